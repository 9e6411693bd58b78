"""Nobody talks to anybody, except pods of a run with each other, the name service and the object store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infra import labels
from infra.kubernetes import network
from infra.settings import StoreEndpoint

STORE = StoreEndpoint(endpoint="http://198.18.0.2:7070", cidr="198.18.0.2/32", port=7070, region="us-east-1")
ANY_RUN = {"match_expressions": [{"key": labels.RUN, "operator": "Exists"}]}

Plain = Callable[[Any], Any]


def test_a_namespace_is_closed_both_ways(plain: Plain) -> None:
    assert plain(network.deny_all()) == {"pod_selector": {}, "policy_types": ["Ingress", "Egress"]}


def test_only_pods_of_runs_may_ask_the_name_service_of_the_cluster(plain: Plain) -> None:
    spec = plain(network.runs_to_dns())
    assert (spec["pod_selector"], spec["policy_types"]) == (ANY_RUN, ["Egress"])
    (rule,) = spec["egress"]
    (resolver,) = rule["to"]
    assert resolver["namespace_selector"]["match_labels"] == {"kubernetes.io/metadata.name": "kube-system"}
    assert resolver["pod_selector"]["match_labels"] == {"k8s-app": "kube-dns"}
    assert rule["ports"] == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


def test_only_pods_of_runs_may_reach_the_store_at_its_one_port(plain: Plain) -> None:
    spec = plain(network.runs_to_store(STORE))
    assert (spec["pod_selector"], spec["policy_types"]) == (ANY_RUN, ["Egress"])
    assert spec["egress"] == [{"to": [{"ip_block": {"cidr": "198.18.0.2/32"}}], "ports": [{"protocol": "TCP", "port": 7070}]}]


def test_the_pods_of_a_run_reach_each_other_and_no_other_run(plain: Plain) -> None:
    spec = plain(network.between_pods_of_run("smoke"))
    same_run = {"match_labels": {labels.RUN: "smoke"}}
    assert (spec["pod_selector"], spec["policy_types"]) == (same_run, ["Ingress", "Egress"])
    tcp = [{"protocol": "TCP"}]
    assert spec["ingress"] == [{"from_": [{"pod_selector": same_run}], "ports": tcp}]
    assert spec["egress"] == [{"to": [{"pod_selector": same_run}], "ports": tcp}]

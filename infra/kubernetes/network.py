"""Who may talk to whom: in a team's namespace nobody, except pods of a run with each other, the name service and the object store."""

from __future__ import annotations

import pulumi
from pulumi_kubernetes.meta.v1 import LabelSelectorArgs, LabelSelectorRequirementArgs, ObjectMetaArgs
from pulumi_kubernetes.networking.v1 import (
    IPBlockArgs,
    NetworkPolicy,
    NetworkPolicyEgressRuleArgs,
    NetworkPolicyIngressRuleArgs,
    NetworkPolicyPeerArgs,
    NetworkPolicyPortArgs,
    NetworkPolicySpecArgs,
)

from infra import labels
from infra.settings import StoreEndpoint

_ANY_TCP = [NetworkPolicyPortArgs(protocol="TCP")]
"""Rendezvous and collectives choose their ports themselves."""


def team_policies(team: str, store: StoreEndpoint | None, opts: pulumi.ResourceOptions) -> list[NetworkPolicy]:
    """Close the namespace of a team and open what every run needs."""
    specs = {"default-deny": deny_all(), "runs-to-dns": runs_to_dns()}
    if store is not None:
        specs["runs-to-object-store"] = runs_to_store(store)
    return [
        NetworkPolicy(
            f"{team}-{name}",
            metadata=ObjectMetaArgs(name=name, namespace=labels.team_namespace(team), labels=labels.of_team(team)),
            spec=spec,
            opts=opts,
        )
        for name, spec in specs.items()
    ]


def deny_all() -> NetworkPolicySpecArgs:
    """Return the rule that closes a namespace in both directions."""
    return NetworkPolicySpecArgs(pod_selector=LabelSelectorArgs(), policy_types=["Ingress", "Egress"])


def runs_to_dns() -> NetworkPolicySpecArgs:
    """Return the rule that lets pods of runs ask the cluster's name service."""
    resolver = NetworkPolicyPeerArgs(
        namespace_selector=LabelSelectorArgs(match_labels={"kubernetes.io/metadata.name": "kube-system"}),
        pod_selector=LabelSelectorArgs(match_labels={"k8s-app": "kube-dns"}),
    )
    ports = [NetworkPolicyPortArgs(protocol=protocol, port=53) for protocol in ("UDP", "TCP")]
    return NetworkPolicySpecArgs(
        pod_selector=_any_run(), policy_types=["Egress"], egress=[NetworkPolicyEgressRuleArgs(to=[resolver], ports=ports)]
    )


def runs_to_store(store: StoreEndpoint) -> NetworkPolicySpecArgs:
    """Return the rule that lets pods of runs reach the object store."""
    rule = NetworkPolicyEgressRuleArgs(
        to=[NetworkPolicyPeerArgs(ip_block=IPBlockArgs(cidr=store.cidr))], ports=[NetworkPolicyPortArgs(protocol="TCP", port=store.port)]
    )
    return NetworkPolicySpecArgs(pod_selector=_any_run(), policy_types=["Egress"], egress=[rule])


def between_pods_of_run(run: str) -> NetworkPolicySpecArgs:
    """Return the rule that lets the pods of one run reach each other. A rule selects by fixed value, so each run has its own."""
    same_run = LabelSelectorArgs(match_labels={labels.RUN: run})
    peers = [NetworkPolicyPeerArgs(pod_selector=same_run)]
    return NetworkPolicySpecArgs(
        pod_selector=same_run,
        policy_types=["Ingress", "Egress"],
        ingress=[NetworkPolicyIngressRuleArgs(from_=peers, ports=_ANY_TCP)],
        egress=[NetworkPolicyEgressRuleArgs(to=peers, ports=_ANY_TCP)],
    )


def _any_run() -> LabelSelectorArgs:
    return LabelSelectorArgs(match_expressions=[LabelSelectorRequirementArgs(key=labels.RUN, operator="Exists")])

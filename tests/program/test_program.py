"""The whole program under mocks: what it asks the engine for, with which options, and in which order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("record.py")
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAPROGRAMTEST", "AWS_SECRET_ACCESS_KEY": "hunter2-of-the-program-test"}
SECRET_MARK = {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270"}
"""How a secret is marked on its way to the engine."""

Recording = dict[str, Any]
Request = dict[str, Any]


def as_the_engine_passes_it(stack: str, **keys: object) -> str:
    declared = yaml.safe_load((PROJECT / "Pulumi.yaml").read_text())["config"]
    defaults = {key: entry["default"] for key, entry in declared.items() if "default" in entry}
    values = defaults | yaml.safe_load((PROJECT / f"Pulumi.{stack}.yaml").read_text())["config"] | keys
    return json.dumps({key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()})


def record(stack: str, credentials: dict[str, str], **keys: object) -> Recording:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_"))}
    # The SDK leaves the event loops of its threads to the end of the process.
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(RECORD), str(PROJECT), stack]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={**environment, **credentials, "PYTHONPATH": str(PROJECT)},
        input=as_the_engine_passes_it(stack, **keys),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("platform")
    kubeconfig = {
        "current-context": "node",
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": "admin"}}],
        "clusters": [{"name": "node", "cluster": {"server": "https://198.18.0.2:6443"}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    (folder / "platform.json").write_text(
        json.dumps(
            {
                "kubeconfig": str(folder / "kubeconfig"),
                "objectStore": {"endpoint": "http://198.18.0.2:7070", "cidr": "198.18.0.2/32", "port": 7070, "region": "us-east-1"},
                "images": {"trainer": f"trainer@sha256:{'a' * 64}", "kueue": "kueue:v1", "jobset": "jobset:v1"},
                "gitSha": "abc1234",
                "charts": {"kueue": str(folder / "kueue"), "jobset": str(folder / "jobset")},
            }
        )
    )
    return folder / "platform.json"


@pytest.fixture(scope="module")
def local(facts: Path) -> Recording:
    recording = record("local", KEYS, **{"trainyard:platform": str(facts)})
    assert recording["error"] is None
    return recording


def of_kind(recording: Recording, kind: str) -> list[Request]:
    found = [request for request in recording["resources"] if request["type"].rsplit(":", 1)[-1] == kind]
    assert found, kind
    return found


def named(recording: Recording, kind: str, name: str) -> Request:
    return next(request for request in of_kind(recording, kind) if request["name"] == name)


def of_run(recording: Recording) -> list[Request]:
    (run,) = of_kind(recording, "TrainingRun")
    return [request for request in recording["resources"] if request["parent"] == run["urn"]]


def all_before(recording: Recording, request: Request) -> set[str]:
    """Return the URNs of everything that must be there before `request`, directly or not."""
    by_urn = {one["urn"]: one for one in recording["resources"]}
    found: set[str] = set()
    left = list(request["dependencies"])
    while left:
        urn = left.pop()
        if urn not in found:
            found.add(urn)
            left.extend(by_urn[urn]["dependencies"])
    return found


def test_every_namespace_enforces_the_strictest_pod_security(local: Recording) -> None:
    namespaces = {request["inputs"]["metadata"]["name"]: request["inputs"]["metadata"]["labels"] for request in of_kind(local, "Namespace")}
    assert set(namespaces) == {"kueue-system", "jobset-system", "team-research"}
    for labels in namespaces.values():
        assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn", "audit")} == {"restricted"}


def test_the_keys_of_the_store_are_secret_and_nowhere_else(local: Recording) -> None:
    assert local["secret"] == dict.fromkeys(KEYS, True)
    (secret,) = of_kind(local, "Secret")
    assert secret["inputs"]["stringData"] == {"value": KEYS, **SECRET_MARK}
    assert {"data", "stringData"} <= set(secret["secret_outputs"])
    others = [request for request in local["resources"] if request is not secret]
    assert not any(value in json.dumps([others, local["outputs"]]) for value in KEYS.values())


def test_every_object_of_a_run_carries_its_labels(local: Recording) -> None:
    objects = of_run(local)
    assert sorted(request["name"] for request in objects) == ["run-smoke", "smoke", "smoke", "smoke-drill", "smoke-prepare"]
    expected = {"trainyard.dev/run": "smoke", "trainyard.dev/team": "research", "app.kubernetes.io/managed-by": "pulumi"}
    for request in objects:
        metadata = request["inputs"]["metadata"]
        assert metadata["namespace"] == "team-research"
        assert metadata["labels"].items() >= expected.items()
        if "template" in request["inputs"].get("spec", {}):
            assert request["inputs"]["spec"]["template"]["metadata"]["labels"].items() >= expected.items()


def test_each_layer_waits_for_the_one_below(local: Recording) -> None:
    kueue, jobset = (named(local, "Release", name) for name in ("kueue", "jobset"))
    queues = [request for request in local["resources"] if request["type"].startswith("kubernetes:kueue.x-k8s.io/")]
    kinds = {request["type"].rsplit(":", 1)[-1] for request in queues}
    assert kinds == {"WorkloadPriorityClass", "ResourceFlavor", "ClusterQueue", "LocalQueue"}
    assert kueue["urn"] in all_before(local, jobset)
    assert named(local, "Namespace", "team-research")["urn"] in all_before(local, named(local, "LocalQueue", "entry-research"))
    for queue in queues:
        assert {kueue["urn"], jobset["urn"]} <= all_before(local, queue)
    (bucket,) = of_kind(local, "Bucket")
    for request in of_run(local):
        before = all_before(local, request)
        assert {kueue["urn"], jobset["urn"], bucket["urn"], *(queue["urn"] for queue in queues)} <= before
    assert named(local, "PriorityClass", "trainyard-training")["urn"] in all_before(local, named(local, "Job", "smoke"))


def test_training_starts_with_its_rules_and_its_data_in_place(local: Recording) -> None:
    before = all_before(local, named(local, "Job", "smoke"))
    for kind, name in (
        ("Job", "smoke-prepare"),
        ("NetworkPolicy", "run-smoke"),
        ("ConfigMap", "smoke"),
        ("Secret", "research-object-store"),
    ):
        assert named(local, kind, name)["urn"] in before, name


def test_a_training_job_leaves_before_its_successor_comes_and_its_queue_may_change_it(local: Recording) -> None:
    job = named(local, "Job", "smoke")
    assert job["delete_before_replace"] is True
    assert job["delete_timeout"] == "180s"
    for request in of_kind(local, "Job"):
        assert {"spec.suspend", "spec.template.spec.nodeSelector", "spec.template.spec.tolerations"} <= set(request["ignore_changes"])
        assert "metadata.labels" in request["replace_on_changes"]
        assert "name" not in request["inputs"]["metadata"]


def test_a_job_reads_the_generated_configuration(local: Recording) -> None:
    (config,) = of_kind(local, "ConfigMap")
    assert config["inputs"]["immutable"] is True
    assert json.loads(config["inputs"]["data"]["run.json"])["bucket"] == "trainyard-local"
    for request in of_kind(local, "Job"):
        (volume,) = [one for one in request["inputs"]["spec"]["template"]["spec"]["volumes"] if one["name"] == "config"]
        assert volume["configMap"]["name"] == "smoke-1a2b3c4d"


def test_a_drill_is_a_cron_job_of_the_run_that_reads_the_same_configuration(local: Recording) -> None:
    (drill,) = of_kind(local, "CronJob")
    assert drill["inputs"]["metadata"]["name"] == "smoke-drill"
    of_its_jobs = drill["inputs"]["spec"]["jobTemplate"]
    assert of_its_jobs["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert of_its_jobs["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == "smoke-1a2b3c4d"
    before = all_before(local, drill)
    assert named(local, "NetworkPolicy", "run-smoke")["urn"] in before
    # It has nothing to wait for that a run may take days to do.
    assert named(local, "Job", "smoke")["urn"] not in before


def test_every_object_goes_to_the_cluster_of_the_kubeconfig(local: Recording) -> None:
    (provider,) = of_kind(local, "kubernetes")
    assert provider["inputs"]["clusterIdentifier"] == "https://198.18.0.2:6443"
    objects = [one for one in local["resources"] if one["custom"] and one["type"].startswith("kubernetes:")]
    assert {one["provider"] for one in objects} == {f"{provider['urn']}::cluster-id"}


def test_the_program_says_what_people_need_next(local: Recording, facts: Path) -> None:
    assert local["outputs"] == {"kubeconfig": str(facts.with_name("kubeconfig")), "bucket": "trainyard-local", "queues": ["research"]}


@pytest.mark.parametrize("stack", ["dev", "prod"])
def test_the_stacks_that_are_to_come_say_so_and_make_nothing(stack: str) -> None:
    recording = record(stack, KEYS)
    assert recording["error"] == (
        f"stack {stack} asks for provider eks, which this version cannot deploy yet; "
        f"set trainyard:provider: existing and trainyard:kubeconfig in Pulumi.{stack}.yaml to use a cluster that is already there."
    )
    assert recording["resources"] == []


def test_missing_credentials_are_named_before_anything_is_made(facts: Path) -> None:
    recording = record("local", {"AWS_ACCESS_KEY_ID": "AKIAPROGRAMTEST"}, **{"trainyard:platform": str(facts)})
    assert recording["error"].startswith("AWS_SECRET_ACCESS_KEY must be set in the environment of `pulumi`")
    assert "make up" in recording["error"]
    assert "AKIAPROGRAMTEST" not in recording["error"]
    assert recording["resources"] == []

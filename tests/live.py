"""The live platform, for the tiers that run on it: objects of the cluster, probe pods, events of runs."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3

from local import paths, stack
from local.node.probe import kubectl
from local.view.ledger import Ledger

NAMESPACE = "team-research"


def engine(*arguments: str, runs: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the real engine on the local stack, with `runs` added to its configuration, and return what it printed."""
    return stack.captured(*arguments, extra_runs=runs)


def deploy(*runs: str) -> None:
    """Deploy the local stack with `runs` added to those of its file; fail with the engine's words."""
    done = engine("up", "--yes", "--skip-preview", "--suppress-outputs", runs=runs)
    assert done.returncode == 0, done.stdout + done.stderr


def objects(kind: str, *arguments: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return objects of the cluster, oldest first."""
    found = json.loads(
        kubectl("get", kind, f"--namespace={namespace}", "--output=json", "--sort-by=.metadata.creationTimestamp", *arguments)
    )
    return found["items"]


def of_run(kind: str, run: str, role: str = "train") -> list[dict[str, Any]]:
    """Return the objects of a run in one role."""
    return objects(kind, f"--selector=trainyard.dev/run={run},trainyard.dev/role={role}")


def workload(run: str) -> dict[str, Any]:
    """Return Kueue's Workload of a run's training Job."""
    job = of_run("jobs.batch", run)[-1]["metadata"]["uid"]
    owned = [item for item in objects("workloads.kueue.x-k8s.io") if job in {owner["uid"] for owner in item["metadata"]["ownerReferences"]}]
    assert owned, f"no Workload of run {run}"
    return owned[-1]


def conditions(item: Mapping[str, Any]) -> dict[str, str]:
    """Return type -> status of an object's conditions."""
    return {condition["type"]: condition["status"] for condition in item.get("status", {}).get("conditions", [])}


def ledger(run: str) -> Ledger:
    """Return what a run has told so far, from its bucket."""
    return Ledger.merge(stack.target().store.ledger_lines(run))


def forget(*runs: str) -> None:
    """Remove what runs of an earlier time left in the cluster and in the bucket, so that their names begin anew."""
    deploy()
    target = stack.target()
    # A session of its own: the default one remembers the keys of whatever test came before.
    bucket = (
        boto3.session.Session()
        .resource("s3", endpoint_url=target.store.endpoint, region_name=target.store.region)
        .Bucket(target.store.bucket)
    )
    for run in runs:
        bucket.object_versions.filter(Prefix=f"runs/{run}/").delete()


def log(pod: str, namespace: str = NAMESPACE) -> str:
    """Return a pod's log so far, empty when there is none yet."""
    return kubectl("logs", pod, f"--namespace={namespace}", check=False)


@contextmanager
def pod(command: list[str], *, labels: Mapping[str, str] | None = None, namespace: str = NAMESPACE) -> Iterator[str]:
    """Run a pod of the trainer's image with all restrictions of the namespace; yield its name, and delete it after."""
    name = f"probe-{uuid.uuid4().hex[:8]}"
    image = json.loads(paths.PLATFORM.read_text())["images"]["trainer"]
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "probe",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                }
            ],
        },
    }
    kubectl("create", "--filename=-", stdin=json.dumps(manifest))
    try:
        yield name
    finally:
        kubectl("delete", "pod", name, f"--namespace={namespace}", "--wait=false", check=False)


def phase(name: str, namespace: str = NAMESPACE) -> str:
    """Return a pod's phase."""
    return json.loads(kubectl("get", "pod", name, f"--namespace={namespace}", "--output=json"))["status"]["phase"]

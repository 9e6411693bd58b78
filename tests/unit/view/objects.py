"""A run as the API server and the trainer record it, with only what the views read."""

import json
from datetime import UTC, datetime

from local.view.cluster import RUN, RunObjects, assemble

T0 = 1_800_000_000.0
POD = "smoke-1a2b3c-xk2vd"


def at(seconds):
    return datetime.fromtimestamp(T0 + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def line(name, when, attempt=1, /, **fields):
    return json.dumps({"event": name, "time": T0 + when, "run": "smoke", "attempt": attempt, **fields})


def attempt(number, begun, steps, *, pod=POD, total=300, restored=None, loss=lambda step: 5.0 - step / 100):
    """The lines of an attempt that starts at `begun` and logs the given steps, one a second."""
    lines = [
        line("start", begun, number, world_size=2, image="localhost/trainer@sha256:feed", git_sha="abc1234", pod=pod),
        line("rendezvous", begun + 2, number, seconds=1.9, world_size=2),
        line("data", begun + 3, number, dataset="python-stdlib", shards=3, tokens=4_700_000, sha256="d1ce"),
        line("model", begun + 4, number, name="byte-2m", parameters=2_100_000),
    ]
    if restored is not None:
        lines.append(line("restore", begun + 5, number, step=restored, seconds=0.4, checkpoint=f"step-{restored:08d}"))
    return lines + [
        line("step", begun + 6 + i, number, step=step, steps=total, loss=loss(step), tokens_per_second=12_000.0, learning_rate=1e-3)
        for i, step in enumerate(steps)
    ]


def checkpoint(step, seconds, number=1, size=26_000_000, **more):
    uri = f"s3://trainyard-local/runs/smoke/checkpoints/step-{step:08d}"
    return line("checkpoint", seconds, number, step=step, seconds=0.8, bytes=size, uri=uri, **more)


def condition(kind, status="True", seconds=0, message="", reason=""):
    return {"type": kind, "status": status, "lastTransitionTime": at(seconds), "message": message, "reason": reason}


def job(*conditions, suspend=False, role="train", uid="job-1", created=0, name="smoke-1a2b3c"):
    labels = {RUN: "smoke", "trainyard.dev/role": role, "kueue.x-k8s.io/queue-name": "research"}
    return {
        "metadata": {"name": name, "namespace": "team-research", "uid": uid, "labels": labels, "creationTimestamp": at(created)},
        "spec": {"suspend": suspend},
        "status": {"conditions": list(conditions)},
    }


def workload(*conditions, owner="job-1", active=True, checks=()):
    return {
        "metadata": {"name": "job-smoke", "namespace": "team-research", "uid": "wl-1", "ownerReferences": [{"uid": owner}]},
        "spec": {"active": active},
        "status": {"conditions": list(conditions), "admissionChecks": list(checks)},
    }


ADMITTED = workload(condition("QuotaReserved", seconds=3), condition("Admitted", seconds=3))


def pod(phase="Running", *conditions, state=None, name=POD, uid="pod-1", created=4, deleted=None, image="localhost/trainer@sha256:feed"):
    return {
        "metadata": {
            "name": name,
            "namespace": "team-research",
            "uid": uid,
            "creationTimestamp": at(created),
            "ownerReferences": [{"uid": "job-1"}],
            "labels": {RUN: "smoke"},
            **({"deletionTimestamp": at(deleted)} if deleted else {}),
        },
        "spec": {"nodeName": "local", "containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "conditions": list(conditions) or [condition("PodScheduled", seconds=5)],
            "containerStatuses": [{"name": "trainer", "image": image, "state": state or {"running": {"startedAt": at(9)}}}],
        },
    }


def warning(uid, message, reason="Failed", seconds=5, kind="Pod", type_="Warning"):
    return {
        "metadata": {"creationTimestamp": at(seconds)},
        "lastTimestamp": at(seconds),
        "type": type_,
        "reason": reason,
        "message": message,
        "involvedObject": {"uid": uid, "kind": kind},
    }


def run(job_, workload_=None, pods=(), events=()) -> RunObjects:
    (entry,) = assemble([job_], [workload_] if workload_ else [], list(pods), list(events))
    return entry

"""Why a run does not train yet, or no longer, in words: from the Job, its Workload, its pods and their events."""

from __future__ import annotations

from dataclasses import dataclass

from local.view.cluster import Obj, RunObjects, condition, containers, holds
from local.view.ledger import Ledger

EXIT_CODES = {
    0: "done",
    1: "an unexpected error of the trainer",
    42: "evicted; a checkpoint was saved, the run resumes from it",
    43: "evicted before a checkpoint could be saved; the run resumes from the one before",
    44: "the run's configuration is wrong",
    45: "the data cannot be used",
    46: "the checks before training failed: the object store, or the network between the processes",
    47: "there are checkpoints and none of them can be used",
    48: "superseded: another attempt of this run has begun",
    49: "hung: nothing moved for longer than hang_seconds allows",
    137: "killed: out of memory (see resources.memory_limit), or not gone when its grace was over",
    143: "ended by SIGTERM before the trainer could take it",
}
"""What an exit code of the trainer's container means."""

_IMAGE_REASONS = {
    "ErrImagePull": "the image cannot be pulled",
    "ImagePullBackOff": "the image cannot be pulled",
    "ErrImageNeverPull": "the image is not on the node, and pulling is forbidden",
    "InvalidImageName": "the image has an invalid name",
}
_CONTAINER_REASONS = {
    "CreateContainerConfigError": "the container cannot be configured",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
    "CrashLoopBackOff": "the container ends again and again",
    **_IMAGE_REASONS,
}


@dataclass(frozen=True)
class Stage:
    """Where a run stands in the cluster, and the reason when it stands still."""

    name: str
    """submitted, queued, admitted, unschedulable, creating, image, stuck, running, stopping, completed, failed or deactivated."""
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.name in ("completed", "failed", "deactivated")


def stage_of(run: RunObjects) -> Stage:
    """Return the first of the following that holds: ended, in the queue, without a pod, or what its newest pod does."""
    for look in (_ended, _queued, _without_pod):
        stage = look(run)
        if stage:
            return stage
    return _pod_stage(run.pods[-1], run.events)


def decide(objects: dict[str, RunObjects], ledger: Ledger) -> tuple[Stage, RunObjects | None]:
    """Return the stage of the run and the objects it comes from: the preparation's while that keeps the training waiting."""
    training, preparation = objects.get("train"), objects.get("prepare")
    stage = stage_of(training) if training else None
    if preparation and not (stage and stage.ended) and stage_of(preparation).name != "completed":
        return stage_of(preparation), preparation
    if stage:
        return stage, training
    if ledger.state.name == "completed":  # Its Job ended so long ago that only the ledger knows.
        return Stage("completed"), None
    return Stage("submitted", "the data is ready, the training Job is being made"), preparation


def exit_code(run: RunObjects) -> int | None:
    """Return the exit code of the newest pod that ended, or None."""
    for pod in reversed(run.pods):
        ends = [one for state in containers(pod) if (one := (state.get("state") or {}).get("terminated"))]
        if ends:
            return next((end["exitCode"] for end in ends if end["exitCode"]), 0)
    return None


def meaning(code: int | None) -> str:
    """Return an exit code with what it means."""
    return "" if code is None else f"exit code {code}: {EXIT_CODES.get(code, 'not one of the trainer')}"


def notable(events: list[Obj]) -> list[Obj]:
    """Return the events a person should see: warnings, and evictions of any type."""
    return [event for event in events if event.get("type") == "Warning" or event.get("reason", "").startswith(("Evicted", "Preempted"))]


def _ended(run: RunObjects) -> Stage | None:
    if holds(run.job, "Complete"):
        return Stage("completed")
    failed = condition(run.job, "Failed") or {}
    if failed.get("status") == "True":
        return Stage("failed", _said(failed))
    if run.workload and run.workload.get("spec", {}).get("active") is False:
        return Stage("deactivated", "Kueue took the run out of the queue: " + _said(condition(run.workload, "Evicted") or {}))
    return None


def _queued(run: RunObjects) -> Stage | None:
    if not (run.job.get("spec") or {}).get("suspend"):
        return None
    queue = (run.job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if not queue:
        return Stage("stuck", "the Job is suspended and names no queue (label kueue.x-k8s.io/queue-name)")
    if not run.workload:
        return Stage("submitted", _latest_warning(run.job, run.events) or "Kueue has not taken the Job up yet")
    evicted = condition(run.workload, "Evicted") or {}
    before = f"evicted ({_said(evicted)}); " if evicted.get("status") == "True" else ""
    if run.pods and not _over(run.pods[-1]):
        return Stage("stopping", f"{before}its pod saves and ends")
    if not holds(run.workload, "QuotaReserved"):
        pending = condition(run.workload, "QuotaReserved") or {}
        return Stage(
            "queued", f"{before}in queue {queue}: " + (pending.get("message") or "Kueue has not looked at it yet") + _never_fits(pending)
        )
    checks = [check for check in (run.workload.get("status") or {}).get("admissionChecks") or [] if check.get("state") != "Ready"]
    if checks:
        return Stage("queued", f"{before}in queue {queue}: " + "; ".join(f"check {one['name']}: {_said(one)}" for one in checks))
    return Stage("admitted", "quota is reserved, the Job is being started")


def _without_pod(run: RunObjects) -> Stage | None:
    if run.pods and (not _over(run.pods[-1]) or holds(run.job, "FailureTarget")):
        return None
    if run.pods and run.pods[-1]["status"]["phase"] == "Succeeded":  # The Job is complete a moment later.
        return Stage("running")
    refused = _latest_warning(run.job, run.events)
    if refused and not run.pods:
        return Stage("stuck", f"no pod can be made: {refused}")
    code = exit_code(run)
    return Stage("admitted", f"the last pod ended ({meaning(code)}); the next is being made" if code else "the pod is being made")


def _pod_stage(pod: Obj, events: list[Obj]) -> Stage:
    if pod["metadata"].get("deletionTimestamp"):
        return Stage("stopping", "its pod saves and ends")
    scheduled = condition(pod, "PodScheduled") or {}
    if scheduled.get("status") == "False":
        return Stage("unschedulable", f"no node takes the pod: {scheduled.get('message') or scheduled.get('reason', '')}")
    for state in containers(pod):
        waiting = (state.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in _CONTAINER_REASONS:
            image = f" {state.get('image', '')}" if reason in _IMAGE_REASONS else ""
            return Stage(
                "image" if image else "stuck", f"{_CONTAINER_REASONS[reason]}{image}: {waiting.get('message') or reason}".replace("  ", " ")
            )
    if pod.get("status", {}).get("phase") == "Pending":
        trouble = _latest_warning(pod, events)
        return Stage("creating", trouble or f"the node {pod.get('spec', {}).get('nodeName', '')} gets the image and makes the container")
    return Stage("running")


def _latest_warning(obj: Obj, events: list[Obj]) -> str:
    own = [one for one in events if one.get("type") == "Warning" and one["involvedObject"].get("uid") == obj["metadata"]["uid"]]
    return own[-1].get("message", "") if own else ""


def _over(pod: Obj) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _said(condition_like: Obj) -> str:
    return condition_like.get("message") or condition_like.get("reason") or condition_like.get("state") or "no reason given"


def _never_fits(pending: Obj) -> str:
    too_large = "maximum capacity" in pending.get("message", "")
    return (
        " - it asks for more than the queue can ever have: ask for less (resources in the run file) or raise the quota" if too_large else ""
    )

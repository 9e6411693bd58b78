"""Where the time of a run went: queue, node, image, rendezvous, first step, training, stop, for every attempt."""

from __future__ import annotations

from dataclasses import dataclass

from local.view.cluster import Obj, RunObjects, condition, containers, moment
from local.view.ledger import Attempt, Ledger
from local.view.waiting import stage_of

STAGES = {
    "queued": "waits for quota",
    "scheduling": "a node is chosen",
    "image": "image and container",
    "rendezvous": "processes find each other",
    "first step": "model, data, restore, first step",
    "training": "steps and checkpoints",
}
"""The stages of an attempt in their order, and what happens in each."""


@dataclass(frozen=True)
class Span:
    """A stage of an attempt, from its beginning to its end."""

    stage: str
    attempt: int
    start: float
    end: float
    open: bool = False
    """Whether it still goes on: `end` is then the time of looking."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def timeline(ledger: Ledger, run: RunObjects | None, now: float) -> list[Span]:
    """Return the stages of all attempts in the order of time; a stage whose end nobody recorded is part of the next one."""
    created = moment(run.job["metadata"].get("creationTimestamp")) if run else None
    spans: list[Span] = []
    previous_end: float | None = None
    for attempt in ledger.attempts:
        before_this_job = created is not None and attempt.start < created
        begun = _begin(attempt, previous_end, None if before_this_job else created)
        facts = [] if run is None or before_this_job else _cluster_facts(run, attempt.pod)
        spans += _chain(attempt.number, begun, [*facts, *_event_facts(attempt)], None if attempt.end else now)
        previous_end = attempt.end
    if run and created is not None and _is_between_attempts(run, ledger):
        newest = run.pods[-1]["metadata"]["name"] if run.pods else ""
        begun = max(created, previous_end or created)
        spans += _chain(len(ledger.attempts) + 1, begun, _cluster_facts(run, newest), now)
    return spans


def _begin(attempt: Attempt, previous_end: float | None, created: float | None) -> float:
    """Return when an attempt was asked for: when the one before ended, the first one of a Job when the Job was made."""
    candidates = [when for when in (previous_end, created) if when is not None and when <= attempt.start]
    return max(candidates, default=attempt.start)


def _cluster_facts(run: RunObjects, pod_name: str) -> list[tuple[str, float]]:
    pod = next((one for one in run.pods if one["metadata"]["name"] == pod_name), None)
    admitted = condition(run.workload, "Admitted") or {}
    # After a second admission the condition carries its time only; the clamp in _chain drops it for the attempts before.
    moments = [("queued", moment(admitted.get("lastTransitionTime")) if admitted.get("status") == "True" else None)]
    if pod:
        scheduled = condition(pod, "PodScheduled") or {}
        moments.append(("scheduling", moment(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None))
        moments.append(("image", _container_start(pod)))
    return [(stage, when) for stage, when in moments if when is not None]


def _event_facts(attempt: Attempt) -> list[tuple[str, float]]:
    rendezvous, step = attempt.first("rendezvous"), attempt.first("step")
    # An attempt that ends early ends in the stage it had come to.
    reached = "training" if step else "first step" if rendezvous else "rendezvous"
    facts = [("rendezvous", rendezvous.time if rendezvous else None), ("first step", step.time if step else None), (reached, attempt.end)]
    return [(stage, when) for stage, when in facts if when is not None]


def _chain(attempt: int, begun: float, facts: list[tuple[str, float]], now: float | None) -> list[Span]:
    """Join the ends of stages to spans; `now` closes a chain that still goes on."""
    spans, at = [], begun
    latest = max((when for stage, when in facts if stage in ("rendezvous", "first step", "training")), default=now or begun)
    for stage, when in facts:
        # Times of the cluster are whole seconds, those of the trainer are not: no stage ends before it began.
        if when > latest:
            continue
        spans.append(Span(stage, attempt, at, max(at, when)))
        at = max(at, when)
    if now is not None:
        names = list(STAGES)
        following = names.index(spans[-1].stage) + 1 if spans else 0
        if following < len(names):
            spans.append(Span(names[following], attempt, at, max(at, now), open=True))
    return spans


def _container_start(pod: Obj) -> float | None:
    for state in containers(pod):
        inner = state.get("state") or {}
        begun = (inner.get("running") or inner.get("terminated") or {}).get("startedAt")
        if begun:
            return moment(begun)
    return None


def _is_between_attempts(run: RunObjects, ledger: Ledger) -> bool:
    """Whether the run waits for its next start: it has not ended, and its newest pod has not begun an attempt."""
    begun = {attempt.pod for attempt in ledger.attempts}
    return not stage_of(run).ended and not (run.pods and run.pods[-1]["metadata"]["name"] in begun)

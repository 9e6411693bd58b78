"""What to say about a run while it is followed: pure, from two looks at it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from local.progress import clock
from local.view.ledger import Event, Ledger, State
from local.view.waiting import Stage, meaning

_TENTHS = 10
_KEEP_RAW = 20
_IN_WORDS = {
    "start": lambda e: f"attempt {e.attempt} started: {e.integer('world_size')} processes",
    "restore": lambda e: f"resumed from step {e.integer('step')} in {clock(e.number('seconds') or 0)} ({e.text('checkpoint')})",
    "skipped": lambda e: f"checkpoint {e.text('checkpoint')} is damaged and was passed over: {e.text('reason')}",
    "preflight": lambda e: f"network between the processes: {e.number('gigabytes_per_second') or 0:.2f} GB/s",
    "compile": lambda e: f"first passes over the model took {clock(e.number('seconds') or 0)}",
    "evaluate": lambda e: f"validation loss at step {e.integer('step')}: {e.number('loss') or math.nan:.3f}",
    "checkpoint": lambda e: (
        f"checkpoint at step {e.integer('step')}: {size(e.integer('bytes'))} in {clock(e.number('seconds') or 0)}{_stall(e)}"
    ),
    "good": lambda e: (
        f"checkpoint at step {e.integer('step')} is good: loaded back, validation loss {e.number('reproduced') or math.nan:.3f} again"
    ),
    "advised": lambda e: f"the machine may go soon ({e.text('source')}): saving, the training goes on",
    "degraded": lambda e: f"degraded, and goes on: {e.text('what')}: {e.text('reason')}",
    "hang": lambda e: f"hangs: {e.text('message') or _late(e)}",
    "warning": lambda e: f"warning: {e.text('message')}",
    "evicted": lambda e: f"evicted at step {e.integer('step')}, {'saved' if e.fields.get('saved') else 'not saved'}{_notice(e)}",
    "error": lambda e: f"the trainer failed: {e.text('message')}",
}
"""The events of a trainer that a person is told of as they happen."""


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    stage: Stage
    ledger: Ledger
    elapsed: float = 0.0

    @property
    def state(self) -> str:
        """One word: the cluster's, and while a pod runs the trainer's."""
        return situation(self.stage, self.ledger)


@dataclass
class Log:
    """The lines of all pods of a run: events once each, and the last of the others."""

    events: dict[str, None] = field(default_factory=dict)
    other: deque[str] = field(default_factory=lambda: deque(maxlen=_KEEP_RAW))

    def add(self, line: str) -> None:
        """Take a line; a log read again after a broken connection brings nothing new."""
        if line.startswith("{"):
            self.events[line] = None
        elif line.strip() and line not in self.other:
            self.other.append(line)


def situation(stage: Stage, ledger: Ledger) -> str:
    """Return the state of a run in one word: the trainer's where a pod runs, else the cluster's."""
    if stage.name != "running":
        return stage.name
    if ledger.events and ledger.events[-1].name == "prepare":
        return "preparing data"
    # Between a pod's start and its first word, and between its last word and its end, the ledger tells of an attempt that is over.
    return {"running": ledger.state.name, "completed": "finishing"}.get(ledger.attempts[-1].outcome if ledger.attempts else "", "starting")


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rate(tokens_per_second: float) -> str:
    """Return a throughput for people."""
    return f"{tokens_per_second / 1000:.1f}k tokens/s" if tokens_per_second >= 1000 else f"{tokens_per_second:.0f} tokens/s"


def progress(state: State, checkpoints: int = 0) -> str:
    """Return step, loss, throughput and checkpoints as far as they are known."""
    parts = [
        f"step {state.step}/{state.steps}" if state.steps else "",
        f"loss {state.loss:.3f}" if state.loss is not None else "",
        rate(state.tokens_per_second) if state.tokens_per_second else "",
        f"{checkpoints} checkpoint{'' if checkpoints == 1 else 's'}" if checkpoints else "",
    ]
    return "  ".join(part for part in parts if part)


def live_line(look: Look) -> str:
    """Return the one line that a terminal shows while nothing lasting happens."""
    known = look.stage.reason
    if look.state in ("training", "stopping"):
        known = progress(look.ledger.state, len(look.ledger.checkpoints))
    elif look.state == "preparing data":
        known = f"shard {look.ledger.events[-1].integer('shard')}/{look.ledger.events[-1].integer('shards')}"
    return "  ".join(part for part in (f"{clock(look.elapsed):>7}", look.state, known) if part)


def changes(before: Look | None, after: Look, *, steps: bool) -> list[str]:
    """Return the lasting lines between two looks: events, changes of state and reason, and with `steps` each tenth of the steps."""
    known = {event.key for event in before.ledger.events} if before else set()
    # Of a run that has ended, the result tells the state and the error.
    news = [event for event in after.ledger.events if event.key not in known and not (after.stage.ended and event.name == "error")]
    lines = [said for event in news if (said := _say(event))]
    if steps:
        lines += _tenths(before, after)
    if not after.stage.ended and (before is None or (before.state, before.stage.reason) != (after.state, after.stage.reason)):
        lines.append(f"{after.state}{': ' + after.stage.reason if after.stage.reason else ''}")
    return [f"{clock(after.elapsed):>7}  {line}" for line in lines]


def failure(run: str, stage: Stage, ledger: Ledger, code: int | None, raw: list[str]) -> list[str]:
    """Return what went wrong, what the exit code means, and what to type to look further."""
    error: Event | None = ledger.error
    said = error.text("message") if error else ""
    # Kubernetes' own account matters only where the trainer left none.
    lines = [f"The run {run} has failed: {said or meaning(code) or stage.reason}"]
    if said and code is not None:
        lines.append(f"  {meaning(code)}")
    elif stage.reason and stage.reason not in lines[0]:
        lines.append(f"  {stage.reason}")
    if not said and raw:
        lines += ["  The last lines of its log:", *(f"    {line}" for line in raw)]
    return [*lines, f"  look further: make logs RUN={run}", "  try again:    correct the cause, then make up"]


def _stall(event: Event) -> str:
    stall = event.number("stall_seconds")
    return "" if stall is None else f", training stood still for {stall:.2f}s"


def _late(event: Event) -> str:
    return f"nothing has moved for {clock(event.number('seconds') or 0)}, rank {event.text('rank')} in {event.text('phase')}"


def _notice(event: Event) -> str:
    """Return what the trainer did of the time it was given, where it says so."""
    seconds, decision = event.number("seconds"), event.text("decision")
    return (
        (f", {clock(seconds)} after the signal" if seconds is not None else "")
        + (f" ({decision})" if decision else "")
        + (f": {e}" if (e := event.text("problem")) else "")
    )


def _say(event: Event) -> str:
    words = _IN_WORDS.get(event.name)
    if event.name == "prepare":
        return _prepared(event)
    return words(event) if words else ""


def _prepared(event: Event) -> str:
    if event.fields.get("unchanged"):
        return "data: unchanged"
    done = f"data: packed {event.integer('files')} files, {size(event.integer('bytes'))}, {event.integer('shards')} shards"
    return done if event.fields.get("done") else ""


def _tenths(before: Look | None, after: Look) -> list[str]:
    now, then = after.ledger.state, before.ledger.state.step if before else 0
    if not now.steps or now.step * _TENTHS // now.steps <= then * _TENTHS // now.steps:
        return []
    return [progress(now, len(after.ledger.checkpoints))]

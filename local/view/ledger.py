"""What a run has done so far: its events, from the ledger in the bucket and from live log lines, and the views drawn from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

END_OF_ATTEMPT = {"done": "completed", "evicted": "evicted", "error": "failed"}
"""The events that end an attempt, and how it ended."""

STATE_AFTER = {
    "start": "starting",
    "data": "starting",
    "rendezvous": "starting",
    "preflight": "starting",
    "model": "starting",
    "compile": "starting",
    "fresh": "starting",
    "skipped": "restoring",
    "restore": "restoring",
    "step": "training",
    "evaluate": "training",
    "checkpoint": "training",
    "evicted": "evicted",
    "done": "completed",
    "error": "failed",
}
"""The state of a run by its latest event."""


@dataclass(frozen=True)
class Event:
    """One line of the trainer."""

    name: str
    time: float
    attempt: int
    fields: dict[str, Any] = field(repr=False)
    key: str = field(repr=False)
    """The line in one spelling: the same event read twice has the same key."""

    def number(self, key: str) -> float | None:
        """Return a field as a finite number, or None."""
        value = self.fields.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None

    def integer(self, key: str) -> int:
        """Return a field as a whole number, 0 when it is none."""
        return int(self.number(key) or 0)

    def text(self, key: str) -> str:
        """Return a field as text, empty when it is absent."""
        value = self.fields.get(key)
        return "" if value is None else str(value)


@dataclass(frozen=True)
class Point:
    """A value measured at a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, and what has become of it."""

    step: int
    seconds: float
    size: int
    uri: str
    time: float
    attempt: int
    stall: float | None = None
    """Seconds for which the training stood still."""
    reason: str = ""
    standing: str = ""
    """The roles it is kept in, or deleted, or damaged."""
    good: float | None = None
    """The validation loss that was reproduced when it was loaded back."""


@dataclass(frozen=True)
class Attempt:
    """One start of the run, from the first process to the end of the last."""

    number: int
    start: float
    end: float | None
    """None while it goes on."""
    outcome: str
    """running, completed, evicted, failed, or lost: it ended without a word."""
    pod: str
    events: tuple[Event, ...] = field(repr=False)

    def first(self, name: str) -> Event | None:
        """Return the first event of that name in this attempt."""
        return next((event for event in self.events if event.name == name), None)


@dataclass(frozen=True)
class State:
    """Where a run stands."""

    name: str = "waiting"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None


def parse(line: str) -> Event | None:
    """Return the event of a log line, or None when the line is something else."""
    try:
        fields = json.loads(line)
        key = json.dumps(fields, sort_keys=True)
        return Event(str(fields["event"]), float(fields["time"]), int(fields.get("attempt") or 0), fields, key)
    except (ValueError, KeyError, TypeError):
        return None


class Ledger:
    """All events of a run, each once, in the order of their times."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Take events in any order; one that comes twice counts once."""
        once = {event.key: event for event in events}
        self.events: tuple[Event, ...] = tuple(sorted(once.values(), key=lambda event: event.time))

    @classmethod
    def merge(cls, *sources: Iterable[str]) -> Ledger:
        """Return the ledger of all these lines: the stored ones, and those of the logs."""
        return cls(event for event in map(parse, chain(*sources)) if event)

    def every(self, name: str) -> list[Event]:
        """Return the events of one name."""
        return [event for event in self.events if event.name == name]

    def last(self, name: str) -> Event | None:
        """Return the latest event of one name."""
        return next((event for event in reversed(self.events) if event.name == name), None)

    def series(self, key: str, of: str = "step") -> list[Point]:
        """Return a number of the events of one name over the steps; where attempts overlap, the last attempt's value counts."""
        chosen: dict[int, tuple[int, float]] = {}
        for event in self.every(of):
            value, step = event.number(key), event.integer("step")
            if value is not None and event.attempt >= chosen.get(step, (event.attempt, 0.0))[0]:
                chosen[step] = (event.attempt, value)
        return [Point(step, value) for step, (_, value) in sorted(chosen.items())]

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The committed checkpoints by step; one written again counts as it was written last."""
        by_step: dict[int, Checkpoint] = {}
        for event in self.events:
            if event.name == "checkpoint":
                by_step[event.integer("step")] = _written(event)
            for step, change in _changes(event):
                if step in by_step:
                    by_step[step] = replace(by_step[step], **change)
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The starts of the run in their order."""
        numbers = sorted({event.attempt for event in self.every("start")})
        return [self._attempt(number, is_last=number == numbers[-1]) for number in numbers]

    def _attempt(self, number: int, *, is_last: bool) -> Attempt:
        own = tuple(event for event in self.events if event.attempt == number and event.name != "prepare")
        start = next(event for event in own if event.name == "start")
        final = next((event for event in reversed(own) if event.name in END_OF_ATTEMPT), None)
        if final:
            end, outcome = final.time, END_OF_ATTEMPT[final.name]
        else:
            end, outcome = (None, "running") if is_last else (own[-1].time, "lost")
        return Attempt(number, start.time, end, outcome, start.text("pod"), own)

    @cached_property
    def state(self) -> State:
        """Where the run stands, by the events alone."""
        steps, done = self.last("step"), self.last("done")
        latest = next((STATE_AFTER[event.name] for event in reversed(self.events) if event.name in STATE_AFTER), "waiting")
        if latest == "waiting" and self.every("prepare"):
            latest = "preparing data"
        reached = max((event.integer("step") for event in (steps, done) if event), default=0)
        return State(
            latest,
            reached,
            steps.integer("steps") if steps else reached,
            next((value for value in (event.number("loss") for event in (done, steps) if event) if value is not None), None),
            steps.number("tokens_per_second") if steps else None,
        )

    @cached_property
    def error(self) -> Event | None:
        """What the trainer said when it failed, unless it was started again since."""
        error, start = self.last("error"), self.last("start")
        return error if error and (start is None or error.time >= start.time) else None

    @cached_property
    def identity(self) -> dict[str, str]:
        """What exactly ran: label and value, for people."""
        start, data, model = self.last("start"), self.last("data"), self.last("model")
        named = [
            ("image", start, "image"),
            ("git sha", start, "git_sha"),
            ("world size", start, "world_size"),
            ("dataset", data, "dataset"),
            ("dataset sha256", data, "sha256"),
            ("dataset tokens", data, "tokens"),
            ("model", model, "name"),
            ("parameters", model, "parameters"),
            ("all-reduce, GB/s", self.last("preflight"), "gigabytes_per_second"),
        ]
        return {label: event.text(key) for label, event, key in named if event and event.text(key)}


def _written(event: Event) -> Checkpoint:
    return Checkpoint(
        event.integer("step"),
        event.number("seconds") or 0.0,
        event.integer("bytes"),
        event.text("uri"),
        event.time,
        event.attempt,
        event.number("stall_seconds"),
        event.text("reason"),
    )


def _changes(event: Event) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return what an event says about checkpoints that were written before: step and changed fields."""
    if event.name == "good":
        yield event.integer("step"), {"good": event.number("reproduced")}
    elif event.name == "skipped" and (found := re.search(r"step-(\d+)", event.text("checkpoint"))):
        yield int(found[1]), {"standing": "damaged", "good": None}
    elif event.name == "retained":
        kept, deleted = event.fields.get("kept"), event.fields.get("deleted")
        for step, roles in kept.items() if isinstance(kept, dict) else ():
            yield int(step), {"standing": ", ".join(map(str, roles))}
        for step in deleted if isinstance(deleted, list) else ():
            yield int(step), {"standing": "deleted"}

"""Where the seconds of a run went, by class, over all its attempts: they sum to its wall time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from local.progress import clock
from local.view.ledger import Attempt, Event, Ledger

CLASSES = {
    "start": "trainer start, checks, torch and savers are loaded",
    "preflight": "the network between the processes is tested",
    "rendezvous": "processes find each other",
    "compile": "first passes over the model, compilation",
    "restore": "a checkpoint is found, verified and loaded",
    "data_wait": "the training waits for data",
    "step": "new steps",
    "redone": "steps that an earlier attempt had done",
    "evaluate": "validation loss",
    "save_stall": "the training waits for a checkpoint",
    "eviction_gap": "nothing ran, or what ran was lost",
}
"""The classes the trainer counts by, in the order of a run, and what happens in each."""


@dataclass(frozen=True)
class Part:
    """The seconds of one class and their share of the whole."""

    name: str
    seconds: float
    share: float


def account(ledger: Ledger) -> list[Part]:
    """Return the classes in which any time went, over all attempts and the gaps between them; none before an attempt told of any.

    An attempt counts up to its last `goodput` event: what it did afterwards is lost, and part of the gap. One without any counts as start.
    """
    if not ledger.every("goodput"):
        return []
    total, end = dict.fromkeys(CLASSES, 0.0), None
    for begun, ended, seconds in map(_counted, _alone(ledger)):
        total["eviction_gap"] += 0.0 if end is None else max(begun - end, 0.0)
        for name, amount in seconds.items():
            total[name] = total.get(name, 0.0) + amount
        end = ended
    whole = sum(total.values()) or 1.0
    return [Part(name, seconds, seconds / whole) for name, seconds in total.items() if seconds > 0]


def share_of_steps(parts: list[Part]) -> str:
    """Return the goodput in percent: the share of the time that made new steps; empty before it is known."""
    return f"{next((part.share for part in parts if part.name == 'step'), 0.0):.0%}" if parts else ""


def lines(parts: list[Part]) -> list[str]:
    """Return the account as a table for a terminal."""
    rows = [(part.name.replace("_", " "), clock(part.seconds), f"{part.share:.1%}", CLASSES.get(part.name, "")) for part in parts]
    rows.append(("in all", clock(sum(part.seconds for part in parts)), f"{sum(part.share for part in parts):.1%}", ""))
    return [f"  {name:<12}  {seconds:>7}  {share:>6}  {meaning}".rstrip() for name, seconds, share, meaning in rows] if parts else []


def _alone(ledger: Ledger) -> Iterator[tuple[Event, ...]]:
    """Return the events of each attempt until the next one began: from then on it is superseded, and its seconds are not the run's."""
    attempts: list[Attempt] = ledger.attempts
    for mine, following in zip(attempts, [*attempts[1:], None], strict=True):
        until = following.start if following else None
        yield tuple(event for event in mine.events if until is None or event.time <= until) or mine.events[:1]


def _counted(events: tuple[Event, ...]) -> tuple[float, float, dict[str, float]]:
    """Return begin, end and seconds by class of one attempt."""
    last = next((event for event in reversed(events) if event.name == "goodput"), None)
    if last is None:
        return events[0].time, events[-1].time, {"start": events[-1].time - events[0].time}
    told = last.fields.get("seconds")
    seconds = {name: float(amount) for name, amount in told.items() if amount} if isinstance(told, dict) else {}
    return last.time - (last.number("wall") or 0.0), last.time, seconds

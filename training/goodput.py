"""Where the seconds of a run go: each second of an attempt is of one class, and the classes of all attempts sum to the run's wall time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

# `start`: from the launcher's start until workers meet. `redone`: steps that an earlier attempt had done. `eviction_gap`: nothing ran.
BEFORE_STEPS = ("start", "preflight", "rendezvous", "compile", "restore")
CLASSES: tuple[str, ...] = (*BEFORE_STEPS, "data_wait", "step", "redone", "evaluate", "save_stall", "eviction_gap")


class Clock:
    """The seconds of one attempt by class. Exactly one class runs at any moment, so they sum to the wall time without rest.

    `spent` is what was counted before; `cls` runs since the moment `since` of time.monotonic(). Other threads may read it.
    """

    def __init__(self, spent: dict[str, float], cls: str, since: float) -> None:
        self._seconds = dict.fromkeys(CLASSES, 0.0) | spent
        self._running, self._since = cls, since
        self._lock = threading.Lock()

    @contextmanager
    def of(self, cls: str) -> Iterator[None]:
        """Count what happens inside to a class; afterwards the class around it runs again."""
        outer = self.turn(cls)
        try:
            yield
        finally:
            self.turn(outer)

    def turn(self, cls: str) -> str:
        """Count to this class from now on, and give the one that ran until now."""
        with self._lock:
            now, before = time.monotonic(), self._running
            self._seconds[before] += now - self._since
            self._running, self._since = cls, now
        return before

    def seconds(self) -> dict[str, float]:
        """Give the seconds of each class up to now."""
        with self._lock:
            return self._seconds | {self._running: self._seconds[self._running] + time.monotonic() - self._since}


def account(events: list[dict[str, Any]]) -> dict[str, float]:
    """Sum the classes over all attempts of a run, and the gaps between them: the time from the first start to the last word.

    An attempt counts up to its last `goodput` event; what it did afterwards is lost, part of the gap. One without any counts as `start`.
    """
    total, end = dict.fromkeys(CLASSES, 0.0), None
    told = [list(group) for _, group in groupby(sorted(events, key=itemgetter("attempt")), key=itemgetter("attempt"))]
    for mine, following in zip_longest(told, told[1:]):
        # An attempt that goes on after the next one has begun is superseded: from then on its seconds are not the run's.
        alone = [event for event in mine if following is None or event["time"] <= following[0]["time"]] or mine[:1]
        lived = alone[-1]["time"] - alone[0]["time"]
        died_early = {"time": alone[-1]["time"], "wall": lived, "seconds": {"start": lived}}
        last = next((event for event in reversed(alone) if event["event"] == "goodput"), died_early)
        total["eviction_gap"] += 0.0 if end is None else max(last["time"] - last["wall"] - end, 0.0)
        total, end = {cls: amount + last["seconds"].get(cls, 0.0) for cls, amount in total.items()}, last["time"]
    return total


def share(seconds: dict[str, float]) -> float:
    """Give the goodput: the part of the wall time that made new steps, from 0 to 1."""
    return seconds["step"] / (sum(seconds.values()) or 1.0)

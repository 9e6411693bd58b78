"""Notices that a run stands still, shows where, and says which rank the others wait for."""

import atexit
import faulthandler
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from training.config import RunConfig

LOOK_SECONDS, PUBLISH_SECONDS, DIAGNOSIS_SECONDS = 0.25, 1.0, 10.0
STORE_TIMEOUT = timedelta(seconds=3)
Place = list[Any]  # step, beats (all ranks tell the same phases, so that more beats are further), phase, host, and when it told this


class Watchdog:
    """A thread that looks, and one that tells the other ranks where this one is. The first beat arms it, stop() ends it.

    `on_hang` gets the message, the same on every rank, in the watching thread, and must end the process. `hang` then has it in parts:
    the late rank (None: not known), its phase and step, and for how many seconds nothing has moved.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, on_hang: Callable[[str], NoReturn]) -> None:
        self._least, self._rank, self._world_size, self._on_hang = config.hang_seconds, rank, world_size, on_hang
        self._place: Place = [0, 0, "start", os.uname().nodename]
        self._stepped, self._durations, self._stopped = 0.0, list[float](), threading.Event()
        self._threads = [threading.Thread(target=job, daemon=True) for job in (self._watch, self._publish)]
        self.hang: dict[str, Any] = {}

    def start(self) -> None:
        """Begin."""
        atexit.register(self.stop)  # a thread that Python ends inside the store's C++ takes the process with it
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no longer: before the process ends in good order, or does what may take as long as it likes."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(STORE_TIMEOUT.total_seconds())

    def beat(self, phase: str, step: int) -> None:
        """Say that a phase of a step begins."""
        if step != self._place[0]:
            before, self._stepped = self._stepped, time.monotonic()
            self._durations = [*self._durations[-49:], self._stepped - before] if before else []
        self._place = [step, self._place[1] + 1, phase, self._place[3]]

    @property
    def step_seconds(self) -> float | None:
        """Give the median of the last 50 steps."""
        return statistics.median(self._durations) if self._durations else None

    def _watch(self) -> None:
        seen, idle, last = 0, 0.0, time.monotonic()
        while not self._stopped.wait(LOOK_SECONDS):
            # A process that was stopped itself must not raise the alarm as soon as it goes on, so a look counts for two intervals at most.
            now, before, seen = time.monotonic(), seen, self._place[1]
            idle, last = idle + min(now - last, 2 * LOOK_SECONDS) if before == seen else 0.0, now
            if seen and idle > max(self._least, 10 * (self.step_seconds or 0.0)):
                self._alarm(idle)

    def _alarm(self, idle: float) -> NoReturn:
        faulthandler.dump_traceback()
        if torch.cuda.is_available() and (dump := getattr(c10d, "_dump_nccl_trace_json", None)):
            os.write(2, dump(onlyActive=True))
        self.hang = _hang(idle, None, self._place, "the job's store does not answer, so the late rank is not known; this one was")
        asking = threading.Thread(target=self._ask, args=(idle,), daemon=True)  # a store may also hang for ever
        asking.start()
        asking.join(DIAGNOSIS_SECONDS)
        self._on_hang(self.hang["message"])

    def _ask(self, idle: float) -> None:
        """Find out who is late: who no longer tells anything, else who has come least far. The first rank to know decides for all."""
        with suppress(RuntimeError):  # the store does not answer
            store = _store()
            before = self._places(store)
            time.sleep(2.5 * PUBLISH_SECONDS)
            now = self._places(store)
            silent = next((rank for rank in now if now[rank] == before[rank] and rank != self._rank), None)
            late = min(now, key=lambda rank: now[rank][:2]) if silent is None else silent
            even = silent is None and all(place[:2] == now[late][:2] for place in now.values())
            how = "no rank is behind the others, all were" if even else "is late, it was" if silent is None else "no longer answers, it was"
            hang = _hang(idle, None if even else late, now[late], how if even else f"rank {late} on {now[late][3]} {how}")
            self.hang = json.loads(store.compare_set("watchdog/verdict", "", json.dumps(hang)))

    def _publish(self) -> None:
        with suppress(RuntimeError):
            store = _store()
            while not self._stopped.is_set():
                store.set(f"watchdog/{self._rank}", json.dumps([*self._place, time.monotonic()]))
                self._stopped.wait(PUBLISH_SECONDS)

    def _places(self, store: c10d.TCPStore) -> dict[int, Place]:
        keys = [f"watchdog/{rank}" for rank in range(self._world_size)]
        return {rank: json.loads(store.get(key)) if store.check([key]) else [0, 0, "start", "?"] for rank, key in enumerate(keys)}


def _hang(idle: float, rank: int | None, place: Place, finding: str) -> dict[str, Any]:
    message = f"nothing has moved for {idle:.0f} s: {finding} last seen in phase {place[2]!r} of step {place[0]}"
    return {"rank": rank, "phase": place[2], "step": place[0], "seconds": round(idle, 1), "message": message}


def _store() -> c10d.TCPStore:
    """Connect to the job's store anew: the group's own connection may be the one that hangs."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return c10d.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)

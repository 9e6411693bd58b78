"""What launcher and workers tell each other, as files in one folder: the order, who is ready for a signal, and how each rank ended."""

import contextlib
import ctypes
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.errors import EVICTED_SAVED, EVICTED_UNSAVED, UNEXPECTED

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(frozen=True)
class Order:
    """What the launcher tells the workers."""

    config: dict[str, Any]
    attempt: int
    data: str
    launched: float


@dataclass(frozen=True)
class Outcome:
    """How a rank, or the whole run, ended."""

    code: int
    message: str = ""


class Work:
    """The folder of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"

    def give(self, order: Order) -> None:
        """Leave the order for the workers."""
        (self.path / "order.json").write_text(json.dumps(asdict(order)))

    def order(self) -> Order:
        """Take the order."""
        return Order(**json.loads((self.path / "order.json").read_text()))

    def ready(self, rank: int) -> None:
        """Say that from now on SIGTERM makes this rank stop in good order."""
        _write_whole(self.path / f"rank-{rank}.pid", str(os.getpid()))

    def ready_pids(self) -> list[int]:
        """List the processes that may be signalled."""
        return [int(path.read_text()) for path in self.path.glob("rank-*.pid")]

    def report(self, rank: int, outcome: Outcome) -> None:
        """Say how this rank ended; torchrun cannot, its exit code is always 1."""
        _write_whole(self.path / f"rank-{rank}.outcome", json.dumps(asdict(outcome)))

    def outcome(self, processes: int) -> Outcome:
        """Combine the reports of all ranks into the outcome of the run."""
        reports: dict[int, Outcome] = {}
        for rank in range(processes):
            path = self.path / f"rank-{rank}.outcome"
            if path.is_file():
                reports[rank] = Outcome(**json.loads(path.read_text()))
        return combine(reports, processes)


def combine(reports: dict[int, Outcome], processes: int) -> Outcome:
    """Decide what the run as a whole did.

    A reason that a rank could name comes first, then a rank that died without a word (killed, out of memory), then a crash that it may have
    caused in the others. An eviction counts as saved only when every rank says so.
    """
    for outcome in reports.values():
        if outcome.code > EVICTED_UNSAVED:
            return outcome
    silent = [str(rank) for rank in range(processes) if rank not in reports]
    if silent:
        return Outcome(
            UNEXPECTED,
            f"rank {', '.join(silent)} of {processes} was killed (out of memory, or from outside); the run resumes when started again",
        )
    for rank, outcome in sorted(reports.items()):
        if outcome.code == UNEXPECTED:
            return Outcome(UNEXPECTED, f"rank {rank} failed: {outcome.message}")
    codes = {outcome.code for outcome in reports.values()}
    if len(codes) == 1:
        return Outcome(codes.pop())
    return Outcome(
        EVICTED_UNSAVED if codes <= {EVICTED_SAVED, EVICTED_UNSAVED} else UNEXPECTED,
        f"the ranks disagree on how the run ended: {sorted(codes)}",
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: torchrun and each worker have their own session, and none may be left."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, as process 1 of a container is anyway."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill all children of this process, and wait for their end.

    A worker that torchrun had only just started when it was killed had no time to tie itself to it.
    """
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
        if parent == os.getpid():
            found.append(int(stat.parent.name))
    return found


def _write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)

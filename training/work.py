"""What the processes of an attempt tell each other, as files in one folder: the order, who is ready, the notice, how each rank ended."""

import contextlib
import ctypes
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.errors import EVICTED_SAVED, EVICTED_UNSAVED, HUNG, SUPERSEDED, UNEXPECTED

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(frozen=True)
class Order:
    """What the launcher tells the workers. With several nodes, rank 0's order counts: only the first launcher knows the attempt."""

    config: dict[str, Any]
    attempt: int  # 0 on every node but the first
    launched: float  # when the attempt began, unix time
    spent: dict[str, float]  # seconds since then by class of goodput
    reached: int  # the highest step that an earlier attempt told


@dataclass(frozen=True)
class Notice:
    """An eviction, or the advice to expect one. Times are those of the machine's monotonic clock, which its processes share."""

    source: str
    noticed: float
    deadline: float | None = None  # until when the workers may live; None for an advice


@dataclass(frozen=True)
class Outcome:
    """How a rank, or the whole run, ended."""

    code: int
    message: str = ""


class Work:
    """The folder of one attempt on one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.finished = path / "finished"  # holds the last step once training is done

    def give(self, order: Order) -> None:
        """Leave the order for the workers."""
        (self.path / "order.json").write_text(json.dumps(asdict(order)))

    def order(self) -> Order:
        """Take the order."""
        return Order(**json.loads((self.path / "order.json").read_text()))

    def ready(self, rank: int) -> None:
        """Say that from now on SIGTERM makes this rank stop in good order."""
        write_whole(self.path / f"rank-{rank}.pid", str(os.getpid()))

    def ready_pids(self) -> list[int]:
        """List the processes that may be signalled."""
        return [int(path.read_text()) for path in self.path.glob("rank-*.pid")]

    def notify(self, notice: Notice) -> None:
        """Leave the notice that the next signal is about."""
        write_whole(self.path / "notice.json", json.dumps(asdict(notice)))

    def notice(self) -> Notice | None:
        """Read the newest notice."""
        path = self.path / "notice.json"
        return Notice(**json.loads(path.read_text())) if path.is_file() else None

    def report(self, rank: int, outcome: Outcome) -> None:
        """Say how this rank ended; torchrun cannot, its exit code is always 1."""
        write_whole(self.path / f"rank-{rank}.outcome", json.dumps(asdict(outcome)))

    def reports(self) -> dict[int, Outcome]:
        """Give the outcomes reported so far by rank."""
        paths = {int(path.stem.removeprefix("rank-")): path for path in self.path.glob("rank-*.outcome")}
        return {rank: Outcome(**json.loads(path.read_text())) for rank, path in sorted(paths.items())}

    def hopeless(self) -> bool:
        """Tell whether a rank has ended in a way that the others cannot: they may wait for it for ever."""
        return any(outcome.code in {HUNG, SUPERSEDED} for outcome in self.reports().values())


def combine(reports: dict[int, Outcome], ranks: range) -> Outcome:
    """Decide what these ranks as a whole did.

    A reason that a rank could name comes first, and a hang, which may be its consequence, after it. Then a rank that died without a word
    (killed, out of memory), then a crash that it may have caused in the others. An eviction counts as saved only when every rank says so.
    """
    named = [outcome for _, outcome in sorted(reports.items()) if outcome.code > EVICTED_UNSAVED]
    if named:
        return min(named, key=lambda outcome: outcome.code == HUNG)
    silent = [str(rank) for rank in ranks if rank not in reports]
    if silent:
        return Outcome(
            UNEXPECTED, f"rank {', '.join(silent)} was killed (out of memory, or from outside); the run resumes when started again"
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


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)

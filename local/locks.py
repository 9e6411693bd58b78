"""A lock between processes: held by a file, freed by the kernel when its holder ends, however it ends.

The holder writes into the file what it does, and who waits reads it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.5


@contextmanager
def exclusive(path: Path, waiting: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Hold the lock at `path` inside the block and yield a function that tells waiters what is being done.

    While another process has the lock, `waiting` is called again and again with what that process tells.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        while not _taken(handle.fileno()):
            waiting(path.read_text().strip() or "another process")
            time.sleep(_POLL_SECONDS)

        def tell(doing: str) -> None:
            handle.seek(0)
            handle.truncate()
            handle.write(f"process {os.getpid()}: {doing}")
            handle.flush()

        tell("starting")
        yield tell


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

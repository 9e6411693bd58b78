"""Events: one JSON object a line on stdout. Everything else that is printed goes to stderr."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Events:
    """The stream of events of one attempt, which also keeps them in a local file when given one."""

    def __init__(self, run: str, attempt: int, stream: TextIO, journal: Path | None = None, always: dict[str, Any] | None = None) -> None:
        self.run, self.attempt = run, attempt
        self._stream, self.journal, self._always = stream, journal, always or {}

    def emit(self, event: str, **fields: Any) -> None:
        """Tell what happened."""
        head = {"event": event, "time": round(time.time(), 3), "run": self.run, "attempt": self.attempt}
        line = json.dumps({**head, **self._always, **fields}) + "\n"
        self._stream.write(line)
        self._stream.flush()
        if self.journal is not None:
            append(self.journal, line)


def append(journal: Path, line: str) -> None:
    """Add a line to a file that other processes add lines to, in one write."""
    with locked(journal):
        file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


@contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Keep every other process away from a journal. The lock is the one of its folder: a journal that is rewritten is another file."""
    folder = os.open(journal.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def claim_stdout() -> TextIO:
    """Keep the real stdout for events and send whatever libraries print there to stderr (gloo prints from C++)."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream

"""Events: one JSON object a line on stdout. Everything else that is printed goes to stderr."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Events:
    """The stream of events of one attempt, which also keeps them in a local file when given one."""

    def __init__(self, run: str, attempt: int, stream: TextIO, journal: Path | None = None) -> None:
        self.run, self.attempt = run, attempt
        self._stream, self._journal = stream, journal

    def emit(self, event: str, **fields: Any) -> None:
        """Tell what happened."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), "run": self.run, "attempt": self.attempt, **fields})
        print(line, file=self._stream, flush=True)
        if self._journal is not None:
            with self._journal.open("a", encoding="utf-8") as journal:
                journal.write(line + "\n")


def claim_stdout() -> TextIO:
    """Keep the real stdout for events and send whatever libraries print there to stderr (gloo prints from C++)."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream

"""The ledger: every event of a run over its attempts. A local file is worked on; the bucket gets it whole, now and then."""

import json
from pathlib import Path
from typing import Any

from training.events import locked
from training.store import Folder, MissingObjectError, Store


class Ledger:
    """The events of a run, in a local file that mirrors one object. Launcher, rank 0 and keeper work on the same file."""

    def __init__(self, path: Path, place: Store | Folder, run: str) -> None:
        self.path, self._place = path, place
        self.key = f"runs/{run}/ledger.jsonl"

    def fetch(self) -> None:
        """Begin with what earlier attempts left."""
        try:
            self.path.write_bytes(self._place.get(self.key))
        except MissingObjectError:
            self.path.write_bytes(b"")

    def put(self) -> None:
        """Store the ledger as it is now."""
        self._place.put(self.key, self._read())

    def events(self) -> list[dict[str, Any]]:
        """Read all events, oldest first."""
        return [json.loads(line) for line in self._read().splitlines()]

    def rewind(self, step: int) -> None:
        """Forget steps newer than the one that training continues from: they will happen again, and a curve has each step once."""
        with locked(self.path):
            events = (json.loads(line) for line in self.path.read_bytes().splitlines())
            kept = [event for event in events if event["event"] != "step" or event["step"] <= step]
            rewritten = self.path.with_suffix(".rewritten")
            rewritten.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")
            rewritten.replace(self.path)

    def last_step(self) -> int:
        """Give the step the run had reached when it last told one."""
        return next((event["step"] for event in reversed(self.events()) if event["event"] in {"step", "restore", "checkpoint"}), 0)

    def reached(self) -> int:
        """Give the highest step of any attempt. Each attempt tells at its start what those before had reached: rewinding forgets steps."""
        return max((max(event.get("step", 0), event.get("reached", 0)) for event in self.events()), default=0)

    def _read(self) -> bytes:
        with locked(self.path):
            return self.path.read_bytes()

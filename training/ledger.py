"""The ledger: every event of a run over its attempts. A local file is worked on; the bucket gets it whole, now and then."""

import json
from pathlib import Path
from typing import Any

from training.store import MissingObjectError, Store


class Ledger:
    """The events of a run, in a local file that mirrors one object."""

    def __init__(self, path: Path, store: Store, run: str) -> None:
        self.path, self._store = path, store
        self.key = f"runs/{run}/ledger.jsonl"

    def fetch(self) -> int:
        """Begin with what earlier attempts left, and give the number of the attempt that starts now."""
        try:
            self.path.write_bytes(self._store.get(self.key))
        except MissingObjectError:
            self.path.write_bytes(b"")
        return 1 + max((event["attempt"] for event in self.events()), default=0)

    def put(self) -> None:
        """Store the ledger as it is now."""
        self._store.put(self.key, self.path.read_bytes())

    def events(self) -> list[dict[str, Any]]:
        """Read all events, oldest first."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def rewind(self, step: int) -> None:
        """Forget steps newer than the one that training continues from: they will happen again, and a curve has each step once."""
        kept = [event for event in self.events() if event["event"] != "step" or event["step"] <= step]
        self.path.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")

    def last_step(self) -> int:
        """Give the step the run had reached when it last told one."""
        return next((event["step"] for event in reversed(self.events()) if event["event"] in {"step", "restore", "checkpoint"}), 0)

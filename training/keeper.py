"""Looks after the checkpoints of a run beside the training: verifies and proves the newest one, deletes what may go, removes debris.

Started by the launcher on node 0. A checkpoint is read back, its weights are loaded, and their validation loss is computed again: if it is
the one that the training had, the checkpoint is good. The keeper ends when the training is done and its last checkpoint has been looked
after. It may be killed at any moment: what it deletes loses its mark first. Nothing that goes wrong here ends the training.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError
from training.config import RunConfig, load
from training.errors import DONE, SupersededError, TrainerError
from training.events import Events, claim_stdout
from training.retention import is_debris, plan
from training.store import Upload, place_of
from training.work import Work, die_with_parent

POLL_SECONDS, RETRY_SECONDS = 2.0, 10.0
CUES = b'{"event": "checkpoint"', b'{"event": "restore"'
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "fp8": 2e-2}  # relative: other kernels add in another order


def reproduced(recorded: float, again: float, precision: str) -> bool:
    """Tell whether two validation losses of the same weights agree; one that is no number agrees with none."""
    return abs(again - recorded) <= TOLERANCE[precision] * abs(recorded)


class Keeper:
    """The checkpoints of one run during one attempt."""

    def __init__(self, config: RunConfig, events: Events) -> None:
        self._config, self._events = config, events
        self._catalog = Catalog(place_of(config), config.run)
        self._known: dict[int, CheckpointManifest | None] = {}
        self._done: int | None = None

    def look(self) -> None:
        """Look after the newest checkpoint that can be trusted, unless that has been done; SupersededError when it is another's task.

        Those before it lose their marks, but only when there is one to go back to.
        """
        catalog = self._catalog
        if catalog.newest_attempt() > self._events.attempt:
            raise SupersededError(f"another attempt looks after the checkpoints of {catalog.run} now")
        good, passed_over = catalog.good(), dict[int, str]()
        for step in catalog.committed():
            trusted = step == self._done or (self._done is None and step in good)
            if reason := None if trusted else self._objection(step, good):
                passed_over[step] = reason
                self._events.emit("skipped", checkpoint=catalog.uri(step), reason=reason)
                continue
            for damaged, objection in passed_over.items():
                catalog.pass_over(damaged, objection)
            if not trusted:
                self._retain(step)
            self._done = step
            self._remove_debris()
            return

    def _objection(self, step: int, good: list[int]) -> str | None:
        """Read a checkpoint back and prove it, or say why it must be passed over.

        As long as none has been proved, a proof that fails speaks as much against the proof. The checkpoint then gets no mark, and stays.
        """
        try:
            manifest = self._catalog.verified(step)
        except DamagedCheckpointError as error:
            return str(error)
        if not self._config.checkpoint.prove or manifest.validation_loss is None or step in good:
            return None
        reason = self._proof(manifest, manifest.validation_loss)
        if reason and not good:
            self._events.emit("warning", message=f"{self._catalog.uri(step)} is not good: {reason}")
        return reason if good else None

    def _proof(self, manifest: CheckpointManifest, recorded: float) -> str | None:
        """Mark a checkpoint good, or say why it is not."""
        from training.prove import prove  # torch takes seconds to load

        try:
            loss = prove(self._catalog, manifest)
        except DamagedCheckpointError as error:
            return str(error)
        if not reproduced(recorded, loss, self._config.train.precision):
            return f"its validation loss was {recorded} when it was saved, and is {loss} now that it was loaded back"
        self._catalog.mark_good(manifest.step, loss_reproduced=loss)
        self._events.emit("good", step=manifest.step, loss=recorded, reproduced=loss)
        return None

    def _retain(self, verified: int) -> None:
        """Delete the checkpoints that no role keeps."""
        losses = {step: manifest and manifest.validation_loss for step, manifest in self._manifests().items()}
        decided = plan(losses, self._catalog.good(), verified, self._config.checkpoint)
        for step in decided.deleted:
            self._catalog.clear(step)
        self._events.emit("retained", kept=decided.kept, deleted=decided.deleted)

    def _remove_debris(self) -> None:
        """Remove what no checkpoint will ever consist of: data of dead attempts and failed saves, and their open uploads."""
        place, prefix = self._catalog.place, self._catalog.prefix
        # Listed before the marks are read, so that a checkpoint committed in between is not taken for debris.
        found = [*place.listing(prefix), *place.uploads(prefix)]
        owners = {step: manifest and manifest.attempt for step, manifest in self._manifests().items()}
        for item in found:
            part = re.match(r"step-(\d+)/(\d+)/", item.key.removeprefix(prefix))
            if part and is_debris(int(part[1]), int(part[2]), owners, self._events.attempt):
                place.abort(item) if isinstance(item, Upload) else place.delete(item.key)

    def _manifests(self) -> dict[int, CheckpointManifest | None]:
        """Give the manifest of each committed checkpoint, read once; None when it cannot be understood."""
        known, self._known = self._known, {}
        for step in self._catalog.committed():
            try:
                self._known[step] = known.get(step) or self._catalog.manifest(step)
            except DamagedCheckpointError:
                self._known[step] = None
        return self._known


def keep(keeper: Keeper, work: Work, events: Events) -> None:
    """Look whenever this attempt tells of another checkpoint, never before it has found its own way back, and when the training is done."""
    seen, warned, finished = b"", "", False
    while not finished:
        finished, cue, pause = work.finished.is_file(), _cue(work.ledger, events.attempt), POLL_SECONDS
        if cue != seen or finished:
            try:
                keeper.look()
                seen, warned = cue, ""
            except SupersededError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                message = error.message if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
                if message != warned:
                    events.emit("warning", message=f"the checkpoints are not looked after: {message}")
                warned, pause = message, RETRY_SECONDS
        time.sleep(0 if finished else pause)


def _cue(journal: Path, attempt: int) -> bytes:
    """Give the line in which this attempt last told of a checkpoint."""
    content = journal.read_bytes() if journal.is_file() else b""
    start = max(content.rfind(cue) for cue in CUES)
    line = content[start:].partition(b"\n")[0] if start >= 0 else b"{}"
    return line if json.loads(line).get("attempt") == attempt else b""


def main() -> int:
    """Keep until the training is done; the launcher's end is the keeper's."""
    die_with_parent()
    stdout = claim_stdout()
    parser = argparse.ArgumentParser(prog="python -m training keeper", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the attempt")
    arguments = parser.parse_args()
    work, config = Work(arguments.work), load(arguments.config)
    events = Events(config.run, work.order().attempt, stdout, work.ledger)
    keep(Keeper(config, events), work, events)
    return DONE


if __name__ == "__main__":
    sys.exit(main())

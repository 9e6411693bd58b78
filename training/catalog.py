"""The checkpoints of a run as objects: who may write them, which exist, and whether they can be trusted.

Each attempt writes a checkpoint into a folder of its own: data objects, then a manifest with the SHA-256 of each. The mark COMMITTED beside
the folders names one of them and the SHA-256 of its manifest. The checkpoint exists when the mark does. Nothing here needs torch.
"""

import hashlib
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from training.errors import StoreError, SupersededError
from training.store import ExistsError, Folder, MissingObjectError, Store

MARK, GOOD, DAMAGED = "COMMITTED", "GOOD", "DAMAGED"
MANIFEST = "manifest.json"
READERS = 4


class DamagedCheckpointError(Exception):
    """A committed checkpoint is not what was committed; the text names the object."""


class StoredObject(BaseModel):
    """One data object of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """What a checkpoint holds, where in the run it was taken, and what the run was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    attempt: int
    step: int
    reason: str  # why it was saved: steps, seconds, milestone, end, eviction, advice
    loss: float
    validation_loss: float | None  # of these weights on the windows held out
    world_size: int
    mesh: dict[str, Any]
    cursor: dict[str, int]
    scheduler: dict[str, float]
    geometry: dict[str, str | int]  # what must not change when the run is resumed
    config: dict[str, Any]
    identity: dict[str, str]
    goodput: dict[str, float]  # seconds of the run so far by class
    time: float
    objects: tuple[StoredObject, ...] = ()

    @property
    def bytes(self) -> int:
        """Add up the data."""
        return sum(item.bytes for item in self.objects)


class Catalog:
    """The attempts and checkpoints of one run."""

    def __init__(self, place: Store | Folder, run: str) -> None:
        self.place, self.run = place, run
        self.attempts, self.prefix = f"runs/{run}/attempts/", f"runs/{run}/checkpoints/"

    def claim(self) -> int:
        """Begin an attempt: give it a number that no other process has got. Attempts with lower numbers can commit nothing from now on."""
        number = self.newest_attempt() + 1
        while True:
            try:
                self.place.put_new(f"{self.attempts}{number:06d}", _json(time=time.time(), pod=socket.gethostname()))
            except ExistsError:
                number += 1
            else:
                return number

    def newest_attempt(self) -> int:
        """Give the number of the newest attempt, 0 before the first."""
        return max((int(listed.key.removeprefix(self.attempts)) for listed in self.place.listing(self.attempts)), default=0)

    def step_folder(self, step: int) -> str:
        """Give the key prefix of everything that belongs to a step, with a slash at the end."""
        return f"{self.prefix}step-{step:08d}/"

    def folder(self, step: int, attempt: int) -> str:
        """Give the key prefix of what one attempt writes for a step, with a slash at the end."""
        return f"{self.step_folder(step)}{attempt:06d}/"

    def uri(self, step: int) -> str:
        """Name a checkpoint for a human or another S3 client."""
        return self.place.uri(self.step_folder(step))

    def committed(self) -> list[int]:
        """List the steps with a committed checkpoint, newest first."""
        return self._marked(MARK)

    def good(self) -> list[int]:
        """List the steps whose checkpoint was loaded back and reproduced its validation loss, newest first."""
        committed = set(self.committed())
        return [step for step in self._marked(GOOD) if step in committed]

    def damaged(self) -> list[int]:
        """List the steps whose checkpoint was passed over, now or earlier."""
        return self._marked(DAMAGED)

    def manifest(self, step: int) -> CheckpointManifest:
        """Read the manifest of a committed checkpoint and compare it with its mark."""
        mark_key = self.step_folder(step) + MARK
        try:
            mark = json.loads(self.place.get(mark_key))
            key = f"{self.step_folder(step)}{mark['folder']}/{MANIFEST}"
            content = self.place.get(key)
            if mark["manifest_sha256"] != hashlib.sha256(content).hexdigest():
                raise DamagedCheckpointError(f"{key} has not the SHA-256 that {MARK} names")
            return CheckpointManifest.model_validate_json(content)
        except MissingObjectError as error:
            raise DamagedCheckpointError(error.message) from None
        except (ValueError, KeyError, TypeError, ValidationError):
            raise DamagedCheckpointError(f"{mark_key} or the manifest that it names cannot be understood") from None

    def verified(self, step: int) -> CheckpointManifest:
        """Read every object of a checkpoint back, and give the manifest only if size and SHA-256 of all of them are right."""
        manifest = self.manifest(step)
        if problems := self.problems(manifest):
            raise DamagedCheckpointError("; ".join(problems))
        return manifest

    def problems(self, manifest: CheckpointManifest, part: int = 0, parts: int = 1) -> list[str]:
        """Read every object back, or one of `parts` shares of them, and say what is wrong."""
        folder = self.folder(manifest.step, manifest.attempt)
        with ThreadPoolExecutor(READERS) as pool:
            return [problem for problem in pool.map(lambda item: self._problem(folder, item), manifest.objects[part::parts]) if problem]

    def _problem(self, folder: str, item: StoredObject) -> str | None:
        """Say what is wrong with one object, if anything is."""
        key = folder + item.name
        try:
            size, sha256 = self.place.digest(key)
        except MissingObjectError:
            return f"{key} is missing"
        if size != item.bytes:
            return f"{key} has {size} bytes instead of {item.bytes}"
        return None if sha256 == item.sha256 else f"{key} has another SHA-256 than when it was written"

    def commit(self, manifest: CheckpointManifest) -> None:
        """Make a checkpoint exist: compare what the place holds with what was sent, then write manifest and mark.

        SupersededError when a newer attempt has begun, or when another one has committed this step.
        """
        folder, mark_key = self.folder(manifest.step, manifest.attempt), self.step_folder(manifest.step) + MARK
        sent = {folder + item.name: item.bytes for item in manifest.objects}
        held = {listed.key: listed.size for listed in self.place.listing(folder) if listed.key not in {folder, folder + MANIFEST}}
        if sent != held:
            raise StoreError(f"{self.place.uri(folder)} does not hold what was written; another process writes there")
        content = manifest.model_dump_json(indent=1).encode()
        self.place.put(folder + MANIFEST, content)
        newest = self.newest_attempt()
        if newest > manifest.attempt:
            raise SupersededError(f"attempt {newest} of the run {self.run} has begun; attempt {manifest.attempt} commits nothing any more")
        mark = _json(step=manifest.step, folder=f"{manifest.attempt:06d}", manifest_sha256=hashlib.sha256(content).hexdigest())
        try:
            self.place.put_new(mark_key, mark)
        except ExistsError:
            # A repeated request finds the mark that the first one wrote when only its answer was lost.
            if self.place.get(mark_key) != mark:
                raise SupersededError(f"{self.place.uri(mark_key)} exists: another attempt has committed this step") from None

    def mark_good(self, step: int, *, loss_reproduced: float) -> None:
        """Note that a checkpoint was loaded back, and that the validation loss of its weights is the recorded one."""
        mark = json.loads(self.place.get(self.step_folder(step) + MARK))
        told = {"loss_recorded": self.manifest(step).validation_loss, "loss_reproduced": loss_reproduced}
        told |= {"verified_by": socket.gethostname(), "time": time.time()}
        self.place.put(self.step_folder(step) + GOOD, _json(manifest_sha256=mark["manifest_sha256"], **told))

    def pass_over(self, step: int, reason: str) -> None:
        """Take back the mark of a damaged checkpoint, so that the step can be committed again."""
        self.place.put(self.step_folder(step) + DAMAGED, _json(reason=reason))
        for name in (GOOD, MARK):
            self.place.delete(self.step_folder(step) + name)

    def clear(self, step: int) -> None:
        """Delete a checkpoint and whatever else a step has, the mark first: half a checkpoint never counts as one."""
        keys = [listed.key for listed in self.place.listing(self.step_folder(step))]
        for key in sorted(keys, key=lambda key: not key.endswith("/" + MARK)):
            self.place.delete(key)

    def _marked(self, name: str) -> list[int]:
        """List the steps that have an object of this name beside their folders, newest first."""
        marks = re.compile(re.escape(self.prefix) + rf"step-(\d+)/{name}$")
        found = (marks.match(listed.key) for listed in self.place.listing(self.prefix))
        return sorted((int(match[1]) for match in found if match), reverse=True)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()

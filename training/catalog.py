"""The checkpoints of a run as objects: which exist, whether they can be trusted, and which may go.

A checkpoint is a folder of data objects, then a manifest with the SHA-256 of each, then the mark COMMITTED with the SHA-256 of
the manifest. It exists when the mark does. Nothing here needs torch.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from training.errors import StoreError
from training.store import Listed, MissingObjectError, Store

MARK = "COMMITTED"
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
    step: int
    loss: float
    world_size: int
    cursor: dict[str, int]
    scheduler: dict[str, float]
    geometry: dict[str, str | int]  # what must not change when the run is resumed
    config: dict[str, Any]
    identity: dict[str, str]
    objects: tuple[StoredObject, ...]

    @property
    def bytes(self) -> int:
        """Add up the data."""
        return sum(item.bytes for item in self.objects)


class Catalog:
    """The checkpoints below runs/<run>/checkpoints/."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.prefix = store, f"runs/{run}/checkpoints/"

    def name(self, step: int) -> str:
        """Give the name of the checkpoint of a step."""
        return f"step-{step:08d}"

    def folder(self, step: int) -> str:
        """Give the key prefix of a checkpoint, with a slash at the end."""
        return f"{self.prefix}{self.name(step)}/"

    def uri(self, step: int) -> str:
        """Name a checkpoint for a human or another S3 client."""
        return self.store.uri(self.folder(step))

    def committed(self) -> list[int]:
        """List the steps with a committed checkpoint, newest first."""
        marks = re.compile(re.escape(self.prefix) + rf"step-(\d+)/{MARK}$")
        found = (marks.match(listed.key) for listed in self.store.listing(self.prefix))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def manifest(self, step: int) -> CheckpointManifest:
        """Read the manifest of a committed checkpoint and compare it with its mark."""
        key = self.folder(step) + MANIFEST
        try:
            content, mark = self.store.get(key), json.loads(self.store.get(self.folder(step) + MARK))
            if mark["manifest_sha256"] != hashlib.sha256(content).hexdigest():
                raise DamagedCheckpointError(f"{key} has not the SHA-256 that {MARK} names")
            return CheckpointManifest.model_validate_json(content)
        except MissingObjectError as error:
            raise DamagedCheckpointError(error.message) from None
        except (ValueError, KeyError, TypeError, ValidationError):
            raise DamagedCheckpointError(f"{key} or the mark {MARK} beside it cannot be understood") from None

    def verified(self, step: int) -> CheckpointManifest:
        """Read every object of a checkpoint back, and give the manifest only if size and SHA-256 of all of them are right."""
        manifest = self.manifest(step)
        with ThreadPoolExecutor(READERS) as pool:
            problems = [problem for problem in pool.map(lambda item: self._problem(step, item), manifest.objects) if problem]
        if problems:
            raise DamagedCheckpointError("; ".join(problems))
        return manifest

    def _problem(self, step: int, item: StoredObject) -> str | None:
        """Say what is wrong with one object, if anything is."""
        key = self.folder(step) + item.name
        try:
            size, sha256 = self.store.digest(key)
        except MissingObjectError:
            return f"{key} is missing"
        if size != item.bytes:
            return f"{key} has {size} bytes instead of {item.bytes}"
        return None if sha256 == item.sha256 else f"{key} has another SHA-256 than when it was written"

    def commit(self, manifest: CheckpointManifest) -> None:
        """Make a checkpoint exist: compare what the store holds with what was sent, then write manifest and mark."""
        folder = self.folder(manifest.step)
        sent = [Listed(folder + item.name, item.bytes) for item in sorted(manifest.objects, key=lambda item: item.name)]
        held = [listed for listed in self.store.listing(folder) if listed.size or listed.key != folder]
        if sorted(sent, key=lambda listed: listed.key) != held:
            raise StoreError(f"{self.store.uri(folder)} holds other objects than were written; another process writes there")
        content = manifest.model_dump_json(indent=1).encode()
        self.store.put(folder + MANIFEST, content)
        mark = {"step": manifest.step, "manifest_sha256": hashlib.sha256(content).hexdigest()}
        self.store.put_new(folder + MARK, json.dumps(mark).encode())

    def clear(self, step: int) -> None:
        """Remove what a dead attempt left of this step, or a damaged checkpoint that training has gone back behind."""
        self._delete(self.store.listing(self.folder(step)))

    def retain(self, newest: int, keep: int) -> None:
        """Delete everything but the `keep` newest committed checkpoints up to `newest`.

        What is newer was passed over as damaged when training went back, and what has no mark is debris. The newest one is read back first:
        as long as it is not proved, nothing older may go.
        """
        kept = [step for step in self.committed() if step <= newest][:keep]
        folders = tuple(self.folder(step) for step in kept)
        surplus = [listed for listed in self.store.listing(self.prefix) if not listed.key.startswith(folders)]
        if surplus:
            self.verified(newest)
            self._delete(surplus)

    def _delete(self, objects: list[Listed]) -> None:
        """Delete the marks first, so that a half-deleted checkpoint never counts as one."""
        for listed in sorted(objects, key=lambda listed: not listed.key.endswith("/" + MARK)):
            self.store.delete(listed.key)

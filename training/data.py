"""Reads a packed dataset: verified shards in a local cache, and a cursor that does not know how many processes there are."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.dataset import Manifest, Shard, read_manifest
from training.errors import DataError, StoreError
from training.store import MissingObjectError, Store

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Cursor:
    """Where training is in the data: `sample` windows of `epoch` have been seen, in the order that `seed` gives."""

    seed: int
    epoch: int = 0
    sample: int = 0

    def advanced(self, count: int, windows: int) -> "Cursor":
        """Move on by `count` samples of a dataset with `windows` windows."""
        epochs, sample = divmod(self.sample + count, windows)
        return Cursor(self.seed, self.epoch + epochs, sample)

    def to_dict(self) -> dict[str, int]:
        """Give the cursor as it is stored in a checkpoint."""
        return asdict(self)


class Sampler:
    """The order of the windows: each epoch is one permutation of all of them, whatever the batch or the number of processes."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self._cached: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def window(self, cursor: Cursor) -> int:
        """Give the window that the cursor points to."""
        key = (cursor.seed, cursor.epoch)
        if self._cached is None or self._cached[0] != key:
            self._cached = key, np.random.Generator(np.random.PCG64(key)).permutation(self.windows)
        return int(self._cached[1][cursor.sample])

    def share(self, cursor: Cursor, batch: int, rank: int) -> Iterator[int]:
        """Give the windows of one rank: its `batch` samples of the global batch that starts at the cursor."""
        for offset in range(rank * batch, (rank + 1) * batch):
            yield self.window(cursor.advanced(offset, self.windows))


class Tokens:
    """The tokens of a dataset as memory-mapped shards that read like one long array of fixed windows."""

    def __init__(self, folder: Path, manifest: Manifest, length: int) -> None:
        self._shards = [np.memmap(folder / shard.name, dtype=np.uint8, mode="r") for shard in manifest.shards]
        self._starts = np.cumsum([0, *(shard.bytes for shard in manifest.shards)])
        self.length = length
        self.windows = window_count(manifest, length)

    def window(self, index: int) -> NDArray[np.uint8]:
        """Give `length` tokens and the one after them; a window may reach over the end of a shard."""
        start, stop = index * self.length, (index + 1) * self.length + 1
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left")) - 1
        parts = [
            self._shards[shard][max(start - int(self._starts[shard]), 0) : stop - int(self._starts[shard])]
            for shard in range(first, last + 1)
        ]
        return np.concatenate(parts)


def window_count(manifest: Manifest, length: int) -> int:
    """Count the windows of `length` tokens that each have a next token."""
    windows = (manifest.tokens - 1) // length
    if windows < 1:
        raise DataError(
            f"the dataset {manifest.name} has {manifest.tokens} tokens, too few for one sequence of {length} (train.sequence_length)"
        )
    return windows


def find_dataset(store: Store, prefix: str) -> Manifest:
    """Read the manifest of a dataset that must be there."""
    manifest = read_manifest(store, prefix)
    if manifest is None:
        raise DataError(
            f"there is no dataset at {store.uri(prefix)} (no manifest.json): the preparation Job has not finished; see its events"
        )
    return manifest


def cache_folder(manifest: Manifest) -> Path:
    """Name the local folder of a dataset; its content's digest is in the name, so a changed dataset gets another folder."""
    return Path(tempfile.gettempdir()) / "trainyard" / "data" / manifest.sha256[:16]


def fetch(store: Store, prefix: str, manifest: Manifest) -> Path:
    """Bring every shard into the cache and verify it; a missing or damaged one is named in a DataError."""
    folder = cache_folder(manifest)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in manifest.shards:
        target = folder / shard.name
        if not (target.is_file() and _intact(target.read_bytes(), shard)):
            _write_whole(target, _download(store, f"{prefix}/{shard.name}", shard))
    _write_whole(folder / MANIFEST, manifest.to_json())
    return folder


def open_tokens(folder: Path, length: int) -> tuple[Tokens, Manifest]:
    """Open a dataset that `fetch` has brought into the cache."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    return Tokens(folder, manifest, length), manifest


def _download(store: Store, key: str, shard: Shard) -> bytes:
    """Get one shard and compare it with the manifest."""
    try:
        content = store.get(key)
    except MissingObjectError:
        raise DataError(
            f"the shard {store.uri(key)} is missing: delete the manifest.json beside it and prepare the dataset again"
        ) from None
    except StoreError as error:
        raise DataError(f"the shard {store.uri(key)} cannot be read: {error.message}") from None
    if not _intact(content, shard):
        raise DataError(
            f"the shard {store.uri(key)} is damaged (its size or SHA-256 is not that of the manifest): "
            "delete the manifest.json beside it and prepare the dataset again"
        )
    return content


def _intact(content: bytes, shard: Shard) -> bool:
    """Compare content with its manifest entry."""
    return len(content) == shard.bytes and hashlib.sha256(content).hexdigest() == shard.sha256


def _write_whole(target: Path, content: bytes) -> None:
    """Write a file so that it is either complete or absent."""
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"the shard cannot be cached at {target}: {error.strerror}; the dataset needs that space below TMPDIR") from None

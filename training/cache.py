"""The local cache of a dataset: whole, verified shards, shared by the processes of a node and bounded in bytes.

    <folder>/dataset-<sha>/<shard>             a verified shard. Who has it open holds a shared lock on it
    <folder>/dataset-<sha>/.<shard>.partial    a download. Its writer holds an exclusive lock on it
    <folder>/dataset-<sha>/.<shard>.lock       held by the one process that downloads the shard
    <folder>/.room                             held by the one process that makes room

All locks are flocks, which end with their process. What nobody holds may be deleted, least recently used first. Shards that are open are
never deleted, so they alone may exceed the limit.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from training.config import RunConfig
from training.dataset import Manifest, Shard
from training.errors import DataError, StoreError
from training.store import MissingObjectError, Store

PART = 16 << 20  # bytes of one ranged read
PARALLEL = 4  # ranged reads at a time
FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


def background(work: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Do something in a thread that the end of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def cache_folder(config: RunConfig) -> Path:
    """Name the folder of the cache, which may hold several datasets."""
    return Path(config.data.cache_folder or Path(tempfile.gettempdir()) / "trainyard" / "data")


class Cache:
    """The shards of one dataset as memory maps; threads and processes may share a folder."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest, folder: Path, limit_bytes: int | None) -> None:
        self._store, self._prefix, self._manifest = store, prefix, manifest
        self._folder, self._limit = folder, limit_bytes
        # The digest is in the name, so a changed dataset gets another folder.
        self._home = folder / f"dataset-{manifest.sha256[:16]}"
        self._verified: dict[str, int] = {}  # the inodes of the files that this process has verified

    def open(self, index: int) -> np.memmap:
        """Map a shard, brought here first if need be; it cannot be deleted from the cache while the map exists."""
        shard = self._manifest.shards[index]
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            file = self._present(shard)
            if file is None:
                with _locked(self._home / f".{shard.name}.lock"):
                    file = self._present(shard) or self._download(shard)
            with file:  # the map has its own descriptor of the same open file, and so the lock
                return np.memmap(file, dtype=self._manifest.token_type, mode="r")
        except OSError as error:
            raise self._explained(shard, error) from None

    def _present(self, shard: Shard) -> BinaryIO | None:
        """Open the shard if it is here, locked against deletion; the first time, compare it with the manifest."""
        try:
            file = (self._home / shard.name).open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        found = os.fstat(file.fileno())
        known = self._verified.get(shard.name) == found.st_ino
        if found.st_size == shard.bytes and (known or hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256):
            return self._used(file, shard)
        file.close()
        return None

    def _download(self, shard: Shard) -> BinaryIO:
        """Get the shard into the cache and give it as `_present` does."""
        partial = self._home / f".{shard.name}.partial"
        with _locked(self._folder / ".room"):
            file = partial.open("w+b")  # what a process that died left there is overwritten
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            self._reserve(file, shard.bytes)
            self._fill(file, shard)
            partial.replace(self._home / shard.name)
        except BaseException:
            partial.unlink(missing_ok=True)
            file.close()
            raise
        fcntl.flock(file, fcntl.LOCK_SH)
        return self._used(file, shard)

    def _used(self, file: BinaryIO, shard: Shard) -> BinaryIO:
        """Note that the file is good, and when it was last wanted."""
        self._verified[shard.name] = os.fstat(file.fileno()).st_ino
        with suppress(OSError):  # a cache that was filled beforehand may be mounted read-only
            os.utime(file.fileno(), ns=(now := time.time_ns(), now))  # finer than the kernel's own
        return file

    def _fill(self, file: BinaryIO, shard: Shard) -> None:
        """Write what the store has, and compare it with the manifest."""
        uri = self._store.uri(self._key(shard))
        mend = "delete the manifest.json beside it and prepare the dataset again"
        size, largest, digest = 0, 0, hashlib.sha256()
        try:
            for part in self._parts(shard):
                if size + len(part) != min(size + PART, shard.bytes):
                    break
                size += len(part)
                digest.update(part)
                largest = max(largest, int(np.frombuffer(part, self._manifest.token_type).max()))
                file.write(part)
        except MissingObjectError:
            raise DataError(f"the shard {uri} is missing: {mend}") from None
        except StoreError as error:
            if "InvalidRange" not in error.message:  # else the object ends before this part
                raise
        file.flush()
        if size != shard.bytes or digest.hexdigest() != shard.sha256:
            raise DataError(f"the shard {uri} is damaged (its size or SHA-256 is not that of the manifest): {mend}")
        if largest >= self._manifest.vocabulary:
            raise DataError(f"the shard {uri} has the token {largest}, but the vocabulary of its manifest is {self._manifest.vocabulary}")

    def _parts(self, shard: Shard) -> Iterator[bytes]:
        """Read the object in order, a few parts at a time; the last one asks for a byte more than there should be."""
        waiting: deque[Future[bytes]] = deque()
        for start in range(0, shard.bytes, PART):
            length = PART if start + PART < shard.bytes else shard.bytes + 1 - start
            waiting.append(background(self._store.get_range, self._key(shard), start, length))
            if len(waiting) == PARALLEL:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _reserve(self, file: BinaryIO, size: int) -> None:
        """Take the space of a whole shard before its first byte arrives, for which others may have to go."""
        with _locked(self._folder / ".room"):
            if self._limit is not None:
                self._free(sum(taken for _, taken, _ in self._files()) + size - self._limit)
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                os.ftruncate(file.fileno(), 0)
                self._free(size)
                os.posix_fallocate(file.fileno(), 0, size)

    def _files(self) -> list[tuple[int, int, Path]]:
        """List the time of the last use, the bytes and the path of every shard and partial file of all datasets, oldest first."""
        found = []
        for path in self._folder.glob("dataset-*/*"):
            with suppress(FileNotFoundError):
                if not path.match(".*.lock"):
                    found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        return sorted(found)

    def _free(self, wanted: int) -> None:
        """Delete the least recently used files that nobody has open, until as many bytes are free, or no such file is left."""
        for _, size, path in self._files():
            if wanted <= 0:
                return
            with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                wanted -= size

    def _key(self, shard: Shard) -> str:
        return f"{self._prefix}/{shard.name}"

    def _explained(self, shard: Shard, error: OSError) -> DataError:
        """Say what is wrong with the folder of the cache."""
        uri = self._store.uri(self._key(shard))
        if error.errno in FULL:
            free = shutil.disk_usage(self._folder).free
            mend = "give data.cache_folder a file system with more room, and data.cache_bytes what the cache may take of it"
            return DataError(f"the disk of the cache {self._folder} is full: {uri} needs {shard.bytes} bytes, {free} are free; {mend}")
        return DataError(f"the shard {uri} cannot be cached in {self._home}: {error.strerror} (data.cache_folder)")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only one, of all threads and processes, who holds this lock file."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The cache: whole and verified shards, within its bytes, one download for all who share it."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from training.cache import PART, Cache
from training.dataset import Manifest, Shard
from training.errors import DataError
from training.store import MissingObjectError

SIZE = 1000


class Shelf:
    """Objects in memory, read as the store reads them; it remembers what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.pause = 0.0

    def uri(self, key: str) -> str:
        return f"s3://shelf/{key}"

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append(key)
        time.sleep(self.pause)
        if key not in self.objects:
            raise MissingObjectError(f"{key} does not exist")
        return self.objects[key][start : start + length]


def fill(shelf: Shelf, *arrays: np.ndarray, prefix: str = "d", vocabulary: int = 65_536) -> Manifest:
    """Put shards on the shelf."""
    shards = []
    for number, array in enumerate(arrays):
        shelf.objects[f"{prefix}/{number}.bin"] = content = array.tobytes()
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(name=f"{number}.bin", bytes=len(content), tokens=len(array), sha256=digest))
    return Manifest(
        name=prefix,
        tokenizer="numbers",
        vocabulary=vocabulary,
        tokens=sum(map(len, arrays)),
        dtype=str(arrays[0].dtype),
        shards=tuple(shards),
    )


def numbers(count: int, seed: int = 0, kind: str = "uint16") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count).astype(kind)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def cached(folder: Path) -> dict[str, int]:
    """List the shards in the cache, and everything else but locks."""
    return {path.name: path.stat().st_size for path in folder.glob("dataset-*/*") if path.suffix != ".lock"}


def taken(folder: Path) -> int:
    """Sum up what the cache holds, of all datasets."""
    return sum(path.stat().st_size for path in folder.glob("dataset-*/*"))


@pytest.mark.parametrize("count", [1, PART // 2 - 1, PART // 2, PART // 2 + 1, 3 * PART + 5])
def test_a_shard_is_read_once_in_parts_and_then_from_the_disk(shelf: Shelf, tmp_path: Path, count: int) -> None:
    tokens = numbers(count)
    manifest = fill(shelf, tokens)
    cache = Cache(shelf, "d", manifest, tmp_path, None)
    assert np.array_equal(cache.open(0), tokens)
    assert len(shelf.reads) == -(-2 * count // PART)
    assert np.array_equal(cache.open(0), tokens)
    assert np.array_equal(Cache(shelf, "d", manifest, tmp_path, None).open(0), tokens)
    assert len(shelf.reads) == -(-2 * count // PART)
    assert cached(tmp_path) == {"0.bin": 2 * count}


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_tokens_have_the_type_of_the_manifest(shelf: Shelf, tmp_path: Path, kind: str) -> None:
    tokens = numbers(SIZE, kind=kind)
    opened = Cache(shelf, "d", fill(shelf, tokens), tmp_path, None).open(0)
    assert opened.dtype == np.dtype(kind)
    assert np.array_equal(opened, tokens)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, 10),
    "longer": lambda path: os.truncate(path, 10_000),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_in_the_cache_is_fetched_again(shelf: Shelf, tmp_path: Path, damage: str) -> None:
    tokens = numbers(SIZE)
    manifest = fill(shelf, tokens)
    Cache(shelf, "d", manifest, tmp_path, None).open(0)
    (path,) = tmp_path.glob("dataset-*/0.bin")
    DAMAGES[damage](path)
    assert np.array_equal(Cache(shelf, "d", manifest, tmp_path, None).open(0), tokens)
    assert len(shelf.reads) == 2


def test_a_file_that_lost_its_end_since_this_process_verified_it_is_fetched_again(shelf: Shelf, tmp_path: Path) -> None:
    tokens = numbers(SIZE)
    cache = Cache(shelf, "d", fill(shelf, tokens), tmp_path, None)
    cache.open(0)
    os.truncate(next(tmp_path.glob("dataset-*/0.bin")), 10)
    assert np.array_equal(cache.open(0), tokens)


def test_a_damaged_object_is_named_and_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    good = numbers(3 * PART)
    manifest = fill(shelf, good)
    content = good.tobytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for wrong in (bytes(flipped), content + b"\0", content[:-1], content[:PART], content[: PART + 1], b""):
        shelf.objects["d/0.bin"] = wrong
        with pytest.raises(DataError, match=r"s3://shelf/d/0.bin is damaged"):
            Cache(shelf, "d", manifest, tmp_path, None).open(0)
    del shelf.objects["d/0.bin"]
    with pytest.raises(DataError, match=r"s3://shelf/d/0.bin is missing"):
        Cache(shelf, "d", manifest, tmp_path, None).open(0)
    assert cached(tmp_path) == {}
    shelf.objects["d/0.bin"] = content
    assert np.array_equal(Cache(shelf, "d", manifest, tmp_path, None).open(0), good)


def test_a_token_beyond_the_vocabulary_never_enters(shelf: Shelf, tmp_path: Path) -> None:
    tokens = numbers(SIZE)
    tokens[500] = 300
    assert Cache(shelf, "d", fill(shelf, tokens, vocabulary=301), tmp_path, None).open(0).max() == 300
    with pytest.raises(DataError, match=r"s3://shelf/d/0.bin has the token 300, but the vocabulary of its manifest is 300"):
        Cache(shelf, "d", fill(shelf, tokens, vocabulary=300), tmp_path, None).open(0)


def test_the_least_recently_used_shard_goes_first_and_an_open_one_stays(shelf: Shelf, tmp_path: Path) -> None:
    manifest = fill(shelf, *(numbers(SIZE, seed) for seed in range(6)))
    cache = Cache(shelf, "d", manifest, tmp_path, 3 * 2 * SIZE)
    for index in (0, 1, 2, 0, 3):
        cache.open(index)
    assert set(cached(tmp_path)) == {"0.bin", "2.bin", "3.bin"}, "1 was used longest ago"
    oldest = cache.open(2)
    for index in (0, 3, 4):
        cache.open(index)
    assert set(cached(tmp_path)) == {"2.bin", "3.bin", "4.bin"}, "2 was used before 0, but is open"
    view = oldest[3:10]
    del oldest
    for index in (3, 4, 5):
        cache.open(index)
    assert set(cached(tmp_path)) == {"2.bin", "4.bin", "5.bin"}, "a part of 2 is still in use"
    assert np.array_equal(view, numbers(SIZE, 2)[3:10])
    del view
    for index in (4, 5, 0):
        cache.open(index)
    assert set(cached(tmp_path)) == {"4.bin", "5.bin", "0.bin"}


def test_other_datasets_and_debris_count_and_other_files_do_not(shelf: Shelf, tmp_path: Path) -> None:
    old = fill(shelf, numbers(SIZE), numbers(SIZE, 1), prefix="old")
    new = fill(shelf, numbers(SIZE, 2), numbers(SIZE, 3), prefix="new")
    foreign = tmp_path / "models" / "weights.bin"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(100 * SIZE))
    before = Cache(shelf, "old", old, tmp_path, None)
    for index in (0, 1):
        before.open(index)
    (next(tmp_path.glob("dataset-*")) / ".9.bin.partial").write_bytes(bytes(2 * SIZE))
    os.utime(next(tmp_path.glob("dataset-*/.9.bin.partial")), (1, 1))
    after = Cache(shelf, "new", new, tmp_path, 3 * 2 * SIZE)
    after.open(0)
    assert taken(tmp_path) == 3 * 2 * SIZE
    assert ".9.bin.partial" not in cached(tmp_path)
    after.open(1)
    assert taken(tmp_path) == 3 * 2 * SIZE
    assert foreign.stat().st_size == 100 * SIZE
    assert not list(tmp_path.glob(f"dataset-{old.sha256[:16]}/0.bin"))


def test_threads_that_want_one_shard_fetch_it_once(shelf: Shelf, tmp_path: Path) -> None:
    tokens = numbers(SIZE)
    manifest = fill(shelf, tokens)
    shelf.pause = 0.2
    caches = [Cache(shelf, "d", manifest, tmp_path, None) for _ in range(4)]
    opened: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda cache=cache: opened.append(cache.open(0))) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(tokens, each) for each in opened)
    assert len(opened) == 4
    assert len(shelf.reads) == 1


def test_a_folder_that_cannot_be_used_is_named(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be cached in .*/file/dataset-.*Not a directory.*data.cache_folder"):
        Cache(shelf, "d", fill(shelf, numbers(SIZE)), tmp_path / "file", None).open(0)

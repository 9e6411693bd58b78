"""The way of the data from a real bucket through the cache to the batches of a rank."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Until
from training.cache import PART, Cache
from training.config import RunConfig
from training.data import Loader
from training.dataset import Cursor, Manifest, Sampler, Shard, find_dataset, read_manifest, split
from training.errors import DataError, StoreError
from training.events import Events
from training.prepare import warm
from training.store import Store

from .lab import BUCKET, REPOSITORY, Lab

LENGTH, HELD_OUT = 16, 5
COUNTS = [401, 97, 17, 16, 640, 333]  # tokens: 25, 6, 1, 0, 39 and 20 windows
WINDOWS = 25 + 6 + 1 + 39 + 20 - HELD_OUT


@pytest.fixture
def bucket(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Let this process reach the store as a pod does."""
    for name, value in lab.gateway.environment.items():
        monkeypatch.setenv(name, value)
    return Store(BUCKET)


def publish(lab: Lab, prefix: str, arrays: list[np.ndarray], vocabulary: int) -> Manifest:
    """Put a dataset into the bucket that no program of this project has packed."""
    shards = []
    for number, array in enumerate(arrays):
        name, content = f"part_{number}.tokens", array.tobytes()
        lab.put(f"{prefix}/{name}", content)
        shards.append(Shard(name=name, bytes=len(content), tokens=len(array), sha256=hashlib.sha256(content).hexdigest()))
    described = {"name": prefix, "tokenizer": "other", "vocabulary": vocabulary, "dtype": str(arrays[0].dtype)}
    manifest = {**described, "tokens": sum(map(len, arrays)), "shards": [shard.model_dump() for shard in shards]}
    lab.put(f"{prefix}/manifest.json", json.dumps(manifest).encode())
    return Manifest.model_validate(manifest)


def counting(counts: list[int], kind: str = "uint16") -> list[np.ndarray]:
    """Make shards in which every token is there once: the token tells where it was read."""
    return np.split(np.arange(sum(counts), dtype=kind), np.cumsum(counts)[:-1])


def configured(lab: Lab, prefix: str, folder: Path, processes: int = 1, **changes: Any) -> RunConfig:
    data = {"prefix": prefix, "cache_folder": str(folder), "validation_windows": HELD_OUT, "shuffle_shards": 2}
    train = {"batch_size": 8 // processes, "sequence_length": LENGTH}
    sections = {"data": {**data, **changes.pop("data", {})}, "train": {**train, **changes.pop("train", {})}}
    return RunConfig.model_validate(lab.config("data", model="llama-160m", processes=processes, **sections, **changes))


def loaders(lab: Lab, config: RunConfig, cursor: Cursor) -> list[Loader]:
    manifest = find_dataset(Store(config.data_bucket), config.data.prefix)
    ranks = [Loader(config, manifest, data_rank=rank) for rank in range(config.data_degree)]
    for loader in ranks:
        loader.seek(cursor)
    return ranks


def read(lab: Lab, config: RunConfig, cursor: Cursor, steps: int) -> tuple[torch.Tensor, Cursor]:
    """Take some steps with all ranks and give the samples in their global order."""
    ranks = loaders(lab, config, cursor)
    batches = [torch.stack([loader.next() for loader in ranks], dim=1) for _ in range(steps)]
    (reached,) = {loader.cursor for loader in ranks}
    for loader in ranks:
        loader.close()
    return torch.cat(batches).reshape(-1, config.train.sequence_length + 1), reached


@pytest.fixture(scope="module")
def numbered(lab: Lab) -> str:
    publish(lab, "datasets/numbered", counting(COUNTS), 2000)
    return "datasets/numbered"


def test_every_window_is_seen_once_an_epoch_and_those_held_out_never(lab: Lab, bucket: Store, numbered: str, tmp_path: Path) -> None:
    config = configured(lab, numbered, tmp_path, train={"batch_size": WINDOWS})
    seen, cursor = read(lab, config, Cursor(5), steps=2)
    assert cursor == Cursor(5, 2, 0)
    assert seen.dtype == torch.int64
    firsts = [[*range(start, start + count - LENGTH, LENGTH)] for start, count in zip(np.cumsum([0, *COUNTS]), COUNTS, strict=False)]
    expected = [first for shard in firsts for first in shard]
    for epoch in seen.split(WINDOWS):
        assert sorted(epoch[:, 0].tolist()) == expected[:-HELD_OUT]
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(LENGTH + 1))
    assert not torch.equal(*seen.split(WINDOWS))

    (loader,) = loaders(lab, config, Cursor(5))
    held_out = loader.validation()
    assert held_out[:, 0].tolist() == expected[-HELD_OUT:]
    assert torch.equal(held_out, held_out[:, :1] + torch.arange(LENGTH + 1))
    loader.close()


def test_4_to_2_to_4_processes_and_any_micro_steps_see_the_same_samples_in_the_same_order(
    lab: Lab, bucket: Store, numbered: str, tmp_path: Path
) -> None:
    steady, end = read(lab, configured(lab, numbered, tmp_path), Cursor(7), steps=14)
    cursor, parts = Cursor(7), []
    for processes, accumulation, steps in [(4, 1, 3), (2, 1, 4), (4, 2, 2), (1, 4, 1), (4, 1, 4)]:
        train = {"batch_size": 8 // processes // accumulation, "accumulation": accumulation}
        part, cursor = read(lab, configured(lab, numbered, tmp_path, processes, train=train), Cursor(**cursor.to_dict()), steps)
        parts.append(part)
    assert torch.equal(torch.cat(parts), steady)
    assert cursor == end
    assert len(set(steady[:WINDOWS, 0].tolist())) == WINDOWS


@pytest.mark.parametrize("sample", [0, 1, 37, WINDOWS - 3])
def test_reading_goes_on_at_any_place(lab: Lab, bucket: Store, numbered: str, tmp_path: Path, sample: int) -> None:
    config = configured(lab, numbered, tmp_path, train={"batch_size": 1})
    whole, _ = read(lab, config, Cursor(7), steps=WINDOWS + 20)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    resumed, cursor = read(lab, config, Cursor(7, 0, sample), steps=20)
    assert torch.equal(resumed, whole[sample : sample + 20])
    assert cursor == Cursor(7).advanced(sample + 20, WINDOWS)
    assert torch.equal(torch.get_rng_state(), state), "the order must not depend on torch's random state, nor change it"


def test_a_loader_can_be_sent_elsewhere_and_measures_how_long_it_blocks(lab: Lab, bucket: Store, numbered: str, tmp_path: Path) -> None:
    (loader,) = loaders(lab, configured(lab, numbered, tmp_path), Cursor(7))
    first, second = loader.next(), loader.next()
    assert loader.wait_seconds > 0
    loader.seek(Cursor(7))
    assert torch.equal(loader.next(), first)
    assert loader._prepared is not None
    loader._prepared.result()
    waited = loader.wait_seconds
    assert torch.equal(loader.next(), second)
    assert loader.wait_seconds - waited < 0.05, "it was ready"
    loader.seek(Cursor(7, 0, WINDOWS + 3))  # of a larger dataset, which the run file said may change
    assert loader.cursor == Cursor(7, 1, 3)
    loader.next()
    assert loader.cursor == Cursor(7, 1, 11)
    loader.close()


def test_a_small_cache_is_enough_for_the_whole_dataset(lab: Lab, bucket: Store, numbered: str, tmp_path: Path) -> None:
    limit = 2 * (640 + 401 + 333 + 97)
    large, _ = read(lab, configured(lab, numbered, tmp_path / "large"), Cursor(7), steps=40)
    small, _ = read(lab, configured(lab, numbered, tmp_path / "small", data={"cache_bytes": limit}), Cursor(7), steps=40)
    assert torch.equal(small, large)
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.tokens")) <= limit
    assert sum(path.stat().st_size for path in (tmp_path / "large").rglob("*.tokens")) == 2 * (sum(COUNTS) - 16), "one has no window"


def test_what_goes_wrong_in_the_thread_is_told_by_next(lab: Lab, bucket: Store, tmp_path: Path) -> None:
    prefix = "datasets/broken"
    publish(lab, prefix, counting([200]), 200)
    (good,) = loaders(lab, configured(lab, prefix, tmp_path / "good"), Cursor(1))
    good.next()
    good.close()
    publish(lab, prefix, counting([200]), 150)
    (strange,) = loaders(lab, configured(lab, prefix, tmp_path / "strange"), Cursor(1))
    with pytest.raises(
        DataError, match=rf"s3://{BUCKET}/{prefix}/part_0.tokens has the token 199, but the vocabulary of its manifest is 150"
    ):
        strange.next()
    lab.flip_bit(f"{prefix}/part_0.tokens")
    (flipped,) = loaders(lab, configured(lab, prefix, tmp_path / "flipped"), Cursor(1))
    with pytest.raises(DataError, match=rf"s3://{BUCKET}/{prefix}/part_0.tokens is damaged"):
        flipped.next()
    for length in (0, 399):
        lab.put(f"{prefix}/part_0.tokens", counting([200])[0].tobytes()[:length])
        (short,) = loaders(lab, configured(lab, prefix, tmp_path / "short"), Cursor(1))
        with pytest.raises(DataError, match=rf"s3://{BUCKET}/{prefix}/part_0.tokens is damaged"):
            short.next()
    lab.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/part_0.tokens")
    (missing,) = loaders(lab, configured(lab, prefix, tmp_path / "missing"), Cursor(1))
    for _ in range(2):
        with pytest.raises(DataError, match=r"part_0\.tokens is missing"):
            missing.next()


def test_a_manifest_of_an_older_program_is_packed_anew_and_otherwise_refused(lab: Lab, bucket: Store) -> None:
    config = lab.config("old", data={"prefix": "datasets/old", "name": "old"})
    lab.put("datasets/old/manifest.json", json.dumps({"name": "old", "tokens": 3, "dtype": "uint8", "files": 1}).encode())
    with pytest.raises(DataError, match=r"datasets/old/manifest.json is not a dataset manifest \(tokenizer Field required\)"):
        read_manifest(bucket, "datasets/old")
    told = lab.run(config, "training.prepare")
    assert told.code == 0, told.errors
    manifest = find_dataset(bucket, "datasets/old")
    assert (manifest.tokenizer, manifest.vocabulary, manifest.dtype) == ("bytes", 256, "uint8")


def test_a_small_cache_is_filled_with_what_is_read_first(lab: Lab, bucket: Store, numbered: str, tmp_path: Path) -> None:
    limit = 2 * (sum(COUNTS) - 16) - 2
    config = configured(lab, numbered, tmp_path, data={"cache_bytes": limit})
    told = io.StringIO()
    warm(config, Events("warm", 1, told))
    last = json.loads(told.getvalue().splitlines()[-1])
    assert (last["shard"], last["shards"], last["done"]) == (4, 4, True)
    assert last["bytes"] <= limit
    manifest = find_dataset(bucket, numbered)
    windows, _ = split(manifest, LENGTH, HELD_OUT)
    kept = {path.name for path in tmp_path.rglob("part*")}
    first = [f"part_{shard}.tokens" for shard in Sampler(windows, 2).shards(Cursor(1234))]
    assert kept == {"part_5.tokens", *[name for name in first if name != "part_5.tokens"][:3]}, "the held-out windows are in part 5"


def test_a_cache_can_be_filled_beforehand(lab: Lab, bucket: Store, numbered: str, tmp_path: Path) -> None:
    config = configured(lab, numbered, tmp_path)
    path = tmp_path / "run.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "training.prepare", "--warm", "--config", path]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    events = [json.loads(line) for line in told.splitlines()]
    assert [(event["shard"], event["done"]) for event in events] == [(1, False), (2, False), (3, False), (4, False), (5, True)]
    assert events[-1]["bytes"] == 2 * (sum(COUNTS) - 16)

    lab.client.copy_object(Bucket=BUCKET, Key="datasets/gone/manifest.json", CopySource=f"{BUCKET}/{numbered}/manifest.json")
    seen, _ = read(lab, configured(lab, "datasets/gone", tmp_path), Cursor(7), steps=14)
    assert torch.equal(seen, read(lab, config, Cursor(7), steps=14)[0]), "the shards came from the cache: there are no others"

    path.write_text(
        configured(lab, numbered, tmp_path)
        .model_copy(update={"data": config.data.model_copy(update={"cache_folder": None})})
        .model_dump_json()
    )
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode == 44
    assert "data.cache_folder" in json.loads(refused.stdout)["message"]


PROGRAM = """
import hashlib, os, sys, time
from pathlib import Path
from training.cache import Cache
from training.dataset import find_dataset
from training.errors import DataError
from training.store import Store

class Counted(Store):
    def get_range(self, key, start, length):
        with open(log, "a") as file:
            file.write(f"{key} {start}\\n")
        if start >= stop:
            time.sleep(600)
        return super().get_range(key, start, length)

prefix, folder, log, stop = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
store = Counted("lab")
manifest = find_dataset(store, prefix)
cache = Cache(store, prefix, manifest, folder, None)
print("ready", flush=True)
sys.stdin.readline()
try:
    for index, shard in enumerate(manifest.shards):
        assert hashlib.sha256(cache.open(index)).hexdigest() == shard.sha256
        print(shard.name, sum(path.stat().st_size for path in folder.rglob("part*")), flush=True)
except DataError as error:
    print(error.message)
    sys.exit(error.code)
"""


class Reader(subprocess.Popen[str]):
    """A process that reads every shard when it is told to; a ranged read from `stop` on never ends."""

    def __init__(self, prefix: str, folder: Path, stop: int = 10**12) -> None:
        command = [sys.executable, "-c", PROGRAM, prefix, folder / "cache", folder / "log", str(stop)]
        super().__init__(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.stdout is not None
        assert self.stdout.readline() == "ready\n"

    def begin(self) -> None:
        assert self.stdin is not None
        self.stdin.write("\n")
        self.stdin.flush()

    def end(self) -> list[str]:
        told, _ = self.communicate(timeout=60)
        assert self.returncode == 0
        return told.splitlines()


def test_processes_that_share_a_cache_fetch_each_part_of_each_shard_once(lab: Lab, bucket: Store, tmp_path: Path) -> None:
    sizes = [2 * PART + 100, 1000, PART, 5000, 77]
    publish(lab, "datasets/shared", [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes], 256)
    with Reader("datasets/shared", tmp_path) as first, Reader("datasets/shared", tmp_path) as second:
        first.begin()
        second.begin()
        assert len(first.end()) == len(second.end()) == len(sizes)
    reads = (tmp_path / "log").read_text().splitlines()
    assert len(reads) == len(set(reads)) == 3 + 1 + 1 + 1 + 1


def test_a_download_that_was_killed_is_begun_anew_by_the_next(lab: Lab, bucket: Store, tmp_path: Path, until: Until) -> None:
    size = 3 * PART
    publish(lab, "datasets/killed", [np.random.default_rng(1).integers(0, 256, size, np.uint8)], 256)
    with Reader("datasets/killed", tmp_path, stop=PART) as first, Reader("datasets/killed", tmp_path) as second:
        try:
            first.begin()
            until("a partial file", lambda: list((tmp_path / "cache").rglob("*.partial")))
            second.begin()
            time.sleep(0.5)
            assert second.poll() is None, "it waits for the first"
        finally:
            first.send_signal(signal.SIGKILL)
        assert second.end() == [f"part_0.tokens {size}"]
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a small disk")
def test_on_a_full_disk_the_oldest_goes_and_what_cannot_fit_is_explained(lab: Lab, bucket: Store, tmp_path: Path) -> None:
    sizes = [400_000] * 4 + [2_000_000]
    publish(
        lab, "datasets/full", [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)], 256
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$0" "$@"'
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        mounted,
        sys.executable,
        "-c",
        PROGRAM,
        "datasets/full",
        disk,
        tmp_path / "log",
        str(10**12),
        "0",
    ]
    ended = subprocess.run(command, cwd=REPOSITORY, input="\n", capture_output=True, text=True, check=False)
    ready, *shards, message = ended.stdout.splitlines()
    assert (ready, ended.returncode) == ("ready", 45), ended.stderr
    assert [shard.split()[0] for shard in shards] == [f"part_{number}.tokens" for number in range(4)]
    assert int(shards[-1].split()[1]) == 800_000, "two of the four are kept"
    for part in (f"the cache {disk} is full", "part_4.tokens needs 2000000 bytes", "data.cache_folder", "data.cache_bytes"):
        assert part in message
    assert not ended.stderr


def test_the_store_that_does_not_answer_is_not_a_fault_of_the_data(
    lab: Lab, bucket: Store, numbered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = find_dataset(bucket, numbered)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="did not answer"):
        Cache(Store(BUCKET), numbered, manifest, tmp_path, None).open(0)


def test_the_dataset_of_the_lab_has_windows_for_everybody(lab: Lab, bucket: Store) -> None:
    windows, held_out = split(find_dataset(bucket, "datasets/prose"), 64, 32)
    assert len(held_out) == 32
    assert sum(windows) > 10_000

"""How fast tokens are read, with and without the local cache: `python benchmarks/data_cache.py [--write]`.

A dataset of random tokens in a real S3 server on this machine is read whole, round after round, in each of these ways, interleaved so that
a busy machine slows all of them. Prints a table of medians; with `--write` it goes to `benchmarks/data_cache.md` as well.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from tests.trainer.gateway import Gateway  # noqa: E402
from training.cache import Cache  # noqa: E402
from training.config import RunConfig  # noqa: E402
from training.data import Loader  # noqa: E402
from training.dataset import Cursor, Manifest, Shard  # noqa: E402
from training.store import Store  # noqa: E402

RESULT = PROJECT / "benchmarks" / "data_cache.md"
BUCKET, PREFIX = "bench", "datasets/random"
SHARDS, SHARD_BYTES, VOCABULARY = 4, 64 << 20, 32_000
LENGTH, BATCH = 2048, 16


def publish(gateway: Gateway) -> Manifest:
    """Put the dataset into the bucket."""
    gateway.client.create_bucket(Bucket=BUCKET)
    shards = []
    for number in range(SHARDS):
        content = np.random.default_rng(number).integers(0, VOCABULARY, SHARD_BYTES // 2, np.uint16).tobytes()
        shard = Shard(name=f"{number}.bin", bytes=len(content), tokens=len(content) // 2, sha256=hashlib.sha256(content).hexdigest())
        gateway.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{shard.name}", Body=content)
        shards.append(shard)
    tokens = sum(shard.tokens for shard in shards)
    return Manifest(name="random", tokenizer="random", vocabulary=VOCABULARY, tokens=tokens, dtype="uint16", shards=tuple(shards))


def configured(folder: Path) -> RunConfig:
    """Describe a run that reads the dataset."""
    train = {"steps": 1, "batch_size": BATCH, "sequence_length": LENGTH, "learning_rate": 1, "warmup_steps": 0, "weight_decay": 0}
    return RunConfig.model_validate(
        {
            "run": "bench",
            "bucket": BUCKET,
            "model": "llama-160m",
            "data": {"name": "random", "prefix": PREFIX, "source": "s3://bench/datasets/random", "cache_folder": str(folder)},
            "train": {**train, "grad_clip": 1, "seed": 1, "log_every": 1},
            "checkpoint": {"every_steps": 1},
            "processes": 1,
            "grace_seconds": 1,
        }
    )


class Ways:
    """The ways of reading the whole dataset; each gives the bytes that it has read."""

    def __init__(self, gateway: Gateway, manifest: Manifest, folder: Path) -> None:
        self._gateway, self._manifest, self._folder = gateway, manifest, folder
        self._store = Store(BUCKET)
        self._warm: Cache | None = None

    def _cache(self) -> Cache:
        """Give a cache as a process has it that has just begun."""
        return Cache(self._store, PREFIX, self._manifest, self._folder, None)

    def _read(self, cache: Cache) -> int:
        """Open every shard and read every token once."""
        size = 0
        for index in range(SHARDS):
            tokens = cache.open(index)
            assert tokens.max() < VOCABULARY
            size += tokens.nbytes
        return size

    def _objects(self) -> Iterator[tuple[Shard, bytes]]:
        """Get each object whole into memory, one after the other."""
        for shard in self._manifest.shards:
            content = self._gateway.client.get_object(Bucket=BUCKET, Key=f"{PREFIX}/{shard.name}")["Body"].read()
            assert np.frombuffer(content, np.uint16).max() < VOCABULARY
            yield shard, content

    def memory(self) -> int:
        """Read with boto3, neither verified nor kept."""
        return sum(len(content) for _, content in self._objects())

    def file(self) -> int:
        """Read with boto3, and do what a miss does: verify and keep."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        size = 0
        for shard, content in self._objects():
            assert hashlib.sha256(content).hexdigest() == shard.sha256
            size += (self._folder / shard.name).write_bytes(content)
        return size

    def miss(self) -> int:
        """Read through an empty cache."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._read(self._cache())

    def first_hit(self) -> int:
        """Read what is there with a process that has not verified it yet."""
        self._warm = self._cache()
        return self._read(self._warm)

    def hit(self) -> int:
        """Read what this process has verified."""
        assert self._warm is not None
        return self._read(self._warm)

    def batches(self) -> int:
        """Take one epoch's batches from the loader, shuffled, as int64 tensors; the bytes are those of the tokens as stored."""
        loader = Loader(configured(self._folder), self._manifest, data_rank=0)
        loader.seek(Cursor(1))
        count = SHARDS * ((SHARD_BYTES // 2 - 1) // LENGTH) // BATCH - 2
        for _ in range(count):
            loader.next()
        loader.close()
        return count * BATCH * LENGTH * 2


def measure(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Give the MB/s of each way in each round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            size = way()
            rates[name].append(size / 1e6 / (time.perf_counter() - began))
    return rates


def table(rates: dict[str, list[float]], rounds: int, load: float) -> str:
    """Return the result as Markdown."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores of {model[1] if model else platform.processor()}, {memory:.0f} GiB, Linux {platform.release()}"
    memory, file = (statistics.median(each) for each in list(rates.values())[:2])
    rows = [
        f"| {name} | {statistics.median(each):,.0f} | {min(each):,.0f} to {max(each):,.0f} "
        f"| {statistics.median(each) / memory:.2f} | {statistics.median(each) / file:.2f} |"
        for name, each in rates.items()
    ]
    return "\n".join(
        [
            "# Reading tokens through the cache",
            "",
            f"Written by `benchmarks/data_cache.py` on {time.strftime('%Y-%m-%d')}. Machine: {machine}.",
            f"{SHARDS} shards of {SHARD_BYTES >> 20} MiB; the S3 server runs on the same machine and shares its cores; "
            f"medians of {rounds} interleaved rounds. The disk's page cache is warm.",
            f"Load average when it began: {load:.1f}.",
            "",
            "| way | MB/s | lowest to highest | times boto3 into memory | times boto3 to files |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measure, print the table, and write it if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="data-cache-"))
    gateway = Gateway(folder / "store")
    os.environ.update(gateway.environment)
    try:
        ways = Ways(gateway, publish(gateway), folder / "cache")
        named = {
            "boto3 get_object of whole shards, into memory": ways.memory,
            "boto3 get_object of whole shards, verified, written to files": ways.file,
            "cache miss: fetched, verified, kept, mapped": ways.miss,
            "cache hit, first use in a process: verified": ways.first_hit,
            "cache hit, later": ways.hit,
            "batches of the loader from a full cache (shuffled, int64)": ways.batches,
        }
        load = os.getloadavg()[0]
        told = table(measure(named, arguments.rounds), arguments.rounds, load)
    finally:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(told)
    if arguments.write:
        RESULT.write_text(told)


if __name__ == "__main__":
    sys.exit(main())

"""The order of the data belongs to the run, not to the number of processes."""

from pathlib import Path

import numpy as np
import pytest

from training.data import Cursor, Sampler, Tokens, window_count
from training.dataset import Manifest, Shard
from training.errors import DataError

GLOBAL_BATCH = 8
DIGEST = "0" * 64


def samples(sampler: Sampler, cursor: Cursor, steps: int, ranks: int) -> tuple[list[int], Cursor]:
    """Walk some steps with some number of ranks; the samples of a step in the order of the ranks."""
    seen: list[int] = []
    for _ in range(steps):
        for rank in range(ranks):
            seen += sampler.share(cursor, GLOBAL_BATCH // ranks, rank)
        cursor = cursor.advanced(GLOBAL_BATCH, sampler.windows)
    return seen, cursor


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_epoch_shows_every_sample_once(ranks: int) -> None:
    seen, cursor = samples(Sampler(64), Cursor(seed=7), steps=8, ranks=ranks)
    assert sorted(seen) == list(range(64))
    assert cursor == Cursor(seed=7, epoch=1, sample=0)


def test_a_run_that_changes_from_4_to_2_to_4_processes_sees_what_a_steady_one_sees() -> None:
    steady, _ = samples(Sampler(64), Cursor(seed=7), steps=8, ranks=4)
    changing: list[int] = []
    cursor = Cursor(seed=7)
    for steps, ranks in [(3, 4), (2, 2), (3, 4)]:
        part, cursor = samples(Sampler(64), Cursor(**cursor.to_dict()), steps, ranks)
        changing += part
    assert changing == steady


def test_epochs_and_seeds_differ_in_order_and_a_batch_may_span_two_epochs() -> None:
    seen, cursor = samples(Sampler(20), Cursor(seed=7), steps=5, ranks=2)
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert cursor == Cursor(seed=7, epoch=2, sample=0)
    assert samples(Sampler(20), Cursor(seed=8), steps=5, ranks=2)[0] != seen


def dataset(folder: Path, sizes: list[int]) -> tuple[Manifest, bytes]:
    """Write shards that count upwards over their borders."""
    content = bytes(index % 251 for index in range(sum(sizes)))
    shards, start = [], 0
    for number, size in enumerate(sizes):
        name = f"shard-{number:05d}.bin"
        (folder / name).write_bytes(content[start : start + size])
        shards.append(Shard(name=name, bytes=size, sha256=DIGEST))
        start += size
    manifest = Manifest(name="count", tokens=len(content), dtype="uint8", files=1, source_fingerprint=DIGEST, shards=tuple(shards))
    return manifest, content


def test_windows_reach_over_the_ends_of_shards(tmp_path: Path) -> None:
    manifest, content = dataset(tmp_path, [100, 100, 3, 50])
    tokens = Tokens(tmp_path, manifest, length=21)
    assert tokens.windows == 12
    for index in range(tokens.windows):
        assert np.array_equal(tokens.window(index), np.frombuffer(content[index * 21 : index * 21 + 22], dtype=np.uint8))


def test_a_dataset_without_one_whole_window_is_refused(tmp_path: Path) -> None:
    manifest, _ = dataset(tmp_path, [10])
    assert window_count(manifest, 9) == 1
    with pytest.raises(DataError, match="10 tokens, too few for one sequence of 10"):
        window_count(manifest, 10)

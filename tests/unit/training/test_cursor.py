"""The order of the data belongs to the run, not to the number of processes."""

from typing import Any

import numpy as np
import pytest

from training.config import RunConfig
from training.dataset import Cursor, Manifest, Place, Sampler, Shard, check_fits, split
from training.errors import DATA, DataError
from training.models import MODELS

GLOBAL_BATCH = 8
DIGEST = "0" * 64
COUNTS = [9, 0, 14, 3, 21, 7, 10]  # windows for training of each shard: 64 in all


def samples(sampler: Sampler, cursor: Cursor, steps: int, ranks: int) -> tuple[list[Place], Cursor]:
    """Walk some steps with some number of ranks; the samples of a step in the order of the ranks."""
    seen: list[Place] = []
    share = GLOBAL_BATCH // ranks
    for _ in range(steps):
        for rank in range(ranks):
            seen += [sampler.place(cursor.advanced(offset, sampler.windows)) for offset in range(rank * share, (rank + 1) * share)]
        cursor = cursor.advanced(GLOBAL_BATCH, sampler.windows)
    return seen, cursor


def every_window() -> list[Place]:
    return [Place(shard, window) for shard, count in enumerate(COUNTS) for window in range(count)]


def manifest_of(*tokens: int, vocabulary: int = 256) -> Manifest:
    shards = tuple(Shard(name=f"part.{number}", bytes=2 * count, tokens=count, sha256=DIGEST) for number, count in enumerate(tokens))
    return Manifest(name="count", tokenizer="t", vocabulary=vocabulary, tokens=sum(tokens), dtype="uint16", shards=shards)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 2, 4, 100])
def test_an_epoch_shows_every_sample_once(ranks: int, group: int) -> None:
    seen, cursor = samples(Sampler(COUNTS, group), Cursor(seed=7), steps=8, ranks=ranks)
    assert sorted(seen) == every_window()
    assert cursor == Cursor(seed=7, epoch=1, sample=0)


def test_a_run_that_changes_from_4_to_2_to_4_processes_sees_what_a_steady_one_sees() -> None:
    steady, _ = samples(Sampler(COUNTS, 2), Cursor(seed=7), steps=12, ranks=4)
    changing: list[Place] = []
    cursor = Cursor(seed=7)
    for steps, ranks in [(3, 4), (2, 2), (7, 4)]:
        part, cursor = samples(Sampler(COUNTS, 2), Cursor(**cursor.to_dict()), steps, ranks)
        changing += part
    assert changing == steady
    assert sorted(changing[:64]) == every_window()


def test_epochs_and_seeds_differ_in_order_and_a_batch_may_span_two_epochs() -> None:
    counts = [8, 12]
    seen, cursor = samples(Sampler(counts, 2), Cursor(seed=7), steps=5, ranks=2)
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 20
    assert first != second
    assert cursor == Cursor(seed=7, epoch=2, sample=0)
    assert samples(Sampler(counts, 2), Cursor(seed=8), steps=5, ranks=2)[0] != seen


def test_only_the_windows_of_one_group_of_shards_are_mixed() -> None:
    sampler = Sampler(COUNTS, 2)
    seen, _ = samples(sampler, Cursor(seed=7), steps=8, ranks=1)
    order = sampler.shards(Cursor(seed=7))
    groups = [order[start : start + 2] for start in range(0, 6, 2)]
    assert sorted(order) == [0, 2, 3, 4, 5, 6], "a shard without a window is never read"
    assert len({tuple(sampler.shards(Cursor(7, epoch))) for epoch in range(9)}) > 1, "each epoch has its own order of shards"
    start = 0
    for number, group in enumerate(groups):
        count = sum(COUNTS[shard] for shard in group)
        part = seen[start : start + count]
        assert {place.shard for place in part} == set(group)
        assert part != sorted(part), "and they are mixed"
        following = groups[number + 1] if number < 2 else sampler.shards(Cursor(7, 1))[:2]
        assert sampler.near(Cursor(7, 0, start + count - 1)) == group + following
        start += count


def test_memory_is_that_of_a_group_and_not_of_the_dataset() -> None:
    windows = 200_000
    sampler = Sampler([windows] * 10_000, 4)
    place = sampler.place(Cursor(1, 3, 1_234_567_890))
    assert 0 <= place.window < windows
    assert len(sampler._mixed(1, 3, 1_234_567_890 // (4 * windows))[2]) == 4 * windows


def test_windows_end_with_their_shard_and_the_last_ones_are_held_out() -> None:
    # Of 9 tokens and the next one: 22 tokens have 2 windows, 19 have 2, 18 have 1, 9 have none.
    windows, held_out = split(manifest_of(22, 19, 9, 18), length=9, held_out=2)
    assert windows == [2, 1, 0, 0]
    assert held_out == [(1, 1), (3, 0)]
    assert np.sum(windows) + len(held_out) == 5


def test_a_dataset_with_too_few_windows_is_refused_with_the_numbers() -> None:
    assert split(manifest_of(10, 19), length=9, held_out=2) == ([1, 0], [(1, 0), (1, 1)])
    with pytest.raises(
        DataError, match=r"10 tokens, too few: in its 1 shard\(s\) they are 1 whole sequence\(s\) of 9 .* and 1 are held out"
    ) as error:
        split(manifest_of(10), length=9, held_out=1)
    assert "2 are needed" in error.value.message
    assert error.value.code == DATA


def config(**data: int) -> RunConfig:
    train = {"steps": 1, "batch_size": 1, "sequence_length": 9, "learning_rate": 1, "warmup_steps": 0, "weight_decay": 0, "grad_clip": 1}
    return RunConfig.model_validate(
        {
            "run": "r",
            "bucket": "b",
            "model": "byte-1m",
            "data": {"name": "count", "prefix": "p", "source": "s", "validation_windows": 1, **data},
            "train": {**train, "seed": 1, "log_every": 1},
            "checkpoint": {"every_steps": 1},
            "processes": 1,
            "grace_seconds": 1,
        }
    )


def test_a_dataset_must_fit_the_model_the_length_and_the_cache() -> None:
    shape = MODELS["byte-1m"]
    check_fits(manifest_of(100, 100, 100), shape, config(shuffle_shards=1, cache_bytes=400))
    with pytest.raises(DataError, match=r"vocabulary of 257 \(tokenizer t\), the model byte-1m one of 256"):
        check_fits(manifest_of(100, vocabulary=257), shape, config())
    with pytest.raises(DataError, match="too few"):
        check_fits(manifest_of(12), shape, config())
    with pytest.raises(DataError, match=r"data.cache_bytes is 399, but the dataset count needs 400: 1 shards .*data.shuffle_shards"):
        check_fits(manifest_of(100, 100, 100), shape, config(shuffle_shards=1, cache_bytes=399))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "uint32"}, "part.0 has 10 bytes, but 5 tokens of 4 bytes"),
        ({"tokens": 12}, "do not add up to 12 tokens"),
        ({"shards": manifest_of(5, 5).shards[:1] * 2, "tokens": 10}, "two have one name"),
        ({"dtype": "int64"}, "dtype"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(changes: dict[str, Any], told: str) -> None:
    good = manifest_of(5, 6)
    assert Manifest.model_validate_json(good.to_json()) == good
    with pytest.raises(ValueError, match=told):
        Manifest.model_validate({**good.model_dump(), **changes})


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "", "a\n"])
def test_a_shard_name_stays_in_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Shard(name=name, bytes=1, tokens=1, sha256=DIGEST)

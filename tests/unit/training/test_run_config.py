"""The run's configuration is checked whole, and every problem is named with its key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from training.config import load
from training.errors import CONFIGURATION, ConfigurationError

GOOD: dict[str, Any] = {
    "run": "smoke",
    "bucket": "trainyard-local",
    "model": "byte-2m",
    "data": {"name": "python-stdlib", "prefix": "datasets/python-stdlib", "source": "/usr/lib/python3.11", "pattern": "*.py"},
    "train": {
        "steps": 300,
        "batch_size": 8,
        "sequence_length": 256,
        "learning_rate": 0.003,
        "warmup_steps": 20,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "seed": 1234,
        "log_every": 5,
    },
    "checkpoint": {"every_steps": 50, "keep": 3},
    "processes": 2,
    "grace_seconds": 60,
}


def written(folder: Path, content: object) -> Path:
    path = folder / "run.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_good_file_is_read_as_it_is(tmp_path: Path) -> None:
    config = load(written(tmp_path, GOOD))
    assert config.model_dump(mode="json", exclude_unset=True) == GOOD
    assert (config.global_batch, config.data_bucket) == (16, "trainyard-local")


def test_already_packed_shards_may_lie_in_another_bucket(tmp_path: Path) -> None:
    data = {"name": "books", "source": "s3://other/books", "bucket": "other", "prefix": "books"}
    config = load(written(tmp_path, {**GOOD, "data": data}))
    assert (config.data_bucket, config.bucket) == ("other", "trainyard-local")


def test_all_problems_are_told_at_once_with_their_keys(tmp_path: Path) -> None:
    bad = copy.deepcopy(GOOD)
    bad["run"] = "Smoke_Test"
    bad["model"] = "llama"
    bad["train"]["steps"] = 0
    bad["train"]["bach_size"] = bad["train"].pop("batch_size")
    bad["checkpoint"]["keep"] = "three"
    del bad["processes"]
    with pytest.raises(ConfigurationError) as raised:
        load(written(tmp_path, bad))
    assert raised.value.code == CONFIGURATION
    first, *problems = raised.value.message.splitlines()
    assert first == f"{tmp_path / 'run.json'}: 7 problem(s)"
    keys = {problem.split(":")[0].strip(): problem for problem in problems}
    assert set(keys) == {"run", "model", "train.steps", "train.batch_size", "train.bach_size", "checkpoint.keep", "processes"}
    assert keys["model"].partition(": ")[2].startswith("unknown model 'llama'; allowed: byte-1m, byte-2m, byte-3m")
    assert "allowed: steps, batch_size, accumulation, sequence_length" in keys["train.bach_size"]
    assert keys["processes"].endswith("is missing")


def test_a_warmup_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="train: warmup_steps is 301, but there are only 300 steps"):
        load(written(tmp_path, {**GOOD, "train": {**GOOD["train"], "warmup_steps": 301}}))


MESHES = {
    "too many": ({"shard": 3}, {}, "is not the number of processes, 2; this would work: 3 processes"),
    "too few": ({"replicate": 1}, {}, "this would work: mesh.replicate 2"),
    "heads": ({"tensor": 4}, {"processes": 4, "model": "byte-3m"}, "4 does not divide the model's key-value heads, 2; these do: 1, 2"),
    "layers": ({"pipeline": 4}, {"processes": 4}, "4 stages for 2 layers; give at most 2"),
    "micro-steps": ({"pipeline": 2}, {}, "need train.accumulation of 2 or more, it is 1"),
    "nodes": ({}, {"nodes": 3}, "2 do not divide evenly over 3 nodes"),
}


@pytest.mark.parametrize("name", MESHES)
def test_an_impossible_mesh_is_refused_with_the_numbers_that_work(tmp_path: Path, name: str) -> None:
    mesh, changes, message = MESHES[name]
    with pytest.raises(ConfigurationError) as raised:
        load(written(tmp_path, {**GOOD, **changes, "mesh": mesh}))
    assert message in raised.value.message


def test_the_mesh_decides_how_many_sequences_a_step_has(tmp_path: Path) -> None:
    train = {**GOOD["train"], "accumulation": 3}
    config = load(written(tmp_path, {**GOOD, "train": train, "processes": 8, "mesh": {"shard": 2, "tensor": 2}}))
    assert config.mesh.degrees(8) == (1, 2, 2, 2)
    assert (config.data_degree, config.global_batch) == (4, 8 * 3 * 4)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "(whole file)")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(written(tmp_path, content))
    assert message in raised.value.message


def test_a_missing_file_says_what_should_mount_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json: cannot be read: No such file or directory; .*ConfigMap"):
        load(tmp_path / "absent.json")

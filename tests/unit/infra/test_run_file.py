"""A run file is checked whole, and every mistake says where it is and what would be right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.problems import ConfigError, Problem
from infra.runs.file import load_run, parse_run

PROJECT = Path(__file__).parents[3]
GOOD: dict[str, Any] = yaml.safe_load((PROJECT / "runs" / "smoke.yaml").read_text())


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    change(document)
    return document


def problems_of(document: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as raised:
        parse_run(document, "runs/x.yaml")
    assert {problem.file for problem in raised.value.problems} == {"runs/x.yaml"}
    return {problem.key: problem for problem in raised.value.problems}


@pytest.mark.parametrize("path", sorted((PROJECT / "runs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_run_file_loads(path: Path) -> None:
    assert load_run(path, path.name).name == path.stem


def test_an_unknown_model_is_answered_with_the_ones_there_are() -> None:
    (problem,) = problems_of({**GOOD, "model": "llama"}).values()
    assert "'llama'" in problem.wrong
    assert (problem.key, problem.allowed, problem.paste) == ("model", "byte-1m, byte-2m, byte-3m", "model: byte-2m\n")


def test_several_mistakes_are_told_at_once() -> None:
    def change(run: dict[str, Any]) -> None:
        run["name"] = "Smoke_Test"
        run["resources"]["gpus_per_node"] = "two"
        run["train"]["bach_size"] = run["train"].pop("batch_size")
        run["grace_seconds"] = 5
        del run["checkpoint"]

    found = problems_of(changed(change))
    assert set(found) == {"name", "resources.gpus_per_node", "train.batch_size", "train.bach_size", "grace_seconds", "checkpoint"}
    assert found["train.batch_size"].wrong == "is missing"
    assert found["train.bach_size"].wrong == "is not a key that exists"
    assert found["train.bach_size"].allowed.startswith("steps, batch_size, sequence_length")
    for problem in found.values():
        assert problem.allowed
    assert yaml.safe_load(found["checkpoint"].paste) == {"checkpoint": {"every_steps": 50, "keep": 3}}


def test_what_is_to_be_pasted_is_right() -> None:
    found = problems_of({"name": "x"})
    repaired = {"name": "x"}
    for problem in found.values():
        repaired |= yaml.safe_load(problem.paste)
    assert parse_run(repaired, "x").name == "x"


@pytest.mark.parametrize(("source", "packed"), [("/usr/lib/python3.11", False), ("s3://other-bucket/books/v1", True)])
def test_a_source_is_a_folder_of_the_image_or_packed_shards(source: str, packed: bool) -> None:
    assert parse_run(changed(lambda run: run["data"].update(source=source)), "x").data.packed is packed


@pytest.mark.parametrize("source", ["books", "http://x/y", "s3://bucket", "s3://b/x", "/with space"])
def test_another_source_is_refused(source: str) -> None:
    assert "a folder in the trainer image" in problems_of(changed(lambda run: run["data"].update(source=source)))["data.source"].allowed


def test_the_limit_of_memory_is_the_request_unless_given() -> None:
    assert parse_run(GOOD, "x").resources.limit == "6Gi"
    assert parse_run(changed(lambda run: run["resources"].pop("memory_limit")), "x").resources.limit == "3Gi"


def test_a_limit_below_the_request_is_refused_with_both_sides() -> None:
    found = problems_of(changed(lambda run: run["resources"].update(memory_limit="2Gi")))
    assert "memory <= memory_limit does not hold: 3Gi > 2Gi; raise memory_limit" in found["resources"].wrong


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    assert "201 > 200" in problems_of(changed(lambda run: run["train"].update(warmup_steps=201)))["train"].wrong


def test_more_than_one_node_is_refused_in_this_version() -> None:
    assert "exactly 1 node" in problems_of(changed(lambda run: run["resources"].update(nodes=2)))["resources.nodes"].wrong


def test_numbers_yaml_takes_for_text_are_numbers() -> None:
    document = yaml.safe_load("3e-4")
    assert document == "3e-4"
    assert parse_run(changed(lambda run: run["train"].update(learning_rate=document)), "x").train.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("text", "message"), [("- 1", "must hold a map"), ("a: [", "is not valid YAML near line"), (None, "cannot be read: No such file")]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path / "run.yaml", "run.yaml")

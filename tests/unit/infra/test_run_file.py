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
from infra.runs.models import MODELS

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
    assert (problem.key, problem.allowed, problem.paste) == ("model", ", ".join(MODELS), "model: byte-2m\n")


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
    assert found["train.bach_size"].allowed.startswith("steps, batch_size, accumulation, sequence_length")
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


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decay_steps": 20}, "decay_steps belongs to schedule: wsd"),
        ({"schedule": "wsd", "decay_steps": 181}, "warmup_steps + decay_steps <= steps does not hold: 20 + 181 > 200"),
    ],
)
def test_phases_that_do_not_fit_are_refused(keys: dict[str, Any], said: str) -> None:
    def change(run: dict[str, Any]) -> None:
        run["train"].pop("schedule")
        run["train"].update(keys)

    assert said in problems_of(changed(change))["train"].wrong


def test_one_of_the_two_intervals_is_needed_and_either_is_enough() -> None:
    problem = problems_of({**GOOD, "checkpoint": {"keep": 2}})["checkpoint"]
    assert "give every_steps or every_seconds" in problem.wrong
    assert parse_run({**GOOD, **yaml.safe_load(problem.paste)}, "x").checkpoint.every_steps == 50
    assert parse_run({**GOOD, "checkpoint": {"every_seconds": 300}}, "x").checkpoint.every_seconds == 300


@pytest.mark.parametrize("keys", [{"folder": "/mnt/checkpoints"}, {"claim": "checkpoints"}])
def test_a_folder_needs_the_claim_that_is_mounted_there(keys: dict[str, str]) -> None:
    assert "folder and claim belong together" in problems_of(changed(lambda run: run["checkpoint"].update(keys)))["checkpoint"].wrong


@pytest.mark.parametrize("schedule", ["0 4 * * 0", "*/15 0-6,18 1,15 */2 *", " 0  4 1 1 6 "])
def test_a_schedule_of_a_drill_has_five_fields(schedule: str) -> None:
    drill = parse_run(changed(lambda run: run["drill"].update(schedule=schedule)), "x").drill
    assert drill
    assert drill.schedule == " ".join(schedule.split())


@pytest.mark.parametrize(
    "schedule", ["daily", "0 4 * *", "60 4 * * 0", "0 24 * * 0", "0 4 0 * 0", "0 4 * 13 0", "0 4 * * 7", "a * * * *", "*/0 * * * *"]
)
def test_another_schedule_is_refused_with_one_to_paste(schedule: str) -> None:
    problem = problems_of(changed(lambda run: run["drill"].update(schedule=schedule)))["drill.schedule"]
    assert yaml.safe_load(problem.paste) == {"drill": {"schedule": "0 4 * * 0"}}


def test_an_impossible_mesh_is_told_with_every_other_mistake() -> None:
    found = problems_of({**changed(lambda run: run["train"].update(accumulation=4)), "mesh": {"tensor": 3, "pipeline": 5}, "team": "Team!"})
    assert set(found) == {"team", "mesh", "mesh.tensor", "mesh.pipeline"}
    assert found["mesh"].wrong == "pipeline 5 x replicate 1 x shard 1 x tensor 3 = 15 is not the number of processes, 2"
    assert found["mesh"].allowed == "15 processes, or degrees whose product divides 2: 1, 2"
    assert yaml.safe_load(found["mesh"].paste) == {"resources": {"gpus_per_node": 15}}


def test_a_mesh_is_not_judged_by_parts_that_are_wrong_themselves() -> None:
    for broken in ({"resources": "two"}, {"train": {}}, {"mesh": {"shard": 0}}, {"model": ["byte-2m"]}):
        assert not {"mesh", "mesh.tensor"} & set(problems_of({**GOOD, "mesh": {"tensor": 3}, **broken}))


def pasted(document: dict[str, Any], text: str) -> dict[str, Any]:
    ((section, keys),) = yaml.safe_load(text).items()
    return {**document, section: document.get(section, {}) | keys}


@pytest.mark.parametrize(
    ("mesh", "gpus"),
    [({"replicate": 4}, 2), ({"shard": 3}, 2), ({"replicate": 1, "shard": 2}, 4), ({"shard": 4}, 6)],
)
def test_what_is_to_be_pasted_for_processes_that_do_not_fit_is_right(mesh: dict[str, int], gpus: int) -> None:
    document = {**changed(lambda run: run["resources"].update(gpus_per_node=gpus)), "mesh": mesh}
    assert parse_run(pasted(document, problems_of(document)["mesh"].paste), "x")


def test_stages_need_as_many_micro_steps() -> None:
    document = {**GOOD, "mesh": {"pipeline": 2}}
    problem = problems_of(document)["mesh.pipeline"]
    assert problem.wrong == "2 stages need train.accumulation of 2 or more, it is 1"
    assert parse_run(pasted(document, problem.paste), "x").train.accumulation == 2


def test_a_drill_that_cannot_share_the_samples_of_a_step_is_refused() -> None:
    document = changed(lambda run: run["drill"].update(world_size=3))
    problem = problems_of(document)["drill.world_size"]
    assert problem.wrong == "3 processes cannot share the 16 samples of a step with micro-steps of at most 8"
    assert problem.allowed == "1, 2, 4, 8, 16"
    assert parse_run(pasted(document, problem.paste), "x")


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

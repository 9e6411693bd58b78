"""Infra and the trainer never import each other; these tests keep what both must know one: models, verdicts on meshes, defaults."""

from __future__ import annotations

import re
from itertools import product
from typing import get_args

import pytest
from pydantic import BaseModel

from infra.runs import sections
from infra.runs.file import RunFile
from infra.runs.mesh import Cut, drill_problems, mesh_problems
from infra.runs.models import MODELS, Model, ModelName
from training import config
from training.drill import reshaped
from training.errors import ConfigurationError
from training.mesh import Mesh
from training.models import MODELS as TABLE

PAIRS: list[tuple[type[BaseModel], type[BaseModel]]] = [
    (sections.Data, config.Data),
    (sections.Train, config.Train),
    (sections.Checkpoint, config.Checkpoint),
    (sections.Mesh, Mesh),
    (sections.Eviction, config.Eviction),
    (sections.Preflight, config.Preflight),
    (RunFile, config.RunConfig),
]
DEGREES = [*product((None, 1, 2), (1, 2, 3), (1, 2, 3, 5), (1, 2, 3))]
SITUATIONS = [*product((1, 2, 4, 12), (96, 250), (1, 2))]


def test_a_run_file_may_name_exactly_the_models_the_trainer_can_build() -> None:
    assert tuple(TABLE) == tuple(MODELS) == get_args(ModelName)


def test_the_dimensions_of_the_models_are_those_of_the_trainer() -> None:
    assert {name: Model(one.layers, one.kv_heads, one.hidden, one.vocabulary) for name, one in TABLE.items()} == MODELS


def numbers(text: str) -> set[str]:
    return set(re.findall(r"[0-9]+", text))


@pytest.mark.parametrize("name", TABLE)
def test_a_mesh_is_possible_to_both_or_to_none_and_for_the_same_reasons(name: ModelName) -> None:
    verdicts = set()
    for (replicate, shard, tensor, pipeline), (processes, length, micro_steps) in product(DEGREES, SITUATIONS):
        degrees = {"replicate": replicate, "shard": shard, "tensor": tensor, "pipeline": pipeline}
        theirs = Mesh(**degrees).problems(processes, TABLE[name], length, micro_steps)
        cut = Cut(sections.Mesh(**degrees), MODELS[name], processes, length, micro_steps, 8)
        ours = list(mesh_problems(cut, "f"))
        assert [problem.key for problem in ours] == [text.split(":")[0] for text in theirs], degrees
        for problem, text in zip(ours, theirs, strict=True):
            assert numbers(text) <= numbers(f"{problem.wrong} {problem.allowed} {problem.paste}"), (problem, text)
        verdicts.add(not ours)
    assert verdicts == {True, False}


BASE = {
    "run": "x",
    "bucket": "b",
    "model": "byte-2m",
    "data": {"name": "d", "prefix": "d", "source": "/d"},
    "checkpoint": {"every_steps": 1},
    "grace_seconds": 30,
}
TRAIN = {
    "steps": 9,
    "sequence_length": 64,
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "grad_clip": 1,
    "seed": 1,
    "log_every": 1,
}


@pytest.mark.parametrize("world_size", range(1, 7))
@pytest.mark.parametrize("degrees", [{}, {"shard": 2}, {"tensor": 4}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_a_drill_is_possible_to_both_or_to_none(degrees: dict[str, int], world_size: int) -> None:
    for batch_size, accumulation in ((1, 2), (3, 2), (8, 4), (5, 3)):
        train = {**TRAIN, "batch_size": batch_size, "accumulation": accumulation}
        was = config.RunConfig.model_validate({**BASE, "train": train, "mesh": degrees, "processes": 4})
        cut = Cut(sections.Mesh(**degrees), MODELS["byte-2m"], 4, 64, accumulation, batch_size)
        try:
            reshaped(was=was, here=was, world_size=world_size)
            possible = True
        except ConfigurationError:
            possible = False
        found = list(drill_problems(cut, world_size, "f"))
        assert possible == (not found), (batch_size, accumulation, found)
        for problem in found:
            assert all(not list(drill_problems(cut, int(size), "f")) for size in problem.allowed.split(", "))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda model: model.__module__)
def test_a_default_is_that_of_the_trainer_or_told_as_such(ours: type[BaseModel], theirs: type[BaseModel]) -> None:
    for key, field in ours.model_fields.items():
        default = theirs.model_fields[key].default if key in theirs.model_fields and not theirs.model_fields[key].is_required() else None
        if default is None or isinstance(default, BaseModel) or key in EXCEPTIONS:
            continue
        if field.default is None:
            told = str(default).lower().removesuffix(".0")
            assert f"{told} when not given" in (field.description or ""), key
        else:
            assert type(default)(field.default) == default, key


EXCEPTIONS = {"metadata_service"}
"""A switch in a run file, an address to the trainer."""

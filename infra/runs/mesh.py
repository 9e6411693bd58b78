"""How the processes of a run share the model: the degrees of a run file, and why some of them are impossible.

The arithmetic is the trainer's, which checks again; tests/unit/infra/test_models_agree.py keeps the two verdicts the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import yaml

from infra.problems import Problem
from infra.runs.models import Model
from infra.runs.sections import MOST_GPUS, Mesh


@dataclass(frozen=True)
class Cut:
    """A mesh with everything that decides whether it is possible."""

    mesh: Mesh
    model: Model
    processes: int
    sequence_length: int
    accumulation: int
    batch_size: int

    @property
    def rest(self) -> int:
        """Processes of one copy of the model."""
        return self.mesh.shard * self.mesh.tensor * self.mesh.pipeline


def mesh_problems(cut: Cut, file: str) -> Iterator[Problem]:
    """Find everything that makes a mesh impossible, each with the numbers that would work."""
    yield from _product(cut, file)
    yield from _tensor(cut, file)
    yield from _pipeline(cut, file)


def drill_problems(cut: Cut, world_size: int, file: str) -> Iterator[Problem]:
    """Find out whether a drill cannot make the run's steps on so many processes: a step keeps its samples, the mesh as much as fits."""
    if _drills(cut, world_size):
        return
    fitting = [size for size in range(1, MOST_GPUS + 1) if _drills(cut, size)]
    samples = cut.batch_size * cut.accumulation * (cut.processes // (cut.mesh.tensor * cut.mesh.pipeline))
    wrong = f"{world_size} processes cannot share the {samples} samples of a step with micro-steps of at most {cut.batch_size}"
    nearest = min(fitting, key=lambda size: abs(size - world_size))
    yield Problem(file, "drill.world_size", wrong, ", ".join(map(str, fitting)), _yaml("drill", "world_size", nearest))


def _drills(cut: Cut, world_size: int) -> bool:
    tensor = gcd(cut.mesh.tensor, world_size)
    pipeline = gcd(cut.mesh.pipeline, world_size // tensor)
    degree = world_size // (tensor * pipeline)
    samples = cut.batch_size * cut.accumulation * (cut.processes // (cut.mesh.tensor * cut.mesh.pipeline))
    each = samples // degree
    return samples % degree == 0 and each // gcd(each, cut.batch_size) >= pipeline


def _product(cut: Cut, file: str) -> Iterator[Problem]:
    mesh, rest = cut.mesh, cut.rest
    replicate = mesh.replicate or max(cut.processes // rest, 1)
    if replicate * rest == cut.processes:
        return
    terms = f"pipeline {mesh.pipeline} x replicate {replicate} x shard {mesh.shard} x tensor {mesh.tensor}"
    wrong = f"{terms} = {replicate * rest} is not the number of processes, {cut.processes}"
    if cut.processes % rest == 0:
        fitting = cut.processes // rest
        yield Problem(file, "mesh", wrong, f"replicate {fitting}", _yaml("mesh", "replicate", fitting))
        return
    fitting = -(-cut.processes // rest) * rest
    paste = _yaml("resources", "gpus_per_node", fitting) if fitting <= MOST_GPUS else ""
    allowed = f"{fitting} processes, or degrees whose product divides {cut.processes}: {_divisors(cut.processes)}"
    yield Problem(file, "mesh", wrong, allowed, paste)


def _tensor(cut: Cut, file: str) -> Iterator[Problem]:
    model, degree = cut.model, cut.mesh.tensor
    all_must = gcd(model.kv_heads, model.hidden, model.vocabulary, cut.sequence_length)
    fitting = max(one for one in range(1, degree + 1) if all_must % one == 0)
    for count, what in (
        (model.kv_heads, "the model's key-value heads"),
        (model.hidden, "the model's feed-forward width"),
        (model.vocabulary, "the model's vocabulary"),
        (cut.sequence_length, "train.sequence_length"),
    ):
        if count % degree:
            yield Problem(
                file, "mesh.tensor", f"{degree} does not divide {what}, {count}", _divisors(count), _yaml("mesh", "tensor", fitting)
            )


def _pipeline(cut: Cut, file: str) -> Iterator[Problem]:
    stages, layers = cut.mesh.pipeline, cut.model.layers
    if stages > layers:
        yield Problem(file, "mesh.pipeline", f"{stages} stages for {layers} layers", f"at most {layers}", _yaml("mesh", "pipeline", layers))
    if cut.accumulation < stages:
        wrong = f"{stages} stages need train.accumulation of {stages} or more, it is {cut.accumulation}"
        yield Problem(file, "mesh.pipeline", wrong, f"at most {cut.accumulation}", _yaml("train", "accumulation", stages))


def _divisors(number: int, limit: int = 64) -> str:
    return ", ".join(str(divisor) for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


def _yaml(section: str, key: str, value: int) -> str:
    return yaml.safe_dump({section: {key: value}})

"""A run file: what to train, on what, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from infra.config import read_yaml
from infra.problems import ConfigError, Problem, explain
from infra.runs.mesh import Cut, drill_problems, mesh_problems
from infra.runs.models import MODELS, ModelName
from infra.runs.sections import Checkpoint, Data, Drill, Eviction, Mesh, Metrics, Name, Preflight, Resources, Section, Train


class RunFile(Section):
    """One training run. The same name is the same run: deployed again, it resumes."""

    name: Name = Field(examples=["smoke"])
    team: Name = Field(examples=["research"])
    priority: Name = Field(examples=["standard"])
    resources: Resources = Field(
        description="what the run asks of the cluster", examples=[{"gpus_per_node": 2, "cpu": "1", "memory": "3Gi"}]
    )
    model: ModelName = Field(description=", ".join(MODELS), examples=["byte-2m"])
    data: Data = Field(
        description="name, source, pattern, ...", examples=[{"name": "python-stdlib", "source": "/opt/stdlib", "pattern": "*.py"}]
    )
    train: Train = Field(
        description="steps, batch_size, sequence_length, learning_rate, ...",
        examples=[{"steps": 300, "batch_size": 8, "sequence_length": 256, "learning_rate": 0.003}],
    )
    mesh: Mesh | None = Field(
        None, description="replicate, shard, tensor, pipeline, zero; only copies when not given", examples=[{"shard": 2}]
    )
    checkpoint: Checkpoint = Field(description="every_steps, every_seconds, keep, ...", examples=[{"every_steps": 50, "keep": 3}])
    eviction: Eviction | None = Field(
        None, description="metadata_service, poll_seconds; SIGTERM alone when not given", examples=[{"metadata_service": True}]
    )
    preflight: Preflight | None = Field(
        None, description="enabled, floor_gigabytes_per_second, megabytes", examples=[{"floor_gigabytes_per_second": 10}]
    )
    metrics: Metrics | None = Field(None, description="port; no endpoint when not given", examples=[{"port": 9400}])
    drill: Drill | None = Field(
        None,
        description="schedule, world_size, steps; no drill when not given",
        examples=[{"schedule": "0 4 * * 0", "world_size": 1, "steps": 5}],
    )
    accept_changes: tuple[Literal["model", "tokenizer", "data"], ...] = Field(
        (), description="what may differ from the checkpoint that is resumed: model, tokenizer, data", examples=[["data"]]
    )
    grace_seconds: int = Field(
        60, description="seconds between SIGTERM and SIGKILL, 10 to 300; saving must fit", ge=10, le=300, examples=[60]
    )
    hang_seconds: float | None = Field(
        None, description="seconds without a step after which a run counts as hung, 10 or more, 300 when not given", ge=10, examples=[300]
    )
    max_seconds: int = Field(3600, description="seconds the run may take in all, 60 or more", ge=60, examples=[3600])


def load_run(path: Path, file: str) -> RunFile:
    """Return a run file. `file` is its name in messages. Raises ConfigError with every problem."""
    return parse_run(read_yaml(path, file), file)


def parse_run(document: dict[str, Any], file: str) -> RunFile:
    """Validate the content of a run file. Raises ConfigError with every problem."""
    impossible = list(_impossible(document, file))
    try:
        run = RunFile.model_validate(document)
    except ValidationError as error:
        raise ConfigError([*explain(error, RunFile, file, document), *impossible]) from None
    if impossible:
        raise ConfigError(impossible)
    return run


def _impossible(document: dict[str, Any], file: str) -> Iterator[Problem]:
    """Find what makes the mesh or the drill impossible as soon as the parts that decide it are right, whatever is wrong elsewhere."""
    model = next((model for name, model in MODELS.items() if name == document.get("model")), None)
    try:
        resources, train = Resources.model_validate(document.get("resources")), Train.model_validate(document.get("train"))
        mesh = Mesh.model_validate(document.get("mesh") or {})
        drill = Drill.model_validate(document["drill"]) if document.get("drill") else None
    except ValidationError:
        return
    if model:
        cut = Cut(mesh, model, resources.processes, train.sequence_length, train.accumulation, train.batch_size)
        found = list(mesh_problems(cut, file))
        yield from found
        if drill and not found:
            yield from drill_problems(cut, drill.world_size, file)

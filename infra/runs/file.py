"""A run file: what to train, on what, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from infra.config import read_yaml
from infra.problems import ConfigError, explain
from infra.quantities import CpuQuantity, MemoryQuantity, memory_bytes

MODELS = ("byte-1m", "byte-2m", "byte-3m")
"""The models the trainer can build."""

ModelName = Literal["byte-1m", "byte-2m", "byte-3m"]
Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
        description="lower-case letters, digits and '-', at most 40, starting and ending with a letter or digit",
    ),
]


class Section(BaseModel):
    """Base of every part: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Resources(Section):
    """What one run asks of the cluster."""

    nodes: int = Field(1, description="number of nodes; this version runs a training on exactly 1", examples=[1])
    gpus_per_node: int = Field(description="GPUs of the node, one process each; 1 to 16", ge=1, le=16, examples=[2])
    cpu: CpuQuantity = Field(examples=["1"])
    memory: MemoryQuantity = Field(examples=["3Gi"])
    memory_limit: MemoryQuantity | None = Field(
        None, description="memory the pod is killed at, not below memory; memory when not given", examples=["6Gi"]
    )

    @field_validator("nodes")
    @classmethod
    def _one_node(cls, nodes: int) -> int:
        if nodes != 1:
            raise ValueError("this version runs a training on exactly 1 node; several nodes come with JobSet")
        return nodes

    @model_validator(mode="after")
    def _holds(self) -> Self:
        if self.memory_limit and memory_bytes(self.memory_limit) < memory_bytes(self.memory):
            raise ValueError(f"memory <= memory_limit does not hold: {self.memory} > {self.memory_limit}; raise memory_limit")
        return self

    @property
    def limit(self) -> str:
        """Memory limit of the pod."""
        return self.memory_limit or self.memory


class Data(Section):
    """Where the text comes from."""

    name: Name = Field(examples=["python-stdlib"])
    source: str = Field(
        description="a folder in the trainer image, or s3://bucket/prefix of shards that are already packed",
        pattern=r"^(/[^\s]*|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\s]+)$",
        examples=["/opt/stdlib"],
    )
    pattern: str = Field("*", description="names of the files taken from the folder", min_length=1, examples=["*.py"])

    @property
    def packed(self) -> bool:
        """Whether the source is already packed, so that nothing has to be prepared."""
        return self.source.startswith("s3://")


class Train(Section):
    """The optimisation itself."""

    steps: int = Field(description="optimiser steps, 1 or more", ge=1, examples=[300])
    batch_size: int = Field(description="sequences per process and step, 1 or more", ge=1, examples=[8])
    sequence_length: int = Field(description="bytes of a sequence, 8 to 8192", ge=8, le=8192, examples=[256])
    learning_rate: float = Field(description="peak learning rate, above 0 and below 10", gt=0, lt=10, examples=[0.003])
    warmup_steps: int = Field(0, description="steps of linear warm-up, not above steps", ge=0, examples=[20])
    weight_decay: float = Field(0.1, description="weight decay, 0 or more", ge=0, examples=[0.1])
    grad_clip: float = Field(1.0, description="largest norm of the gradient, above 0", gt=0, examples=[1.0])
    seed: int = Field(1234, description="seed of parameters and data order, 0 to 4294967295", ge=0, lt=2**32, examples=[1234])
    log_every: int = Field(5, description="steps between two reports, 1 or more", ge=1, examples=[5])

    @model_validator(mode="after")
    def _warm(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps <= steps does not hold: {self.warmup_steps} > {self.steps}; lower warmup_steps")
        return self


class Checkpoint(Section):
    """How often the run is saved."""

    every_steps: int = Field(description="steps between two checkpoints, 1 or more", ge=1, examples=[50])
    keep: int = Field(3, description="newest checkpoints kept, 1 or more", ge=1, examples=[3])


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
        description="name, source, pattern", examples=[{"name": "python-stdlib", "source": "/opt/stdlib", "pattern": "*.py"}]
    )
    train: Train = Field(
        description="steps, batch_size, sequence_length, learning_rate, ...",
        examples=[{"steps": 300, "batch_size": 8, "sequence_length": 256, "learning_rate": 0.003}],
    )
    checkpoint: Checkpoint = Field(description="every_steps, keep", examples=[{"every_steps": 50, "keep": 3}])
    grace_seconds: int = Field(
        60, description="seconds between SIGTERM and SIGKILL, 10 to 300; saving must fit", ge=10, le=300, examples=[60]
    )
    max_seconds: int = Field(3600, description="seconds the run may take in all, 60 or more", ge=60, examples=[3600])


def load_run(path: Path, file: str) -> RunFile:
    """Return a run file. `file` is its name in messages. Raises ConfigError with every problem."""
    return parse_run(read_yaml(path, file), file)


def parse_run(document: dict[str, Any], file: str) -> RunFile:
    """Validate the content of a run file."""
    try:
        return RunFile.model_validate(document)
    except ValidationError as error:
        raise ConfigError(explain(error, RunFile, file, document)) from None

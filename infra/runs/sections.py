"""The parts of a run file: every key with its bounds, its meaning and an example.

A key whose default the trainer decides is None here and is not passed on; its description names the trainer's default.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from infra.quantities import CpuQuantity, MemoryQuantity, memory_bytes

MOST_GPUS = 16
"""GPUs of the largest node there is."""

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
    gpus_per_node: int = Field(description="GPUs of the node, one process each; 1 to 16", ge=1, le=MOST_GPUS, examples=[2])
    cpu: CpuQuantity = Field(examples=["1"])
    memory: MemoryQuantity = Field(examples=["3Gi"])
    memory_limit: MemoryQuantity | None = Field(
        None, description="memory the pod is killed at, not below memory; half of it is /dev/shm; memory when not given", examples=["6Gi"]
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

    @property
    def processes(self) -> int:
        """Processes of the training: its world size."""
        return self.nodes * self.gpus_per_node


class Data(Section):
    """Where the text comes from, and how it is read."""

    name: Name = Field(examples=["python-stdlib"])
    source: str = Field(
        description="a folder in the trainer image, or s3://bucket/prefix of shards that are already packed",
        pattern=r"^(/[^\s]*|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\s]+)$",
        examples=["/opt/stdlib"],
    )
    pattern: str = Field("*", description="names of the files taken from the folder", min_length=1, examples=["*.py"])
    validation_windows: int | None = Field(
        None,
        description="last windows of the dataset, never trained on, for the validation loss; 1 or more, 32 when not given",
        ge=1,
        examples=[32],
    )
    shuffle_shards: int | None = Field(
        None, description="shards whose windows are mixed with each other, 1 or more, 4 when not given", ge=1, examples=[4]
    )
    cache_bytes: int = Field(
        2**30,
        description="bytes of shards kept on the node's disk, 1048576 or more; the open ones stay whatever they need",
        ge=2**20,
        examples=[2**30],
    )

    @property
    def packed(self) -> bool:
        """Whether the source is already packed, so that nothing has to be prepared."""
        return self.source.startswith("s3://")


class Train(Section):
    """The optimisation itself."""

    steps: int = Field(description="optimiser steps, 1 or more", ge=1, examples=[300])
    batch_size: int = Field(description="sequences of one micro-step and data-parallel process, 1 or more", ge=1, examples=[8])
    accumulation: int = Field(1, description="micro-steps of a step, whose gradients are added up, 1 or more", ge=1, examples=[1])
    sequence_length: int = Field(description="tokens of a sequence, 8 to 131072", ge=8, le=131_072, examples=[256])
    learning_rate: float = Field(description="peak learning rate, above 0 and below 10", gt=0, lt=10, examples=[0.003])
    schedule: Literal["cosine", "wsd"] | None = Field(
        None, description="cosine: down to the end; wsd: warm up, stay, decay at the end; cosine when not given", examples=["cosine"]
    )
    warmup_steps: int = Field(0, description="steps of linear warm-up, not above steps", ge=0, examples=[20])
    decay_steps: int | None = Field(
        None, description="last steps over which wsd decays, 1 or more; a tenth of the steps when not given", ge=1, examples=[30]
    )
    weight_decay: float = Field(0.1, description="weight decay, 0 or more", ge=0, examples=[0.1])
    grad_clip: float = Field(1.0, description="largest norm of the gradient, above 0", gt=0, examples=[1.0])
    precision: Literal["float32", "bfloat16", "fp8"] | None = Field(
        None, description="numbers the model computes in; fp8 needs a GPU that has it; float32 when not given", examples=["bfloat16"]
    )
    recompute: Literal["none", "selective", "full"] | None = Field(
        None, description="activations computed again in the backward pass instead of kept; none when not given", examples=["selective"]
    )
    compile: bool | None = Field(None, description="compile each block of the model; false when not given", examples=[True])
    seed: int = Field(1234, description="seed of parameters and data order, 0 to 4294967295", ge=0, lt=2**32, examples=[1234])
    log_every: int = Field(5, description="steps between two reports, 1 or more", ge=1, examples=[5])
    evaluate_every: int | None = Field(
        None, description="steps between two validation losses, 1 or more; only with checkpoints when not given", ge=1, examples=[50]
    )

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps <= steps does not hold: {self.warmup_steps} > {self.steps}; lower warmup_steps")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError("decay_steps belongs to schedule: wsd; add that or remove decay_steps")
        if self.warmup_steps + (self.decay_steps or 0) > self.steps:
            both = f"{self.warmup_steps} + {self.decay_steps} > {self.steps}"
            raise ValueError(f"warmup_steps + decay_steps <= steps does not hold: {both}; lower decay_steps")
        return self


class Checkpoint(Section):
    """When the run is saved, where, and which checkpoints are kept. One of every_steps and every_seconds is needed."""

    every_steps: int | None = Field(None, description="steps between two checkpoints, 1 or more", ge=1, examples=[50])
    every_seconds: float | None = Field(None, description="seconds between two checkpoints, 1 or more", ge=1, examples=[300])
    milestone_steps: int | None = Field(
        None, description="every so many steps one is saved and kept as a milestone, 1 or more", ge=1, examples=[1000]
    )
    keep: int = Field(3, description="newest checkpoints kept, 1 or more", ge=1, examples=[3])
    keep_best: int | None = Field(
        None, description="checkpoints of lowest validation loss kept beside them, 0 or more, 1 when not given", ge=0, examples=[1]
    )
    keep_milestones: int | None = Field(None, description="newest milestones kept, 1 or more; all when not given", ge=1, examples=[10])
    asynchronous: bool | None = Field(
        None, description="upload beside the training, which waits for the copy to memory only; true when not given", examples=[True]
    )
    folder: str | None = Field(
        None,
        description="path below /mnt at which the claim is mounted; checkpoints and ledger go there instead of the bucket",
        pattern=r"^/mnt/[^\s]*[^\s/]$",
        examples=["/mnt/checkpoints"],
    )
    claim: Name | None = Field(
        None, description="PersistentVolumeClaim of the team's namespace, mounted at folder", examples=["checkpoints"]
    )
    prove: bool | None = Field(
        None,
        description="load the newest one back beside the training and reproduce its validation loss; true when not given",
        examples=[True],
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.every_steps is None and self.every_seconds is None:
            raise ValueError("give every_steps or every_seconds, or both")
        if (self.folder is None) != (self.claim is None):
            raise ValueError("folder and claim belong together: the pod can write nowhere else than where a claim is mounted")
        return self


class Mesh(Section):
    """How the processes share the model. The product of the degrees is the number of processes."""

    replicate: int | None = Field(
        None,
        description="copies of the model that see different samples, 1 or more; what the other degrees leave when not given",
        ge=1,
        examples=[2],
    )
    shard: int = Field(1, description="processes that share one copy of weights, gradients and optimizer state", ge=1, examples=[2])
    tensor: int = Field(1, description="processes that share each matrix, and the sequence between them", ge=1, examples=[2])
    pipeline: int = Field(1, description="stages, each with a part of the layers; not above train.accumulation", ge=1, examples=[2])
    zero: Literal[1, 2, 3] | None = Field(
        None,
        description="what is not kept whole where shard is above 1: 3 nothing is, 2 the weights are within a step, 1 the gradients too; "
        "3 when not given",
        examples=[3],
    )


class Eviction(Section):
    """Where, beside SIGTERM, the news of an eviction comes from."""

    metadata_service: bool = Field(
        False, description="true: ask http://169.254.169.254 of EC2 for spot notices and rebalance advice", examples=[True]
    )
    poll_seconds: float | None = Field(
        None, description="seconds between two questions, 1 to 60, 5 when not given", ge=1, le=60, examples=[5]
    )


class Preflight(Section):
    """The test of the network between the processes, before the first step."""

    enabled: bool | None = Field(None, description="false: no test; true when not given", examples=[True])
    floor_gigabytes_per_second: float | None = Field(
        None,
        description="all-reduce bandwidth below which the run ends with 46; that of the GPU's row in the table when not given",
        gt=0,
        examples=[10],
    )
    megabytes: int | None = Field(None, description="largest message, 1 to 4096, 16 when not given", ge=1, le=4096, examples=[64])


class Metrics(Section):
    """The Prometheus endpoint of the training."""

    port: int = Field(description="TCP port of /metrics, named `metrics` in the pod, 1024 to 65535", ge=1024, le=65535, examples=[9400])


_CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
"""Bounds of minute, hour, day, month and day of the week."""


class Drill(Section):
    """A restore drill on a schedule: the last known good checkpoint is loaded back on another number of processes and replayed."""

    schedule: str = Field(
        description="five fields in numbers: minute, hour, day, month, day of the week (0 is Sunday); UTC on most clusters",
        examples=["0 4 * * 0"],
    )
    world_size: int = Field(description="processes of the drill, one GPU each, 1 to 16", ge=1, le=MOST_GPUS, examples=[1])
    steps: int = Field(5, description="steps that are replayed, 1 or more", ge=1, examples=[5])

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, schedule: str) -> str:
        fields = schedule.split()
        if len(fields) != len(_CRON) or not all(_is_field(field, *bounds) for field, bounds in zip(fields, _CRON, strict=True)):
            raise ValueError("not five fields such as 0 4 * * 0")
        return " ".join(fields)


def _is_field(field: str, low: int, high: int) -> bool:
    parts = [re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part) for part in field.split(",")]
    return all(part and all(low <= int(bound) <= high for bound in part.groups()[:2] if bound) for part in parts)

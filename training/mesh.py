"""How the ranks are arranged: one specification for data, sharded, tensor and pipeline parallel training. No torch needed to check it.

replicate  copies of the model that see different samples (DDP; together with `shard`, HSDP)
shard      ranks that share one copy: weights, gradients and optimizer state are cut into as many pieces (FSDP2)
tensor     ranks that share each matrix, and the sequence between them (Megatron's tensor and sequence parallelism)
pipeline   stages, each with a part of the layers, fed with the micro-steps of `accumulation` (1F1B)
zero       what of a sharded model is kept whole between uses (arXiv 1910.02054). 3: nothing. 2: the weights, from the first forward of
           a step to its end. 1: the gradients too, which are reduced once a step instead of once a micro-step
"""

from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from training.models import ModelShape


class Section(BaseModel):
    """A part of the run's file: cannot change, knows its keys, and never repeats a value in an error by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Mesh(Section):
    """The degrees; their product is the world size. `replicate` is what the others leave when it is not given."""

    replicate: int | None = Field(default=None, ge=1)
    shard: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    zero: Literal[1, 2, 3] = 3

    def degrees(self, world_size: int) -> tuple[int, int, int, int]:
        """Give pipeline, replicate, shard, tensor, from the slowest links to the fastest."""
        rest = self.shard * self.tensor * self.pipeline
        return self.pipeline, self.replicate or max(world_size // rest, 1), self.shard, self.tensor

    def problems(self, world_size: int, shape: ModelShape, length: int, micro_steps: int) -> list[str]:
        """Say everything that makes the mesh impossible, each with the numbers that would work."""
        found = []
        degrees = self.degrees(world_size)
        if prod(degrees) != world_size:
            terms = " x ".join(
                f"{name} {degree}" for name, degree in zip(("pipeline", "replicate", "shard", "tensor"), degrees, strict=True)
            )
            rest = self.shard * self.tensor * self.pipeline
            mend = f"mesh.replicate {world_size // rest}" if world_size % rest == 0 else f"{_multiple(world_size, rest)} processes"
            found.append(f"mesh: {terms} = {prod(degrees)} is not the number of processes, {world_size}; this would work: {mend}")
        for name, degree, count, what in (
            ("tensor", self.tensor, shape.kv_heads, "the model's key-value heads"),
            ("tensor", self.tensor, shape.hidden, "the model's feed-forward width"),
            ("tensor", self.tensor, shape.vocabulary, "the model's vocabulary"),
            ("tensor", self.tensor, length, "train.sequence_length"),
        ):
            if count % degree:
                found.append(f"mesh.{name}: {degree} does not divide {what}, {count}; these do: {_divisors(count)}")
        if self.pipeline > shape.layers:
            found.append(f"mesh.pipeline: {self.pipeline} stages for {shape.layers} layers; give at most {shape.layers}")
        if micro_steps < self.pipeline:
            found.append(f"mesh.pipeline: {self.pipeline} stages need train.accumulation of {self.pipeline} or more, it is {micro_steps}")
        return found


def _multiple(world_size: int, rest: int) -> int:
    """Give the next number of processes that the other degrees divide."""
    return -(-world_size // rest) * rest


def _divisors(number: int, limit: int = 64) -> str:
    return ", ".join(str(divisor) for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)

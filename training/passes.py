"""Passes through the model: losses and gradients of one step, and the validation loss; with and without a pipeline."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from training.config import RunConfig
from training.evaluate import precise, validation_loss
from training.parallelize import Parts, sync_gradients

IGNORED = -100  # a target that counts for no loss


class Passes(Protocol):
    """How a step's gradients and a validation loss are computed. All ranks call, all get the same kind of answer."""

    def gradients(self, tokens: Tensor) -> Tensor:
        """Add the gradients of tokens (accumulation, batch, length + 1), and give this data rank's mean loss."""
        ...

    def validation(self, windows: Tensor, between: Callable[[], None]) -> float:
        """Give the mean loss of windows (count, length + 1); `between` is called now and then."""
        ...


def passes_of(config: RunConfig, parts: Parts, device: torch.device) -> Passes:
    """Choose by the mesh."""
    return Pipelined(config, parts, device) if config.mesh.pipeline > 1 else Plain(config, parts, device)


class Plain:
    """Every rank has all layers, or its piece of all of them."""

    def __init__(self, config: RunConfig, parts: Parts, device: torch.device) -> None:
        self._config, self._parts, self._device = config, parts, device

    def gradients(self, tokens: Tensor) -> Tensor:
        """Run the micro-steps one after the other."""
        micro_steps = len(tokens)
        total = torch.zeros((), device=self._device)
        for index, micro in enumerate(tokens.to(self._device, non_blocking=True)):
            sync_gradients(self._parts.module, self._config, last=index == micro_steps - 1)
            with precise(self._config.train.precision, self._device):
                logits = self._parts.module(micro[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), micro[:, 1:].flatten()) / micro_steps
            loss.backward()
            total += loss.detach()
        return total

    def validation(self, windows: Tensor, between: Callable[[], None]) -> float:
        """Share the windows out over the data ranks where they divide evenly."""
        config, degree = self._config, self._config.data_degree
        even = len(windows) % degree == 0
        own = windows[self._parts.data_rank :: degree] if even else windows
        shape = self._parts.decoder.shape
        loss = validation_loss(
            self._parts.module, own, config.train.batch_size, shape.vocabulary, config.train.precision, self._device, between
        )
        return mean_over_ranks(torch.tensor(loss, dtype=torch.float64)).item()


class Pipelined:
    """Every rank has some layers; the micro-steps flow through the stages (1F1B)."""

    def __init__(self, config: RunConfig, parts: Parts, device: torch.device) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # a second and a half that only a pipeline needs

        self._config, self._device = config, device
        stages = config.mesh.pipeline
        self._first, self._last = parts.stage == 0, parts.stage == stages - 1
        self._group = parts.mesh.get_group("pipeline")
        self._last_rank = dist.get_global_rank(self._group, stages - 1)
        self._tokens = config.train.batch_size * config.train.sequence_length
        stage = PipelineStage(parts.module, parts.stage, stages, device, group=self._group)
        self._schedule = Schedule1F1B(stage, config.train.accumulation, loss_fn=self._loss)
        self._shape = parts.decoder.shape

    def gradients(self, tokens: Tensor) -> Tensor:
        """Run the schedule once."""
        with precise(self._config.train.precision, self._device):
            return self._run(self._schedule.step, tokens.flatten(0, 1)) / len(tokens)

    def validation(self, windows: Tensor, between: Callable[[], None]) -> float:
        """Fill the schedule's micro-steps with windows; rows that only fill up have no target."""
        rows = self._config.train.batch_size * self._config.train.accumulation
        filler = windows.new_full((-len(windows) % rows, windows.shape[1]), IGNORED)
        total = 0.0
        with precise(self._config.train.precision, self._device):
            for chunk in torch.cat((windows, filler)).split(rows):
                between()
                total += self._run(self._schedule.eval, chunk).item()
        return total * self._tokens / (len(windows) * (windows.shape[1] - 1))

    def _run(self, action: Callable[..., object], rows: Tensor) -> Tensor:
        """Feed the first stage, take the losses from the last one, and tell their sum to all stages."""
        rows, losses = rows.to(self._device), []
        inputs = (rows[:, :-1].clamp(min=0),) if self._first else ()
        action(*inputs, **({"target": rows[:, 1:], "losses": losses} if self._last else {}))
        total = torch.stack(losses).detach().sum() if self._last else torch.zeros((), device=self._device)
        dist.broadcast(total, self._last_rank, group=self._group)
        return total

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give the mean over all positions of a micro-step; positions without a target add nothing."""
        summed = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return summed / self._tokens


def mean_over_ranks(value: Tensor) -> Tensor:
    """Average over all ranks; those that share samples hold the same value."""
    dist.all_reduce(value)
    return value / dist.get_world_size()

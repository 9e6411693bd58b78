"""Saves the run and finds its way back: which checkpoint to trust, and whether it belongs to the run as it is described now."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError
from training.checkpoint import load_state, save_state
from training.config import RunConfig
from training.data import Cursor
from training.dataset import Manifest
from training.errors import ConfigurationError, NoUsableCheckpointError
from training.events import Events
from training.ledger import Ledger
from training.ranks import on_rank_zero


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, the loss of the last one, and the place in the data."""

    step: int
    loss: float
    cursor: Cursor


def geometry(config: RunConfig, dataset: Manifest) -> dict[str, str | int]:
    """List what must not change when a run is resumed, by key path. Another number of processes is fine if the global batch stays."""
    return {
        "model": config.model,
        "data.name": config.data.name,
        "data (SHA-256 of its manifest)": dataset.sha256,
        "train.seed": config.train.seed,
        "train.sequence_length": config.train.sequence_length,
        "train.batch_size x processes": config.global_batch,
    }


def identity(dataset: Manifest) -> dict[str, str]:
    """Say what exactly ran."""
    return {
        "image": os.environ.get("TRAINYARD_IMAGE", ""),
        "git_sha": os.environ.get("TRAINYARD_GIT_SHA", ""),
        "torch": torch.__version__,
        "dataset_sha256": dataset.sha256,
    }


class Checkpointer:
    """The checkpoints of one run, seen from its ranks. Every method is called by all of them."""

    def __init__(self, config: RunConfig, dataset: Manifest, catalog: Catalog, ledger: Ledger, events: Events) -> None:
        self._config, self._dataset = config, dataset
        self._catalog, self._ledger, self._events = catalog, ledger, events
        self.saved_step: int | None = None

    def save(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, *, tidy: bool = True) -> None:
        """Save, commit, tell, store the ledger; then tidy up unless there is no time for it."""
        began = time.monotonic()
        step = progress.step
        on_rank_zero(lambda: self._catalog.clear(step))
        objects = save_state(self._catalog.uri(step).removesuffix("/"), model, optimizer)
        manifest = CheckpointManifest(
            run=self._config.run,
            step=step,
            loss=progress.loss,
            world_size=dist.get_world_size(),
            cursor=progress.cursor.to_dict(),
            scheduler={"step": step, "learning_rate": optimizer.param_groups[0]["lr"]},
            geometry=geometry(self._config, self._dataset),
            config=self._config.model_dump(mode="json"),
            identity=identity(self._dataset),
            objects=tuple(objects),
        )
        on_rank_zero(lambda: self._catalog.commit(manifest))
        self.saved_step = step
        self._events.emit("checkpoint", step=step, seconds=_since(began), bytes=manifest.bytes, uri=self._catalog.uri(step))
        on_rank_zero(self._ledger.put)
        if tidy:
            on_rank_zero(lambda: self._tidy(step))

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
        """Load the newest checkpoint that can be trusted; None when the run has none at all."""
        began = time.monotonic()
        steps = on_rank_zero(self._catalog.committed)
        for step in steps:
            manifest = on_rank_zero(lambda step=step: self._trusted(step))
            if manifest is None:
                continue
            self._check_same_run(manifest)
            try:
                load_state(self._catalog.uri(step).removesuffix("/"), model, optimizer)
            except CheckpointException as error:
                self._skip(step, f"it cannot be loaded: {error}")
                continue
            on_rank_zero(lambda step=step: self._ledger.rewind(step))
            self._events.emit("restore", step=step, seconds=_since(began), checkpoint=self._catalog.uri(step))
            self.saved_step = step
            return Progress(step, manifest.loss, Cursor(**manifest.cursor))
        if steps:
            raise NoUsableCheckpointError(
                f"all {len(steps)} committed checkpoint(s) below {self._catalog.store.uri(self._catalog.prefix)} are damaged "
                "(see the skipped events): restore an older version of the objects named there, or start again under a new run name"
            )
        on_rank_zero(lambda: self._ledger.rewind(0))
        self._events.emit("fresh")
        return None

    def _trusted(self, step: int) -> CheckpointManifest | None:
        """Give the manifest of a checkpoint that is intact, or say why it is passed over."""
        try:
            return self._catalog.verified(step)
        except DamagedCheckpointError as error:
            self._skip(step, str(error))
            return None

    def _check_same_run(self, manifest: CheckpointManifest) -> None:
        """Refuse to go on with other data or another model under the same name."""
        now: dict[str, Any] = geometry(self._config, self._dataset)
        changes = [f"  {key}: was {value}, is {now.get(key)}" for key, value in manifest.geometry.items() if now.get(key) != value]
        if manifest.step > self._config.train.steps:
            changes.append(f"  train.steps: the run is at step {manifest.step} already, is {self._config.train.steps}")
        if changes:
            raise ConfigurationError(
                f"the run {self._config.run} has a checkpoint at step {manifest.step} that does not fit its run file:\n"
                + "\n".join(changes)
                + "\ngive the run a new name to start anew, or put the old values back to resume it"
            )

    def _tidy(self, step: int) -> None:
        """Apply retention; when the newest checkpoint proves bad, keep everything and say so."""
        try:
            self._catalog.retain(step, self._config.checkpoint.keep)
        except DamagedCheckpointError as error:
            self._skip(step, str(error))

    def _skip(self, step: int, reason: str) -> None:
        self._events.emit("skipped", checkpoint=self._catalog.uri(step), reason=reason)


def _since(began: float) -> float:
    """Give the seconds since a moment."""
    return round(time.monotonic() - began, 3)

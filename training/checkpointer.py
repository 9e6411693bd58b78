"""Saves the run beside the training and finds its way back: which checkpoint to trust, and whether it belongs to the run as it is now."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from training.catalog import Catalog, CheckpointManifest, DamagedCheckpointError
from training.checkpoint import Uploader, Writer, failure, load_state, reader, save_now, staged_bytes, state_of
from training.config import RunConfig
from training.dataset import Cursor, Manifest
from training.errors import ConfigurationError, NoUsableCheckpointError, SupersededError, TrainerError
from training.events import Events
from training.ledger import Ledger
from training.ranks import gather, on_rank_zero
from training.store import place_of
from training.work import Order

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the kernel has it
REMEMBERED = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, the loss of the last one, and the place in the data."""

    step: int
    loss: float
    cursor: Cursor


@dataclass(frozen=True)
class SaveResult:
    """A save that has become a checkpoint; the training stood still for `stall_seconds` of its `seconds`."""

    step: int
    reason: str
    seconds: float
    stall_seconds: float
    bytes: int


@dataclass
class Saving:
    """A save that runs, or has ended and was not collected. Times are those of the monotonic clock."""

    step: int
    called: float  # and from then on the training stood still, perhaps for the save before
    began: float
    staged: float
    future: Future
    waited: bool  # for, by the training
    ended: float | None = None

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._end)

    def _end(self, _: Future) -> None:
        self.ended = time.monotonic()


class Estimate(NamedTuple):
    """How many seconds a save takes: the longest of the last ones; None before the first."""

    staging: float | None
    upload: float | None


def geometry(config: RunConfig, dataset: Manifest) -> dict[str, str | int]:
    """List what must not change when a run is resumed. Another mesh is fine if the sequences of a step stay as many."""
    return {
        "model": config.model,
        "tokenizer": dataset.tokenizer,
        "data.name": config.data.name,
        "data.sha256": dataset.sha256,
        "train.seed": config.train.seed,
        "train.sequence_length": config.train.sequence_length,
        "global_batch": config.global_batch,
    }


class Checkpointer:
    """The checkpoints of one run, seen from its ranks. All of them call every method but `finished` and `close`."""

    def __init__(self, config: RunConfig, order: Order, dataset: Manifest, identity: dict[str, str], events: Events) -> None:
        self._config, self._attempt, self._dataset, self._identity, self._events = config, order.attempt, dataset, identity, events
        place = place_of(config)
        self._catalog, self._ledger = Catalog(place, config.run), Ledger(events.journal or Path(os.devnull), place, config.run)
        self._uploader: Uploader | None = None
        self._saving: Saving | None = None
        self._past: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.last: SaveResult | None = None
        self.restored_step: int | None = None
        self.durable_step: int | None = None
        self.durable_time: float | None = None  # of the monotonic clock

    @property
    def running_step(self) -> int | None:
        """Give the step of the save that runs or was not collected yet."""
        return self._saving.step if self._saving else None

    @property
    def running_seconds(self) -> float:
        """Give how long that save has been written."""
        return time.monotonic() - self._saving.staged if self._saving else 0.0

    @property
    def estimate(self) -> Estimate:
        """Judge by the past."""
        return Estimate(*(map(max, zip(*self._past, strict=True)) if self._past else (None, None)))

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
        """Load the newest checkpoint that can be trusted, random state last; None when the run never had one."""
        began = time.monotonic()
        manifest = self._newest_intact()
        if manifest is None:
            on_rank_zero(lambda: self._ledger.rewind(0))
            self._events.emit("fresh")
            return None
        self._check_same_run(manifest)
        load_state(reader(self._catalog, manifest), model, optimizer)
        on_rank_zero(lambda: self._ledger.rewind(manifest.step))
        self._events.emit("restore", step=manifest.step, seconds=_since(began), checkpoint=self._catalog.uri(manifest.step))
        self.restored_step = self.durable_step = manifest.step
        self.durable_time = time.monotonic()
        return Progress(manifest.step, manifest.loss, Cursor(**manifest.cursor))

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start the uploader and give it its memory, before the first step and while there are no gradients."""
        if not self._config.checkpoint.asynchronous:
            return
        state = state_of(model, optimizer)
        node, free = os.environ.get("GROUP_RANK"), shutil.disk_usage(SHARED_MEMORY).free
        parts = gather((node, free, staged_bytes(state)))
        for name, room, _ in parts:
            need = sum(size for other, _, size in parts if other == name)
            if need > room:
                self._events.emit(
                    "degraded",
                    what="checkpoints are saved while the training waits",
                    reason=f"{SHARED_MEMORY} of node {name} has {room >> 20} MiB and {(need >> 20) + 1} are needed; "
                    "mount an emptyDir with medium Memory there",
                )
                return
        self._uploader = Uploader(state)

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reason: str,
        goodput: dict[str, float],
        validation_loss: float | None = None,
        wait: bool = False,
    ) -> SaveResult | None:
        """Copy the state and have the copy written; with `wait`, or without an uploader, return when it is committed, with the result.

        A save that still runs is waited for and collected first.
        """
        called = time.monotonic()
        self.collect()
        if self.durable_step == progress.step:
            return self.last
        began = time.monotonic()
        manifest = CheckpointManifest(
            run=self._config.run,
            attempt=self._attempt,
            step=progress.step,
            reason=reason,
            loss=progress.loss,
            validation_loss=validation_loss,
            world_size=dist.get_world_size(),
            mesh=self._config.mesh.model_dump(mode="json"),
            cursor=progress.cursor.to_dict(),
            scheduler={"step": progress.step, "learning_rate": float(optimizer.param_groups[0]["lr"])},
            geometry=geometry(self._config, self._dataset),
            config=self._config.model_dump(mode="json"),
            identity=self._identity,
            goodput=goodput,
            time=time.time(),
        )
        uri = self._catalog.place.uri(self._catalog.folder(progress.step, self._attempt)).rstrip("/")
        writer, state = Writer(uri, self._config, manifest), state_of(model, optimizer)
        save, wait = (self._uploader.save, wait) if self._uploader else (save_now, True)
        staged = time.monotonic()
        future = save(state, writer)
        self._saving = Saving(progress.step, called, began, time.monotonic() if self._uploader else staged, future, wait)
        return self.collect() if wait else None

    def finished(self) -> bool:
        """Tell, for this rank alone and at once, whether the running save has ended, well or not."""
        return self._saving is not None and self._saving.future.done()

    def collect(self) -> SaveResult | None:
        """Wait for the running save, if any, tell of the checkpoint and store the ledger; raise on all ranks what went wrong on one."""
        if self._saving is None:
            return None
        saving = self._saving
        try:
            manifest, ended = together(lambda: self._committed(saving))[0]
        finally:
            self._saving = None
        self._past.append((saving.staged - saving.began, ended - saving.staged))
        self.durable_step, self.durable_time = saving.step, ended
        seconds, stall = round(ended - saving.began, 3), round((ended if saving.waited else saving.staged) - saving.called, 3)
        self.last = SaveResult(saving.step, manifest.reason, seconds, stall, manifest.bytes)
        self._events.emit("checkpoint", uri=self._catalog.uri(saving.step), **asdict(self.last))
        on_rank_zero(self._ledger.put)
        return self.last

    def close(self) -> None:
        """End the uploader; a save that still runs comes to nothing."""
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None

    def _committed(self, saving: Saving) -> tuple[CheckpointManifest, float]:
        """Wait for a save, and give what was committed and when."""
        error = saving.future.exception()
        if error is not None:
            raise failure(error, f"the checkpoint {self._catalog.uri(saving.step)} could not be written")
        return saving.future.result().storage_data, saving.ended or time.monotonic()

    def _newest_intact(self) -> CheckpointManifest | None:
        """Find the newest checkpoint whose objects are all as they were written. Only then do those passed over lose their marks."""
        steps, passed_over = on_rank_zero(self._catalog.committed), dict[int, str]()
        for step in steps:
            found = on_rank_zero(lambda step=step: self._manifest(step))
            if isinstance(found, CheckpointManifest):
                problems = together(lambda found=found: self._catalog.problems(found, dist.get_rank(), dist.get_world_size()))
                if not any(problems):
                    on_rank_zero(lambda: [self._catalog.pass_over(*item) for item in passed_over.items()])
                    return found
                found = "; ".join(problem for part in problems for problem in part)
            passed_over[step] = found
            self._events.emit("skipped", checkpoint=self._catalog.uri(step), reason=found)
        if steps or on_rank_zero(self._catalog.damaged):
            raise NoUsableCheckpointError(
                f"all {len(steps)} committed checkpoint(s) below {self._catalog.place.uri(self._catalog.prefix)} are damaged "
                "(see the skipped events): restore an older version of the objects named there, or start again under a new run name"
            )
        return None

    def _manifest(self, step: int) -> CheckpointManifest | str:
        """Give the manifest of a checkpoint, or say what is wrong with it."""
        try:
            return self._catalog.manifest(step)
        except DamagedCheckpointError as error:
            return str(error)

    def _check_same_run(self, manifest: CheckpointManifest) -> None:
        """Refuse to go on with other data or another model under the same name, unless told to."""
        now: dict[str, Any] = geometry(self._config, self._dataset)
        accepted = self._config.accept_changes
        changes = [
            f"  {key}: was {value}, is {now.get(key)}"
            for key, value in manifest.geometry.items()
            if now.get(key) != value and accepted.isdisjoint({key, key.partition(".")[0]})
        ]
        if manifest.step > self._config.train.steps:
            changes.append(f"  train.steps: the run is at step {manifest.step} already, is {self._config.train.steps}")
        if changes:
            raise ConfigurationError(
                f"the run {self._config.run} has a checkpoint at step {manifest.step} that does not fit its run file:\n"
                + "\n".join(changes)
                + "\ngive the run a new name to start anew, put the old values back to resume it, or name the keys in accept_changes"
            )


def together(action: Callable[[], T]) -> list[T]:
    """Do something on all ranks and give all results to each, or raise on all of them what one of them raised."""
    try:
        mine: T | TrainerError = action()
    except TrainerError as error:
        mine = error
    outcomes = gather(mine)
    errors = [outcome for outcome in outcomes if isinstance(outcome, TrainerError)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, SupersededError))
    return [outcome for outcome in outcomes if not isinstance(outcome, TrainerError)]


def _since(began: float) -> float:
    """Give the seconds since a moment."""
    return round(time.monotonic() - began, 3)

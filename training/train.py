"""The training loop as it happens, from meeting the other ranks to the last checkpoint. Started by training.worker."""

import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from training.catalog import Catalog
from training.checkpointer import Checkpointer, Progress
from training.config import RunConfig
from training.data import Cursor, Sampler, Tokens, open_tokens
from training.errors import DONE, EVICTED_SAVED, EVICTED_UNSAVED, TrainerError
from training.events import Events
from training.ledger import Ledger
from training.model import Decoder, parameter_count
from training.models import MODELS, VOCABULARY
from training.optimizer import build_optimizer, learning_rate, set_learning_rate
from training.ranks import EvictionNotice, connect
from training.store import Store
from training.work import Order, Work


def train(config: RunConfig, order: Order, work: Work, events: Events) -> int:
    """Train from the newest checkpoint to the last step, or to the eviction, and give the exit code."""
    began = time.monotonic()
    notice = EvictionNotice()
    be_deterministic()
    device = connect()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    events.emit("rendezvous", seconds=round(time.time() - order.launched, 3), world_size=world_size)

    torch.manual_seed(config.train.seed)
    model = Decoder(MODELS[config.model]).to(device)
    optimizer = build_optimizer(model, config.train)
    parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    torch.manual_seed(config.train.seed + 1 + rank)
    settle_buckets(parallel, config.train.sequence_length, device)
    events.emit("model", name=config.model, parameters=parameter_count(model))

    tokens, dataset = open_tokens(Path(order.data), config.train.sequence_length)
    sampler = Sampler(tokens.windows)
    store = Store(config.bucket)
    checkpointer = Checkpointer(config, dataset, Catalog(store, config.run), Ledger(work.ledger, store, config.run), events)
    progress = checkpointer.restore(model, optimizer) or Progress(0, 0.0, Cursor(config.train.seed))
    work.ready(rank)

    meter = Meter()
    while progress.step < config.train.steps:
        if received := notice.agreed():
            return evict(received, progress, checkpointer, model, optimizer, events)
        with meter:
            step, cursor = progress.step + 1, progress.cursor
            rate = learning_rate(step, config.train)
            set_learning_rate(optimizer, rate)
            inputs, targets = batch_of(tokens, sampler, cursor, config.train.batch_size, rank, device)
            loss = functional.cross_entropy(parallel(inputs).view(-1, VOCABULARY), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
            optimizer.step()
            mean_loss = finite(mean_over_ranks(loss.detach()).item(), step)
            progress = Progress(step, mean_loss, cursor.advanced(config.global_batch, sampler.windows))
            meter.tokens += config.global_batch * config.train.sequence_length
        if step == 1 or step % config.train.log_every == 0 or step == config.train.steps:
            events.emit(
                "step",
                step=step,
                steps=config.train.steps,
                loss=mean_loss,
                tokens_per_second=meter.read(),
                learning_rate=rate,
                grad_norm=norm.item(),
            )
        if step % config.checkpoint.every_steps == 0 or step == config.train.steps:
            checkpointer.save(progress, model, optimizer)
    events.emit("done", step=progress.step, loss=progress.loss, seconds=round(time.monotonic() - began, 3))
    return DONE


def be_deterministic() -> None:
    """Make the numbers depend on the run file only, not on the machine's cores or on which kernel wins a race."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def settle_buckets(parallel: DistributedDataParallel, length: int, device: torch.device) -> None:
    """Run two passes that change nothing: DDP arranges its gradient buckets anew after the first.

    The order of gradients in a bucket decides the order of additions between more than two ranks. Without them, the first step
    after a resume would add in another order than the same step of a run that was never interrupted.
    """
    for _ in range(2):
        parallel(torch.zeros(1, length, dtype=torch.int64, device=device)).sum().backward()
        parallel.zero_grad(set_to_none=True)


def batch_of(
    tokens: Tokens, sampler: Sampler, cursor: Cursor, size: int, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give this rank's inputs and targets of the global batch that starts at the cursor."""
    windows = torch.stack([torch.from_numpy(tokens.window(index)) for index in sampler.share(cursor, size, rank)]).to(device, torch.int64)
    return windows[:, :-1], windows[:, 1:]


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """Average the loss over the global batch; every rank has an equal share of it."""
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def finite(loss: float, step: int) -> float:
    """Pass a loss on; one that is no number must never reach a checkpoint."""
    if not math.isfinite(loss):
        raise TrainerError(
            f"the loss of step {step} is {loss}: the run diverged, and nothing after its last checkpoint was saved. "
            "Lower train.learning_rate or train.grad_clip, or give more train.warmup_steps"
        )
    return loss


def evict(
    received: str, progress: Progress, checkpointer: Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, events: Events
) -> int:
    """Save what the last checkpoint does not have yet, and say whether that worked."""
    saved = True
    if checkpointer.saved_step != progress.step:
        try:
            checkpointer.save(progress, model, optimizer, tidy=False)
        except TrainerError as error:
            saved = False
            print(f"eviction at step {progress.step}: {error.message}", file=sys.stderr)
    events.emit("evicted", step=progress.step, saved=saved, signal=received)
    return EVICTED_SAVED if saved else EVICTED_UNSAVED


class Meter:
    """Tokens per second over the training steps alone, without checkpoints."""

    def __init__(self) -> None:
        self.tokens, self._seconds, self._began = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.monotonic() - self._began

    def read(self) -> float:
        """Give the rate since the last reading."""
        rate = self.tokens / self._seconds
        self.tokens, self._seconds = 0, 0.0
        return round(rate, 1)

"""The training as it happens, from meeting the other ranks to the last checkpoint. Started by training.worker."""

import gc
import math
import os
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from training import hardware, metrics
from training.checkpointer import Checkpointer, Progress
from training.config import RunConfig
from training.data import Loader
from training.dataset import Cursor, check_fits, find_dataset
from training.errors import DONE, EVICTED_SAVED, EVICTED_UNSAVED, HUNG, TrainerError
from training.events import Events
from training.eviction import ADVISED, EVICTED, EvictionNotice, decide
from training.goodput import Clock, account
from training.identity import identity
from training.ledger import Ledger
from training.models import MODELS
from training.optimizer import build_optimizer, clip, learning_rate, set_learning_rate
from training.parallelize import build
from training.passes import mean_over_ranks, passes_of
from training.preflight import floor, preflight
from training.ranks import agree, connect, on_rank_zero
from training.store import Store, place_of
from training.watchdog import Watchdog
from training.work import Order, Outcome, Work

GOODPUT_SECONDS = 5.0  # between two accounts of the time


class Interrupted(BaseException):
    """An eviction was noticed in the middle of an evaluation. No `except Exception` may swallow it."""


class Training:
    """One rank of one attempt. Every method is called by all ranks."""

    def __init__(self, config: RunConfig, order: Order, work: Work, events: Events) -> None:
        self.config, self.work, self.events = config, work, events
        self.notice = EvictionNotice(work)
        before = time.time() - order.launched - sum(order.spent.values())
        self.clock = Clock(order.spent, "start", time.monotonic() - before)
        with self.clock.of("rendezvous"):
            self.device = connect()
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.order: Order = on_rank_zero(lambda: order)
        events.emit("rendezvous", seconds=round(time.time() - order.launched, 3), world_size=self.world_size)
        be_deterministic(self.device)
        with self.clock.of("preflight"):
            bandwidth = self._preflight()
        self.manifest = on_rank_zero(lambda: find_dataset(Store(config.data_bucket), config.data.prefix))
        check_fits(self.manifest, MODELS[config.model], config)
        self.identity = identity(config, self.order, self.manifest, bandwidth)
        self.exporter = metrics.Exporter(config.metrics, self.identity)
        if os.environ["LOCAL_RANK"] == "0" and (port := self.exporter.start()) is not None:
            events.emit("metrics", port=port)
        self._build()
        self.watchdog = Watchdog(config, self.rank, self.world_size, self._hang)
        self.progress = Progress(0, 0.0, Cursor(config.train.seed))
        self.saved_at, self.told_at, self.meter, self.advice_taken = time.monotonic(), 0.0, Meter(), False

    def _preflight(self) -> float | None:
        """Measure the network and tell."""
        began = time.monotonic()
        bandwidth = preflight(self.config, self.device)
        if bandwidth is not None:
            self.events.emit(
                "preflight",
                gigabytes_per_second=round(bandwidth, 3),
                floor=floor(self.config, self.device),
                seconds=round(time.monotonic() - began, 3),
            )
        return bandwidth

    def _build(self) -> None:
        """Make the model and everything that trains it, and run it once so that nothing is compiled or arranged later."""
        config = self.config
        torch.manual_seed(config.train.seed)
        self.parts = build(config, self.device)
        self.optimizer = build_optimizer(self.parts.module, config.train)
        self.passes = passes_of(config, self.parts, self.device)
        self.pipeline = self.parts.mesh.get_group("pipeline") if config.mesh.pipeline > 1 else None
        self.events.emit("model", name=config.model, parameters=MODELS[config.model].parameters)
        self.loader = Loader(config, self.manifest, data_rank=self.parts.data_rank)
        with self.clock.of("data_wait"):
            self.validation = self.loader.validation()
        began = time.monotonic()
        with self.clock.of("compile"):
            self._settle()
        self.events.emit("compile", seconds=round(time.monotonic() - began, 3))
        torch.manual_seed(config.train.seed + 1 + self.rank)
        self.checkpointer = Checkpointer(config, self.order, self.manifest, self.identity, self.events)
        self.seconds_before: dict[str, float] = {}

    def _settle(self) -> None:
        """Run two passes that change nothing: the first compiles, and DDP arranges its gradient buckets anew after it.

        The order of gradients in a bucket decides the order of additions between more than two ranks. Without them, the first step
        after a resume would add in another order than the same step of a run that was never interrupted.
        """
        train = self.config.train
        nothing = torch.zeros(train.accumulation, train.batch_size, train.sequence_length + 1, dtype=torch.int64)
        for _ in range(2):
            self.passes.gradients(nothing)
            self.parts.module.zero_grad(set_to_none=True)

    def _restore(self) -> None:
        """Go back to the newest checkpoint that can be trusted; without any, begin."""
        with self.clock.of("start"):
            self.checkpointer.prepare(self.parts.module, self.optimizer)
        with self.clock.of("restore"):
            found = self.checkpointer.restore(self.parts.module, self.optimizer)
        self.progress = found or self.progress
        self._tell_past()
        self.loader.seek(self.progress.cursor)

    def _tell_past(self) -> None:
        """Go on counting where earlier attempts ended."""
        ledger, attempt = Ledger(self.work.ledger, place_of(self.config), self.config.run), self.order.attempt
        events: list[dict[str, Any]] = on_rank_zero(ledger.events)
        starts = [event for event in events if event["attempt"] < attempt or event["event"] == "start"]
        self.seconds_before = account(starts)
        resumes = [event for event in events if event["event"] == "restore" and event["attempt"] > 1]
        evictions = [event["seconds"] for event in events if event["event"] == "evicted" and event["saved"]]
        self.exporter.tell(
            resumes_total=attempt - 1,
            resume_successes_total=len({event["attempt"] for event in resumes}),
            sigterm_to_durable_seconds=evictions[-1] if evictions else None,
            last_durable_step=self.checkpointer.restored_step,
        )

    def run(self) -> int:
        """Train to the last step or to the eviction, and give the exit code."""
        config, train = self.config, self.config.train
        self._restore()
        self.saved_at = time.monotonic()
        self.work.ready(self.rank)
        self.watchdog.start()
        if self.progress.step < train.steps:
            gc.collect()
            gc.freeze()
        while self.progress.step < train.steps:
            try:
                if self._attend() == EVICTED:
                    return self._evict()
                self.step()
                step = self.progress.step
                reason = due(config, step)
                loss = self.evaluate() if reason or (train.evaluate_every and step % train.evaluate_every == 0) else None
            except Interrupted:
                return self._evict()
            if reason:
                self._save(reason, loss, wait=reason == "end")
        self.watchdog.stop()
        self._account()
        self.events.emit("done", step=self.progress.step, loss=self.progress.loss, seconds=round(time.time() - self.order.launched, 3))
        return DONE

    def _attend(self) -> int:
        """Agree with the other ranks on what has happened: evictions, uploads that ended, time for a checkpoint."""
        checkpointer, interval = self.checkpointer, self.config.checkpoint.every_seconds
        self.watchdog.beat("agree", self.progress.step)
        is_time = self.rank == 0 and interval is not None and time.monotonic() - self.saved_at >= interval
        level, is_time, running = agree(
            self.notice.level(), int(is_time), int(checkpointer.running_step is not None and not checkpointer.finished())
        )
        if checkpointer.running_step is not None and not running:
            self._collect()
        advised = level == ADVISED and not self.advice_taken
        if level == EVICTED or running or not (is_time or advised):
            return int(level)
        if advised:
            self.advice_taken = True
            self.events.emit("advised", step=self.progress.step, source=self.notice.source())
        if self.progress.step > (checkpointer.durable_step or 0):
            self._save("advice", None) if advised else self._save("seconds", self.evaluate())
        return int(level)

    def step(self) -> None:
        """Do one step of the optimizer."""
        config, train, step = self.config, self.config.train, self.progress.step + 1
        began = time.monotonic()
        with self.clock.of("data_wait"):
            self.watchdog.beat("data", step)
            tokens = self.loader.next()
        with self.clock.of("redone" if step <= self.order.reached else "step"):
            loaded = time.monotonic()
            self.watchdog.beat("forward-backward", step)
            rate = learning_rate(step, train)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.zero_grad()
            own_loss = self.passes.gradients(tokens)
            passed = time.monotonic()
            self.watchdog.beat("optimizer", step)
            norm = clip(self.parts.module, train.grad_clip, self.pipeline)
            self.optimizer.step()
            stepped = time.monotonic()
            self.watchdog.beat("loss", step)
            loss = finite(mean_over_ranks(own_loss).item(), step)
        ended = time.monotonic()
        self.progress = Progress(step, loss, self.loader.cursor)
        self.meter.add(config.global_batch * train.sequence_length, loaded - began, ended - began)
        if step == 1 or step % train.log_every == 0 or step == train.steps:
            parts = {
                "data": loaded - began,
                "forward_backward": passed - loaded,
                "optimizer": stepped - passed,
                "communication": ended - stepped,
            }
            self._tell(rate, norm.item(), parts)

    def _tell(self, rate: float, norm: float, parts: dict[str, float]) -> None:
        """Tell of the step, and now and then of where the time went."""
        config, progress = self.config, self.progress
        data_wait, speed = self.meter.read()
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        flops = MODELS[config.model].flops_per_token(config.train.sequence_length)
        mfu = hardware.mfu(flops, speed / self.world_size, hardware.peak(name, config.train.precision))
        told = {"loss": progress.loss, "grad_norm": norm} | ({} if mfu is None else {"mfu": round(mfu, 4)})
        self.events.emit(
            "step", step=progress.step, steps=config.train.steps, **told, tokens_per_second=speed, learning_rate=rate, data_wait=data_wait
        )
        self.exporter.tell(
            step=progress.step,
            loss=progress.loss,
            grad_norm=norm,
            tokens_per_second_per_gpu=speed / self.world_size,
            mfu_ratio=mfu,
            step_seconds=parts,
        )
        if time.monotonic() - self.told_at >= GOODPUT_SECONDS:
            self._account()

    def _account(self) -> None:
        """Tell where the time went: of this attempt as an event, of the whole run as metrics."""
        self.told_at, seconds = time.monotonic(), self.clock.seconds()
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        self.events.emit("goodput", seconds=rounded, wall=round(sum(seconds.values()), 3))
        self.exporter.tell(
            goodput_seconds={name: value + self.seconds_before.get(name, 0.0) for name, value in seconds.items()},
            data_wait_seconds_total=self.loader.wait_seconds,
            steps_redone_total=max(min(self.progress.step, self.order.reached) - (self.checkpointer.restored_step or 0), 0),
            checkpoint_interval_seconds=metrics.interval(self.config.checkpoint, self.watchdog.step_seconds),
        )

    def evaluate(self) -> float:
        """Compute the validation loss; an eviction ends it between two micro-batches."""
        began, step = time.monotonic(), self.progress.step

        def between() -> None:
            self.watchdog.beat("evaluate", step)
            if agree(self.notice.level())[0] == EVICTED:
                raise Interrupted

        with self.clock.of("evaluate"):
            loss = self.passes.validation(self.validation, between)
        self.events.emit("evaluate", step=step, loss=loss, seconds=round(time.monotonic() - began, 3))
        return loss

    def _save(self, reason: str, validation_loss: float | None, *, wait: bool = False) -> None:
        """Begin a checkpoint of what is done so far; `wait` for it to be durable."""
        if wait:
            self.watchdog.stop()  # an upload may take as long as it likes
        self.watchdog.beat("save", self.progress.step)
        goodput = {name: round(value + self.seconds_before.get(name, 0.0), 3) for name, value in self.clock.seconds().items()}
        with self.clock.of("save_stall"):
            self.checkpointer.save(
                self.progress, self.parts.module, self.optimizer, reason=reason, validation_loss=validation_loss, goodput=goodput, wait=wait
            )
        self.saved_at = time.monotonic()
        if self.checkpointer.running_step is None:
            self._export_save()

    def _collect(self) -> None:
        """Take note of an upload that has ended on all ranks."""
        with self.clock.of("save_stall"):
            self.checkpointer.collect()
        self._export_save()

    def _export_save(self) -> None:
        saved = self.checkpointer.last
        if saved is not None:
            self.exporter.tell(
                checkpoint_seconds=saved.seconds,
                checkpoint_stall_seconds=saved.stall_seconds,
                checkpoint_bytes=saved.bytes,
                last_durable_step=saved.step,
                last_durable_timestamp_seconds=time.time(),
            )

    def _evict(self) -> int:
        """Make durable what the time allows, and say whether all of it is."""
        checkpointer, step = self.checkpointer, self.progress.step
        self.watchdog.stop()
        source, left = on_rank_zero(self.notice.source), -agree(-self.notice.seconds_left())[0]
        running = checkpointer.running_step
        unsaved = step - max(running or 0, checkpointer.durable_step or 0)
        decision = on_rank_zero(
            lambda: decide(left, running is not None, 0.0, *checkpointer.estimate, unsaved, checkpointer.running_seconds)
        )
        try:
            if decision == "save":
                self._save("eviction", None, wait=True)
            elif decision == "finish":
                self._collect()
            problem = ""
        except TrainerError as error:
            problem = error.message
        saved = checkpointer.durable_step == step or step == 0
        seconds = round(agree(self.notice.seconds_since())[0], 3)
        self._account()
        self.events.emit(
            "evicted",
            step=step,
            saved=saved,
            signal=source,
            seconds=seconds,
            decision=decision,
            **({"problem": problem} if problem else {}),
        )
        self.exporter.tell(sigterm_to_durable_seconds=seconds if saved else None)
        return EVICTED_SAVED if saved else EVICTED_UNSAVED

    def _hang(self, message: str) -> NoReturn:
        """End this process at once: nothing that stands still can be saved."""
        self.events.emit("hang", **self.watchdog.hang)
        self.work.report(self.rank, Outcome(HUNG, message))
        os._exit(HUNG)

    def close(self) -> None:
        """End what runs beside the training."""
        self.loader.close()
        self.checkpointer.close()


def train(config: RunConfig, order: Order, work: Work, events: Events) -> int:
    """Train, and give the exit code. Raises TrainerError, on every rank the same."""
    training = Training(config, order, work, events)
    code = training.run()
    training.close()
    return code


def be_deterministic(device: torch.device) -> None:
    """On a CPU, make the numbers depend on the run file only, not on the machine's cores or on which kernel wins a race."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def due(config: RunConfig, step: int) -> str | None:
    """Say why this step is saved, if it is; the timed reason is decided elsewhere."""
    checkpoint = config.checkpoint
    if step == config.train.steps:
        return "end"
    if checkpoint.milestone_steps and step % checkpoint.milestone_steps == 0:
        return "milestone"
    return "steps" if checkpoint.every_steps and step % checkpoint.every_steps == 0 else None


def finite(loss: float, step: int) -> float:
    """Pass a loss on; one that is no number must never reach a checkpoint."""
    if not math.isfinite(loss):
        raise TrainerError(
            f"the loss of step {step} is {loss}: the run diverged, and nothing after its last checkpoint was saved. "
            "Lower train.learning_rate or train.grad_clip, or give more train.warmup_steps"
        )
    return loss


class Meter:
    """Tokens per second over the training steps alone, without checkpoints, and how much of their time went into waiting for data."""

    def __init__(self) -> None:
        self._tokens, self._waited, self._seconds = 0, 0.0, 0.0

    def add(self, tokens: int, waited: float, seconds: float) -> None:
        """Count one step."""
        self._tokens, self._waited, self._seconds = self._tokens + tokens, self._waited + waited, self._seconds + seconds

    def read(self) -> tuple[float, float]:
        """Give the seconds waited for data and the rate, since the last reading."""
        waited, rate = round(self._waited, 3), round(self._tokens / self._seconds, 1)
        self._tokens, self._waited, self._seconds = 0, 0.0, 0.0
        return waited, rate

"""One rank that makes steps without data and saves them: the checkpoints of training, without the rest of it.

    RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. python -m tests.trainer.saver PLAN.json

The plan: config (a run file), attempt (claimed when absent), steps, save (steps to save).
"""

import hashlib
import io
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from training.catalog import Catalog
from training.checkpoint import state_of
from training.checkpointer import Checkpointer, Progress
from training.config import RunConfig
from training.dataset import Cursor, Manifest, Shard
from training.errors import TrainerError
from training.events import Events, claim_stdout
from training.optimizer import build_optimizer
from training.parallelize import build
from training.ranks import gather, on_rank_zero
from training.store import place_of
from training.work import Order, die_with_parent

DATASET = Manifest(
    name="none", tokenizer="bytes", vocabulary=256, tokens=8, dtype="uint8", shards=(Shard(name="a", bytes=8, tokens=8, sha256="0" * 64),)
)


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Give the SHA-256 of every whole tensor, by name, from whatever ranks it lies on."""
    state = state_of(model, optimizer)
    mine = {}
    for part in ("model", "optimizer"):
        for name, value in state[part].items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            mine[f"{part}.{name}"] = hashlib.sha256(whole.cpu().contiguous().numpy().tobytes()).hexdigest()
    return {name: value for part in gather(mine) for name, value in part.items()}


def main() -> int:
    """Save by the plan; the exit code is the trainer's."""
    die_with_parent()
    stdout = claim_stdout()
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    config = RunConfig.model_validate(plan["config"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    attempt = plan.get("attempt") or on_rank_zero(Catalog(place_of(config), config.run).claim)
    journal = Path(sys.argv[1]).with_suffix(".ledger") if rank == 0 else None
    if journal:
        journal.touch()
    events = Events(config.run, attempt, stdout if rank == 0 else io.StringIO(), journal)
    parts = build(config, torch.device("cpu"))
    model, optimizer = parts.module, build_optimizer(parts.module, config.train)
    torch.manual_seed(1000 + rank)
    checkpointer = Checkpointer(config, Order(plan["config"], attempt, time.time(), {}, 0), DATASET, {}, events)
    code = 0
    try:
        checkpointer.prepare(model, optimizer)
        progress = checkpointer.restore(model, optimizer) or Progress(0, 0.0, Cursor(config.train.seed))
        drawn = gather(torch.rand(1).item())
        events.emit("begun", step=progress.step, drawn=drawn, digests=digests(model, optimizer))
        for step in range(progress.step + 1, plan["steps"] + 1):
            if all(gather(checkpointer.finished())):
                checkpointer.collect()
            for parameter in model.parameters():
                parameter.grad = parameter.detach().sin()
            optimizer.step()
            optimizer.zero_grad()
            progress = Progress(step, 1.0 / step, progress.cursor.advanced(config.global_batch, 1000))
            if step in plan.get("save", []):
                events.emit("saving", step=step)
                checkpointer.save(progress, model, optimizer, reason="steps", goodput={"step": 1.0})
        drawn = gather(torch.rand(1).item())
        events.emit("ended", drawn=drawn, digests=digests(model, optimizer), running=checkpointer.running_step)
        checkpointer.collect()
    except TrainerError as error:
        events.emit("error", code=error.code, message=error.message)
        code = error.code
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Trains some steps on a mesh with the trainer's own parts, as one of torchrun's workers, and prints the losses."""

import json
import sys

import torch
import torch.distributed as dist

from training.config import RunConfig
from training.optimizer import build_optimizer, clip, learning_rate, set_learning_rate
from training.parallelize import build
from training.passes import mean_over_ranks, passes_of
from training.worker import be_quiet

ROWS, VALUES = 16, 64


def main() -> None:
    be_quiet()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    config = RunConfig.model_validate_json(sys.argv[1])
    train = config.train
    device = torch.device("cpu")
    parts = build(config, device)
    optimizer = build_optimizer(parts.module, train)
    passes = passes_of(config, parts, device)
    pipeline = parts.mesh.get_group("pipeline") if config.mesh.pipeline > 1 else None
    losses = []
    for step in range(1, train.steps + 1):
        draws = torch.randint(0, 16, (ROWS, train.sequence_length + 1), generator=torch.Generator().manual_seed(step))
        tokens = (draws.cumsum(1) % VALUES).view(train.accumulation, config.data_degree, train.batch_size, -1)[:, parts.data_rank]
        set_learning_rate(optimizer, learning_rate(step, train))
        optimizer.zero_grad()
        loss = passes.gradients(tokens)
        clip(parts.module, train.grad_clip, pipeline)
        optimizer.step()
        losses.append(mean_over_ranks(loss).item())
    windows = (torch.arange(5 * (train.sequence_length + 1)).view(5, -1) * 7) % VALUES
    losses.append(passes.validation(windows, lambda: None))
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

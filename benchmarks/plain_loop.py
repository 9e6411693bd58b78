"""The least that trains the same model: DDP, AdamW, clipping, tokens in memory. What `throughput.py` compares the trainer with.

torchrun --nproc-per-node 2 benchmarks/plain_loop.py MODEL STEPS BATCH LENGTH LOG_EVERY TOKENS_FILE EVENTS_FILE
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from training.model import Decoder, initialize
from training.models import MODELS
from training.work import die_with_parent


def main() -> None:
    """Train, and tell of every so many steps in a file."""
    die_with_parent()  # with torchrun, when that is killed
    shape, (steps, batch, length, log_every) = MODELS[sys.argv[1]], map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    decoder = Decoder(shape)
    initialize(decoder, "", shape.layers, 1)
    model = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.frombuffer(bytearray(Path(sys.argv[6]).read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(dist.get_rank())
    with Path(sys.argv[7]).open("a") as events:
        for step in range(1, steps + 1):
            rows = torch.stack([tokens[start : start + length + 1] for start in torch.randint(len(tokens) - length, (batch,)).tolist()])
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if dist.get_rank() == 0 and (step == 1 or step % log_every == 0):
                events.write(json.dumps({"event": "step", "step": step, "time": time.time(), "loss": loss.item()}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""How weights are changed: AdamW, clipping over all ranks, and a learning rate that is a pure function of the step."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from training.config import Train

BETAS = (0.9, 0.95)
FLOOR = 0.1  # the share of the peak learning rate at the last step of "cosine"


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """Decay matrices, not norms. The fused kernel works element by element, so its result does not depend on the order of work."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, train: Train) -> float:
    """Give the rate of step 1, 2, ... `steps` after a linear warm-up.

    cosine: half a cosine down to a tenth (arXiv 1608.03983, without restarts). wsd: constant, then over the last `decay_steps`
    linearly down to nothing (warm-up, stable, decay; arXiv 2404.06395), so that a run can be made longer before its decay begins.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "wsd":
        decay_steps = train.decay_steps or max(train.steps // 10, 1)
        return train.learning_rate * min(1.0, (train.steps - step + 1) / decay_steps)
    decay_steps = max(train.steps - train.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - train.warmup_steps) / decay_steps)))
    return train.learning_rate * (FLOOR + (1 - FLOOR) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use a rate from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, limit: float, pipeline: dist.ProcessGroup | None) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model, on whatever ranks it lies, is at most `limit`; give the norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=pipeline)
        norm = squared.sqrt()
    clip_grads_with_norm_(parameters, limit, norm)
    return norm

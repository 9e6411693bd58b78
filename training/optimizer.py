"""How weights are changed: AdamW, and a learning rate that is a pure function of the step."""

import math

import torch
from torch import nn

from training.config import Train

BETAS = (0.9, 0.95)
FLOOR = 0.1  # the share of the peak learning rate at the last step


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """Decay matrices, not norms. The fused kernel works element by element, so its result does not depend on the order of work."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, train: Train) -> float:
    """Give the rate of step 1, 2, ... `steps`: a linear warm-up, then half a cosine down to the floor."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    decay_steps = max(train.steps - train.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - train.warmup_steps) / decay_steps)))
    return train.learning_rate * (FLOOR + (1 - FLOOR) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use a rate from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate

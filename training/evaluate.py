"""The validation loss, computed in one way by the training and by whoever loads its checkpoint back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional


def precise(precision: str, device: torch.device) -> AbstractContextManager:
    """Give the context in which a model of this precision computes; fp8 is a matter of its layers, the rest of it is bfloat16."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)


@torch.no_grad()
def validation_loss(
    forward: Callable[[Tensor], Tensor],
    windows: Tensor,
    batch_size: int,
    vocabulary: int,
    precision: str,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> float:
    """Give the mean cross-entropy in nats per token over windows of shape (n, length + 1), `batch_size` of them at a time.

    `between` is called before each micro-batch: training looks for evictions there.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in windows.split(batch_size):
        between()
        batch = batch.to(device, torch.int64)
        with precise(precision, device):
            logits = forward(batch[:, :-1])
        total += functional.cross_entropy(logits.float().view(-1, vocabulary), batch[:, 1:].reshape(-1), reduction="sum")
    return (total / windows[:, 1:].numel()).item()

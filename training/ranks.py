"""The processes of a run as a group: how they meet, agree and stop together."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.errors import TrainerError

T = TypeVar("T")


def connect() -> torch.device:
    """Join the group and give this process its device. Control messages stay on the CPU, so they never wait for a GPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def leave() -> None:
    """End the group together: a rank that leaves early tears connections that others still use."""
    dist.barrier()
    dist.destroy_process_group()


def on_rank_zero(action: Callable[[], T]) -> T:
    """Do something once and give its result, or raise its TrainerError, on every rank."""
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = action()
        except TrainerError as error:
            result[1] = error
    dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
    if result[1] is not None:
        raise result[1]
    return result[0]


def gather(value: T) -> list[T]:
    """Give every rank the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(*values: float) -> list[float]:
    """Give each value's maximum over all ranks: what one knows, all know, and all act on it at the same place."""
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return together.tolist()

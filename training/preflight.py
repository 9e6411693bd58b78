"""The test of the network between the ranks, before the first step: a slow link found now costs seconds, found later it costs days."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from training import hardware
from training.config import RunConfig
from training.errors import PREFLIGHT, TrainerError

MIB, SMALLEST, GROWTH, PAIR_BYTES = 2**20, 2**16, 4, 2**22
TRIES, IN_A_ROW = 3, 4  # several in a row, so that it matters little who begins first


def preflight(config: RunConfig, device: torch.device) -> float | None:
    """Measure the bus bandwidth of an all-reduce in GB/s; None without other ranks, or when switched off.

    The same on every rank, as is the TrainerError when it is below the floor, which names the slowest pair of neighbours.
    """
    ranks, least = dist.get_world_size(), floor(config, device)
    if not config.preflight.enabled or ranks == 1:
        return None
    found = bus_bandwidth(device, config.preflight.megabytes * MIB)
    if least is None or found >= least:
        return found
    first, second, speed = slowest_pair(device)
    hosts = [""] * ranks
    dist.all_gather_object(hosts, os.uname().nodename)
    raise TrainerError(
        f"all {ranks} ranks together exchange {found:.3f} GB/s (bus bandwidth of an all-reduce), the floor is {least:g} GB/s. "
        f"The slowest pair is rank {first} on {hosts[first]} and rank {second} on {hosts[second]}, with {speed:.3f} GB/s: look at their "
        "network and GPUs, or set another floor with preflight.floor_gigabytes_per_second",
        PREFLIGHT,
    )


def floor(config: RunConfig, device: torch.device) -> float | None:
    """Give the least bandwidth in GB/s: the run file's, or that of the hardware when it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return config.preflight.floor_gigabytes_per_second or hardware.floor(name, config.nodes)


def bus_bandwidth(device: torch.device, largest: int) -> float:
    """All-reduce rising sizes in bytes, and give the bandwidth of the largest in GB/s: 2 (n - 1) / n x bytes / s."""
    size, seconds, ranks = SMALLEST // GROWTH, 0.0, dist.get_world_size()
    while size < largest:
        size = min(size * GROWTH, largest)
        payload = torch.zeros(size // 4, device=device)
        seconds = min(_seconds(device, [partial(dist.all_reduce, payload)] * IN_A_ROW) for _ in range(TRIES)) / IN_A_ROW
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 2 * (ranks - 1) / ranks * largest / slowest.item() / 1e9


def slowest_pair(device: torch.device) -> tuple[int, int, float]:
    """Send to each neighbour and back, one pair after the other, and give the slowest pair with its GB/s, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    speeds, payload = torch.zeros(ranks if ranks > 2 else 1, dtype=torch.float64), torch.zeros(PAIR_BYTES // 4, device=device)
    for first in range(len(speeds)):
        second = (first + 1) % ranks
        forth, back, peer = (dist.send, dist.recv, second) if rank == first else (dist.recv, dist.send, first)
        trip = [partial(forth, payload, peer), partial(back, payload, peer)] if rank in (first, second) else []
        seconds = [_seconds(device, trip) for _ in range(2)][1]  # the first time connects them
        speeds[first] = 2 * PAIR_BYTES / seconds / 1e9 if rank == first else 0.0
    dist.all_reduce(speeds)
    first = int(speeds.argmin())
    return first, (first + 1) % ranks, speeds[first].item()


def _seconds(device: torch.device, actions: Sequence[Callable[[], object]]) -> float:
    """Time what all ranks begin together."""
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    for action in actions:
        action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began

"""What the hardware can do, to compare measurements with. A GPU that is not in the table has no peak: a wrong one is worse than none.

Peaks are dense (no structured sparsity) tensor TFLOPS per GPU, from NVIDIA's data sheets of each product; the A10G's, little more than half
of the A10's 125, from NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022. The T4 has no bfloat16 units.
Floors are bus bandwidths in GB/s of an all-reduce of 16 MiB on one node. They lie far below a healthy node's (all_reduce_perf, large sizes:
8 H100 SXM 460-480, 8 A100 SXM 230-250, 8 H100 PCIe 35-45), so that only a broken path is below: NVLink lost, or TCP in its place.
"""

import re
from typing import NamedTuple

ANY_NETWORK, BETWEEN_GPU_NODES = 0.005, 0.1  # GB/s: gloo between CPUs; less than 1 Gbit/s between nodes carries no training


class Gpu(NamedTuple):
    """Peaks in TFLOPS, None when the GPU does not compute in that precision; the floor in GB/s."""

    bfloat16: float | None
    fp8: float | None
    floor: float


# By the whole of torch.cuda.get_device_name(): a slice of a GPU (MIG) and a product with a longer name have other peaks.
TABLE = {
    r"NVIDIA B200": Gpu(2250, 4500, 40),
    r"NVIDIA H200|NVIDIA H100 80GB HBM3": Gpu(989, 1979, 40),
    r"NVIDIA (H200|H100) NVL": Gpu(835, 1671, 2),
    r"NVIDIA H100 PCIe": Gpu(756, 1513, 2),
    r"(NVIDIA )?A100-SXM4-(40|80)GB": Gpu(312, None, 30),
    r"(NVIDIA )?A100(-PCIE-(40|80)GB| 80GB PCIe)": Gpu(312, None, 2),
    r"NVIDIA L40S": Gpu(362, 733, 2),
    r"NVIDIA L4": Gpu(121, 242, 1),
    r"NVIDIA A10G": Gpu(70, None, 1),
    r"(NVIDIA|Tesla) T4": Gpu(None, None, 0.5),
}


def gpu(name: str) -> Gpu | None:
    """Look up a GPU by the name its driver gives."""
    return next((row for pattern, row in TABLE.items() if re.fullmatch(pattern, name)), None)


def peak(name: str, precision: str) -> float | None:
    """Give the TFLOPS that a precision of the run file can reach at most; None when not known, as for float32 (TF32 or not?)."""
    return getattr(gpu(name), precision, None)


def floor(name: str | None, nodes: int) -> float | None:
    """Give the least bandwidth in GB/s that all ranks together must show. No name: CPUs. None: not known, anything will do."""
    row = Gpu(None, None, ANY_NETWORK) if name is None else gpu(name)
    return row and (row.floor if nodes == 1 else min(row.floor, BETWEEN_GPU_NODES))


def mfu(flops_per_token: float, tokens_per_second_per_gpu: float, peak: float | None) -> float | None:
    """Give the model FLOPS utilisation, from 0 to 1, for a peak in TFLOPS; None without a peak."""
    return None if peak is None else flops_per_token * tokens_per_second_per_gpu / (peak * 1e12)

"""A peak is right or absent."""

import pytest

from training.hardware import ANY_NETWORK, BETWEEN_GPU_NODES, floor, mfu, peak
from training.models import MODELS

PEAKS = {
    "NVIDIA B200": (2250, 4500),
    "NVIDIA H200": (989, 1979),
    "NVIDIA H100 80GB HBM3": (989, 1979),
    "NVIDIA H100 PCIe": (756, 1513),
    "NVIDIA H100 NVL": (835, 1671),
    "NVIDIA A100-SXM4-40GB": (312, None),
    "A100-SXM4-80GB": (312, None),
    "NVIDIA A100-PCIE-40GB": (312, None),
    "NVIDIA A100 80GB PCIe": (312, None),
    "NVIDIA L4": (121, 242),
    "NVIDIA L40S": (362, 733),
    "NVIDIA A10G": (70, None),
    "Tesla T4": (None, None),
}
UNKNOWN = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H20",
    "NVIDIA L40",
    "NVIDIA A10",
    "NVIDIA H100 96GB HBM2e",
    "NVIDIA GeForce RTX 4090",
    "",
)


@pytest.mark.parametrize("name", PEAKS)
def test_known_gpus_have_dense_peaks(name: str) -> None:
    assert (peak(name, "bfloat16"), peak(name, "fp8")) == PEAKS[name]
    assert floor(name, 1) is not None


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_gpu_that_only_resembles_a_known_one_has_neither_peak_nor_floor(name: str) -> None:
    assert peak(name, "bfloat16") is None
    assert floor(name, 1) is None


def test_float32_has_no_peak_to_compare_with() -> None:
    assert peak("NVIDIA H100 80GB HBM3", "float32") is None


def test_the_floor_depends_on_what_lies_between_the_ranks() -> None:
    assert floor(None, 1) == floor(None, 8) == ANY_NETWORK
    assert floor("NVIDIA H200", 1) == 40
    assert floor("NVIDIA H200", 4) == BETWEEN_GPU_NODES


def test_mfu_of_a_published_run() -> None:
    """6,667 tokens/s per H100 SXM at 8B and 8,192 tokens are torchtitan's 33 to 39 per cent."""
    found = mfu(MODELS["llama-8b"].flops_per_token(8192), 6667, 989)
    assert found == pytest.approx(0.39, abs=0.01)
    assert mfu(1e9, 1e4, None) is None

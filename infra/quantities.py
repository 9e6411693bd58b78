"""Kubernetes quantities as whole numbers: CPU in thousandths, memory in bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import Field

_SCALE = {
    "": Decimal(1),
    "m": Decimal(1) / 1000,
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
_CPU = r"^([1-9][0-9]*m|[0-9]+(\.[0-9]{1,3})?)$"
_MEMORY = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$"

CpuQuantity = Annotated[str, Field(pattern=_CPU, description="CPUs as Kubernetes writes them, quoted", examples=["1", "500m"])]
MemoryQuantity = Annotated[str, Field(pattern=_MEMORY, description="memory as Kubernetes writes it", examples=["4Gi", "512Mi"])]


def _exact(text: str) -> Decimal:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match.group(2) not in _SCALE:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 500m, 2 or 4Gi")
    return Decimal(match.group(1)) * _SCALE[match.group(2)]


def millicpu(text: str) -> int:
    """Return thousandths of a CPU: `millicpu("1.5") == 1500`."""
    return int(_exact(text) * 1000)


def memory_bytes(text: str) -> int:
    """Return bytes: `memory_bytes("4Gi") == 4 * 2**30`."""
    return int(_exact(text))


def cpu_text(milli: int) -> str:
    """Return thousandths of a CPU in the canonical form the API server answers with, so that nothing differs on the next preview."""
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def memory_text(count: int) -> str:
    """Return bytes in the largest binary unit that holds them exactly."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        size = int(_SCALE[unit])
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)

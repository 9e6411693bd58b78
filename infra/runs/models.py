"""The models the trainer can build, by name, with the dimensions that decide how they can be cut.

The trainer's own table says more; nothing here imports it, and tests/unit/infra/test_models_agree.py keeps the two the same.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ModelName = Literal["byte-1m", "byte-2m", "byte-3m", "byte-44m", "llama-160m", "llama-1b", "llama-3b", "llama-8b", "llama-70b"]


class Model(NamedTuple):
    """What of a model the degrees of a mesh must divide, or not exceed."""

    layers: int
    kv_heads: int
    hidden: int
    """Width of the feed-forward part."""
    vocabulary: int


MODELS: dict[ModelName, Model] = {
    "byte-1m": Model(layers=5, kv_heads=2, hidden=320, vocabulary=256),
    "byte-2m": Model(layers=2, kv_heads=4, hidden=768, vocabulary=256),
    "byte-3m": Model(layers=4, kv_heads=2, hidden=704, vocabulary=256),
    "byte-44m": Model(layers=7, kv_heads=4, hidden=2048, vocabulary=256),
    "llama-160m": Model(layers=12, kv_heads=12, hidden=2048, vocabulary=32_000),
    "llama-1b": Model(layers=16, kv_heads=8, hidden=8192, vocabulary=128_256),
    "llama-3b": Model(layers=28, kv_heads=8, hidden=8192, vocabulary=128_256),
    "llama-8b": Model(layers=32, kv_heads=8, hidden=14_336, vocabulary=128_256),
    "llama-70b": Model(layers=80, kv_heads=8, hidden=28_672, vocabulary=128_256),
}
"""The smallest first."""

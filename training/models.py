"""The named model configurations. A table without torch, so that a wrong name is found before torch is imported."""

from dataclasses import dataclass

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder; `kv_heads` below `heads` means that query heads share keys and values."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


MODELS: dict[str, ModelShape] = {
    "byte-1m": ModelShape(dim=128, layers=5, heads=2, kv_heads=2, hidden=320),
    "byte-2m": ModelShape(dim=256, layers=2, heads=4, kv_heads=4, hidden=768),
    "byte-3m": ModelShape(dim=256, layers=4, heads=4, kv_heads=2, hidden=704),
}

"""The named model configurations, with what each costs. A table without torch, so that a wrong name is found before torch is imported."""

from dataclasses import dataclass

BYTES = 256  # the vocabulary of the built-in tokenizer: a token is a byte
LLAMA = 128_256  # the vocabulary of Llama 3


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder; `kv_heads` below `heads` means that query heads share keys and values."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = BYTES
    rotary_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Count the trained numbers: two embeddings, and per layer attention, SwiGLU and two norms, and the last norm."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        return 2 * self.vocabulary * self.dim + self.layers * (attention + 3 * self.dim * self.hidden + 2 * self.dim) + self.dim

    def flops_per_token(self, length: int) -> int:
        """Give the floating-point operations of a forward and a backward pass for one token of a sequence of `length`.

        6 N + 12 layers x dim x length (PaLM, arXiv 2204.02311, appendix B), N without the input embedding, whose lookup multiplies nothing.
        Attention is counted in full although half of it is masked, and recomputed activations are not counted, as is the custom for MFU.
        """
        return 6 * (self.parameters - self.vocabulary * self.dim) + 12 * self.layers * self.dim * length


MODELS: dict[str, ModelShape] = {
    "byte-1m": ModelShape(dim=128, layers=5, heads=2, kv_heads=2, hidden=320),
    "byte-2m": ModelShape(dim=256, layers=2, heads=4, kv_heads=4, hidden=768),
    "byte-3m": ModelShape(dim=256, layers=4, heads=4, kv_heads=2, hidden=704),
    "byte-44m": ModelShape(dim=768, layers=7, heads=12, kv_heads=4, hidden=2048),
    "llama-160m": ModelShape(dim=768, layers=12, heads=12, kv_heads=12, hidden=2048, vocabulary=32_000),
    "llama-1b": ModelShape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocabulary=LLAMA, rotary_base=500_000.0),
    "llama-3b": ModelShape(dim=3072, layers=28, heads=24, kv_heads=8, hidden=8192, vocabulary=LLAMA, rotary_base=500_000.0),
    "llama-8b": ModelShape(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14_336, vocabulary=LLAMA, rotary_base=500_000.0),
    "llama-70b": ModelShape(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=LLAMA, rotary_base=500_000.0),
}

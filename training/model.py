"""A decoder in the manner of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. It knows nothing of other ranks."""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.models import ModelShape

INITIAL_STD = 0.02


def rotary_table(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the cosines and sines of each position, shape (length, head_dim / 2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + half) by the angle of its position; x is (batch, heads, length, head_dim)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads may share one head of keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim, self.grouped = shape.head_dim, shape.kv_heads < shape.heads
        self.query = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Let each position look at itself and what came before."""
        batch, length, _ = x.shape
        # With tensor parallelism the projections give this rank's heads only, hence -1.
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=self.grouped
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: a gated pair of projections and the way back."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own."""
        return self.output(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Refine the residual stream."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The language model: tokens in, the logits of the next token out. A pipeline stage has some of the layers, under their own names."""

    def __init__(self, shape: ModelShape, layers: range | None = None) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == shape.layers
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim) if first else None
        self.blocks = nn.ModuleDict({str(index): Block(shape) for index in layers})
        self.norm = nn.RMSNorm(shape.dim) if last else None
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False) if last else None
        self.sequence_parts = 1  # in how many pieces the sequence lies between the layers
        self._rotary: tuple[tuple[int, torch.device], tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary). Between stages of a pipeline flows the residual stream."""
        length = x.shape[1] if self.embedding is not None else x.shape[1] * self.sequence_parts
        cos, sin = self._positions(length, x.device)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return x if self.output is None or self.norm is None else self.output(self.norm(x))

    def _positions(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = length, device
        if self._rotary is None or self._rotary[0] != key:
            self._rotary = key, rotary_table(length, self.shape.head_dim, self.shape.rotary_base, device)
        return self._rotary[1]


def initialize(part: nn.Module, prefix: str, layers: int, seed: int) -> None:
    """Draw the weights of a part of the model, each parameter from a generator of its own that knows seed and full name.

    So the same model starts with the same weights however it is cut over ranks. Matrices that write into the residual stream are drawn
    smaller the more layers add up there (GPT-2).
    """
    for name, parameter in part.named_parameters():
        if parameter.ndim < 2:
            nn.init.ones_(parameter)
            continue
        digest = hashlib.sha256(f"{seed} {prefix}{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        residual = name.endswith(("attention.output.weight", "feed_forward.output.weight"))
        nn.init.normal_(parameter, std=INITIAL_STD / ((2 * layers) ** 0.5 if residual else 1), generator=generator)


def parameter_count(model: nn.Module) -> int:
    """Count the trained numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters())

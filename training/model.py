"""A decoder in the manner of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.models import VOCABULARY, ModelShape

ROTARY_BASE = 10_000.0
INITIAL_STD = 0.02


def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the cosines and sines of each position, shape (length, head_dim / 2)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + half) by the angle of its position; x is (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads may share one head of keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.query = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Let each position look at itself and what came before."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=self.kv_heads < self.heads
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
    """The language model: bytes in, the logits of the next byte out."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, VOCABULARY, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        """Draw weights small, and those that write into the residual stream smaller the more layers add up."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
        if isinstance(module, Attention | FeedForward):
            nn.init.normal_(module.output.weight, std=INITIAL_STD / (2 * self.shape.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary)."""
        cos, sin = rotary_table(tokens.shape[1], self.shape.head_dim, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.output(self.norm(x))


def parameter_count(model: nn.Module) -> int:
    """Count the trained numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters())

"""A byte-level GPT in plain PyTorch: nothing in this file knows that it may be distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT; ``width`` is cut into ``heads`` equal parts, ``context`` is the longest sequence in bytes."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 64
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention: [batch, sequence, width] to the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two layers with a GELU between them: [batch, sequence, width] to the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer of the transformer, with the norms before its parts."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Bytes [batch, sequence] to the logits of the next ones [batch, sequence, 256]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.bytes.weight

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: GPT, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the next bytes, in nats."""
    logits = model(tokens, places)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(text: bytes, config: Config, batch: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """``steps`` pairs of inputs and targets [batch, context], cut from ``text`` at random places."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - config.context, (steps, batch), generator=generator)
    windows = starts[..., None] + torch.arange(config.context)
    return [(data[window], data[window + 1]) for window in windows]

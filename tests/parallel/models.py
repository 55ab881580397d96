"""Modules for the tests of parallel styles, and what a module's twin on one rank says."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.parallel import parallelize_module
from shardwise.parallel.styles import ParallelStyle

Plan = dict[str, ParallelStyle]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mlp(width: int = 4, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).double()


class Block(nn.Module):
    """A transformer block whose attention splits the heads that this rank holds by view."""

    def __init__(self, width: int = 8, head: int = 2) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        split = [part(normed) for part in (self.query, self.key, self.value)]
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm(x))))


def line(name: str = "tp") -> shardwise.DeviceMesh:
    """A mesh of one axis over all ranks."""
    return shardwise.init_device_mesh("cpu", (shardwise.current_world().size,), mesh_dim_names=(name,))


def twins(
    make: Callable[[], nn.Module], plan: Plan | ParallelStyle, mesh: shardwise.DeviceMesh
) -> tuple[nn.Module, nn.Module]:
    """A parallel module and the plain one with the same parameters."""
    torch.manual_seed(1)
    plain = make()
    return parallelize_module(copy.deepcopy(plain), mesh, plan), plain


def assert_same_gradients(parallel: nn.Module, plain: nn.Module) -> None:
    found, wanted = dict(parallel.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        gradient = found[name].grad
        if parameter.grad is None:
            assert gradient is None, name
            continue
        whole = gradient.full_tensor() if isinstance(gradient, shardwise.DTensor) else gradient
        torch.testing.assert_close(whole, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")

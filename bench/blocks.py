"""Whole blocks beside torch.distributed.tensor: a gated MLP, the first call of attention, a transformer's first step.

Tensors are small, and the mesh stands on torch's `fake` backend, which moves no data. First calls are measured in a
process of their own each, since they happen once; what an implementation refuses is not a number.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
import shardwise.parallel

TP = 8
NAMES = ("ours", "theirs")


class Gated(nn.Module):
    """Norm, two ways up of which one gates the other, one way down."""

    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """Attention over heads, and a gated MLP."""

    def __init__(self, width: int = 64, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norm, self.mlp = nn.LayerNorm(width), Gated(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        split = [part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))


def set_up(name: str) -> tuple[object, object, object]:
    """The names of an implementation, its parallel styles and a mesh."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    ours = name == "ours"
    api = shardwise if ours else torch.distributed.tensor
    parallel = shardwise.parallel if ours else torch.distributed.tensor.parallel
    make = shardwise.init_device_mesh if ours else dist.init_device_mesh
    return api, parallel, make("cpu", (TP,), mesh_dim_names=("tp",))


def gated(name: str) -> Callable[[], object]:
    _, parallel, mesh = set_up(name)
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    block = parallel.parallelize_module(Gated(), mesh, {"gate": column(), "up": column(), "down": row()})
    x = torch.randn(2, 4, 64, requires_grad=True)

    def step() -> None:
        block(x).sum().backward()
        x.grad = None
        block.zero_grad()

    return step


def first_attention(name: str) -> float:
    """Milliseconds of the first call, heads over one axis and the batch over the other."""
    api, _, _ = set_up(name)
    make = shardwise.init_device_mesh if name == "ours" else dist.init_device_mesh
    mesh = make("cpu", (2, TP // 2), mesh_dim_names=("dp", "tp"))
    local = torch.randn(2, 2, 8, 16)
    q = api.DTensor.from_local(local, mesh, [api.Shard(0), api.Shard(1)], run_check=False)
    return milliseconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))


def first_step(name: str) -> float:
    """Milliseconds of the first forward and backward of a transformer's block, all calls cold."""
    _, parallel, mesh = set_up(name)
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    ways_in = dict.fromkeys(("query", "key", "value", "mlp.gate", "mlp.up"), column())
    block = parallel.parallelize_module(Block(), mesh, {**ways_in, "out": row(), "mlp.down": row()})
    x = torch.randn(2, 4, 64, requires_grad=True)
    return milliseconds(lambda: block(x).sum().backward())


def milliseconds(call: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e3


def alone(measure: Callable[[str], float], name: str) -> float:
    """What ``measure`` finds in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(measure, (name,))
        except NotImplementedError:
            return math.nan


def warm(make: Callable[[str], Callable[[], object]], rounds: int) -> list[float]:
    calls = [make(name) for name in NAMES]
    for call in calls:
        milliseconds(call, 10)
    samples = [[milliseconds(call, 10) for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Samples of what is warm.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(rounds: int, target: Path | None) -> None:
    """Print milliseconds on both implementations, and their ratio."""
    found = {
        "gated MLP, forward and backward": warm(gated, rounds),
        "first attention on a 2-d mesh": [alone(first_attention, name) for name in NAMES],
        "first step of a transformer block": [alone(first_step, name) for name in NAMES],
    }
    rows = []
    for name, (ours, theirs) in found.items():
        rows.append({"name": name, "unit": "ms", "ours": ours, "theirs": theirs})
        click.echo(f"{name:34} shardwise {ours:9.2f} ms   torch {theirs:9.2f} ms   ratio {ours / theirs:6.3f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

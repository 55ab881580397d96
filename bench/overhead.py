"""What the layer above the kernels costs: shardwise beside torch.distributed.tensor, in one process, in turn.

Tensors are tiny, and the mesh stands on torch's `fake` backend, which moves no data; what is left is the layer's own
time. *Warm*: the call was made before. *Cold*: the operator meets a shape for the first time.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

AXES = {"dp": 8, "tp": 8}
WARM_SECONDS = 0.01  # how long one round of a warm benchmark takes, about
COLD_CALLS = 16


@dataclass
class Bench:
    """Operands on one implementation's mesh: ``api`` has the names of torch.distributed.tensor."""

    api: ModuleType
    mesh: torch.distributed.DeviceMesh | shardwise.DeviceMesh

    def sharded(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """A batch: its first dim over dp. ``shape`` is the local one."""
        return self._place(torch.randn(shape), (self.api.Shard(0), self.api.Replicate()), grad)

    def weight(self, *shape: int, dim: int, grad: bool = False) -> torch.Tensor:
        """A weight whose ``dim`` is over tp."""
        return self._place(torch.randn(shape), (self.api.Replicate(), self.api.Shard(dim)), grad)

    def whole(self, *shape: int) -> torch.Tensor:
        return self._place(torch.randn(shape), (self.api.Replicate(), self.api.Replicate()), False)

    def _place(self, local: torch.Tensor, placements: tuple[object, ...], grad: bool) -> torch.Tensor:
        return self.api.DTensor.from_local(local, self.mesh, placements, run_check=False).detach().requires_grad_(grad)


Call = Callable[[], object]


def add(bench: Bench) -> Call:
    x, y = bench.sharded(4, 16), bench.sharded(4, 16)
    return lambda: x + y


def gelu(bench: Bench) -> Call:
    x = bench.sharded(4, 16)
    return lambda: F.gelu(x)


def mm_column(bench: Bench) -> Call:
    x, w = bench.sharded(4, 16), bench.weight(16, 4, dim=1)
    return lambda: x @ w


def linear(bench: Bench) -> Call:
    x, w, b = bench.sharded(2, 4, 16), bench.whole(16, 16), bench.whole(16)
    return lambda: F.linear(x, w, b)


def softmax(bench: Bench) -> Call:
    x = bench.sharded(4, 16)
    return lambda: torch.softmax(x, -1)


def layer_norm(bench: Bench) -> Call:
    x = bench.sharded(4, 16)
    return lambda: F.layer_norm(x, (16,))


def sum_over_shards(bench: Bench) -> Call:
    x = bench.sharded(4, 16)
    return lambda: x.sum(0)


def view(bench: Bench) -> Call:
    x = bench.sharded(2, 4, 16)
    return lambda: x.view(-1, 4, 4)


def from_local(bench: Bench) -> Call:
    local, placements = torch.randn(4, 16), (bench.api.Shard(0), bench.api.Replicate())
    return lambda: bench.api.DTensor.from_local(local, bench.mesh, placements, run_check=False)


def to_local(bench: Bench) -> Call:
    return bench.sharded(4, 16).to_local


def redistribute(bench: Bench) -> Call:
    x, target = bench.sharded(4, 16), (bench.api.Replicate(), bench.api.Replicate())
    return lambda: x.redistribute(bench.mesh, target)


def mlp_forward_backward(bench: Bench) -> Call:
    operands = (
        bench.sharded(4, 16, grad=True),
        bench.weight(16, 4, dim=1, grad=True),
        bench.weight(4, 16, dim=0, grad=True),
    )
    x, up, down = operands

    def step() -> None:
        (F.gelu(x @ up) @ down).sum().backward()
        for operand in operands:
            operand.grad = None

    return step


def adamw(bench: Bench) -> Call:
    parameters = [torch.nn.Parameter(bench.weight(4, 4, dim=0)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(parameters, foreach=True).step


def mesh_slice(bench: Bench) -> Call:
    return lambda: bench.mesh["tp"]


WARM = [
    add, gelu, mm_column, linear, softmax, layer_norm, sum_over_shards, view, from_local, to_local, redistribute,
    mlp_forward_backward, adamw, mesh_slice,
]  # fmt: skip

# Each takes a tensor of a shape that no call had before.
COLD: dict[str, Callable[[Bench, torch.Tensor], object]] = {
    "relu": lambda bench, x: torch.relu(x),
    "add": lambda bench, x: x + x,
    "softmax": lambda bench, x: torch.softmax(x, -1),
    "view": lambda bench, x: x.view(-1, 4, 4),
    "sum": lambda bench, x: x.sum(0),
    "layer_norm": lambda bench, x: F.layer_norm(x, (16,)),
}


def microseconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


def warm(make: Callable[[Bench], Call], benches: list[Bench], rounds: int) -> list[float]:
    """Median microseconds of a call on each implementation."""
    calls = [make(bench) for bench in benches]
    for call in calls:
        microseconds(call, 10)
    times = [max(3, min(1000, int(WARM_SECONDS * 1e6 / microseconds(call, 5)))) for call in calls]
    samples = [[microseconds(call, n) for call, n in zip(calls, times, strict=True)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def cold(call: Callable[[Bench, torch.Tensor], object], benches: list[Bench], sizes: count[int]) -> list[float]:
    """Median microseconds of a call at a new shape; the first two only load what is loaded once."""
    samples = []
    for size in (next(sizes) for _ in range(COLD_CALLS)):
        operands = [bench.sharded(size, 16) for bench in benches]
        pairs = zip(benches, operands, strict=True)
        samples.append([microseconds(lambda bench=bench, x=x: call(bench, x), 1) for bench, x in pairs])
    return [statistics.median(column) for column in zip(*samples[2:], strict=True)]


def set_up() -> list[Bench]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(AXES.values()))
    shape, names = tuple(AXES.values()), tuple(AXES)
    theirs = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    ours = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
    return [Bench(shardwise, ours), Bench(torch.distributed.tensor, theirs)]


@click.command()
@click.option("--only", default="", help="Run the benchmarks whose name matches this pattern.")
@click.option("--rounds", default=7, show_default=True, help="Rounds of each warm benchmark.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(only: str, rounds: int, target: Path | None) -> None:
    """Print the median time of each call on both implementations, and their ratio."""
    benches, sizes, rows = set_up(), count(5), []
    jobs = {f"warm {make.__name__}": lambda make=make: warm(make, benches, rounds) for make in WARM}
    jobs |= {f"cold {name}": lambda call=call: cold(call, benches, sizes) for name, call in COLD.items()}
    for name, job in jobs.items():
        if re.search(only, name):
            ours, theirs = job()
            rows.append({"name": name, "unit": "us", "ours": ours, "theirs": theirs})
            click.echo(f"{name:28} shardwise {ours:9.1f} us   torch {theirs:9.1f} us   ratio {ours / theirs:5.2f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

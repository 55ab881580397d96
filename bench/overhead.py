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
from functools import cached_property
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

    @cached_property
    def columns(self) -> torch.Tensor:
        """A weight cut by columns."""
        return self.weight(16, 4, dim=1)

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


@dataclass
class Operands:
    """What the one-line benchmarks work on."""

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    square: torch.Tensor
    bias: torch.Tensor
    batch: torch.Tensor
    indices: torch.Tensor
    target: torch.Tensor
    pending: torch.Tensor


def operands(bench: Bench) -> Operands:
    api, lies = bench.api, (bench.api.Shard(0), bench.api.Replicate())
    indices = api.DTensor.from_local(torch.randint(0, 16, (2, 4)), bench.mesh, lies, run_check=False)
    pending = api.DTensor.from_local(
        torch.randn(4, 16), bench.mesh, (api.Shard(0), api.Partial()), run_check=False
    ).detach()
    return Operands(
        x=bench.sharded(4, 16),
        y=bench.sharded(4, 16),
        w=bench.weight(16, 4, dim=1),
        square=bench.whole(16, 16),
        bias=bench.whole(16),
        batch=bench.sharded(2, 4, 16),
        indices=indices,
        target=bench.sharded(4, 16),
        pending=pending,
    )


# Each takes operands; what is made of them does not matter.
WARM: dict[str, Callable[[Operands], object]] = {
    "add": lambda on: on.x + on.y,
    "times a number": lambda on: on.x * 2.0,
    "relu": lambda on: torch.relu(on.x),
    "gelu": lambda on: F.gelu(on.x),
    "mm": lambda on: on.x @ on.w,
    "linear": lambda on: F.linear(on.batch, on.square, on.bias),
    "softmax": lambda on: torch.softmax(on.x, -1),
    "layer_norm": lambda on: F.layer_norm(on.x, (16,)),
    "sum of a sharded dim": lambda on: on.x.sum(0),
    "mean of all": lambda on: on.x.mean(),
    "view": lambda on: on.batch.view(-1, 4, 4),
    "transpose": lambda on: on.batch.transpose(1, 2),
    "slice": lambda on: on.x[:, 2:8],
    "cat": lambda on: torch.cat([on.x, on.y], 1),
    "chunk": lambda on: on.x.chunk(2, 1),
    "embedding": lambda on: F.embedding(on.indices, on.square),
    "add in place": lambda on: on.target.add_(on.y, alpha=1e-6),
    "detach": lambda on: on.x.detach(),
    "to_local": lambda on: on.x.to_local(),
    "full_tensor": lambda on: on.x.full_tensor(),
}


def from_local(bench: Bench) -> Call:
    local, placements = torch.randn(4, 16), [bench.api.Shard(0), bench.api.Replicate()]
    return lambda: bench.api.DTensor.from_local(local, bench.mesh, placements, run_check=False)


def redistributed(bench: Bench, source: str, *to: str) -> Call:
    api = bench.api
    named = {"S0": api.Shard(0), "S1": api.Shard(1), "R": api.Replicate()}
    x, target = getattr(operands(bench), source), [named[letters] for letters in to]
    return lambda: x.redistribute(bench.mesh, target)


def mlp_forward_backward(bench: Bench) -> Call:
    x = bench.sharded(4, 16, grad=True)
    up, down = bench.weight(16, 4, dim=1, grad=True), bench.weight(4, 16, dim=0, grad=True)

    def step() -> None:
        (F.gelu(x @ up) @ down).sum().backward()
        x.grad = up.grad = down.grad = None

    return step


def adamw(bench: Bench, foreach: bool) -> Call:
    parameters = [torch.nn.Parameter(bench.weight(4, 4, dim=0)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW(parameters, foreach=foreach).step


def clip_grad_norm(bench: Bench) -> Call:
    parameters = [torch.nn.Parameter(bench.weight(4, 4, dim=0)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9)


def one_line(run: Callable[[Operands], object]) -> Callable[[Bench], Call]:
    def make(bench: Bench) -> Call:
        on = operands(bench)
        return lambda: run(on)

    return make


MAKERS: dict[str, Callable[[Bench], Call]] = {
    **{name: one_line(run) for name, run in WARM.items()},
    "from_local": from_local,
    "redistribute to the same": lambda bench: redistributed(bench, "x", "S0", "R"),
    "redistribute R to S": lambda bench: redistributed(bench, "x", "S0", "S1"),
    "redistribute S to R": lambda bench: redistributed(bench, "x", "R", "R"),
    "redistribute P to S": lambda bench: redistributed(bench, "pending", "S0", "S1"),
    "mlp, forward and backward": mlp_forward_backward,
    "adamw of 20, foreach": lambda bench: adamw(bench, True),
    "adamw of 20, loop": lambda bench: adamw(bench, False),
    "clip_grad_norm of 20": clip_grad_norm,
    "mesh slice": lambda bench: lambda: bench.mesh["tp"],
    "mesh slice of two": lambda bench: lambda: bench.mesh["dp", "tp"],
    "mesh flatten again": lambda bench: lambda: bench.mesh._flatten("dp_tp"),
    "mesh local rank": lambda bench: lambda: bench.mesh.get_local_rank("tp"),
    "mesh group": lambda bench: lambda: bench.mesh.get_group("tp"),
}

# Each takes a tensor of a shape that no call had before.
COLD: dict[str, Callable[[Bench, torch.Tensor], object]] = {
    "relu": lambda bench, x: torch.relu(x),
    "add": lambda bench, x: x + x,
    "mm": lambda bench, x: x @ bench.columns,
    "softmax": lambda bench, x: torch.softmax(x, -1),
    "layer_norm": lambda bench, x: F.layer_norm(x, (16,)),
    "view": lambda bench, x: x.view(-1, 4, 4),
    "sum": lambda bench, x: x.sum(0),
    "cat": lambda bench, x: torch.cat([x, x]),
    "slice": lambda bench, x: x[:, 2:8],
    "redistribute": lambda bench, x: x.redistribute(bench.mesh, [bench.api.Replicate()] * 2),
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
    jobs = {f"warm {name}": lambda make=make: warm(make, benches, rounds) for name, make in MAKERS.items()}
    jobs |= {f"cold {name}": lambda call=call: cold(call, benches, sizes) for name, call in COLD.items()}
    for name, job in jobs.items():
        if re.search(only, name):
            ours, theirs = job()
            rows.append({"name": name, "unit": "us", "ours": ours, "theirs": theirs})
            click.echo(f"{name:28} shardwise {ours:9.1f} us   torch {theirs:9.1f} us   ratio {ours / theirs:5.2f}")
    for kind in ("warm", "cold"):
        ratios = [row["ours"] / row["theirs"] for row in rows if str(row["name"]).startswith(kind)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            click.echo(f"{kind}: geometric mean of {len(ratios)} ratios {mean:.3f}, the worst {max(ratios):.2f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

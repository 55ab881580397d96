"""What a change of placement costs above the wire: shardwise beside torch.distributed.tensor, in one process, in turn.

Tensors are tiny, and the mesh stands on torch's `fake` backend, which moves no data; what is left is the layer's own
time. *Warm*: the call was made before. *Cold*: the tensor has a shape that no call had before.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

AXES = {"dp": 2, "tp": 4}
WARM_SECONDS = 0.01  # how long one round of a warm benchmark takes, about
COLD_CALLS = 16

Call = Callable[[], object]
Sides = list[tuple[ModuleType, object]]  # an implementation's names, and its mesh

# From and to, as letters: R replicated, 0 and 1 sharded by that dim, P a sum pending.
CHANGES = ["0R RR", "00 RR", "R0 R1", "PR RR", "PP RR", "PR 0R", "RR 01", "01 10", "P0 0R"]


def placements(api: ModuleType, letters: str) -> list[object]:
    return [{"R": api.Replicate(), "P": api.Partial()}.get(letter) or api.Shard(int(letter)) for letter in letters]


def tensor(api: ModuleType, mesh: object, letters: str, rows: int, grad: bool = False) -> torch.Tensor:
    shape = [rows, 16]
    for size, letter in zip(AXES.values(), letters, strict=True):
        if letter.isdigit():
            shape[int(letter)] //= size
    local = torch.randn(shape)
    return api.DTensor.from_local(local, mesh, placements(api, letters), run_check=False).detach().requires_grad_(grad)


def change(api: ModuleType, mesh: object, before: str, after: str, rows: int = 16) -> Call:
    x, target = tensor(api, mesh, before, rows), placements(api, after)
    return lambda: x.redistribute(mesh, target)


def full_tensor(api: ModuleType, mesh: object, before: str) -> Call:
    return tensor(api, mesh, before, 16).full_tensor


def forward_backward(api: ModuleType, mesh: object, before: str, after: str) -> Call:
    x, target = tensor(api, mesh, before, 16, grad=True), placements(api, after)
    gradient = x.redistribute(mesh, target).detach()
    return lambda: torch.autograd.grad(x.redistribute(mesh, target), x, gradient)


def microseconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


def warm(calls: list[Call], rounds: int) -> list[float]:
    """Median microseconds of a call on each implementation."""
    for call in calls:
        microseconds(call, 10)
    times = [max(3, min(1000, int(WARM_SECONDS * 1e6 / microseconds(call, 5)))) for call in calls]
    samples = [[microseconds(call, n) for call, n in zip(calls, times, strict=True)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def cold(sides: Sides, before: str, after: str, rows: count[int]) -> list[float]:
    """Median microseconds of a change at a new shape; the first two only load what is loaded once."""
    samples = []
    for size in (next(rows) for _ in range(COLD_CALLS)):
        calls = [change(*side, before, after, size) for side in sides]
        samples.append([microseconds(call, 1) for call in calls])
    return [statistics.median(column) for column in zip(*samples[2:], strict=True)]


def jobs(sides: Sides, rounds: int) -> dict[str, Callable[[], list[float]]]:
    rows = count(16, 16)
    made: dict[str, Callable[[], list[float]]] = {}
    for before, after in (pair.split() for pair in CHANGES):
        made[f"warm redistribute {before} to {after}"] = lambda before=before, after=after: warm(
            [change(*side, before, after) for side in sides], rounds
        )
    for before in ("0R", "00", "PR"):
        made[f"warm full_tensor {before}"] = lambda before=before: warm(
            [full_tensor(*side, before) for side in sides], rounds
        )
    made["warm forward and backward 0R to RR"] = lambda: warm(
        [forward_backward(*side, "0R", "RR") for side in sides], rounds
    )
    for before, after in (pair.split() for pair in CHANGES):
        made[f"cold redistribute {before} to {after}"] = lambda before=before, after=after: cold(
            sides, before, after, rows
        )
    return made


def set_up() -> Sides:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(AXES.values()))
    shape, names = tuple(AXES.values()), tuple(AXES)
    theirs = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    ours = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)
    return [(shardwise, ours), (torch.distributed.tensor, theirs)]


@click.command()
@click.option("--only", default="", help="Run the benchmarks whose name matches this pattern.")
@click.option("--rounds", default=7, show_default=True, help="Rounds of each warm benchmark.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(only: str, rounds: int, target: Path | None) -> None:
    """Print the median time of each call on both implementations, and their ratio."""
    rows = []
    for name, job in jobs(set_up(), rounds).items():
        if re.search(only, name):
            ours, theirs = job()
            rows.append({"name": name, "unit": "us", "ours": ours, "theirs": theirs})
            click.echo(f"{name:36} shardwise {ours:9.1f} us   torch {theirs:9.1f} us   ratio {ours / theirs:5.2f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

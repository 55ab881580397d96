"""What a functional collective costs its caller: shardwise beside torch, in one process, in turn.

Tensors are tiny, and the group stands on torch's `fake` backend, which moves no data. A result is dropped unread, or
waited for, or used; with *gradient*, the input needs one.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import collectives as ours

SIZE = 8
TIMES = 100  # calls in one sample
Call = Callable[[], object]

x = torch.ones(16)
rows = torch.ones(16, 16)
leaf = torch.ones(16, requires_grad=True)
splits = [2] * SIZE

CALLS: dict[str, Callable[[ModuleType, object], Call]] = {
    "all_reduce": lambda c, g: lambda: c.all_reduce(x, "sum", g),
    "all_reduce, waited": lambda c, g: lambda: c.wait_tensor(c.all_reduce(x, "sum", g)),
    "all_reduce, used": lambda c, g: lambda: c.all_reduce(x, "sum", g) + 1,
    "all_reduce, gradient": lambda c, g: lambda: c.all_reduce(leaf, "sum", g),
    "all_gather 0": lambda c, g: lambda: c.all_gather_single(rows, 0, g),
    "all_gather 1": lambda c, g: lambda: c.all_gather_single(rows, 1, g),
    "reduce_scatter 0": lambda c, g: lambda: c.reduce_scatter_single(rows, "sum", 0, g),
    "reduce_scatter 1": lambda c, g: lambda: c.reduce_scatter_single(rows, "sum", 1, g),
    "all_to_all": lambda c, g: lambda: c.all_to_all_single(rows, splits, splits, g),
    "broadcast": lambda c, g: lambda: c.broadcast(x, 0, g),
    "permute": lambda c, g: lambda: c.permute_tensor(x, [*range(1, SIZE), 0], g),
    "all_reduce of 4": lambda c, g: lambda: c.all_reduce_coalesced([x] * 4, "sum", g),
    "all_gather of 4": lambda c, g: lambda: c.all_gather_into_tensor_coalesced([x] * 4, g),
    "reduce_scatter of 4": lambda c, g: lambda: c.reduce_scatter_tensor_coalesced([rows] * 4, "sum", [0] * 4, g),
}


def microseconds(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(TIMES):
        call()
    return (time.perf_counter() - start) / TIMES * 1e6


def measure(calls: list[Call], rounds: int) -> list[float]:
    """Median microseconds of each call, measured in turn."""
    for call in calls:
        call()
    samples = [[microseconds(call) for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


@click.command()
@click.option("--only", default="", help="Run the benchmarks whose name matches this pattern.")
@click.option("--rounds", default=9, show_default=True, help="Samples of each call.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(only: str, rounds: int, target: Path | None) -> None:
    """Print the median time of each call on both implementations, and their ratio."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    meshes = [module.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",)) for module in (shardwise, dist)]
    groups = {"": [dist.group.WORLD] * 2, " on a mesh": meshes}
    rows = []
    for name, make in CALLS.items():
        for suffix, pair in groups.items() if name == "all_reduce" else [("", groups[""])]:
            if re.search(only, name + suffix):
                calls = [make(module, group) for module, group in zip((ours, theirs), pair, strict=True)]
                mine, other = measure(calls, rounds)
                rows.append({"name": name + suffix, "unit": "us", "ours": mine, "theirs": other})
                click.echo(
                    f"{name + suffix:26} shardwise {mine:8.1f} us   torch {other:8.1f} us   ratio {mine / other:5.2f}"
                )
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

"""Warm views of distributed tensors beside PyTorch's own, in one process: microseconds a call, and the ratio.

python bench/views.py [--calls 2000]
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours

VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda x: x.view(8, 16, 4, 16),
    "flatten": lambda x: x.view(128, 64),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "slice beside": lambda x: x[:, 2:5],
    "select beside": lambda x: x[:, 3],
    "chunk beside": lambda x: x.chunk(2, 2),
    "slice along": lambda x: x[2:5],
    "select along": lambda x: x[3],
}


def microseconds(view: Callable[[torch.Tensor], object], x: torch.Tensor, calls: int) -> float:
    """The best of five runs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            view(x)
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


@click.command()
@click.option("--calls", default=2000, show_default=True, help="How many calls a run has.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(calls: int, target: Path | None) -> None:
    """Print the microseconds of each view on both implementations, and their ratio."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="4")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    dense = torch.randn(8, 16, 64)
    pair, rows = [], []
    for library in (ours, theirs):
        make = ours.init_device_mesh if library is ours else dist.init_device_mesh
        mesh = make("cpu", (4,), mesh_dim_names=("x",))
        pair.append(library.DTensor.from_local(dense[:2].clone(), mesh, [library.Shard(0)]))
    with torch.no_grad():
        for name, view in VIEWS.items():
            mine, other = (microseconds(view, x, calls) for x in pair)
            rows.append({"name": name, "unit": "us", "ours": mine, "theirs": other})
            click.echo(f"{name:14} shardwise {mine:8.2f} us   torch {other:8.2f} us   ratio {mine / other:5.2f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

"""Warm views of distributed tensors beside PyTorch's own, in one process: microseconds a call, and the ratio.

python bench/views.py [--calls 2000]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="4")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    dense = torch.randn(8, 16, 64)
    pair = []
    for library in (ours, theirs):
        make = ours.init_device_mesh if library is ours else dist.init_device_mesh
        mesh = make("cpu", (4,), mesh_dim_names=("x",))
        pair.append(library.DTensor.from_local(dense[:2].clone(), mesh, [library.Shard(0)]))
    print(f"{'view':14} {'ours':>8} {'torch':>8} {'ratio':>7}")
    with torch.no_grad():
        for name, view in VIEWS.items():
            mine, other = (microseconds(view, x, calls) for x in pair)
            print(f"{name:14} {mine:8.2f} {other:8.2f} {mine / other:7.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

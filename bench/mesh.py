"""What a device mesh of 65,536 ranks costs on one rank: shardwise beside torch, in one process, in turn.

Neither moves data: torch stands on its `fake` backend, shardwise on a dry world. *Cold*: everything is made for the
first time. *Warm*: it was made before.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.mesh.world import dry_world, use_world

SHAPE, NAMES = (1024, 8, 8), ("dp", "cp", "tp")
RANK, RANKS = 50_000, 65_536
CUTS = ("dp", "cp", "tp", ("dp", "cp"), ("dp", "tp"), ("cp", "tp"))
Mesh = shardwise.DeviceMesh | dist.DeviceMesh
Init = Callable[..., Mesh]


def make(init: Init) -> Mesh:
    return init("cpu", SHAPE, mesh_dim_names=NAMES)


def cut(mesh: Mesh) -> None:
    for names in CUTS:
        mesh[names]


def flatten(mesh: Mesh) -> None:
    mesh["cp", "tp"]._flatten("cp_tp").get_coordinate()


def seconds(call: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def cold(init: Init) -> dict[str, float]:
    """Milliseconds of each step on a new mesh, and of all together."""
    gc.collect()
    meshes: list[Mesh] = []
    steps = {"create": seconds(lambda: meshes.append(make(init)))}
    steps["slice each axis and pair"] = seconds(lambda: cut(meshes[0]))
    steps["flatten two axes"] = seconds(lambda: flatten(meshes[0]))
    steps["together"] = sum(steps.values())
    return {name: 1000 * took for name, took in steps.items()}


def megabytes(init: Init) -> float:
    """The peak of what Python allocates for all steps together; torch's groups in C++ come on top."""
    gc.collect()
    tracemalloc.start()
    mesh = make(init)
    cut(mesh)
    flatten(mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def warm(init: Init) -> dict[str, float]:
    """Microseconds of what was done before."""
    mesh = make(init)
    cut(mesh)
    flatten(mesh)
    calls = {"one axis": lambda: mesh["tp"], "two axes": lambda: mesh["cp", "tp"], "flatten": lambda: flatten(mesh)}
    return {name: 1e6 * statistics.median(seconds(call, 200) for _ in range(5)) for name, call in calls.items()}


def rows(unit: str, kind: str, ours: dict[str, float], theirs: dict[str, float]) -> list[dict[str, str | float]]:
    return [
        {"name": f"{kind} {name}", "unit": unit, "ours": took, "theirs": theirs[name]} for name, took in ours.items()
    ]


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds of the cold benchmarks; torch takes seconds each.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(rounds: int, target: Path | None) -> None:
    """Print what each step costs on both implementations, and their ratio."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    both: tuple[Init, Init] = shardwise.init_device_mesh, dist.init_device_mesh
    with use_world(dry_world(RANK, RANKS)):
        taken = [[cold(init) for init in both] for _ in range(rounds)]
        medians = [
            {name: statistics.median(one[side][name] for one in taken) for name in taken[0][side]} for side in (0, 1)
        ]
        found = rows("ms", "cold", *medians)
        found += rows("MB", "cold", *[{"memory": megabytes(init)} for init in both])
        found += rows("us", "warm", *[warm(init) for init in both])
    for row in found:
        ours, theirs = float(row["ours"]), float(row["theirs"])
        shown = f"{row['name']:30} shardwise {ours:10.4g} {row['unit']}   torch {theirs:10.4g} {row['unit']}"
        click.echo(f"{shown}   ratio {ours / theirs:.2g}")
    if target:
        target.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

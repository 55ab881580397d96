"""The bytes that ranks send and receive, as traced, beside those that plans say and those that are lacking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch import Tensor

from redistribute.layouts import coordinates, distributed, dry_mesh, mesh_of, reduced, settled, spec_of
from shardwise import sim
from shardwise.comm import wire
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute, planner
from shardwise.sharding.placement import (
    REDUCE_OPS,
    Owned,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from shardwise.sharding.spec import Spec

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16, torch.int64, torch.bool,
    torch.complex64,
]  # fmt: skip
SHAPES = [(), (12,), (7,), (1,), (0,), (24, 4), (5, 3), (2, 0), (1, 9), (6, 12, 2), (3, 5, 2), (1, 1, 1)]
Loads = tuple[int, int]  # bytes sent, bytes received


def lying(ndim: int, parts: int, dtype: torch.dtype, choose: random.Random) -> Placement:
    """Any placement at all on an axis of ``parts`` ranks."""
    kinds = ["replicated", "pending", *(["cut", "cut", "strided", "ragged"] if ndim else ["owned"])]
    dim = choose.randrange(max(ndim, 1))
    match choose.choice(kinds):
        case "cut":
            return Shard(dim)
        case "strided":
            return StridedShard(dim, split_factor=choose.choice([2, 3]))
        case "ragged":
            return RaggedShard(dim, (*(choose.randrange(3) for _ in range(parts - 1)), 2))
        case "owned":
            return Owned(choose.randrange(parts))
        case "pending":
            pending = Partial(choose.choice(REDUCE_OPS))
            sums = pending.reduce_op in ("sum", "avg") and dtype is torch.bool  # of which the terms are not unique
            return pending if pending.is_defined(dtype) and not sums else Replicate()
    return Replicate()


def cases(mesh: DeviceMesh, count: int) -> list[tuple[Spec, Spec]]:
    """Pairs of specs, of any dtypes and sizes, with a plan between them."""
    choose, found = random.Random(mesh.shape[0]), list[tuple[Spec, Spec]]()
    while len(found) < count:
        shape, dtype = choose.choice(SHAPES), choose.choice(DTYPES)
        sides = [[lying(len(shape), parts, dtype, choose) for parts in mesh.shape] for _ in range(2)]
        kept = [axis for axis in range(mesh.ndim) if choose.random() < 0.2 or all(s[axis].is_partial() for s in sides)]
        for axis in kept:
            sides[1][axis] = sides[0][axis]
        found.append((spec_of(mesh, sides[0], shape, dtype), spec_of(mesh, sides[1], shape, dtype)))
    return found


def dense(spec: Spec) -> Tensor:
    return (torch.arange(prod(spec.shape)) % 5 + 1).view(spec.shape).to(spec.meta.dtype)


def load(told: wire.Transmission) -> Loads:
    """What this rank sends and receives in a collective."""
    here = told.ranks.index(current_world().rank)
    if told.op == "broadcast":
        return (told.bytes, 0) if told.terms == (here,) else (0, told.bytes)
    if told.splits is None:
        return told.bytes, told.bytes
    row = prod(told.shape[1:]) * told.dtype.itemsize
    sent, received = ((sum(rows) - rows[here]) * row for rows in told.splits)
    assert sent == told.bytes
    return sent, received


def traced(mesh_shape: tuple[int, ...], asked: list[tuple[Spec, Spec]]) -> list[list[tuple[Tensor, list[Loads]]]]:
    """For each rank and pair: its local tensor afterwards, and its loads in each step."""
    held = [distributed(dense(src), src) for src, _ in asked]

    def body() -> Iterator[tuple[Tensor, list[Loads]]]:
        mesh, now = mesh_of(mesh_shape), list[Loads]()
        with wire.observing(lambda told: now.append(load(told))):
            for parts, (src, dst) in zip(held, asked, strict=True):
                loads, local = list[Loads](), parts[mesh.get_coordinate()].contiguous()
                for spec, step in planner.stages(src, planner.plan(src, dst)):
                    local = execute.run(local, spec, (step,))
                    loads.append(tuple(map(sum, zip((0, 0), *now, strict=True))))
                    now.clear()
                yield local, loads

    return sim.run(lambda: list(body()), prod(mesh_shape))


def lacking(src: Spec, dst: Spec, coordinate: tuple[int, ...]) -> int:
    """The bytes that the rank there is to hold and does not."""
    numbered = torch.arange(prod(src.shape)).view(src.shape)
    held, needed = (set[int](), set[int]())
    for spec, into in ((src, held), (dst, needed)):
        owned = [p.index == at for p, at in zip(spec.placements, coordinate, strict=True) if isinstance(p, Owned)]
        if all(owned):
            cuts = spec.with_placements([Replicate() if isinstance(p, Owned) else p for p in settled(spec).placements])
            into |= set(distributed(numbered, cuts)[coordinate].flatten().tolist())
    return len(needed - held) * src.meta.dtype.itemsize


@pytest.mark.parametrize("mesh_shape", [(4,), (3, 2), (2, 2, 2)], ids=str)
def test_bytes_traced_are_bytes_planned(mesh_shape: tuple[int, ...]) -> None:
    asked = cases(dry_mesh(mesh_shape), 240)
    for (src, dst), results in zip(asked, zip(*traced(mesh_shape, asked), strict=True), strict=True):
        at = dict(zip(coordinates(mesh_shape), results, strict=True))
        steps = list(planner.stages(src, planner.plan(src, dst)))
        for number, (spec, step) in enumerate(steps):
            loads = [tuple(loads[number]) for _, loads in results]
            assert tuple(map(max, zip(*loads, strict=True))) == step.traffic(spec), (src, dst, step)
        changed = [pair for pair in zip(src.placements, dst.placements, strict=True) if pair[0] is not pair[1]]
        if not any(placement.is_partial() for pair in changed for placement in pair):
            for coordinate, (_, loads) in at.items():
                assert sum(received for _, received in loads) == lacking(src, dst, coordinate), (src, dst, coordinate)
        expected = distributed(dense(dst), settled(dst))
        got = reduced({coordinate: local for coordinate, (local, _) in at.items()}, dst)
        for coordinate, local in got.items():
            owned = [p.index == i for p, i in zip(dst.placements, coordinate, strict=True) if isinstance(p, Owned)]
            assert local.dtype is dst.meta.dtype
            assert not all(owned) or torch.equal(local, expected[coordinate]), (src, dst, coordinate)

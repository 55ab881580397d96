"""The same changes of placement on real process groups."""

from __future__ import annotations

import itertools

import pytest
import torch

from gloo import run_gloo
from redistribute.layouts import coordinates, distributed, dry_mesh, mesh_of, placed, reduced, settled, spec_of
from shardwise import distribute_tensor
from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute import execute, planner
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard, StridedShard

SHAPE = (5, 6)
WAYS = placed(2, 2, StridedShard(0, split_factor=2))
Moved = tuple[list[float], list[float]]  # what a rank has at first and at last
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bfloat16, torch.int16)


def asked() -> list[tuple[torch.dtype, tuple[Placement, ...], tuple[Placement, ...]]]:
    pairs = list(itertools.product(WAYS, repeat=2))[::7]
    return [(dtype, *pair) for dtype, pair in zip(itertools.cycle(DTYPES), pairs)]


def whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(30).view(SHAPE).to(dtype) * (1j if dtype.is_complex else 1)


def results() -> list[torch.Tensor]:
    mesh, found = mesh_of((2, 2)), []
    for dtype, before, after in asked():
        src, dst = (spec_of(mesh, placements, SHAPE, dtype) for placements in (before, after))
        local = distributed(whole(dtype), src)[mesh.get_coordinate() or ()]
        found.append(execute.run(local, src, planner.plan(src, dst)))
    return found


def everything() -> tuple[list[torch.Tensor], Moved, Moved]:
    return results(), in_another_order(), across_meshes()


Found = list[tuple[list[torch.Tensor], Moved, Moved]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What four processes find, rank by rank."""
    return run_gloo(everything, 4)


@pytest.mark.gloo
def test_four_processes_find_what_the_dense_tensor_says(found: Found) -> None:
    for (dtype, before, after), *locals_ in zip(asked(), *(moved for moved, _, _ in found), strict=True):
        dst = spec_of(dry_mesh((2, 2)), after, SHAPE, dtype)
        got = reduced(dict(zip(coordinates((2, 2)), locals_, strict=True)), dst)
        for key, expected in distributed(whole(dtype), settled(dst)).items():
            torch.testing.assert_close(
                got[key], expected, rtol=0, atol=0, msg=f"{before} to {after} of {dtype} at {key}"
            )


def in_another_order() -> Moved:
    src = spec_of(DeviceMesh("cpu", [1, 0, 3, 2]), [Shard(0)], (8,))
    local = distributed(torch.arange(8.0), src)[src.mesh.get_coordinate() or ()]
    dst = src.with_placements([Replicate()])
    return local.tolist(), execute.run(local, src, planner.plan(src, dst)).tolist()


@pytest.mark.gloo
def test_a_mesh_in_another_order_of_ranks(found: Found) -> None:
    everywhere = torch.arange(8.0).tolist()
    expected = [([2.0, 3.0], everywhere), ([0.0, 1.0], everywhere), ([6.0, 7.0], everywhere), ([4.0, 5.0], everywhere)]
    assert [moved for _, moved, _ in found] == expected


def across_meshes() -> Moved:
    low, high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3, 1, 2])
    x = distribute_tensor(torch.arange(6.0), low, [Shard(0)], src_data_rank=None).requires_grad_()
    y = x.redistribute(high, [Shard(0)], async_op=True)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x)
    return y.to_local().tolist(), gradient.to_local().tolist()


@pytest.mark.gloo
def test_from_one_mesh_to_another_and_back(found: Found) -> None:
    assert [moved for _, _, moved in found] == [
        ([], [0.0, 2.0, 4.0]),
        ([2.0, 3.0], [6.0, 8.0, 10.0]),
        ([4.0, 5.0], []),
        ([0.0, 1.0], []),
    ]


def not_numbers() -> list[list[float]]:
    mesh, found = mesh_of((2,)), []
    rank = mesh.get_local_rank()
    for reduce_op, dtype in itertools.product(("max", "min"), (torch.float32, torch.bfloat16)):
        local = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [-2.0, 3.0], [-torch.inf, torch.inf]], dtype=dtype)
        src = spec_of(mesh, [Partial(reduce_op)], (4,), dtype)
        for dst in (Replicate(), Shard(0)):
            steps = planner.plan(src, src.with_placements([dst]))
            found.append(execute.run(local[:, rank].contiguous(), src, steps).nan_to_num(7).tolist())
    return found


@pytest.mark.gloo
def test_what_is_not_a_number_is_neither_largest_nor_smallest_but_stays() -> None:
    greatest, least = float(torch.finfo(torch.float32).max), float(torch.finfo(torch.float32).min)
    first, second = run_gloo(not_numbers, 2)
    assert first[0] == second[0] == [7.0, 7.0, 3.0, greatest]
    assert first[1] + second[1] == first[0]
    assert first[4] == second[4] == [7.0, 7.0, -2.0, least]
    assert first[5] + second[5] == first[4]
    assert first[2][:3] == first[3] + second[3][:1] == [7.0, 7.0, 3.0]

"""From one mesh to another, against the dense tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redistribute.layouts import distributed, placed, spec_of
from shardwise import DTensor, current_world, distribute_tensor, sim
from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.errors import RedistributeError
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.redistribute.transfer import transfer
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec

STRIDED = StridedShard(0, split_factor=2)
MESHES: dict[str, list[object]] = {
    "low": [0, 1],
    "high": [2, 3],
    "grid": [[0, 1], [2, 3]],
    "reordered": [3, 1, 0, 2],
    "beyond": [[3, 2], [0, 4]],
    "one": [2],
}


def part(whole: Tensor, spec: Spec) -> Tensor:
    """What this rank holds."""
    coordinate = spec.mesh.get_coordinate()
    return whole.new_zeros((0,) * whole.ndim) if coordinate is None else distributed(whole, spec)[coordinate].clone()


def ways(mesh: DeviceMesh, ndim: int, pending: bool) -> list[tuple[Placement, ...]]:
    found = placed(ndim, mesh.ndim, STRIDED)
    return [way for way in found if pending or not any(placement.is_partial() for placement in way)]


@pytest.mark.parametrize("source, target", list(itertools.product(MESHES, repeat=2)))
def test_the_tensor_is_the_same_on_the_other_mesh(source: str, target: str) -> None:
    whole = torch.arange(30.0).view(5, 6)

    def body() -> None:
        meshes = [DeviceMesh("cpu", MESHES[name]) for name in (source, target)]
        pairs = itertools.product(ways(meshes[0], 2, True), ways(meshes[1], 2, False))
        for before, after in list(pairs)[::9]:
            src, dst = spec_of(meshes[0], before, (5, 6)), spec_of(meshes[1], after, (5, 6))
            moved = transfer(part(whole, src), src, dst)
            assert torch.equal(moved, part(whole, dst)), (src, dst)

    sim.run(body, 6)


def sent_by(body: Callable[[], object], ranks: int) -> list[list[int]]:
    def watched() -> list[int]:
        sent: list[int] = []
        with wire.observing(lambda transmission: sent.append(transmission.bytes)):
            body()
        return sent

    return sim.run(watched, ranks)


def test_only_what_is_lacking_is_sent() -> None:
    def body() -> None:
        x = distribute_tensor(torch.zeros(8, 8), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
        x.redistribute(DeviceMesh("cpu", [1, 0, 2, 3]), [Shard(0)])

    # rows 0-3 on rank 0, 4-7 on rank 1, become 0-1 on 1, 2-3 on 0, 4-5 on 2, 6-7 on 3
    assert sent_by(body, 5) == [[64], [128], [0], [0], []]


def test_the_same_ranks_under_other_names_send_nothing() -> None:
    def body() -> DTensor:
        x = distribute_tensor(
            torch.zeros(8, 8), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)], src_data_rank=None
        )
        return x.redistribute(init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), [Shard(0)])

    assert sent_by(body, 4) == [[]] * 4


def test_gradients_come_back_to_the_source_mesh() -> None:
    dense = torch.randn(6, 4, dtype=torch.float64)

    def body() -> tuple[bool, Tensor, Tensor]:
        first, second = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [2, 3, 1, 0])
        x = distribute_tensor(dense, first, [Shard(0)], src_data_rank=None).requires_grad_()
        y = x.redistribute(second, [Shard(1)])
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second_gradient,) = torch.autograd.grad(gradient.pow(2).sum(), x)
        return gradient.device_mesh is first, gradient.to_local(), second_gradient.to_local()

    rows = dense.chunk(3)
    for rank, (same_mesh, once, twice) in enumerate(sim.run(body, 4)):
        assert same_mesh
        torch.testing.assert_close(once, 3 * rows[rank] ** 2 if rank < 3 else torch.zeros(0, 0, dtype=torch.float64))
        if rank < 3:
            torch.testing.assert_close(twice, 36 * rows[rank] ** 3)


def test_it_may_stay_on_the_wire() -> None:
    def body() -> tuple[bool, list[float]]:
        x = distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
        local = x.redistribute(DeviceMesh("cpu", [2, 3]), [Shard(0)], async_op=True).to_local()
        return isinstance(local, AsyncCollectiveTensor), (local + 0).tolist()

    assert sim.run(body, 4) == [(True, []), (True, []), (True, [0.0, 1.0]), (True, [2.0, 3.0])]


def test_a_part_of_a_mesh_is_served_by_the_whole() -> None:
    whole = torch.arange(30.0).view(5, 6)

    def body() -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        row = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).redistribute(mesh["tp"], [Shard(0)])
        return row.full_tensor(), row.redistribute(mesh["tp"].flatten("line"), [Shard(1)]).full_tensor()

    assert all(torch.equal(whole, x) for pair in sim.run(body, 6) for x in pair)


REFUSED: list[tuple[Callable[[DTensor, DeviceMesh], object], str]] = [
    (lambda x, mesh: x.redistribute(mesh, [Partial()]), "nothing can become pending on another mesh"),
    (lambda x, mesh: x.redistribute(DeviceMesh("meta", [0, 1]), [Shard(0)]), "different device types"),
    (lambda x, mesh: x.redistribute(mesh["tp"], [Shard(0)]).redistribute(mesh["dp"], [Shard(0)]), "has 2 parts"),
    (lambda x, mesh: x.redistribute(mesh["tp"], [Shard(0), Shard(0)]), "one placement for each mesh axis: 1, not 2"),
    (lambda x, mesh: x.redistribute(mesh["tp"], [Shard(2)]), "dim out of range"),
]


@pytest.mark.parametrize("ask, text", REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_is_refused_on_every_rank(ask: Callable[[DTensor, DeviceMesh], object], text: str) -> None:
    def body() -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0), Replicate()])
        with pytest.raises((RedistributeError, ValueError), match=text) as raised:
            ask(x, mesh["tp"] if text.startswith("nothing") else mesh)
        return str(raised.value).partition("\n")[0]

    assert len(set(sim.run(body, 4))) == 1


def test_ranks_in_neither_mesh_take_part_in_nothing() -> None:
    def body() -> list[int]:
        x = distribute_tensor(torch.zeros(4, 4), DeviceMesh("cpu", [0]), [Shard(0)], src_data_rank=None)
        return list(x.redistribute(DeviceMesh("cpu", [1, 2]), [Shard(0)]).to_local().shape)

    assert sim.run(body, 4) == [[0, 0], [2, 4], [2, 4], [0, 0]]


@pytest.mark.parametrize("async_op", [False, True])
def test_the_order_in_memory_is_that_of_the_whole_there_too(async_op: bool) -> None:
    whole = torch.arange(24.0).view(6, 4).t()

    def body() -> None:
        x = distribute_tensor(whole, DeviceMesh("cpu", [0, 1]), [Shard(0)])
        moved = x.redistribute(DeviceMesh("cpu", [2, 3]), [Shard(1)], async_op=async_op)
        local, rank = moved.to_local() + 0, current_world().rank
        if rank > 1:
            assert torch.equal(local, whole.chunk(2, 1)[rank - 2])
            assert local.stride() == (1, 4)

    sim.run(body, 4)

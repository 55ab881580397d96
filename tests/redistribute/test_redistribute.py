"""`DTensor.redistribute`: gradients, dtypes, overlap, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redistribute.layouts import mesh_of, placed
from shardwise import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor, sim
from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.errors import PlacementError, RedistributeError, ShardwiseError

CUTS = [way for way in placed(2, 2, StridedShard(0, split_factor=2)) if not any(p.is_partial() for p in way)]


def traced(body: Callable[[], object]) -> list[tuple[str, torch.dtype, bool]]:
    """Each collective: what it does, the dtype that travels, and whether it is a gradient's."""
    sent: list[tuple[str, torch.dtype, bool]] = []
    with wire.observing(lambda told: sent.append((told.op, told.dtype, told.backward))):
        body()
    return sent


@pytest.mark.parametrize("shape", [(8, 6), (5, 3)], ids=str)
def test_gradients_are_those_of_the_dense_tensor(shape: tuple[int, ...]) -> None:
    dense = torch.randn(shape, dtype=torch.float64)

    def body() -> None:
        mesh = mesh_of((2, 2))
        for before, after in list(itertools.product(CUTS, repeat=2))[::4]:
            x = distribute_tensor(dense, mesh, before, src_data_rank=None).requires_grad_()
            x.redistribute(placements=after).pow(3).sum().backward()
            assert x.grad is not None
            assert x.grad.placements == x.placements
            torch.testing.assert_close(x.grad.full_tensor(), 3 * dense**2)

    sim.run(body, 4)


@pytest.mark.parametrize("after", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_the_gradient_of_a_pending_sum_is_replicated(after: Placement) -> None:
    def body() -> tuple[tuple[Placement, ...], Tensor]:
        mesh = mesh_of((2,))
        x = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()]).detach().requires_grad_()
        x.redistribute(placements=[after]).pow(2).sum().backward()
        assert x.grad is not None
        return x.grad.placements, x.grad.to_local()

    for placements, gradient in sim.run(body, 2):
        assert placements == (Replicate(),)
        assert torch.equal(gradient, torch.full((4, 6), 4.0))  # of (1 + 1)^2


def test_dtypes_of_the_way_there_and_back() -> None:
    half, single, double = torch.bfloat16, torch.float32, torch.float64

    def body() -> tuple[list[tuple[str, torch.dtype, bool]], torch.dtype, torch.dtype]:
        x = distribute_tensor(torch.ones(4, 4), mesh_of((2,)), [Shard(0)], src_data_rank=None).requires_grad_()
        columns = distribute_tensor(torch.ones(4, 4), x.device_mesh, [Shard(1)], src_data_rank=None)
        kept: list[DTensor] = []

        def both() -> None:
            kept.append(x.redistribute(placements=[Shard(1)], forward_dtype=half, backward_dtype=double))
            (kept[0] * columns).sum().backward()

        return traced(both), kept[0].dtype, x.grad.dtype

    sent = [("all_to_all", half, False), ("all_to_all", double, True)]
    assert sim.run(body, 2) == [(sent, half, single)] * 2


def test_the_backward_dtype_counts_where_nothing_moves_forward() -> None:
    def body() -> torch.dtype:
        x = distribute_tensor(torch.ones(4), mesh_of((2,)), [Shard(0)], src_data_rank=None).requires_grad_()
        y = x.redistribute(placements=[Shard(0)], backward_dtype=torch.bfloat16)
        (y * 1.001).sum().backward()
        return x.grad.to_local().tolist()

    rounded = torch.tensor(1.001).bfloat16().item()
    assert sim.run(body, 2) == [[rounded] * 2] * 2


@pytest.mark.parametrize(
    "before, after",
    [((Shard(0), Shard(0)), (Replicate(), Replicate())), ((Partial(), Shard(1)), (Shard(0), Replicate())),
     ((Shard(1), Replicate()), (Replicate(), Shard(0)))],
    ids=str,
)  # fmt: skip
def test_an_asynchronous_result_waits_at_its_first_use(
    before: tuple[Placement, ...], after: tuple[Placement, ...]
) -> None:
    def body() -> tuple[bool, bool, bool]:
        x = DTensor.from_local(torch.ones(3, 2), mesh_of((2, 2)), before)
        late, soon = (x.redistribute(placements=after, async_op=way) for way in (True, False))
        local = late._local_tensor
        pending = isinstance(local, AsyncCollectiveTensor) and not local.completed
        return pending, torch.equal((late * 2).to_local(), (soon * 2).to_local()), bool(local.completed)

    assert sim.run(body, 4) == [(True, True, True)] * 4


def test_an_asynchronous_result_can_move_on_and_give_gradients() -> None:
    dense = torch.randn(6, 4, dtype=torch.float64)

    def body() -> tuple[Tensor, Tensor]:
        x = distribute_tensor(dense, mesh_of((3,)), [Shard(0)], src_data_rank=None).requires_grad_()
        y = x.redistribute(placements=[Shard(1)], async_op=True).redistribute(placements=[Replicate()], async_op=True)
        y.pow(2).sum().backward()
        return y.full_tensor().detach(), x.grad.full_tensor()

    for moved, gradient in sim.run(body, 3):
        torch.testing.assert_close(moved, dense)
        torch.testing.assert_close(gradient, 2 * dense)


REFUSED: list[tuple[tuple[Placement, ...], tuple[Placement, ...], type[ShardwiseError], str]] = [
    ((Partial(), Shard(0)), (Partial("max"), Shard(0)), RedistributeError, "cannot become"),
    ((Shard(0), Shard(0)), (Partial(), Shard(0)), RedistributeError, "cannot become"),
    ((Replicate(), Shard(0)), (Partial(), Shard(0)), RedistributeError, "cannot become"),
    ((Shard(0), Shard(0)), (Shard(2), Shard(0)), PlacementError, "dim out of range"),
    ((Shard(0), Shard(0)), (Shard(-3), Shard(0)), PlacementError, "dim out of range"),
    ((Shard(0), Shard(0)), (Shard(0),), PlacementError, "one placement for each mesh axis: 2, not 1"),
    ((Shard(0), Shard(0)), (Shard(0),) * 3, PlacementError, "one placement for each mesh axis: 2, not 3"),
    ((Partial("avg"), Shard(0)), (Replicate(), Shard(0)), RedistributeError, "no avg of i64"),
]


@pytest.mark.parametrize("before, after, kind, text", REFUSED, ids=lambda item: str(item))
def test_what_cannot_be_is_refused_on_every_rank_alike(
    before: tuple[Placement, ...], after: tuple[Placement, ...], kind: type[ShardwiseError], text: str
) -> None:
    """Also where some ranks hold nothing: 1 row on 4 ranks."""

    def body() -> tuple[str, int]:
        mesh = mesh_of((2, 2))
        rows = 1 if before[0] is not Shard(0) and mesh.get_local_rank("tp") == 0 else int(mesh.get_rank() == 0)
        x = DTensor.from_local(torch.ones(rows, 4, dtype=torch.int64), mesh, before, shape=(1, 4), stride=(4, 1))
        with pytest.raises(kind, match=text) as raised:
            x.redistribute(placements=after)
        return str(raised.value), len(traced(lambda: None))

    assert len(set(sim.run(body, 4))) == 1


def test_placements_must_be_given() -> None:
    def body() -> None:
        x = distribute_tensor(torch.ones(4), mesh_of((2,)), [Shard(0)])
        with pytest.raises(RedistributeError, match="needs placements"):
            x.redistribute()

    sim.run(body, 2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_gradient_of_what_does_not_move_comes_placed_as_the_tensor_is(placement: Placement) -> None:
    def body() -> None:
        x = distribute_tensor(torch.ones(4, 4), mesh_of((2,)), [placement]).requires_grad_()
        same = x.redistribute(placements=[placement])
        assert same.to_local().data_ptr() == x.to_local().data_ptr()
        assert traced(lambda: same.sum().backward()) == []
        assert x.grad is not None
        assert x.grad.placements == (placement,)
        assert torch.equal(x.grad.full_tensor(), torch.ones(4, 4))

    sim.run(body, 2)


def test_what_is_written_to_what_did_not_move_is_known_to_gradients() -> None:
    def body() -> None:
        x = distribute_tensor(torch.ones(4), mesh_of((2,)), [Shard(0)]).requires_grad_()
        y = x * 3
        square, same = y * y, y.redistribute(placements=[Shard(0)])
        same.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()
        same.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.full_tensor(), torch.full((4,), 6.0))

    sim.run(body, 2)

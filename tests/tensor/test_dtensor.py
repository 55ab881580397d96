"""DTensor: making, reading and moving one, and the gradients of all three."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from shardwise import (
    DTensor,
    Partial,
    PlacementError,
    RedistributeError,
    Replicate,
    RuleError,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
    sim,
)

PLACEMENTS = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(0), Shard(0)],
    [StridedShard(0, split_factor=2), Shard(0)],
    [Partial(), Shard(0)],
]


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2)], ids=str)
def test_distribute_then_full_tensor_is_identity(placements, shape) -> None:
    dense = torch.randn(shape)
    for full in sim.run(lambda: distribute_tensor(dense, grid(), placements).full_tensor(), 4):
        torch.testing.assert_close(full, dense)
        assert full.is_contiguous()


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
@pytest.mark.parametrize("target", PLACEMENTS[:-1], ids=str)
def test_redistribute_keeps_the_value_and_the_gradient(source, target) -> None:
    dense, weight = torch.randn(5, 4), torch.randn(5, 4)

    def body():
        x = distribute_tensor(dense, grid(), source).requires_grad_()
        moved = x.redistribute(placements=target)
        (moved * distribute_tensor(weight, grid(), [Replicate(), Shard(1)])).sum().backward()
        return moved.full_tensor().detach(), x.grad.full_tensor(), x.grad.placements

    for full, gradient, placements in sim.run(body, 4):
        torch.testing.assert_close(full, dense)
        torch.testing.assert_close(gradient, weight)
        assert not any(isinstance(placement, Partial) for placement in placements)


def test_from_local_infers_the_global_shape_and_strides() -> None:
    def body():
        x = DTensor.from_local(torch.ones(3, 2), grid(), [Shard(0), Shard(1)])
        return tuple(x.shape), x.stride(), x.full_tensor().shape

    assert sim.run(body, 4) == [((6, 4), (4, 1), torch.Size([6, 4]))] * 4


def test_from_local_refuses_a_part_of_the_wrong_size() -> None:
    def body():
        with pytest.raises(PlacementError, match="not this rank's part"):
            DTensor.from_local(torch.ones(3, 2), grid(), [Shard(0), Shard(1)], shape=(9, 4), stride=(4, 1))

    sim.run(body, 4)


def test_from_local_and_to_local_pass_gradients() -> None:
    parts = torch.randn(2, 3, 4)

    def body(scale):
        mesh = init_device_mesh("cpu", (2,))
        part = parts[mesh.get_local_rank()].clone().requires_grad_()
        whole = DTensor.from_local(part, mesh, [Shard(0)])
        (whole * scale).to_local().pow(2).sum().backward()
        return part.grad

    for rank, gradient in enumerate(sim.run(body, 2, 3.0)):
        torch.testing.assert_close(gradient, 18 * parts[rank])


def test_gradient_of_a_pending_part_is_replicated() -> None:
    """d/dpart of f(sum of parts) is the same on every rank: that of the whole."""
    parts = torch.randn(2, 3)

    def body():
        mesh = init_device_mesh("cpu", (2,))
        part = parts[mesh.get_local_rank()].clone().requires_grad_()
        DTensor.from_local(part, mesh, [Partial()]).redistribute(placements=[Replicate()]).pow(2).sum().backward()
        return part.grad

    for gradient in sim.run(body, 2):
        torch.testing.assert_close(gradient, 2 * parts.sum(0))


def test_to_local_takes_gradients_that_are_pending() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        (x.to_local(grad_placements=[Partial()]) * (mesh.get_local_rank() + 1)).sum().backward()
        return x.grad.full_tensor()

    for gradient in sim.run(body, 2):
        torch.testing.assert_close(gradient, torch.full((3,), 3.0))


def test_redistribute_casts_forward_and_backward() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        moved = x.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
        moved.sum().backward()
        return moved.dtype, x.grad.dtype, x.grad.placements

    assert sim.run(body, 2) == [(torch.bfloat16, torch.float32, (Shard(0),))] * 2


def test_second_derivatives_through_redistribute() -> None:
    dense = torch.randn(4, 3, dtype=torch.float64)

    def body():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(dense, mesh, [Shard(0)]).requires_grad_()
        (first,) = torch.autograd.grad(x.redistribute(placements=[Replicate()]).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return second.full_tensor()

    for second in sim.run(body, 2):
        torch.testing.assert_close(second, 36 * dense**3)


def test_bad_placements_are_refused() -> None:
    def body():
        mesh = grid()
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
        with pytest.raises(PlacementError, match="one placement for each mesh axis: 2, not 1"):
            x.redistribute(placements=[Shard(0)])
        with pytest.raises(PlacementError, match="dim out of range"):
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(2), Replicate()])
        assert x.redistribute(placements=[Shard(-1), Replicate()]).placements == (Shard(1), Replicate())

    sim.run(body, 4)


@pytest.mark.parametrize("source", [Replicate(), Shard(0), Partial("max")], ids=str)
def test_redistribute_makes_nothing_pending(source) -> None:
    def body():
        x = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [source])
        with pytest.raises(RedistributeError, match=r"cannot become P\(sum\)"):
            x.redistribute(placements=[Partial()])

    sim.run(body, 2)


def test_run_check_names_the_rank_that_differs() -> None:
    def body():
        mesh = init_device_mesh("cpu", (3,))
        with pytest.raises(PlacementError, match="rank 2 differs"):
            DTensor.from_local(torch.full((2,), mesh.get_local_rank() // 2), mesh, [Replicate()], run_check=True)

    sim.run(body, 3)


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Replicate(), Replicate()]], ids=str)
def test_all_ranks_of_the_mesh_name_the_replica_that_differs(placements) -> None:
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.tensor([1.0, 2.0 if mesh.get_coordinate() == (1, 1) else torch.nan])
        with pytest.raises(PlacementError, match=r"axis dp(.|\n)*rank 3 differs from rank 1") as raised:
            DTensor.from_local(local, mesh, placements, run_check=True)
        return str(raised.value)

    assert len(set(sim.run(body, 4))) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64], ids=str
)
def test_replicas_without_numbers_are_the_same(dtype) -> None:
    held = torch.tensor([1.0, torch.nan if dtype.is_floating_point or dtype.is_complex else 2.0]).to(dtype)

    def body():
        return DTensor.from_local(held.clone(), init_device_mesh("cpu", (2,)), run_check=True).to_local()

    assert all(str(found) == str(held) for found in sim.run(body, 2))


@pytest.mark.parametrize("shape", [(2,), (2, 2, 1)])
def test_a_shape_of_other_dims_than_the_parts_is_refused(shape) -> None:
    def body():
        with pytest.raises(PlacementError, match="parts of 2 dims"):
            DTensor.from_local(torch.ones(1, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=True, shape=shape)

    sim.run(body, 2)


def test_item_and_bool_of_a_pending_scalar_are_global() -> None:
    def body():
        total = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)]).sum()
        return total.placements, total.item(), float(total), bool(total == 28)

    assert sim.run(body, 4) == [((Partial(),), 28.0, 28.0, True)] * 4


def test_pickle_deepcopy_and_save() -> None:
    dense = torch.randn(5, 2)

    def body():
        x = nn.Parameter(distribute_tensor(dense, init_device_mesh("cpu", (2,)), [Shard(0)]))
        stored = io.BytesIO()
        torch.save(x, stored)
        stored.seek(0)
        copies = [pickle.loads(pickle.dumps(x)), copy.deepcopy(x), torch.load(stored)]
        for made in copies:
            assert (made.placements, made.device_mesh) == (x.placements, x.device_mesh)
            assert made.requires_grad
            assert made._local_tensor.data_ptr() != x._local_tensor.data_ptr()
        assert isinstance(copies[1], nn.Parameter)
        return [made.full_tensor() for made in copies]

    for rank in sim.run(body, 2):
        for full in rank:
            torch.testing.assert_close(full, dense)


def test_text_form() -> None:
    def body():
        return str(distribute_tensor(torch.ones(4, 2), grid(), [Shard(0), Partial()])._spec)

    assert sim.run(body, 4) == ["f32[4@dp, 2]{sum@tp}"] * 4


def test_a_rank_outside_the_mesh_takes_no_part() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        return (x + 1).to_local().tolist(), x.sum().to_local().numel()

    assert sim.run(body, 3)[:2] == [([1.0, 2.0], 1), ([3.0, 4.0], 1)]


def test_data_is_set_to_what_lies_alike_and_to_nothing_else() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        x = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        x.data = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with pytest.raises(PlacementError, match="lies like it"):
            x.data = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        with pytest.raises(RuleError, match="apply_"):
            x.apply_(lambda element: element)
        return x.full_tensor().tolist(), x.data.requires_grad

    assert sim.run(body, 2) == [([0.0, 1.0, 2.0, 3.0], False)] * 2


def test_the_parts_of_a_tensor_can_be_shared() -> None:
    def body():
        module = nn.Linear(3, 4)
        module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)]))
        assert not module.weight.is_shared()
        module.share_memory()
        return module.weight.is_shared(), module.weight.to_local().is_shared(), module.weight.sum().item()

    assert sim.run(body, 2) == [(True, True, 12.0)] * 2

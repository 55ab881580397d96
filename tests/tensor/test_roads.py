"""What may copy takes the cheapest road, however it is called: as a method, as a function, within another operator."""

from __future__ import annotations

import pytest
import torch

from shardwise import (
    InplaceError,
    RaggedShard,
    RedistributeError,
    Replicate,
    RuleError,
    Shard,
    ViewError,
    current_world,
    distribute_tensor,
    explicit,
    init_device_mesh,
    sim,
)
from shardwise.comm import wire

DENSE = torch.arange(40.0).view(5, 8)

CALLS = {
    "method": lambda x: x.reshape(4, 10),
    "list": lambda x: x.reshape([-1, 10]),
    "function": lambda x: torch.reshape(x, (4, 10)),
    "unbound": lambda x: torch.Tensor.reshape(x, 4, -1),
    "like another": lambda x: x.reshape_as(torch.empty(4, 10)),
    "flatten": lambda x: x.flatten(),
    "torch.flatten": lambda x: torch.flatten(x, 0, 1),
    "nn.Flatten": lambda x: torch.nn.Flatten(0)(x),
    "ravel": lambda x: torch.ravel(x),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "torch.unflatten": lambda x: torch.unflatten(x, -1, (2, 4)),
    "nn.Unflatten": lambda x: torch.nn.Unflatten(1, (2, 4))(x),
}


def cut(placement):
    return distribute_tensor(DENSE, init_device_mesh("cpu", (2,)), [placement]).requires_grad_()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard(1, (3, 5)), RaggedShard(0, (1, 4))], ids=str)
def test_values_and_gradients_are_those_of_the_whole(name, placement) -> None:
    dense = DENSE.clone().requires_grad_()
    (expected := CALLS[name](dense)).square().sum().backward()

    def body():
        x = cut(placement)
        found = CALLS[name](x)
        found.square().sum().backward()
        return found.full_tensor().detach(), x.grad.full_tensor()

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, (expected.detach(), dense.grad))


@pytest.mark.parametrize("name", CALLS)
def test_a_move_is_forbidden_in_every_one(name) -> None:
    def body() -> None:
        x, sent = cut(RaggedShard(1, (3, 5))), []
        for _ in range(2):  # unknown at first, remembered then
            with wire.observing(sent.append), explicit(), pytest.raises(RedistributeError, match="by itself"):
                CALLS[name](x)
            assert sent == []
            with explicit(False):
                CALLS[name](x)

    sim.run(body, 2)


def test_where_it_is_a_view_what_is_written_reaches_the_tensor() -> None:
    def body():
        x = cut(Shard(1)).detach()
        torch.flatten(x)[8:16].zero_()
        torch.unflatten(x, 1, (2, 4))[0, 1].fill_(7)
        with pytest.raises(InplaceError):
            x.reshape(4, 10).zero_()  # moved
        return x.full_tensor()

    expected = DENSE.clone()
    expected[1], expected[0, 4:] = 0, 7
    assert all(torch.equal(found, expected) for found in sim.run(body, 2))


WRITES = {
    "in place": lambda y: y.zero_(),
    "part": lambda y: y[0, 1].fill_(7),
    "out": lambda y: torch.add(y, 1, out=y),
    "list": lambda y: torch._foreach_add_([y], 1),
    "item": lambda y: y.__setitem__(0, 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_be_written_to_a_view_that_has_moved_is_refused(name) -> None:
    def body():
        x = cut(RaggedShard(1, (3, 5))).detach()
        moved = x.unflatten(1, (2, 4))
        with pytest.raises(InplaceError, match="clone"):
            WRITES[name](moved)
        WRITES[name](moved.clone())
        WRITES[name](x.unflatten(0, (1, 5)))
        return x.full_tensor()

    expected = DENSE.clone()
    WRITES[name](expected.unflatten(0, (1, 5)))
    assert all(torch.equal(found, expected) for found in sim.run(body, 2))


MOVED = {
    "reshape": lambda x: x.reshape(4, 2, 2, 5),
    "torch.reshape": lambda x: torch.reshape(x, (2, 2, 10, 2)),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_may_copy_is_written_to_where_torch_copies_and_else_refused(name) -> None:
    """Where nothing moves, it is a view."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain, turned = torch.zeros(4, 20), torch.zeros(20, 4).t()
        for placement in (RaggedShard(1, (3, 17)), RaggedShard(0, (3, 1)), Replicate()):
            x = distribute_tensor(plain, mesh, [placement])
            y = MOVED[name](x)
            if y.to_local().untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr():
                y.add_(1)
                assert torch.equal(x.full_tensor(), torch.ones(4, 20))
            else:
                with pytest.raises(InplaceError, match="clone"):
                    y.add_(1)
                assert torch.equal(y.clone().add_(1).full_tensor(), MOVED[name](plain) + 1)
            y = MOVED[name](distribute_tensor(turned, mesh, [placement]))
            if MOVED[name](turned).untyped_storage().data_ptr() != turned.untyped_storage().data_ptr():
                assert torch.equal(y.add_(1).full_tensor(), MOVED[name](turned) + 1)

    sim.run(body, 2)


def test_a_view_that_has_moved_is_forgotten_when_it_is_gone() -> None:
    def body() -> None:
        moved = cut(RaggedShard(1, (3, 5))).unflatten(1, (2, 4))
        assert len(current_world().memory["unseen"]) == 1
        del moved
        assert not current_world().memory["unseen"]

    sim.run(body, 2)


def test_a_view_stays_strict() -> None:
    def body() -> None:
        x = cut(Shard(1))
        for view in (lambda: x.view(4, 10), lambda: torch.Tensor.view(x, 4, 10), lambda: x.view_as(x.new_empty(4, 10))):
            with pytest.raises(ViewError, match="a view never communicates"):
                view()

    sim.run(body, 2)


STRIDED = {
    "slice": ((2, 8), (8, 1), 16),
    "steps": ((3, 8), (16, 1), 0),
    "block": ((2, 3), (8, 1), 17),
    "column": ((6,), (8,), 3),
    "turned": ((8, 6), (1, 8), 0),
    "regrouped": ((2, 3, 2, 4), (24, 8, 4, 1), 0),
    "entry": ((), (), 21),
    "spread": ((3, 8), (0, 1), 24),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dim", [0, 1])
def test_as_strided_is_the_view_that_it_is(name, dim) -> None:
    dense = torch.arange(48.0).view(6, 8).requires_grad_()
    (expected := dense.as_strided(*STRIDED[name])).square().sum().backward()
    written = dense.detach().clone()
    written.as_strided(*STRIDED[name]).zero_()

    def body():
        x = distribute_tensor(dense.detach(), init_device_mesh("cpu", (2,)), [Shard(dim)]).requires_grad_()
        sent = []
        with wire.observing(sent.append):
            found = x.as_strided(*STRIDED[name])
            y = x.detach().clone()
            y.as_strided(*STRIDED[name]).zero_()
        assert sent == []
        found.backward(2 * found.detach())
        return found.full_tensor().detach(), x.grad.full_tensor(), y.full_tensor()

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, (expected.detach(), dense.grad, written))


def test_as_strided_that_would_move_or_count_from_elsewhere_is_refused() -> None:
    def body() -> None:
        x = cut(Shard(0))
        for asked in [((2, 2, 2, 3), (1, 1, 1, 1), 0), ((4, 10), (10, 1), 0)]:
            with pytest.raises(ViewError, match="as_strided"):
                x.as_strided(*asked)
        with pytest.raises(RuleError, match="an offset counts from the start"):
            x[2:].as_strided((8,), (1,), 8)

    sim.run(body, 2)


@pytest.mark.parametrize("asked", [((3, 8), (16, 1), 0), ((8, 5), (1, 8), 0), ((4, 10), (10, 1), 0)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_copy_of_a_view_by_strides_is_that_of_the_whole(asked, dim) -> None:
    def body():
        x = cut(Shard(dim)).detach()
        found = torch.as_strided_copy(x, *asked)
        assert found.stride() == torch.as_strided_copy(DENSE, *asked).stride()
        found.zero_()
        return torch.as_strided_copy(x, *asked).full_tensor()

    assert all(torch.equal(found, DENSE.as_strided(*asked)) for found in sim.run(body, 2))

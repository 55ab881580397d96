"""Values at the edges: lazy conjugates, numbers that are not finite, integers that wrap, indices that are not there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    WorldError,
    current_world,
    distribute_tensor,
    init_device_mesh,
    sim,
)


def line():
    return init_device_mesh("cpu", (2,))


def lay(x: torch.Tensor, placement) -> DTensor:
    return distribute_tensor(x, line(), [placement])


def pending(x: torch.Tensor) -> DTensor:
    """``x``, of which the first rank holds all."""
    return DTensor.from_local(x if current_world().rank == 0 else torch.zeros_like(x), line(), [Partial()])


REDUCE = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}


def test_what_is_pending_over_two_axes_with_a_whole_tensor() -> None:
    terms, whole = torch.tensor([3.0, -2, 5, 4, -1, 7, 2, 6]).reshape(2, 2, 2), torch.tensor([1.0, 4])
    pairs = list(itertools.product(REDUCE, repeat=2))

    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        y, (row, column) = distribute_tensor(whole, mesh, [Replicate()] * 2), divmod(current_world().rank, 2)
        for pair in pairs:
            x = DTensor.from_local(terms[row, column], mesh, [Partial(each) for each in pair], run_check=False)
            yield (x + y).full_tensor(), torch.cat([x, y]).full_tensor()

    for found in sim.run(lambda: list(body()), 4):
        for (first, last), (added, joined) in zip(pairs, found, strict=True):
            x = REDUCE[first](REDUCE[last](terms, 1), 0)  # the last axis is reduced first
            torch.testing.assert_close((added, joined), (x + whole, torch.cat([x, whole])))


def test_conjugates_are_read_as_such_and_have_right_gradients() -> None:
    z, x = torch.tensor([1 + 2j, 2 + 5j]), torch.tensor([1.0, 2.0], requires_grad=True)
    (torch.complex(x, x) * torch.complex(x, -x)).real.sum().backward()

    def body():
        d, y = lay(z, Shard(0)), lay(x.detach(), Shard(0)).requires_grad_()
        (torch.complex(y, y) * torch.complex(y, -y)).real.sum().backward()
        found = [d.conj().sum(), d.conj() * d, d.conj().real, y.grad]
        return [
            *(each.full_tensor() for each in found),
            DTensor.from_local(z.conj(), line(), [Replicate()]).full_tensor(),
        ]

    for found in sim.run(body, 2):
        torch.testing.assert_close(
            found, [z.conj().sum(), z.conj() * z, z.conj().real, x.grad, z.conj().resolve_conj()]
        )


@pytest.mark.parametrize("number", [0.0, math.inf, -math.inf, math.nan])
def test_a_pending_sum_times_or_over_a_number_that_is_not_finite(number) -> None:
    x = torch.tensor([1.0, -2.0])

    def body():
        ordinary = (pending(x) * 2.0).full_tensor()
        return ordinary, (pending(x) * number).full_tensor(), (pending(x) / number).full_tensor()

    for ordinary, times, over in sim.run(body, 2):
        torch.testing.assert_close(ordinary, 2 * x)
        torch.testing.assert_close(times, x * number, equal_nan=True)
        torch.testing.assert_close(over, x / number, equal_nan=True)


def test_integers_wrap_as_they_do_on_one_device() -> None:
    x = torch.tensor([120], dtype=torch.int8)

    def body():
        largest = DTensor.from_local(x - current_world().rank, line(), [Partial("max")])
        return [each.full_tensor() for each in (largest + 10, -largest, largest**3, -100 - largest)]

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, [x + 10, -x, x**3, -100 - x])


def test_a_row_that_a_cut_embedding_does_not_have_is_an_error() -> None:
    def body(row):
        with pytest.raises(IndexError, match="out of range"):
            F.embedding(lay(torch.tensor([1, row]), Replicate()), lay(torch.randn(10, 2), Shard(0)))

    for row in (12, -1):
        sim.run(body, 2, row)


def test_a_list_times_one_pending_scalar() -> None:
    def body():
        x = lay(torch.arange(4.0), Shard(0))
        return [each.full_tensor() for each in torch._foreach_mul([x, x + 1], x.sum())]

    for found in sim.run(body, 2):
        torch.testing.assert_close(found, [6 * torch.arange(4.0), 6 * torch.arange(1.0, 5.0)])


def test_gradient_placements_that_give_another_shape_are_refused() -> None:
    def body():
        with pytest.raises(PlacementError, match="the shape of the part"):
            DTensor.from_local(torch.ones(2, requires_grad=True), line(), [Shard(0)], grad_placements=[Replicate()])

    sim.run(body, 2)


@pytest.mark.parametrize("size", ["2", 2.0, 0])
def test_a_world_has_a_whole_number_of_ranks(size) -> None:
    with pytest.raises(WorldError, match="no such world"):
        sim.run(lambda: None, size)


CONJUGATES = {
    "conj": lambda x: x.conj().mul_(2j),
    "conj of part": lambda x: x.conj()[1:].fill_(1 - 3j),
    "imag of conj": lambda x: x.conj().imag.fill_(3.0),
    "real of conj": lambda x: x.conj().real.zero_(),
    "adjoint": lambda x: x.mH.add_(1j),
    "negative": lambda x: torch._neg_view(x).add_(1),
    "conj of conj": lambda x: x.conj().conj().zero_(),
}


@pytest.mark.parametrize("name", CONJUGATES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_what_is_written_to_a_conjugate_is_written_to_the_tensor(name: str, placement: Placement) -> None:
    whole = torch.randn(3, 4, dtype=torch.complex128)
    want = whole.clone()
    CONJUGATES[name](want)

    def body() -> None:
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [placement])
        lazy = x.conj()
        assert lazy.is_conj()
        CONJUGATES[name](x)
        torch.testing.assert_close(x.full_tensor(), want)
        torch.testing.assert_close(lazy.full_tensor(), want.conj().resolve_conj())
        torch.testing.assert_close((lazy @ x.mT).full_tensor(), want.conj() @ want.mT)
        torch.testing.assert_close(lazy.redistribute(placements=[Shard(1)]).imag.full_tensor(), want.conj().imag)

    sim.run(body, 2)

"""Gradients of the functional collectives, first and second order, against autograd through what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.comm.dense import CASES, sample
from torch import Tensor

from shardwise import collectives as c
from shardwise import sim
from shardwise.mesh.world import current_world

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]

LINEAR = [name for name in CASES if not any(op in name for op in ("product", "min", "max"))]


def rank() -> int:
    return current_world().rank


def everyone() -> list[int]:
    return list(range(current_world().size))


def drawn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("n", [2, 3])
def test_adjoint_law(case: str, n: int) -> None:
    def program() -> tuple[float, float]:
        x = drawn(sample(0, n), rank()).requires_grad_()
        forth = CASES[case][0](x, everyone(), rank())
        y = drawn(forth, 100 + rank())
        (back,) = torch.autograd.grad(forth, x, y)
        assert type(back) is Tensor
        return float((forth * y).sum().detach()), float((x * back).sum().detach())

    pairs = torch.tensor(sim.run(program, n), dtype=torch.float64)
    assert torch.allclose(pairs[:, 0].sum(), pairs[:, 1].sum(), rtol=1e-12)  # <A x, y> = <x, A* y>, over all ranks


def loss(result: Tensor, seed: int) -> Tensor:
    return (result**3 * drawn(result, seed)).sum()


@pytest.mark.parametrize("case", CASES)
def test_first_and_second_order(case: str) -> None:
    n, (call, meaning) = 3, CASES[case]
    inputs = [sample(r, n) + 1 for r in range(n)]  # with ties, for min and max
    directions = [drawn(inputs[r], 50 + r) for r in range(n)]

    def program() -> list[Tensor]:
        x = inputs[rank()].clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(call(x, everyone(), rank()), rank()), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, x, directions[rank()])]

    whole = [x.clone().requires_grad_() for x in inputs]
    total = sum(loss(result, r) for r, result in enumerate(meaning(whole)))
    first = torch.autograd.grad(total, whole, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(first, whole, directions, materialize_grads=True)
    for r, got in enumerate(sim.run(program, n)):
        torch.testing.assert_close(got, [first[r].detach(), second[r]], rtol=1e-11, atol=1e-9)


class Together(torch.autograd.Function):
    """A program of every rank as one function of all their tensors: inputs and results in the order of the ranks."""

    @staticmethod
    def forward(ctx: object, program: Program, n: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.program, ctx.n = program, n
        ctx.save_for_backward(*xs)
        results = sim.run(lambda: [result.detach() + 0 for result in program(xs[rank() :: n])], n)
        return tuple(one for each in zip(*results, strict=True) for one in each)

    @staticmethod
    def backward(ctx: object, *ys: Tensor) -> tuple[Tensor | None, ...]:
        program, count = ctx.program, len(ctx.saved_tensors) // ctx.n

        def gradients(both: Sequence[Tensor]) -> Sequence[Tensor]:
            with torch.enable_grad():
                xs = [x if x.requires_grad else x.clone().requires_grad_() for x in both[:count]]
                found = torch.autograd.grad(program(xs), xs, both[count:], create_graph=True, materialize_grads=True)
            return found

        return None, None, *Together.apply(gradients, ctx.n, *ctx.saved_tensors, *ys)


@pytest.mark.parametrize("case", [*CASES, "coalesced"])
def test_gradcheck_over_all_ranks(case: str) -> None:
    n = 2

    def program(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        if case == "coalesced":
            whole = c.all_gather_into_tensor_coalesced([xs[0] ** 2, xs[0][0]], None)
            return c.reduce_scatter_tensor_coalesced(c.all_reduce_coalesced(whole, "avg", None), "sum", [2, 0], None)
        return [CASES[case][0](xs[0] ** 2, everyone(), rank())]

    inputs = [drawn(sample(0, n), r).requires_grad_() for r in range(n)]  # no ties
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *xs: Together.apply(program, n, *xs), inputs, fast_mode=True)


def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the sum of ``(rank + 1) * call(x)``."""
    x = torch.ones(2, 2).requires_grad_()
    ((rank() + 1) * call(x)).sum().backward()
    assert x.grad is not None
    return x.grad


def test_sum_forward_and_sum_backward() -> None:
    def program() -> list[Tensor]:
        x = torch.full((2, 2), rank() + 1.0)
        values = [c.sum_forward(x, None) + 0, c.sum_backward(x, None) + 0]
        return [*values, gradient(lambda x: c.sum_forward(x, None)), gradient(lambda x: c.sum_backward(x, None))]

    for r, (total, same, unchanged, summed) in enumerate(sim.run(program, 2)):
        assert [float(x.unique()) for x in (total, same, unchanged, summed)] == [3, r + 1, r + 1, 3]


def test_coalesced_gradients() -> None:
    def program() -> list[float]:
        calls = [
            lambda x: c.all_reduce_coalesced([x], "sum", None)[0],
            lambda x: c.all_gather_into_tensor_coalesced([x], None)[0],
        ]
        halves = gradient(lambda x: c.reduce_scatter_tensor_coalesced([x], "sum", [1], None)[0])
        return [float(gradient(call).unique()) for call in calls] + halves[0].tolist()

    assert sim.run(program, 2) == [[3, 3, 1, 2]] * 2


def test_gradients_pass_through_every_way_to_wait() -> None:
    def program() -> None:
        for wait in (c.wait_tensor, lambda y: y.wait(), lambda y: y.view(-1), lambda y: c.all_reduce(y, "avg", None)):
            assert torch.equal(
                gradient(lambda x, wait=wait: wait(c.all_reduce(x, "sum", None))), torch.full((2, 2), 3.0)
            )

    sim.run(program, 2)


def test_in_place_after_a_collective() -> None:
    def program() -> None:
        def call(x: Tensor) -> Tensor:
            return c.reduce_scatter_tensor(x, "sum", 1, None).mul_(2).wait().add_(1)

        assert gradient(call)[0].tolist() == [2, 4]

    sim.run(program, 2)


def test_nothing_is_recorded_where_autograd_is_off() -> None:
    with torch.no_grad():
        assert not c.all_reduce(torch.ones(2).requires_grad_(), "max", None).requires_grad

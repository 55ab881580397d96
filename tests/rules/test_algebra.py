"""Products, reductions, norms and scans: what they claim, on even, uneven and empty shards."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise import Shard, distribute_tensor, init_device_mesh, sim
from shardwise.rules import checker
from shardwise.rules.algebra import contracted, dims_of, root_of_sum
from shardwise.rules.rule import resolve
from shardwise.rules.table import lookup, make_call
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)


def claimed(op, *args, **kwargs) -> set[str]:
    """The strategies of a call on two ranks, in text; all of them must hold before the judge on 2, 3 and 5."""
    assert checker.problems(op, args, kwargs, sizes=(2, 3, 5)) == []
    return set(map(str, checker.strategies_of(op, args, kwargs, 2)))


def test_products_contract_what_both_have() -> None:
    assert "S(1) S(0) -> P(sum)" in claimed(aten.mm.default, rand(4, 5), rand(5, 3))
    assert "S(2) S(1) -> P(sum)" in claimed(aten.bmm.default, rand(2, 4, 5), rand(2, 5, 3))
    assert "S(0) S(0) -> S(0)" in claimed(aten.bmm.default, rand(2, 4, 5), rand(2, 5, 3))
    assert "S(0) S(0) -> P(sum)" in claimed(aten.dot.default, rand(5), rand(5))
    assert "S(0) R -> S(0)" in claimed(aten.mv.default, rand(4, 5), rand(5))


@pytest.mark.parametrize("bias", [(3,), (4, 3), (1, 3), (4, 1), ()])
def test_the_bias_of_a_product_is_added_once(bias: tuple[int, ...]) -> None:
    found = claimed(aten.addmm.default, rand(*bias), rand(4, 5), rand(5, 3), beta=0.5, alpha=2)
    assert "P(sum) S(1) S(0) -> P(sum)" in found
    assert "R S(1) S(0) -> P(sum)" not in found


def test_a_layer_is_cut_along_every_dim() -> None:
    found = claimed(aten.linear.default, rand(4, 5, 6), rand(7, 6), rand(7))
    assert {"S(1) R R -> S(1)", "R S(0) S(0) -> S(2)", "S(2) S(1) P(sum) -> P(sum)"} <= found
    assert "R S(0) - -> S(0)" in claimed(aten.linear.default, rand(6), rand(7, 6))


def test_sums_are_pending_over_what_was_cut() -> None:
    x = rand(5, 3)
    assert "S(0) -> P(sum)" in claimed(aten.sum.default, x)
    assert claimed(aten.sum.dim_IntList, x, [-1], True) >= {"S(0) -> S(0)", "S(1) -> P(sum)"}
    assert "S(0) -> P(sum)" in claimed(aten.sum.dim_IntList, x, None)
    assert "S(0) -> P(sum)" in claimed(aten.sum.default, x > 0)
    assert claimed(aten.sum.default, rand()) == {"R -> R", "P(sum) -> P(sum)", "P(avg) -> P(avg)"}


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_the_mean_is_over_the_global_count(size: int) -> None:
    assert "S(0) -> P(sum)" in claimed(aten.mean.default, rand(size, 3))
    assert "S(0) -> P(sum)" in claimed(aten.mean.dim, rand(size, 3), [0, 1], True)
    assert "S(0) -> P(sum)" in claimed(aten.mean.dim, rand(size, dtype=torch.float32), [0], dtype=torch.float64)


def test_the_mean_of_half_precision_does_not_overflow() -> None:
    x = torch.full((5, 300), 300.0, dtype=torch.float16)
    assert "S(1) -> P(sum)" in claimed(aten.mean.dim, x, [1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_extremes_fill_empty_shards_with_their_identity(size: int, dtype: torch.dtype) -> None:
    x = rand(size, 3).abs().to(dtype)
    assert "S(0) -> P(max)" in claimed(aten.amax.default, x, [0])
    assert "S(0) -> P(min)" in claimed(aten.amin.default, x, [0], True)
    assert "S(0) -> P(max)" in claimed(aten.max.default, x)
    assert "P(min) -> P(min)" in claimed(aten.min.default, x)
    assert "S(0) -> P(product)" in claimed(aten.prod.default, rand(size))


def test_a_product_of_complex_numbers_is_not_left_pending() -> None:
    x = torch.complex(rand(5, 3), rand(5, 3))
    assert not any("product" in text for text in claimed(aten.prod.default, x))
    assert claimed(aten.prod.dim_int, x, 0, True) == {"R -> R", "S(1) -> S(1)"}
    assert not any("product" in text for text in claimed(aten.prod.default, x.real, dtype=torch.complex128))
    assert "S(0) -> P(sum)" in claimed(aten.sum.default, x)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for places in ([Shard(0), Shard(1)], [Shard(0), Shard(0)]):
            start = distribute_tensor(x, mesh, places)
            for found, want in ((torch.prod(start), x.prod()), (torch.prod(start, 1), x.prod(1))):
                torch.testing.assert_close(found.full_tensor(), want)

    sim.run(body, 4)


def test_what_ranks_cannot_finish_for_each_other_is_whole() -> None:
    x = rand(5, 3)
    for op in (
        aten.max.dim,
        aten.argmax.default,
        aten.median.dim,
        aten.mode.default,
        aten.any.dim,
        aten.cummax.default,
    ):
        found = claimed(op, x, 1)
        assert any(text.startswith("S(0) -> S(0)") for text in found)
        assert not any("S(1)" in text or "P(" in text for text in found)
    assert claimed(aten.argmax.default, x) == {"R -> R"}
    assert claimed(aten.all.default, x > 0) == {"R -> R"}


def test_scans_are_linear_only_if_they_add() -> None:
    x = rand(5, 3)
    assert claimed(aten.cumsum.default, x, 1) == {
        "R -> R", "S(0) -> S(0)", "P(sum) -> P(sum)", "P(avg) -> P(avg)",
    }  # fmt: skip
    assert claimed(aten.cumprod.default, x, 0) == {"R -> R", "S(1) -> S(1)"}
    assert claimed(aten.logcumsumexp.default, x, -1) == {"R -> R", "S(0) -> S(0)"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_a_mean_is_over_the_global_count_and_its_sums_do_not_overflow(dtype: torch.dtype) -> None:
    whole = torch.full((1001, 2), 300.0).to(dtype) + torch.tensor([0, 100])

    def body():
        x = distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])
        return [found.full_tensor() for found in (x.mean(), x.mean(0), x.mean((0, 1), keepdim=True), x.mean(1))]

    expected = [whole.mean(), whole.mean(0), whole.mean((0, 1), keepdim=True), whole.mean(1)]
    torch.testing.assert_close(sim.run(body, 4)[3], expected)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [None, [0], [-1, 0]])
def test_norms(order: float, dims: list[int] | None) -> None:
    found = claimed(aten.linalg_vector_norm.default, rand(5, 3), order, dims)
    pending = {0: "P(sum)", 1: "P(sum)", 2: "P(norm)", math.inf: "P(max)", -math.inf: "P(min)"}.get(order)
    assert f"S(0) -> {pending}" in found or pending is None
    claimed(aten.linalg_vector_norm.default, rand(5, 3, dtype=torch.bfloat16), order, dims)
    claimed(aten.linalg_vector_norm.default, rand(5, 3).to(torch.complex64), order, dims)
    claimed(aten.linalg_vector_norm.default, rand(5, dtype=torch.float32), order, dtype=torch.float64)


def test_the_euclidean_norm_of_half_precision_does_not_overflow() -> None:
    x = torch.full((1000,), 300.0, dtype=torch.float16)
    torch.testing.assert_close(root_of_sum(x, 2.0), torch.linalg.vector_norm(x))

    def body():
        mesh = init_device_mesh("cpu", (3,))
        return distribute_tensor(x, mesh, [Shard(0)]).norm().full_tensor()

    torch.testing.assert_close(sim.run(body, 3)[0], x.norm())


def test_roots_of_sums_are_written_in_other_operators() -> None:
    def expanded(op, *args):
        x = TensorMeta.contiguous((4, 3), torch.float64)
        rule, _ = resolve(lookup(op), make_call(op, (x, *args), {}, [x]))
        return rule.expand is not None

    assert expanded(aten.linalg_vector_norm.default, 3)
    assert not expanded(aten.linalg_vector_norm.default, 1)
    assert expanded(aten.var.correction)
    assert expanded(aten.logsumexp.default, [0])


def test_variance_and_log_of_sums_of_difficult_numbers() -> None:
    x = rand(5, 3)
    for correction in (0, 1, 2.5, 5, 7):
        assert not checker.problems(aten.var.correction, (x, [0]), {"correction": correction})
        assert not checker.problems(aten.std.correction, (x,), {"correction": correction, "keepdim": True})
    y = x.clone()
    y[0, 0], y[1, 2] = math.inf, math.nan
    y[:, 1] = -math.inf
    assert not checker.problems(aten.logsumexp.default, (y, [0]), {})
    assert not checker.problems(aten.logsumexp.default, (y, [0, 1], True), {})


def test_texts_of_reductions() -> None:
    x = TensorMeta.contiguous((4, 3), torch.float32)
    assert contracted(x, [-1], True) == "d0 d1 -> d0 1"
    assert contracted(x).startswith("d0 d1 -> ")
    assert dims_of(x, []) == (0, 1)
    assert dims_of(TensorMeta.contiguous((), torch.float32), -1) == ()

"""Which pending reductions elementwise operators let pass, and that what they claim is right."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules import checker, pointwise
from shardwise.rules.table import lookup
from shardwise.sharding.placement import Replicate, Shard

aten = torch.ops.aten


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)


def passed(op, *args, **kwargs) -> set[str]:
    """The pending strategies of a call, in text; all strategies must hold before the judge."""
    assert checker.problems(op, args, kwargs) == []
    return {str(found) for found in checker.strategies_of(op, args, kwargs, 2) if "P(" in str(found)}


SUMS = {"P(sum) -> P(sum)", "P(avg) -> P(avg)"}
RISES = {"P(max) -> P(max)", "P(min) -> P(min)"}
FALLS = {"P(max) -> P(min)", "P(min) -> P(max)"}


@pytest.mark.parametrize("name", pointwise.RISING.split())
def test_rising_functions_rise(name: str) -> None:
    packet, _, overload = name.partition(".")
    options = {"decimals": 1} if overload else {}
    assert passed(getattr(getattr(aten, packet), overload or "default"), rand(5, 3), **options) == RISES


def test_multiplying_by_a_number_is_linear_and_keeps_or_turns_the_order() -> None:
    x = rand(5)
    assert passed(aten.neg.default, x) == SUMS | FALLS
    assert passed(aten.mul.Scalar, x, 2.5) == SUMS | RISES
    assert passed(aten.mul.Scalar, x, -2) == SUMS | FALLS
    assert passed(aten.mul.Scalar, x, 0) == SUMS
    assert passed(aten.div.Scalar, x, -2) == SUMS | FALLS
    assert passed(aten.mul.Tensor, x, 2.5) == {"P(sum) R -> P(sum)", "P(avg) R -> P(avg)"}


def test_adding_a_number_shifts_extremes_and_is_done_once_in_a_sum() -> None:
    x = rand(5)
    assert passed(aten.add.Tensor, x, 2.0) == {f"P({op}) R -> P({op})" for op in ("sum", "avg", "max", "min")}
    assert passed(aten.sub.Scalar, x, 2.0) == SUMS | RISES
    assert passed(aten.rsub.Scalar, x, 2.0) == SUMS | FALLS
    assert passed(aten.rsub.Scalar, x, 2.0, -1) == SUMS | RISES


def test_sums_and_products() -> None:
    x, y, mask = rand(5, 3), rand(3), rand(5, 3) > 0
    both = {"P(sum) P(sum) -> P(sum)", "P(avg) P(avg) -> P(avg)"}
    first = {"P(sum) R -> P(sum)", "P(avg) R -> P(avg)"}
    second = {"R P(sum) -> P(sum)", "R P(avg) -> P(avg)"}
    assert passed(aten.add.Tensor, x, y, alpha=3) == both
    assert passed(aten.sub.Tensor, x, y) == both
    assert passed(aten.mul.Tensor, x, y) == first | second
    assert passed(aten.mul.Tensor, x, mask) == first
    assert passed(aten.div.Tensor, x, y) == first
    assert passed(aten.div.Tensor_mode, x, y, rounding_mode="trunc") == set()
    assert passed(aten.lerp.Scalar, x, y, 0.3) == both


def test_a_tensor_without_dims_is_whole_wherever_the_other_is_cut() -> None:
    found = checker.strategies_of(aten.mul.Tensor, (rand(5, 3), rand()), {}, 2)
    assert "S(0) R -> S(0)" in map(str, found)
    assert passed(aten.add.Tensor, rand(5, 3), rand()) == {"P(sum) P(sum) -> P(sum)", "P(avg) P(avg) -> P(avg)"}


def test_choosing_is_linear_in_both_branches_together() -> None:
    condition, x, y = rand(5, 3) > 0, rand(5, 3), rand(3)
    assert "R P(sum) P(sum) -> P(sum)" in passed(aten.where.self, condition, x, y)
    assert passed(aten.masked_fill.Scalar, x, condition, 0) == {"P(sum) R -> P(sum)", "P(avg) R -> P(avg)"}
    assert passed(aten.masked_fill.Scalar, x, condition, -1e9) == {"P(sum) R -> P(sum)", "P(avg) R -> P(avg)"}
    assert "P(sum) R P(sum) -> P(sum)" in passed(aten.masked_fill.Tensor, x, condition, rand())


def test_integers_add_up_but_do_not_average() -> None:
    x, small = rand(5, dtype=torch.int64), rand(5, dtype=torch.int8)
    assert passed(aten.add.Tensor, x, x) == {"P(sum) P(sum) -> P(sum)"}
    assert passed(aten._to_copy.default, x, dtype=torch.float64) == {"P(sum) -> P(sum)", *RISES}
    assert passed(aten._to_copy.default, small, dtype=torch.int64) == set()
    assert passed(aten._to_copy.default, rand(5), dtype=torch.int64) == set()
    assert passed(aten._to_copy.default, rand(5), dtype=torch.bool) == set()
    assert passed(aten._to_copy.default, rand(5), dtype=torch.float32) == SUMS | RISES


def test_gradients_pass_where_what_was_saved_is_whole() -> None:
    x, y = rand(5, 3), rand(5, 3)
    first = {"P(sum) R -> P(sum)", "P(avg) R -> P(avg)"}
    for op, rest in [(aten.sigmoid_backward, ()), (aten.tanh_backward, ()), (aten.threshold_backward, (0.0,)),
                     (aten.gelu_backward, ()), (aten.silu_backward, ())]:  # fmt: skip
        assert passed(op.default, x, y, *rest) == first
    assert passed(aten.native_dropout_backward.default, x, y > 0, 2.0) == first


def test_activations_with_slopes() -> None:
    x = rand(5)
    assert passed(aten.leaky_relu.default, x, 0.1) == RISES
    assert passed(aten.leaky_relu.default, x, -0.1) == set()
    assert passed(aten.threshold.default, x, 0.0, 7.0) == set()
    assert passed(aten.pow.Tensor_Scalar, x, 3) == RISES
    assert passed(aten.pow.Tensor_Scalar, x, 2) == set()
    assert passed(aten.clamp.default, x, -1, 1) == RISES
    assert passed(aten.sqrt.default, x.abs()) == set()  # not defined on the parts of a maximum


def test_in_place_writers_of_a_constant() -> None:
    x = rand(5, 3)
    assert passed(aten.zero_.default, x) >= SUMS
    assert passed(aten.fill_.Scalar, x, 0) >= SUMS
    assert passed(aten.fill_.Scalar, x, 2) == SUMS
    assert "P(sum) P(sum) -> P(sum)" in passed(aten.copy_.default, x, rand(3))


def test_optimizer_arithmetic_runs_where_the_parameters_lie() -> None:
    x, y, z = rand(5, 3), rand(5, 3), rand(5, 3).abs() + 1
    for op, args in [(aten.addcdiv_.default, (x, y, z)), (aten.addcmul_.default, (x, y, z)),
                     (aten.lerp_.Scalar, (x, y, 0.1)), (aten.sqrt.default, (z,)), (aten.maximum.default, (x, y)),
                     (aten.mul_.Tensor, (x, rand())), (aten.sign.default, (x,))]:  # fmt: skip
        found = checker.strategies_of(op, args, {}, 3)
        cuts = [strategy for strategy in found if strategy.outputs == (Shard(0),)]
        assert [set(strategy.inputs) - {Replicate()} for strategy in cuts] == [{Shard(0)}]
        assert checker.problems(op, args, {}) == []


def test_lookup_of_an_unlisted_function() -> None:
    assert lookup(aten.hypot.default).meaning == "f(..., ...) -> ..."
    assert passed(aten.hypot.default, rand(5), rand(5)) == set()

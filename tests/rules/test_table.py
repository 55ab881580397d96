"""The lookup, the variants that follow from schemas, and the normal form of calls."""

from __future__ import annotations

import pytest
import torch

from shardwise import distribute_tensor, init_device_mesh, sim
from shardwise.errors import EquationError, InplaceError, RuleError
from shardwise.rules import algebra, checker, pointwise
from shardwise.rules.rule import choices
from shardwise.rules.table import (
    FAMILIES,
    foreach_base,
    foreach_entries,
    lookup,
    make_call,
    register_rule,
    unregister_rule,
)
from shardwise.sharding.placement import Partial, Replicate, Shard
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta.contiguous(shape, dtype)


def test_exact_overloads_come_before_names() -> None:
    assert lookup(aten.sum.default).meaning is algebra.RULES["sum.default"]
    assert lookup(aten.sum.dim_IntList).meaning is algebra.RULES["sum.dim_IntList"]
    assert lookup(aten.bmm.default).meaning == algebra.RULES["bmm"]


def test_no_operator_has_two_rules() -> None:
    names = [name for family in FAMILIES for name in family]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_every_named_operator_exists() -> None:
    for name in [*pointwise.RULES, *algebra.RULES]:
        packet, _, overload = name.partition(".")
        assert hasattr(aten, packet), name
        assert not overload or overload in getattr(aten, packet).overloads(), name


def test_pointwise_operators_need_no_entry() -> None:
    assert "atan2" not in pointwise.RULES
    assert lookup(aten.atan2.default).meaning == "f(..., ...) -> ..."
    assert lookup(aten.frexp.Tensor).meaning == "f(...) -> ..., ..."


def test_in_place_means_the_same_over_operand_zero() -> None:
    assert lookup(aten.add_.Tensor).in_place
    x = torch.randn(5, 3)
    found = checker.strategies_of(aten.add_.Tensor, (x[:1], x[:1] * 2), {}, 2)
    assert all(strategy.inputs[0] == strategy.outputs[0] for strategy in found)
    assert not checker.problems(aten.add_.Tensor, (x, x * 2), {})
    assert not checker.problems(aten.cumsum_.default, (x, 1), {})
    assert not checker.problems(aten.sigmoid_.default, (x,), {})


def test_out_operands_lie_as_the_outputs_do() -> None:
    a, b, out = torch.randn(4, 6), torch.randn(6, 3), torch.empty(4, 3)
    found = checker.strategies_of(aten.mm.out, (a, b), {"out": out}, 2)
    assert all(strategy.inputs[2] == strategy.outputs[0] for strategy in found)
    assert any(strategy.outputs == (Partial("sum"),) for strategy in found)
    assert not checker.problems(aten.mm.out, (a, b), {"out": out})
    assert not checker.problems(aten.mean.out, (a, [0]), {"out": torch.empty(6)})


def test_out_of_several_results() -> None:
    x = torch.randn(4, 6)
    args = (x, 1), {"max": torch.empty(4), "max_values": torch.empty(4, dtype=torch.int64)}
    assert lookup(aten.max.dim_max).out == 2
    assert not checker.problems(aten.max.dim_max, *args)


@pytest.mark.parametrize(
    ("foreach", "base"),
    [
        (aten._foreach_add_.List, aten.add_.Tensor),
        (aten._foreach_add.Scalar, aten.add.Scalar),
        (aten._foreach_mul.Scalar, aten.mul.Scalar),
        (aten._foreach_mul_.ScalarList, aten.mul_.Scalar),
        (aten._foreach_mul_.Tensor, aten.mul_.Tensor),
        (aten._foreach_sub.List, aten.sub.Tensor),
        (aten._foreach_addcdiv_.ScalarList, aten.addcdiv_.default),
        (aten._foreach_addcmul_.Scalar, aten.addcmul_.default),
        (aten._foreach_lerp_.Scalar, aten.lerp_.Scalar),
        (aten._foreach_lerp.List, aten.lerp.Tensor),
        (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default),
        (aten._foreach_maximum_.List, aten.maximum.default),
        (aten._foreach_maximum.Scalar, aten.clamp_min.default),
        (aten._foreach_pow.ScalarAndTensor, aten.pow.Scalar),
        (aten._foreach_copy_.default, aten.copy_.default),
        (aten._foreach_sqrt.default, aten.sqrt.default),
        (aten._foreach_zero_.default, aten.zero_.default),
        (aten._foreach_sign.default, aten.sign.default),
        (aten.add.Tensor, None),
    ],
)
def test_foreach_operators_are_found_by_schema(foreach, base) -> None:
    if foreach is aten._foreach_maximum_.List:
        base = aten.clamp_min_.Tensor  # there is no maximum_
    assert foreach_base(foreach) == base


def test_foreach_entries_give_what_the_foreach_operator_gives() -> None:
    xs, ys, zs = ([torch.randn(2), torch.randn(3)] for _ in range(3))
    cases = [
        (aten._foreach_addcdiv.ScalarList, (xs, ys, zs, [2.0, 3.0]), {}),
        (aten._foreach_addcmul.Scalar, (xs, ys, zs), {"value": 0.5}),
        (aten._foreach_add.List, (xs, ys), {"alpha": 3}),
        (aten._foreach_lerp.Scalar, (xs, ys, 0.25), {}),
        (aten._foreach_norm.Scalar, (xs, 1), {"dtype": torch.float64}),
        (aten._foreach_mul.Tensor, (xs, torch.tensor(2.0)), {}),
    ]
    for op, args, kwargs in cases:
        base = foreach_base(op)
        found = [base(*each, **named) for each, named in foreach_entries(op, args, kwargs)]
        torch.testing.assert_close(found, list(op(*args, **kwargs)))


def test_make_call_fills_defaults_and_flattens_operands() -> None:
    x = meta(2, 3)
    call = make_call(aten.add.Tensor, (x, 2.5), {}, [x])
    assert call.args == (x, 2.5, 1)
    assert call.operands[0] is x
    assert call.operands[1].shape == ()
    assert call.fixed == {1}
    call = make_call(aten.cat.default, ([x, x],), {}, [meta(4, 3)])
    assert call.operands == (x, x)
    assert call.args[1] == 0
    call = make_call(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64}, [meta(3)])
    assert call.args == (x, [0], False, torch.float64)
    call = make_call(aten.convolution.default, (x, x, None, [1], [0], [1], False, [0], 1), {}, [x])
    assert call.operands == (x, x, None)


def test_users_rules_come_first_and_go_again() -> None:
    register_rule("atan2", "f([a], [a]) -> [a]")
    try:
        call = make_call(aten.atan2.default, (meta(4), meta(4)), {}, [meta(4)])
        assert choices(lookup(aten.atan2.default), call).labels == ["whole"]
        assert lookup(aten.atan2_.default).meaning == "f([a], [a]) -> [a]"
    finally:
        unregister_rule("atan2")
    assert lookup(aten.atan2.default).meaning == "f(..., ...) -> ..."
    with pytest.raises(RuleError):
        unregister_rule("atan2")
    with pytest.raises(EquationError):
        register_rule("atan2", "a b")


def test_dtypes_decide_what_may_be_pending() -> None:
    def outputs(op, *args, result):
        call = make_call(op, args, {}, [result])
        made = choices(lookup(op), call)
        found = [made.strategy(label, 2, made.sizes) for label in made.labels]
        return {str(strategy.outputs[0]) for strategy in found if strategy and strategy.inputs[0].is_partial()}

    ints, floats, flags = (meta(4, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.bool))
    assert outputs(aten.add.Tensor, floats, floats, result=floats) == {"P(sum)", "P(avg)"}
    assert outputs(aten.add.Tensor, ints, ints, result=ints) == {"P(sum)"}
    assert outputs(aten.mul.Tensor, floats, flags, result=floats) == {"P(sum)", "P(avg)"}
    assert outputs(aten.logical_not.default, floats, result=flags) == set()


def test_the_sum_of_a_flag_is_a_pending_count() -> None:
    call = make_call(aten.sum.default, (meta(4, dtype=torch.bool),), {}, [meta(dtype=torch.int64)])
    made = choices(lookup(aten.sum.default), call)
    found = [made.strategy(label, 2, made.sizes) for label in made.labels]
    assert [strategy.inputs for strategy in found] == [(Replicate(),), (Shard(0),)]


def test_what_is_measured_is_written_where_it_fits() -> None:
    x, expected = torch.tensor([1.0, 0, 2, 3]), torch.tensor([[0], [2], [3]])

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        given, out = (distribute_tensor(item, mesh, [Shard(0)]) for item in (x, torch.zeros_like(expected)))
        assert torch.nonzero(given, out=out) is out
        assert torch.equal(out.full_tensor(), expected)
        with pytest.raises(InplaceError, match="another shape"):
            torch.nonzero(given, out=distribute_tensor(torch.zeros(5, 1, dtype=torch.int64), mesh, [Replicate()]))

    sim.run(body, 2)


@pytest.mark.parametrize("name", ["zeros_like", "new_empty", "_to_copy", "rand_like", "nonzero", "mm", "var"])
def test_an_operand_to_write_to_is_not_overlooked(name: str) -> None:
    overload = "correction_out" if name == "var" else "out"
    rule = lookup(getattr(getattr(aten, name), overload))
    assert rule is None or rule.out == 1 or rule.meaning == ""

"""The notation: what a text means, and which strategies follow from it."""

from __future__ import annotations

import pytest

from shardwise.errors import EquationError
from shardwise.rules.equation import Bound, Strategy, parse
from shardwise.sharding.placement import Partial, Replicate, Shard, StridedShard

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")


def strategies(text, operands, outputs, parts=2, **options):
    bound = Bound(parse(text), operands, outputs, **options)
    found = [bound.strategy(label, parts, bound.sizes) for label in bound.labels()]
    return {(strategy.inputs, strategy.outputs) for strategy in found if strategy}


def test_parse_reads_terms_off_the_signs() -> None:
    assert parse("m n + m k * k n -> m n").terms == ((0,), (1, 2))
    assert parse("a / a -> a").divisors == (1,)
    assert parse("a + / i * b -> a").terms == ((0,), (1, 2))
    assert parse("a + / i * b -> a").divisors == (1,)
    assert parse("a [b] -> a").whole == {"b"}
    assert parse("(a b) -> a b").operands == ((("a", "b"),),)
    assert parse("a, b -> a").shape == "f"
    assert parse("a -> a, a").outputs == ((("a",),), (("a",),))


def test_nothing_on_the_right_is_one_tensor_without_dims() -> None:
    assert parse("k * k -> ").outputs == ((),)
    assert parse("-> a").operands == ()


def test_a_number_is_a_factor_of_that_size_whole() -> None:
    cut, strided = (S0, S0), StridedShard(0, 2)
    assert strategies("same(a b, a b) -> (2 a) b", [(4, 3), (4, 3)], [(8, 3)]) >= {(cut, (strided,))}
    assert strategies("a -> (1 a)", [(4,)], [(4,)]) >= {((S0,), (S0,))}


@pytest.mark.parametrize(
    "text", ["a b", "a -> b -> c", "a [b -> a", "(a b -> a", "a ? b -> a", "a -> b * c", "a -> / b"]
)
def test_a_text_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(EquationError):
        parse(text)


def test_matmul_has_the_ways_of_the_textbook() -> None:
    found = strategies("m k * k n -> m n", [(4, 6), (6, 8)], [(4, 8)])
    avg = Partial("avg")
    assert found == {
        ((R, R), (R,)),
        ((S0, R), (S0,)),
        ((S1, S0), (SUM,)),
        ((R, S1), (S1,)),
        ((SUM, R), (SUM,)),
        ((R, SUM), (SUM,)),
        ((avg, R), (avg,)),
        ((R, avg), (avg,)),
    }


def test_a_bias_is_pending_where_the_product_is() -> None:
    found = strategies("m n + m k * k n -> m n", [(8,), (4, 6), (6, 8)], [(4, 8)])
    assert ((SUM, S1, S0), (SUM,)) in found
    assert ((R, S0, R), (S0,)) in found
    assert ((S0, R, S1), (S1,)) in found
    assert ((R, S1, S0), (SUM,)) not in found


def test_a_divisor_is_cut_along_but_never_pending() -> None:
    found = strategies("... / ... -> ...", [(4, 6), (6,)], [(4, 6)])
    assert ((S1, S0), (S1,)) in found
    assert ((SUM, R), (SUM,)) in found
    assert not any(inputs[1] == SUM for inputs, _ in found)


def test_a_term_may_begin_with_what_is_never_pending() -> None:
    found = strategies("/ a * a -> a", [(4,), (4,)], [(4,)])
    assert {inputs for inputs, _ in found} == {(R, R), (S0, S0), (R, SUM), (R, Partial("avg"))}
    found = strategies("a + / _ * [i] -> a", [(4,), (3,), (3,)], [(4,)])
    assert ((SUM, R, SUM), (SUM,)) in found
    assert ((SUM, R, R), (SUM,)) not in found


def test_a_number_cannot_be_pending_so_neither_can_the_other_summand() -> None:
    found = strategies("... + ... -> ...", [(4,), ()], [(4,)], fixed=frozenset({1}))
    assert found == {((R, R), (R,)), ((S0, R), (S0,))}
    found = strategies("... * ... -> ...", [(4,), ()], [(4,)], fixed=frozenset({1}))
    assert ((SUM, R), (SUM,)) in found


def test_broadcast_dims_of_size_one_stay_whole() -> None:
    found = strategies("..., ... -> ...", [(4, 1), (1, 6)], [(4, 6)])
    assert found == {((R, R), (R,)), ((S0, R), (S0,)), ((R, S1), (S1,))}


def test_monotone_functions_pass_extremes() -> None:
    high, low = Partial("max"), Partial("min")
    assert ((high,), (high,)) in strategies("up(...) -> ...", [(4,)], [(4,)])
    assert ((high,), (low,)) in strategies("down(...) -> ...", [(4,)], [(4,)])
    both = strategies("-(...) -> ...", [(4,)], [(4,)])
    assert {((SUM,), (SUM,)), ((low,), (high,))} <= both
    assert ((SUM,), (SUM,)) not in strategies("up(...) -> ...", [(4,)], [(4,)])


def test_a_reduction_passes_its_own_kind_only() -> None:
    high = Partial("max")
    found = strategies("a b -> a", [(4, 6)], [(4,)], reduce="max")
    assert found == {((R,), (R,)), ((S0,), (S0,)), ((S1,), (high,)), ((high,), (high,))}
    assert strategies("f(a b) -> a", [(4, 6)], [(4,)], reduce=None) == {((R,), (R,)), ((S0,), (S0,))}


def test_composed_dims_become_strided_shards() -> None:
    found = strategies("(a b) -> a b", [(12,)], [(4, 3)], parts=2)
    assert ((S0,), (S0,)) in found
    assert ((StridedShard(0, 4),), (S1,)) in found
    uneven = strategies("(a b) -> a b", [(15,)], [(5, 3)], parts=2)
    assert ((S0,), (S0,)) not in uneven


def test_sizes_shrink_from_axis_to_axis() -> None:
    bound = Bound(parse("(a b) -> a b"), [(12,)], [(4, 3)])
    left = bound.after("cut a", 2, bound.sizes)
    assert bound.strategy("cut b", 3, left) == Strategy((StridedShard(0, 2),), (S1,))
    left = bound.after("cut a", 3, bound.sizes)
    assert bound.strategy("cut b", 3, left) is None


def test_an_absent_operand_drops_its_term() -> None:
    found = strategies("m n + m k * k n -> m n", [None, (4, 6), (6, 8)], [(4, 8)])
    assert ((None, S1, S0), (SUM,)) in found


@pytest.mark.parametrize(
    ("text", "operands"), [("a b -> a b", [(2,)]), ("a, a -> a", [(2,), (3,)]), ("a -> a", [(2,), (2,)])]
)
def test_a_rule_that_does_not_fit_the_shapes_says_so(text, operands) -> None:
    with pytest.raises(EquationError):
        Bound(parse(text), operands, [operands[0]])

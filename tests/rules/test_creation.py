"""New tensors: they lie as what they are made from does, or in any way, and hold the right local sizes."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.checker import problems, strategies_of
from shardwise.rules.creation import dense

aten = torch.ops.aten
X = torch.randn(5, 3, 4)


def claims(op, *args, **kwargs) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, kwargs, 2)}


@pytest.mark.parametrize("op", [aten.ones_like.default, aten.rand_like.default, aten.empty_like.default])
def test_a_likeness_is_cut_as_its_model_and_never_pending(op) -> None:
    found = claims(op, X)
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "P(sum) -> R", "P(max) -> R"} <= found
    assert not any(claim.endswith("P(sum)") for claim in found)


def test_a_new_tensor_is_cut_where_it_is_as_long() -> None:
    found = claims(aten.new_ones.default, X, [5, 7])
    assert {"S(0) -> S(0)", "R -> S(1)", "S(1) -> R", "P(sum) -> R"} <= found


def test_a_random_number_is_drawn_for_each_element() -> None:
    assert "S(1) -> S(1)" in claims(aten.uniform_.default, X)
    assert "S(0) -> S(0)" in claims(aten.multinomial.default, X[0].abs(), 2)
    assert "S(1) -> S(1)" not in claims(aten.multinomial.default, X[0].abs(), 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_packed_strides_keep_the_order_of_dims(order: tuple[int, ...]) -> None:
    whole = torch.empty(8, 6, 4).permute(order)
    part = torch.empty(2, 3, 4).permute(order)
    assert tuple(dense(part.shape, whole.stride())) == part.stride()


CALLS = [
    (aten.zeros_like.default, (X,)),
    (aten.full_like.default, (X, 2.5)),
    (aten.new_zeros.default, (X, [5, 4])),
    (aten.new_full.default, (X, [2, 3, 4, 9], 1.5)),
    (aten.new_empty.default, (X, [3])),
    (aten.new_empty_strided.default, (X, [4, 5], [1, 4])),
    (aten.new_ones.default, (torch.tensor(1.0), [3])),
    (aten.randn_like.default, (X,)),
    (aten.randint_like.default, (X, 9)),
    (aten.bernoulli.p, (X, 0.5)),
]


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_each_claim_gives_the_answer_of_one_rank(op, args) -> None:
    assert claims(op, *args)
    assert problems(op, args, {}, sizes=(2, 3, 4, 7)) == []


def test_options_reach_the_new_tensor() -> None:
    assert problems(aten.new_zeros.default, (X, [6, 3]), {"dtype": torch.int32}, sizes=(2, 4)) == []
    assert problems(aten.full_like.default, (X, 3), {"dtype": torch.int64}, sizes=(2, 4)) == []

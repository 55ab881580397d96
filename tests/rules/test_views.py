"""Views: which strategies are claimed, and that each gives torch's answer on one rank."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import RuleError
from shardwise.rules.checker import problems, strategies_of
from shardwise.rules.views import as_strided, regroup
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten


def claims(op, *args, parts: int = 2) -> list[str]:
    return [str(strategy) for strategy in strategies_of(op, args, {}, parts)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 3), (6,), (["d0", "d1"], ["(d0 d1)"])),
        ((4, 6), (8, 3), (["d0", "(d1 d2)"], ["(d0 d1)", "d2"])),
        ((12, 10, 3), (4, 15, 6), (["(d0 d1)", "(d2 d3)", "d4"], ["d0", "(d1 d2)", "(d3 d4)"])),
        ((2, 1, 3), (6, 1), (["d0", "1", "d1"], ["(d0 d1)", "1"])),
        ((1, 5), (1, 5), (["d0", "d2"], ["d0", "d2"])),
        ((4, 9), (6, 6), (["[l0]", "[l1]"], ["[r0]", "[r1]"])),
        ((), (1, 1), ([], ["1", "1"])),
        ((3, 0, 2), (3, 0), (["d0", "d1", "[l2]"], ["d0", "d1"])),
    ],
)
def test_shapes_are_regrouped_by_their_common_factors(before, after, expected) -> None:
    assert regroup(before, after) == expected


def runs_of(sizes: list[int], ends: set[int]) -> list[int]:
    bounds = [0, *sorted(end for end in ends if 0 < end < len(sizes)), len(sizes)]
    return [prod(sizes[start:stop]) for start, stop in pairwise(bounds)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))
def test_every_view_that_is_claimed_is_right(sizes: list[int], one: set[int], other: set[int]) -> None:
    before, after = runs_of(sizes, one), runs_of(sizes, other)
    x = torch.arange(float(prod(sizes))).view(before)
    assert problems(aten.view.default, (x, after), {}, sizes=(2, 3)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_shapes_without_common_factors_are_never_cut_wrongly(before: list[int], more: list[int]) -> None:
    after = [*more, -1] if prod(before) % prod(more) == 0 else [-1, *before]
    x = torch.arange(float(prod(before))).view(before)
    assert problems(aten.view.default, (x, after), {}, sizes=(2, 4)) == []


def test_splitting_heads_needs_no_communication() -> None:
    x = torch.zeros(2, 6, 8)
    assert "S(2) -> S(2)" in claims(aten.view.default, x, [2, 6, 4, 2])
    assert "S(2) -> S(2)" in claims(aten.view.default, x.view(2, 6, 4, 2), [2, 6, 8])
    assert "_S(2, 4) -> S(3)" in claims(aten.view.default, x, [2, 6, 4, 2])


def test_flattening_an_inner_dim_gives_a_strided_shard() -> None:
    found = claims(aten.view.default, torch.zeros(4, 6), [24])
    assert "S(0) -> S(0)" in found
    assert "S(1) -> _S(0, 4)" in found


def test_an_uneven_leading_dim_is_not_flattened() -> None:
    assert claims(aten.view.default, torch.zeros(5, 4), [20], parts=2)[:2] == ["R -> R", "S(1) -> _S(0, 5)"]
    assert "S(0) -> S(0)" in claims(aten.view.default, torch.zeros(5, 4), [20], parts=5)


def test_only_a_global_size_of_one_is_squeezed() -> None:
    x = torch.randn(3, 1, 4)
    assert "S(0) -> S(0)" in claims(aten.squeeze.default, x, parts=3)
    assert "S(2) -> S(1)" in claims(aten.squeeze.dims, x, [0, 1], parts=4)
    for args in ((aten.squeeze.default, x), (aten.squeeze.dim, x, 0), (aten.squeeze.dims, x, [0, 1])):
        assert problems(args[0], args[1:], {}, sizes=(3, 4)) == []


def test_memory_beyond_the_tensor_is_refused() -> None:
    x = TensorMeta.contiguous((4, 2), torch.float32)
    assert as_strided(x, (3, 2), (1, 1), 4) == "same([d0] [d1]) -> [s0] [s1]"
    with pytest.raises(RuleError, match="as_strided"):
        as_strided(x, (3, 2), (1, 1), 5)
    with pytest.raises(RuleError, match="call contiguous"):
        as_strided(TensorMeta((4, 2), (1, 4), torch.float32), (8,), (1,))


def test_as_strided_is_the_view_that_it_is() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert "S(1) -> S(2)" in claims(aten.as_strided.default, x, [4, 2, 3], [1, 12, 4])
    for size, stride in (([4, 2, 3], [1, 12, 4]), ([6, 4], [4, 1])):
        assert problems(aten.as_strided.default, (x, size, stride), {}, sizes=(2, 3)) == []


X = torch.randn(5, 3, 4)
CALLS = [
    (aten.transpose.int, (X, 0, -1)),
    (aten.permute.default, (X, [2, 0, 1])),
    (aten.t.default, (X[0],)),
    (aten.unsqueeze.default, (X, -2)),
    (aten.expand.default, (X[:, :1], [2, -1, 3, 4])),
    (aten.squeeze_copy.default, (X[:1],)),
    (aten.as_strided.default, (X, [3, 2], [4, 1])),
    (aten.view_copy.default, (X, [15, 4])),
    (aten.view.dtype, (X, torch.int16)),
    (aten.view_as_complex.default, (torch.randn(5, 3, 2),)),
]


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda value: value.__name__ if callable(value) else "")
def test_each_claim_gives_the_answer_of_one_rank(op, args) -> None:
    assert claims(op, *args)
    assert problems(op, args, {}, sizes=(2, 3, 4, 7)) == []

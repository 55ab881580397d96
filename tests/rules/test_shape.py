"""Moves, parts and joins: which strategies are claimed, and that each gives torch's answer on one rank."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten


def claims(op, *args, parts: int = 2) -> list[str]:
    return [str(strategy) for strategy in strategies_of(op, args, {}, parts)]


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.view.default, ([6],)),
        (aten.transpose.int, (0, 1)),
        (aten.select.int, (0, 1)),
        (aten.slice.Tensor, (1, 1, 3)),
        (aten.expand.default, ([4, 2, 3],)),
        (aten.tril.default, ()),
        (aten.constant_pad_nd.default, ([1, 1],)),
    ],
)
def test_every_pending_reduction_passes(op, args, reduce_op: str) -> None:
    assert f"P({reduce_op}) -> P({reduce_op})" in claims(op, torch.ones(2, 3), *args)


def test_a_sum_does_not_pass_where_other_numbers_come_in() -> None:
    assert not any("P(" in claim for claim in claims(aten.constant_pad_nd.default, torch.ones(2, 3), [1, 1], 5.0))


def test_a_dim_sliced_whole_stays_cut() -> None:
    x = torch.zeros(6, 4)
    for bounds in ((0, 6), (None, None), (-6, 9), (0, 2**63 - 1)):
        assert "S(0) -> S(0)" in claims(aten.slice.Tensor, x, 0, *bounds)
    for bounds in ((1, 6, 1), (0, 5, 1), (0, 6, 2), (0, -1, 1)):
        assert "S(0) -> S(0)" not in claims(aten.slice.Tensor, x, 0, *bounds)


def test_a_new_dim_is_cut_for_free() -> None:
    assert "R -> S(0)" in claims(aten.expand.default, torch.ones(1, 3), [5, 3])
    assert "R -> S(0)" in claims(aten.repeat.default, torch.ones(3), [4, 1])
    assert "S(0) -> _S(0, 2)" in claims(aten.repeat.default, torch.ones(3), [2])


X = torch.randn(5, 3, 4)
CALLS = [
    (aten.repeat.default, (X, [2, 1, 3, 1])),
    (aten.slice.Tensor, (X, 1, -2, 3)),
    (aten.select.int, (X, -1, -2)),
    (aten.split.Tensor, (X, 2)),
    (aten.split_with_sizes.default, (X, [1, 2], 1)),
    (aten.unbind.int, (X, 1)),
    (aten.cat.default, ([X, X[:, :0], torch.zeros(0), X[:, 1:]], 1)),
    (aten.stack.default, ([X, X], -1)),
    (aten.diagonal.default, (X, 1, 0, 2)),
    (aten.unfold.default, (X, 0, 2, 2)),
    (aten.flip.default, (X, [1, -1])),
    (aten.roll.default, (X, [1], [0])),
    (aten.roll.default, (X, [2])),
    (aten.rot90.default, (X, 1, [0, 2])),
    (aten.tril.default, (X, -1)),
    (aten.triu.default, (X, 1)),
    (aten.diag_embed.default, (X, 1, 0, -1)),
    (aten.pixel_shuffle.default, (torch.randn(3, 8, 5, 4), 2)),
    (aten.pixel_unshuffle.default, (torch.randn(3, 2, 4, 10), 2)),
    (aten.channel_shuffle.default, (torch.randn(3, 8, 5, 4), 2)),
    (aten.narrow_copy.default, (X, 0, 1, 3)),
    (aten.constant_pad_nd.default, (X, [1, -1, 0, 0, 2, 0], 3.0)),
    (aten.slice_backward.default, (X, [5, 3, 9], 2, 1, 9, 2)),
    (aten.slice_backward.default, (X, [5, 3, 4], 0, 0, 5, 1)),
    (aten.select_backward.default, (X, [5, 2, 3, 4], 1, -1)),
    (aten.diagonal_backward.default, (X[0], [3, 6, 4], 0, 1, 2)),
    (aten.unfold_backward.default, (X, [5, 9], 1, 4, 3)),
    (aten.slice_scatter.default, (X, X[:2], 0, 1, 3)),
    (aten.select_scatter.default, (X, X[:, 0], 1, 2)),
    (aten.diagonal_scatter.default, (X, X[:, :, 0], 0, 1, 2)),
]


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda value: value.__name__ if callable(value) else "")
def test_each_claim_gives_the_answer_of_one_rank(op, args) -> None:
    assert claims(op, *args)
    assert problems(op, args, {}, sizes=(2, 3, 4, 7)) == []


def test_triangles_are_cut_along_rows_and_columns() -> None:
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"} <= set(claims(aten.tril.default, X))


def test_an_odd_turn_reverses_one_dim_only() -> None:
    x = torch.arange(30.0).view(5, 3, 2)
    assert "S(0) -> S(1)" in claims(aten.rot90.default, x, 1, [0, 1])
    assert "S(1) -> S(0)" in claims(aten.rot90.default, x, 3, [0, 1])
    assert "S(0) -> S(0)" in claims(aten.rot90.default, x, 4, [0, 1])
    for turns in range(-4, 5):
        for dims in ([0, 1], [1, 0], [-1, 0]):
            assert problems(aten.rot90.default, (x, turns, dims), {}, sizes=(2, 3)) == []

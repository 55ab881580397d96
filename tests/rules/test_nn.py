"""Softmax, dropout, convolution, pooling: which strategies are claimed, and that each gives torch's answer."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten


def claims(op, *args, parts: int = 2) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, {}, parts)}


X = torch.randn(5, 4, 3)


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default])
def test_a_softmax_needs_its_own_dim_whole(op) -> None:
    found = {claim for claim in claims(op, X, 1, False) if "_S" not in claim}
    assert found == {"R -> R", "S(0) -> S(0)", "S(2) -> S(2)"}


def test_the_gradient_of_a_softmax_is_linear_in_the_gradient() -> None:
    found = claims(aten._softmax_backward_data.default, X, X.softmax(1), 1, torch.float32)
    assert {"S(0) S(0) -> S(0)", "P(sum) R -> P(sum)"} <= found
    assert "R P(sum) -> P(sum)" not in found


IMAGE, KERNEL, BIAS = torch.randn(3, 4, 7, 6), torch.randn(5, 4, 3, 2), torch.randn(5)
PLAIN = ([1, 2], [1, 0], [1, 1], False, [0, 0])


def test_a_convolution_is_cut_along_batch_and_channels() -> None:
    found = claims(aten.convolution.default, IMAGE, KERNEL, BIAS, *PLAIN, 1)
    assert {"S(0) R R -> S(0)", "R S(0) S(0) -> S(1)", "S(1) S(1) P(sum) -> P(sum)"} <= found


def test_groups_of_channels_are_cut_whole() -> None:
    found = claims(aten.convolution.default, IMAGE, torch.randn(6, 2, 3, 2), None, *PLAIN, 2)
    assert "S(1) S(0) - -> S(1)" in found
    # Within the groups, the channels of each group are cut.
    assert "R _S(0, 2) - -> _S(1, 2)" in found


def test_the_gradient_of_a_bias_is_not_counted_twice() -> None:
    args = (torch.randn(3, 5, 7, 3), IMAGE, KERNEL, [5], *PLAIN, 1)
    assert "R S(1) S(1) -> S(1) S(1) P(sum)" not in claims(aten.convolution_backward.default, *args, [True] * 3)
    assert "R S(1) S(1) -> S(1) S(1) -" in claims(aten.convolution_backward.default, *args, [True, True, False])
    assert "S(0) S(0) R -> S(0) P(sum) P(sum)" in claims(aten.convolution_backward.default, *args, [True] * 3)


CONVOLUTIONS = [
    (IMAGE, KERNEL, BIAS, *PLAIN, 1),
    (IMAGE, torch.randn(6, 2, 3, 2), torch.randn(6), *PLAIN, 2),
    (IMAGE, torch.randn(4, 1, 3, 3), torch.randn(4), *PLAIN, 4),
    (IMAGE, torch.randn(4, 5, 3, 2), BIAS, [2, 1], [0, 1], [1, 1], True, [1, 0], 1),
    (IMAGE, torch.randn(4, 3, 3, 2), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 2),
    (IMAGE[..., 0], KERNEL[..., 0], BIAS, [1], [2], [2], False, [0], 1),
]


@pytest.mark.parametrize("args", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_those_of_one_rank(args) -> None:
    image, kernel, bias, *options = args
    result = aten.convolution.default(*args)
    grad = torch.randn_like(result)
    sizes = None if bias is None else [bias.shape[0]]
    gradient = (grad, image, kernel, sizes, *options, [True, True, bias is not None])
    assert claims(aten.convolution_backward.default, *gradient)
    assert problems(aten.convolution.default, args, {}, sizes=(2, 3, 4)) == []
    assert problems(aten.convolution_backward.default, gradient, {}, sizes=(2, 3, 4)) == []


POOL = ([2, 2], [1, 2], [1, 0])
CALLS = [
    (aten._softmax.default, (X, -1, False)),
    (aten._log_softmax.default, (X[0, 0, 0], 0, False)),
    (aten._log_softmax_backward_data.default, (X, X.log_softmax(0), 0, torch.float32)),
    (aten._safe_softmax.default, (X, 1)),
    (aten.glu.default, (X, 1)),
    (aten.glu_backward.default, (X[:, :2], X, 1)),
    (aten.native_dropout_backward.default, (X, X > 0, 2.0)),
    (aten.avg_pool2d.default, (IMAGE, *POOL)),
    (aten.max_pool2d_with_indices.default, (IMAGE, *POOL)),
    (aten._adaptive_avg_pool2d.default, (IMAGE, [2, 3])),
    (aten.reflection_pad2d.default, (IMAGE, [1, 1, 2, 0])),
    (aten.upsample_bilinear2d.default, (IMAGE, [9, 4], False)),
    (aten.upsample_nearest2d_backward.default, (IMAGE, [7, 6], [3, 4, 2, 2])),
]


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_each_claim_gives_the_answer_of_one_rank(op, args) -> None:
    assert claims(op, *args)
    assert problems(op, args, {}, sizes=(2, 3, 4, 7)) == []


def test_channels_are_cut_and_what_is_drawn_for_them_is_whole() -> None:
    args = (IMAGE[0], [2, 2], [3, 3], torch.rand(1, 4, 2))
    assert {"S(0) R -> S(0) S(0)"} <= claims(aten.fractional_max_pool2d.default, *args)
    assert problems(aten.fractional_max_pool2d.default, args, {}, sizes=(2, 3, 7)) == []


def test_each_of_three_factors_may_be_cut() -> None:
    args = (torch.randn(5, 3), torch.randn(6, 3, 4), torch.randn(5, 4), [1, 3], [0], [1, 2], [2, 3])
    found = claims(aten._trilinear.default, *args)
    assert {"S(0) R S(0) -> S(0)", "R S(0) R -> S(1)", "S(1) S(1) R -> P(sum)", "P(sum) R R -> P(sum)"} <= found
    assert problems(aten._trilinear.default, args, {}, sizes=(2, 3, 7)) == []

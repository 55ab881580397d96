"""Normalisations: statistics are global, whatever is cut."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules import norms
from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten
X = torch.randn(5, 6, 4, dtype=torch.float64)
SCALE, SHIFT = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)


def claims(op, *args, parts: int = 2) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, {}, parts)}


def test_a_layer_norm_is_cut_besides_its_own_dims() -> None:
    found = claims(aten.native_layer_norm.default, X, [4], SCALE, SHIFT, 1e-5)
    assert {claim for claim in found if "_S" not in claim} == {
        "R R R -> R R R",
        "S(0) R R -> S(0) S(0) S(0)",
        "S(1) R R -> S(1) S(1) S(1)",
    }


def test_the_gradients_of_scale_and_shift_add_up() -> None:
    _, mean, rstd = aten.native_layer_norm.default(X, [4], SCALE, SHIFT, 1e-5)
    args = (X, X, [4], mean, rstd, SCALE, SHIFT, [True, True, True])
    assert "S(0) S(0) S(0) S(0) R R -> S(0) P(sum) P(sum)" in claims(aten.native_layer_norm_backward.default, *args)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_layer_norms_are_those_of_one_rank(dims: int, scaled: bool) -> None:
    shape = list(X.shape[3 - dims :])
    scale, shift = (torch.randn(shape, dtype=torch.float64) if scaled else None for _ in range(2))
    _, mean, rstd = aten.native_layer_norm.default(X, shape, scale, shift, 1e-5)
    gradient = (torch.randn_like(X), X, shape, mean, rstd, scale, shift, [True, scaled, scaled])
    assert claims(aten.native_layer_norm_backward.default, *gradient)
    assert problems(aten.native_layer_norm.default, (X, shape, scale, shift, 1e-5), {}, sizes=(2, 3, 7)) == []
    assert problems(aten.native_layer_norm_backward.default, gradient, {}, sizes=(2, 3, 7)) == []


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norms_are_those_of_one_rank(groups: int) -> None:
    scale, shift = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    args = (X, scale, shift, 5, 6, 4, groups, 1e-5)
    _, mean, rstd = aten.native_group_norm.default(*args)
    gradient = (torch.randn_like(X), X, mean, rstd, scale, 5, 6, 4, groups, [True] * 3)
    assert claims(aten.native_group_norm.default, *args)
    assert problems(aten.native_group_norm.default, args, {}, sizes=(2, 3, 7)) == []
    assert problems(aten.native_group_norm_backward.default, gradient, {}, sizes=(2, 3, 7)) == []


def test_groups_of_channels_are_cut_whole() -> None:
    args = (X, None, None, 5, 6, 4, 2, 1e-5)
    assert "S(1) - - -> S(1) S(1) S(1)" in claims(aten.native_group_norm.default, *args, parts=2)
    assert "S(1) - - -> S(1) S(1) S(1)" not in claims(aten.native_group_norm.default, *args, parts=3)


@pytest.mark.parametrize("scaled", [True, False])
def test_batch_statistics_follow_torch(scaled: bool) -> None:
    scale, shift = (torch.randn(6, dtype=torch.float64) if scaled else None for _ in range(2))
    ours = [torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)]
    torchs = [running.clone() for running in ours]
    expected = aten.native_batch_norm.default(X, scale, shift, *torchs, True, 0.2, 1e-5)
    found = norms.batch_norm_training(X, scale, shift, *ours, True, 0.2, 1e-5)
    for mine, other in zip([*found, *ours], [*expected, *torchs], strict=True):
        assert torch.allclose(mine, other)
    grad = torch.randn_like(X)
    options = (True, 1e-5, [True, scaled, scaled])
    expected = aten.native_batch_norm_backward.default(grad, X, scale, *torchs, *expected[1:], *options)
    gradients = norms.batch_norm_training_backward(grad, X, scale, *ours, *found[1:], *options)
    assert all(a is None or torch.allclose(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("scaled", [True, False])
def test_given_statistics_are_used(scaled: bool) -> None:
    scale, shift = (torch.randn(6, dtype=torch.float64) if scaled else None for _ in range(2))
    args = (X, scale, shift, torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64), False, 0.1, 1e-5)
    expected = aten.native_batch_norm.default(*args)
    for mine, other in zip(norms.batch_norm_given(*args), expected, strict=True):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other)
    grad = (torch.randn_like(X), X, scale, *args[3:5], *expected[1:], False, 1e-5, [True, scaled, scaled])
    assert "S(0) S(0)" in " ".join(claims(aten.native_batch_norm_backward.default, *grad))
    assert problems(aten.native_batch_norm_backward.default, grad, {}, sizes=(2, 3, 7)) == []

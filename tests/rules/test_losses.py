"""Losses: a mean is over the global count, on parts of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.rules import losses
from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten
X, Y = torch.rand(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
WEIGHT = torch.rand(3, dtype=torch.float64)
TARGET = torch.tensor([2, 0, -100, 1, 1])


def claims(op, *args) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, {}, 2)}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    "loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_losses_and_their_gradients_are_those_of_one_rank(loss: str, reduction: int) -> None:
    extra = {"smooth_l1_loss": (0.5,), "huber_loss": (0.5,)}.get(loss, ())
    weight = (Y,) if loss == "binary_cross_entropy" else ()
    forward, backward = getattr(aten, loss).default, getattr(aten, f"{loss}_backward").default
    args = (X, Y, *weight, reduction, *extra)
    grad = torch.rand_like(forward(*args))
    assert claims(backward, grad, *args)
    assert problems(forward, args, {}, sizes=(2, 3, 7)) == []
    assert problems(backward, (grad, *args), {}, sizes=(2, 3, 7)) == []


def test_a_mean_is_a_pending_sum() -> None:
    assert {"S(0) S(0) -> P(sum)", "S(1) S(1) -> P(sum)"} <= claims(aten.mse_loss.default, X, Y, 1)
    assert "S(0) S(0) -> S(0)" in claims(aten.mse_loss.default, X, Y, 0)


def test_weights_broadcast() -> None:
    args = (X, Y, None, WEIGHT, 1)
    assert "S(0) S(0) - R -> P(sum)" in claims(aten.binary_cross_entropy_with_logits.default, *args)
    assert problems(aten.binary_cross_entropy_with_logits.default, args, {}, sizes=(2, 3, 7)) == []


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_likelihoods_are_those_of_one_rank(reduction: int, weight: torch.Tensor | None) -> None:
    x = X.log_softmax(1)
    args = (x, TARGET, weight, reduction, -100)
    loss, total = aten.nll_loss_forward.default(*args)
    gradient = (torch.rand_like(loss), x, TARGET, weight, reduction, -100, total)
    cut = "S(0)" if reduction == losses.NONE else "R"
    given = "-" if weight is None else "R"
    assert f"{cut} S(0) S(0) {given} R -> S(0)" in claims(aten.nll_loss_backward.default, *gradient)
    assert problems(aten.nll_loss_forward.default, args, {}, sizes=(2, 3, 7)) == []
    assert problems(aten.nll_loss_backward.default, gradient, {}, sizes=(2, 3, 7)) == []


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_the_mean_likelihood_divides_by_the_total_weight(weight: torch.Tensor | None) -> None:
    x = X.log_softmax(1)
    loss, total = losses.nll_mean(x, TARGET, weight, losses.MEAN, -100)
    assert torch.allclose(loss, F.nll_loss(x, TARGET, weight))
    kept = TARGET[TARGET >= 0]
    assert torch.allclose(total, torch.tensor(4.0, dtype=X.dtype) if weight is None else weight[kept].sum())


def test_a_mean_over_nothing_is_not_a_number_as_in_torch() -> None:
    x, target = X.log_softmax(1), torch.full((5,), -100)
    loss, _ = losses.nll_mean(x, target, None, losses.MEAN, -100)
    assert loss.isnan()
    assert F.nll_loss(x, target).isnan()


def test_likelihoods_over_images_are_cut_in_space() -> None:
    x, target = torch.rand(2, 3, 4, 5).log_softmax(1), torch.randint(0, 3, (2, 4, 5))
    assert "S(2) S(1) - -> P(sum) P(sum)" in claims(aten.nll_loss2d_forward.default, x, target, None, 2, -100)
    assert problems(aten.nll_loss2d_forward.default, (x, target, None, 0, -100), {}, sizes=(2, 3)) == []

"""Operators whose answer is no tensor: a number, a truth value, a size. It is the same on every rank."""

from __future__ import annotations

import torch

from shardwise.rules.equation import Strategy
from shardwise.rules.rule import Rule
from shardwise.sharding.placement import Replicate


def _whole(operands: int) -> Rule:
    return Rule([Strategy((Replicate(),) * operands, ())])


def _is_same_size(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all().item())


def _allclose(
    one: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all().item())


RULES = {
    "_local_scalar_dense": _whole(1),
    "is_nonzero": _whole(1),
    "equal": Rule(expand=_equal),
    "allclose": Rule(expand=_allclose),
    "is_same_size": Rule(expand=_is_same_size),
}

"""Attention: heads, batch and queries are cut where that changes nothing."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.attention import Dims
from shardwise.rules.checker import problems, strategies_of
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def operands(heads: int = 4, kept: int = 4, length: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, heads, 5, 8), (2, kept, length, 8), (2, kept, length, 8)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def claims(op, *args, parts: int = 2, **kwargs) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, kwargs, parts)}


def test_batch_and_heads_are_cut_without_communication() -> None:
    found = claims(FORWARD, *operands(), 0.0, True)
    assert {claim for claim in found if "_S" not in claim} == {
        "R R R - -> R R",
        "S(0) S(0) S(0) - -> S(0) S(0)",
        "S(1) S(1) S(1) - -> S(1) S(1)",
    }


def test_queries_are_cut_where_no_position_masks_another() -> None:
    assert "S(2) R R - -> S(2) S(2)" in claims(FORWARD, *operands())
    assert "S(2) R R S(0) -> S(2) S(2)" in claims(FORWARD, *operands(), attn_mask=torch.zeros(5, 5).double())
    assert "S(2) R R - -> S(2) S(2)" not in claims(FORWARD, *operands(), 0.0, True)


def test_grouped_heads_are_cut_in_whole_groups() -> None:
    grouped = operands(heads=6, kept=2)
    assert "S(1) S(1) S(1) - -> S(1) S(1)" in claims(FORWARD, *grouped, parts=2)
    assert "S(1) S(1) S(1) - -> S(1) S(1)" not in claims(FORWARD, *grouped, parts=3)


@pytest.mark.parametrize("kept", [6, 2])
@pytest.mark.parametrize(
    ("causal", "mask"), [(True, None), (False, None), (False, (5, 5)), (False, (2, 1, 5, 5)), (False, (1, 6, 1, 5))]
)
def test_attention_and_its_gradients_are_those_of_one_rank(kept: int, causal: bool, mask) -> None:
    query, key, value = operands(6, kept)
    bias = None if mask is None else torch.randn(mask, dtype=torch.float64)
    out, logsumexp = FORWARD(query, key, value, 0.0, causal, attn_mask=bias)
    gradient = (torch.randn_like(out), query, key, value, out, logsumexp, 0.0, causal)
    assert claims(BACKWARD, *gradient, attn_mask=bias)
    assert problems(FORWARD, (query, key, value, 0.0, causal), {"attn_mask": bias}, sizes=(2, 3, 7)) == []
    assert problems(BACKWARD, gradient, {"attn_mask": bias}, sizes=(2, 3, 7)) == []


def test_a_mask_is_aligned_right_and_broadcasts() -> None:
    query, key = (TensorMeta.contiguous(shape, torch.float32) for shape in ((2, 4, 5, 8), (2, 4, 6, 8)))
    dims = Dims(query, key, queries=True)
    shapes = {(5, 6): "l [s]", (1, 6): "1 [s]", (2, 1, 5, 6): "b 1 l [s]", (4, 5, 6): "h l [s]"}
    for shape, expected in shapes.items():
        assert dims.mask(TensorMeta.contiguous(shape, torch.float32)) == expected

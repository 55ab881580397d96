"""What a rank without elements answers, where the operator's own kernel will not take empty tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.rules.rule import Call, Placing

Run = Callable[..., object]


def zeros(call: Call, placing: Placing) -> Run:
    """Results of the right shapes: without elements, or zeros, which add nothing to a pending sum."""
    metas = [None if meta is None else (placing.output_shape(at), meta.dtype) for at, meta in enumerate(call.outputs)]

    def run(x: torch.Tensor, *_: object) -> object:
        made = [None if meta is None else x.new_zeros(meta[0], dtype=meta[1]) for meta in metas]
        return tuple(made) if len(made) > 1 else made[0]

    return run


def unless_empty(call: Call, placing: Placing) -> Run:
    """The operator itself, but `zeros` where the first operand has a dim of which nothing lies here."""
    first = call.operands[0]
    assert first is not None, call
    lacks = any(here == 0 != size for here, size in zip(placing.input_shape(), first.shape, strict=True))
    return zeros(call, placing) if lacks else call.op

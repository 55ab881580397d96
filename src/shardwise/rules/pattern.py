"""Pieces of rule texts for operators whose rank is known only at the call: ``d0 [d1] d2`` and the like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.sharding.spec import TensorMeta

NO_DIMS = "..."  # what stands for a tensor without dims: an empty operand could not be seen in the text


def named(ndim: int, prefix: str = "d") -> list[str]:
    """The names of the dims of a tensor of rank ``ndim``.

    >>> named(2)
    ['d0', 'd1']
    """
    return [f"{prefix}{dim}" for dim in range(ndim)]


def text(dims: Iterable[str]) -> str:
    """The operand with these dims.

    >>> text(["d0", "[d1]"])
    'd0 [d1]'
    """
    return " ".join(dims) or NO_DIMS


def wrap(dim: int, ndim: int) -> int:
    """``dim`` counted from the front; a tensor without dims is taken to have one."""
    return dim % max(ndim, 1)


def along(x: TensorMeta, dims: Iterable[int]) -> list[str]:
    """The dims of ``x``, those that the operator needs whole in brackets.

    >>> import torch
    >>> text(along(TensorMeta.contiguous((2, 3, 4), torch.float32), [-1]))
    'd0 d1 [d2]'
    """
    whole = {wrap(dim, len(x.shape)) for dim in dims}
    return [f"[{name}]" if dim in whole else name for dim, name in enumerate(named(len(x.shape)))]


def without(dims: Sequence[str], *removed: int) -> list[str]:
    """``dims`` without some positions.

    >>> without(["d0", "d1", "d2"], 1)
    ['d0', 'd2']
    """
    gone = {wrap(dim, len(dims)) for dim in removed}
    return [name for dim, name in enumerate(dims) if dim not in gone]


def same(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> str:
    """The text of an operator that moves elements.

    >>> same([["d0", "d1"]], [["d1", "d0"]])
    'same(d0 d1) -> d1 d0'
    """
    left, right = (", ".join(text(dims) for dims in side) for side in (inputs, outputs))
    return f"same({left}) -> {right}"

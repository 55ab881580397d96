"""`as_strided` as the views that it is: dims ordered, regrouped, sliced, dropped, added and spread.

What lies ``offset`` elements from the start and takes steps of ``stride`` is, in packed memory, a part of dims whose
sizes are the ratios of the strides. Where there are no such dims (windows that overlap, diagonals) it is no such view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd, prod
from operator import floordiv

from shardwise.sharding.spec import TensorMeta

Sizes = Sequence[int]
Views = list[tuple[str, tuple[object, ...]]]  # methods of a tensor, and their arguments
Line = tuple[int, int]  # how many entries, and how many elements apart


def views_of(x: TensorMeta, size: Sizes, stride: Sizes, offset: int) -> list[Views]:
    """The views, one of the other, that ``as_strided`` is of a tensor like ``x``; several ways, or none.

    >>> import torch
    >>> views_of(TensorMeta.contiguous((2, 3), torch.float32), (), (), 4)[0]
    [('__getitem__', ((1, 1),))]
    """
    if 0 in (*size, *x.shape):
        return []
    order = sorted(range(len(x.shape)), key=lambda dim: (-x.stride[dim], dim))
    shape, steps = (tuple([side[dim] for dim in order]) for side in (x.shape, x.stride))
    pairs = list(zip(size, stride, strict=True))
    dims = sorted([dim for dim, (n, step) in enumerate(pairs) if n > 1 and step], key=lambda dim: -stride[dim])
    first: Views = [("permute", (order,))] if order != sorted(order) else []
    last: Views = [("permute", ([dims.index(dim) for dim in sorted(dims)],))] if dims != sorted(dims) else []
    last += [("unsqueeze", (dim,)) for dim in range(len(size)) if dim not in dims]
    last += [("expand", (tuple(size),))] if any(n > 1 and not step for n, step in pairs) else []
    lines = [pairs[dim] for dim in dims]
    packed = TensorMeta(shape, steps, x.dtype).row_major
    ways = _taken(shape, lines, offset) if packed else _of_own(shape, steps, lines) if not offset else ()
    return [[*first, *taken, *last] for taken in ways]


def _of_own(shape: Sizes, steps: Sizes, lines: Sequence[Line]) -> Iterator[Views]:
    """The lines, the longest steps first, of dims that lie apart, from the first element on."""
    left = list(lines)
    index: list[int | slice] = []
    for size, step in zip(shape, steps, strict=True):
        fits = bool(left) and left[0][1] == step and left[0][0] <= size
        index.append(slice(left.pop(0)[0]) if fits else 0)
    if not left:
        yield [("__getitem__", (tuple(index),))]


def _taken(shape: tuple[int, ...], lines: Sequence[Line], offset: int) -> Iterator[Views]:
    """The lines, the longest steps first: of the dims as they are, of others, or of others of what they reach."""
    total, steps = prod(shape), [step for _, step in lines]
    of_these = _parts(total, list(accumulate(shape, floordiv, initial=total))[1:], lines, offset)
    if of_these is not None:
        yield of_these[1:] if shape else of_these
    others = _parts(total, list(accumulate(steps, gcd, initial=total))[1:], lines, offset)
    if others is not None:
        yield others
    length = lines[0][0] * steps[0] if lines else 1
    reached = _parts(length, list(accumulate(steps, gcd, initial=length))[1:], lines, 0)
    if reached is not None and offset + length <= total != length:
        yield [("view", ((total,),)), ("narrow", (0, offset, length)), *reached]


def _parts(total: int, units: Sequence[int], lines: Sequence[Line], offset: int) -> Views | None:
    """The view of ``total`` elements as dims of these strides, and the slices or entries of these dims."""
    inner = [] if units and units[-1] == 1 else [1]
    units, left = [*units, *inner], list(lines)
    index: list[int | slice] = []
    for larger, unit in zip([total, *units], units, strict=False):
        start, room = offset % larger // unit, larger // unit
        if left and left[0][1] % unit == 0:
            count, step = left[0][0], left[0][1] // unit
            left = left[1:]
            stop = start + (count - 1) * step + 1
            if stop > room:
                return None
            index.append(slice(start, stop, step))
        else:
            index.append(start)
    sizes = tuple([larger // unit for larger, unit in zip([total, *units], units, strict=False)])
    return None if left or offset >= total else [("view", (sizes,)), ("__getitem__", (tuple(index),))]

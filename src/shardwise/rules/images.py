"""Where the elements of a part come to lie under a view: what a view means, said in boxes.

Equations say which cuts of a dim stay cuts of a dim by the same rule. An image says it of any part whatever: the box of
elements that a rank holds becomes a box of the result, or the part of the result is no box and there is no such view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from shardwise.sharding.fitting import Box, intersect, length, merged, volume
from shardwise.sharding.placement import Intervals

Sizes = Sequence[int]
Boxes = tuple[Box | None, ...]
Run = Callable[[torch.Tensor, Box, Boxes], Sequence[torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Image:
    """What becomes of a part of operand 0.

    ``touched``  the dims whose cuts the image must follow; cuts of the others pass as they are
    ``kept``     for each output, the dim that each other dim becomes
    ``boxes``    where a part that holds something lies in each output (None: nothing); None if it is no box
    ``run``      the results on a rank that holds the part, given the local tensor, the part and those of the results
    ``exact``    whether every element of the outputs comes from the operand; where not, the others are zeros
    ``pends``    whether the elements stay what they are, so that a pending reduction of them passes
    """

    touched: frozenset[int]
    kept: tuple[Mapping[int, int], ...]
    boxes: Callable[[Box], Boxes | None]
    run: Run
    exact: bool = True
    pends: bool = True


@dataclass(frozen=True, slots=True)
class Joining:
    """What becomes of the parts of several operands that are joined along ``dim``."""

    dim: int


# --- regrouping


def regrouping(before: Sizes, after: Sizes, groups: Sequence[tuple[Sizes, Sizes]]) -> Image:
    """The image of a view, whose shapes fall into ``groups`` of dims that hold the same elements."""
    touched: set[int] = set()
    kept: dict[int, int] = {}
    here = there = 0
    for own, others in groups:
        if tuple(own) == tuple(others) and len(own) == 1:
            kept[here] = there
        else:
            touched.update(range(here, here + len(own)))
        here, there = here + len(own), there + len(others)

    def boxes(part: Box) -> Boxes | None:
        found: list[Intervals] = []
        place = 0
        for own, others in groups:
            held = part[place : place + len(own)]
            made = held if tuple(own) == tuple(others) else unravel(ravel(held, own), others)
            if made is None:
                return None
            found += made
            place += len(own)
        return (tuple(found),)

    return Image(frozenset(touched), (kept,), boxes, lambda x, part, results: [x.view(shape_of(results[0]))])


def ravel(box: Box, sizes: Sizes) -> Intervals:
    """The intervals of the flattened dims that ``box`` holds.

    >>> ravel((((0, 2),), ((1, 3),)), (2, 4))
    ((1, 3), (5, 7))
    """
    flat: Intervals = ((0, 1),)
    for intervals, size in zip(box, sizes, strict=True):
        if intervals == ((0, size),):
            flat = tuple((start * size, stop * size) for start, stop in flat)
        else:
            rows = [row for start, stop in flat for row in range(start, stop)]
            flat = tuple((row * size + start, row * size + stop) for row in rows for start, stop in intervals)
    return merged(flat)


def unravel(flat: Intervals, sizes: Sizes) -> Box | None:
    """The box of which ``flat`` is what is held once its dims are flattened; None if there is none.

    >>> unravel(((1, 3), (5, 7)), (2, 4))
    (((0, 2),), ((1, 3),))
    """
    if not sizes:
        return ()
    row = prod(sizes[1:])
    content: Intervals | None = None
    held: list[tuple[int, int]] = []
    for start, stop, inside in _rows(flat, row):
        if content is not None and inside != content:
            return None
        content = inside
        held.append((start, stop))
    rest = unravel(content or (), sizes[1:])
    return None if rest is None else (merged(held), *rest)


def _rows(flat: Intervals, row: int) -> Iterator[tuple[int, int, Intervals]]:
    """Runs of rows of that length with what they hold, the same in each."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    runs: list[tuple[int, int]] = []
    for start, stop in flat:
        first, last = -(-start // row), stop // row
        if first < last:
            runs.append((first, last))
        for low, high in (
            ((start, min(stop, first * row)), (max(start, last * row), stop)) if first <= last else ((start, stop),)
        ):
            if low < high:
                pieces.setdefault(low // row, []).append((low % row, low % row + high - low))
    parts = [(at, at + 1, merged(inside)) for at, inside in pieces.items()]
    yield from sorted([*parts, *((first, last, ((0, row),)) for first, last in runs)])


# --- parts of a dim


@dataclass(frozen=True, slots=True)
class Stride:
    """Positions of a dim: ``count`` of them from ``start``, ``step`` apart; ``drop``: one, whose dim goes."""

    start: int
    count: int
    step: int = 1
    drop: bool = False


def strides(ndim: int, dim: int, taken: Sequence[Stride]) -> Image:
    """The image of parts of one dim, such as slices, pieces of a split, single entries."""
    kept = tuple(_without(ndim, dim) if one.drop else _others(ndim, dim) for one in taken)

    def boxes(part: Box) -> Boxes | None:
        found: list[Box | None] = []
        for one in taken:
            if _local(part[dim], one) is None:
                return None
            inside = merged(list(_within(part[dim], one)))
            found.append(_placed(part, dim, inside, one.drop))
        return tuple(found)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        pairs = zip(taken, results, strict=True)
        return [_taken(x, dim, _local(part[dim], one), one.drop) if volume(result) else None for one, result in pairs]

    return Image(frozenset({dim}), kept, boxes, run)


def _placed(part: Box, dim: int, inside: Intervals, drop: bool) -> Box | None:
    if not inside:
        return None
    return (*part[:dim], *(() if drop else (inside,)), *part[dim + 1 :])


def _without(ndim: int, dim: int) -> dict[int, int]:
    return {at: at - (at > dim) for at in range(ndim) if at != dim}


def _others(ndim: int, dim: int) -> dict[int, int]:
    return {at: at for at in range(ndim) if at != dim}


def _within(held: Intervals, one: Stride) -> Iterator[tuple[int, int]]:
    """Which of the positions taken lie in each interval."""
    for low, high in held:
        first = max(0, -(-(low - one.start) // one.step))
        last = min(one.count, -(-(high - one.start) // one.step))
        yield first, max(first, last)


def _local(held: Intervals, one: Stride) -> tuple[int, int, int] | None:
    """Start, stop and step of the positions taken, in the local dim; None if they are not evenly spaced there."""
    runs = []
    offset = 0
    for (low, high), (first, last) in zip(held, _within(held, one), strict=True):
        if first < last:
            runs.append((one.start + first * one.step - low + offset, last - first))
        offset += high - low
    if not runs:
        return 0, 0, 1
    ends = [start + (count - 1) * one.step for start, count in runs]
    gaps = {start - end for end, (start, _) in zip(ends, runs[1:], strict=False)}
    gaps.update(one.step for _, count in runs if count > 1)
    return None if len(gaps) > 1 else (runs[0][0], ends[-1] + 1, gaps.pop() if gaps else 1)


def _taken(x: torch.Tensor, dim: int, where: tuple[int, int, int] | None, drop: bool) -> torch.Tensor:
    assert where is not None, dim
    start, stop, step = where
    return x.select(dim, start) if drop else torch.ops.aten.slice.Tensor(x, dim, start, stop, step)


# --- gradients of parts of a dim


def scattering(shape: Sizes, dim: int, one: Stride) -> Image:
    """The image of the gradient of a part of a dim: the part of a tensor of zeros."""
    ndim = len(shape)
    back = {after: before for before, after in (_without if one.drop else _others)(ndim, dim).items()}

    def boxes(part: Box) -> Boxes | None:
        whole = part if not one.drop else (*part[:dim], ((0, 1),), *part[dim:])
        spread = [
            (one.start + position * one.step, one.start + (position + 1) * one.step - (one.step - 1))
            for start, stop in whole[dim]
            for position in range(start, stop)
        ]
        return ((*whole[:dim], merged(spread), *whole[dim + 1 :]),)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        result = results[0]
        assert result is not None, part
        made = x.new_zeros(shape_of(result))
        where = _local(result[dim], one)
        assert where is not None, result
        _taken(made, dim, where, one.drop).copy_(x)
        return [made]

    touched = frozenset(range(ndim - 1)) if one.drop else frozenset({dim})
    return Image(touched, (back,), boxes, run, exact=False)


def diagonal_scattering(shape: Sizes, offset: int, dim1: int, dim2: int) -> Image:
    """The image of the gradient of a diagonal: its entries in a tensor of zeros."""
    others = [dim for dim in range(len(shape)) if dim not in (dim1, dim2)]
    lines = ((dim1, max(-offset, 0)), (dim2, max(offset, 0)))

    def boxes(part: Box) -> Boxes:
        found = dict(zip(others, part, strict=False))
        found.update({dim: _moved(part[-1], -by) for dim, by in lines})
        return (tuple(found[dim] for dim in range(len(shape))),)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        result = results[0]
        assert result is not None, part
        made = target = x.new_zeros(shape_of(result))
        for dim, by in lines:
            line = _line(result[dim], part[-1], by)
            assert line is not None, result
            target = torch.ops.aten.slice.Tensor(target, dim, *line)
        target.diagonal(0, dim1, dim2).copy_(x)
        return [made]

    kept = dict(enumerate(others))
    return Image(frozenset({len(others)}), (kept,), boxes, run, exact=False)


def window_scattering(shape: Sizes, dim: int, size: int, step: int) -> Image:
    """The image of the gradient of `unfold`: where windows overlap, their entries add up."""
    ndim = len(shape)

    def positions(part: Box) -> list[int]:
        windows_, inside = ([at for start, stop in held for at in range(start, stop)] for held in (part[dim], part[-1]))
        return [window * step + entry for window in windows_ for entry in inside]

    def boxes(part: Box) -> Boxes:
        reached = merged([(at, at + 1) for at in sorted(set(positions(part)))])
        return ((*part[:dim], reached, *part[dim + 1 : ndim]),)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        result = results[0]
        assert result is not None, part
        places = torch.tensor([_before(result[dim], at) for at in positions(part)], device=x.device)
        entries = x.movedim(-1, dim + 1).flatten(dim, dim + 1)
        return [x.new_zeros(shape_of(result)).index_add_(dim, places, entries)]

    return Image(frozenset({dim, ndim}), (_others(ndim, dim),), boxes, run, exact=False)


# --- one entry for many, and others


def spreading(before: Sizes, after: Sizes) -> Image:
    """The image of `expand`: dims of size one that get larger, and new ones in front."""
    new = len(after) - len(before)
    grown = {dim: after[new + dim] for dim, size in enumerate(before) if size == 1 != after[new + dim]}
    kept = {dim: new + dim for dim in range(len(before)) if dim not in grown}

    def boxes(part: Box) -> Boxes:
        front = tuple(((0, size),) for size in after[:new])
        return ((*front, *(((0, grown[dim]),) if dim in grown else own for dim, own in enumerate(part))),)

    return Image(frozenset(grown), (kept,), boxes, lambda x, part, results: [x.expand(shape_of(results[0]))])


def diagonals(shape: Sizes, offset: int, dim1: int, dim2: int) -> Image:
    """The image of a diagonal, of which each rank that holds one block has what lies in the block."""
    others = [dim for dim in range(len(shape)) if dim not in (dim1, dim2)]
    first, second = max(-offset, 0), max(offset, 0)
    count = max(min(shape[dim1] - first, shape[dim2] - second), 0)

    def inside(part: Box) -> Intervals:
        rows, columns = _moved(part[dim1], first), _moved(part[dim2], second)
        return intersect(intersect(rows, columns), ((0, count),))

    def boxes(part: Box) -> Boxes | None:
        taken = inside(part)
        if not taken:
            return (None,)
        lines = (_line(part[dim], taken, by) for dim, by in ((dim1, first), (dim2, second)))
        return None if None in lines else ((*(part[dim] for dim in others), taken),)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        taken = inside(part)
        for dim, by in ((dim1, first), (dim2, second)):
            line = _line(part[dim], taken, by)
            assert line is not None, part
            x = torch.ops.aten.slice.Tensor(x, dim, *line)
        return [x.diagonal(0, dim1, dim2)]

    kept = {dim: place for place, dim in enumerate(others)}
    return Image(frozenset({dim1, dim2}), (kept,), boxes, run)


def _line(held: Intervals, taken: Intervals, by: int) -> tuple[int, int, int] | None:
    """Start, stop and step in the local dim of the positions that are ``taken``, shifted; None if steps differ."""
    places = [_before(held, position + by) for start, stop in taken for position in range(start, stop)]
    gaps = {after - before for before, after in pairwise(places)}
    return None if len(gaps) > 1 else (places[0], places[-1] + 1, gaps.pop() if gaps else 1)


def _before(held: Intervals, position: int) -> int:
    return sum([min(stop, position) - start for start, stop in held if start < position])


def _moved(intervals: Intervals, by: int) -> Intervals:
    return tuple((start - by, stop - by) for start, stop in intervals)


def windows(size_of_dim: int, ndim: int, dim: int, size: int, step: int) -> Image:
    """The image of `unfold`: what a rank holds of each window must be the same entries of it, or none."""
    count = (size_of_dim - size) // step + 1

    def rows(held: Intervals) -> Iterator[tuple[int, Intervals, int]]:
        for window in range(count):
            low = window * step
            inside = intersect(held, ((low, low + size),))
            if inside:
                yield window, _moved(inside, low), _before(held, inside[0][0])

    def boxes(part: Box) -> Boxes | None:
        found = list(rows(part[dim]))
        gaps = {after - before for (_, _, before), (_, _, after) in pairwise(found)}
        if len({inside for _, inside, _ in found}) > 1 or len(gaps) > 1 or 0 in gaps:
            return None
        if not found:
            return (None,)
        taken = merged([(window, window + 1) for window, _, _ in found])
        return ((*part[:dim], taken, *part[dim + 1 :], found[0][1]),)

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        found = list(rows(part[dim]))
        wide, first, last = length(found[0][1]), found[0][2], found[-1][2]
        gap = found[1][2] - first if len(found) > 1 else 1
        return [x.narrow(dim, first, last + wide - first).unfold(dim, wide, gap)]

    return Image(frozenset({dim}), (_others(ndim, dim),), boxes, run)


def rescaling(ndim: int, own: torch.dtype, dtype: torch.dtype) -> Image:
    """The image of a view as another dtype: the last dim counts elements of another size, in bytes."""
    dim, before, after = ndim - 1, own.itemsize, dtype.itemsize

    def run(x: torch.Tensor, part: Box, results: Boxes) -> Sequence[torch.Tensor | None]:
        return [x.view(dtype)]

    def boxes(part: Box) -> Boxes | None:
        scaled = [(start * before, stop * before) for start, stop in part[dim]]
        if any(place % after for interval in scaled for place in interval):
            return None
        return ((*part[:dim], tuple((start // after, stop // after) for start, stop in scaled)),)

    return Image(frozenset({dim}), (_others(ndim, dim),), boxes, run, pends=dtype in (own, own.to_real()))


def pairing(ndim: int) -> Image:
    """The image of complex numbers seen as pairs of real ones, in a dim of their own."""
    kept = {dim: dim for dim in range(ndim)}

    def boxes(part: Box) -> Boxes:
        return ((*part, ((0, 2),)),)

    return Image(frozenset(), (kept,), boxes, lambda x, part, results: [torch.view_as_real(x)])


def unpairing(ndim: int) -> Image:
    """The image of pairs of real numbers, in the last of ``ndim`` dims, seen as complex ones."""
    dim = ndim - 1

    def boxes(part: Box) -> Boxes | None:
        return (part[:dim],) if part[dim] == ((0, 2),) else None

    return Image(frozenset({dim}), (_others(ndim, dim),), boxes, lambda x, part, results: [torch.view_as_complex(x)])


def emptied(ndim: int) -> Image:
    """The image of a view that has no elements."""
    return Image(frozenset(range(ndim)), ({},), lambda part: (None,), lambda x, part, results: [None])


def shape_of(box: Box | None) -> tuple[int, ...]:
    """The shape of the local tensor that holds a box."""
    assert box is not None
    return tuple(map(length, box))

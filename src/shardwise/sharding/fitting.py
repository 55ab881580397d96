"""Which placements describe given parts of a tensor.

A part is a box: for each dim the intervals that it holds, and None if it holds nothing. Each axis of the mesh cuts one
dim of what the axes before it left, so the placements are looked for axis by axis, and a placement fits if every rank's
part lies within what it would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isqrt, prod
from typing import NamedTuple

from shardwise.sharding.placement import Cut, Intervals, Owned, Placement, RaggedShard, Shard, StridedShard

Box = tuple[Intervals, ...]
Coordinate = tuple[int, ...]
Parts = Mapping[Coordinate, Box | None]
Regions = dict[Coordinate, Box | None]


def fit(
    shape: Sequence[int],
    axes: Sequence[int],
    parts: Parts,
    *,
    exact: bool,
    factors: frozenset[int] = frozenset(),
    dims: Sequence[int] | None = None,
) -> tuple[Placement, ...] | None:
    """One placement for each of ``axes`` (ranks on each) such that the rank at each coordinate holds its part.

    If ``exact``, it holds nothing else; else it may hold more. None if there are no such placements. Among several,
    `Shard` comes before `RaggedShard`, and that before `StridedShard`, whose split factors divide the dim or are among
    ``factors``; and of the dims those first in ``dims``.

    >>> fit((5,), (2,), {(0,): (((0, 4),),), (1,): (((4, 5),),)}, exact=True)
    (RaggedShard(dim=0, sizes=(4, 1)),)
    """
    whole: Regions = {(): tuple(((0, size),) for size in shape)}
    order = tuple(range(len(shape))) if dims is None else tuple(dims)
    return _fit(whole, Search(tuple(axes), parts, exact, factors, order))


class Search(NamedTuple):
    """What stays the same all through a search."""

    axes: tuple[int, ...]
    parts: Parts
    exact: bool
    factors: frozenset[int]
    dims: tuple[int, ...]


def _fit(regions: Regions, search: Search) -> tuple[Placement, ...] | None:
    axis, parts = len(next(iter(regions))), search.parts
    if axis == len(search.axes):
        fits = not search.exact or all(volume(regions[place]) == volume(part) for place, part in parts.items())
        return () if fits else None
    for placement in _candidates(regions, axis, search):
        after = _cut(regions, placement, search.axes[axis])
        if all(_is_within(part, after[place[: axis + 1]]) for place, part in parts.items()):
            rest = _fit(after, search)
            if rest is not None:
                return (placement, *rest)
    return None


def _candidates(regions: Regions, axis: int, search: Search) -> Iterator[Placement]:
    count = search.axes[axis]
    if not search.dims:
        yield from map(Owned, range(count))
        return
    yield from map(Shard, search.dims)
    for dim in search.dims:
        for sizes in dict.fromkeys(_sizes(regions, axis, count, search.parts, dim)):
            yield RaggedShard(dim, sizes)
    for dim in search.dims:
        size = max(length(box[dim]) for box in regions.values() if box is not None)
        factors = sorted({*_divisors(size), *search.factors})
        yield from (StridedShard(dim, factor) for factor in factors if factor > 1)


def _divisors(size: int) -> Iterator[int]:
    for factor in range(1, isqrt(size) + 1):
        if size % factor == 0:
            yield from (factor, size // factor)


def _sizes(regions: Regions, axis: int, count: int, parts: Parts, dim: int) -> Iterator[tuple[int, ...]]:
    """For each region, the sizes of the runs that start where the parts of the ranks start."""
    for prefix, region in regions.items():
        if region is None or not volume(region):
            continue
        size = length(region[dim])
        starts = [size] * (count + 1)
        for place, part in parts.items():
            if place[:axis] == prefix and part is not None and volume(part):
                first = part[dim][0][0]
                before = length(intersect(region[dim], ((0, first),))) if first else 0
                starts[place[axis]] = min(starts[place[axis]], before)
        for index in reversed(range(count)):
            starts[index] = min(starts[index], starts[index + 1])
        starts[0] = 0
        yield tuple(starts[index + 1] - starts[index] for index in range(count))


def _cut(regions: Regions, placement: Placement, count: int) -> Regions:
    return {
        (*prefix, index): _held(region, placement, count, index)
        for prefix, region in regions.items()
        for index in range(count)
    }


def _held(region: Box | None, placement: Placement, count: int, index: int) -> Box | None:
    if region is None:
        return None
    if isinstance(placement, Owned):
        return region if index == placement.index else None
    assert isinstance(placement, Cut), placement
    own = region[placement.dim]
    kept = select(own, placement.intervals(length(own), count, index))
    return (*region[: placement.dim], kept, *region[placement.dim + 1 :])


def _is_within(part: Box | None, region: Box | None) -> bool:
    if part is None or not volume(part):
        return True
    if region is None:
        return False
    return all(
        own == around or length(intersect(own, around)) == length(own) for own, around in zip(part, region, strict=True)
    )


def length(intervals: Intervals) -> int:
    """How many positions lie in ``intervals``."""
    return sum([stop - start for start, stop in intervals])


def volume(box: Box | None) -> int:
    """How many elements lie in a box."""
    return 0 if box is None else prod([length(intervals) for intervals in box])


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """The intervals that lie in both lists, ascending as they are.

    >>> intersect(((0, 4), (6, 8)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    both, here, there = [], 0, 0
    while here < len(first) and there < len(second):
        (low, high), (start, stop) = first[here], second[there]
        if max(low, start) < min(high, stop):
            both.append((max(low, start), min(high, stop)))
        here, there = (here + 1, there) if high <= stop else (here, there + 1)
    return tuple(both)


def select(held: Intervals, wanted: Intervals) -> Intervals:
    """The intervals of the dim that ``wanted``, in positions within ``held``, picks out.

    >>> select(((2, 4), (6, 9)), ((1, 3),))
    ((3, 4), (6, 7))
    """
    picked: list[tuple[int, int]] = []
    position = 0
    for low, high in held:
        inside = intersect(wanted, ((position, position + high - low),))
        picked += [(low + start - position, low + stop - position) for start, stop in inside]
        position += high - low
    return merged(picked)


def merged(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """Ascending intervals without empty ones, neighbours joined.

    >>> merged([(0, 2), (2, 3), (5, 5), (6, 7)])
    ((0, 3), (6, 7))
    """
    found: list[tuple[int, int]] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)

"""Who sends what to whom when every rank knows what each holds and what each is to hold.

Positions are half-open intervals along each dim. What the ranks hold is a partition of the tensor, of which each part
may have several holders; what a rank lacks of it comes from exactly one of them, the one that sends least so far, and
among those the nearest. All of it is arithmetic, so every rank finds the same without talking.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapreplace
from math import gcd, prod
from operator import sub
from typing import NamedTuple

from shardwise.redistribute.bits import told
from shardwise.redistribute.bits import traffic as even_traffic
from shardwise.sharding.fitting import intersect
from shardwise.sharding.placement import Cut, Intervals, Owned, Placement, Shard, StridedShard

Held = tuple[Intervals, ...]  # for each dim, which positions
Sizes = tuple[int, ...]

MANY = 256  # ranks of a group from which on replicas are taken to share their work equally, to spare counting it


class Box(NamedTuple):
    """A part of a local tensor: its shape, and where it lies along the dims that it does not fill."""

    shape: Sizes
    cuts: tuple[tuple[int, Intervals], ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)


class Parcel(NamedTuple):
    """What is sent to, or comes from, the member ``peer`` of the group."""

    peer: int
    box: Box


class Parcels(NamedTuple):
    """What one member sends (boxes of what it holds), receives, and keeps (boxes of the result)."""

    outgoing: tuple[Parcel, ...]
    incoming: tuple[Parcel, ...]
    kept: tuple[Box, Box]


class Grid(NamedTuple):
    """A tensor on a group of ranks: its sizes, how many parts each axis has, how it is cut before and after.

    Where ``fixed`` has an index and not None, the group stands there on that axis, and does not go over it.
    """

    sizes: Sizes
    parts: Sizes
    sources: tuple[Placement, ...]
    targets: tuple[Placement, ...]
    fixed: tuple[int | None, ...]


def pack(have: Sequence[Held | None], want: Sequence[Held | None], index: int) -> Parcels:
    """The parcels of member ``index`` of a group whose members hold ``have`` and are to hold ``want``."""
    held, wanted = have[index], want[index]
    outgoing, incoming = [], []
    for receiver, sender, part in _messages(have, want, index):
        if sender == index and held is not None:
            outgoing.append(Parcel(receiver, _box(part, held)))
        elif receiver == index and wanted is not None:
            incoming.append(Parcel(sender, _box(part, wanted)))
    kept = common(held, wanted) if held is not None and wanted is not None else ()
    boxes = (_box(kept, held), _box(kept, wanted)) if held is not None and wanted is not None else (_NOTHING, _NOTHING)
    return Parcels(tuple(outgoing), tuple(sorted(incoming)), boxes)


_NOTHING = Box((0,), ())


@lru_cache(maxsize=4096)
def parcels(grid: Grid, index: int) -> Parcels:
    """The parcels of the rank ``index``, counted row-major, of a grid."""
    have, want = layouts(grid)
    return pack(have, want, index)


@lru_cache(maxsize=4096)
def places(sizes: Sizes, parts: Sizes, cuts: tuple[Cut, ...]) -> tuple[Box, ...]:
    """For each rank, row-major, where its part lies in a tensor of ``sizes`` that is cut over axes of ``parts``."""
    whole: Held = tuple([((0, size),) for size in sizes])
    return tuple([_box(held, whole) for held in _spread(sizes, parts, cuts) if held is not None])


def traffic(grid: Grid) -> tuple[int, int]:
    """The most elements that a rank of any such group sends, and the most that one receives, wherever it is fixed."""
    units = tuple([_unit(grid, dim) if size else 0 for dim, size in enumerate(grid.sizes)])
    scale = prod([size // unit for size, unit in zip(grid.sizes, units, strict=True) if unit])
    sent, received = _traffic(grid._replace(sizes=units))
    return sent * scale, received * scale


@lru_cache(maxsize=16384)
def _traffic(grid: Grid) -> tuple[int, int]:
    have, want = (told(grid.sizes, grid.parts, side) for side in (grid.sources, grid.targets))
    if have is not None and want is not None:
        return even_traffic(have, want, grid.parts, [axis for axis, at in enumerate(grid.fixed) if at is not None])
    places = [(None,) if at is None else range(parts) for at, parts in zip(grid.fixed, grid.parts, strict=True)]
    found = [_most(*layouts(grid._replace(fixed=fixed))) for fixed in itertools.product(*places)]
    return max(sent for sent, _ in found), max(received for _, received in found)


def _most(before: Sequence[Held | None], after: Sequence[Held | None]) -> tuple[int, int]:
    """The most that a member sends and that one receives, where every element wanted is wanted by equally many."""
    if None in before or None in after:  # a tensor without dims, which lies on one rank
        sent_by, received_by = loads(before, after)
        return max(sent_by), max(received_by)
    have, want = ([held for held in side if held is not None] for side in (before, after))
    shared = _Shared(want)
    kept = [shared.of(*pair) for pair in zip(have, want, strict=True)]
    received = max(map(sub, map(volume, want), kept))
    anywhere = tuple([_union(dim) for dim in zip(*want, strict=True)])
    times = sum(map(volume, want)) // max(volume(anywhere), 1)
    sent = 0
    for part, holders in _holders(have).items():
        total = times * volume(common(part, anywhere)) - sum([kept[holder] for holder in holders])
        if len(holders) > 1 and total and len(have) <= MANY:
            sizes = shared.of_all(part)
            for holder in holders:
                sizes[holder] = 0
            sent = max(sent, _heaviest(sizes, len(holders)))
        else:
            sent = max(sent, -(-total // len(holders)))
    return sent, received


class _Shared:
    """How many elements boxes have in common with those of ``want``; along a dim, each pair is compared once."""

    def __init__(self, want: Sequence[Held]) -> None:
        self.want = want
        self.known: list[dict[Intervals, dict[Intervals, int]]] = [{} for _ in want[0]]

    def of(self, box: Held, wanted: Held) -> int:
        """With one."""
        found = 1
        for known, here, there in zip(self.known, box, wanted, strict=True):
            lengths = known.setdefault(here, {})
            if there not in lengths:
                lengths[there] = length(here if here == there else intersect(here, there))
            found *= lengths[there]
        return found

    def of_all(self, box: Held) -> list[int]:
        """With each."""
        found = {wanted: self.of(box, wanted) for wanted in dict.fromkeys(self.want)}
        return [found[wanted] for wanted in self.want]


def _heaviest(sizes: list[int], holders: int) -> int:
    """The largest load when each of ``sizes`` in turn goes to the holder that has least."""
    sizes = [size for size in sizes if size]
    if len(set(sizes)) < 2:
        return -(-len(sizes) // holders) * max(sizes, default=0)
    load = [0] * holders
    for size in sizes:
        heapreplace(load, load[0] + size)
    return max(load)


def _union(several: Iterable[Intervals]) -> Intervals:
    """The positions that lie in any of the lists."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted({interval for intervals in several for interval in intervals}):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def loads(have: Sequence[Held | None], want: Sequence[Held | None]) -> tuple[list[int], list[int]]:
    """How many elements each member sends, and how many each receives."""
    sent, received = [0] * len(have), [0] * len(want)
    for receiver, sender, part in _messages(have, want, None):
        sent[sender] += volume(part)
        received[receiver] += volume(part)
    return sent, received


def _messages(
    have: Sequence[Held | None], want: Sequence[Held | None], index: int | None
) -> Iterator[tuple[int, int, Held]]:
    """Receiver, sender and part of each message, or of those that member ``index`` takes part in and maybe others."""
    for part, holders in _holders(have).items():
        alone = len(holders) == 1 and index is not None and index not in holders
        receivers: Iterable[int] = (index,) if alone and index is not None else range(len(want))
        if len(holders) == 1:
            yield from _from_one(part, holders[0], want, receivers)
        else:
            yield from _from_several(part, holders, want)


def _holders(have: Sequence[Held | None]) -> dict[Held, list[int]]:
    holders: dict[Held, list[int]] = {}
    for member, held in enumerate(have):
        if held is not None and volume(held):
            holders.setdefault(held, []).append(member)
    return holders


def _from_one(
    held: Held, sender: int, want: Sequence[Held | None], receivers: Iterable[int]
) -> Iterator[tuple[int, int, Held]]:
    for receiver in receivers:
        wanted = want[receiver]
        if wanted is not None and receiver != sender:
            part = common(held, wanted)
            if volume(part):
                yield receiver, sender, part


def _from_several(held: Held, holders: list[int], want: Sequence[Held | None]) -> Iterator[tuple[int, int, Held]]:
    load = dict.fromkeys(holders, 0)
    for receiver, wanted in enumerate(want):
        if wanted is None or receiver in load:
            continue
        part = common(held, wanted)
        if size := volume(part):
            least = min(load.values())
            sender = min((abs(holder - receiver), holder) for holder in holders if load[holder] == least)[1]
            load[sender] += size
            yield receiver, sender, part


@lru_cache(maxsize=1024)
def layouts(grid: Grid) -> tuple[tuple[Held | None, ...], tuple[Held | None, ...]]:
    """What each rank of the grid holds before and after, row-major."""
    before, after = (_spread(grid.sizes, grid.parts, cuts, grid.fixed) for cuts in (grid.sources, grid.targets))
    return before, after


def _spread(
    sizes: Sizes, parts: Sizes, placements: Sequence[Placement], fixed: Sequence[int | None] | None = None
) -> tuple[Held | None, ...]:
    """What each rank holds, row-major; None where a tensor that lies on one rank does not."""
    spread: list[Held | None] = [tuple([((0, size),) for size in sizes])]
    for placement, count, place in zip(placements, parts, fixed or (None,) * len(parts), strict=True):
        indices = range(count) if place is None else (place,)
        parts_of = {held: [_part(held, placement, count, index) for index in indices] for held in dict.fromkeys(spread)}
        spread = [part for held in spread for part in parts_of[held]]
    return tuple(spread)


def _part(held: Held | None, placement: Placement, parts: int, index: int) -> Held | None:
    if held is None or (isinstance(placement, Owned) and placement.index != index):
        return None
    if not isinstance(placement, Cut):
        return held
    whole = held[placement.dim]
    kept = locate_back(whole, placement.intervals(length(whole), parts, index))
    return (*held[: placement.dim], kept, *held[placement.dim + 1 :])


def _unit(grid: Grid, dim: int) -> int:
    """The size of ``dim`` by which the real one may be divided without changing a proportion; the real one if none."""
    size = grid.sizes[dim]
    units = [unit_of(placements, grid.parts, dim) for placements in (grid.sources, grid.targets)]
    unit = units[0] * units[1] // gcd(*units) if all(units) else 0
    return unit if unit and size % unit == 0 else size


def unit_of(placements: Sequence[Placement], parts: Sequence[int], dim: int) -> int:
    """The smallest size of ``dim`` that the placements cut into equal parts; 0 if the sizes of a cut are its own."""
    unit = 1
    for placement, count in zip(placements, parts, strict=True):
        match placement:
            case Shard(dim=own) if own == dim:
                unit *= count
            case StridedShard(dim=own, split_factor=factor) if own == dim:
                unit *= count * factor
            case Cut(dim=own) if own == dim:
                return 0
    return unit


def length(intervals: Intervals) -> int:
    """How many positions lie in ``intervals``."""
    return sum([stop - start for start, stop in intervals])


def volume(held: Held) -> int:
    """How many elements lie in a box."""
    return prod([length(intervals) for intervals in held])


def common(first: Held, second: Held) -> Held:
    """What lies in both boxes."""
    return tuple([here if here == there else intersect(here, there) for here, there in zip(first, second, strict=True)])


def _box(part: Held, within: Held) -> Box:
    """``part`` as a box of the local tensor that holds ``within``."""
    cuts = [
        (dim, locate(intervals, whole))
        for dim, (intervals, whole) in enumerate(zip(part, within, strict=True))
        if length(intervals) != length(whole)
    ]
    return Box(tuple(map(length, part)), tuple(cuts))


def locate(intervals: Intervals, within: Intervals) -> Intervals:
    """Where ``intervals``, parts of those of ``within``, lie if those of ``within`` stand one after the other."""
    located: list[tuple[int, int]] = []
    position = 0
    for low, high in within:
        for start, stop in intersect(intervals, ((low, high),)):
            first, last = start - low + position, stop - low + position
            if located and located[-1][1] == first:
                located[-1] = (located[-1][0], last)
            else:
                located.append((first, last))
        position += high - low
    return tuple(located)


def locate_back(within: Intervals, positions: Intervals) -> Intervals:
    """The intervals that stand at ``positions`` when those of ``within`` stand one after the other."""
    found, offset = [], 0
    for low, high in within:
        parts = intersect(positions, ((offset, offset + high - low),))
        found += [(start - offset + low, stop - offset + low) for start, stop in parts]
        offset += high - low
    return tuple(found)

"""The least that it takes to get from one spec to another: what a search may count on before it prices anything."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from shardwise.redistribute.cost import TICKS, Cost, Price
from shardwise.redistribute.parcels import Held, length, locate_back
from shardwise.redistribute.steps import AllReduce, Axes, ReduceScatter, Step, largest_nbytes
from shardwise.sharding.fitting import intersect
from shardwise.sharding.placement import Cut, Intervals, Placement
from shardwise.sharding.spec import Spec

ROUNDING = 8  # ticks by which the least may be too much, since every step is rounded


class Ahead:
    """What it takes at least to get to ``goal``.

    A rank that lacks elements, in whatever state, needs a collective that is no reduction; what is pending needs one
    that is. And each element that a rank is to hold and lacks, or has only a term of, is received at least once.
    """

    def __init__(self, goal: Spec, cost: Cost) -> None:
        mesh, topology = goal.mesh, cost.topology
        self.all = tuple([axis for axis, parts in enumerate(mesh.shape) if parts > 1])
        names = [(mesh.axis_names[axis],) for axis in self.all]
        self.goal, self.cost, self.whole = goal, cost, largest_nbytes(goal)
        self.byte = cost.scale / max(map(topology.bandwidth_over, names)) * TICKS
        self.known: dict[Spec, int] = {}
        self.starts: dict[Axes, float] = {(): min([self._start((axis,)) for axis in self.all])}

    def ticks(self, spec: Spec) -> int:
        """From ``spec``."""
        if spec not in self.known:
            lacking, crossed = least_received(spec, self.goal)
            pairs = enumerate(zip(spec.placements, self.goal.placements, strict=True))
            pending = tuple([axis for axis, (own, aim) in pairs if own is not aim and own.is_partial()])
            received = max(lacking, self.whole) if pending else lacking
            least = (self._talk(crossed) if lacking else 0) + (self._talk(pending) if pending else 0)
            self.known[spec] = max(0, int(least + self.byte * received) - ROUNDING)
        return self.known[spec]

    def by_two(self, spec: Spec, total: Price) -> Price:
        """By two collectives or more from ``spec``, which it took ``total`` to reach."""
        return Price(total.ticks + max(int(2 * self.starts[()]), self.ticks(spec)), total.peak)

    def _talk(self, axes: Axes) -> float:
        """The ticks that it takes to start collectives over these axes, or more: one over all of them, or several."""
        if axes not in self.starts:
            self.starts[axes] = min(self._start(axes), max([self._start((axis,)) for axis in axes]) + self.starts[()])
        return self.starts[axes]

    def _start(self, axes: Axes) -> float:
        mesh = self.goal.mesh
        names = tuple([mesh.axis_names[axis] for axis in axes])
        return self.cost.topology.seconds(names, prod([mesh.shape[axis] for axis in axes]), 0) * TICKS

    def at_least(self, step: Step, spec: Spec, total: Price) -> Price:
        """By way of ``step`` from ``spec``, which it took ``total`` to reach."""
        after = step.after(spec)
        received = step.traffic(spec)[0] if isinstance(step, AllReduce) else least_received(spec, after)[0]
        if isinstance(step, ReduceScatter):
            received = largest_nbytes(spec) * (step.ranks(spec) - 1) // step.ranks(spec)
        names = tuple([spec.mesh.axis_names[axis] for axis in step.group])
        taken = 0.0
        if received:
            taken = self.cost.topology.seconds(names, step.ranks(spec), received * self.cost.scale) * TICKS
        peak = (largest_nbytes(spec) + largest_nbytes(after)) * self.cost.scale
        ticks = total.ticks + max(0, int(taken) - ROUNDING) + self.ticks(after)
        return Price(ticks, max(total.peak, peak))


def least_received(spec: Spec, after: Spec) -> tuple[int, Axes]:
    """The bytes that some rank is to hold after and does not hold before, and axes that they must cross.

    Only a few ranks are looked at. An axis that alone cuts a dim is crossed if its part is not all that is needed.
    """
    most, crossed = 0, set[int]()
    for (held, _, alone), (needed, wanted, _) in zip(_seen(spec), _seen(after), strict=True):
        common = 1
        for here, there in zip(held, needed, strict=True):
            common *= _length(here, there)
        if common < wanted:
            most = max(most, wanted - common)
            for axis, dim, part in alone:
                if axis not in crossed and _length(needed[dim], part) < _length(needed[dim], needed[dim]):
                    crossed.add(axis)
    return most * spec.meta.dtype.itemsize, tuple(sorted(crossed))


@lru_cache(maxsize=16384)
def _seen(spec: Spec) -> tuple[tuple[Held, int, tuple[tuple[int, int, Intervals], ...]], ...]:
    """What a few ranks hold, how much it is, and of the axes that alone cut a dim which part of the dim it is in."""
    cuts: dict[int, list[int]] = {}
    for axis, own in enumerate(spec.placements):
        if isinstance(own, Cut):
            cuts.setdefault(own.dim, []).append(axis)
    seen = []
    for place in _places(spec.mesh.shape):
        held, alone = [], []
        for dim, size in enumerate(spec.shape):
            axes = cuts.get(dim, [])
            part = _cut(size, tuple([(spec.placements[axis], spec.mesh.shape[axis], place[axis]) for axis in axes]))
            held.append(part)
            if len(axes) == 1:
                alone.append((axes[0], dim, part))
        seen.append((tuple(held), prod([_length(own, own) for own in held]), tuple(alone)))
    return tuple(seen)


@lru_cache(maxsize=256)
def _places(parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The first rank, those next to it along an axis, and the last but for the last of each axis."""
    units = [tuple([int(axis == own) for own in range(len(parts))]) for axis, count in enumerate(parts) if count > 1]
    return tuple(dict.fromkeys([(0,) * len(parts), *units, tuple([max(count - 2, count > 1) for count in parts])]))


@lru_cache(maxsize=16384)
def _cut(size: int, cuts: tuple[tuple[Placement, int, int], ...]) -> Intervals:
    held: Intervals = ((0, size),)
    for cut, parts, index in cuts:
        assert isinstance(cut, Cut), cut
        held = locate_back(held, cut.intervals(length(held), parts, index))
    return held


@lru_cache(maxsize=16384)
def _length(here: Intervals, there: Intervals) -> int:
    return length(here if here == there else intersect(here, there))

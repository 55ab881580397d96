"""The way between two specs in which nothing pending changes: no rank receives a byte that it has or does not need.

One exchange over all axes concerned always meets that bound. So do slices followed by one gather, and some sequences of
steps each of which lays some axes as they are to lie; these are preferred where their groups are cheaper.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm

from shardwise.redistribute.bits import is_between, told
from shardwise.redistribute.cost import Cost, Price, seconds
from shardwise.redistribute.parcels import Grid, Held, common, layouts, unit_of, volume
from shardwise.redistribute.steps import Axes, Slice, Step, exchanges, involved, is_even, is_innermost
from shardwise.sharding.placement import Cut
from shardwise.sharding.spec import Spec

MANY = 256  # ranks from which on parts that are not equally large are not counted


@lru_cache(maxsize=16384)
def between(start: Spec, goal: Spec, cost: Cost) -> tuple[Step, ...]:
    """The cheapest steps that meet the bound: slices first, then one collective or several."""
    first = _slices(start, goal)
    after = start if first is None else first.after(start)
    if after is goal:
        return () if first is None else (first,)
    single = _step(after, goal, cost)
    alone = len(_changed(after, goal)) == 1 or _is_unbeaten(single, after, goal, cost)
    rest = (single,) if alone else _in_parts(after, goal, cost)
    return rest if first is None else (first, *rest)


def _is_unbeaten(step: Step, start: Spec, goal: Spec, cost: Cost) -> bool:
    """Whether two collectives cannot be cheaper than one step: they have to bring as much, and to start twice."""
    axes = involved(start, goal)
    names = tuple([start.mesh.axis_names[axis] for axis in axes])
    if _ranks(start, axes) > MANY and not all(is_even(side, axis) for side in (start, goal) for axis in axes):
        return True
    if not cost.topology.is_uniform(names):
        return False
    brought = step.traffic(start)[1] * cost.scale / cost.topology.bandwidth_over(names)
    return seconds(step, start, cost.topology, cost.scale) <= 2 * cost.topology.latency_over(names) + brought


def _slices(start: Spec, goal: Spec) -> Step | None:
    """What can be sliced at once: cuts of dims that no other change concerns and no later axis cuts."""
    changed = _changed(start, goal)
    sliced = [
        axis for axis in changed if start.placements[axis].is_replicate() and isinstance(goal.placements[axis], Cut)
    ]
    moved = {dim for axis in changed if axis not in sliced for dim in _dims(start, goal, axis)}
    for axis in reversed(sliced):
        (dim,) = _dims(start, goal, axis)
        if not is_innermost(start, tuple(sliced), axis, dim):
            moved.add(dim)
    axes = tuple([axis for axis in sliced if not moved & _dims(start, goal, axis)])
    if not axes:
        return None
    (step,) = exchanges(start, _laid(start, goal, axes))
    assert isinstance(step, Slice), step
    return step


def _step(start: Spec, goal: Spec, cost: Cost) -> Step:
    """The cheapest single step."""
    ways = exchanges(start, goal)
    return ways[0] if len(ways) == 1 else min(ways, key=lambda step: cost.of(step, start))


def _in_parts(start: Spec, goal: Spec, cost: Cost) -> tuple[Step, ...]:
    """The cheapest order in which to lay the changed axes, together or apart, without breaking the bound."""
    changed = _changed(start, goal)
    best: dict[Axes, tuple[Price, tuple[Step, ...]]] = {(): (cost.nothing, ())}
    for done in _subsets(changed):
        if done not in best:
            continue
        here, (before, steps) = _laid(start, goal, done), best[done]
        for after in [axes for axes in _subsets(changed) if set(axes) > set(done)]:
            there = _laid(start, goal, after)
            if there is not goal and not _is_between(here, there, goal):
                continue
            step = _step(here, there, cost)
            total = cost.add(before, cost.of(step, here))
            if after not in best or total < best[after][0]:
                best[after] = total, (*steps, step)
    return best[changed][1]


def _subsets(axes: Axes) -> Iterator[Axes]:
    return itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(len(axes) + 1))


def _changed(start: Spec, goal: Spec) -> Axes:
    return tuple([axis for axis, own in enumerate(start.placements) if own is not goal.placements[axis]])


def _dims(start: Spec, goal: Spec, axis: int) -> set[int]:
    return {lying.dim for side in (start, goal) if isinstance(lying := side.placements[axis], Cut)}


def _laid(start: Spec, goal: Spec, axes: Axes) -> Spec:
    """``start`` with ``axes`` as in ``goal``."""
    return start.with_placements(
        [(goal if axis in axes else start).placements[axis] for axis in range(start.mesh.ndim)]
    )


def _ranks(spec: Spec, axes: Axes) -> int:
    ranks = 1
    for axis in axes:
        ranks *= spec.mesh.shape[axis]
    return ranks


@lru_cache(maxsize=4096)
def _is_between(start: Spec, middle: Spec, goal: Spec) -> bool:
    """Whether each rank, in the middle, has what it needs of what it had, and nothing that it neither had nor needs."""
    sides = (start, middle, goal)
    units = [_unit(sides, dim) for dim in range(start.ndim)]
    had, has, needs = (told(units, start.mesh.shape, spec.placements) for spec in sides)
    if had is not None and has is not None and needs is not None:
        return is_between(had, has, needs)
    kept = zip(*(_held(spec) for spec in sides), strict=True)
    return all(None not in boxes and _is_box_between(*boxes) for boxes in kept)


def _unit(sides: Sequence[Spec], dim: int) -> int:
    """The size to which ``dim`` may be taken to shrink, all cuts staying as they are; its own if there is none."""
    units = [unit_of(spec.placements, spec.mesh.shape, dim) for spec in sides]
    size = sides[0].shape[dim]
    return lcm(*units) if all(units) and size % lcm(*units) == 0 else size


def _held(spec: Spec) -> tuple[Held | None, ...]:
    return layouts(Grid(spec.shape, spec.mesh.shape, spec.placements, spec.placements, (None,) * spec.mesh.ndim))[0]


def _is_box_between(had: Held, has: Held, needs: Held) -> bool:
    both = common(had, needs)
    inside = common(has, both)
    known = volume(common(has, had)) + volume(common(has, needs)) - volume(inside)
    return volume(inside) == volume(both) and known == volume(has)

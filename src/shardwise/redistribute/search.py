"""The way between two specs of which a pending reduction is to be done or made: a search, cheapest first.

It goes over the placements that can lie between, until nothing is left to reduce: from there the rest is one move, the
way of `shards`, and what is to be pending is made last. Only where reductions of different kinds wait for each other is
every change of one axis tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count

from shardwise.redistribute import shards
from shardwise.redistribute.cost import TICKS, Cost, Price
from shardwise.redistribute.steps import MakePartial, Step, direct, exchanges, may_reduce, name_of, reduction
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec

Steps = tuple[Step, ...]
Between = tuple[tuple[Placement, ...], ...]


def cheapest(start: Spec, goal: Spec, cost: Cost) -> Steps:
    """A* search; among equally cheap ways it takes the first found, so all ranks take the same."""
    between = tuple([_between(start, goal, axis) for axis in range(start.mesh.ndim)])
    ways = _ways if _in_any_order(start, goal) else _all_ways
    least = _least(start, cost)
    order = count()
    queue: list[tuple[Price, int, Price, Spec, Steps]] = [(cost.nothing, next(order), cost.nothing, start, ())]
    best = {start: cost.nothing}
    while queue:
        _, _, before, spec, steps = heappop(queue)
        if spec is goal:
            return steps
        if before > best[spec]:
            continue
        for way in [*((step,) for step in ways(spec, between)), *_jumps(spec, goal, cost)]:
            after, total = spec, before
            for step in way:
                total = cost.add(total, cost.of(step, after))
                after = step.after(after)
            if after not in best or total < best[after]:
                best[after] = total
                bound = Price(total.ticks + (0 if _is_near(after, goal) else least), total.peak)
                heappush(queue, (bound, next(order), total, after, (*steps, *way)))
    raise AssertionError(f"no way from {start} to {goal}")


def _least(start: Spec, cost: Cost) -> int:
    """The ticks that a collective takes at least."""
    return int(min(cost.topology.latency_over((name,)) for name in start.mesh.axis_names) * TICKS)


def _is_near(spec: Spec, goal: Spec) -> bool:
    """Whether no collective may be needed: each axis that is not right is replicated."""
    pairs = zip(spec.placements, goal.placements, strict=True)
    return all(here is there or here.is_replicate() for here, there in pairs)


@lru_cache(maxsize=16384)
def _ways(spec: Spec, between: Between) -> Steps:
    """Every change of one axis that leaves it cut or replicated, and reductions over several axes."""
    pending = [axis for axis, own in enumerate(spec.placements) if isinstance(own, Partial) and between[axis]]
    if not pending:
        return ()
    targets = enumerate([[lying for lying in placements if not lying.is_partial()] for placements in between])
    steps = [step for axis, aims in targets for target in aims for step in _changes(spec, axis, target)]
    for length in range(2, len(pending) + 1):
        for axes in itertools.combinations(pending, length):
            cuts = [[lying for lying in between[axis] if isinstance(lying, Cut)] for axis in axes]
            found = [reduction(spec, axes, aims) for aims in ((Replicate(),) * length, *itertools.product(*cuts))]
            steps += [step for step in found if step is not None]
    return tuple(steps)


def _changes(spec: Spec, axis: int, target: Placement) -> list[Step]:
    own = spec.placements[axis]
    if own is target:
        return []
    step = direct(spec, axis, target)
    if step is None and not own.is_partial():
        return exchanges(spec, spec.with_placements([*spec.placements[:axis], target, *spec.placements[axis + 1 :]]))
    return [] if step is None else [step]


@lru_cache(maxsize=16384)
def _all_ways(spec: Spec, between: Between) -> Steps:
    """Every change of one axis."""
    steps = [direct(spec, axis, lying) for axis, placements in enumerate(between) for lying in placements]
    return tuple([step for step in steps if step is not None])


def _jumps(spec: Spec, goal: Spec, cost: Cost) -> Iterator[Steps]:
    """All changes that concern nothing pending at once; then what is to be pending, kind by kind, if nothing waits."""
    aims, made, left = [], dict[str, tuple[int, ...]](), False
    for axis, (here, there) in enumerate(zip(spec.placements, goal.placements, strict=True)):
        left = left or (isinstance(here, Partial) and here is not there)
        if isinstance(there, Partial) and here is not there and not isinstance(here, Partial):
            made[there.reduce_op] = (*made.get(there.reduce_op, ()), axis)
        aims.append(here if isinstance(here, Partial) else Replicate() if isinstance(there, Partial) else there)
    rest = spec.with_placements(aims)
    steps = shards.between(spec, rest, cost) if rest is not spec else ()
    if not left and all(may_reduce(goal, axes, reduce_op) for reduce_op, axes in made.items()):
        steps = (*steps, *(MakePartial(axes, name_of(goal, axes), reduce_op) for reduce_op, axes in made.items()))
    if steps:
        yield steps


def _between(start: Spec, goal: Spec, axis: int) -> tuple[Placement, ...]:
    """What may lie on ``axis`` on the way.

    An axis that starts replicated and is not to be cut is not cut on the way: a slice that a later gather undoes saves
    bytes in an all_reduce at times, but is not what anybody expects of it.
    """
    before, after = start.placements[axis], goal.placements[axis]
    if before is after and (before.is_replicate() or (before.is_partial() and _in_any_order(start, goal))):
        return ()
    if after.is_partial() and not isinstance(before, Cut):
        return after, Replicate()
    cuts = [Shard(dim) for dim, size in enumerate(start.shape) if size > 1]
    return tuple(dict.fromkeys((after, Replicate(), before, *cuts)))


def _in_any_order(*specs: Spec) -> bool:
    """Whether no pending reduction must wait for another."""
    pending = [(spec, *item) for spec in specs for item in enumerate(spec.placements)]
    return all(may_reduce(spec, (axis,), here.reduce_op) for spec, axis, here in pending if isinstance(here, Partial))

"""The way between two specs of which a pending reduction is to be done or made: a search, cheapest first.

It goes over the placements that can lie between, until nothing is left to reduce: from there the rest is one move, the
way of `shards`, and what is to be pending is made last. Only where reductions of different kinds wait for each other is
every change of one axis tried.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import NamedTuple

from shardwise.redistribute import shards
from shardwise.redistribute.bounds import Ahead
from shardwise.redistribute.cost import Cost, Price
from shardwise.redistribute.steps import (
    MakePartial,
    Slice,
    Step,
    direct,
    exchanges,
    is_even,
    may_reduce,
    name_of,
    reduction,
)
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec

Steps = tuple[Step, ...]
Between = tuple[tuple[Placement, ...], ...]

JUMP, RELAY = "jump", "relay"
MANY = 16  # ranks from which on no exchange is done in two


class Road(NamedTuple):
    """A way from the start to ``spec`` and its price, and maybe what is to be tried from there, not priced yet."""

    spec: Spec
    total: Price
    steps: Steps
    onward: Step | str | None = None


def cheapest(start: Spec, goal: Spec, cost: Cost) -> Steps:
    """A* search; among equally cheap ways it takes the first found, so all ranks take the same.

    What a step costs is only found out when no other way can be cheaper: by the least that it may cost and the least
    that is left to be done.
    """
    search = _Search(start, goal, cost)
    while True:
        bound, _, _, road = heappop(search.queue)
        if road.total > search.best[road.spec]:
            continue
        match road.onward:
            case None if road.spec is goal:
                return road.steps
            case None:
                search.expand(road, bound)
            case str() as onward if onward is RELAY:
                search.relay(road)
            case str():
                search.follow(road, _jump(road.spec, goal, cost))
            case step:
                search.follow(road, (step,))


class _Search:
    """The roads that are open, the least that each takes, and the best price at which each spec was reached."""

    def __init__(self, start: Spec, goal: Spec, cost: Cost) -> None:
        self.goal, self.cost, self.ahead = goal, cost, Ahead(goal, cost)
        self.between = tuple([_between(start, goal, axis) for axis in range(start.mesh.ndim)])
        self.in_any_order, self.reduces = _in_any_order(start, goal), _is_pending(start, goal)
        self.best, self.order = {start: cost.nothing}, count()
        self.queue: list[tuple[Price, bool, int, Road]] = []
        self._open(cost.nothing, Road(start, cost.nothing, ()))

    def _open(self, least: Price, road: Road) -> None:
        ended = road.spec is self.goal and road.onward is None
        heappush(self.queue, (least, not ended, next(self.order), road))

    def expand(self, road: Road, least: Price) -> None:
        """Open whatever may be done next."""
        spec, goal, pending = road.spec, self.goal, _is_pending(road.spec, self.goal)
        if not self.in_any_order or not pending or _may_jump(road, goal):
            self._open(least, road._replace(onward=JUMP))
        if not pending and self.reduces and _may_relay(spec, goal):
            self._open(self.ahead.by_two(spec, road.total), road._replace(onward=RELAY))
        for step in (_ways if self.in_any_order else _all_ways)(spec, self.between):
            if not isinstance(step, Slice) or not _is_detour(step, spec, goal):
                self._open(self.ahead.at_least(step, spec, road.total), road._replace(onward=step))

    def relay(self, road: Road) -> None:
        """Open exchanges from which another leads on."""
        for step in _relays(road.spec, self.between):
            self._open(self.ahead.at_least(step, road.spec, road.total), road._replace(onward=step))

    def follow(self, road: Road, steps: Steps) -> None:
        """Price ``steps``, and open the road on from where they lead."""
        spec, total = road.spec, road.total
        for step in steps:
            total, spec = self.cost.add(total, self.cost.of(step, spec)), step.after(spec)
        if steps and (spec not in self.best or total < self.best[spec]):
            self.best[spec] = total
            least = Price(total.ticks + self.ahead.ticks(spec), total.peak)
            self._open(least, Road(spec, total, (*road.steps, *steps)))


@lru_cache(maxsize=16384)
def _ways(spec: Spec, between: Between) -> Steps:
    """Every change of one axis that leaves it cut or replicated, and reductions over several axes."""
    pending = [axis for axis, own in enumerate(spec.placements) if isinstance(own, Partial) and between[axis]]
    if not pending:
        return ()
    targets = enumerate([[lying for lying in placements if not lying.is_partial()] for placements in between])
    steps = [step for axis, aims in targets for target in aims for step in _changes(spec, axis, target)]
    for several in range(2, len(pending) + 1):
        for axes in itertools.combinations(pending, several):
            cuts = [[lying for lying in between[axis] if isinstance(lying, Cut)] for axis in axes]
            found = [reduction(spec, axes, aims) for aims in ((Replicate(),) * several, *itertools.product(*cuts))]
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


def _is_pending(spec: Spec, goal: Spec) -> bool:
    """Whether a reduction is still to be done."""
    return any(own is not aim and own.is_partial() for own, aim in zip(spec.placements, goal.placements, strict=True))


def _may_relay(spec: Spec, goal: Spec) -> bool:
    """Whether some ranks may have more to send than others, and they are few enough to look for a way about it."""
    axes = range(spec.mesh.ndim)
    return prod(spec.mesh.shape) <= MANY and not all(is_even(side, axis) for side in (spec, goal) for axis in axes)


def _relays(spec: Spec, between: Between) -> list[Step]:
    """Exchanges to what is not the goal, from where another leads there: some ranks may have less to send so."""
    pairs = zip(spec.placements, between, strict=True)
    choices = [[own, *(lying for lying in ways if not lying.is_partial())] for own, ways in pairs]
    ways = dict.fromkeys(spec.with_placements(way) for way in itertools.product(*choices))
    return [step for way in ways if way is not spec for step in exchanges(spec, way)]


def _is_detour(step: Slice, spec: Spec, goal: Spec) -> bool:
    """Whether an axis is cut otherwise than it is to be cut in the end, and could be, standing in no other's way."""
    ((axis, cut),) = zip(step.axes, step.cuts, strict=True)
    aim = goal.placements[axis]
    if aim is cut or not isinstance(aim, Cut) or direct(spec, axis, aim) is None:
        return False
    earlier = zip(spec.placements[:axis], goal.placements[:axis], strict=True)
    return all(own is end for own, end in earlier)


def _may_jump(road: Road, goal: Spec) -> bool:
    """Whether a jump is neither one step of those tried anyway nor, the last step being a slice, one from before it."""
    pairs = list(zip(road.spec.placements, goal.placements, strict=True))
    changed = sum(own is not aim and not own.is_partial() and not aim.is_partial() for own, aim in pairs)
    last = road.steps[-1] if road.steps else None
    return changed > 1 and not (
        isinstance(last, Slice) and all(goal.placements[axis] in last.cuts for axis in last.axes)
    )


def _jump(spec: Spec, goal: Spec, cost: Cost) -> Steps:
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
    return steps


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

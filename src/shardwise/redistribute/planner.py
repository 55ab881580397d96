"""The cheapest way from one spec to another: plans and their prices.

A plan is a function of two specs alone, so every rank finds the same one without talking. A change on one axis is
usually one step; whatever else is asked is searched, cheapest first, over the placements that can lie between.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf

import torch

from shardwise.errors import RedistributeError, message
from shardwise.redistribute.steps import (
    LINEAR,
    AllGather,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    direct,
    is_even,
    may_reduce,
)
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, dtype_name

BANDWIDTH = 50e9  # bytes a second that a rank sends
LATENCY = 1e-5  # seconds that a collective takes however little it sends
LOCAL = 1e-8  # seconds for a step that sends nothing: little, so that it only breaks ties

BITWISE = frozenset(("band", "bor", "bxor"))


@lru_cache(maxsize=16384)
def plan(src: Spec, dst: Spec) -> tuple[Step, ...]:
    """The cheapest steps that lay the tensor of ``src`` as ``dst`` says; none if it lies so already.

    Both are of one mesh, shape and dtype. Mesh axes of one rank need no step. Raises `RedistributeError` where one
    pending reduction is asked to become another, or the dtype cannot be reduced so.
    """
    _check_same(src, dst)
    start, goal = _canonical(src), _canonical(dst)
    changed = [axis for axis, placement in enumerate(start.placements) if placement is not goal.placements[axis]]
    for axis in changed:
        _check_reduction(src, dst, axis)
    if not changed:
        return ()
    step = direct(start, changed[0], goal.placements[changed[0]]) if len(changed) == 1 else None
    return (step,) if step is not None and not _wastes(step, start) else _search(start, goal)


@lru_cache(maxsize=16384)
def price(src: Spec, dst: Spec) -> float:
    """The seconds that the plan from ``src`` to ``dst`` takes, by the model; 0.0 only if there is nothing to do."""
    return sum((seconds(step, spec) for spec, step in stages(src, plan(src, dst))), 0.0)


def moved_bytes(src: Spec, dst: Spec) -> int:
    """The bytes that the plan from ``src`` to ``dst`` has a rank send: for each step, the rank that sends most."""
    return sum(step.bytes(spec) for spec, step in stages(src, plan(src, dst)))


def seconds(step: Step, spec: Spec) -> float:
    """What one step from ``spec`` takes, by the model: a latency, and the bytes over the bandwidth."""
    return LOCAL if isinstance(step, Slice | MakePartial) else LATENCY + step.bytes(spec) / BANDWIDTH


def stages(src: Spec, steps: tuple[Step, ...]) -> Iterator[tuple[Spec, Step]]:
    """Each step with the spec that it starts from."""
    for step in steps:
        yield src, step
        src = step.after(src)


def _canonical(spec: Spec) -> Spec:
    """The same layout in one notation: on an axis of one rank all placements are alike, and one block is no blocks."""
    pairs = zip(spec.placements, spec.mesh.shape, strict=True)
    return spec.with_placements([Replicate() if parts == 1 else _plain(placement) for placement, parts in pairs])


def _plain(placement: Placement) -> Placement:
    if isinstance(placement, StridedShard) and placement.split_factor == 1:
        return Shard(placement.dim)
    return placement


def _wastes(step: Step, spec: Spec) -> bool:
    """Whether the step would send padding, so that a longer way may be cheaper."""
    match step:
        case AllGather():
            return not is_even(spec, step.axis)
        case ReduceScatter():
            return not is_even(step.after(spec), step.axis)
    return False


def _search(start: Spec, goal: Spec) -> tuple[Step, ...]:
    """A* search; among equally cheap ways it takes the first found, so all ranks take the same."""
    between = [_between(start, goal, axis) for axis in range(start.mesh.ndim)]
    order = count()
    queue: list[tuple[float, int, float, Spec, tuple[Step, ...]]] = [(0.0, next(order), 0.0, start, ())]
    best = {start: 0.0}
    while queue:
        _, _, cost, spec, steps = heappop(queue)
        if spec is goal:
            return steps
        if cost > best[spec]:
            continue
        for step in _moves(spec, between):
            after, total = step.after(spec), cost + seconds(step, spec)
            if total < best.get(after, inf):
                best[after] = total
                heappush(queue, (total + _at_least(after, goal), next(order), total, after, (*steps, step)))
    raise AssertionError(f"no way from {start} to {goal}")


def _at_least(spec: Spec, goal: Spec) -> float:
    """A bound for the seconds left: on each axis that is neither right nor replicated a collective is still to come."""
    pairs = zip(spec.placements, goal.placements, strict=True)
    return LATENCY * sum(here is not there and not here.is_replicate() for here, there in pairs)


def _moves(spec: Spec, between: list[tuple[Placement, ...]]) -> Iterator[Step]:
    for axis, placements in enumerate(between):
        for placement in placements:
            step = direct(spec, axis, placement)
            if step is not None:
                yield step


def _between(start: Spec, goal: Spec, axis: int) -> tuple[Placement, ...]:
    """What may lie on ``axis`` on the way.

    An axis that starts replicated and is not to be cut is not cut on the way: a slice that a later gather undoes saves
    bytes in an all_reduce at times, but is not what anybody expects of it.
    """
    before, after = start.placements[axis], goal.placements[axis]
    if before is after and (before.is_replicate() or (before.is_partial() and _reduces_in_any_order(start, goal))):
        return ()
    if after.is_partial() and not isinstance(before, Cut):
        return after, Replicate()
    cuts = [Shard(dim) for dim, size in enumerate(start.shape) if size > 1]
    return tuple(dict.fromkeys((after, Replicate(), before, *cuts)))


def _reduces_in_any_order(*specs: Spec) -> bool:
    pending = [(spec, *item) for spec in specs for item in enumerate(spec.placements)]
    return all(may_reduce(spec, axis, here.reduce_op) for spec, axis, here in pending if isinstance(here, Partial))


def _check_same(src: Spec, dst: Spec) -> None:
    same_tensor = src.shape == dst.shape and src.meta.dtype is dst.meta.dtype
    if src.mesh is not dst.mesh or not same_tensor:
        what = "a redistribution changes placements, not the mesh, shape or dtype"
        raise RedistributeError(message(what, asked=f"{src} on {src.mesh}", got=f"{dst} on {dst.mesh}"))


def _check_reduction(src: Spec, dst: Spec, axis: int) -> None:
    before, after = src.placements[axis], dst.placements[axis]
    asked = f"{src} as {dst} on {src.mesh}"
    if isinstance(before, Partial) and isinstance(after, Partial):
        what = f"a pending {before.reduce_op} over axis {src.mesh.axis_names[axis]} cannot become a {after.reduce_op}"
        raise RedistributeError(message(what, asked=asked, do="redistribute to Replicate() on that axis first"))
    pending = before if isinstance(before, Partial) else after
    if isinstance(pending, Partial) and not _is_defined(pending.reduce_op, src.meta.dtype):
        what = f"no {pending.reduce_op} of {dtype_name(src.meta.dtype)} tensors"
        raise RedistributeError(message(what, asked=asked, do="convert the tensor to another dtype first"))


def _is_defined(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether the wire can do the reduction: only what is exact or rounds as the dtype does."""
    if dtype.is_complex:
        return reduce_op in LINEAR
    if dtype.is_floating_point:
        return reduce_op not in BITWISE
    return reduce_op != "avg"

"""The cheapest way from one spec to another: plans and their prices.

A plan is a function of two specs and a topology alone, so every rank finds the same one without talking. Where nothing
pending changes it meets the byte bound (`shards`), else it is searched for (`search`). Plans have no sizes in them, so
they are remembered by what decides them: how dims are cut, the sizes of those that are cut into unequal parts, and the
size of the whole to four binary digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import lcm, prod

import torch

from shardwise.errors import RedistributeError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute import search, shards
from shardwise.redistribute.carriers import width
from shardwise.redistribute.cost import Cost, seconds
from shardwise.redistribute.parcels import unit_of
from shardwise.redistribute.steps import AllReduce, ReduceScatter, Step, direct
from shardwise.redistribute.topology import Topology, current_topology
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta, dtype_name

Placements = tuple[Placement, ...]

DIGITS = 4  # binary digits of the size that a plan may depend on
ROUGH = 16  # elements a rank of a dim that is not cut, from which on it counts as one that could be cut evenly


def plan(src: Spec, dst: Spec, topology: Topology | None = None) -> tuple[Step, ...]:
    """The cheapest steps that lay the tensor of ``src`` as ``dst`` says; none if it lies so already.

    Both are of one mesh, shape and dtype. Mesh axes of one rank need no step. ``topology`` is by default that of this
    rank. Raises `RedistributeError` where one pending reduction is asked to become another, or the dtype cannot be
    reduced so.
    """
    return _plan(src, dst, topology or current_topology())


def price(src: Spec, dst: Spec, topology: Topology | None = None) -> float:
    """The seconds that the plan from ``src`` to ``dst`` takes, by the model; 0.0 only if there is nothing to do."""
    return _price(src, dst, topology or current_topology())


def rough(spec: Spec) -> Spec:
    """``spec`` with sizes rounded down to a few binary digits: where prices need not be exact, alike ones are alike."""
    return Spec(spec.mesh, spec.placements, TensorMeta.contiguous(rough_sizes(spec.shape), spec.meta.dtype))


def rough_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of `rough`.

    >>> rough_sizes((7, 1000, 1024))
    (7, 960, 1024)
    """
    return tuple([size >> excess << excess if (excess := size.bit_length() - DIGITS) > 0 else size for size in shape])


def moved_bytes(src: Spec, dst: Spec) -> int:
    """The bytes that the plan from ``src`` to ``dst`` has a rank send: for each step, the rank that sends most."""
    return sum(step.bytes(spec) for spec, step in stages(src, plan(src, dst)))


def stages(src: Spec, steps: tuple[Step, ...]) -> Iterator[tuple[Spec, Step]]:
    """Each step with the spec that it starts from."""
    for step in steps:
        yield src, step
        src = step.after(src)


@lru_cache(maxsize=16384)
def _plan(src: Spec, dst: Spec, topology: Topology) -> tuple[Step, ...]:
    _check_same(src, dst)
    before, after, changed = _changes(src.mesh, src.placements, dst.placements)
    for axis in changed:
        _check_reduction(src, dst, axis)
    if not changed:
        return ()
    start = src if before == src.placements else src.with_placements(before)
    step = direct(start, changed[0], after[changed[0]]) if len(changed) == 1 else None
    if step is not None and not _may_waste(step, start):
        return (step,)
    return _planned(*_reduced(start, dst.with_placements(after)), topology)


@lru_cache(maxsize=16384)
def _price(src: Spec, dst: Spec, topology: Topology) -> float:
    return sum((seconds(step, spec, topology) for spec, step in stages(src, _plan(src, dst, topology))), 0.0)


@lru_cache(maxsize=16384)
def _planned(start: Spec, goal: Spec, scale: int, topology: Topology) -> tuple[Step, ...]:
    pairs = zip(start.placements, goal.placements, strict=True)
    pending = any(here is not there and (here.is_partial() or there.is_partial()) for here, there in pairs)
    return (search.cheapest if pending else shards.between)(start, goal, Cost(topology, scale))


@lru_cache(maxsize=4096)
def _changes(mesh: DeviceMesh, *sides: Placements) -> tuple[Placements, Placements, tuple[int, ...]]:
    """The same layouts in one notation, and where they differ.

    On an axis of one rank all placements are alike, and one block is no blocks.
    """
    before, after = (
        tuple([Replicate() if parts == 1 else _plain(own) for own, parts in zip(side, mesh.shape, strict=True)])
        for side in sides
    )
    return before, after, tuple([axis for axis, own in enumerate(before) if own is not after[axis]])


def _plain(placement: Placement) -> Placement:
    if isinstance(placement, StridedShard) and placement.split_factor == 1:
        return Shard(placement.dim)
    return placement


def _may_waste(step: Step, spec: Spec) -> bool:
    """Whether ranks are sent unequally much, or terms travel wider than they are, so that a longer way may pay."""
    if isinstance(step, AllReduce):
        return step.is_wide(spec)
    return isinstance(step, ReduceScatter) and not step.is_even(spec)


def _reduced(start: Spec, goal: Spec) -> tuple[Spec, Spec, int]:
    """Two specs of which the plan is the same, of bytes and of sizes as small as can be; and how much smaller.

    A dim that is cut into equal parts is as small as these parts allow. The others have the size 1, except those that
    may be cut on the way if a reduction is pending.
    """
    lying = [placement for side in (start, goal) for placement in side.placements]
    cut = {placement.dim for placement in lying if isinstance(placement, Cut)}
    pending = any(placement.is_partial() for placement in lying)
    spare = _spare(start, cut) if pending else []
    dtype = _alike(start, goal) if pending else torch.uint8
    shape, scale = [], start.meta.dtype.itemsize // dtype.itemsize
    for dim, size in enumerate(start.shape):
        unit = _unit(start, goal, dim, pending) if dim in cut or dim in spare else 1
        roughly = dim in spare and size >= ROUGH * unit  # a plan is as good if it takes a long dim for an even one
        small = unit if unit and size and (roughly or size % unit == 0) else size
        shape.append(small)
        scale *= -(-size // small) if small else 1
    meta = TensorMeta.contiguous(shape, dtype)
    excess = max(scale.bit_length() - DIGITS, 0)
    return Spec(start.mesh, start.placements, meta), Spec(goal.mesh, goal.placements, meta), scale >> excess << excess


_PLAIN = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _alike(*sides: Spec) -> torch.dtype:
    """A dtype that counts as theirs does: if nothing pending travels wider than it is, by its bytes alone."""
    dtype = sides[0].meta.dtype
    pending = {own.reduce_op for side in sides for own in side.placements if isinstance(own, Partial)}
    wide = any(width(reduce_op, dtype) > dtype.itemsize for reduce_op in pending)
    return dtype if wide else _PLAIN[dtype.itemsize]


def _spare(spec: Spec, cut: set[int]) -> list[int]:
    """Of the dims that are not cut the first that all axes could cut evenly, or nearly; all if there is none."""
    free = [dim for dim in range(spec.ndim) if dim not in cut]
    whole = prod(spec.mesh.shape)
    even = [dim for dim in free if spec.shape[dim] % whole == 0]
    long = sorted([dim for dim in free if spec.shape[dim] >= ROUGH * whole], key=lambda dim: -spec.shape[dim])
    return [*even, *long][:1] or [dim for dim in free if spec.shape[dim] > 1]


def _unit(start: Spec, goal: Spec, dim: int, pending: bool) -> int:
    """The size of ``dim`` that all cuts, now or on the way, cut into equal parts; 0 if there is none."""
    sides = [[unit_of((own,), (parts,), dim) for own, parts in _lying(side)] for side in (start, goal)]
    if not all(map(all, sides)):
        return 0
    unit = prod(start.mesh.shape) if pending else 1
    return lcm(unit, *map(prod, sides), prod(map(lcm, *sides)))  # on the way, some axes lie as on either side


def _lying(spec: Spec) -> Iterator[tuple[Placement, int]]:
    return zip(spec.placements, spec.mesh.shape, strict=True)


def _check_same(src: Spec, dst: Spec) -> None:
    same_tensor = src.shape == dst.shape and src.meta.dtype is dst.meta.dtype
    if src.mesh is not dst.mesh or not same_tensor:
        what = "a redistribution changes placements, not the mesh, shape or dtype"
        raise RedistributeError(message(what, asked=f"{src} on {src.mesh}", got=f"{dst} on {dst.mesh}"))


def _check_reduction(src: Spec, dst: Spec, axis: int) -> None:
    before, after = src.placements[axis], dst.placements[axis]
    pending = before if isinstance(before, Partial) else after
    if not isinstance(pending, Partial):
        return
    if isinstance(before, Partial) and isinstance(after, Partial):
        what = f"a pending {before.reduce_op} over axis {src.mesh.axis_names[axis]} cannot become a {after.reduce_op}"
        do = "redistribute to Replicate() on that axis first"
    elif not pending.is_defined(src.meta.dtype):
        what = f"no {pending.reduce_op} of {dtype_name(src.meta.dtype)} tensors"
        do = "convert the tensor to another dtype first"
    else:
        return
    raise RedistributeError(message(what, asked=f"{src} as {dst} on {src.mesh}", do=do))

"""The closed set of moves that change how a tensor lies on mesh axes, and the bytes that each sends.

A step says what is done over which axes and knows no sizes, so it serves a tensor of any shape. `execute` carries steps
out, `planner` chooses them. Over several axes a step is one collective on the flattened group, whose ranks stand
row-major in the order of the axes.

Placements act from the first axis to the last. So a dim can be cut or made whole over axes only where no later axis
cuts it too (`is_innermost`), except by an `AllToAll`, which takes such later axes along. Likewise a reduction over axes
can be done only when none of another kind is pending on a later one (`may_reduce`).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod

import torch

from shardwise._value import derived, value
from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute.carriers import width
from shardwise.redistribute.parcels import Grid, traffic
from shardwise.sharding.placement import LINEAR, Cut, Owned, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta

Axes = tuple[int, ...]


@value
class Step:
    """One move over the mesh axes ``axes`` (ascending), whose names joined are ``name``; the base of all steps."""

    axes: Axes
    name: str

    @property
    def targets(self) -> tuple[Placement, ...]:
        """How the tensor lies on each of the axes afterwards."""
        raise NotImplementedError

    def after(self, spec: Spec) -> Spec:
        """The spec that the move makes of ``spec``."""
        placements = list(spec.placements)
        for axis, target in zip(self.axes, self.targets, strict=True):
            placements[axis] = target
        return spec.with_placements(placements)

    def bytes(self, spec: Spec) -> int:
        """The bytes that a rank sends, in the ideal ring algorithm: those of the rank that sends most."""
        return self.traffic(spec)[0]

    def traffic(self, spec: Spec) -> tuple[int, int]:
        """The most bytes that a rank sends, and the most that one receives."""
        return 0, 0

    def peak(self, spec: Spec) -> int:
        """The bytes that the largest rank needs while the step runs: what it holds before and after, and buffers."""
        return largest_nbytes(spec) + largest_nbytes(self.after(spec))

    def parts(self, spec: Spec) -> tuple[int, ...]:
        """How many ranks each of the axes has."""
        return tuple([spec.mesh.shape[axis] for axis in self.axes])

    @property
    def group(self) -> Axes:
        """The axes whose ranks talk to each other."""
        return self.axes

    def ranks(self, spec: Spec) -> int:
        """How many ranks talk to each other."""
        return prod([spec.mesh.shape[axis] for axis in self.group])


@value
class AllGather(Step):
    """Join the parts of dims, equally large on all ranks: cut to replicated. If they are not, it is an `AllToAll`."""

    axes: Axes
    name: str
    cuts: tuple[Cut, ...]

    @property
    def targets(self) -> tuple[Placement, ...]:
        return (Replicate(),) * len(self.axes)

    def is_even(self, spec: Spec) -> bool:
        """Whether the parts are equally large."""
        return all(is_even(spec, axis) for axis in self.axes)

    @derived
    def along_dim_0(self) -> bool:
        """Whether the parts follow each other along dim 0, in the order of ranks."""
        return all(isinstance(cut, Shard) and cut.dim == 0 for cut in self.cuts)

    def fitting(self, spec: Spec) -> AllGather | AllToAll:
        """The same move for parts as large as those of ``spec``."""
        return self if self.is_even(spec) else AllToAll(self.axes, self.name, self.cuts, self.targets)

    def traffic(self, spec: Spec) -> tuple[int, int]:
        if (fitting := self.fitting(spec)) is not self:
            return fitting.traffic(spec)
        sent = (self.ranks(spec) - 1) * largest_nbytes(spec)
        return sent, sent

    def peak(self, spec: Spec) -> int:
        return largest_nbytes(spec) + (1 if self.along_dim_0 else 2) * largest_nbytes(self.after(spec))

    def __repr__(self) -> str:
        return f"all_gather({self.name}, {_dims(self.cuts)})"


@value
class ReduceScatter(Step):
    """Do a pending reduction, and keep a part of the result: partial to cut.

    Where the parts are not equally large, or the terms would travel wider than they are, each rank is sent its part of
    all terms and adds them up: so nothing is padded or widened, and a rank sends what the others are to hold and no
    more, which is the least that tells them of its term.
    """

    axes: Axes
    name: str
    cuts: tuple[Cut, ...]
    reduce_op: str

    @property
    def targets(self) -> tuple[Placement, ...]:
        return self.cuts

    def is_even(self, spec: Spec) -> bool:
        """Whether the parts are equally large."""
        after = self.after(spec)
        return all(is_even(after, axis) for axis in self.axes)

    def is_exchanged(self, spec: Spec) -> bool:
        """Whether the ranks send each other the terms, and no backend reduces them."""
        return not self.is_even(spec) or width(self.reduce_op, spec.meta.dtype) > spec.meta.dtype.itemsize

    def traffic(self, spec: Spec) -> tuple[int, int]:
        others = self.ranks(spec) - 1
        if self.is_even(spec):
            sent = others * largest_nbytes(self.after(spec))
            return sent, sent
        before, parts = sizes_of(spec), self.parts(spec)
        choices = [sorted(sizes) if self._cuts(dim) else [max(sizes)] for dim, sizes in enumerate(before)]
        most, widest = 0, 0
        for sizes in itertools.product(*choices):
            found = [{size} for size in sizes]
            for cut, count in zip(self.cuts, parts, strict=True):
                found[cut.dim] = {part for size in found[cut.dim] for part in local_sizes(cut, size, count)}
            most, widest = max(most, prod(sizes) - prod(map(min, found))), max(widest, prod(map(max, found)))
        itemsize = spec.meta.dtype.itemsize
        return most * itemsize, others * widest * itemsize

    def _cuts(self, dim: int) -> bool:
        return any(cut.dim == dim for cut in self.cuts)

    def peak(self, spec: Spec) -> int:
        after = largest_nbytes(self.after(spec))
        if not self.is_exchanged(spec):
            return largest_nbytes(spec) + (self.ranks(spec) + 1) * after
        return largest_nbytes(spec) + sum(self.traffic(spec)) + after

    def __repr__(self) -> str:
        return f"reduce_scatter({self.name}, {_dims(self.cuts)}, {self.reduce_op})"


@value
class AllReduce(Step):
    """Do a pending reduction: partial to replicated."""

    axes: Axes
    name: str
    reduce_op: str

    @property
    def targets(self) -> tuple[Placement, ...]:
        return (Replicate(),) * len(self.axes)

    def traffic(self, spec: Spec) -> tuple[int, int]:
        ranks = self.ranks(spec)
        sent = 2 * (ranks - 1) * self._travelling(spec) // ranks
        return sent, sent

    def is_wide(self, spec: Spec) -> bool:
        """Whether the terms travel wider than they are."""
        return width(self.reduce_op, spec.meta.dtype) > spec.meta.dtype.itemsize

    def peak(self, spec: Spec) -> int:
        return Step.peak(self, spec) + 2 * self._travelling(spec) * self.is_wide(spec)

    def _travelling(self, spec: Spec) -> int:
        return largest_nbytes(spec) // spec.meta.dtype.itemsize * width(self.reduce_op, spec.meta.dtype)

    def __repr__(self) -> str:
        return f"all_reduce({self.name}, {self.reduce_op})"


@value
class AllToAll(Step):
    """Lie otherwise: each rank is sent exactly what it is to hold and lacks, each part by one of those that hold it.

    It goes over ``axes`` without the axes ``apart``: over these the tensor is replicated, and each of their ranks is
    served by those that stand where it does. ``name`` is that of the axes that it goes over. What one rank holds and
    all are to hold is broadcast.
    """

    axes: Axes
    name: str
    sources: tuple[Placement, ...]
    aims: tuple[Placement, ...]
    apart: Axes = ()

    @property
    def targets(self) -> tuple[Placement, ...]:
        return self.aims

    @property
    def group(self) -> Axes:
        return tuple([axis for axis in self.axes if axis not in self.apart])

    @property
    def root(self) -> tuple[int, ...] | None:
        """Where the rank stands on the axes that alone has what all are to have; None if that is not so."""
        owners = tuple([source.index for source in self.sources if isinstance(source, Owned)])
        alone = len(owners) == len(self.sources) and all(aim.is_replicate() for aim in self.aims)
        return owners if alone else None

    def traffic(self, spec: Spec) -> tuple[int, int]:
        if self.root is not None:
            return spec.meta.dtype.itemsize, spec.meta.dtype.itemsize
        return _exchanged(self, spec)

    def peak(self, spec: Spec) -> int:
        return largest_nbytes(spec) + largest_nbytes(self.after(spec)) + sum(self.traffic(spec))

    def grid(self, spec: Spec, coordinate: tuple[int, ...]) -> Grid:
        """The part of the tensor that the group of the rank at ``coordinate`` exchanges, and how it is cut."""
        sizes = list(spec.shape)
        for axis, (placement, parts) in enumerate(zip(spec.placements, spec.mesh.shape, strict=True)):
            if axis not in self.axes and isinstance(placement, Cut):
                sizes[placement.dim] = local_sizes(placement, sizes[placement.dim], parts)[coordinate[axis]]
        fixed = tuple([coordinate[axis] if axis in self.apart else None for axis in self.axes])
        return Grid(tuple(sizes), self.parts(spec), self.sources, self.aims, fixed)

    def grids(self, spec: Spec) -> list[Grid]:
        """The grids that differ, with the largest size of dims that are not exchanged."""
        moved = {placement.dim for placement in (*self.sources, *self.aims) if isinstance(placement, Cut)}
        found = sizes_of(spec, self.axes)
        choices = [sorted(sizes) if dim in moved else [max(sizes)] for dim, sizes in enumerate(found)]
        fixed = tuple([0 if axis in self.apart else None for axis in self.axes])
        lying = self.parts(spec), self.sources, self.aims, fixed
        return [Grid(sizes, *lying) for sizes in itertools.product(*choices)]

    def __repr__(self) -> str:
        if len(self.axes) == 1:
            return f"all_to_all({self.name}, {_lying(*self.sources)} -> {_lying(*self.aims)})"
        return f"all_to_all({self.name}, {' '.join(map(str, self.sources))} -> {' '.join(map(str, self.aims))})"


@lru_cache(maxsize=16384)
def _exchanged(step: AllToAll, spec: Spec) -> tuple[int, int]:
    """The most bytes that a rank sends in an exchange, and the most that one receives."""
    found = [traffic(grid) for grid in step.grids(spec)]
    itemsize = spec.meta.dtype.itemsize
    return max(sent for sent, _ in found) * itemsize, max(received for _, received in found) * itemsize


@value
class Slice(Step):
    """Keep a part of dims: replicated to cut. Nothing is sent."""

    axes: Axes
    name: str
    cuts: tuple[Cut, ...]

    @property
    def targets(self) -> tuple[Placement, ...]:
        return self.cuts

    def __repr__(self) -> str:
        return f"slice({self.name}, {_dims(self.cuts)})"


@value
class MakePartial(Step):
    """Make terms whose reduction is the tensor: replicated to partial. Nothing is sent, and no bit is lost.

    For sums, products and exclusive or, the first rank of the axes keeps the tensor and the others hold the neutral
    element; for the other reductions every rank keeps the tensor.
    """

    axes: Axes
    name: str
    reduce_op: str

    @property
    def targets(self) -> tuple[Placement, ...]:
        return (Partial(self.reduce_op),) * len(self.axes)

    def __repr__(self) -> str:
        return f"make_partial({self.name}, {self.reduce_op})"


def direct(spec: Spec, axis: int, target: Placement) -> Step | None:
    """The one step that lays ``spec`` as ``target`` on ``axis``, the other axes unchanged; None if there is none."""
    step = _direct(spec.mesh, spec.placements, axis, target)
    return step.fitting(spec) if isinstance(step, AllGather) else step


@lru_cache(maxsize=16384)
def _direct(mesh: DeviceMesh, placements: tuple[Placement, ...], axis: int, target: Placement) -> Step | None:
    source, spec = placements[axis], Spec(mesh, placements, _ANY)
    if source is target or not all(_is_free(spec, (axis,), axis, placement) for placement in (source, target)):
        return None
    axes, name = (axis,), mesh.axis_names[axis]
    match source, target:
        case Cut(), Replicate():
            return AllGather(axes, name, (source,))
        case (Cut(), Cut()) | (Owned(), Owned() | Replicate()) | (Replicate(), Owned()):
            return AllToAll(axes, name, (source,), (target,))
        case Partial(), Replicate():
            return AllReduce(axes, name, source.reduce_op)
        case Partial(), Cut():
            return ReduceScatter(axes, name, (target,), source.reduce_op)
        case Replicate(), Cut():
            return Slice(axes, name, (target,))
        case Replicate(), Partial():
            return MakePartial(axes, name, target.reduce_op)
    return None


_ANY = TensorMeta.contiguous((), torch.uint8)  # steps are the same whatever the tensor


def reduction(spec: Spec, axes: Axes, targets: tuple[Placement, ...]) -> Step | None:
    """The one step that reduces what is pending over ``axes``, alike, to ``targets``: all cut or all replicated."""
    own, name = spec.placements[axes[0]], name_of(spec, axes)
    assert isinstance(own, Partial), own
    if any(spec.placements[axis] is not own for axis in axes) or not may_reduce(spec, axes, own.reduce_op):
        return None
    if not all(_is_free(spec, axes, *target) for target in zip(axes, targets, strict=True)):
        return None
    cuts = tuple([target for target in targets if isinstance(target, Cut)])
    if not cuts:
        return AllReduce(axes, name, own.reduce_op)
    return ReduceScatter(axes, name, cuts, own.reduce_op) if len(cuts) == len(axes) else None


def exchanges(spec: Spec, after: Spec) -> list[Step]:
    """The steps, each of which leads from one spec to another; they differ on axes that are cut or replicated in both.

    A slice if every changed axis only takes a part of what it has, a gather if parts of equal size are joined; else an
    exchange over the changed axes and the later ones that cut the same dims: over all of them, so that replicas share
    the work, or within the replicas.
    """
    changed = tuple([axis for axis, own in enumerate(spec.placements) if own is not after.placements[axis]])
    sources, targets = (tuple([side.placements[axis] for axis in changed]) for side in (spec, after))
    taken, given = (tuple([lying for lying in side if isinstance(lying, Cut)]) for side in (targets, sources))
    cuts = taken or given
    if bool(taken) != bool(given) and all(_is_free(spec, changed, *cut) for cut in zip(changed, cuts, strict=True)):
        if taken:
            return [Slice(changed, name_of(spec, changed), cuts)]
        if all(is_even(spec, axis) for axis in changed):
            return [AllGather(changed, name_of(spec, changed), cuts)]
    axes = involved(spec, after)
    before, aims = (tuple([side.placements[axis] for axis in axes]) for side in (spec, after))
    talking = tuple([axis for axis in axes if not spec.placements[axis].is_replicate()])
    apart = tuple([axis for axis in axes if axis not in talking])
    ways: list[Step] = [AllToAll(axes, name_of(spec, axes), before, aims)]
    return [*ways, AllToAll(axes, name_of(spec, talking), before, aims, apart)] if talking and apart else ways


def involved(spec: Spec, after: Spec) -> Axes:
    """The axes that change, and the later ones that cut a dim of theirs: there the parts shift."""
    first: dict[int, int] = {}
    changed = [axis for axis, own in enumerate(spec.placements) if own is not after.placements[axis]]
    for axis in changed:
        for side in (spec, after):
            if isinstance(cut := side.placements[axis], Cut):
                first.setdefault(cut.dim, axis)
    return tuple(
        [
            axis
            for axis, (placement, parts) in enumerate(zip(spec.placements, spec.mesh.shape, strict=True))
            if axis in changed
            or (isinstance(placement, Cut) and parts > 1 and axis > first.get(placement.dim, spec.mesh.ndim))
        ]
    )


def name_of(spec: Spec, axes: Axes) -> str:
    """The names of axes joined, as a flattened mesh joins them."""
    return "_".join([spec.mesh.axis_names[axis] for axis in axes])


def _is_free(spec: Spec, axes: Axes, axis: int, placement: Placement) -> bool:
    """Whether nothing later stands in the way of making or unmaking ``placement`` on ``axis``, one of ``axes``."""
    if isinstance(placement, Cut):
        return is_innermost(spec, axes, axis, placement.dim)
    return not isinstance(placement, Partial) or may_reduce(spec, axes, placement.reduce_op)


def is_innermost(spec: Spec, axes: Axes, axis: int, dim: int) -> bool:
    """Whether no axis later than ``axis``, other than those of ``axes``, cuts ``dim``; axes of one rank cut nothing."""
    for later in range(axis + 1, spec.mesh.ndim):
        placement = spec.placements[later]
        if isinstance(placement, Cut) and placement.dim == dim and later not in axes and spec.mesh.shape[later] > 1:
            return False
    return True


def may_reduce(spec: Spec, axes: Axes, reduce_op: str) -> bool:
    """Whether every reduction pending later than ``axes`` may as well be done after one by ``reduce_op`` over them."""
    later = range(axes[0] + 1, spec.mesh.ndim)
    pending = {
        placement.reduce_op
        for axis in later
        if isinstance(placement := spec.placements[axis], Partial) and spec.mesh.shape[axis] > 1
    }
    return not pending or pending == {reduce_op} or (reduce_op in LINEAR and pending <= LINEAR)


@lru_cache(maxsize=16384)
def local_sizes(cut: Cut, size: int, parts: int) -> tuple[int, ...]:
    """What each of ``parts`` ranks holds of a dim of ``size``.

    >>> local_sizes(Shard(0), 5, 4)
    (2, 2, 1, 0)
    """
    if isinstance(cut, Shard) and size % parts == 0:
        return (size // parts,) * parts
    return tuple(cut.local_size(size, parts, index) for index in range(parts))


@lru_cache(maxsize=16384)
def is_even(spec: Spec, axis: int) -> bool:
    """Whether ``axis`` cuts what the axes before it left into equally large parts, wherever they stand there."""
    cut, parts = spec.placements[axis], spec.mesh.shape[axis]
    if not isinstance(cut, Cut):
        return True
    if isinstance(cut, Shard) and not any(
        isinstance(own, Cut) and own.dim == cut.dim for own in spec.placements[:axis]
    ):
        return spec.shape[cut.dim] % parts == 0
    # Placements act from the first axis to the last: what later axes cut is cut alike if these parts are alike.
    later = tuple(range(axis, spec.mesh.ndim))
    return all(len(set(local_sizes(cut, size, parts))) == 1 for size in _sizes(spec, cut.dim, later))


@lru_cache(maxsize=16384)
def largest_nbytes(spec: Spec) -> int:
    """The bytes of the largest local tensor of any rank."""
    return prod(map(max, sizes_of(spec))) * spec.meta.dtype.itemsize


def sizes_of(spec: Spec, skipped: Axes = ()) -> list[set[int]]:
    """For each dim, the local sizes that occur on the mesh, if the axes ``skipped`` did not cut it."""
    cut = {placement.dim for placement in spec.placements if isinstance(placement, Cut)}
    return [_sizes(spec, dim, skipped) if dim in cut else {size} for dim, size in enumerate(spec.shape)]


def _sizes(spec: Spec, dim: int, skipped: Axes) -> set[int]:
    sizes = {spec.shape[dim]}
    for axis, (placement, parts) in enumerate(zip(spec.placements, spec.mesh.shape, strict=True)):
        if axis not in skipped and isinstance(placement, Cut) and placement.dim == dim:
            sizes = {part for size in sizes for part in local_sizes(placement, size, parts)}
    return sizes


def _dims(cuts: tuple[Cut, ...]) -> str:
    return ", ".join(map(_lying, cuts))


def _lying(placement: Placement) -> str:
    if not isinstance(placement, Cut):
        return str(placement)
    factor = getattr(placement, "split_factor", None)
    return f"dim {placement.dim}" if factor is None else f"dim {placement.dim}/{factor}"

"""The closed set of moves that change how a tensor lies on one mesh axis, and the bytes that each sends.

A step says what is done on which axis and knows no sizes, so it serves a tensor of any shape. `execute` carries steps
out, `planner` chooses them. A dim can be cut or made whole over an axis only where no later axis cuts it too, because
placements act from the first axis to the last (`is_innermost`); likewise a reduction over an axis can be done only when
none of another kind is pending on a later one (`may_reduce`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from shardwise._value import value
from shardwise.sharding.placement import Cut, Intervals, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec

LINEAR = frozenset(("sum", "avg"))  # reductions that may be done in any order among each other


@value
class Step:
    """One move on the mesh axis ``axis``, whose name is ``name``; the base of all steps."""

    axis: int
    name: str

    @property
    def target(self) -> Placement:
        """How the tensor lies on the axis afterwards."""
        raise NotImplementedError

    def after(self, spec: Spec) -> Spec:
        """The spec that the move makes of ``spec``."""
        placements = spec.placements
        return spec.with_placements((*placements[: self.axis], self.target, *placements[self.axis + 1 :]))

    def bytes(self, spec: Spec) -> int:
        """The bytes that a rank sends, in the ideal ring algorithm: those of the rank that sends most."""
        return 0


@value
class AllGather(Step):
    """Join the parts of a dim: cut to replicated. Parts are padded to the largest."""

    axis: int
    name: str
    cut: Cut

    @property
    def target(self) -> Replicate:
        return Replicate()

    def bytes(self, spec: Spec) -> int:
        return (spec.mesh.shape[self.axis] - 1) * largest_nbytes(spec)

    def __repr__(self) -> str:
        return f"all_gather({self.name}, {_dim(self.cut)})"


@value
class ReduceScatter(Step):
    """Do a pending reduction, and keep a part of the result: partial to cut. Parts are padded to the largest."""

    axis: int
    name: str
    cut: Cut
    reduce_op: str

    @property
    def target(self) -> Cut:
        return self.cut

    def bytes(self, spec: Spec) -> int:
        return (spec.mesh.shape[self.axis] - 1) * largest_nbytes(self.after(spec))

    def __repr__(self) -> str:
        return f"reduce_scatter({self.name}, {_dim(self.cut)}, {self.reduce_op})"


@value
class AllReduce(Step):
    """Do a pending reduction: partial to replicated."""

    axis: int
    name: str
    reduce_op: str

    @property
    def target(self) -> Replicate:
        return Replicate()

    def bytes(self, spec: Spec) -> int:
        parts = spec.mesh.shape[self.axis]
        return 2 * (parts - 1) * largest_nbytes(spec) // parts

    def __repr__(self) -> str:
        return f"all_reduce({self.name}, {self.reduce_op})"


@value
class AllToAll(Step):
    """Cut otherwise: each rank sends each other exactly what that one is to hold."""

    axis: int
    name: str
    source: Cut
    cut: Cut

    @property
    def target(self) -> Cut:
        return self.cut

    def bytes(self, spec: Spec) -> int:
        parts, source, target = spec.mesh.shape[self.axis], self.source, self.cut
        others = prod(size for dim, size in enumerate(_largest(spec)) if dim not in (source.dim, target.dim))
        sizes = _sizes(spec, source.dim, self.axis)
        if source.dim == target.dim:
            sent = max(_moved(source, target, size, parts) for size in sizes)
        else:
            crossed = _sizes(spec, target.dim, self.axis)
            sent = max(_exchanged(source, target, size, cross, parts) for size in sizes for cross in crossed)
        return sent * others * spec.meta.dtype.itemsize

    def __repr__(self) -> str:
        return f"all_to_all({self.name}, {_dim(self.source)} -> {_dim(self.cut)})"


@value
class Slice(Step):
    """Keep a part of a dim: replicated to cut. Nothing is sent."""

    axis: int
    name: str
    cut: Cut

    @property
    def target(self) -> Cut:
        return self.cut

    def __repr__(self) -> str:
        return f"slice({self.name}, {_dim(self.cut)})"


@value
class MakePartial(Step):
    """Make terms whose reduction is the tensor: replicated to partial. Nothing is sent, and no bit is lost.

    For sums, products and exclusive or, the first rank of the axis keeps the tensor and the others hold the neutral
    element; for the other reductions every rank keeps the tensor.
    """

    axis: int
    name: str
    reduce_op: str

    @property
    def target(self) -> Partial:
        return Partial(self.reduce_op)

    def __repr__(self) -> str:
        return f"make_partial({self.name}, {self.reduce_op})"


def direct(spec: Spec, axis: int, target: Placement) -> Step | None:
    """The one step that lays ``spec`` as ``target`` on ``axis``, the other axes unchanged; None if there is none."""
    name, source = spec.mesh.axis_names[axis], spec.placements[axis]
    if source is target or not all(_is_free(spec, axis, placement) for placement in (source, target)):
        return None
    match source, target:
        case Cut(), Replicate():
            return AllGather(axis, name, source)
        case Cut(), Cut():
            return AllToAll(axis, name, source, target)
        case Partial(), Replicate():
            return AllReduce(axis, name, source.reduce_op)
        case Partial(), Cut():
            return ReduceScatter(axis, name, target, source.reduce_op)
        case Replicate(), Cut():
            return Slice(axis, name, target)
        case Replicate(), Partial():
            return MakePartial(axis, name, target.reduce_op)
    return None


def _is_free(spec: Spec, axis: int, placement: Placement) -> bool:
    """Whether nothing on a later axis stands in the way of making or unmaking ``placement`` on ``axis``."""
    if isinstance(placement, Cut):
        return is_innermost(spec, axis, placement.dim)
    return not isinstance(placement, Partial) or may_reduce(spec, axis, placement.reduce_op)


def is_innermost(spec: Spec, axis: int, dim: int) -> bool:
    """Whether no axis later than ``axis`` cuts ``dim``; axes of one rank cut nothing."""
    later = zip(spec.placements[axis + 1 :], spec.mesh.shape[axis + 1 :], strict=True)
    return not any(isinstance(placement, Cut) and placement.dim == dim and parts > 1 for placement, parts in later)


def may_reduce(spec: Spec, axis: int, reduce_op: str) -> bool:
    """Whether every reduction pending later than ``axis`` may as well be done after one by ``reduce_op`` on it."""
    later = zip(spec.placements[axis + 1 :], spec.mesh.shape[axis + 1 :], strict=True)
    pending = {placement.reduce_op for placement, parts in later if isinstance(placement, Partial) and parts > 1}
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


def is_even(spec: Spec, axis: int) -> bool:
    """Whether all ranks of ``axis`` hold equally large parts, wherever they stand on the other axes."""
    cut, parts = spec.placements[axis], spec.mesh.shape[axis]
    if not isinstance(cut, Cut):
        return True
    return all(len(set(local_sizes(cut, size, parts))) == 1 for size in _sizes(spec, cut.dim, axis))


def largest_nbytes(spec: Spec) -> int:
    """The bytes of the largest local tensor of any rank."""
    return prod(_largest(spec)) * spec.meta.dtype.itemsize


def _largest(spec: Spec) -> tuple[int, ...]:
    cut = {placement.dim for placement in spec.placements if isinstance(placement, Cut)}
    return tuple(max(_sizes(spec, dim)) if dim in cut else size for dim, size in enumerate(spec.shape))


def _sizes(spec: Spec, dim: int, skipped: int = -1) -> set[int]:
    """The local sizes of ``dim`` that occur on the mesh, if the axis ``skipped`` did not cut it."""
    sizes = {spec.shape[dim]}
    for axis, (placement, parts) in enumerate(zip(spec.placements, spec.mesh.shape, strict=True)):
        if axis != skipped and isinstance(placement, Cut) and placement.dim == dim:
            sizes = {part for size in sizes for part in local_sizes(placement, size, parts)}
    return sizes


def _exchanged(source: Cut, target: Cut, size: int, cross: int, parts: int) -> int:
    """The most elements that leave a rank when a (``size``, ``cross``) matrix is cut along dim 1 instead of dim 0."""
    held, wanted = local_sizes(source, size, parts), local_sizes(target, cross, parts)
    return max(rows * (cross - columns) for rows, columns in zip(held, wanted, strict=True))


def _moved(source: Cut, target: Cut, size: int, parts: int) -> int:
    """The most elements that leave a rank when a dim of ``size`` is cut otherwise."""
    pairs = ((source.intervals(size, parts, index), target.intervals(size, parts, index)) for index in range(parts))
    return max(length(held) - length(intersect(held, wanted)) for held, wanted in pairs)


def length(intervals: Intervals) -> int:
    """How many positions lie in ``intervals``."""
    return sum(stop - start for start, stop in intervals)


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """The intervals that lie in both lists, ascending as they are.

    >>> intersect(((0, 4), (6, 8)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    both = ((max(low, start), min(high, stop)) for low, high in first for start, stop in second)
    return tuple((start, stop) for start, stop in both if start < stop)


def _dim(cut: Cut) -> str:
    factor = getattr(cut, "split_factor", None)
    return f"dim {cut.dim}" if factor is None else f"dim {cut.dim}/{factor}"

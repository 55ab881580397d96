"""A sharded tensor without its data: mesh, placements and the meta of the global tensor.

The text form is ``f32[8@dp, 4]`` (dim 0 cut over axis dp), ``f32[8, 4]{sum@tp}`` (a sum over axis tp is pending),
``f32[8@tp/2, 4]`` (a strided shard with split factor 2), ``f32[5@tp(2,2,1,0), 4]`` (parts of these sizes),
``f32[]{tp=1}`` (a tensor without dims that lies on the rank of index 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch

from shardwise._value import derived, value
from shardwise.errors import PlacementError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.placement import (
    Cut,
    Intervals,
    Owned,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, as the text form of specs has it."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


@value
class TensorMeta:
    """Shape (elements), stride (elements) and dtype of a global tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """The meta of a tensor; raises `PlacementError` if it is sparse."""
        if tensor.layout is not torch.strided:
            do = "x.to_dense()"
            raise PlacementError(message("a sparse tensor cannot be a DTensor", got=str(tensor.layout), do=do))
        return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
        """The meta of a contiguous tensor of ``shape``."""
        return TensorMeta(tuple(shape), packed(shape), dtype)

    @derived
    def is_packed(self) -> bool:
        """Whether this is what `TensorMeta.contiguous` gives: contiguous, dims of one element included."""
        return self.stride == packed(self.shape)

    @derived
    def row_major(self) -> bool:
        """Whether a tensor like this is contiguous."""
        return self.is_packed or _same_strides(self.shape, self.stride, packed(self.shape))

    def lay_out(self, part: torch.Tensor) -> torch.Tensor:
        """``part`` with its dims in memory in the order of the whole's: itself if it lies so, else a dense copy.

        Operators look at strides: a part must not tell them otherwise than the whole.
        """
        if self.row_major:
            return part.contiguous()
        wanted = dense(part.shape, self.stride)
        if _same_strides(tuple(part.shape), part.stride(), wanted) or 0 in self.stride:
            return part
        return torch.empty_strided(part.shape, wanted, dtype=part.dtype, device=part.device).copy_(part)

    @derived
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``.

    >>> packed((4, 3))
    (3, 1)
    """
    strides, step = [], 1
    for size in shape[::-1]:
        strides.append(step)
        if size > 1:
            step *= size
    return tuple(strides[::-1])


def dense(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """The strides of a packed tensor of ``shape`` whose dims follow each other in memory as those of strides ``like``.

    >>> dense((4, 3), (1, 8))
    (1, 4)
    """
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _same_strides(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    alike = all(size == 1 or here == there for size, here, there in zip(shape, one, other, strict=True))
    return alike or 0 in shape


@value
class Spec:
    """Where every element of a tensor lies: a mesh, one placement for each of its axes, and the global meta.

    The placements must have been normalised (`normalize`): no negative dims, one for each axis.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    meta: TensorMeta

    @derived
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @derived
    def ndim(self) -> int:
        return len(self.meta.shape)

    @derived
    def is_replicated(self) -> bool:
        return all(placement.is_replicate() for placement in self.placements)

    @derived
    def gradient_placements(self) -> tuple[Placement, ...]:
        """How the gradient of such a tensor lies, unless it is said otherwise: pending axes are replicated."""
        return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in self.placements)

    @derived
    def likeness(self) -> tuple[object, ...]:
        """What this has in common with the specs that differ only in the sizes of dims of two elements and more."""
        meta = self.meta
        return self.mesh, self.placements, meta.dtype, tuple([size if size < 2 else 2 for size in meta.shape])

    @derived
    def _local_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def local_shape(self, coordinate: tuple[int, ...] | None) -> tuple[int, ...]:
        """The shape of the part at ``coordinate`` of the mesh; all zeros outside the mesh."""
        if coordinate is None:
            return (0,) * self.ndim
        found = self._local_shapes.get(coordinate)
        if found is None:
            found = self._local_shapes[coordinate] = self._compute_local_shape(coordinate)
        return found

    def _compute_local_shape(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(self.shape)
        for placement, parts, index in zip(self.placements, self.mesh.shape, coordinate, strict=True):
            if isinstance(placement, Cut):
                shape[placement.dim] = placement.local_size(shape[placement.dim], parts, index)
        return tuple(shape)

    def size_before(self, axis: int, coordinate: tuple[int, ...]) -> int:
        """The size of the dim that ``axis`` cuts, as the axes before it left it at ``coordinate``."""
        own = self.placements[axis]
        assert isinstance(own, Cut), own
        size = self.shape[own.dim]
        for placement, parts, index in list(zip(self.placements, self.mesh.shape, coordinate, strict=True))[:axis]:
            if isinstance(placement, Cut) and placement.dim == own.dim:
                size = placement.local_size(size, parts, index)
        return size

    def intervals(self, dim: int, coordinate: tuple[int, ...]) -> Intervals:
        """Which [start, stop) intervals of the global dim lie at ``coordinate``, in local order."""
        held: Intervals = ((0, self.shape[dim]),)
        for placement, parts, index in zip(self.placements, self.mesh.shape, coordinate, strict=True):
            if isinstance(placement, Cut) and placement.dim == dim:
                size = sum(stop - start for start, stop in held)
                held = _select(held, placement.intervals(size, parts, index))
        return held

    def take(self, whole: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        """The part of the global tensor ``whole`` that lies at ``coordinate``; pending reductions are not looked at."""
        part = whole
        for placement, parts, index in zip(self.placements, self.mesh.shape, coordinate, strict=True):
            if isinstance(placement, Cut):
                part = placement.take(part, parts, index)
        return part

    def with_placements(self, placements: Sequence[Placement]) -> Spec:
        """The same tensor lying otherwise."""
        return Spec(self.mesh, tuple(placements), self.meta)

    def __repr__(self) -> str:
        cuts: list[str] = ["" for _ in self.shape]
        pending = []
        for placement, name in zip(self.placements, self.mesh.axis_names, strict=True):
            if isinstance(placement, Cut):
                cuts[placement.dim] += f"@{name}{_suffix(placement)}"
            elif isinstance(placement, Partial):
                pending.append(f"{placement.reduce_op}@{name}")
            elif isinstance(placement, Owned):
                pending.append(f"{name}={placement.index}")
        dims = ", ".join(f"{size}{cut}" for size, cut in zip(self.shape, cuts, strict=True))
        return f"{dtype_name(self.meta.dtype)}[{dims}]" + (f"{{{', '.join(pending)}}}" if pending else "")


def _suffix(cut: Cut) -> str:
    match cut:
        case StridedShard():
            return f"/{cut.split_factor}"
        case RaggedShard():
            return f"({','.join(map(str, cut.sizes))})"
    return ""


def _select(held: Intervals, wanted: Intervals) -> Intervals:
    """The intervals of the global dim that ``wanted``, in positions within ``held``, picks out."""
    picked, position = [], 0
    for low, high in held:
        for start, stop in wanted:
            first, last = max(start, position), min(stop, position + high - low)
            if first < last:
                picked.append((low + first - position, low + last - position))
        position += high - low
    return tuple(picked)


def normalize(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """``placements`` checked against a mesh and a tensor of rank ``ndim``, negative dims counted from the end.

    Raises `PlacementError` if their number is not that of the mesh's axes, or a dim is out of range.
    """
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise PlacementError(
            message("placements are a list, one for each mesh axis", got=repr(placements), do="[Shard(0)], for example")
        )
    own = tuple(placements)
    if len(own) == mesh.ndim and _are_normal(own, ndim):
        return own
    asked = f"placements {list(placements)} on {mesh} for a tensor of {ndim} dims"
    if len(placements) != mesh.ndim:
        raise PlacementError(
            message(
                f"one placement for each mesh axis: {mesh.ndim}, not {len(placements)}",
                asked=asked,
                do=f"give {mesh.ndim} placements, one for each of the axes {', '.join(mesh.axis_names)}",
            )
        )
    pairs = zip(placements, mesh.shape, strict=True)
    return tuple(_normalize_one(placement, ndim, parts, asked) for placement, parts in pairs)


def _are_normal(placements: tuple[Placement, ...], ndim: int) -> bool:
    for placement in placements:
        if placement.__class__ is Shard:
            if not 0 <= placement.dim < ndim:
                return False
        elif placement.__class__ not in (Replicate, Partial):
            return False
    return True


def check_sizes(spec: Spec) -> None:
    """Raise `PlacementError` if the sizes of a `RaggedShard` add up to nothing that it cuts, at no coordinate.

    Where they add up at some coordinates, it cuts in their proportion at the others.
    """
    for placement, size in misfits(spec):
        raise PlacementError(
            message(
                f"the sizes of {placement!r} add up to {sum(placement.sizes)}, and there are {size} elements to cut",
                asked=f"{spec} on {spec.mesh}",
                do=f"give sizes that add up to {size}, or Shard({placement.dim})",
            )
        )


def misfits(spec: Spec) -> Iterator[tuple[RaggedShard, int]]:
    """Each `RaggedShard` whose sizes add up to nothing that it cuts, with the most elements that it is to cut."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard) and len(placement.sizes) - placement.sizes.count(0) != 1:
            cut = {spec.size_before(axis, coordinate) for coordinate in product(*map(range, spec.mesh.shape))} - {0}
            if cut and sum(placement.sizes) not in cut:
                yield placement, max(cut)


def _normalize_one(placement: Placement, ndim: int, parts: int, asked: str) -> Placement:
    if not isinstance(placement, Placement):
        raise PlacementError(
            message(f"{placement!r} is not a placement", asked=asked, do="Shard(dim), Replicate(), ...")
        )
    if isinstance(placement, Owned) and (ndim or not 0 <= placement.index < parts):
        span = f"an index from 0 to {parts - 1}, for a tensor without dims"
        raise PlacementError(message(f"{placement!r} does not fit", asked=asked, do=span))
    if not isinstance(placement, Cut):
        return placement
    if isinstance(placement, RaggedShard) and len(placement.sizes) != parts:
        raise PlacementError(message(f"{placement!r}: {parts} sizes are needed", asked=asked, do="one for each rank"))
    if not -ndim <= placement.dim < ndim:
        span = (
            f"a dim from {-ndim} to {ndim - 1}" if ndim else "a tensor without dims can only be replicated or partial"
        )
        raise PlacementError(message(f"{placement!r}: dim out of range", asked=asked, do=span))
    if isinstance(placement, Shard) or placement.dim < 0:
        return placement.at(placement.dim % ndim)
    return placement

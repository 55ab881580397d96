"""Whether what the ranks hand in as parts can be the parts of one tensor, and of which one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple
from zlib import crc32

import torch

from shardwise.comm import wire
from shardwise.errors import PlacementError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.fitting import fit
from shardwise.sharding.placement import Cut, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta, dense, normalize

DIMS = 64  # the most dims that a tensor of torch can have
DTYPES = {crc32(str(dtype).encode()): str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

GRADIENTS = 4096  # for how many layouts it is remembered that their gradients may lie so
Coordinate = tuple[int, ...]


def check_local_shape(shape: tuple[int, ...], spec: Spec, coordinate: tuple[int, ...] | None) -> None:
    """Raise `PlacementError` unless a part of ``shape`` is what the spec gives the rank at ``coordinate``."""
    if coordinate is None or shape == spec.local_shape(coordinate):
        return
    raise PlacementError(
        message(
            "the local tensor is not this rank's part of the global one",
            asked=f"from_local of {list(shape)} as {spec} on {spec.mesh}",
            got=f"at {coordinate} of the mesh the part must have the shape {list(spec.local_shape(coordinate))}",
            do="give the shape= of the global tensor, whose parts follow the rule of torch.chunk; or, for parts of "
            "other sizes, RaggedShard(dim, sizes), or run_check=True, which asks every rank for its sizes",
        )
    )


@lru_cache(maxsize=GRADIENTS)
def check_gradient(spec: Spec, back: tuple[Placement, ...]) -> None:
    """Raise `PlacementError`, on every rank alike, unless gradients that lie so have the shapes of the parts."""
    other = spec.with_placements(back)
    places = product(*map(range, spec.mesh.shape))
    if back != spec.gradient_placements and any(other.local_shape(at) != spec.local_shape(at) for at in places):
        raise PlacementError(
            message(
                "the gradient of a part has the shape of the part",
                asked=f"from_local of parts of {spec} with grad_placements={list(back)}",
                do="give grad_placements that cut the same dims",
            )
        )


class Part(NamedTuple):
    """What a rank says of its part."""

    dtype: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def agreed(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Spec:
    """The spec of the tensor whose parts the ranks of ``mesh`` hold, found by asking them all.

    Dims cut by `Shard` whose parts follow another rule than that of `torch.chunk` are cut by `RaggedShard`. Raises
    `PlacementError` where the parts cannot be those of one tensor (of ``shape``, if given), naming a rank.
    """
    if mesh.get_coordinate() is None:
        meta = TensorMeta.contiguous(tuple(shape or (0,) * local.ndim), local.dtype)
        return Spec(mesh, normalize(placements, mesh, local.ndim), meta)
    parts = _exchanged(local, mesh)  # before anything that looks at this rank's part: all ranks raise, or none
    _check_kinds(parts, mesh, placements)
    placements = normalize(placements, mesh, local.ndim)
    _check_sizes(parts, mesh, placements)
    first = parts[(0,) * mesh.ndim]
    if shape is not None and len(shape) != local.ndim:
        raise _not_parts(mesh, placements, f"parts of {local.ndim} dims, and shape={list(shape)}")
    laid, sizes = list(placements), list(first.shape)
    for dim in range(local.ndim):
        axes = [axis for axis, own in enumerate(placements) if isinstance(own, Cut) and own.dim == dim]
        if axes:
            sizes[dim], found = _along(parts, mesh, placements, axes, dim, None if shape is None else shape[dim])
            for axis, placement in zip(axes, found, strict=True):
                laid[axis] = placement
    if shape is not None and tuple(shape) != tuple(sizes):
        raise _not_parts(mesh, placements, f"the parts make up {sizes}, and shape={list(shape)}")
    steps = dense(sizes, first.stride) if stride is None else tuple(stride)
    spec = Spec(mesh, tuple(laid), TensorMeta(tuple(sizes), steps, local.dtype))
    _check_replicas(local, spec)
    return spec


def _exchanged(local: torch.Tensor, mesh: DeviceMesh) -> dict[Coordinate, Part]:
    row = [local.ndim, crc32(str(local.dtype).encode()), *local.shape, *local.stride()]
    mine = torch.tensor(row + [0] * (2 + 2 * DIMS - len(row)), dtype=torch.int64, device=local.device)
    group = mesh.axes_group(tuple(range(mesh.ndim)))
    rows = wire.wait(wire.all_gather(mine, group)).view(group.size, -1).tolist()
    found = {}
    for coordinate, (ndim, dtype, *rest) in zip(product(*map(range, mesh.shape)), rows, strict=True):
        found[coordinate] = Part(dtype, tuple(rest[:ndim]), tuple(rest[ndim : 2 * ndim]))
    return found


def _check_kinds(parts: dict[Coordinate, Part], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    first = parts[(0,) * mesh.ndim]
    for rank, part in zip(mesh.ranks, parts.values(), strict=True):
        if part.dtype != first.dtype:
            got = f"rank {rank} has the dtype {_dtype(part)}, and rank {mesh.ranks[0]} {_dtype(first)}"
            raise _not_parts(mesh, placements, got)
        if len(part.shape) != len(first.shape):
            got = f"rank {rank} has the shape {list(part.shape)}, and rank {mesh.ranks[0]} {list(first.shape)}"
            raise _not_parts(mesh, placements, f"{got}, of another number of dims")


def _dtype(part: Part) -> str:
    return DTYPES.get(part.dtype, "of another kind")


def _check_sizes(parts: dict[Coordinate, Part], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """The sizes of dims are the same over axes that do not cut them."""
    for rank, (coordinate, part) in zip(mesh.ranks, parts.items(), strict=True):
        for dim, size in enumerate(part.shape):
            like = tuple(
                index if isinstance(own, Cut) and own.dim == dim else 0
                for own, index in zip(placements, coordinate, strict=True)
            )
            if size != parts[like].shape[dim]:
                other = list(parts).index(like)
                got = f"dim {dim} has the size {size} on rank {rank}, and {parts[like].shape[dim]} on rank"
                raise _not_parts(mesh, placements, f"{got} {mesh.ranks[other]}")


def _along(
    parts: dict[Coordinate, Part],
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    axes: list[int],
    dim: int,
    asked: int | None,
) -> tuple[int, tuple[Placement, ...]]:
    """The size of a dim, and how the axes that cut it do so."""
    counts = [mesh.shape[axis] for axis in axes]
    sizes, intervals, position = {}, {}, 0
    for place in product(*map(range, counts)):
        at = dict(zip(axes, place, strict=True))
        sizes[place] = parts[tuple(at.get(axis, 0) for axis in range(mesh.ndim))].shape[dim]
        intervals[place] = (((position, position + sizes[place]),),) if sizes[place] else None
        position += sizes[place]
    size = position if asked is None else asked
    given = tuple(placements[axis] for axis in axes)
    line = Spec(mesh, tuple(_moved(own, dim) for own in placements), TensorMeta.contiguous((size,), torch.uint8))
    follows = all(line.local_shape(coordinate) == (part.shape[dim],) for coordinate, part in parts.items())
    if follows or position != size:
        if not follows:
            raise _not_parts(mesh, placements, f"the parts of dim {dim} are {list(sizes.values())}, of {size} in all")
        return size, given
    found = fit((size,), counts, intervals, exact=True) if all(isinstance(own, Shard) for own in given) else None
    if found is None:
        raise _not_parts(mesh, placements, f"the parts of dim {dim} are {list(sizes.values())}")
    return size, tuple(own.at(dim) for own in found if isinstance(own, Cut))


def _moved(own: Placement, dim: int) -> Placement:
    return own.at(0) if isinstance(own, Cut) and own.dim == dim else Replicate()


def _not_parts(mesh: DeviceMesh, placements: tuple[Placement, ...], got: str) -> PlacementError:
    what = "the ranks do not hold the parts of one tensor"
    do = "give each rank its part of one tensor: of one dtype and as many dims, of other sizes only where it is cut"
    return PlacementError(message(what, asked=f"from_local as {list(placements)} on {mesh}", got=got, do=do))


def _check_replicas(local: torch.Tensor, spec: Spec) -> None:
    """Raise on every rank of the mesh, of the first axis and rank, unless contents agree over replicated axes."""
    mesh = spec.mesh
    replicated = [axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Replicate)]
    if not replicated:
        return
    seen = torch.tensor([[_differing(local, mesh, axis) for axis in replicated]], device=local.device)
    group = mesh.axes_group(tuple(range(mesh.ndim)))
    verdicts = wire.wait(wire.all_gather(seen, group)).transpose(0, 1).tolist()
    for axis, found in zip(replicated, verdicts, strict=True):
        for rank, other in found:
            if rank >= 0:
                name = mesh.axis_names[axis]
                raise PlacementError(
                    message(
                        f"the tensor is not the same on the ranks of axis {name}, where it is to be replicated",
                        got=f"rank {rank} differs from rank {other}",
                        do="broadcast it first, or use distribute_tensor",
                    )
                )


def _differing(local: torch.Tensor, mesh: DeviceMesh, axis: int) -> tuple[int, int]:
    group = mesh.axis_group(axis)
    parts = wire.wait(wire.all_gather(local.detach().contiguous().reshape(1, *local.shape), group))
    for rank, part in zip(group.ranks, parts, strict=True):
        if rank != group.ranks[0] and not _equal(part, parts[0]):
            return rank, group.ranks[0]
    return -1, -1


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, those that are no numbers to each other."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.is_floating_point() and one.itemsize == 1:
        one, other = one.float(), other.float()
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())

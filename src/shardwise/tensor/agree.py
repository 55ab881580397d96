"""Whether what the ranks hand in as parts can be the parts of one tensor, and of which one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple
from zlib import crc32

import torch

from shardwise.comm import wire
from shardwise.errors import PlacementError, RedistributeError, message
from shardwise.mesh.device import SILENT_TYPES
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.sharding.fitting import fit
from shardwise.sharding.placement import Cut, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta, dense, normalize

SHOWN = 240  # how many bytes of what differs are shown
PLAIN = "a plain tensor"

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


def check_gradient(spec: Spec, back: tuple[Placement, ...]) -> None:
    """Raise `PlacementError`, on every rank alike, unless gradients that lie so have the shapes of the parts."""
    cuts, others = ([own if isinstance(own, Cut) else None for own in side] for side in (spec.placements, back))
    if cuts == others:
        return
    other, places = spec.with_placements(back), product(*map(range, spec.mesh.shape))
    if any(other.local_shape(at) != spec.local_shape(at) for at in places):
        raise PlacementError(
            message(
                "the gradient of a part has the shape of the part",
                asked=f"from_local of parts of {spec} with grad_placements={list(back)}",
                do="give grad_placements that cut the same dims",
            )
        )


class Fact(NamedTuple):
    """Something of which every rank is to say the same; ``shown`` tells more of it."""

    name: str
    value: object
    shown: object = None


def facts_of(tensor: object) -> list[Fact]:
    """What is to be the same of a tensor on every rank, whatever its sizes."""
    given = tensor if isinstance(tensor, torch.Tensor) else torch.empty(0)
    strided = given.layout is torch.strided and not given.is_nested
    kind = PLAIN if strided else f"a tensor of {given.layout}"
    if given is not tensor:
        kind = f"a {type(tensor).__name__}"
    elif hasattr(given, "_spec"):
        kind = "a distributed tensor"
    return [
        Fact("what it is", kind),
        Fact("the device", given.device.type),
        Fact("the dtype", str(given.dtype)),
        Fact("whether it requires a gradient", torch.is_grad_enabled() and given.requires_grad),
        Fact("the shape", given.dim(), list(given.shape) if strided else f"{given.dim()} dims"),
    ]


def check_alike(facts: Sequence[Fact], mesh: DeviceMesh, what: str) -> None:
    """Raise `PlacementError` on every rank of the mesh, naming one, unless all say the same of ``facts``."""
    if not current_world().has_others or mesh.device_type in SILENT_TYPES or mesh.size() == 1:
        return
    said = _gathered([crc32(repr(fact.value).encode()) for fact in facts], torch.int64, mesh)
    for at, fact in enumerate(facts):
        odd = next((index for index, row in enumerate(said) if row[at] != said[0][at]), None)
        if odd is not None:
            text = str(fact.value if fact.shown is None else fact.shown).encode()[:SHOWN].ljust(SHOWN)
            shown = [bytes(row).decode().rstrip() for row in _gathered([*text], torch.uint8, mesh)]
            raise PlacementError(
                message(
                    f"the ranks do not agree on {fact.name}",
                    asked=f"{what} on {mesh}",
                    got=f"rank {mesh.ranks[odd]} has {shown[odd]}, and rank {mesh.ranks[0]} has {shown[0]}",
                    do="let every rank of the mesh give the same",
                )
            )


def _gathered(numbers: list[int], dtype: torch.dtype, mesh: DeviceMesh) -> list[list[int]]:
    """The numbers of each rank of the mesh."""
    group = mesh.axes_group(tuple(range(mesh.ndim)))
    mine = torch.tensor(numbers, dtype=dtype, device=mesh.device_type)
    found: list[list[int]] = wire.wait(wire.all_gather(mine, group)).view(group.size, -1).tolist()
    return found


class Part(NamedTuple):
    """What a rank says of its part."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def agreed(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    back: Sequence[Placement] | None = None,
) -> Spec:
    """The spec of the tensor whose parts the ranks of ``mesh`` hold, found by asking them all.

    Dims cut by `Shard` whose parts follow another rule than that of `torch.chunk` are cut by `RaggedShard`. Raises
    `PlacementError` where the parts cannot be those of one tensor (of ``shape``, if given), naming a rank.
    """
    asked = [
        Fact("the placements", placements),
        Fact("shape=", shape and [*shape]),
        Fact("stride=", stride and [*stride]),
    ]
    if mesh.get_coordinate() is not None:
        check_alike([*facts_of(local), *asked, Fact("grad_placements=", back and [*back])], mesh, "from_local")
    check_plain(local)
    if mesh.get_coordinate() is None:
        meta = TensorMeta.contiguous(tuple(shape or (0,) * local.ndim), local.dtype)
        return Spec(mesh, normalize(placements, mesh, local.ndim), meta)
    parts = _exchanged(local, mesh)  # before anything that looks at this rank's part: all ranks raise, or none
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


def check_plain(local: object) -> None:
    """Raise `RedistributeError` unless this is a tensor like those that torch makes."""
    kind = facts_of(local)[0].value
    if kind != PLAIN:
        do = "use .redistribute(...), to_dense(), or torch.as_tensor(...) first"
        raise RedistributeError(message("from_local takes a plain tensor", got=kind, do=do))


def _exchanged(local: torch.Tensor, mesh: DeviceMesh) -> dict[Coordinate, Part]:
    ndim = local.ndim
    rows = _gathered([ndim, *local.shape, *local.stride()], torch.int64, mesh)
    return {
        coordinate: Part(tuple(row[1 : ndim + 1]), tuple(row[ndim + 1 :]))
        for coordinate, row in zip(product(*map(range, mesh.shape)), rows, strict=True)
    }


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

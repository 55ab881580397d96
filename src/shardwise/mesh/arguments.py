"""What a user passes to make a mesh, read and checked: ranks, shapes, names, device types, backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsIndex, TypeAlias, cast

import torch

from shardwise.errors import AxisError, AxisNameError, MeshError, message
from shardwise.mesh.layout import Layout, RankMap
from shardwise.mesh.process_groups import Backend, Members
from shardwise.mesh.world import Group, current_world


class Listed(Protocol):
    """An array: a tensor, or what NumPy makes."""

    def tolist(self) -> object: ...


Ranks: TypeAlias = Sequence[int] | Sequence["Ranks"] | Listed
Override: TypeAlias = Mapping[int, object] | Mapping[str, object] | Mapping[int | str, object]
Backends: TypeAlias = tuple[Backend | None, ...]


def grid(shape: tuple[int, ...]) -> Layout:
    return Layout.join([axis.coalesce() for axis in Layout.row_major(shape).axes])


def read_ranks(mesh: object) -> tuple[Layout, RankMap]:
    listed = mesh.tolist() if hasattr(mesh, "tolist") else mesh
    shape, ranks = _unnest(listed, mesh)
    if not shape or not ranks:
        raise MeshError(message("a mesh needs at least one axis and one rank", got=repr(mesh)))
    wrong = [rank for rank in ranks if type(rank) is not int or rank < 0]
    if wrong:
        raise MeshError(message("ranks must be integers from 0 on", got=f"{wrong[0]!r} in {mesh!r}"))
    if len(set(ranks)) < len(ranks):
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        raise MeshError(
            message("a rank stands in the mesh more than once", asked=repr(mesh), got=f"duplicate ranks {twice}")
        )
    check_fits(max(ranks), f"a mesh with rank {max(ranks)}")
    return grid(shape), RankMap.read(ranks, shape)


def _unnest(listed: object, mesh: object) -> tuple[tuple[int, ...], list[int]]:
    if not isinstance(listed, (list, tuple, range)):
        return (), [cast(int, listed)]
    rows = [_unnest(row, mesh) for row in listed]
    if len({shape for shape, _ in rows}) > 1:
        raise MeshError(message("the rows of the mesh have different lengths", got=mesh))
    inner = rows[0][0] if rows else ()
    return (len(rows), *inner), [rank for _, ranks in rows for rank in ranks]


def read_shape(sizes: object) -> tuple[int, ...]:
    given = sizes if isinstance(sizes, (list, tuple)) else ()
    shape = tuple(int(size) if isinstance(size, SupportsIndex) and type(size) is not bool else 0 for size in given)
    if not shape or min(shape) < 1:
        raise MeshError(message("the shape must be a tuple of one or more positive integers", got=repr(sizes)))
    return shape


def check_fits(largest: int, asked: str) -> None:
    world = current_world()
    if largest >= world.size:
        raise MeshError(
            message(
                "the mesh does not fit in the world",
                asked=asked,
                got=f"a world of {world.size} ranks, 0 to {world.size - 1}",
                do=f"start {largest + 1} or more processes (torchrun), or simulate them with shardwise.sim.run",
            )
        )


def check_device_type(device_type: object) -> None:
    try:
        fits = isinstance(device_type, str) and torch.device(device_type).index is None
    except RuntimeError:
        fits = False
    if not fits:
        raise MeshError(
            message(
                "the device type must be one of torch's, without an index",
                got=repr(device_type),
                do="'cpu' or 'cuda'; which device a rank uses follows from torch's current device",
            )
        )


def read_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if names is None:
        return None
    read = (names,) if isinstance(names, str) else tuple(names)
    asked = f"mesh_dim_names={read} for shape {shape}"
    if len(read) != len(shape):
        raise AxisNameError(
            message(f"{len(read)} names for {len(shape)} axes", asked=asked, do="one name for each axis")
        )
    if not all(type(name) is str and name != "" for name in read):
        raise AxisNameError(message("axis names must be strings that are not empty", asked=asked))
    if len(set(read)) < len(read):
        twice = sorted({name for name in read if read.count(name) > 1})
        raise AxisNameError(message(f"axis names must be unique, {twice} are repeated", asked=asked))
    return read


def read_backends(override: Override, names: tuple[str, ...] | None, ndim: int) -> Backends | None:
    axes: dict[object, int] = {**{axis: axis for axis in range(ndim)}, **{n: i for i, n in enumerate(names or ())}}
    unknown = [key for key in override if key not in axes]
    if unknown:
        raise AxisError(message("backend_override names axes that are not there", asked=override, got=unknown))
    if len({axes[key] for key in override}) < len(override):
        raise AxisError(message("backend_override gives one axis twice, by name and by index", asked=override))
    found = {axes[key]: read_backend(backend) for key, backend in override.items()}
    return tuple(found.get(axis) for axis in range(ndim)) if found else None


def read_backend(backend: object) -> Backend | None:
    if backend is None or isinstance(backend, str):
        return None if backend is None else (backend, None)
    if isinstance(backend, tuple):
        name, options = backend
        return name, options
    return None, backend


def check_groups(groups: Sequence[Group], ranks: Sequence[Members], mesh: str) -> None:
    """Raise unless the groups have these ranks."""
    for axis, wanted in enumerate(ranks):
        if len(groups) != len(ranks) or groups[axis].ranks != wanted:
            raise MeshError(
                message(
                    "the groups are not those of the mesh",
                    asked=f"from_group([{', '.join(map(repr, groups))}]) on {mesh}",
                    got=f"{len(groups)} groups for {len(ranks)} axes; along axis {axis} lie ranks {list(wanted)}",
                )
            )

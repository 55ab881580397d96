"""Device meshes: named axes over a layout of ranks.

A mesh knows no rank and holds no process group: it is a value, the same on every rank. *Positions* of a root mesh count
its ranks in row-major order; every mesh cut from it (a slice, a flattened or unflattened mesh, a concatenation) is a
`Layout` of those positions, one part of which holds the rank that asks. What depends on the asking rank (its
coordinate, its groups, the names that it has given to flattened axes) is found through `current_world()`, and kept in
its memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from shardwise._value import derived, value
from shardwise.errors import AxisError, AxisNameError, MeshError, NotInMeshError, message
from shardwise.mesh.agreement import Claim, digest, is_wanted, seconds
from shardwise.mesh.arguments import (
    Backends,
    Override,
    Ranks,
    check_device_type,
    check_fits,
    check_groups,
    grid,
    read_backend,
    read_backends,
    read_names,
    read_ranks,
    read_shape,
)
from shardwise.mesh.axes import Axes
from shardwise.mesh.device import SILENT_TYPES, settle_device
from shardwise.mesh.layout import Layout, RankMap
from shardwise.mesh.process_groups import SILENT, Members
from shardwise.mesh.seat import Part, Seat, release, seats
from shardwise.mesh.slicing import check_free, check_slice, split
from shardwise.mesh.world import Group, World, current_world


class _Cut(NamedTuple):
    layout: Layout
    rank_map: RankMap
    backends: Backends | None
    root: DeviceMesh | None
    fresh: bool = (
        False  # made by a program, so that the ranks must agree on it; not cut from another mesh, or unpickled
    )


@value
class DeviceMesh(Axes):
    """Ranks laid out along axes, which may have names. Equal meshes are one object, also after pickling.

    Args:
        device_type: a device type without an index, like ``"cpu"`` or ``"cuda"``.
        mesh: the ranks, as nested lists, a tensor or an array with one dim for each axis; in any order, each once.
        mesh_dim_names: a name for each axis.
        backend_override: for an axis (its index or name) the backend of its groups: a backend's name, torch's options
            for it, or a pair of both.
        eager: make this rank's groups along all axes now, not each at its first use.
        check: let the ranks agree that they make the same mesh. The first time that a rank makes a mesh, it waits for
            the others; ``SHARDWISE_MESH_CHECK=0`` in the environment turns this off for all meshes.
        timeout: seconds to wait for the others; by default ``SHARDWISE_MESH_TIMEOUT`` in the environment, or 60.

    Raises:
        MeshError: the ranks are not distinct integers of the current world, or the device type has an index.
        AxisNameError: the names do not match the axes.
        MeshMismatchError: another rank makes another mesh.
        CollectiveTimeoutError: a rank does not come to make the mesh.

    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(rank=5, size=8)):
    ...     mesh = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp"))
    ...     print(mesh, mesh.get_coordinate(), mesh["tp"].ranks)
    DeviceMesh('cpu', dp=2, tp=4) (1, 1) (4, 5, 6, 7)
    """

    device_type: str
    layout: Layout
    mesh_dim_names: tuple[str, ...] | None
    rank_map: RankMap
    backends: Backends | None
    root: DeviceMesh | None

    def __init__(
        self,
        device_type: str,
        mesh: Ranks,
        *fields: object,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Override | None = None,
        eager: bool = False,
        check: bool = True,
        timeout: float | None = None,
    ) -> None:
        check_device_type(device_type)
        if fields:  # those of a mesh that there is, as values are made again; torch.compile does so
            names, *rest = cast("tuple[Any, ...]", fields)
            mesh_dim_names, mesh = names, cast(Ranks, _Cut(cast(Layout, mesh), *rest))
        cut = mesh if isinstance(mesh, _Cut) else _Cut(*read_ranks(mesh), None, None, fresh=True)
        layout, rank_map, backends, root, fresh = cut
        names = read_names(mesh_dim_names, layout.shape)
        if backend_override:
            backends = read_backends(backend_override, names, len(layout.axes))
        contents = (device_type, layout, names, rank_map, backends, root)
        for name, content in zip(self.__match_args__, contents, strict=True):
            object.__setattr__(self, name, content)
        self.shape, self.ndim, self._axes, self.axis_names  # noqa: B018  torch.compile can read what is derived, not derive it
        if fresh:
            self._settle(eager, check, timeout)

    def _key(self) -> tuple[object, ...]:
        # the pool must not keep the root alive, whose cuts hold this mesh; an id is good for as long as this mesh lives
        return self.device_type, self.layout, self.mesh_dim_names, self.rank_map, self.backends, id(self.root)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks, of one axis if one is given."""
        if mesh_dim is None:
            return math.prod(self.shape)
        mesh, axis = self._locate(mesh_dim, "size")
        return mesh.shape[axis]

    def get_rank(self) -> int:
        """This rank's number in the world."""
        return current_world().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's index along each axis; None if it is not in the mesh."""
        return self._seat().coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index along one axis, which a mesh of one axis need not be told.

        Raises:
            NotInMeshError: this rank is not in the mesh.
            AxisError: there is no such axis, or none is given and the mesh has several.
        """
        mesh, axis = self._locate(mesh_dim, "get_local_rank")
        coordinate = mesh._seat().coordinate
        if coordinate is None:
            raise mesh._not_in_mesh("get_local_rank")
        return coordinate[axis]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, row-major; of a mesh cut from another, the part that holds this rank.

        Raises:
            NotInMeshError: this rank is in no part of the mesh.
        """
        seat = self._seat()
        if seat.ranks is None:
            seat.ranks = self.rank_map.ranks(self._positions(seat, tuple(range(self.ndim))))
        return seat.ranks

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an int32 tensor of the mesh's shape, made anew at each call."""
        return torch.tensor(self.ranks, dtype=torch.int32).view(self.shape)

    def axis_group(self, axis: int) -> Group:
        """The group of this rank and those that differ from it only along one axis."""
        seat = self._seat()
        found = seat.groups.get(axis)
        return self._join(seat, axis, (axis,)) if found is None else found

    def axes_group(self, axes: tuple[int, ...]) -> Group:
        """The group of this rank and those that differ from it only along these axes, row-major in the order given."""
        if len(axes) == 1:
            return self.axis_group(axes[0])
        seat = self._seat()
        found = seat.groups.get(axes)
        return self._join(seat, axes, axes) if found is None else found

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """The process group of this rank along one axis, made at its first use.

        Raises:
            NotInMeshError: this rank is not in the mesh.
            AxisError: there is no such axis, or none is given and the mesh has several.
        """
        mesh, axis = self._locate(mesh_dim, "get_group")
        return mesh.axis_group(axis).process_group

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """The process group of this rank along each axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh of some axes, by name, in the order of this mesh; names given by `flatten` may stand among them.

        Raises:
            AxisError: there is no such axis, or the order is another.

        >>> from shardwise.mesh.world import dry_world, use_world
        >>> with use_world(dry_world(rank=5, size=8)):
        ...     mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        ...     print(mesh["pp", "tp"], mesh["pp", "tp"].mesh.tolist())
        DeviceMesh('cpu', pp=2, tp=2) [[0, 1], [4, 5]]
        """
        if is_dynamo_compiling():
            _slice_ahead(current_world(), self, mesh_dim_names)
            return cast(DeviceMesh, getattr(self, f"traced {mesh_dim_names}"))
        try:
            found = self._cuts[mesh_dim_names]
        except (KeyError, TypeError):  # not asked before, or a list
            found = None
        return self._slice(mesh_dim_names) if found is None else found

    def flatten(self, mesh_dim_name: str | None = None, backend_override: object = None) -> DeviceMesh:
        """All axes as one. The root mesh then knows it by its name, by default the names joined with ``_``.

        Raises:
            AxisNameError: the name is that of an axis, or of other axes flattened.

        >>> from shardwise.mesh.world import dry_world, use_world
        >>> with use_world(dry_world(rank=5, size=8)):
        ...     mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        ...     print(mesh["pp", "tp"].flatten().ranks, mesh["pp_tp"])
        (0, 1, 4, 5) DeviceMesh('cpu', pp_tp=4)
        """
        name = mesh_dim_name or ("_".join(self.mesh_dim_names) if self.mesh_dim_names else None)
        if self.ndim == 1 and backend_override is None and self.mesh_dim_names == (name and (name,)):
            return self
        part = Part(self._line, read_backend(backend_override))
        if name is not None:
            self._enter_flattened(name, part)
        return self._cut_flattened(name, part)

    def unflatten(
        self,
        mesh_dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Override | None = None,
    ) -> DeviceMesh:
        """The mesh with one axis split in several, the last of them fastest.

        Raises:
            MeshError: the product of the sizes is not the size of the axis.

        >>> from shardwise.mesh.world import dry_world, use_world
        >>> with use_world(dry_world(rank=5, size=8)):
        ...     print(init_device_mesh("cpu", (8,)).unflatten(0, (2, 4)))
        DeviceMesh('cpu', 2, 4)
        """
        axis, sizes = self.axis(mesh_dim), read_shape(mesh_sizes)
        names, old = read_names(mesh_dim_names, sizes), self.mesh_dim_names
        if (names is None) != (old is None):
            raise AxisNameError(message("name all axes or none", asked=f"{self}.unflatten({mesh_dim!r}, {sizes})"))
        backends = read_backends(backend_override or {}, names, len(sizes)) or (None,) * len(sizes)
        layouts = split(self.axis_names[axis], self.layout.axes[axis], sizes, repr(self))
        pieces = map(Part, layouts, backends)
        joined = None if old is None or names is None else (*old[:axis], *names, *old[axis + 1 :])
        return self._cut([*self._parts[:axis], *pieces, *self._parts[axis + 1 :]], joined)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh with the axes of several meshes that were cut from one.

        Raises:
            MeshError: the meshes have different roots, or share an axis.

        >>> from shardwise.mesh.world import dry_world, use_world
        >>> with use_world(dry_world(rank=5, size=8)):
        ...     mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        ...     print(DeviceMesh.concatenate([mesh["tp"], mesh["pp"]]).mesh.tolist())
        [[0, 4], [1, 5]]
        """
        asked = f"concatenate([{', '.join(map(repr, meshes))}])"
        if not meshes or any(mesh._get_root_mesh() is not meshes[0]._get_root_mesh() for mesh in meshes):
            raise MeshError(message("only meshes cut from one mesh can be concatenated", asked=asked))
        for place, mesh in enumerate(meshes):
            if any(mesh.layout.overlaps(before.layout) for before in meshes[:place]):
                raise MeshError(message("meshes that overlap cannot be concatenated", asked=asked))
        if len({mesh.mesh_dim_names is None for mesh in meshes}) > 1:
            raise AxisNameError(message("some of the meshes have axis names, some have none", asked=asked))
        names = None if meshes[0].mesh_dim_names is None else tuple(n for mesh in meshes for n in mesh.axis_names)
        return meshes[0]._cut([part for mesh in meshes for part in mesh._parts], names)

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: Ranks | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        check: bool = True,
        timeout: float | None = None,
    ) -> DeviceMesh:
        """The mesh that stands on process groups which exist: one, or for each axis one and the ranks in ``mesh``.

        Raises:
            MeshError: the groups are not those of this rank along the axes of ``mesh``.
        """
        groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        adopted = [current_world().adopt(one) for one in groups]
        if mesh is None:
            if len(groups) != 1:
                raise MeshError(message("several groups need the ranks of the mesh", got=adopted, do="pass mesh="))
            mesh = adopted[0].ranks
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, check=check, timeout=timeout)
        made._take_groups(adopted)
        return made

    def destroy(self) -> None:
        """Do away with the process groups that this rank has made for the mesh and what was cut from it.

        Every rank of a group must do so alike. The mesh can be used as before: its groups, and those of other meshes
        that had the same, are made anew at their next use. The default group, and groups that came from `from_group`,
        stay.

        >>> from shardwise.mesh.world import dry_world, use_world
        >>> with use_world(dry_world(rank=5, size=8)):
        ...     mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), eager=True)
        ...     before = mesh.get_group("tp")
        ...     mesh.destroy()
        ...     print(mesh.get_group("tp") is before)
        False
        """
        world = current_world()
        known = [seat for mesh, seat in list(seats(world).items()) if self in (mesh, getattr(mesh, "root", None))]
        release(world, [group for seat in known for group in seat.groups.values()])

    def __enter__(self) -> DeviceMesh:
        memory, key = current_world().memory, (DeviceMesh, threading.get_ident())
        memory[key] = (*memory.get(key, ()), self)
        return self

    def __exit__(self, *exception: object) -> None:
        memory, key = current_world().memory, (DeviceMesh, threading.get_ident())
        memory[key] = memory[key][:-1]
        if not memory[key]:
            del memory[key]

    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate

    def _get_root_mesh(self) -> DeviceMesh:
        return self if self.root is None else self.root

    def _get_root_mesh_dim(self) -> int | None:
        if self.ndim > 1:
            raise AxisError(
                message("only a mesh of one axis is one of its root's", asked=f"{self}._get_root_mesh_dim()")
            )
        return self._get_root_mesh()._named.get(self.axis_names[0])

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        names = None if self.mesh_dim_names is None else (mesh_dim_name,)
        rows = self._family((self.axis(mesh_dim_name),))
        return [DeviceMesh(self.device_type, row, mesh_dim_names=names, check=False) for row in rows]

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self.get_coordinate() is not None

    def _settle(self, eager: bool, check: bool, timeout: float | None) -> None:
        world = current_world()
        settle_device(self.device_type, world)
        silent = self.device_type in SILENT_TYPES
        if check and world.has_others and not silent and self.size() > 1 and is_wanted():
            self._agree(world, seconds() if timeout is None else timeout)
        if (eager or (world.together and not silent)) and self.get_coordinate() is not None:
            self.get_all_groups()

    def _agree(self, world: World, timeout: float) -> None:
        backends = [backend and backend[0] for backend in self.backends or ()]
        key = digest(self.device_type, self.layout, self.mesh_dim_names, self.rank_map, backends)
        if not world.has_agreed(key):
            ranks = sorted(self.rank_map.ranks(range(self.layout.size)))
            world.agree(Claim(tuple(ranks), key, f"{self}, backends {backends}" if backends else repr(self)), timeout)

    def _seat(self) -> Seat:
        world = current_world()
        return _seat_of_traced(world, self) if is_dynamo_compiling() else self._seat_in(world)

    def _seat_in(self, world: World) -> Seat:
        found = seats(world).get(self)
        return seats(world).setdefault(self, self._take_seat(world)) if found is None else found

    def _take_seat(self, world: World) -> Seat:
        return Seat(self.rank_map.position(world.rank), self.layout.axes)

    def _positions(self, seat: Seat, axes: tuple[int, ...]) -> tuple[int, ...]:
        if seat.position is None or seat.coordinate is None:
            raise self._not_in_mesh("its ranks or groups")
        parts = [self.layout.axes[axis] for axis in axes]
        origin = seat.position - sum(part(seat.coordinate[axis]) for part, axis in zip(parts, axes, strict=True))
        return tuple(origin + step for step in Layout.join(parts).values())

    def _join(self, seat: Seat, key: int | tuple[int, ...], axes: tuple[int, ...]) -> Group:
        ranks = self.rank_map.ranks(self._positions(seat, axes))
        backend = self.backends[axes[0]] if self.backends is not None and len(axes) == 1 else None
        if self.device_type in SILENT_TYPES:
            backend = SILENT
        group = seat.groups[key] = current_world().group(ranks, backend, lambda: self._family(axes))
        return group

    def _family(self, axes: tuple[int, ...]) -> list[Members]:
        """The ranks of all groups along these axes; those of the asking rank are among them."""
        line = Layout.join([self.layout.axes[axis] for axis in axes])
        origins = line.coalesce().complement(self._get_root_mesh().layout.size).values()
        return [self.rank_map.ranks(origin + step for step in line.values()) for origin in origins]

    def _take_groups(self, groups: Sequence[Group]) -> None:
        seat = self._seat()
        lines = [self.rank_map.ranks(self._positions(seat, (axis,))) for axis in range(self.ndim)]
        check_groups(groups, lines, repr(self))
        seat.groups.update(enumerate(groups))

    @derived
    def _cuts(self) -> dict[object, DeviceMesh]:
        return {}

    @derived
    def _line(self) -> Layout:
        return self.layout.coalesce()

    @derived
    def _outside(self) -> Layout:
        return self.layout.complement(self._get_root_mesh().layout.size)

    @derived
    def _parts(self) -> tuple[Part, ...]:
        return tuple(map(Part, self.layout.axes, self.backends or (None,) * self.ndim))

    def _cut(self, parts: Sequence[Part], names: tuple[str, ...] | None) -> DeviceMesh:
        root = self._get_root_mesh()
        layout = Layout.join([part.layout for part in parts])
        backends = tuple(part.backend for part in parts)
        cut = _Cut(layout, root.rank_map, backends if any(backends) else None, root)
        if (cut.layout, cut.backends, names) == (root.layout, root.backends, root.mesh_dim_names):
            return root
        return DeviceMesh(self.device_type, cast(Ranks, cut), mesh_dim_names=names)

    def _cut_flattened(self, name: str | None, part: Part) -> DeviceMesh:
        found = self._cuts.get((name, part))
        if found is None:
            found = self._cuts[name, part] = self._cut([part], None if name is None else (name,))
        return found

    def _slice(self, asked: str | Sequence[str]) -> DeviceMesh:
        names = tuple(asked) if isinstance(asked, (list, tuple)) else (asked,)
        parts = [self._part(name) for name in names]
        if len(names) == 1 and names[0] not in self._named:
            return self._cut_flattened(names[0], parts[0])
        check_slice(repr(self), self._named, self.layout, names, parts)
        made = self._cut(parts, names)
        if all(name in self._named for name in names):
            self._cuts[names if isinstance(asked, list) else asked] = made
        return made

    def _part(self, name: str) -> Part:
        if name in self._named:
            return self._parts[self._named[name]]
        part = self._get_root_mesh()._seat().flattened.get(name)
        if part is None or ((name, part) not in self._cuts and part.layout.overlaps(self._outside)):
            raise self._no_axis(name)
        return part

    def _enter_flattened(self, name: str, part: Part) -> None:
        root = self._get_root_mesh()
        flattened = root._seat().flattened
        if flattened.get(name) != part:
            known = [root._named, self._named]
            meaning = f"an axis of {root}" if any(name in axes for axes in known) else None
            meaning = f"other ranks of {root} flattened" if name in flattened else meaning
            check_free(name, meaning, f"{self}.flatten({name!r})")
            read_names((name,), (1,))
            flattened[name] = part

    def _locate(self, mesh_dim: int | str | None, asking: str) -> tuple[DeviceMesh, int]:
        if mesh_dim is None:
            if self.ndim == 1:
                return self, 0
            raise AxisError(
                message(
                    f"a mesh of {self.ndim} axes needs to be told which one",
                    asked=f"{self}.{asking}()",
                    do=f"pass mesh_dim: one of {self.axis_names}, or its index",
                )
            )
        axis = self._axes.get(mesh_dim)
        if axis is not None:
            return self, axis
        if isinstance(mesh_dim, str):
            return self[mesh_dim], 0
        raise self._no_axis(mesh_dim)

    def __repr__(self) -> str:
        named = self.mesh_dim_names is not None
        sizes = [f"{n}={s}" if named else str(s) for n, s in zip(self.axis_names, self.shape, strict=True)]
        ranks = [] if self.root is not None or self.rank_map.counts else [f"ranks={self.rank_map}"]
        return f"DeviceMesh({', '.join([repr(self.device_type), *sizes, *ranks])})"

    def _no_axis(self, name: object) -> AxisError:
        flattened = self._get_root_mesh()._seat().flattened
        inside = [name for name, part in flattened.items() if not part.layout.overlaps(self._outside)]
        known = list(dict.fromkeys([*(self.mesh_dim_names or ()), *inside]))
        there = f"axes {self.axis_names}" if self.mesh_dim_names else f"{self.ndim} axes without names"
        return AxisError(
            message(
                f"the mesh has no axis {name!r}",
                asked=f"{name!r} of {self}",
                got=there,
                do=f"one of {known}" if known else "give the mesh names: mesh_dim_names=(...)",
            )
        )

    def _not_in_mesh(self, asked: str) -> NotInMeshError:
        return NotInMeshError(
            message(
                f"rank {current_world().rank} is not in the mesh",
                asked=f"{asked} of {self}",
                got=f"the mesh has ranks {self.rank_map}",
                do="ask only where mesh.get_coordinate() is not None",
            )
        )

    def __fx_create_arg__(self, tracer: torch.fx.Tracer) -> torch.fx.Node:
        def mesh() -> DeviceMesh:
            return self

        return tracer.create_node("call_function", mesh, (), {})

    def __reduce__(self) -> tuple[object, ...]:
        cut = _Cut(self.layout, self.rank_map, self.backends, self.root)
        return _restore, (self.device_type, cut, self.mesh_dim_names)


def _restore(device_type: str, cut: _Cut, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device_type, cast(Ranks, cut), mesh_dim_names=names)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Override | None = None,
    eager: bool = False,
    check: bool = True,
    timeout: float | None = None,
) -> DeviceMesh:
    """The mesh of the first ranks of the world, row-major over ``mesh_shape``; see `DeviceMesh` for the options.

    Raises:
        MeshError: the shape is not made of positive integers, or has more places than the world has ranks.
        AxisNameError: the names do not match the shape.
        MeshMismatchError: another rank makes another mesh.
        CollectiveTimeoutError: a rank does not come to make the mesh.

    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(rank=0, size=65536)):
    ...     mesh = init_device_mesh("cuda", (1024, 8, 8), mesh_dim_names=("dp", "cp", "tp"))
    ...     print(mesh, mesh["tp"])
    DeviceMesh('cuda', dp=1024, cp=8, tp=8) DeviceMesh('cuda', tp=8)
    """
    shape = read_shape(mesh_shape)
    check_fits(math.prod(shape) - 1, f"a mesh of shape {shape}, which needs {math.prod(shape)} ranks")
    ranks = RankMap(Layout.row_major(math.prod(shape)).coalesce(), 0, None)
    return DeviceMesh(
        device_type,
        cast(Ranks, _Cut(grid(shape), ranks, None, None, fresh=True)),
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        eager=eager,
        check=check,
        timeout=timeout,
    )


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:`` of this thread, None outside of any."""
    stack: tuple[DeviceMesh, ...] | None = current_world().memory.get((DeviceMesh, threading.get_ident()))
    return stack[-1] if stack else None


# torch.compile runs these instead of tracing them; what it compiles is good for this world only.


def _seat_of_traced(world: World, mesh: DeviceMesh) -> Seat:
    return mesh._seat_in(world)


def _slice_ahead(world: World, mesh: DeviceMesh, asked: str | tuple[str, ...]) -> None:
    mesh.__dict__[f"traced {asked}"] = mesh[asked]


_seat_of_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_slice_ahead._dynamo_marked_constant = True  # type: ignore[attr-defined]

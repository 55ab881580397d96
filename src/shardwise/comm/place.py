"""Where a collective happens: all the ways to name a group.

None is the world; else a process group or its name, a `Group`, a list of ranks, a list of such lists (the one with this
rank counts), a 1-D `DeviceMesh`, or ``(mesh, axis)`` with the axis by index or name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from shardwise.errors import CollectiveError, NotInMeshError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import Group, World, current_world

GroupLike: TypeAlias = (
    Group
    | dist.ProcessGroup
    | DeviceMesh
    | tuple[DeviceMesh, int | str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | str
    | None
)


class Place(NamedTuple):
    """Where a collective happens: its group, and the name of the mesh axis or ""."""

    group: Group
    axis: str


def place_of(group: GroupLike) -> Place:
    if isinstance(group, Group):
        return Place(group, "")
    if isinstance(group, DeviceMesh):
        return _axis(group, 0) if group.ndim == 1 else _ambiguous(group)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _axis(group[0], group[1])
    return Place(_of_traced(current_world(), group) if is_dynamo_compiling() else _group(group), "")


def _axis(mesh: DeviceMesh, axis: int | str) -> Place:
    index = mesh.axis(axis)
    traced = is_dynamo_compiling()
    group = _axis_of_traced(current_world(), mesh, index) if traced else mesh.axis_group(index)
    return Place(group, mesh.axis_names[index])


# torch.compile runs these instead of tracing them: the groups that a region is the first to use are made meanwhile, and
# what it compiles is good for this world only.


def _of_traced(world: World, group: GroupLike) -> Group:
    return _group(group)


def _axis_of_traced(world: World, mesh: DeviceMesh, axis: int) -> Group:
    return mesh.axis_group(axis)


_of_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
_axis_of_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _group(group: GroupLike) -> Group:
    if isinstance(group, dist.ProcessGroup):
        return current_world().adopt(group)
    if isinstance(group, str):
        named = torch._C._distributed_c10d._resolve_process_group(dist.GroupName(group))
        return current_world().adopt(named)
    if group is None:
        world = current_world()
        return world.group(range(world.size))
    return _of_sequence(group if isinstance(group, list | tuple | range) else (group,))


def _ambiguous(mesh: DeviceMesh) -> Place:
    raise CollectiveError(
        message(
            f"a mesh of {mesh.ndim} axes has no one group",
            asked=f"a collective over {mesh!r}",
            do=f"say which axis: (mesh, {mesh.axis_names[0]!r}), or flatten the mesh",
        )
    )


def _of_sequence(group: Sequence[object]) -> Group:
    if group and all(isinstance(part, list | tuple) for part in group):
        return current_world().group(_own_part(cast("Sequence[Sequence[int]]", group)))
    if group and all(isinstance(rank, int) for rank in group) and len(set(group)) == len(group):
        return current_world().group(cast("Sequence[int]", group))
    raise CollectiveError(
        message(
            "this is no group",
            asked=f"a collective over {group!r}",
            do="a list of different ranks, a list of such lists, a process group, a 1-D mesh, (mesh, axis) or None",
        )
    )


def _own_part(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    rank = current_world().rank
    own = [part for part in parts if rank in part]
    if len(own) == 1:
        return own[0]
    do = f"have rank {rank} in one of them, and call it on the ranks of the lists only"
    raise NotInMeshError(
        message(f"rank {rank} is in {len(own)} of the lists", asked=f"a collective over {parts}", do=do)
    )


def group_of(group: GroupLike) -> Group:
    """The `Group` that any of the accepted forms means.

    >>> from shardwise.comm.place import group_of
    >>> group_of(None)
    Group(0)
    """
    return place_of(group).group

"""Move a tensor from one mesh to another: other ranks, another order or another shape of them.

It is one exchange among the ranks of both meshes, of which each rank knows what all of them hold and need. What is
pending is reduced on the source mesh first. A mesh that was cut from another has several parts, each on its own ranks:
every part of the target takes from the part of the source that its ranks are in, or from the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from torch import Tensor

from shardwise.errors import RedistributeError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute, planner
from shardwise.redistribute.parcels import Held, Parcels, common, pack, volume
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec

Coordinate = tuple[int, ...]
Seats = Mapping[int, tuple[int, Coordinate]]  # for each rank, its part of the mesh and its coordinate
Crew = tuple[int, ...]


def transfer(local: Tensor, src: Spec, dst: Spec, *, async_op: bool = False) -> Tensor:
    """Lay ``local``, this rank's part of ``src``, as ``dst`` says, on another mesh; returns the new local tensor.

    Every rank of either mesh calls it; those outside ``src.mesh`` pass any tensor on the device, those outside
    ``dst.mesh`` get an empty one, and a rank in neither sends and receives nothing. With ``async_op`` the result may be
    an `AsyncCollectiveTensor`.

    Raises:
        RedistributeError: the tensors or device types differ, a reduction is to be pending on the target, or it is not
            said which part of the source mesh the target is to take from. On every rank alike.
    """
    _check(src, dst)
    crew = crews(src.mesh, dst.mesh).get(current_world().rank)
    settled = _settled(src)
    here = src.mesh.get_coordinate()
    local = execute.run(local, src, planner.plan(src, settled)) if here else local.new_empty(0, dtype=src.meta.dtype)
    there = dst.mesh.get_coordinate()
    result = local.new_empty(dst.local_shape(there))
    if crew is None:
        return result
    group = current_world().group(crew)
    own, talks = _parcels(settled, dst, crew, group.index)
    sent = execute.exchange(local, result, own, talks, group, "")
    return execute.finish_later(sent, dst, there) if async_op else dst.meta.lay_out(execute.finish(sent))


def _check(src: Spec, dst: Spec) -> None:
    asked = f"{src} on {src.mesh} as {dst} on {dst.mesh}"
    if src.shape != dst.shape or src.meta.dtype is not dst.meta.dtype:
        raise RedistributeError(message("a redistribution changes neither shape nor dtype", asked=asked))
    if any(isinstance(placement, Partial) for placement in dst.placements):
        do = "redistribute to Shard(dim) or Replicate()"
        raise RedistributeError(message("nothing can become pending on another mesh", asked=asked, do=do))
    if src.mesh.device_type != dst.mesh.device_type:
        do = "move the local tensors to the other device type first"
        raise RedistributeError(message("the meshes have different device types", asked=asked, do=do))


def _settled(src: Spec) -> Spec:
    """The cheapest spec with nothing pending: replicated or cut where a reduction was pending."""
    pending = [axis for axis, placement in enumerate(src.placements) if isinstance(placement, Partial)]
    if not pending:
        return src
    parts = prod(src.mesh.shape[axis] for axis in pending)
    cut = {placement.dim for placement in src.placements if isinstance(placement, Cut)}
    dims = [dim for dim, size in enumerate(src.shape) if dim not in cut and size % parts == 0]
    ends: list[Placement] = [Replicate(), *map(Shard, dims)]
    ways = [src.with_placements([end if p.is_partial() else p for p in src.placements]) for end in ends]
    return min(ways, key=lambda way: planner.price(src, way))


@lru_cache(maxsize=256)
def crews(source: DeviceMesh, target: DeviceMesh) -> dict[int, Crew]:
    """For each rank of either mesh those it exchanges with: a part of the source mesh, and who takes from it."""
    senders, receivers = _seats(source), _seats(target)
    parts = _parts(senders)
    members = {part: set(ranks) for part, ranks in parts.items()}
    for ranks in _parts(receivers).values():
        members[_source_part(source, target, ranks, senders, parts)].update(ranks)
    return {rank: tuple(sorted(crew)) for crew in members.values() for rank in crew}


def _source_part(
    source: DeviceMesh, target: DeviceMesh, ranks: list[int], senders: Seats, parts: Mapping[int, list[int]]
) -> int:
    if len(parts) == 1:
        return next(iter(parts))
    found = {senders[rank][0] if rank in senders else None for rank in ranks}
    part = found.pop() if len(found) == 1 else None
    if part is None:
        raise RedistributeError(
            message(
                f"{source} has {len(parts)} parts, and it is not said which one the target is to take from",
                asked=f"a tensor on {source} to {target}",
                got=f"ranks {ranks} of the target are not all in one of the parts {list(parts.values())}",
                do="redistribute within the mesh that it was cut from, or build the source mesh of the ranks meant",
            )
        )
    return part


def _parts(seats: Seats) -> dict[int, list[int]]:
    parts: dict[int, list[int]] = {}
    for rank, (part, _) in seats.items():
        parts.setdefault(part, []).append(rank)
    return parts


@lru_cache(maxsize=256)
def _seats(mesh: DeviceMesh) -> dict[int, tuple[int, Coordinate]]:
    root = mesh if mesh.root is None else mesh.root
    seats = {}
    for position, rank in enumerate(mesh.rank_map.ranks(range(root.layout.size))):
        coordinate = tuple(axis.project(position) for axis in mesh.layout.axes)
        start = position - sum(axis(index) for axis, index in zip(mesh.layout.axes, coordinate, strict=True))
        seats[rank] = start, coordinate
    return seats


@lru_cache(maxsize=4096)
def _parcels(src: Spec, dst: Spec, crew: Crew, index: int) -> tuple[Parcels, bool]:
    """The parcels of the member ``index`` of a crew, and whether any of them sends any."""
    have, want = _held(src, crew), _held(dst, crew)
    return pack(have, want, index), any(map(_lacks, have, want))


def _lacks(held: Held | None, wanted: Held | None) -> bool:
    if wanted is None:
        return False
    return volume(wanted) > (0 if held is None else volume(common(held, wanted)))


def _held(spec: Spec, crew: Crew) -> list[Held | None]:
    seats = _seats(spec.mesh)
    places = [seats[rank][1] if rank in seats else None for rank in crew]
    dims = range(spec.ndim)
    return [None if place is None else tuple([spec.intervals(dim, place) for dim in dims]) for place in places]

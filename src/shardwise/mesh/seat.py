"""What one rank knows of the meshes that it has met; kept in its world's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from shardwise.mesh.layout import Layout
from shardwise.mesh.process_groups import Backend
from shardwise.mesh.world import Group, World


class Part(NamedTuple):
    """An axis: its layout over the positions of the root mesh, and the backend of its groups."""

    layout: Layout
    backend: Backend | None


class Seat:
    """One rank's place in one mesh. It must not hold the mesh, which would then never be freed."""

    __slots__ = ("coordinate", "flattened", "groups", "position", "ranks")

    def __init__(self, position: int | None, axes: Sequence[Layout]) -> None:
        self.position = position
        self.coordinate = None if position is None else tuple(axis.project(position) for axis in axes)
        self.groups: dict[int | tuple[int, ...], Group] = {}
        self.flattened: dict[str, Part] = {}
        self.ranks: tuple[int, ...] | None = None


Seats = WeakKeyDictionary[object, Seat]


def seats(world: World) -> Seats:
    """All seats of a world's rank, by mesh."""
    found: Seats | None = world.memory.get(Seat)
    return world.memory.setdefault(Seat, WeakKeyDictionary()) if found is None else found


def release(world: World, groups: Iterable[Group]) -> None:
    """Do away with groups, and let all seats forget them."""
    gone = set(groups)
    for seat in list(seats(world).values()):
        seat.groups = {key: group for key, group in seat.groups.items() if group not in gone}
    world.release(gone)

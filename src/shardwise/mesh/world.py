"""Who am I, and who else is there: worlds, and the groups of ranks that talk to each other.

A `World` is one rank's view of all ranks. There are three kinds: a *process* world stands on `torch.distributed`, a
*simulated* one (`shardwise.sim`) is one of many threads of this process, a *dry* one moves no data and has any size.
This is the only room that makes process groups; a group is known by its ranks, and made once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, _register_process_group

from shardwise.errors import NotInMeshError, WorldError, message

Backend: TypeAlias = tuple[str | None, Any]  # a backend's name, and torch's options for it


class Group:
    """Ranks that talk to each other, in order, seen from one of them.

    ``name`` is what torch's native collectives know the group by; ``index`` is this rank's place in ``ranks``.
    """

    __slots__ = ("__weakref__", "index", "name", "process_group", "ranks", "size")

    def __init__(self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup, name: str) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.process_group = process_group
        self.name = name

    def __repr__(self) -> str:
        return f"Group({', '.join(map(str, self.ranks))})"


class GroupMaker(Protocol):
    """How a kind of world makes a process group of ``ranks``; returns it with its registered name."""

    def __call__(self, ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]: ...


class SpecialMaker(Protocol):
    """How a kind of world makes a process group on another backend than its own."""

    def __call__(self, ranks: tuple[int, ...], backend: Backend) -> tuple[dist.ProcessGroup, str]: ...


class World:
    """One rank's view of all ranks: who it is, and its groups by their ranks.

    ``memory`` holds what this rank remembers (plans, coordinates); nothing in it is shared between ranks.
    """

    def __init__(
        self, kind: str, rank: int, size: int, make_group: GroupMaker, make_special: SpecialMaker | None = None
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.size = size
        self.memory: dict[Any, Any] = {}
        self._make_group = make_group
        self._make_special = make_special
        self._groups: dict[tuple[tuple[int, ...], Backend | None], Group] = {}
        self._lock = threading.RLock()

    def group(self, ranks: Sequence[int], backend: Backend | None = None) -> Group:
        """The group of ``ranks``, made at its first use; this rank must be one of them.

        ``backend`` asks for other than the world's own backend; worlds that have only one ignore it.
        """
        key = (tuple(ranks), backend if self._make_special else None)
        found = self._groups.get(key)
        return self._enter(*key) if found is None else found

    def adopt(self, process_group: dist.ProcessGroup) -> Group:
        """Make a process group that the user has made the group of its ranks."""
        known = next((group for group in self._groups.values() if group.process_group is process_group), None)
        if known is not None:
            return known
        ranks = tuple(dist.get_process_group_ranks(process_group))
        self._check_member(ranks)
        with self._lock:
            adopted = Group(ranks, self.rank, process_group, process_group.group_name)
            self._groups[ranks, None] = adopted
            return adopted

    def _enter(self, ranks: tuple[int, ...], backend: Backend | None) -> Group:
        self._check_member(ranks)
        with self._lock:
            if (ranks, backend) not in self._groups:
                make_special = self._make_special
                made = (
                    self._make_group(ranks) if backend is None or make_special is None else make_special(ranks, backend)
                )
                self._groups[ranks, backend] = Group(ranks, self.rank, *made)
            return self._groups[ranks, backend]

    def _check_member(self, ranks: tuple[int, ...]) -> None:
        if self.rank not in ranks:
            raise NotInMeshError(
                message(
                    f"rank {self.rank} is not in the group",
                    asked=f"a collective over ranks {list(ranks)}",
                    do=f"call it on ranks {list(ranks)} only, or use a group that includes rank {self.rank}",
                )
            )

    def __repr__(self) -> str:
        return f"World({self.kind}, rank {self.rank} of {self.size})"


class _Current(threading.local):
    world: World | None = None


_current = _Current()
_process_lock = threading.Lock()
_process: list[tuple[Any, World]] = []  # the process world, beside the default group that it stands on


def current_world() -> World:
    """The world that this thread is in; at the first call, the process world."""
    return _current.world or _process_world()


@contextlib.contextmanager
def use_world(world: World) -> Iterator[World]:
    """Let this thread be in ``world`` for the duration of the block."""
    before, _current.world = _current.world, world
    try:
        yield world
    finally:
        _current.world = before


def _process_world() -> World:
    default = dist.group.WORLD
    if _process and _process[0][0] is default:
        return _process[0][1]
    with _process_lock:
        return _find_process_world()


def _find_process_world() -> World:
    if dist.group.WORLD is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _initialise()
    default = dist.group.WORLD
    if not _process or _process[0][0] is not default:
        _process[:] = [(default, _alone() if default is None else _distributed(default))]
    return _process[0][1]


def _initialise() -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and os.environ["WORLD_SIZE"] == "1":
        return
    if missing:
        raise WorldError(
            message(
                "this process is told its rank but not where the others are",
                got=f"RANK={os.environ['RANK']}, WORLD_SIZE={os.environ['WORLD_SIZE']}, no {' and no '.join(missing)}",
                do="start the program with torchrun, or call torch.distributed.init_process_group first",
            )
        )
    dist.init_process_group(None if torch.accelerator.is_available() else "gloo")


def _distributed(default: dist.ProcessGroup) -> World:
    everyone = tuple(range(default.size()))

    def make(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]:
        if ranks == everyone:
            return default, default.group_name
        return _new_group(ranks)

    return World("process", default.rank(), default.size(), make, _new_group)


def _new_group(ranks: tuple[int, ...], backend: Backend = (None, None)) -> tuple[dist.ProcessGroup, str]:
    # the ranks' order is the group's order, which torch only keeps when told so
    options: dict[str, Any] = {} if sorted(ranks) == list(ranks) else {"sort_ranks": False}
    options |= {"backend": backend[0], "pg_options": backend[1]}
    made = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    if made is None or isinstance(made, int):
        raise WorldError(message(f"torch.distributed made no group of ranks {list(ranks)}"))
    return made, made.group_name


def _alone() -> World:
    name = f"shardwise-alone-{uuid.uuid4()}"
    return World("process", 0, 1, lambda ranks: fake_group(0, 1, name))


def dry_world(rank: int, size: int) -> World:
    """A world of ``size`` ranks in which this process is ``rank`` and no data moves, for planning.

    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(3, 65536)) as world:
    ...     print(world)
    World(dry, rank 3 of 65536)
    """
    if not 0 <= rank < size:
        raise WorldError(message("no such rank", asked=f"rank {rank} of {size}", do=f"a rank from 0 to {size - 1}"))

    def make(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]:
        return fake_group(ranks.index(rank), len(ranks), f"shardwise-dry-{uuid.uuid4()}")

    return World("dry", rank, size, make)


def fake_group(index: int, size: int, name: str) -> tuple[dist.ProcessGroup, str]:
    """A group on torch's ``fake`` backend, which completes every collective without moving data."""
    backend = FakeProcessGroup._create_internal(index, size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(HashStore(), index, size)
    group._set_default_backend(custom)
    for device_type in ("cpu", "cuda", "meta"):
        group._register_backend(torch.device(device_type), custom, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
    return group, name

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import NotInMeshError, WorldError, message
from shardwise.mesh.agreement import Claim, Exchange, check_claims
from shardwise.mesh.process_groups import SILENT, Backend, Family, Made, Members, TorchGroups, fake_group
from shardwise.mesh.store import StoreExchange


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
    """How a kind of world makes a process group of ``ranks``: the fields of `Made`, of which two will do."""

    def __call__(self, ranks: Members) -> tuple[dist.ProcessGroup, str] | Made: ...


class SpecialMaker(Protocol):
    """How a kind of world that has several backends makes process groups; ``together``: all ranks must take part."""

    together: bool

    def __call__(self, ranks: Members, backend: Backend | None, family: Family | None) -> Made: ...


class World:
    """One rank's view of all ranks: who it is, and its groups by their ranks.

    ``memory`` holds what this rank remembers (plans, coordinates); nothing in it is shared between ranks. ``exchange``
    is how the ranks agree on meshes; a world without it has nobody to agree with.
    """

    def __init__(
        self,
        kind: str,
        rank: int,
        size: int,
        make_group: GroupMaker,
        make_special: SpecialMaker | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.size = size
        self.memory: dict[Any, Any] = {}
        self._make_group = make_group
        self._make_special = make_special
        self._exchange = exchange
        self._groups: dict[tuple[Members, Backend | None], Group] = {}
        self._closing: dict[str, Callable[[], None]] = {}  # how to do away with groups, by name
        self._agreed: set[str] = set()
        self._agreeing: dict[str, threading.Lock] = {}
        self._lock = threading.RLock()

    @property
    def has_others(self) -> bool:
        """Whether other processes or threads stand behind the other ranks."""
        return self._exchange is not None

    @property
    def together(self) -> bool:
        """Whether a group can only be made by all ranks of the world together."""
        return self._make_special is not None and self._make_special.together

    def group(self, ranks: Sequence[int], backend: Backend | None = None, family: Family | None = None) -> Group:
        """The group of ``ranks``, made at its first use; this rank must be one of them.

        ``backend`` asks for other than the world's own backend; worlds that have only one ignore it, except `SILENT`.
        ``family`` tells which groups the other ranks make meanwhile, for backends that must know.
        """
        key = (tuple(ranks), backend if self._make_special or backend is SILENT else None)
        if is_dynamo_compiling():
            return _group_of_traced(self, *key)
        found = self._groups.get(key)
        return self._enter(*key, family) if found is None else found

    def release(self, groups: Iterable[Group]) -> None:
        """Do away with groups that this world has made; the next use of their ranks makes them anew."""
        with self._lock:
            for group in groups:
                close = self._closing.pop(group.name, None)
                if close is not None:
                    for key in [key for key, known in self._groups.items() if known is group]:
                        del self._groups[key]
                    close()

    def has_agreed(self, digest: str) -> bool:
        """Whether the ranks have agreed on this before, or there is nobody to agree with."""
        return self._exchange is None or digest in self._agreed

    def agree(self, claim: Claim, timeout: float) -> None:
        """Hear what the other ranks say, once for each claim.

        Raises:
            MeshMismatchError: another rank claims something else.
            CollectiveTimeoutError: a rank does not come.
        """
        if self._exchange is None:
            return
        with self._lock:
            turn = self._agreeing.setdefault(claim.digest, threading.Lock())
        with turn:
            if claim.digest not in self._agreed:
                check_claims(self._exchange(claim, timeout), timeout)
                self._agreed.add(claim.digest)
                self._agreeing.pop(claim.digest, None)

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

    def _enter(self, ranks: Members, backend: Backend | None, family: Family | None) -> Group:
        self._check_member(ranks)
        with self._lock:
            if (ranks, backend) not in self._groups:
                made = self._make(ranks, backend, family)
                if made.close is not None:
                    self._closing[made.name] = made.close
                group = Group(ranks, self.rank, made.process_group, made.name)
                if made.fleeting and made.close is not None:
                    weakref.finalize(group, made.close).atexit = False
                self._groups[ranks, backend] = group
            return self._groups[ranks, backend]

    def _make(self, ranks: Members, backend: Backend | None, family: Family | None) -> Made:
        if backend is SILENT:
            return fake_group(ranks.index(self.rank), len(ranks), f"shardwise-silent-{uuid.uuid4()}")
        if self._make_special is not None:
            return self._make_special(ranks, backend, family)
        return Made(*self._make_group(ranks))

    def _check_member(self, ranks: tuple[int, ...]) -> None:
        if max(ranks) >= self.size:
            raise WorldError(
                message(
                    f"there are no ranks {[rank for rank in ranks if rank >= self.size]} here",
                    asked=f"a collective over ranks {list(ranks)}",
                    got=repr(self),
                    do="use it in the world that it was made for; out of a simulated run, return plain tensors",
                )
            )
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
    if (world := _current.world) is not None:
        return world
    if _process and _process[0][0] is c10d._world.default_pg and not is_dynamo_compiling():
        return _process[0][1]
    return _process_world()


@contextlib.contextmanager
def use_world(world: World) -> Iterator[World]:
    """Let this thread be in ``world`` for the duration of the block."""
    before, _current.world = _current.world, world
    try:
        yield world
    finally:
        _current.world = before


@contextlib.contextmanager
def saying(what: str) -> Iterator[None]:
    """Let the memory of this rank's world say that ``what`` is so, for the duration of the block."""
    memory = current_world().memory
    before = memory.get(what, False)
    memory[what] = True
    try:
        yield
    finally:
        memory[what] = before


def _process_world() -> World:
    if is_dynamo_compiling():
        _make_process_world()
    with _process_lock:
        return _find_process_world()


def _make_process_world() -> None:
    with _process_lock:
        _find_process_world()


def _group_of_traced(world: World, ranks: Members, backend: Backend | None) -> Group:
    return world.group(ranks, backend)


# torch.compile runs these instead of tracing them
_make_process_world._dynamo_marked_constant = True  # type: ignore[attr-defined]
_group_of_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    groups, rank, size = TorchGroups(default), default.rank(), default.size()
    talks = size > 1 and dist.get_backend(default) != "fake"
    exchange = StoreExchange(c10d._get_default_store(), rank) if talks else None
    return World("process", rank, size, lambda ranks: groups(ranks, None, None), groups, exchange)


def _alone() -> World:
    return World("process", 0, 1, lambda ranks: fake_group(0, 1, f"shardwise-alone-{uuid.uuid4()}"))


def dry_world(rank: int, size: int) -> World:
    """A world of ``size`` ranks in which this process is ``rank`` and no data moves, for planning.

    >>> from shardwise.mesh.world import dry_world, use_world
    >>> with use_world(dry_world(3, 65536)) as world:
    ...     print(world)
    World(dry, rank 3 of 65536)
    """
    if not 0 <= rank < size:
        raise WorldError(message("no such rank", asked=f"rank {rank} of {size}", do=f"a rank from 0 to {size - 1}"))

    def make(ranks: Members) -> Made:
        return fake_group(ranks.index(rank), len(ranks), f"shardwise-dry-{uuid.uuid4()}")

    return World("dry", rank, size, make)

"""Process groups of torch: how they are made, named, and done away with."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import WorldError, message
from shardwise.mesh.agreement import digest

Members: TypeAlias = tuple[int, ...]
Family: TypeAlias = Callable[[], Sequence[Members]]  # all groups along the same axes, those of other ranks too
Backend: TypeAlias = tuple[str | None, Any]  # a backend's name, and torch's options for it

SILENT: Backend = ("silent", None)  # completes every collective and moves nothing
SORTS = "sort_ranks" not in inspect.signature(dist.new_group).parameters  # torch 2.11 puts the ranks in rising order


class Made(NamedTuple):
    """A process group, the name that torch's native collectives know it by, and how to do away with it.

    One that is ``fleeting`` goes by itself when its world has gone.
    """

    process_group: dist.ProcessGroup
    name: str
    close: Callable[[], None] | None = None
    fleeting: bool = False


class TorchGroups:
    """Makes groups of the ranks of ``default``, the default group of `torch.distributed`.

    Where the backend lets a group's ranks make it alone, only they do; ``together`` says that it does not, so that all
    ranks of the world must make all groups along the same axes in the same order.
    """

    def __init__(self, default: dist.ProcessGroup) -> None:
        self.default = default
        self.together = _splits(default)
        self._times: dict[tuple[Members, str | None], int] = {}

    def __call__(self, ranks: Members, backend: Backend | None, family: Family | None) -> Made:
        """Make the group of ``ranks``, which this rank is one of."""
        if backend is None and ranks == tuple(range(self.default.size())):
            return Made(self.default, self.default.group_name)
        if not self.together:
            try:
                return _made(self._alone(ranks, backend or (None, None)))
            except (ValueError, NotImplementedError) as refusal:
                if "use_local_synchronization" not in str(refusal):
                    raise
                self.together = True
        return _made(self._with_all(ranks, backend, family))

    def _alone(self, ranks: Members, backend: Backend) -> object:
        # torch's own name counts all groups that a rank has made, in which its ranks may differ: then they never meet
        times = self._times[ranks, backend[0]] = self._times.get((ranks, backend[0]), -1) + 1
        with _named(f"shardwise-{digest(ranks, backend[0])}-{times}"):
            return _new_group(ranks, backend, alone=True)

    def _with_all(self, ranks: Members, backend: Backend | None, family: Family | None) -> object:
        groups = [ranks] if family is None else family()
        if sum(map(len, groups)) < self.default.size():
            raise WorldError(
                message(
                    "the backend makes groups only with all ranks of the world, and the mesh has not all of them",
                    asked=f"a group of ranks {list(ranks)} in a world of {self.default.size()}",
                    do="make it with torch.distributed.new_group on every rank and pass it to DeviceMesh.from_group, "
                    "or leave out device_id in init_process_group",
                )
            )
        if backend is None and _splits(self.default) and all(sorted(group) == [*group] for group in groups):
            return dist.split_group(split_ranks=[list(group) for group in groups])
        made = [_new_group(group, backend or (None, None)) for group in groups]
        return made[groups.index(ranks)]


def fake_group(index: int, size: int, name: str) -> Made:
    """A group on torch's ``fake`` backend, which completes every collective without moving data."""
    backend = FakeProcessGroup._create_internal(index, size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(HashStore(), index, size)
    group._set_default_backend(custom)
    for device_type in ("cpu", "cuda", "meta"):
        group._register_backend(torch.device(device_type), custom, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
    return Made(group, name, functools.partial(_unregister, name), fleeting=True)


class Placed(int):
    """A rank that sorts by its place in a group.

    >>> sorted(Placed.all((3, 1, 2)))
    [3, 1, 2]
    """

    place: int

    @classmethod
    def all(cls, ranks: Sequence[int]) -> list[Placed]:
        """The ranks, each with its place."""
        placed = [cls(rank) for rank in ranks]
        for place, rank in enumerate(placed):
            rank.place = place
        return placed

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, Placed) else int(self) < other


def _new_group(ranks: Members, backend: Backend, *, alone: bool = False) -> object:
    # the ranks' order is the group's order, which torch only keeps when told so
    mixed = sorted(ranks) != [*ranks]
    ordered = Placed.all(ranks) if mixed and SORTS else list(ranks)
    options: dict[str, Any] = {"sort_ranks": False} if mixed and not SORTS else {}
    return dist.new_group(
        ordered, backend=backend[0], pg_options=backend[1], use_local_synchronization=alone, **options
    )


def _made(group: object) -> Made:
    if not isinstance(group, dist.ProcessGroup):
        raise WorldError(message("torch.distributed made no group for this rank", got=repr(group)))
    return Made(group, group.group_name, functools.partial(_destroy, group))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let the group that this thread makes in the block have a name of our own."""
    own, thread = c10d._process_group_name, threading.get_ident()

    def choose(ranks: object, use_hashed_name: bool) -> object:
        ours = use_hashed_name and threading.get_ident() == thread
        return name if ours else own(ranks, use_hashed_name)

    c10d._process_group_name = choose  # type: ignore[assignment]
    try:
        yield
    finally:
        c10d._process_group_name = own


def _splits(default: dist.ProcessGroup) -> bool:
    """Whether torch splits groups from the default one, which takes all of its ranks."""
    device = default.bound_device_id
    return device is not None and bool(default._get_backend(device).supports_splitting)


def _destroy(group: dist.ProcessGroup) -> None:
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def _unregister(name: str) -> None:
    with contextlib.suppress(RuntimeError):  # it is not there any more
        _unregister_process_group(name)  # type: ignore[arg-type]

"""`torch.distributed` as one simulated rank sees it, so that scripts written for torchrun run unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import WorldError, message
from shardwise.sim.lockstep import Lockstep
from shardwise.sim.meeting import Channel
from shardwise.sim.process_group import SimulatedGroup

ChannelKey = tuple[tuple[int, ...], int]


class RankWorld(c10d._World):
    """What `torch.distributed` knows, for one rank: its default group and all others, by name.

    Groups of torch's native collectives are known by name in the whole process; ``prefix`` keeps the runs and the ranks
    apart. ``channels`` is what the ranks of the run share.
    """

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(
        self, rank: int, size: int, lockstep: Lockstep, channels: dict[ChannelKey, Channel], prefix: str
    ) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self.prefix = prefix
        self.groups: list[SimulatedGroup] = []
        self._lockstep = lockstep
        self._channels = channels
        self._repeats: dict[tuple[int, ...], int] = {}
        self._store = HashStore()
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {})
        self.everyone = self.add(tuple(range(size)))
        self.default_pg = self.everyone

    def add(self, ranks: tuple[int, ...]) -> SimulatedGroup:
        """Make one more group of ``ranks`` and register it; the n-th of one rank is the n-th of the others."""
        if not set(ranks) <= set(range(self.size)):
            raise WorldError(message("no such ranks", asked=f"a group of {list(ranks)} in a world of {self.size}"))
        repeat = self._repeats[ranks] = self._repeats.get(ranks, -1) + 1
        channel = self._channels.setdefault((ranks, repeat), Channel(ranks))
        group = SimulatedGroup(self.rank, channel, self._lockstep, f"{self.prefix}/{self.rank}.{len(self.groups)}")
        self.groups.append(group)
        self.enter(group)
        _register_process_group(group.group_name, group)  # type: ignore[arg-type]
        return group

    def enter(self, group: SimulatedGroup) -> None:
        """Let `torch.distributed` know ``group``."""
        name = group.group_name
        self.pg_map[group] = ("gloo", self._store)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {rank: index for index, rank in enumerate(group.ranks)}
        self.pg_backend_config[group] = "cpu:gloo,cuda:gloo"
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg[f"ptd:{name}"] = [group]
        self.tags_to_pg.setdefault("", []).append(group)

    def make_group(self, ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]:
        """Make a group for a `World`; the group of everybody is the default group."""
        group = self.everyone if ranks == self.everyone.ranks else self.add(ranks)
        return group, group.group_name

    def close(self) -> None:
        """Take all groups of this rank out of the process's registers."""
        for group in self.groups:
            with contextlib.suppress(RuntimeError):
                _unregister_process_group(group.group_name)  # type: ignore[arg-type]
        for register in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config, self.pg_to_tag):
            register.clear()
        self.tags_to_pg.clear()
        self.groups.clear()
        self.default_pg = None


def _init_process_group(world: RankWorld, *args: object, **kwargs: object) -> None:
    if world.default_pg is None:
        world.default_pg = world.everyone
        world.enter(world.everyone)


def _new_group(
    world: RankWorld,
    ranks: Sequence[int] | None = None,
    *args: object,
    use_local_synchronization: bool = False,
    sort_ranks: bool = True,
    **kwargs: object,
) -> object:
    members = tuple(range(world.size)) if ranks is None else tuple(sorted(ranks) if sort_ranks else ranks)
    if world.rank in members:
        return world.add(members)
    return None if use_local_synchronization else dist.GroupMember.NON_GROUP_MEMBER


def _unregister_all(world: RankWorld) -> None:
    """A rank that destroys its groups must not destroy those of the others; all go when the run ends."""


_REPLACED: tuple[tuple[ModuleType, str, Callable[..., object]], ...] = (
    (dist, "init_process_group", _init_process_group),
    (c10d, "init_process_group", _init_process_group),
    (c10d, "_new_group_with_tag", _new_group),
    (c10d, "_unregister_all_process_groups", _unregister_all),
)


@contextlib.contextmanager
def torch_replaced() -> Iterator[None]:
    """For the duration of a run, let the few functions of `torch.distributed` that reach for a server not do so."""
    originals = [getattr(module, name) for module, name, _ in _REPLACED]
    for (module, name, replacement), original in zip(_REPLACED, originals, strict=True):
        setattr(module, name, _for_ranks(replacement, original))
    try:
        yield
    finally:
        for (module, name, _), original in zip(_REPLACED, originals, strict=True):
            setattr(module, name, original)


def _for_ranks(replacement: Callable[..., object], original: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        world = c10d._world
        if isinstance(world, RankWorld):
            return replacement(world, *args, **kwargs)
        return original(*args, **kwargs)

    return call

"""The guard: before a collective starts, the ranks of its group compare what they are about to do.

On real process groups a mismatch hangs, or mixes up data. The guard compares over the store of `torch.distributed`, on
the CPU, with a time limit: the operation, its place in the sequence of the group's calls, shape, dtype, reduction,
splits, and (where asked) the line of the program. If they differ, or a rank does not come, every rank raises.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from shardwise.comm.transmission import Transmission
from shardwise.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, WorldError, message
from shardwise.mesh.agreement import Claim, Claims, digest, ranks_text
from shardwise.mesh.store import StoreExchange
from shardwise.mesh.world import World, current_world

SWITCH = "SHARDWISE_GUARD"
LIMIT = "SHARDWISE_GUARD_TIMEOUT"
SECONDS = 60.0
FAREWELL = 1.0  # seconds that a rank stays after a verdict for others to read it: it may own the store


class Call(NamedTuple):
    """What a rank leaves in the store for the others to read: its latest guarded call."""

    ranks: list[int]
    number: int
    text: str
    line: str

    def __str__(self) -> str:
        return f"{self.text} at {self.line or 'an unknown line'} (call {self.number} over {ranks_text(self.ranks)})"


class Desk:
    """One rank's side of the guard; kept in the memory of its world, because the store remembers as long."""

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self.store = PrefixStore("shardwise/guard", store)
        self.exchange = StoreExchange(store, rank, "collective", sweeps=True)
        self.numbers: dict[tuple[int, ...], int] = {}
        self.splits: dict[tuple[int, ...], str] = {}  # the key of those that this rank has left last

    def announce(self, told: Transmission) -> Call:
        """Leave word of this rank's next call."""
        ranks = tuple(sorted(told.ranks))
        number = self.numbers[ranks] = self.numbers.get(ranks, 0) + 1
        call = Call([*ranks], number, call_text(told), told.line)
        self.store.set(f"call/{self.rank}", json.dumps(call))
        return call

    def latest(self, rank: int) -> Call | None:
        """The latest call of another rank."""
        key = f"call/{rank}"
        return Call(*json.loads(self.store.get(key))) if self.store.check([key]) else None

    def take_leave(self, call: Call, present: int) -> None:
        """Stay until the others have read what has gone wrong."""
        key = f"bye/{digest(call.ranks, call.number)}"
        self.store.add(key, 1)
        limit = time.monotonic() + FAREWELL
        while self.store.add(key, 0) < present and time.monotonic() < limit:
            time.sleep(0.01)


class Guard:
    """An observer of the wire that lets no collective start before all ranks of the group are about to do the same.

    ``timeout`` is in seconds, by default what the environment says; ``lines``: the lines of the program count too.
    """

    def __init__(self, timeout: float | None = None, *, lines: bool = False) -> None:
        self.timeout = seconds() if timeout is None else timeout
        self.lines = lines

    def __call__(self, told: Transmission) -> None:
        world = current_world()
        if world.kind != "process" or not world.has_others:
            return  # the simulator compares anyway, and elsewhere there is nobody to compare with
        desk = desk_of(world)
        try:
            self._compare(told, desk)
        except (CollectiveMismatchError, CollectiveTimeoutError):
            raise
        except (CollectiveError, dist.DistError) as error:
            raise CollectiveTimeoutError(
                message(
                    "the store of torch.distributed cannot be reached: the process that holds it is gone",
                    asked=f"{call_text(told)} over {ranks_text(told.ranks)} at {told.line}",
                    got=str(error).partition("\n")[0],
                    do="see why that process (rank 0, or the launcher) ended",
                )
            ) from error

    def _compare(self, told: Transmission, desk: Desk) -> None:
        call = desk.announce(told)
        if told.splits is not None:
            _leave_splits(told, desk, call)
        claim = Claim(tuple(sorted(told.ranks)), self._fingerprint(told), call.text)
        claims = desk.exchange(claim, self.timeout)
        if len(claims.made) > 1 or claims.absent:
            raise self._refusal(told, claims, _calls(told, desk, call, claims))
        if told.splits is not None:
            _check_splits(told, desk, call)

    def _fingerprint(self, told: Transmission) -> str:
        shape = told.shape if told.splits is None else told.shape[1:]
        terms = (told.op, told.ranks, shape, str(told.dtype), told.reduce_op, told.terms)
        return digest(*terms, told.line if self.lines else "")

    def _refusal(self, told: Transmission, claims: Claims, calls: Sequence[str]) -> CollectiveError:
        asked, got = f"{call_text(told)} at {told.line}", "\n".join(calls)
        if len(claims.made) > 1:
            return _mismatch(told, asked, calls)
        return CollectiveTimeoutError(
            message(
                f"{ranks_text([*claims.absent])} did not come within {self.timeout:g} s to a collective",
                asked=asked,
                got=got,
                do=f"let every rank of the group make the call; to give slow ranks longer, set {LIMIT} (seconds)",
            )
        )


def desk_of(world: World) -> Desk:
    found: Desk | None = world.memory.get(Desk)
    if found is None:
        found = world.memory[Desk] = Desk(c10d._get_default_store(), world.rank)
    return found


def call_text(told: Transmission) -> str:
    """What a rank calls, without where.

    >>> import torch
    >>> call_text(Transmission("all_reduce", "", (0, 1), "", (8, 4), torch.float32, "sum", 128))
    'all_reduce(sum) of float32[8, 4]'
    """
    shapes = told.terms if told.op.endswith("_coalesced") else (told.shape,)
    tensors = ", ".join(f"{str(told.dtype).removeprefix('torch.')}{list(cast(tuple[int, ...], s))}" for s in shapes)
    source = f"from index {told.terms[0]}" if told.op == "broadcast" else told.reduce_op
    splits = "" if told.splits is None else f" sending {list(told.splits[0])} receiving {list(told.splits[1])}"
    backward = " in backward" if told.backward else ""
    return f"{told.op}{f'({source})' if source else ''} of {tensors}{splits}{backward}"


def is_wanted() -> bool:
    """Whether the environment turns the guard on."""
    return os.environ.get(SWITCH, "0").lower() not in ("", "0", "false", "off", "no")


def seconds() -> float:
    """How long the ranks wait for each other unless a caller says otherwise."""
    try:
        return float(os.environ.get(LIMIT, SECONDS))
    except ValueError:
        raise WorldError(message(f"{LIMIT} must be a number of seconds", got=repr(os.environ[LIMIT]))) from None


def _calls(told: Transmission, desk: Desk, own: Call, claims: Claims) -> list[str]:
    """What each rank of the group calls, from the first to the last."""
    latest: Mapping[int, Call | None] = {rank: desk.latest(rank) for rank in told.ranks}
    came = {rank for ranks in claims.made.values() for rank in ranks}
    desk.take_leave(own, len(came))
    return [f"rank {rank} {_deed(latest[rank], own, rank in came)}" for rank in told.ranks]


def _deed(call: Call | None, own: Call, came: bool) -> str:
    here = call is not None and (call.ranks, call.number) == (own.ranks, own.number)
    if came or here:
        return f"calls {call}"
    return "has not come, nor to any call before" if call is None else f"has not come; its latest call is {call}"


def _mismatch(told: Transmission, asked: str, calls: Sequence[str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        message(
            f"the ranks of group {list(told.ranks)} call different things",
            asked=asked,
            got="\n".join(calls),
            do="let every rank of a group call the same collectives, in the same order, with fitting shapes",
        )
    )


def _leave_splits(told: Transmission, desk: Desk, call: Call) -> None:
    assert told.splits is not None
    key = f"splits/{digest(call.ranks, call.number)}"
    desk.store.set(f"{key}/{desk.rank}", json.dumps([*told.splits, told.line]))


def _check_splits(told: Transmission, desk: Desk, call: Call) -> None:
    """Every rank reads what all send and receive, and comes to the same conclusion."""
    key = f"splits/{digest(call.ranks, call.number)}"
    left = desk.store.multi_get([f"{key}/{rank}" for rank in told.ranks])
    sent, received, lines = zip(*map(json.loads, left), strict=True)
    for source, rank in enumerate(told.ranks):
        for target, other in enumerate(told.ranks):
            if sent[source][target] != received[target][source]:
                wrong = f"rank {rank} sends {sent[source][target]} rows to rank {other}, which expects"
                each = zip(told.ranks, sent, received, lines, strict=True)
                calls = [f"rank {r} calls all_to_all sending {s} receiving {t} at {line}" for r, s, t, line in each]
                asked = f"{call_text(told)} at {told.line}"
                raise _mismatch(told, asked, [f"{wrong} {received[target][source]}", *calls])
    before, desk.splits[told.ranks] = desk.splits.get(told.ranks), key
    if before is not None:
        desk.store.delete_key(f"{before}/{desk.rank}")

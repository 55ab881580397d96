"""The exchange of claims over the store that the processes of `torch.distributed` share.

A store has no collectives that could hang, so whoever waits can always say for whom. A *round* is the n-th time that a
set of ranks makes a mesh (or whatever the exchange is for) together. Each rank leaves a few short entries; the last one
to come, or the first whose time is up, writes the one verdict that all others read. Only where that fails does anybody
read what each rank has left.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shardwise.errors import CollectiveError, message
from shardwise.mesh.agreement import Claim, Claims, digest, gather

FIRST_PAUSE = 0.0002
LONGEST_PAUSE = 0.05  # seconds between two looks at the store, in small worlds
PAUSE_PER_RANK = 1e-5  # one server answers everybody
LOOK = 0.25  # seconds after which a rank that waits looks where the missing ones are
GRACE = 5.0  # seconds that whoever decides gets to write the verdict

Said: TypeAlias = tuple[int, str, str]
Verdict: TypeAlias = tuple[str, str] | tuple[dict[str, list[int]], list[tuple[int, str]]]  # agreed, or not


class _Other(NamedTuple):
    """Another round: its key, and the mesh that a rank makes there."""

    key: str
    digest: str
    text: str
    ranks: tuple[int, ...]


class StoreExchange:
    """Brings together the claims of processes; a rank's rounds are counted for each set of ranks.

    ``subject`` says what the claims are about. An exchange for many rounds is made with ``sweeps``: then what a round
    has left in the store goes two rounds later.
    """

    def __init__(self, store: Store, rank: int, subject: str = "mesh", *, sweeps: bool = False) -> None:
        self._store = PrefixStore(f"shardwise/{subject}", store)
        self._rank = rank
        self._subject = subject
        self._rounds: dict[str, int] = {}
        self._left: dict[str, list[_Round]] | None = {} if sweeps else None
        self._lock = threading.Lock()

    def __call__(self, claim: Claim, timeout: float) -> Claims:
        name = digest(claim.ranks)
        with self._lock:
            number = self._rounds[name] = self._rounds.get(name, -1) + 1
        entered = _Round(self._store, f"{name}.{number}", self._rank, claim)
        try:
            claims = entered.meet(timeout)
            if self._left is not None:
                self._sweep(self._left.setdefault(name, []), entered, claims)
            return claims
        except dist.DistError as error:
            raise CollectiveError(
                message(
                    f"the store of torch.distributed cannot be reached to agree on a {self._subject}",
                    asked=claim.text,
                    got=error,
                    do="see whether the process that holds it (rank 0, or the launcher) still runs",
                )
            ) from error

    def _sweep(self, left: list[_Round], entered: _Round, claims: Claims) -> None:
        # All ranks have come to this round, if it ended well: so they have read what the round before has left.
        if len(claims.made) == 1 and not claims.absent:
            while left:
                left.pop().forget()
            left.append(entered)


class _Round:
    def __init__(self, store: Store, key: str, rank: int, claim: Claim) -> None:
        self.store = store
        self.key = key
        self.rank = rank
        self.claim = claim
        self.elsewhere: dict[int, _Other] = {}  # who was found in another round at the last look

    def meet(self, timeout: float) -> Claims:
        watches = self._arrive()
        began = time.monotonic()
        pause, longest = FIRST_PAUSE, LONGEST_PAUSE + PAUSE_PER_RANK * len(self.claim.ranks)
        look = LOOK
        while (verdict := self._verdict(self.key)) is None:
            waited = time.monotonic() - began
            if waited >= timeout + GRACE:
                return self._late()
            if waited >= timeout:
                self._decide(self._late(), [self.key])
            elif watches and waited >= look:
                look *= 2
                self._look()
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return self._read(verdict)

    def _arrive(self) -> bool:
        """Leave this rank's claim; whether it is the one that watches over the round."""
        claim, key, store = self.claim, self.key, self.store
        store.set(f"at/{self.rank}", json.dumps([key, claim.digest]))
        if store.add(f"{key}/said/{claim.digest}", int(self.rank in claim.ranks)) <= 1:
            store.set(f"{key}/text/{claim.digest}", json.dumps([claim.text, claim.ranks]))
        if self.rank not in claim.ranks:
            return True
        store.set(f"{key}/rank/{self.rank}", claim.digest)
        come = store.add(f"{key}/come", 1)
        if come == len(claim.ranks):
            same = store.add(f"{key}/said/{claim.digest}", 0) == come
            self._decide(claim if same else self._late(), [key])
        return come == 1

    def forget(self) -> None:
        """Take out of the store what this rank has left there, and what all have left together."""
        keys = [f"rank/{self.rank}"]
        if self.rank == self.claim.ranks[0]:
            keys += [f"said/{self.claim.digest}", f"text/{self.claim.digest}", "come", "decided", "verdict"]
        for key in keys:
            self.store.delete_key(f"{self.key}/{key}")

    def _decide(self, verdict: Claim | Claims, keys: Sequence[str]) -> None:
        agreed = isinstance(verdict, Claim)
        text = json.dumps(verdict[1:] if agreed else [verdict[0], [*cast(Claims, verdict).absent.items()]])
        for key in keys:
            if self.store.add(f"{key}/decided", 1) == 1:
                self.store.set(f"{key}/verdict", text)

    def _read(self, verdict: Verdict) -> Claims:
        said, rest = verdict
        if isinstance(said, dict):
            return Claims(said, dict(cast("list[tuple[int, str]]", rest)))
        inside = [(rank, said, cast(str, rest)) for rank in self.claim.ranks]
        own = [] if said == self.claim.digest else [self._own()]
        return Claims(gather([*inside, *own]), {})

    def _late(self) -> Claims:
        """What has been said until now."""
        said = self._said(self.key, self.claim.ranks)
        if self.rank not in self.claim.ranks:
            said.append(self._own())
        absent: dict[int, str] = {}
        for rank in sorted({*self.claim.ranks} - {rank for rank, _, _ in said}):
            other = self._other_round(rank)
            absent[rank] = "" if other is None else f"waits for others to make {other.text}"
        return Claims(gather(said), absent)

    def _look(self) -> None:
        """Decide at once if a missing rank waits, in another round, for a rank that waits in this one.

        Seen twice in a row, because a rank that is told the verdict needs a moment to go on.
        """
        found: dict[int, _Other] = {}
        for rank in self.claim.ranks:
            other = None if self._is_here(self.key, rank) else self._other_round(rank)
            if other is not None and any(self._waits_only_here(member, other.key) for member in other.ranks):
                found[rank] = other
        if found and found == self.elsewhere:
            self._decide(self._apart(found), [self.key, *{other.key for other in found.values()}])
        self.elsewhere = found

    def _apart(self, found: dict[int, _Other]) -> Claims:
        """What is said in this round and in the others where missing ranks were found."""
        here = self._said(self.key, self.claim.ranks)
        there = [(rank, other.digest, other.text) for rank, other in found.items()]
        for other in set(found.values()):
            there += self._said(other.key, other.ranks)
        everyone = {claim[0]: claim for claim in [*there, *here, self._own()]}
        absent = {rank: "" for rank in self.claim.ranks if rank not in everyone}
        return Claims(gather(everyone[rank] for rank in sorted(everyone)), absent)

    def _said(self, key: str, ranks: Sequence[int]) -> list[Said]:
        """What the ranks of a mesh that have come to a round have said: rank, digest and text."""
        here = [(rank, self.store.get(f"{key}/rank/{rank}").decode()) for rank in ranks if self._is_here(key, rank)]
        texts = {said: self._text(key, said) for _, said in here}
        return [(rank, said, text[0]) for rank, said in here if (text := texts[said]) is not None]

    def _own(self) -> Said:
        return self.rank, self.claim.digest, self.claim.text

    def _waits_only_here(self, rank: int, other: str) -> bool:
        waits = rank == self.rank or self._is_here(self.key, rank)
        return waits and not self._is_here(other, rank)

    def _is_here(self, key: str, rank: int) -> bool:
        return self.store.check([f"{key}/rank/{rank}"])

    def _other_round(self, rank: int) -> _Other | None:
        """The round in which another rank waits, if it does."""
        key, said = cast("tuple[str, str]", self._load(f"at/{rank}") or (self.key, ""))
        text = None if key == self.key or self._verdict(key) else self._text(key, said)
        return None if text is None else _Other(key, said, text[0], tuple(text[1]))

    def _verdict(self, key: str) -> Verdict | None:
        return cast("Verdict | None", self._load(f"{key}/verdict"))

    def _text(self, key: str, said: str) -> tuple[str, list[int]] | None:
        return cast("tuple[str, list[int]] | None", self._load(f"{key}/text/{said}"))

    def _load(self, key: str) -> object:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

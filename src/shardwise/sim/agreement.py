"""How simulated ranks agree on a mesh: they meet, and the last one to come finds out for all."""

from __future__ import annotations

import functools
import itertools

from shardwise.mesh.agreement import Claim, Claims, Exchange, gather
from shardwise.sim.lockstep import Lockstep


class Round:
    """The n-th time that a set of ranks makes a mesh; done when what follows is known."""

    __slots__ = ("claims", "outcome", "ranks", "waiting")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.claims: dict[int, Claim] = {}
        self.waiting: dict[int, Claim] = {}  # who waits here; also ranks outside the mesh
        self.outcome: Claims | None = None

    @property
    def done(self) -> bool:
        return self.outcome is not None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.claims]

    def waits_for(self, other: Round) -> bool:
        """Whether a rank that is missing here waits in another round."""
        return any(rank in other.waiting for rank in self.missing)

    def text(self, rank: int) -> str:
        """What ``rank`` waits for."""
        return f"{self.waiting[rank].text} (not made by {', '.join(f'rank {other}' for other in self.missing)})"


class Agreements:
    """The rounds of one run."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._rounds: dict[tuple[tuple[int, ...], int], Round] = {}
        self._counts: dict[tuple[int, tuple[int, ...]], int] = {}
        self._at: dict[int, Round] = {}

    def of(self, rank: int) -> Exchange:
        """The exchange of one rank."""
        return functools.partial(self._meet, rank)

    def _meet(self, rank: int, claim: Claim, timeout: float) -> Claims:
        self._lockstep.launch(rank)
        number = self._counts[rank, claim.ranks] = self._counts.get((rank, claim.ranks), -1) + 1
        here = self._at[rank] = self._rounds.setdefault((claim.ranks, number), Round(claim.ranks))
        here.waiting[rank] = claim
        if rank in claim.ranks:
            here.claims[rank] = claim
        if not here.missing:
            here.outcome = Claims(_said(here.claims), {})
        self._break_circles()
        self._lockstep.wait(rank, here)
        del self._at[rank]
        assert here.outcome is not None
        inside = rank in claim.ranks or len(here.outcome.made) > 1
        return here.outcome if inside else Claims(_said({**here.claims, rank: claim}), {})

    def _break_circles(self) -> None:
        """Ranks that make different meshes and wait for each other would wait for ever: tell them."""
        rounds = {id(found): found for found in self._at.values() if not found.done}.values()
        for here, other in itertools.permutations(rounds, 2):
            if here.waits_for(other) and other.waits_for(here) and {*here.ranks, *other.ranks} <= self._at.keys():
                here.outcome = other.outcome = Claims(_said({**here.waiting, **other.waiting}), {})


def _said(claims: dict[int, Claim]) -> dict[str, list[int]]:
    return gather((rank, claim.digest, claim.text) for rank, claim in sorted(claims.items()))

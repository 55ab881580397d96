"""What the ranks of a mesh say that it is, and what follows if they do not say the same.

A rank *claims* a mesh: its ranks, a digest of all that matters, and a text. An `Exchange` brings the claims together;
how, depends on the kind of world.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from shardwise.errors import CollectiveTimeoutError, MeshMismatchError, WorldError, message

SWITCH = "SHARDWISE_MESH_CHECK"
LIMIT = "SHARDWISE_MESH_TIMEOUT"
SECONDS = 60.0


class Claim(NamedTuple):
    """One rank's word on a mesh; ``ranks`` are those of the mesh, in rising order."""

    ranks: tuple[int, ...]
    digest: str
    text: str


class Claims(NamedTuple):
    """Who said what, by text; and what the ranks that did not come do instead, as far as known."""

    made: Mapping[str, Sequence[int]]
    absent: Mapping[int, str]


class Exchange(Protocol):
    """Tells the ranks of a mesh one rank's claim, and that rank what all say, at most ``timeout`` seconds later.

    A rank outside the mesh hears what those inside have agreed on.
    """

    def __call__(self, claim: Claim, timeout: float) -> Claims: ...


def digest(*parts: object) -> str:
    """A short text that is the same in every process, and different for different parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def gather(claims: Iterable[tuple[int, str, str]]) -> dict[str, list[int]]:
    """Ranks by what they say, from triples of rank, digest and text; equal texts with other digests are kept apart."""
    texts: dict[str, str] = {}
    made: dict[str, list[int]] = {}
    for rank, key, text in claims:
        if key not in texts:
            texts[key] = f"{text} (digest {key})" if text in texts.values() else text
        made.setdefault(texts[key], []).append(rank)
    return made


def check_claims(claims: Claims, timeout: float) -> None:
    """Raise if the ranks said different things, or some did not come."""
    said = [f"{ranks_text(ranks)}: {text}" for text, ranks in claims.made.items()]
    absent = [f"{ranks_text([rank])}: {text or 'has not come'}" for rank, text in claims.absent.items()]
    if len(claims.made) > 1:
        raise MeshMismatchError(
            message(
                "the ranks do not agree on the mesh",
                got="\n".join([*said, *absent]),
                do="make the same meshes in the same order on every rank",
            )
        )
    if absent:
        raise CollectiveTimeoutError(
            message(
                f"{ranks_text([*claims.absent])} did not come within {timeout:g} s to make the mesh that others made",
                got="\n".join([*said, *absent]),
                do="make the same meshes in the same order on every rank; to give slow ranks longer, pass timeout= "
                f"or set {LIMIT} (seconds); to make meshes without this check, pass check=False or set {SWITCH}=0",
            )
        )


def is_wanted() -> bool:
    """Whether the environment leaves the check on."""
    return os.environ.get(SWITCH, "1").lower() not in ("0", "false", "off", "no")


def seconds() -> float:
    """How long the ranks wait for each other unless a caller says otherwise."""
    given = os.environ.get(LIMIT)
    if given is None:
        return SECONDS
    try:
        return float(given)
    except ValueError:
        raise WorldError(message(f"{LIMIT} must be a number of seconds", got=repr(given))) from None


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as people write them.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"

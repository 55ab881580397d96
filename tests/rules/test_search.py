"""Searches and scans along cut dims: the answers of one rank, and no gathering of what is searched."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise import Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire

NAN = float("nan")
TIES = torch.randint(0, 4, (7, 5, 2), generator=torch.Generator().manual_seed(1)).float()
SPOILT = TIES.clone()
SPOILT[2, 1, 0] = SPOILT[5, 1, 0] = SPOILT[6, 3, 1] = NAN
GIVEN = {
    "ties": TIES,
    "not a number": SPOILT,
    "few integers": TIES[:2].long(),
    "endless": torch.full_like(TIES, -torch.inf).permute(2, 0, 1).contiguous().permute(1, 2, 0),
}
PLACEMENTS = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (StridedShard(0, 2), Replicate())]


def flat(results) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def steps(x: torch.Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def agrees(function, given: torch.Tensor) -> None:
    """``function`` gives what it gives on one rank, wherever the tensor lies on a mesh of 3 by 2."""
    expected = flat(function(given))

    def body():
        mesh = init_device_mesh("cpu", (3, 2))
        lying = [distribute_tensor(given, mesh, placements) for placements in PLACEMENTS]
        return [[part.full_tensor() for part in flat(function(x))] for x in lying]

    for found in sim.run(body, 6)[0]:
        for part, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(part, wanted, equal_nan=True)
            assert steps(part) == steps(wanted)


SEARCHES = {
    "max.dim": lambda x: tuple(x.max(0)),
    "min.dim": lambda x: tuple(x.min(1, keepdim=True)),
    "argmax": lambda x: x.argmax(0, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all": lambda x: x.argmin(keepdim=True),
    "any": lambda x: (x.any(0), x.any()),
    "all": lambda x: (x.all(1, keepdim=True), x.all()),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=0)),
    "topk": lambda x: x.topk(2, 0).values,
    "median": lambda x: x.median(0).values,
}


@pytest.mark.parametrize(("what", "given"), list(itertools.product(SEARCHES, GIVEN)))
def test_a_search_finds_what_one_rank_finds(what: str, given: str) -> None:
    agrees(SEARCHES[what], GIVEN[given])


SCANS = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0, dtype=torch.float64),
    "logcumsumexp": lambda x: x.float().logcumsumexp(0),
    "cummax": lambda x: tuple(x.cummax(0)),
    "cummin": lambda x: tuple(x.cummin(1)),
}


@pytest.mark.parametrize(("what", "given"), list(itertools.product(SCANS, GIVEN)))
def test_a_scan_takes_up_what_came_before(what: str, given: str) -> None:
    agrees(SCANS[what], GIVEN[given])


SMALL = {
    "argmax": lambda x: x.argmax(0),
    "any": lambda x: x.any(),
    "cumsum": lambda x: x.cumsum(0),
    "var": lambda x: x.var(0),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.parametrize("what", SMALL)
def test_little_is_sent(what: str) -> None:
    def body():
        x = distribute_tensor(torch.rand(64, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        sent = []
        with wire.observing(lambda transmission: sent.append(transmission.bytes)):
            for part in flat(SMALL[what](x)):
                part.full_tensor() if what != "cumsum" else part
        return sum(sent)

    assert max(sim.run(body, 2)) <= 48


def test_a_scan_in_place_keeps_its_placements() -> None:
    def body():
        x = distribute_tensor(TIES, init_device_mesh("cpu", (2,)), [Shard(0)])
        return x.cumsum_(0).placements, x.full_tensor()

    placements, whole = sim.run(body, 2)[1]
    assert placements == (Shard(0),)
    torch.testing.assert_close(whole, TIES.cumsum(0))

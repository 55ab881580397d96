"""Who sends what to whom, against sets of positions."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from redistribute.layouts import coordinates, distributed, dry_mesh, placed, spec_of
from shardwise.redistribute.parcels import Grid, Held, layouts, loads, locate, parcels, traffic, volume
from shardwise.sharding.fitting import intersect
from shardwise.sharding.placement import Placement, Replicate, Shard, StridedShard

STRIDED = StridedShard(0, split_factor=2)
WAYS = [way for way in placed(2, 2, STRIDED) if not any(p.is_partial() for p in way)]
OPEN = (None, None)


def positions(held: Held) -> set[tuple[int, ...]]:
    """The elements of a box, one by one."""
    return set(itertools.product(*([place for low, high in dim for place in range(low, high)] for dim in held)))


def grids(sizes: tuple[int, ...], parts: tuple[int, int]) -> list[Grid]:
    return [Grid(sizes, parts, *pair, OPEN) for pair in itertools.product(WAYS, repeat=2)]


def test_intersections_hold_what_lies_in_both() -> None:
    first, second = ((0, 3), (5, 9), (9, 11)), ((1, 2), (4, 7), (10, 20))
    positions = [{place for low, high in side for place in range(low, high)} for side in (first, second)]
    both = intersect(first, second)
    assert [place for low, high in both for place in range(low, high)] == sorted(positions[0] & positions[1])


def test_positions_are_counted_within_what_is_held() -> None:
    assert locate(((1, 2), (8, 9)), ((0, 3), (7, 9))) == ((1, 2), (4, 5))
    assert locate(((2, 3), (7, 9)), ((0, 3), (7, 9))) == ((2, 5),)


@pytest.mark.parametrize("sizes", [(6, 4), (5, 3), (1, 2)], ids=str)
def test_layouts_are_those_of_the_dense_tensor(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(prod(sizes)).view(sizes)
    for way in WAYS:
        dense = distributed(whole, spec_of(dry_mesh((2, 3)), way, sizes))
        held, _ = layouts(Grid(sizes, (2, 3), way, way, OPEN))
        for coordinate, own in zip(coordinates((2, 3)), held, strict=True):
            there = torch.isin(whole, dense[coordinate].contiguous()).nonzero()
            assert positions(own) == {tuple(place) for place in there.tolist()}


@pytest.mark.parametrize("sizes", [(8, 8), (5, 3)], ids=str)
def test_every_rank_receives_what_it_needs_and_lacks_once(sizes: tuple[int, ...]) -> None:
    for grid in grids(sizes, (2, 3)):
        have, want = layouts(grid)
        sent, received = loads(have, want)
        lacking = [len(positions(wanted) - positions(held)) for held, wanted in zip(have, want, strict=True)]
        assert received == lacking
        assert sum(sent) == sum(received)
        packed = [parcels(grid, index) for index in range(6)]
        assert [sum(box.volume for _, box in own.outgoing) for own in packed] == sent
        for index, own in enumerate(packed):
            assert [box.volume for peer, box in own.incoming] == [
                box.volume for peer, _ in own.incoming for to, box in packed[peer].outgoing if to == index
            ]


def test_replicas_share_the_work() -> None:
    cut, whole = Shard(0), Replicate()
    have, want = layouts(Grid((16, 4), (4, 4), (whole, cut), (cut, whole), OPEN))
    sent, received = loads(have, want)
    assert max(sent) == max(received) == volume(want[0])


@pytest.mark.parametrize("sizes", [(12, 60), (24, 6), (7, 36)], ids=str)
def test_traffic_grows_with_the_sizes(sizes: tuple[int, ...]) -> None:
    for grid in grids(sizes, (2, 3)):
        sent, received = loads(*layouts(grid))
        assert traffic(grid) == (max(sent), max(received)), grid


def test_a_group_may_stand_still_on_an_axis() -> None:
    placements: tuple[tuple[Placement, ...], ...] = ((Replicate(), Shard(0)), (Shard(0), Replicate()))
    for place in range(2):
        have, want = layouts(Grid((8, 2), (2, 4), *placements, (place, None)))
        assert len(have) == len(want) == 4
        assert set(want) == {(((4 * place, 4 * place + 4),), ((0, 2),))}

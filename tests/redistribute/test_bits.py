"""What is said of cuts by powers of two in bits, against counting element by element."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import torch

from redistribute.layouts import distributed, dry_mesh, spec_of
from shardwise.redistribute import bits
from shardwise.redistribute.parcels import Grid, layouts, loads
from shardwise.sharding.placement import Placement, RaggedShard, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec


def drawn(draw: random.Random, sides: int) -> Iterator[list[Spec]]:
    """Layouts, as many as ``sides``, of one tensor, of which all sizes are powers of two."""
    while True:
        parts = tuple(draw.choice([1, 2, 2, 4]) for _ in range(draw.choice([1, 2, 2, 3])))
        sizes = tuple(draw.choice([2, 4, 8]) for _ in range(draw.choice([1, 2])))
        one = [
            Replicate(),
            *(cut for dim in range(len(sizes)) for cut in (Shard(dim), Shard(dim), StridedShard(dim, 2))),
        ]
        lying: list[list[Placement]] = [[draw.choice(one) for _ in parts] for _ in range(sides)]
        if all(bits.told(sizes, parts, side) is not None for side in lying):
            yield [spec_of(dry_mesh(parts), side, sizes) for side in lying]


def read(spec: Spec) -> bits.Told:
    found = bits.told(spec.shape, spec.mesh.shape, spec.placements)
    assert found is not None
    return found


def test_loads_are_those_of_the_messages() -> None:
    draw = random.Random(0)
    for _, (src, dst) in zip(range(150), drawn(draw, 2), strict=False):
        apart = [axis for axis, own in enumerate(src.placements) if own.is_replicate() and draw.random() < 0.4]
        most = (0, 0)
        for place in product(*map(range, src.mesh.shape)):
            fixed = tuple(at if axis in apart else None for axis, at in enumerate(place))
            sent, received = loads(*layouts(Grid(src.shape, src.mesh.shape, src.placements, dst.placements, fixed)))
            most = max(most[0], *sent), max(most[1], *received)
        assert bits.traffic(read(src), read(dst), src.mesh.shape, apart) == most, (src, dst, apart)


def elements(spec: Spec) -> list[set[int]]:
    whole = torch.arange(prod(spec.shape)).view(spec.shape)
    return [set(local.flatten().tolist()) for local in distributed(whole, spec).values()]


def test_what_lies_between() -> None:
    draw, found = random.Random(1), []
    for _, (start, middle, goal) in zip(range(200), drawn(draw, 3), strict=False):
        ends = zip(start.placements, middle.placements, goal.placements, strict=True)
        mixed = middle.with_placements([draw.choice([one, one, other, other, own]) for one, own, other in ends])
        sets = zip(elements(start), elements(mixed), elements(goal), strict=True)
        expected = all(had & needs <= has <= had | needs for had, has, needs in sets)
        assert bits.is_between(read(start), read(mixed), read(goal)) == expected, (start, mixed, goal)
        found.append(expected)
    assert {True, False} == set(found)


def test_other_cuts_are_not_told() -> None:
    for sizes, parts, cut in [((6,), (2,), Shard(0)), ((8,), (3,), Shard(0)), ((2,), (4,), Shard(0))]:
        assert bits.told(sizes, parts, [cut]) is None
    assert bits.told((8,), (2,), [StridedShard(0, 3)]) is bits.told((8,), (2,), [RaggedShard(0, (4, 4))]) is None

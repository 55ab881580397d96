"""Placements found from the parts of the ranks, against cutting with placements that are known."""

from __future__ import annotations

from itertools import product

import pytest

from redistribute.layouts import coordinates, dry_mesh, spec_of
from shardwise.sharding.fitting import fit, intersect, merged, select, volume
from shardwise.sharding.placement import Owned, RaggedShard, Shard, StridedShard

ONE = [Shard(0), Shard(1), RaggedShard(0, (1, 4)), RaggedShard(1, (0, 4)), StridedShard(1, split_factor=2)]


def parts_of(spec):
    boxes = {at: tuple(merged(spec.intervals(dim, at)) for dim in (0, 1)) for at in coordinates(spec.mesh.shape)}
    return {at: box if volume(box) else None for at, box in boxes.items()}


@pytest.mark.parametrize("placements", list(product(ONE, repeat=2)), ids=str)
def test_placements_are_found_from_the_parts_that_they_cut(placements) -> None:
    spec = spec_of(dry_mesh((2, 2)), placements, (5, 4))
    found = fit(spec.shape, (2, 2), parts_of(spec), exact=True)
    assert found is not None
    assert parts_of(spec.with_placements(found)) == parts_of(spec)


def test_parts_that_no_placement_cuts_are_not_described() -> None:
    diagonal = {(0,): (((0, 1),), ((0, 1),)), (1,): (((1, 2),), ((1, 2),))}
    assert fit((2, 2), (2,), diagonal, exact=True) is None
    assert fit((2, 2), (2,), diagonal, exact=False) == (Shard(0),)


def test_a_tensor_without_dims_lies_on_one_rank() -> None:
    assert fit((), (3,), {(0,): None, (1,): (), (2,): None}, exact=True) == (Owned(1),)


def test_the_dim_that_comes_first_is_tried_first() -> None:
    parts = {(0,): None, (1,): (((0, 3),), ((0, 2),))}
    assert fit((3, 2), (2,), parts, exact=True) == (RaggedShard(0, (0, 3)),)
    assert fit((3, 2), (2,), parts, exact=True, dims=(1, 0)) == (RaggedShard(1, (0, 2)),)


def test_intervals() -> None:
    assert intersect(((0, 4), (6, 8)), ((2, 7),)) == ((2, 4), (6, 7))
    assert select(((2, 4), (6, 9)), ((1, 3),)) == ((3, 4), (6, 7))
    assert merged([(0, 2), (2, 3), (5, 5), (6, 7)]) == ((0, 3), (6, 7))

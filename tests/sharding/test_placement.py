"""Placements: their arithmetic against torch.chunk, their notation, and that they are values."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlacementError
from shardwise.sharding.placement import REDUCE_OPS, Cut, Partial, Placement, Replicate, Shard, StridedShard

ALL = [Replicate(), Shard(0), Shard(-1), StridedShard(1, split_factor=3), Partial(), Partial("max")]


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_a_placement_is_a_value(placement: Placement) -> None:
    assert copy.copy(placement) is copy.deepcopy(placement) is pickle.loads(pickle.dumps(placement)) is placement


def test_equal_fields_are_one_object_and_classes_differ() -> None:
    assert Shard(1) is Shard(dim=1)
    assert Partial("sum") is Partial()
    assert len({Replicate(), Shard(0), Shard(1), StridedShard(0), Partial()}) == 5
    assert Shard(numpy.int64(1)) is Shard(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "placement, short, long",
    [
        (Replicate(), "R", "Replicate()"),
        (Shard(1), "S(1)", "Shard(dim=1)"),
        (Partial("avg"), "P(avg)", "Partial(avg)"),
        (StridedShard(0, split_factor=2), "_S(0, 2)", "StridedShard(dim=0, split_factor=2)"),
    ],
)
def test_the_notation_is_torchs(placement: Placement, short: str, long: str) -> None:
    assert (str(placement), repr(placement)) == (short, long)


def test_questions() -> None:
    assert [Shard(1).is_shard(dim) for dim in (None, 1, 0)] == [True, True, False]
    assert [Partial("max").is_partial(op) for op in (None, "max", "sum")] == [True, True, False]
    answers = [(p.is_replicate(), p.is_shard(), p.is_partial()) for p in (Replicate(), Shard(0), Partial())]
    assert answers == [(True, False, False), (False, True, False), (False, False, True)]
    assert not StridedShard(0).is_shard()


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_shards_follow_torch_chunk(size: int, parts: int) -> None:
    whole = torch.arange(size)
    chunks = [piece.tolist() for piece in whole.chunk(parts)]
    taken = [Shard(0).take(whole, parts, index).tolist() for index in range(parts)]
    assert taken == chunks + [[]] * (parts - len(chunks)) if size else not any(taken)


@given(size=st.integers(0, 40), parts=st.integers(1, 6), factor=st.integers(1, 6))
def test_strided_shards_cut_each_block(size: int, parts: int, factor: int) -> None:
    whole, cut = torch.arange(size), StridedShard(0, split_factor=factor)
    blocks = [[*block.chunk(parts), *[block[:0]] * parts][:parts] for block in whole.chunk(factor)]
    for index in range(parts):
        expected = [element for block in blocks for element in block[index].tolist()]
        assert cut.take(whole, parts, index).tolist() == expected


CUTS = [Shard(0), *(StridedShard(0, split_factor=factor) for factor in (1, 2, 3, 5))]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_parts_are_disjoint_and_make_the_whole(cut: Cut) -> None:
    for size, parts in itertools.product(range(20), range(1, 6)):
        held = [cut.intervals(size, parts, index) for index in range(parts)]
        positions = [place for intervals in held for low, high in intervals for place in range(low, high)]
        assert sorted(positions) == list(range(size))
        for index, intervals in enumerate(held):
            assert cut.local_size(size, parts, index) == sum(high - low for low, high in intervals)
            edges = [edge for interval in intervals for edge in interval]
            assert edges == sorted(edges)


def test_torchs_static_method_gives_size_and_offset() -> None:
    assert [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)] == [(2, 0), (2, 2), (1, 4), (0, 5)]


def test_a_flattened_later_dim_becomes_a_strided_shard() -> None:
    """What Shard(1) of an (a, b) matrix holds is StridedShard(0, split_factor=a) of the flat tensor."""
    matrix = torch.arange(3 * 8).view(3, 8)
    for index in range(4):
        flat = StridedShard(0, split_factor=3).take(matrix.flatten(), 4, index)
        assert flat.tolist() == Shard(1).take(matrix, 4, index).flatten().tolist()


def test_a_part_in_one_piece_is_a_view() -> None:
    whole = torch.zeros(4, 6)
    Shard(1).take(whole, 2, 1).fill_(1)
    assert whole.sum(0).tolist() == [0, 0, 0, 4, 4, 4]


def test_the_same_cut_of_another_dim() -> None:
    assert Shard(-1).at(2) is Shard(2)
    assert StridedShard(0, split_factor=3).at(1) is StridedShard(1, split_factor=3)


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
def test_reductions_are_those_of_torch(reduce_op: str) -> None:
    assert Partial(reduce_op).reduce_op == reduce_op


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlacementError, match="no such reduction") as raised:
        Partial("median")
    assert "sum, avg" in str(raised.value)
    with pytest.raises(PlacementError, match="at least 1"):
        StridedShard(0, split_factor=0)
    with pytest.raises(TypeError):
        Shard(1.5)  # type: ignore[arg-type]

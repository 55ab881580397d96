"""What each step makes of a spec, how it prints, and the bytes that it counts."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from redistribute.layouts import distributed, dry_mesh, placed, spec_of
from shardwise.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    direct,
    exchanges,
    involved,
    largest_nbytes,
    local_sizes,
    reduction,
)
from shardwise.sharding.placement import Cut, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

STRIDED = StridedShard(0, split_factor=2)
TP = (1,)
STEPS: list[tuple[Step, Placement, str]] = [
    (AllGather(TP, "tp", (Shard(0),)), Shard(0), "all_gather(tp, dim 0)"),
    (AllGather(TP, "tp", (STRIDED,)), STRIDED, "all_gather(tp, dim 0/2)"),
    (ReduceScatter(TP, "tp", (Shard(1),), "sum"), Partial(), "reduce_scatter(tp, dim 1, sum)"),
    (AllReduce(TP, "tp", "max"), Partial("max"), "all_reduce(tp, max)"),
    (AllToAll(TP, "tp", (Shard(0),), (Shard(1),)), Shard(0), "all_to_all(tp, dim 0 -> dim 1)"),
    (Slice(TP, "tp", (Shard(1),)), Replicate(), "slice(tp, dim 1)"),
    (MakePartial(TP, "tp", "sum"), Replicate(), "make_partial(tp, sum)"),
]


@pytest.mark.parametrize("step, before, text", STEPS, ids=lambda item: str(item))
def test_a_step_is_a_value_that_prints_as_what_it_does(step: Step, before: Placement, text: str) -> None:
    assert str(step) == repr(step) == text
    assert copy.deepcopy(step) is pickle.loads(pickle.dumps(step)) is step


@pytest.mark.parametrize("step, before, text", STEPS, ids=lambda item: str(item))
def test_a_step_changes_its_axis_only(step: Step, before: Placement, text: str) -> None:
    spec = spec_of(dry_mesh((2, 4)), [Shard(1), before], (8, 8))
    after = step.after(spec)
    assert after.placements == (Shard(1), *step.targets)
    assert (after.mesh, after.meta) == (spec.mesh, spec.meta)


@pytest.mark.parametrize("step, before, text", [item for item in STEPS if item[1] is not STRIDED], ids=str)
def test_the_direct_step_between_two_placements(step: Step, before: Placement, text: str) -> None:
    spec = spec_of(dry_mesh((2, 4)), [Replicate(), before], (8, 8))
    assert direct(spec, 1, step.targets[0]) is step


def test_bytes_are_those_of_the_ring_algorithms() -> None:
    mesh, full = dry_mesh((2, 4)), 8 * 8 * 4
    spec = [spec_of(mesh, [Replicate(), placement], (8, 8)) for placement in (Shard(0), Partial(), Replicate())]
    assert AllGather((1,), "tp", (Shard(0),)).bytes(spec[0]) == 3 * full // 4
    assert AllToAll(TP, "tp", (Shard(0),), (Shard(1),)).bytes(spec[0]) == 3 * full // 16
    assert ReduceScatter(TP, "tp", (Shard(1),), "sum").bytes(spec[1]) == 3 * full // 4
    assert AllReduce(TP, "tp", "sum").bytes(spec[1]) == 2 * 3 * full // 4
    assert Slice(TP, "tp", (Shard(1),)).bytes(spec[2]) == MakePartial(TP, "tp", "sum").bytes(spec[2]) == 0


@pytest.mark.parametrize("shape", [(5, 3), (1, 9), (0, 4), (8, 6)], ids=str)
def test_the_largest_local_tensor_is_that_of_some_rank(shape: tuple[int, ...]) -> None:
    strided = StridedShard(0, split_factor=3)
    for placements in placed(2, 2, STRIDED, strided):
        spec = spec_of(dry_mesh((2, 3)), placements, shape)
        locals_ = distributed(torch.zeros(shape), spec).values()
        assert largest_nbytes(spec) == 4 * max(local.numel() for local in locals_), spec


def test_a_dim_that_a_later_axis_cuts_too_has_no_direct_step() -> None:
    nested = spec_of(dry_mesh((2, 4)), [Shard(0), Shard(0)], (8, 8))
    assert direct(nested, 0, Replicate()) is None
    assert direct(nested.with_placements([Replicate(), Shard(0)]), 0, Shard(0)) is None
    assert direct(nested, 1, Replicate()) is AllGather((1,), "tp", (Shard(0),))
    single = spec_of(dry_mesh((2, 1)), [Shard(0), Shard(0)], (8, 8))
    assert direct(single, 0, Replicate()) is AllGather((0,), "dp", (Shard(0),))


def test_a_reduction_waits_for_one_of_another_kind_on_a_later_axis() -> None:
    mesh = dry_mesh((2, 4))
    for outer, inner in itertools.product(("sum", "avg", "max", "product"), repeat=2):
        spec = spec_of(mesh, [Partial(outer), Partial(inner)], (8, 8))
        together = outer == inner or {outer, inner} == {"sum", "avg"}
        assert (direct(spec, 0, Replicate()) is not None) == together, spec
        assert direct(spec, 1, Replicate()) is AllReduce(TP, "tp", inner)


@pytest.mark.parametrize("cut", [Shard(0), STRIDED, StridedShard(0, split_factor=3)], ids=str)
def test_local_sizes_are_those_of_each_rank(cut: Cut) -> None:
    for size, parts in itertools.product(range(14), range(1, 5)):
        sizes = local_sizes(cut, size, parts)
        assert list(sizes) == [cut.local_size(size, parts, index) for index in range(parts)]
        assert sum(sizes) == size


def test_uneven_parts_are_exchanged_not_padded() -> None:
    spec = spec_of(dry_mesh((4,)), [Shard(0)], (5, 3))
    step = direct(spec, 0, Replicate())
    assert step is AllToAll((0,), "dp", (Shard(0),), (Replicate(),))
    assert step.traffic(spec) == (4 * 3 * 3 * 2, 4 * 3 * 5)  # 2 rows to 3 ranks; 5 rows by the one that has none
    assert AllGather((0,), "dp", (Shard(0),)).traffic(spec) == step.traffic(spec)


def test_one_step_over_several_axes() -> None:
    spec = spec_of(dry_mesh((2, 4)), [Shard(0), Shard(0)], (8, 8))
    (gather,) = exchanges(spec, spec.with_placements([Replicate(), Replicate()]))
    assert str(gather) == "all_gather(dp_tp, dim 0, dim 0)"
    assert gather.bytes(spec) == 7 * 8 * 4
    pending = spec.with_placements([Partial(), Partial()])
    assert reduction(pending, (0, 1), (Replicate(), Replicate())) is AllReduce((0, 1), "dp_tp", "sum")
    scatter = reduction(pending, (0, 1), (Shard(1), Shard(0)))
    assert str(scatter) == "reduce_scatter(dp_tp, dim 1, dim 0, sum)"
    assert reduction(pending, (0, 1), (Shard(1), Replicate())) is None


def test_an_exchange_takes_later_cuts_of_the_same_dim_along() -> None:
    mesh = dry_mesh((2, 2, 2))
    spec = spec_of(mesh, [Replicate(), Shard(1), Shard(0)], (8, 8))
    after = spec.with_placements([Shard(0), Shard(1), Shard(0)])
    assert involved(spec, after) == (0, 2)
    assert involved(spec, spec.with_placements([Shard(1), Shard(1), Shard(0)])) == (0, 1)
    assert involved(spec, spec.with_placements([Replicate(), Shard(1), Replicate()])) == (2,)


def test_replicas_may_be_served_apart() -> None:
    spec = spec_of(dry_mesh((2, 4)), [Replicate(), Shard(0)], (8, 8))
    together, apart = exchanges(spec, spec.with_placements([Shard(0), Replicate()]))
    assert (str(together), str(apart)) == (
        "all_to_all(dp_tp, R S(0) -> S(0) R)",
        "all_to_all(tp, R S(0) -> S(0) R)",
    )
    assert (together.ranks(spec), apart.ranks(spec)) == (8, 4)
    assert together.traffic(spec)[1] == apart.traffic(spec)[1] == 4 * 8 * 4  # 4 of 8 rows, those not held


@pytest.mark.parametrize("size", [6, 8, 12, 15])
def test_only_parts_of_one_size_are_gathered(size: int) -> None:
    mesh = dry_mesh((2, 2))
    cuts = [Shard(0), *(StridedShard(0, split_factor=blocks) for blocks in (2, 3, 4)), RaggedShard(0, (1, 2))]
    for pair in itertools.product(cuts, repeat=2):
        spec = spec_of(mesh, pair, (size, 2))
        held = {spec.local_shape(coordinate) for coordinate in itertools.product(range(2), repeat=2)}
        for step in exchanges(spec, spec.with_placements([Replicate()] * 2)):
            assert isinstance(step, AllToAll) or len(held) == 1, (spec, held)

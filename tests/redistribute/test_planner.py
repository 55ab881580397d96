"""Plans against exhaustive search, and what they may never do."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from math import inf

import pytest
import torch

from redistribute.layouts import dry_mesh, placed, spec_of
from shardwise.errors import RedistributeError
from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute import planner
from shardwise.redistribute.planner import moved_bytes, plan, price, seconds, stages
from shardwise.redistribute.steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceScatter, Slice, Step
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec

STRIDED = StridedShard(0, split_factor=2)
SMALL, LARGE, UNEVEN = (12, 12), (6000, 6000), (5, 5_000_001)


def asked(mesh: DeviceMesh, shape: tuple[int, ...], *more: Placement) -> list[tuple[Spec, Spec]]:
    """Pairs of specs: all of them, or a thousand where there are more."""
    ways = [spec_of(mesh, placements, shape) for placements in placed(len(shape), mesh.ndim, *more)]
    pairs = list(itertools.product(ways, repeat=2))
    return pairs[:: 1 + len(pairs) // 1000]


def every_step(spec: Spec, placements: list[Placement]) -> Iterator[Step]:
    """All steps that are possible from ``spec``, by the law that a cut dim and its pieces nest from left to right."""
    for axis, (here, name) in enumerate(zip(spec.placements, spec.mesh.axis_names, strict=True)):
        later = {placement.dim for placement in spec.placements[axis + 1 :] if isinstance(placement, Cut)}
        for there in placements:
            if there is here or {place.dim for place in (here, there) if isinstance(place, Cut)} & later:
                continue
            if isinstance(here, Cut):
                if isinstance(there, Cut):
                    yield AllToAll(axis, name, here, there)
                elif there.is_replicate():
                    yield AllGather(axis, name, here)
            elif here.is_partial():
                yield AllReduce(axis, name, "sum")
                if isinstance(there, Cut):
                    yield ReduceScatter(axis, name, there, "sum")
            else:
                yield Slice(axis, name, there) if isinstance(there, Cut) else MakePartial(axis, name, "sum")


def cheapest_from(src: Spec, placements: list[Placement], uncut: frozenset[int]) -> dict[Spec, float]:
    """What it costs at least to reach each spec, by relaxing every step until nothing gets cheaper."""
    best, fresh = {src: 0.0}, [src]
    while fresh:
        spec = fresh.pop()
        for step in every_step(spec, placements):
            after, total = step.after(spec), best[spec] + seconds(step, spec)
            allowed = step.axis not in uncut or not isinstance(step.target, Cut)
            if allowed and total < best.get(after, inf) - 1e-15:
                best[after] = total
                fresh.append(after)
    return best


@pytest.mark.parametrize("shape", [SMALL, LARGE, UNEVEN], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3), (4, 2)], ids=str)
def test_no_sequence_of_steps_is_cheaper(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    placements: list[Placement] = [Replicate(), Shard(0), Shard(1), STRIDED, Partial()]
    found: dict[tuple[Spec, frozenset[int]], dict[Spec, float]] = {}
    for src, dst in asked(dry_mesh(mesh_shape), shape, STRIDED):
        ends = enumerate(zip(src.placements, dst.placements, strict=True))
        key = src, frozenset(axis for axis, pair in ends if stays_uncut(*pair))
        if key not in found:
            found[key] = cheapest_from(src, placements, key[1])
        assert price(src, dst) == pytest.approx(found[key][dst], rel=1e-9), (src, dst, plan(src, dst))


def stays_uncut(before: Placement, after: Placement) -> bool:
    """Whether a cut of the axis could only be one that is undone later."""
    return before.is_replicate() and not isinstance(after, Cut)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 3), (2, 2, 2)], ids=str)
def test_never_dearer_than_to_replicate_and_slice(mesh_shape: tuple[int, ...]) -> None:
    everything = [Replicate()] * len(mesh_shape)
    for src, dst in asked(dry_mesh(mesh_shape), (7, 6)):
        whole = src.with_placements(everything)
        assert price(src, dst) <= price(src, whole) + price(whole, dst) + 1e-12, (src, dst)


@pytest.mark.parametrize("mesh_shape", [(2,), (1,), (2, 3), (2, 2, 2)], ids=str)
def test_a_plan_ends_where_it_is_to_end(mesh_shape: tuple[int, ...]) -> None:
    for src, dst in asked(dry_mesh(mesh_shape), (7, 6), STRIDED):
        last = src
        for spec, step in stages(src, plan(src, dst)):
            last = step.after(spec)
        ends = zip(last.placements, dst.placements, mesh_shape, strict=True)
        assert all(here is there or parts == 1 for here, there, parts in ends), (src, dst)


@pytest.mark.parametrize(
    "before, after, text",
    [
        (Shard(0), Replicate(), "all_gather(tp, dim 0)"),
        (Partial(), Replicate(), "all_reduce(tp, sum)"),
        (Partial("max"), Shard(1), "reduce_scatter(tp, dim 1, max)"),
        (Shard(0), Shard(1), "all_to_all(tp, dim 0 -> dim 1)"),
        (Shard(0), STRIDED, "all_to_all(tp, dim 0 -> dim 0/2)"),
        (Replicate(), Shard(1), "slice(tp, dim 1)"),
        (Replicate(), Partial("avg"), "make_partial(tp, avg)"),
        (Shard(1), Partial(), "all_gather(tp, dim 1) make_partial(tp, sum)"),
    ],
)
def test_a_change_on_one_axis(before: Placement, after: Placement, text: str) -> None:
    for other in (Replicate(), Shard(2)):
        src = spec_of(dry_mesh((2, 4)), [other, before], (8, 8, 8))
        assert " ".join(map(str, plan(src, src.with_placements([other, after])))) == text


def test_slices_come_before_gathers() -> None:
    src = spec_of(dry_mesh((2, 4)), [Shard(0), Replicate()], (8, 8))
    steps = plan(src, src.with_placements([Replicate(), Shard(1)]))
    assert list(map(str, steps)) == ["slice(tp, dim 1)", "all_gather(dp, dim 0)"]


def test_a_price_is_zero_only_where_nothing_is_done() -> None:
    for mesh_shape in ((1, 2), (2, 2)):
        for src, dst in asked(dry_mesh(mesh_shape), (4, 4)):
            ends = zip(src.placements, dst.placements, mesh_shape, strict=True)
            nothing = all(here is there or parts == 1 for here, there, parts in ends)
            assert (price(src, dst) == 0.0) == nothing == (plan(src, dst) == ())


def test_a_price_grows_with_the_bytes() -> None:
    mesh = dry_mesh((2, 2))
    for before, after in itertools.product(placed(2, 2), repeat=2):
        ends = [(spec_of(mesh, before, (size, size)), spec_of(mesh, after, (size, size))) for size in (4, 64, 4096)]
        prices = [price(*pair) for pair in ends]
        assert prices == sorted(prices)
        assert [moved_bytes(*pair) == 0 for pair in ends] == [prices[0] < planner.LATENCY] * 3


def test_a_local_step_is_far_cheaper_than_a_message() -> None:
    src = spec_of(dry_mesh((2,)), [Replicate()], (1,))
    sliced = price(src, src.with_placements([Shard(0)]))
    assert 0 < sliced < price(src.with_placements([Shard(0)]), src) / 100


def test_one_block_is_no_blocks() -> None:
    src = spec_of(dry_mesh((2,)), [StridedShard(0, split_factor=1)], (4,))
    assert plan(src, src.with_placements([Shard(0)])) == ()


@pytest.mark.parametrize("before, after", [("sum", "max"), ("sum", "avg"), ("min", "product")])
def test_a_pending_reduction_cannot_become_another(before: str, after: str) -> None:
    src = spec_of(dry_mesh((2, 2)), [Shard(0), Partial(before)], (4, 4))
    with pytest.raises(RedistributeError, match=rf"pending {before} over axis tp cannot become a {after}") as raised:
        plan(src, src.with_placements([Shard(0), Partial(after)]))
    assert f"f32[4@dp, 4]{{{before}@tp}}" in str(raised.value)


@pytest.mark.parametrize(
    "reduce_op, dtype",
    [("avg", torch.int64), ("avg", torch.bool), ("max", torch.complex64), ("bor", torch.float32)],
)
def test_a_reduction_that_the_dtype_does_not_have(reduce_op: str, dtype: torch.dtype) -> None:
    pending = spec_of(dry_mesh((2,)), [Partial(reduce_op)], (4,), dtype)
    for placement in (Replicate(), Shard(0)):
        with pytest.raises(RedistributeError, match=f"no {reduce_op} of"):
            plan(pending, pending.with_placements([placement]))
    with pytest.raises(RedistributeError, match=f"no {reduce_op} of"):
        plan(pending.with_placements([Replicate()]), pending)


def test_only_placements_can_change() -> None:
    src = spec_of(dry_mesh((2,)), [Shard(0)], (4,))
    others = [spec_of(dry_mesh((3,)), [Shard(0)], (4,)), spec_of(src.mesh, [Shard(0)], (5,))]
    others.append(spec_of(src.mesh, [Shard(0)], (4,), torch.float64))
    for dst in others:
        with pytest.raises(RedistributeError, match="changes placements, not"):
            plan(src, dst)


def test_plans_do_not_depend_on_the_process() -> None:
    """Where hashes of strings, addresses and the order of calls differ, the plans are the same all the same."""
    program = (
        "from redistribute.layouts import dry_mesh; from redistribute.test_planner import asked, plan\n"
        "print([plan(*pair) for pair in asked(dry_mesh((2, 2)), (5, 6))[::-1]][::-1])"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    other = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, timeout=100
    )
    assert other.stdout.decode() == f"{[plan(*pair) for pair in asked(dry_mesh((2, 2)), (5, 6))]}\n"

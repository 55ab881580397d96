"""Plans against exhaustive search, and what they may never do."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from math import inf, prod

import pytest
import torch

from redistribute.layouts import distributed, dry_mesh, placed, spec_of
from shardwise.errors import RedistributeError
from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute import search
from shardwise.redistribute.cost import LOCAL, seconds
from shardwise.redistribute.parcels import Held, common, volume
from shardwise.redistribute.planner import moved_bytes, plan, price, stages
from shardwise.redistribute.steps import MakePartial, Step, exchanges, name_of, reduction
from shardwise.redistribute.topology import LATENCY, Topology
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec

STRIDED = StridedShard(0, split_factor=2)


def asked(mesh: DeviceMesh, shape: tuple[int, ...], *more: Placement) -> list[tuple[Spec, Spec]]:
    """Pairs of specs: all of them, or a thousand where there are more."""
    ways = [spec_of(mesh, placements, shape) for placements in placed(len(shape), mesh.ndim, *more)]
    pairs = list(itertools.product(ways, repeat=2))
    return pairs[:: 1 + len(pairs) // 1000]


def every_step(spec: Spec, ways: list[Spec]) -> Iterator[Step]:
    """All steps that are possible from ``spec``: any exchange, and any reduction over any axes."""
    for after in ways:
        changed = [axis for axis, here in enumerate(spec.placements) if here is not after.placements[axis]]
        sources, targets = ([side.placements[axis] for axis in changed] for side in (spec, after))
        axes = tuple(changed)
        if not any(placement.is_partial() for placement in (*sources, *targets)):
            yield from exchanges(spec, after) if axes else ()
        elif all(placement.is_partial() for placement in sources):
            step = None if any(p.is_partial() for p in targets) else reduction(spec, axes, tuple(targets))
            yield from () if step is None else (step,)
        elif all(p.is_replicate() for p in sources) and all(p.is_partial() for p in targets):
            yield MakePartial(axes, name_of(spec, axes), "sum")


Edge = tuple[Spec, float, frozenset[int]]  # where a step leads, what it costs, the axes that it cuts


def edges_from(spec: Spec, ways: list[Spec], worth: Topology) -> list[Edge]:
    found = []
    for step in every_step(spec, ways):
        cuts = [axis for axis, end in zip(step.axes, step.targets, strict=True) if isinstance(end, Cut)]
        found.append((step.after(spec), cost(step, spec, worth), frozenset(cuts)))
    return found


class Edges(dict[Spec, list[Edge]]):
    """The steps from each spec, found when they are asked for."""

    def __init__(self, ways: list[Spec], worth: Topology) -> None:
        self.ways, self.worth = ways, worth

    def __missing__(self, spec: Spec) -> list[Edge]:
        self[spec] = edges_from(spec, self.ways, self.worth)
        return self[spec]


def cheapest_from(src: Spec, edges: dict[Spec, list[Edge]], uncut: frozenset[int]) -> dict[Spec, float]:
    """What it costs at least to reach each spec, by relaxing every step until nothing gets cheaper."""
    best, fresh = {src: 0.0}, [src]
    while fresh:
        spec = fresh.pop()
        for after, more, cuts in edges[spec]:
            total = best[spec] + more
            if not cuts & uncut and total < best.get(after, inf) * (1 - 1e-12):
                best[after] = total
                fresh.append(after)
    return best


def cost(step: Step, spec: Spec, worth: Topology) -> float:
    return seconds(step, spec, worth) if step.bytes(spec) else 0.0


BYTES = Topology(1.0, 0.0)  # where the seconds are the bytes


@pytest.mark.parametrize("worth", [BYTES, Topology()], ids=["bytes", "seconds"])
@pytest.mark.parametrize(
    "mesh_shape, shape, sample",
    [((2, 2), (4096,), 0), ((2, 2), (64, 64), 0), ((2, 4), (4096, 4096), 0), ((2, 4), (16, 8, 64), 0),
     ((2, 2, 2), (4096,), 0), ((2, 2, 2), (64, 64), 60), ((2, 2, 2), (64, 64, 64), 30),
     ((2, 2), (7,), 0), ((2, 2), (5, 3), 0), ((2, 2, 2), (9,), 60), ((2, 2), (3, 5, 2), 0), ((2, 4), (7, 4), 0),
     ((2, 4), (3, 5, 2), 100), ((2, 2, 2), (5, 3), 60), ((2, 2, 2), (6, 4), 60), ((2, 2, 2), (3, 5, 2), 4)],
    ids=str,
)  # fmt: skip
def test_no_way_to_reduce_is_cheaper(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], sample: int, worth: Topology
) -> None:
    ways = [spec_of(dry_mesh(mesh_shape), way, shape) for way in placed(len(shape), len(mesh_shape))]
    edges = Edges(ways, worth)
    even = all(size % prod(mesh_shape) == 0 for size in shape)  # else, where nothing is reduced, the bound comes first
    wanted = changes_pending if even else is_reduced
    pairs = [pair for pair in itertools.product(ways, repeat=2) if any(map(wanted, *lying(*pair)))]
    found: dict[tuple[Spec, frozenset[int]], dict[Spec, float]] = {}
    for src, dst in pairs if not sample else random.Random(0).sample(pairs, sample):
        key = src, frozenset(axis for axis, pair in enumerate(zip(*lying(src, dst), strict=True)) if stays_uncut(*pair))
        if key not in found:
            found[key] = cheapest_from(src, edges, key[1])
        steps_taken = plan(src, dst, worth)
        took = sum(cost(step, spec, worth) for spec, step in stages(src, steps_taken))
        assert took == pytest.approx(found[key][dst], rel=1e-9, abs=2 * LOCAL), (src, dst, steps_taken)


def lying(src: Spec, dst: Spec) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    return src.placements, dst.placements


def changes_pending(before: Placement, after: Placement) -> bool:
    return before is not after and (before.is_partial() or after.is_partial())


def is_reduced(before: Placement, after: Placement) -> bool:
    return before is not after and before.is_partial()


def stays_uncut(before: Placement, after: Placement) -> bool:
    """Whether a cut of the axis could only be one that is undone later."""
    return before.is_replicate() and not isinstance(after, Cut)


# --- the byte bound

FACTORS = [STRIDED, StridedShard(0, split_factor=3)]
WHOLE = {shape: torch.arange(prod(shape)).view(shape) for shape in [(8,), (7,), (8, 16), (5, 3), (4, 8, 8), (3, 5, 2)]}


def elements(spec: Spec) -> list[set[int]]:
    """Which elements of the dense tensor each rank holds."""
    return [set(local.flatten().tolist()) for local in distributed(WHOLE[spec.shape], spec).values()]


def shards(ndim: int, axes: int) -> list[tuple[Placement, ...]]:
    """All placements with nothing pending, strided ones included."""
    return [way for way in placed(ndim, axes, *FACTORS) if not any(placement.is_partial() for placement in way)]


@pytest.mark.parametrize("shape", list(WHOLE), ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_no_byte_is_received_that_is_held_or_not_needed(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    ways = [spec_of(dry_mesh(mesh_shape), way, shape, torch.int8) for way in shards(len(shape), len(mesh_shape))]
    pairs = list(itertools.product(ways, repeat=2))
    pairs = pairs if len(pairs) < 800 else random.Random(0).sample(pairs, 800)
    held = {spec: elements(spec) for spec in {spec for pair in pairs for spec in pair}}
    for src, dst in pairs:
        lacking = [len(needs - has) for has, needs in zip(held[src], held[dst], strict=True)]
        steps = plan(src, dst)
        assert sum(step.traffic(spec)[1] > 0 for spec, step in stages(src, steps)) == (max(lacking) > 0), (
            src,
            dst,
            steps,
        )
        assert sum(step.traffic(spec)[1] for spec, step in stages(src, steps)) == max(lacking), (src, dst, steps)


LINKS = Topology(50e9, 1e-5, (("dp", 5e9), ("tp", 400e9)))


@pytest.mark.parametrize("shape", [(4096,), (4096, 4096), (64, 64, 64)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 2, 2)], ids=str)
def test_the_bound_holds_whatever_the_links(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Each step of a plan brings what is needed and lacking, and drops nothing that is needed."""
    ways = [spec_of(dry_mesh(mesh_shape), way, shape) for way in shards(len(shape), len(mesh_shape))]
    pairs = list(itertools.product(ways, repeat=2))
    for src, dst in random.Random(0).sample(pairs, min(len(pairs), 150)):
        for spec, step in stages(src, plan(src, dst, LINKS)):
            for has, gets, needs in zip(*map(boxes, (spec, step.after(spec), dst)), strict=True):
                inside = common(gets, common(has, needs))
                assert inside == common(has, needs), (src, dst, step)
                assert volume(common(gets, has)) + volume(common(gets, needs)) - volume(inside) == volume(gets)


def boxes(spec: Spec) -> list[Held]:
    places = itertools.product(*map(range, spec.mesh.shape))
    return [tuple(spec.intervals(dim, place) for dim in range(spec.ndim)) for place in places]


def test_a_plan_follows_the_links() -> None:
    """Over unequal links what can go over the fast one does; over equal ones it is one collective."""
    src = spec_of(dry_mesh((2, 4)), [Shard(0), Shard(0)], (4096, 4096))
    whole = src.with_placements([Replicate(), Replicate()])
    assert list(map(str, plan(src, whole))) == ["all_gather(dp_tp, dim 0, dim 0)"]
    assert list(map(str, plan(src, whole, LINKS))) == ["all_gather(tp, dim 0)", "all_gather(dp, dim 0)"]
    pending = src.with_placements([Partial(), Partial()])
    assert list(map(str, plan(pending, whole))) == ["all_reduce(dp_tp, sum)"]
    assert list(map(str, plan(pending, whole, LINKS))) == [
        "reduce_scatter(tp, dim 0, sum)",
        "all_reduce(dp, sum)",
        "all_gather(tp, dim 0)",
    ]


def test_a_new_shape_of_the_same_kind_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [spec_of(dry_mesh((2, 4)), way, (16, 1037, 64)) for way in ([Shard(0), Partial()], [Shard(2), Replicate()])]
    first = plan(*ends)
    monkeypatch.setattr(search, "cheapest", None)
    assert plan(*(spec_of(end.mesh, end.placements, (16, 1039, 64)) for end in ends)) is first
    with pytest.raises(TypeError):
        plan(*(spec_of(end.mesh, end.placements, (9, 1039, 64)) for end in ends))


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


@pytest.mark.parametrize("start", [Replicate(), Shard(0)], ids=str)
def test_reductions_of_all_kinds_can_be_made_pending_together(start: Placement) -> None:
    src = spec_of(dry_mesh((2, 2, 2)), [start, Replicate(), Replicate()], (4, 6))
    for reduce_ops in itertools.product(("sum", "avg", "product", "min"), repeat=3):
        dst = src.with_placements([Partial(reduce_op) for reduce_op in reduce_ops])
        *_, (before, step) = ways = list(stages(src, plan(src, dst)))
        assert step.after(before) is dst
        assert sum(not isinstance(each, MakePartial) for _, each in ways) == (start is Shard(0)), ways


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
        assert [moved_bytes(*pair) == 0 for pair in ends] == [prices[0] < LATENCY] * 3


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

"""Every change of placement against the dense tensor, on simulated ranks; and the bytes that it sends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from redistribute.layouts import COMBINE, coordinates, distributed, dry_mesh, mesh_of, placed, reduced, settled, spec_of
from shardwise import sim
from shardwise._value import value
from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.errors import RedistributeError
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute, planner
from shardwise.redistribute.steps import AllToAll, MakePartial, Slice, Step
from shardwise.sharding.placement import REDUCE_OPS, Cut, Intervals, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta

STRIDED = StridedShard(0, split_factor=2)
Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]
SHAPES = [(12, 12), (5, 3), (1, 2), (0, 4), (7, 1)]
DIRECT = [
    (Shard(0), Replicate(), "all_gather"),
    (Partial(), Replicate(), "all_reduce"),
    (Partial(), Shard(0), "reduce_scatter"),
    (Partial(), Shard(1), "reduce_scatter"),
]


def pairs(ndim: int, axes: int, *more: Placement) -> list[Pair]:
    """All pairs of placements except a pending reduction that is to become another."""
    ways = placed(ndim, axes, *more)
    return [pair for pair in itertools.product(ways, repeat=2) if not any(map(_clash, *pair))]


def _clash(before: Placement, after: Placement) -> bool:
    return before.is_partial() and after.is_partial() and before is not after


def moved(mesh_shape: tuple[int, ...], whole: Tensor, asked: list[Pair]) -> list[list[tuple[Tensor, list[int]]]]:
    """For each rank and pair: its local tensor afterwards, and the bytes that it sent in each collective."""
    shape, dtype = tuple(whole.shape), whole.dtype
    dry = dry_mesh(mesh_shape)
    held = {before: distributed(whole, spec_of(dry, before, shape)) for before in {before for before, _ in asked}}

    def body() -> Iterator[tuple[Tensor, list[int]]]:
        mesh, sent = mesh_of(mesh_shape), []
        with wire.observing(lambda transmission: sent.append(transmission.bytes)):
            for before, after in asked:
                src, dst = (spec_of(mesh, placements, shape, dtype) for placements in (before, after))
                yield execute.run(held[before][mesh.get_coordinate()], src, planner.plan(src, dst)), sent[:]
                sent.clear()

    return sim.run(lambda: list(body()), len(coordinates(mesh_shape)))


def check(mesh_shape: tuple[int, ...], whole: Tensor, asked: list[Pair]) -> None:
    ranks, keys, shape = moved(mesh_shape, whole, asked), coordinates(mesh_shape), tuple(whole.shape)
    mesh = dry_mesh(mesh_shape)
    expected = {
        after: distributed(whole, settled(spec_of(mesh, after, shape))) for after in {pair[1] for pair in asked}
    }
    for pair, results in zip(asked, zip(*ranks, strict=True), strict=True):
        src, dst = (spec_of(mesh, placements, shape, whole.dtype) for placements in pair)
        got = {key: local for key, (local, _) in zip(keys, results, strict=True)}
        check_values(src, dst, expected[pair[1]], got)
        check_bytes(src, dst, [sent for _, sent in results])


def check_values(
    src: Spec, dst: Spec, expected: dict[tuple[int, ...], Tensor], got: dict[tuple[int, ...], Tensor]
) -> None:
    for key, local in reduced(got, dst).items():
        assert local.dtype is expected[key].dtype, (src, dst)
        assert torch.equal(local.nan_to_num(77), expected[key].nan_to_num(77)), (src, dst, key)


def talks(step: Step, spec: Spec) -> bool:
    """Whether the step is a collective: an exchange in which every rank has what it needs is none."""
    return not isinstance(step, Slice | MakePartial) and not (isinstance(step, AllToAll) and not step.bytes(spec))


def check_bytes(src: Spec, dst: Spec, sent: list[list[int]]) -> None:
    """Of the ranks that send in a collective, the one that sends most sends what the step says."""
    said = [step.bytes(spec) for spec, step in planner.stages(src, planner.plan(src, dst)) if talks(step, spec)]
    assert [max(several) for several in zip(*sent, strict=True)] == said, (src, dst)
    assert planner.moved_bytes(src, dst) == sum(said)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,)], ids=str)
def test_every_pair_on_one_axis(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    check(mesh_shape, torch.randint(-9, 9, shape).float(), pairs(2, 1, STRIDED, Partial("max")))


@pytest.mark.parametrize(
    "mesh_shape, shape",
    [((2, 2), (12, 12)), ((2, 2), (5, 3)), ((2, 2), (1, 2)), ((2, 3), (12, 12)), ((2, 3), (7, 3)), ((3, 1), (0, 4))],
    ids=str,
)
def test_every_pair_on_two_axes(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    check(mesh_shape, torch.randint(-9, 9, shape).float(), pairs(2, 2, STRIDED))


@pytest.mark.parametrize("shape", [(8, 4, 4), (3, 5, 2)], ids=str)
def test_pairs_on_three_axes(shape: tuple[int, ...]) -> None:
    asked = pairs(3, 3, STRIDED)
    chosen = [asked[index] for index in torch.randperm(len(asked))[:150].tolist()]
    check((2, 2, 2), torch.randint(-9, 9, shape).double(), chosen)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.uint8]
)
def test_every_dtype_keeps_its_values(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (5, 6)).to(dtype) * (1j if dtype.is_complex else 1)
    ways = [
        pair for pair in pairs(2, 1, STRIDED) if dtype is not torch.bool or not any(p.is_partial() for (p,) in pair)
    ]
    check((3,), whole.to(dtype), ways)


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
def test_every_reduction(reduce_op: str) -> None:
    pending, ends = Partial(reduce_op), [Replicate(), Shard(0), Shard(1), STRIDED]
    asked = [((pending,), (end,)) for end in ends] + [((end,), (pending,)) for end in ends]
    whole = torch.randint(1, 9, (5, 6))
    check((3,), whole if reduce_op in ("band", "bor", "bxor") else whole.double(), asked)


def test_a_pending_norm_keeps_signs_and_all_digits() -> None:
    whole = torch.tensor([-3.1, 0.0, -0.0, 1e-38, -3e38, math.inf, -math.inf, 1 / 3])

    def body() -> Tensor:
        spec = spec_of(mesh_of((2,)), [Replicate()], (8,))
        pending = spec.with_placements([Partial("norm")])
        local = execute.run(whole, spec, planner.plan(spec, pending))
        return execute.run(local, pending, planner.plan(pending, spec))

    for result in sim.run(body, 2):
        assert torch.equal(result, whole)


@pytest.mark.parametrize("reduce_op", ["sum", "product", "band", "bor", "min", "max", "bxor"])
def test_reductions_of_booleans(reduce_op: str) -> None:
    masks = torch.tensor([[True, True, False, False], [True, False, True, False]])
    expected = {"sum": masks.any(0), "bor": masks.any(0), "max": masks.any(0), "bxor": masks[0] ^ masks[1]}

    def body() -> list[Tensor]:
        mesh = mesh_of((2,))
        src = spec_of(mesh, [Partial(reduce_op)], (4,), torch.bool)
        steps = planner.plan(src, src.with_placements([Replicate()]))
        return execute.run(masks[mesh.get_local_rank()], src, steps)

    for result in sim.run(body, 2):
        assert result.dtype is torch.bool
        assert result.tolist() == expected.get(reduce_op, masks.all(0)).tolist()


def test_reductions_of_two_kinds_are_done_from_the_last_axis_to_the_first() -> None:
    asked = [
        ((Partial("sum"), Partial("max")), (Replicate(), Replicate())),
        ((Partial("sum"), Partial("max")), (Shard(0), Partial("max"))),
        ((Partial("max"), Partial("sum")), (Replicate(), Partial("sum"))),
        ((Replicate(), Partial("sum")), (Partial("product"), Partial("sum"))),
        ((Partial("avg"), Partial("sum")), (Shard(1), Shard(0))),
    ]
    check((2, 3), torch.randint(1, 9, (5, 6)).double(), asked)


def test_scalars() -> None:
    check((2, 2), torch.tensor(3.5), pairs(0, 2))


def test_a_nan_stays_where_it_is() -> None:
    whole = torch.tensor([[float("nan"), 1.0], [2.0, float("inf")], [3.0, 4.0]])
    check((2,), whole, [pair for pair in pairs(2, 1, STRIDED) if not any(p.is_partial() for (p,) in pair)])


@pytest.mark.parametrize("before, after", [(Shard(0), Replicate()), (Partial(), Shard(0)), (Shard(1), Shard(0))])
def test_a_local_tensor_of_any_strides_is_taken(before: Placement, after: Placement) -> None:
    whole = torch.arange(24.0).view(4, 6)

    def body() -> Tensor:
        mesh = mesh_of((2,))
        src = spec_of(mesh, [before], (4, 6))
        local = distributed(whole, src)[mesh.get_coordinate() or ()]
        scattered = local.t().contiguous().t()
        assert not scattered.is_contiguous()
        return execute.run(scattered, src, planner.plan(src, src.with_placements([after])))

    dst = spec_of(dry_mesh((2,)), [after], (4, 6))
    check_values(dst, dst, distributed(whole, dst), dict(zip([(0,), (1,)], sim.run(body, 2), strict=True)))


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)], ids=str)
def test_results_are_contiguous_and_share_nothing_with_the_input(shape: tuple[int, ...]) -> None:
    def body() -> None:
        mesh = mesh_of((2,))
        for before, after in pairs(2, 1, STRIDED):
            src = spec_of(mesh, before, shape)
            local = distributed(torch.ones(shape), src)[mesh.get_coordinate() or ()].clone()
            steps = planner.plan(src, src.with_placements(after))
            result = execute.run(local, src, steps)
            assert result.is_contiguous(), (before, after)
            assert (
                (result.untyped_storage().data_ptr() != local.untyped_storage().data_ptr())
                or not result.numel()
                or not steps
            )

    sim.run(body, 2)


@pytest.mark.parametrize("before, after, op", DIRECT)
def test_what_arrives_is_the_result(
    before: Placement, after: Placement, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[Tensor] = []
    wait = wire.wait
    monkeypatch.setattr(wire, "wait", lambda x: arrived.append(wait(x)) or arrived[-1])

    def body() -> tuple[bool, list[str]]:
        sent: list[str] = []
        src = spec_of(mesh_of((2,)), [before], (4, 6))
        local = torch.ones(src.local_shape(src.mesh.get_coordinate()))
        with wire.observing(lambda transmission: sent.append(transmission.op)):
            result = execute.run(local, src, planner.plan(src, src.with_placements([after])))
        return any(result is x for x in arrived), sent

    assert sim.run(body, 2) == [(True, [op])] * 2


def test_the_last_step_may_stay_on_the_wire() -> None:
    def body() -> tuple[bool, list[float]]:
        mesh = mesh_of((2,))
        src = spec_of(mesh, [Partial()], (2,))
        local = torch.tensor([1.0, 2.0])
        result = execute.run_async(local, src, planner.plan(src, src.with_placements([Replicate()])))
        return isinstance(result, AsyncCollectiveTensor) and not result.completed, (result + 0).tolist()

    assert sim.run(body, 2) == [(True, [2.0, 4.0])] * 2


def test_whatever_comes_last_may_stay_on_the_wire() -> None:
    """Unpacking, and steps that send nothing, wait too."""
    whole, asked = torch.randint(-9, 9, (5, 6)).float(), pairs(2, 2, STRIDED)[::5]

    def body() -> None:
        mesh = mesh_of((2, 2))
        for before, after in asked:
            src, dst = spec_of(mesh, before, (5, 6)), spec_of(mesh, after, (5, 6))
            local = distributed(whole, src)[mesh.get_coordinate()]
            steps = planner.plan(src, dst)
            late, soon = (run(local, src, steps) for run in (execute.run_async, execute.run))
            sends = any(talks(step, spec) for spec, step in planner.stages(src, steps))
            assert isinstance(late, AsyncCollectiveTensor) == sends, (src, dst, steps)
            assert late.shape == soon.shape
            assert torch.equal(late + 0, soon), (src, dst, steps)

    sim.run(body, 4)


DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
)


@pytest.mark.parametrize("shape", [(4, 3), (5, 3)], ids=str)
@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
def test_what_is_waited_for_is_what_comes_at_once(reduce_op: str, shape: tuple[int, ...]) -> None:
    """In dtype, strides and values, whatever stands for the numbers on the wire."""
    values = torch.arange(float(math.prod(shape))).view(shape) * 1.5 - 4

    def body() -> None:
        mesh = mesh_of((2,))
        for dtype, turned, after in itertools.product(DTYPES, (False, True), (Replicate(), Shard(0), Shard(1))):
            parts = [(values * factor).to(dtype) for factor in (1, -2)]
            if turned:
                parts = [part.t().contiguous().t() for part in parts]
            src = Spec(mesh, (Partial(reduce_op),), TensorMeta.of(parts[0]))
            try:
                steps = planner.plan(src, src.with_placements([after]))
            except RedistributeError:
                assert not (dtype.is_floating_point and reduce_op not in ("band", "bor", "bxor")), dtype
                continue
            local = parts[mesh.get_local_rank()]
            late, soon = (run(local, src, steps) for run in (execute.run_async, execute.run))
            assert isinstance(late, AsyncCollectiveTensor)
            late = late.wait()
            assert (late.dtype, late.stride()) == (soon.dtype, soon.stride()) == (dtype, late.stride())
            assert torch.equal(late, soon)
            if reduce_op in ("max", "min") and after.is_replicate():
                assert torch.equal(late, COMBINE[reduce_op](parts))

    sim.run(body, 2)


def test_nothing_is_waited_for_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: set[int] = set()
    wait = wire.wait
    monkeypatch.setattr(wire, "wait", lambda x: waited.add(current_world().rank) or wait(x))

    def body() -> None:
        src = spec_of(mesh_of((3,)), [Shard(0)], (5, 3))
        local = torch.ones(src.local_shape(src.mesh.get_coordinate()))
        late = execute.run_async(local, src, planner.plan(src, src.with_placements([Shard(1)])))
        assert current_world().rank not in waited
        assert late.sum() == 5
        assert current_world().rank in waited

    sim.run(body, 3)


def test_nested_uneven_shards_are_gathered_in_order() -> None:
    whole = torch.arange(15.0).view(5, 3)

    def body() -> Tensor:
        src = spec_of(mesh_of((2, 2)), [Shard(0), Shard(0)], (5, 3))
        local = distributed(whole, src)[src.mesh.get_coordinate()]
        return execute.run(local, src, planner.plan(src, src.with_placements([Replicate(), Replicate()])))

    assert all(torch.equal(result, whole) for result in sim.run(body, 4))


@value
class Ragged(Cut):
    """A cut into parts of any sizes."""

    dim: int
    sizes: tuple[int, ...]

    def intervals(self, size: int, parts: int, index: int) -> Intervals:
        start = sum(self.sizes[:index])
        return ((start, start + self.sizes[index]),)

    def at(self, dim: int) -> Ragged:
        return Ragged(dim, self.sizes)


def test_what_a_later_axis_cuts_evenly_may_be_uneven_before() -> None:
    """A dim of 6 x 5, flattened, of which an axis cuts the 5 in 3 and 2, and another the 6: 6 and 4 for each rank."""
    lying, whole = (StridedShard(0, split_factor=6), Shard(0)), (Replicate(), Replicate())
    check((2, 3), torch.arange(30.0), [(lying, whole), (lying, (Shard(0), Replicate())), (whole, lying)])


def test_a_cut_of_any_kind_is_understood() -> None:
    whole, ragged = torch.arange(42.0).view(6, 7), Ragged(0, (4, 0, 2))
    ways = [ragged, Ragged(1, (1, 5, 1)), Ragged(0, (2, 2, 2)), Replicate(), Shard(0), STRIDED]

    def part(spec: Spec) -> Tensor:
        return spec.take(whole, spec.mesh.get_coordinate() or ()).contiguous()

    def body() -> None:
        mesh = mesh_of((3, 2))
        for before, after, other in itertools.product(ways, ways, (Replicate(), Shard(0), Shard(1))):
            src, dst = spec_of(mesh, [before, other], (6, 7)), spec_of(mesh, [after, Shard(0)], (6, 7))
            assert torch.equal(execute.run(part(src), src, planner.plan(src, dst)), part(dst)), (src, dst)
        src = spec_of(mesh, [Partial(), Replicate()], (6, 7))
        dst = src.with_placements([ragged, Replicate()])
        assert torch.equal(execute.run(whole / 3, src, planner.plan(src, dst)), part(dst))

    sim.run(body, 6)


def test_a_plan_serves_another_shape() -> None:
    def body() -> list[float]:
        mesh = mesh_of((2,))
        src = spec_of(mesh, [Shard(0)], (4,))
        steps = planner.plan(src, src.with_placements([Replicate()]))
        other = spec_of(mesh, [Shard(0)], (3,))
        local = torch.tensor([[1.0, 2.0], [3.0]][current_world().rank])
        return execute.run(local, other, steps).tolist()

    assert sim.run(body, 2) == [[1.0, 2.0, 3.0]] * 2


def test_a_rank_outside_the_mesh_keeps_what_it_has() -> None:
    def body() -> list[int]:
        src = spec_of(DeviceMesh("cpu", [0, 1]), [Shard(0)], (4,))
        local = torch.zeros(src.local_shape(src.mesh.get_coordinate()))
        return list(execute.run(local, src, planner.plan(src, src.with_placements([Replicate()]))).shape)

    assert sim.run(body, 3) == [[4], [4], [0]]


def test_a_mesh_in_another_order_of_ranks() -> None:
    def body() -> list[float]:
        src = spec_of(DeviceMesh("cpu", [2, 0, 1]), [Shard(0)], (6,))
        local = distributed(torch.arange(6.0), src)[src.mesh.get_coordinate() or ()]
        return execute.run(local, src, planner.plan(src, src.with_placements([Replicate()]))).tolist()

    assert sim.run(body, 3) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3

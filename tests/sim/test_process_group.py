"""Every collective of a simulated group against plain torch on the stacked inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import CollectiveError
from shardwise.mesh.world import current_world
from shardwise.sim import RankError, run

NATIVE = torch.ops._c10d_functional
SIZE = 4


def group_name() -> str:
    world = current_world()
    return world.group(range(world.size)).name


def wait(x: torch.Tensor) -> torch.Tensor:
    return NATIVE.wait_tensor(x)


def numbers(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 5, shape, generator=generator).to(dtype) for _ in range(SIZE)]


def middle_mean(x: torch.Tensor) -> torch.Tensor:
    return x.double().mean(0) if x.is_floating_point() else x.sum(0) // SIZE


def fold(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: op(op(x[0], x[1]), op(x[2], x[3]))


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": middle_mean,
    "product": lambda x: x.prod(0, dtype=x.dtype),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
    "band": fold(torch.bitwise_and),
    "bor": fold(torch.bitwise_or),
    "bxor": fold(torch.bitwise_xor),
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
CASES = [
    *[(name, dtype) for name in ("sum", "avg", "product", "min", "max") for dtype in [*FLOATS, *WHOLE]],
    *[(name, dtype) for name in ("band", "bor", "bxor") for dtype in [*WHOLE, torch.bool]],
    *[(name, torch.bool) for name in ("product", "min", "max")],
    ("sum", torch.complex64),
]


@pytest.mark.parametrize(("reduce_op", "dtype"), CASES)
def test_all_reduce(reduce_op: str, dtype: torch.dtype) -> None:
    inputs = numbers(dtype, 3, 2)
    results = run(lambda: wait(NATIVE.all_reduce(inputs[dist.get_rank()], reduce_op, group_name())), SIZE)
    expected = REDUCTIONS[reduce_op](torch.stack(inputs)).to(dtype)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("reduce_op", "dtype"), CASES)
def test_reduce_scatter(reduce_op: str, dtype: torch.dtype) -> None:
    inputs = numbers(dtype, 2 * SIZE, 3)
    results = run(
        lambda: wait(NATIVE.reduce_scatter_tensor(inputs[dist.get_rank()], reduce_op, SIZE, group_name())), SIZE
    )
    expected = REDUCTIONS[reduce_op](torch.stack(inputs)).to(dtype).chunk(SIZE)
    for result, part in zip(results, expected, strict=True):
        torch.testing.assert_close(result, part, rtol=0, atol=0)


def test_half_precision_is_rounded_once() -> None:
    inputs = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    results = run(lambda: wait(NATIVE.all_reduce(inputs[dist.get_rank()], "sum", group_name())), SIZE)
    assert results == [torch.tensor([259.0]).bfloat16()] * SIZE


@pytest.mark.parametrize(
    ("reduce_op", "dtype"), [("band", torch.float32), ("max", torch.complex64), ("avg", torch.bool), ("sub", torch.int)]
)
def test_reductions_without_meaning_are_refused(reduce_op: str, dtype: torch.dtype) -> None:
    with pytest.raises(RankError) as raised:
        run(lambda: dist.all_reduce(torch.ones(2, dtype=dtype), op=getattr(dist.ReduceOp, reduce_op.upper())), 2)
    assert isinstance(raised.value.__cause__, CollectiveError | AttributeError | ValueError)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.bool, torch.complex64])
def test_all_gather(dtype: torch.dtype) -> None:
    inputs = numbers(dtype, 2, 3)
    results = run(lambda: wait(NATIVE.all_gather_into_tensor(inputs[dist.get_rank()], SIZE, group_name())), SIZE)
    for result in results:
        assert torch.equal(result, torch.cat(inputs))


def test_all_gather_of_transposed_and_empty_tensors() -> None:
    def gather() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(6.0).view(2, 3).t() + dist.get_rank()
        return (
            wait(NATIVE.all_gather_into_tensor(x.contiguous(), SIZE, group_name())),
            wait(NATIVE.all_gather_into_tensor(torch.ones(0, 3), SIZE, group_name())),
        )

    expected = torch.cat([torch.arange(6.0).view(2, 3).t() + rank for rank in range(SIZE)])
    for whole, empty in run(gather, SIZE):
        assert torch.equal(whole, expected)
        assert empty.shape == (0, 3)


def test_coalesced_calls_are_the_calls_one_by_one() -> None:
    inputs = [[torch.arange(4.0) + rank, torch.ones(8, 2) * rank] for rank in range(SIZE)]

    def together() -> list[list[torch.Tensor]]:
        mine, name = inputs[dist.get_rank()], group_name()
        return [
            [wait(x) for x in NATIVE.all_reduce_coalesced(mine, "sum", name)],
            [wait(x) for x in NATIVE.all_gather_into_tensor_coalesced(mine, SIZE, name)],
            [wait(x) for x in NATIVE.reduce_scatter_tensor_coalesced(mine, "max", SIZE, name)],
        ]

    columns = list(zip(*inputs, strict=True))
    for rank, (reduced, gathered, scattered) in enumerate(run(together, SIZE)):
        for index, column in enumerate(columns):
            assert torch.equal(reduced[index], torch.stack(column).sum(0))
            assert torch.equal(gathered[index], torch.cat(column))
            assert torch.equal(scattered[index], torch.stack(column).amax(0).chunk(SIZE)[rank])


def test_all_to_all_with_uneven_splits() -> None:
    sizes = [[0, 2, 1, 3], [1, 1, 1, 1], [2, 0, 0, 2], [4, 1, 0, 0]]  # from whom (row) to whom (column)
    inputs = [torch.arange(sum(row) * 2.0).view(-1, 2) + 100 * rank for rank, row in enumerate(sizes)]
    pieces = [x.split(row) for x, row in zip(inputs, sizes, strict=True)]

    def exchange() -> torch.Tensor:
        rank = dist.get_rank()
        received = [row[rank] for row in sizes]
        return wait(NATIVE.all_to_all_single(inputs[rank], received, sizes[rank], group_name()))

    for rank, result in enumerate(run(exchange, SIZE)):
        assert torch.equal(result, torch.cat([piece[rank] for piece in pieces]))


@pytest.mark.parametrize("source", range(SIZE))
def test_broadcast(source: int) -> None:
    inputs = numbers(torch.float32, 3)
    results = run(lambda: wait(NATIVE.broadcast(inputs[dist.get_rank()], source, group_name())), SIZE)
    for result in results:
        assert torch.equal(result, inputs[source])


def test_inputs_are_left_alone() -> None:
    inputs = numbers(torch.float32, 4)
    before = [x.clone() for x in inputs]

    def everything() -> None:
        mine, name = inputs[dist.get_rank()], group_name()
        wait(NATIVE.all_reduce(mine, "sum", name))
        wait(NATIVE.broadcast(mine, 1, name))
        wait(NATIVE.reduce_scatter_tensor(mine, "sum", SIZE, name))

    run(everything, SIZE)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_groups_of_some_ranks_in_their_own_order() -> None:
    def gather() -> list[float]:
        rank = current_world().rank
        ranks = (2, 0) if rank in (0, 2) else (1, 3)
        group = current_world().group(ranks)
        return wait(NATIVE.all_gather_into_tensor(torch.tensor([float(rank)]), 2, group.name)).tolist()

    assert run(gather, SIZE) == [[2, 0], [1, 3], [2, 0], [1, 3]]


def test_a_group_of_one() -> None:
    def alone() -> float:
        group = current_world().group([current_world().rank])
        return wait(NATIVE.all_reduce(torch.tensor([3.0]), "avg", group.name)).item()

    assert run(alone, 3) == [3.0] * 3


def test_inference_tensors() -> None:
    def infer() -> torch.Tensor:
        with torch.inference_mode(dist.get_rank() < 2):
            return wait(NATIVE.all_reduce(torch.ones(2), "sum", group_name()))

    assert all(torch.equal(result, torch.full((2,), 4.0)) for result in run(infer, SIZE))


def test_results_need_no_autograd() -> None:
    def leaf() -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        dist.all_reduce(x.detach())
        dist.broadcast(x.data, 0)
        return x

    assert all(x.requires_grad and x.is_leaf and x.tolist() == [2, 2] for x in run(leaf, 2))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_of_a_rank_do_not_see_how_data_moves() -> None:
    def program() -> tuple[list[str], float]:
        x = torch.ones(1)
        with Recorder() as recorder:
            dist.all_reduce(x)
            wait(NATIVE.all_reduce(x, "sum", group_name()))
        return recorder.seen, x.item()

    for seen, total in run(program, 2):
        assert seen == ["_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"]
        assert total == 2


def test_default_devices_and_dtypes_of_a_rank_do_not_matter() -> None:
    def program() -> float:
        x = torch.ones(3, dtype=torch.bfloat16)
        with torch.device("meta"):
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            dist.all_gather_single(torch.empty(6, device="cpu"), torch.ones(3, device="cpu"))
        return x.sum().item()

    assert run(program, 2) == [3.0] * 2

"""Each functional collective against what it means, over dtypes, dims and sizes of the group."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.comm.dense import BITS, CASES, reduced, sample
from torch import Tensor

from shardwise import collectives as c
from shardwise import sim
from shardwise.comm.wire import Transmission, observing
from shardwise.errors import CollectiveError
from shardwise.mesh.world import current_world

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]


def rank() -> int:
    return current_world().rank


def everyone() -> list[int]:
    return list(range(current_world().size))


def fits(case: str, dtype: torch.dtype) -> bool:
    if dtype in WHOLE:
        return "avg" not in case
    return not (dtype in COMPLEX and any(op in case for op in ("product", "min", "max")))


def results(case: str, n: int, dtype: torch.dtype) -> list[Tensor]:
    call = CASES[case][0]
    return sim.run(lambda: call(sample(rank(), n, dtype), everyone(), rank()).wait(), n)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_value(case: str, n: int) -> None:
    expected = CASES[case][1]([sample(r, n) for r in range(n)])
    for got, want in zip(results(case, n, torch.float64), expected, strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", FLOATS + WHOLE + COMPLEX, ids=str)
def test_value_in_every_dtype(dtype: torch.dtype) -> None:
    for case in (name for name in CASES if fits(name, dtype)):
        expected = CASES[case][1]([sample(r, 2, dtype) for r in range(2)])
        for got, want in zip(results(case, 2, dtype), expected, strict=True):
            assert got.dtype is dtype
            assert torch.equal(got, want), case


@pytest.mark.parametrize("op", BITS)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_bitwise(op: str, dtype: torch.dtype) -> None:
    got = sim.run(lambda: c.all_reduce(sample(rank(), 3, dtype), op.upper(), None).wait(), 3)
    want = reduced([sample(r, 3, dtype) for r in range(3)], op)
    assert all(torch.equal(one, want) for one in got)


def test_scalars_and_empty_tensors() -> None:
    def program() -> list[list[float]]:
        one, none = torch.tensor(rank() + 1.0), torch.ones(0, 3)
        pending = [c.all_reduce(one, "sum", None), c.all_gather_tensor(one, 0, None), c.broadcast(one, 1, None)]
        pending += [c.permute_tensor(one, [1, 0], None)]
        empty = [c.all_reduce(none, "max", None), c.reduce_scatter_tensor(none, "sum", 0, None)]
        shapes = [list(x.shape) for x in [*empty, c.all_gather_tensor(none, 1, None), c.broadcast(none, 0, None)]]
        return [x.tolist() for x in pending] + shapes

    first, second = sim.run(program, 2)
    assert first == [3, [1, 2], 2, 2, [0, 3], [0, 3], [0, 6], [0, 3]]
    assert second == [3, [1, 2], 2, 1, *first[4:]]


@pytest.mark.parametrize("case", CASES)
def test_layout_of_the_input_does_not_matter(case: str) -> None:
    call, meaning = CASES[case]

    def program() -> Tensor:
        x = sample(rank(), 2).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        assert not x.is_contiguous()
        return call(x, everyone(), rank()).wait()

    want = meaning([sample(r, 2) for r in range(2)])
    assert all(torch.equal(*pair) for pair in zip(sim.run(program, 2), want, strict=True))


def test_lazily_conjugated_input() -> None:
    def program() -> Tensor:
        x = torch.tensor([1 + 2j, rank() * 1j]).conj()
        return torch.cat([c.all_gather_tensor(x, 0, None), c.all_reduce(x.imag, "sum", None)])

    want = torch.tensor([1 - 2j, 0, 1 - 2j, -1j, -4, -1])
    assert all(torch.equal(got, want) for got in sim.run(program, 2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2])
def test_input_and_result_do_not_meet(case: str, n: int) -> None:
    call, meaning = CASES[case]

    def program() -> tuple[Tensor, Tensor]:
        x = sample(rank(), n)
        pending = call(x, everyone(), rank())
        x.fill_(-1)  # before it is sent, for all that one knows
        return pending.add_(0).wait(), x

    want = meaning([sample(r, n) for r in range(n)])
    for (got, x), expected in zip(sim.run(program, n), want, strict=True):
        assert torch.equal(got, expected)
        assert bool((x == -1).all())


def test_coalesced_results_stand_alone_and_lists_stay() -> None:
    def program() -> list[list[float]]:
        given = [torch.full((2, 2), rank() + 1.0), torch.full((4,), rank() + 1.0)]
        kept = copy.copy(given)
        total = c.all_reduce_coalesced(given, "sum", None)
        whole = c.all_gather_into_tensor_coalesced(given, None)
        parts = c.reduce_scatter_tensor_coalesced(given, "sum", [1, 0], None)
        assert all(one is other for one, other in zip(given, kept, strict=True))
        return [(x + 0).tolist() for x in [parts[1], parts[0], whole[1], total[0]]]

    want = [[3, 3], [[3], [3]], [1, 1, 1, 1, 2, 2, 2, 2], [[3, 3], [3, 3]]]
    assert sim.run(program, 2) == [want, want]


def test_coalesced_tensors_of_one_dtype_go_in_one_launch() -> None:
    def program() -> list[str]:
        xs = [torch.full((2, n), rank() + 1.0) for n in (1, 2, 3)] + [torch.full((2, 2), rank() + 1)]
        told: list[Transmission] = []
        with observing(told.append):
            sums = c.all_reduce_coalesced(xs, "sum", None)
            wholes = c.all_gather_into_tensor_coalesced(xs, None)
            parts = c.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0, -2, 1], None)
        assert [x.wait().unique().tolist() for x in reversed(sums + parts)] == [[3]] * 8
        assert [(x.dtype, list(x.shape)) for x in wholes[2:]] == [(torch.float32, [4, 3]), (torch.int64, [4, 2])]
        return [f"{sent.op} {sent.shape[0]}" for sent in told]

    ops = [f"{op}_coalesced" for op in ("all_reduce", "all_gather", "reduce_scatter")]
    assert sim.run(program, 2) == [[f"{op} {size}" for op in ops for size in (12, 4)]] * 2


def test_nothing_coalesced_is_nothing() -> None:
    assert c.all_reduce_coalesced([], "sum", None) == c.all_gather_into_tensor_coalesced([], None) == []
    assert c.reduce_scatter_tensor_coalesced([], "sum", [], None) == []


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_padded_reduce_scatter(dim: int, op: str) -> None:
    n, inputs = 3, [sample(r, 2)[:, :, 0] for r in range(3)]  # 4 by 3
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 2) if dim == 0 else (0, 0)) for x in inputs]
    want = reduced(padded, op).chunk(n, dim)

    def program() -> list[Tensor]:
        x = inputs[rank()].clone().requires_grad_()
        part = c.reduce_scatter_tensor(x, op, dim, None, pad=True)
        part.sum().backward()
        return [part.detach(), x.grad]

    got = sim.run(program, n)
    assert all(torch.equal(part, one) for (part, _), one in zip(got, want, strict=True))
    assert torch.stack([back for _, back in got]).sum().item() == (36 if op == "sum" else 12)


def test_older_and_newer_names_are_the_same_functions() -> None:
    assert c.all_gather_tensor is c.all_gather_single is c.all_gather_tensor_autograd
    assert c.reduce_scatter_tensor is c.reduce_scatter_single is c.reduce_scatter_single_autograd
    assert c.all_to_all_single is c.all_to_all_single_autograd


def refused(call: object, *words: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        call()  # type: ignore[operator]
    assert all(word in str(caught.value) for word in words), caught.value


def test_refusals_name_the_numbers() -> None:
    def program() -> None:
        x = torch.ones(3, 5)
        refused(lambda: c.reduce_scatter_tensor(x, "sum", -1, None), "dim 1", "size 5", "size 2")
        refused(lambda: c.all_gather_tensor(x, 2, None), "dim 2", "-2 to 1")
        refused(lambda: c.all_to_all_single(x, None, None, None), "size 3")
        refused(lambda: c.all_to_all_single(x, [1, 2], None, None), "both")
        refused(lambda: c.all_to_all_single(x, [1, 1], [1, 1], None), "add up to 2", "3 rows")
        refused(lambda: c.all_to_all_single(x, [3], [3], None), "each rank")
        refused(lambda: c.broadcast(x, 2, None), "0 to 1")
        refused(lambda: c.permute_tensor(x, [0, 0], None), "permutation")

    sim.run(program, 2)


def test_refused_reductions() -> None:
    x = torch.ones(3)
    refused(lambda: c.all_reduce(x, "mean", None), "mean", "avg")
    refused(lambda: c.all_reduce(x, "band", None), "band", "float32", "product")
    refused(lambda: c.all_reduce(x.int(), "avg", None), "avg", "int32", "bxor")
    refused(lambda: c.all_reduce(x.cfloat(), "max", None), "max", "complex64", "sum, avg")


def test_gathering_an_inner_dim_stays_asynchronous() -> None:
    def program() -> Tensor:
        pending = c.all_gather_tensor(torch.full((2, 2), rank() + 0.0), 1, None)
        row = pending.view(4, 2).t()[0]
        assert not pending.completed
        assert not row.completed
        return row + 0

    assert all(got.tolist() == [0, 1, 0, 1] for got in sim.run(program, 2))


def test_one_rank_alone_tells_nobody() -> None:
    with observing(lambda sent: pytest.fail(str(sent))):
        for case, (call, meaning) in CASES.items():
            x = sample(0, 1)
            assert torch.equal(call(x, [0], 0).wait(), meaning([x])[0]), case

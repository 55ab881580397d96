"""Wrong programs: each ends within moments, with the error that names what every rank was doing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import WorldError
from shardwise.mesh.world import current_world
from shardwise.sim import CollectiveMismatchError, DeadlockError, RankError, run
from shardwise.sim.lockstep import RankThread

NATIVE = torch.ops._c10d_functional
HERE = "test_failures.py"


@pytest.fixture(autouse=True)
def _quick_and_clean() -> Iterator[None]:
    threads, start = threading.enumerate(), time.monotonic()
    yield
    assert time.monotonic() - start < 60  # not a hang, on a busy machine either
    assert threading.enumerate() == threads


def fails(error: type[Exception], fn: Callable[[int], object], size: int = 3) -> str:
    with pytest.raises(error) as raised:
        run(lambda: fn(current_world().rank), size)
    return str(raised.value)


def line_of(fn: Callable[..., object], offset: int) -> str:
    return f"{HERE}:{fn.__code__.co_firstlineno + offset}"


def test_a_rank_that_skips_a_collective() -> None:
    def program(rank: int) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(4, 2))

    lines = fails(DeadlockError, program).splitlines()
    for rank in (0, 2):
        (line,) = [line for line in lines if f"rank {rank} waits" in line]
        assert "all_reduce(sum) of f32[4, 2] over group (0, 1, 2) (not called by rank 1)" in line
        assert line.endswith(line_of(program, 2))
    assert any("rank 1 has finished" in line for line in lines)


def test_ranks_that_wait_for_each_other_in_a_circle() -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]

    def program(rank: int) -> None:
        group = current_world().group(pairs[rank]).process_group
        dist.all_reduce(torch.ones(2, dtype=torch.int64), group=group)

    text = fails(DeadlockError, program)
    for rank, pair in enumerate(pairs):
        absent = next(member for member in pair if member != rank)
        assert f"rank {rank} waits in all_reduce(sum) of i64[2] over group {pair} (not called by rank {absent})" in text


def test_a_wait_far_from_its_launch_names_both_lines() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()

    text = fails(DeadlockError, program, 2)
    assert line_of(program, 2) in text
    assert line_of(program, 3) in text


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(2, 2)])
def test_a_rank_with_another_tensor(other: torch.Tensor) -> None:
    def program(rank: int) -> None:
        NATIVE.wait_tensor(NATIVE.all_reduce(other if rank == 2 else torch.ones(4), "sum", name()))

    lines = fails(CollectiveMismatchError, program).splitlines()
    assert lines[0] == "the ranks of group (0, 1, 2) call different things"
    assert ["all_reduce(sum) of f32[4] at" in line for line in lines[1:4]] == [True, True, False]
    assert all(line.endswith(line_of(program, 1)) for line in lines[1:4])


def name() -> str:
    world = current_world()
    return world.group(range(world.size)).name


DIFFERENT: list[tuple[str, Callable[[int], object]]] = [
    ("op", lambda rank: dist.barrier() if rank else dist.all_reduce(torch.ones(1))),
    ("reduction", lambda rank: dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)),
    ("root", lambda rank: dist.broadcast(torch.ones(1), src=rank)),
    ("reduction of reduce", lambda rank: dist.reduce(torch.ones(2), 0, [dist.ReduceOp.MIN, dist.ReduceOp.MAX][rank])),
    ("splits", lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [1, 3])),
    ("pieces", lambda rank: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2 + rank))),
    ("message", lambda rank: dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(2), 1)),
]


@pytest.mark.parametrize(("what", "program"), DIFFERENT, ids=[what for what, _ in DIFFERENT])
def test_ranks_that_call_different_things(what: str, program: Callable[[int], object]) -> None:
    text = fails(CollectiveMismatchError, program, 2)
    assert "rank 0 calls" in text
    assert "rank 1 calls" in text
    assert text.count(HERE) == 2


def test_a_mismatch_is_found_before_anybody_waits() -> None:
    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1 + rank), async_op=True)

    assert "rank 2 has not come yet" in fails(CollectiveMismatchError, program)


def test_an_exception_names_the_rank_and_keeps_its_traceback() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("no such luck")
        dist.barrier()

    with pytest.raises(RankError, match=r"^rank 1 of 3 raised ValueError: no such luck$") as raised:
        run(lambda: program(current_world().rank), 3)
    cause = raised.value.__cause__
    assert raised.value.rank == 1
    assert isinstance(cause, ValueError)
    trace = cause.__traceback__
    assert trace is not None
    assert trace.tb_frame.f_code.co_filename == __file__  # nothing of the simulator stands above the program
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_code is program.__code__


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, AssertionError])
def test_every_exception_ends_the_run(error: type[BaseException]) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            raise error
        dist.barrier()

    fails(RankError, program)


def test_the_other_ranks_are_unwound() -> None:
    unwound = []

    def program(rank: int) -> None:
        if rank == 2:
            raise KeyError("mine")
        try:
            dist.barrier()
        except Exception:
            unwound.append("an exception that the program could take for its own")
        finally:
            unwound.append(rank)
            dist.barrier()

    assert "KeyError" in fails(RankError, program)
    assert unwound == [0, 1]


class Backward(torch.autograd.Function):
    """Does nothing but call ``fn`` with the gradient in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.fn = fn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.fn(grad), None


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    return NATIVE.wait_tensor(NATIVE.all_reduce(x, "sum", name()))


def test_an_error_in_backward() -> None:
    def gradient(grad: torch.Tensor) -> torch.Tensor:
        if current_world().rank == 1:
            raise LookupError("in backward")
        return all_reduce(grad)

    def program(rank: int) -> None:
        Backward.apply(torch.ones(2, requires_grad=True), gradient).sum().backward()

    assert "rank 1 of 2 raised LookupError: in backward" in fails(RankError, program, 2)


def test_a_deadlock_in_backward() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            Backward.apply(torch.ones(2, requires_grad=True), all_reduce).sum().backward()

    assert line_of(all_reduce, 1) in fails(DeadlockError, program, 2)


def test_messages_that_nobody_takes() -> None:
    text = fails(DeadlockError, lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else None)
    assert "rank 0 waits in send of f32[2] over group (0, 1, 2) (not called by rank 1)" in text
    text = fails(DeadlockError, lambda rank: dist.recv(torch.ones(2)) if rank == 0 else None)
    assert "(not called by any rank)" in text


def test_two_groups_in_different_orders_are_no_deadlock_when_launched_first() -> None:
    def program() -> list[float]:
        rank, x, y = dist.get_rank(), torch.ones(1), torch.ones(1)
        a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
        first, second = ((x, a), (y, b)) if rank else ((y, b), (x, a))
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in (first, second)]
        for work in reversed(works):
            work.wait()
        return [x.item(), y.item()]

    assert run(program, 2) == [[2.0, 2.0]] * 2


def test_polling_lets_the_others_run() -> None:
    def program() -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        return x.item()

    assert run(program, 3) == [3.0] * 3


def test_polling_for_ever_is_a_deadlock() -> None:
    def program(rank: int) -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True) if rank else None
        while work is not None and not work.is_completed():
            pass

    text = fails(DeadlockError, program)
    assert "rank 0 has finished" in text
    assert line_of(program, 2) in text


def test_groups_end_with_their_run() -> None:
    group = run(lambda: current_world().group(range(2)).process_group, 2)[0]
    with pytest.raises(WorldError, match="run has ended"):
        group.allreduce([torch.ones(1)])


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankThread.start

    def start_two(thread: RankThread) -> None:
        if thread.rank == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(RankThread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        run(dist.get_rank, 4)


@pytest.mark.parametrize("to_the_process", [True, False])
def test_the_caller_can_break_off_a_run(to_the_process: bool) -> None:
    def program() -> None:
        if current_world().rank == 1:
            if to_the_process:
                os.kill(os.getpid(), signal.SIGINT)
            else:  # the kernel may give the signal to any thread; the thread of the caller then sleeps on
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            while True:
                time.sleep(0.001)
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run(program, 2)
    assert run(dist.get_rank, 2) == [0, 1]


def test_a_group_of_another_rank_is_refused() -> None:
    names = []

    def program() -> None:
        names.append(dist.group.WORLD.group_name)
        NATIVE.wait_tensor(NATIVE.all_reduce(torch.ones(2), "sum", names[0]))

    with pytest.raises(RankError, match="rank 1") as caught:
        run(program, 2)
    assert isinstance(caught.value.__cause__, WorldError)
    assert "a collective of rank 1 on a group of rank 0" in str(caught.value.__cause__)

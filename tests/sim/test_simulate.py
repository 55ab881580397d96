"""What a run is: results by rank, each rank's own world, modes, random numbers; and nothing left behind."""

from __future__ import annotations

import contextvars
import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import WorldError
from shardwise.mesh.world import World, current_world, dry_world, use_world
from shardwise.sim import RankError, run

NATIVE = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    world = current_world()
    return NATIVE.wait_tensor(NATIVE.all_reduce(x, "sum", world.group(range(world.size)).name))


def test_results_come_by_rank_and_arguments_are_passed() -> None:
    def fn(x: int, *, y: int) -> tuple[int, int]:
        world = current_world()
        return world.rank * x, world.size + y

    assert run(fn, 3, 10, y=1) == [(0, 4), (10, 4), (20, 4)]


def test_each_rank_has_its_own_world() -> None:
    worlds = run(current_world, 4)
    assert [(world.kind, world.rank, world.size) for world in worlds] == [("simulated", rank, 4) for rank in range(4)]
    assert len({id(world.memory) for world in worlds}) == 4


def test_the_callers_world_stays() -> None:
    with use_world(dry_world(1, 2)) as world:
        run(current_world, 2)
        assert current_world() is world


def test_many_ranks() -> None:
    results = run(lambda: all_reduce(torch.tensor(float(current_world().rank))).item(), 64)
    assert results == [64 * 63 / 2] * 64


def test_a_world_needs_ranks() -> None:
    with pytest.raises(WorldError, match="0 ranks"):
        run(current_world, 0)


def test_ranks_take_turns_in_the_same_order_every_time() -> None:
    def program(log: list[tuple[int, int]]) -> None:
        rank = current_world().rank
        pair = current_world().group((rank // 2 * 2, rank // 2 * 2 + 1))
        for step in range(3):
            log.append((rank, step))
            NATIVE.wait_tensor(NATIVE.all_reduce(torch.ones(1), "sum", pair.name))
            all_reduce(torch.ones(1))

    logs: list[list[tuple[int, int]]] = [[], [], []]
    for log in logs:
        run(program, 4, log)
    assert logs[0] == logs[1] == logs[2]
    assert [step for _, step in logs[0]] == [0] * 4 + [1] * 4 + [2] * 4


def test_nothing_is_left_behind() -> None:
    def program() -> str:
        everyone = current_world().group(range(4))
        NATIVE.all_reduce(torch.ones(2), "sum", everyone.name)  # launched, never waited for
        pair = dist.new_group([0, 1])
        return everyone.name if pair is None else everyone.process_group.group_name

    before = threading.enumerate()
    names = run(program, 4)
    assert threading.enumerate() == before
    assert not dist.is_initialized()
    for name in names:
        with pytest.raises(RuntimeError):
            _resolve_process_group(name)


def test_worlds_are_freed() -> None:
    def program() -> weakref.ref[World]:
        all_reduce(torch.ones(1))
        return weakref.ref(current_world())

    worlds = run(program, 3)
    gc.collect()
    assert [world() for world in worlds] == [None] * 3


def test_launched_collectives_complete_though_nobody_waits() -> None:
    x = [torch.ones(2) for _ in range(3)]
    run(lambda: dist.all_reduce(x[dist.get_rank()], async_op=True) and None, 3)
    assert [each.tolist() for each in x] == [[3, 3]] * 3


def test_a_launched_collective_that_others_never_call_is_dropped() -> None:
    def program() -> int:
        if dist.get_rank() == 0:
            NATIVE.all_reduce(torch.ones(2), "sum", current_world().group(range(2)).name)
        return dist.get_rank()

    assert run(program, 2) == [0, 1]


def test_runs_nest() -> None:
    def outer() -> tuple[list[float], float]:
        inner = run(lambda: all_reduce(torch.ones(())).item(), 3)
        return inner, all_reduce(torch.ones(())).item()

    assert run(outer, 2) == [([3.0] * 3, 2.0)] * 2


def test_runs_from_several_threads_do_not_mix() -> None:
    results: dict[int, list[float]] = {}

    def caller(size: int) -> None:
        results[size] = run(lambda: all_reduce(torch.ones(())).item(), size)

    threads = [threading.Thread(target=caller, args=(size,)) for size in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {size: [float(size)] * size for size in (2, 3, 4)}


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_random_numbers_start_from_the_callers_state_on_every_rank() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = [draw(), draw()]

    def program() -> list[tuple[float, float, float]]:
        first = draw()
        all_reduce(torch.ones(1))
        return [first, draw()]

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert run(program, 3) == [expected] * 3
    assert draw() == expected[0]  # the caller's own stream was not touched


def test_random_numbers_of_ranks_are_independent() -> None:
    def program() -> list[float]:
        rank = current_world().rank
        torch.manual_seed(rank)
        drawn = []
        for _ in range(3):
            drawn += torch.rand(1 + rank).tolist()
            all_reduce(torch.ones(1))
        return drawn

    for rank, drawn in enumerate(run(program, 3)):
        generator = torch.Generator().manual_seed(rank)
        assert drawn == [x for _ in range(3) for x in torch.rand(1 + rank, generator=generator).tolist()]


def test_modes_of_the_caller_reach_the_ranks_and_stay_with_them() -> None:
    setting: contextvars.ContextVar[int] = contextvars.ContextVar("setting", default=0)

    def program() -> tuple[bool, bool, int]:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(current_world().rank == 0)
        setting.set(setting.get() + current_world().rank)
        all_reduce(torch.ones(1))
        return before, torch.is_grad_enabled(), setting.get()

    setting.set(5)
    with torch.no_grad():
        assert run(program, 2) == [(False, True, 5), (False, False, 6)]
    assert torch.is_grad_enabled()
    assert setting.get() == 5


def test_inference_and_autocast_reach_the_ranks() -> None:
    def program() -> tuple[bool, torch.dtype]:
        return torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert run(program, 2) == [(True, torch.bfloat16)] * 2
    assert run(program, 2) == [(False, torch.float32)] * 2


class Doubling(torch.autograd.Function):
    """Sums over all ranks, forward and backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return SummedBackward.apply(grad)


class SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return all_reduce(grad)


def test_collectives_in_backward_and_in_its_backward() -> None:
    values = [1.0, 2.0, 3.0]

    def program() -> tuple[float, float]:
        x = torch.tensor(values[current_world().rank], requires_grad=True)
        loss = Doubling.apply(x) ** 3
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return first.item(), second.item()

    x = torch.tensor(values, requires_grad=True)  # one rank that does what three do
    total = 3 * x.sum() ** 3
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert run(program, 3) == list(zip(first.tolist(), second.tolist(), strict=True))


def test_torch_is_as_before() -> None:
    before = (dist.init_process_group, c10d._world, c10d._new_group_with_tag, torch.default_generator.get_state())
    with pytest.raises(RankError):
        run(lambda: [][0], 2)
    after = (dist.init_process_group, c10d._world, c10d._new_group_with_tag)
    assert all(x is y for x, y in zip(before, after, strict=False))
    assert torch.equal(before[3], torch.default_generator.get_state())

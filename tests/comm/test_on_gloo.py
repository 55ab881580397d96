"""The same programs on real process groups as in the simulator, with the same results."""

from __future__ import annotations

import pytest
import torch
from tests.comm.dense import CASES, sample
from tests.gloo import run_gloo

from shardwise import sim
from shardwise.collectives import all_reduce, all_reduce_coalesced
from shardwise.mesh.world import current_world

DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.complex64, torch.bool]


def values() -> list[list[float]]:
    world = current_world()
    xs = [sample(world.rank, world.size, dtype) for dtype in (torch.float32, torch.complex64, torch.float16)]
    results = [x.wait().to(torch.complex128).flatten().tolist() for x in all_reduce_coalesced([*xs, *xs], "sum", None)]
    for case, (call, _) in CASES.items():
        for dtype in DTYPES if "reduce" not in case else DTYPES[:1]:
            got = call(sample(world.rank, world.size, dtype), list(range(world.size)), world.rank)
            results.append(got.wait().to(torch.complex128).flatten().tolist())
    return results


def gradients() -> list[list[float]]:
    world = current_world()
    results = []
    for call, _ in CASES.values():
        x = (sample(world.rank, world.size) + 1).requires_grad_()
        (call(x, list(range(world.size)), world.rank) ** 2 * (world.rank + 1)).sum().backward()
        results.append(x.grad.flatten().tolist())
    return results


def totals_of_halves() -> list[float]:
    half = [[0, 1], [2, 3]]
    return [all_reduce(torch.tensor(1.0 * current_world().rank), "sum", half).item() for _ in range(3)]


@pytest.mark.gloo
def test_two_processes() -> None:
    assert run_gloo(values_and_gradients, 2) == sim.run(values_and_gradients, 2)


def values_and_gradients() -> tuple[list[list[float]], list[list[float]]]:
    return values(), gradients()


def values_and_totals() -> tuple[list[list[float]], list[float]]:
    return values(), totals_of_halves()


@pytest.mark.gloo
def test_four_processes_and_groups_of_two() -> None:
    found = run_gloo(values_and_totals, 4)
    assert [each for each, _ in found] == [each for each, _ in sim.run(values_and_totals, 4)]
    assert [totals for _, totals in found] == [[1.0] * 3] * 2 + [[5.0] * 3] * 2

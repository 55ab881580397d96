"""The same program gives the same numbers on simulated ranks and on real ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.gloo import run_gloo

from shardwise.mesh.world import current_world
from shardwise.sim import run

NATIVE = torch.ops._c10d_functional
WHOLE = [torch.int64, torch.int32, torch.uint8, torch.int8]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, *WHOLE]
REDUCTIONS = [
    *[("avg", dtype) for dtype in FLOATS],  # gloo averages no whole numbers
    *[(name, dtype) for name in ("sum", "product", "min", "max") for dtype in DTYPES],
    *[(name, dtype) for name in ("band", "bor", "bxor") for dtype in WHOLE],
]


def every_collective() -> dict[str, torch.Tensor]:
    world = current_world()
    rank, size, name = world.rank, world.size, world.group(range(world.size)).name
    results = {}
    for reduce_op, dtype in REDUCTIONS:
        x = (torch.arange(4 * size) % 5 - 2 * (dtype != torch.uint8) + rank).to(dtype)
        whole, part = NATIVE.all_reduce(x, reduce_op, name), NATIVE.reduce_scatter_tensor(x, reduce_op, size, name)
        results[f"all_reduce {reduce_op} {dtype}"] = NATIVE.wait_tensor(whole)
        results[f"reduce_scatter {reduce_op} {dtype}"] = NATIVE.wait_tensor(part)
    for dtype in [*DTYPES, torch.bool, torch.complex64]:
        x = (torch.arange(6).view(3, 2) + 10 * rank).to(dtype)
        results[f"all_gather {dtype}"] = NATIVE.wait_tensor(NATIVE.all_gather_into_tensor(x, size, name))
        results[f"broadcast {dtype}"] = NATIVE.wait_tensor(NATIVE.broadcast(x, 1, name))
    for dtype in DTYPES:
        x = (torch.arange(6).view(3, 2) + 10 * rank).to(dtype)
        sizes = [1, 2] if rank == 0 else [3, 0]
        received = [1, 3] if rank == 0 else [2, 0]
        results[f"all_to_all {dtype}"] = NATIVE.wait_tensor(NATIVE.all_to_all_single(x, received, sizes, name))
    odd = dist.new_group([size - 1])
    results["group"] = torch.tensor([dist.get_rank(odd), dist.get_world_size(odd)])
    return results


@pytest.mark.gloo
def test_every_collective_gives_the_same_on_real_ranks() -> None:
    real = run_gloo(every_collective, 2, timeout=120)
    for rank, results in enumerate(run(every_collective, 2)):
        assert results.keys() == real[rank].keys()
        for what, result in results.items():
            assert torch.equal(result, real[rank][what]), what

"""Distributed tensors inside torch.compile: made, moved and taken apart in one graph, with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.gloo import run_gloo
from torch import Tensor

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, parallel, sim
from shardwise.mesh.world import current_world


def compiled(call: Callable[..., Tensor], backend: str = "aot_eager") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend)


def there_and_back(x: DTensor) -> Tensor:
    mesh = x.device_mesh
    local = x.to_local(grad_placements=[Shard(0)])
    again = DTensor.from_local(local * 2, mesh, [Shard(0)])
    summed = DTensor.from_local(again.redistribute(mesh, [Replicate()]).to_local(), mesh, (Partial("avg"),))
    return summed.redistribute(placements=[Shard(1)]).full_tensor().pow(2).sum()


def uneven(x: DTensor) -> Tensor:
    local = x.to_local()
    whole = DTensor.from_local(local + 1, x.device_mesh, [Shard(0)], shape=(5, 4), stride=(4, 1))
    return whole.redistribute(placements=[Replicate()], async_op=True).to_local().pow(2).sum()


PROGRAMS = {
    "there and back": (there_and_back, (4, 4), lambda x: (2 * x).pow(2).sum()),
    "uneven": (uneven, (5, 4), lambda x: (x + 1).pow(2).sum() * 2),  # a replica's loss counts on each of two ranks
}


def made_and_moved(backend: str, names: Sequence[str], whole: dict[str, Tensor]) -> None:
    mesh = shardwise.init_device_mesh("cpu", (2,))
    for name in names:
        call, _, meaning = PROGRAMS[name]
        results = []
        for run in (call, compiled(call, backend)):
            x = shardwise.distribute_tensor(whole[name], mesh, [Shard(0)]).requires_grad_()
            loss = run(x)
            loss.backward()
            results.append([loss.detach(), x.grad.full_tensor()])
        torch.testing.assert_close(*results)
        if name == "there and back":
            plain = whole[name].clone().requires_grad_()
            (want := meaning(plain)).backward()
            torch.testing.assert_close(results[0], [want.detach(), plain.grad])


def drawn() -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=torch.float64) for name, (_, shape, _) in PROGRAMS.items()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_made_and_moved(name: str, backend: str) -> None:
    sim.run(made_and_moved, 2, backend, [name], drawn())


def parallel_layers(backend: str) -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    net, mesh, rank = copy.deepcopy(plain), shardwise.init_device_mesh("cpu", (2,)), current_world().rank
    plan = {
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
    }
    parallel.parallelize_module(net, mesh, plan)
    run = compiled(lambda x: net(x), backend)
    for rows in (8, 12):  # which compiles it anew
        x = torch.randn(rows, 4)
        want, out = plain(x), run(x.chunk(2)[rank])
        torch.testing.assert_close(out, want.chunk(2)[rank])
        (want**2).sum().backward()
        (out**2).sum().backward()
    for got, parameter in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), parameter.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_parallel_layers(backend: str) -> None:
    sim.run(parallel_layers, 2, backend)


def everything(whole: dict[str, Tensor]) -> None:
    made_and_moved("aot_eager", list(PROGRAMS), whole)
    parallel_layers("aot_eager")


@pytest.mark.gloo
def test_on_gloo() -> None:
    run_gloo(everything, 2, drawn())

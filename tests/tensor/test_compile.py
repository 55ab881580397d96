"""Distributed tensors inside torch.compile: made, moved and taken apart in one graph, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_made_and_moved(name: str, backend: str) -> None:
    call, shape, meaning = PROGRAMS[name]
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    want = meaning(whole)
    want.backward()

    def program() -> list[Tensor]:
        mesh = shardwise.init_device_mesh("cpu", (2,))
        results = []
        for run in (call, compiled(call, backend)):
            x = shardwise.distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
            loss = run(x)
            loss.backward()
            results += [loss.detach(), x.grad.full_tensor()]
        return results

    for loss, gradient, traced, back in sim.run(program, 2):
        torch.testing.assert_close([traced, back], [loss, gradient])
        if name == "there and back":
            torch.testing.assert_close([traced, back], [want.detach(), whole.grad])


def test_parallel_layers() -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    x = torch.randn(8, 4)
    want = plain(x)
    (want**2).sum().backward()

    def program() -> list[Tensor]:
        mesh, rank = shardwise.init_device_mesh("cpu", (2,)), current_world().rank
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
        net.load_state_dict(plain.state_dict())
        plan = {
            "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
            "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
        }
        run = compiled(parallel.parallelize_module(net, mesh, plan).__call__)
        out = run(x.chunk(2)[rank])
        (out**2).sum().backward()
        torch.testing.assert_close(out, want.chunk(2)[rank])
        return [parameter.grad.full_tensor() for parameter in net.parameters()]

    for gradients in sim.run(program, 2):
        torch.testing.assert_close(gradients, [parameter.grad for parameter in plain.parameters()])

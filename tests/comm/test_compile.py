"""Inside torch.compile the collectives are traced whole, wait in the graph, and have the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.comm.dense import CASES, sample
from torch import Tensor

from shardwise import collectives as c
from shardwise import sim
from shardwise.mesh.mesh import init_device_mesh
from shardwise.mesh.world import current_world, dry_world, use_world


def compiled(call: Callable[..., Tensor], backend: object = "aot_eager", **options: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend, **options)


def with_gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    result = call(x)
    (result**2).sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad]


@pytest.mark.parametrize("case", CASES)
def test_compiled_is_eager(case: str) -> None:
    def program() -> None:
        rank, everyone = current_world().rank, list(range(current_world().size))
        x = sample(rank, 2) + 1

        def call(x: Tensor) -> Tensor:
            return CASES[case][0](x, everyone, rank) * 2

        want = call(x)  # which makes the group: a graph cannot
        traced = compiled(call)
        assert torch.equal(traced(x), want)
        for got, want in zip(with_gradient(traced, x), with_gradient(call, x), strict=True):
            assert torch.equal(got, want)

    sim.run(program, 2)


def operators(call: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled(call, backend)(x)
    return names


def test_the_graph_waits_where_the_value_is_used() -> None:
    with use_world(dry_world(0, 4)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh.axis_group(1)  # the group is there before the graph
        names = operators(lambda x: c.all_reduce(x, "sum", (mesh, "tp")) + 1, torch.ones(4))
    native = [name for name in names if "c10d" in name]
    assert native == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]


@pytest.mark.parametrize("dim", [0, 1])
def test_pending_input_is_waited_for_inside(dim: int) -> None:
    def program() -> Tensor:
        pending = c.all_gather_tensor(torch.full((2, 2), current_world().rank + 1.0), dim, None)
        result = compiled(lambda x: x * 2)(pending)
        assert not isinstance(result, c.AsyncCollectiveTensor)
        return result

    want = torch.cat([torch.full((2, 2), 2.0), torch.full((2, 2), 4.0)], dim)
    assert all(torch.equal(got, want) for got in sim.run(program, 2))


def test_dynamic_sizes() -> None:
    def program() -> None:
        traced = compiled(
            lambda x: c.reduce_scatter_tensor(c.all_gather_tensor(x, 1, None), "sum", 0, None), dynamic=True
        )
        current_world().group(range(2))
        for rows in (2, 4, 6):
            assert torch.equal(traced(torch.ones(rows, 3)), torch.full((rows // 2, 6), 2.0))

    sim.run(program, 2)

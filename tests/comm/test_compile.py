"""In torch.compile and torch.export the collectives are traced whole, wait in the graph, have the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.comm.dense import CASES, sample
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from shardwise import collectives as c
from shardwise import sim
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
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


COALESCED: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "coalesced all_reduce": lambda x, g: sum(c.all_reduce_coalesced([x, x[0]], "avg", g)),
    "coalesced all_gather": lambda x, g: sum(c.all_gather_into_tensor_coalesced([x, x * 2], g)),
    "coalesced reduce_scatter": lambda x, g: sum(c.reduce_scatter_tensor_coalesced([x, x], "sum", [0, -3], g)),
}


@pytest.mark.parametrize("case", [*CASES, *COALESCED])
def test_compiled_is_eager(case: str) -> None:
    def program() -> None:
        rank, everyone = current_world().rank, list(range(current_world().size))
        x = sample(rank, 2) + 1

        def call(x: Tensor) -> Tensor:
            found = CASES[case][0](x, everyone, rank) if case in CASES else COALESCED[case](x, everyone)
            return found * 2

        traced = compiled(call)
        assert torch.equal(traced(x), call(x))
        for got, want in zip(with_gradient(traced, x), with_gradient(call, x), strict=True):
            assert torch.equal(got, want)

    sim.run(program, 2)


def several(x: Tensor) -> Tensor:
    """Of 4n by 4 elements."""
    whole = c.all_gather_tensor(x * 2, 1, None)
    part = c.reduce_scatter_tensor(torch.sin(whole), "avg", 0, None)
    return c.broadcast(c.all_reduce(part, "sum", None) + c.permute_tensor(part, [1, 0], None), 1, None)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backends(backend: str) -> None:
    def program() -> None:
        x = torch.arange(16.0).view(4, 4) * (current_world().rank + 1) / 7
        torch.testing.assert_close(with_gradient(compiled(several, backend), x), with_gradient(several, x))

    sim.run(program, 2)


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = several(x @ self.weight)
        y = y + c.all_to_all_single(y, None, None, None) + c.all_reduce_coalesced([y, y[0]], "max", None)[0]
        return y + c.sum_forward(c.sum_backward(y, None), None)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_is_eager(strict: bool) -> None:
    def program() -> None:
        layer, x = Linear(), torch.arange(32.0).view(8, 4) * (current_world().rank + 1) / 7
        rows = 4 * torch.export.Dim("rows", min=2, max=64)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict)
        names = [str(node.target) for node in exported.graph.nodes if "c10d" in str(node.target)]
        assert names.count("_c10d_functional.wait_tensor.default") >= len(names) // 2
        longer, gradients = torch.cat([x, x, x]), []
        for call in (exported.module(), layer):
            result = call(longer)
            (result**2).sum().backward()
            gradients.append([result.detach(), layer.weight.grad])
            layer.weight.grad = None
        torch.testing.assert_close(*gradients)

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


def test_the_graph_of_a_pending_input_waits_first() -> None:
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    with use_world(dry_world(0, 2)):
        pending = c.all_reduce(torch.ones(4), "sum", None)
        compiled(lambda x: x * 2, aot_autograd(fw_compiler=backend))(pending)
        assert names[0] == "_c10d_functional.wait_tensor.default"


# Of a mesh (dp=2, tp=2) that nobody has used before: the group in which rank 1 of 4 is.
FORMS: dict[str, Callable[[DeviceMesh], tuple[object, list[int]]]] = {
    "the world": lambda mesh: (None, [0, 1, 2, 3]),
    "ranks": lambda mesh: ([1, 3], [1, 3]),
    "lists of ranks": lambda mesh: ([[0, 1], [2, 3]], [0, 1]),
    "axis": lambda mesh: ((mesh, "tp"), [0, 1]),
    "slice": lambda mesh: (mesh["dp"], [1, 3]),
    "axis of a slice": lambda mesh: ((mesh["dp", "tp"], -1), [0, 1]),
    "Group": lambda mesh: (current_world().group([0, 1]), [0, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_regions_make_the_groups_that_they_use(form: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with use_world(dry_world(1, 4)) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        traced = compiled(lambda x: c.all_reduce(c.broadcast(x, 0, None), "sum", FORMS[form](mesh)[0]), backend)
        traced(torch.ones(2)), traced(torch.zeros(2))
        assert len(graphs) == 1
        (sent,) = (node for node in graphs[0].graph.nodes if "all_reduce" in str(node.target))
        ranks = FORMS[form](mesh)[1]
        assert sent.args[2] == world.group(ranks).name
    with use_world(dry_world(1, 4)) as other:  # where that group means nothing
        traced(torch.ones(2))
        (sent,) = (node for node in graphs[-1].graph.nodes if "all_reduce" in str(node.target))
        assert sent.args[2] == other.group(ranks).name


def test_what_a_rank_asks_its_mesh_is_constant() -> None:
    with use_world(dry_world(3, 4)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def call(x: Tensor) -> Tensor:
            place = mesh.get_coordinate()
            return x + 10 * mesh.get_local_rank("dp") + mesh["tp"].size() + place[1] + current_world().rank

        assert compiled(call)(torch.zeros(1)).item() == 16


def test_dynamic_sizes() -> None:
    def program() -> None:
        traced = compiled(
            lambda x: c.reduce_scatter_tensor(c.all_gather_tensor(x, 1, None), "sum", 0, None), dynamic=True
        )
        for rows in (2, 4, 6):
            assert torch.equal(traced(torch.ones(rows, 3)), torch.full((rows // 2, 6), 2.0))

    sim.run(program, 2)

"""Lists of tensors that lie in different ways, on different meshes, or are plain among distributed ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire

VALUES = [torch.randn(size, generator=torch.Generator().manual_seed(place)) for place, size in enumerate(
    [(8, 3), (5,), (4, 6), (3, 3)]
)]  # fmt: skip


def parameters() -> list[nn.Parameter]:
    """Two on one mesh, one on another, one plain; each with itself times 2 as gradient."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    placements = [(line, [Shard(0)]), (line, [Shard(0)]), (grid, [Replicate(), Shard(1)])]
    made = [distribute_tensor(x.clone(), *how) for x, how in zip(VALUES, placements, strict=False)]
    made = [nn.Parameter(x) for x in [*made, VALUES[3].clone()]]
    for parameter in made:
        parameter.grad = parameter.detach() * 2
    return made


def plain() -> list[nn.Parameter]:
    made = [nn.Parameter(x.clone()) for x in VALUES]
    for parameter in made:
        parameter.grad = parameter.detach() * 2
    return made


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all(order: float, foreach: bool) -> None:
    def clipped(make):
        given = make()
        norm = nn.utils.clip_grad_norm_(given, 0.7, norm_type=order, foreach=foreach)
        return [whole(norm), *(whole(parameter.grad) for parameter in given)]

    for found in sim.run(clipped, 4, parameters):
        torch.testing.assert_close(found, clipped(plain))


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "adam": (torch.optim.Adam, {"maximize": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_those_of_plain_parameters(name: str) -> None:
    cls, options = OPTIMIZERS[name]

    def stepped(make):
        given = make()
        optimizer = cls(given, lr=0.1, fused=True, **options)
        optimizer.step()
        optimizer.step()
        return [whole(parameter) for parameter in given]

    torch.testing.assert_close(sim.run(stepped, 4, parameters)[3], stepped(plain))


@pytest.mark.parametrize("foreach", [True, False])
def test_norms_of_one_mesh_are_reduced_together(foreach: bool) -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [Shard(0)]) for x in VALUES[1:]]
        given.append(distribute_tensor(VALUES[0], mesh, [Replicate()]))
        sent = []
        with wire.observing(lambda transmission: sent.append(transmission.op)):
            total = nn.utils.get_total_norm(given, foreach=foreach) + 1
        return sent, whole(total)

    for sent, total in sim.run(body, 2):
        assert sent == ["all_reduce"]
        torch.testing.assert_close(total, torch.cat([x.flatten() for x in VALUES]).norm() + 1)


@pytest.mark.parametrize("spoilt", [False, True])
def test_every_rank_hears_of_a_gradient_that_is_not_finite(spoilt: bool) -> None:
    def body():
        gradients = [parameter.grad for parameter in parameters()]
        if spoilt and isinstance(gradients[0], DTensor) and gradients[0].device_mesh.get_rank() == 3:
            gradients[0].to_local()[-1] = torch.inf
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
        return found.item(), whole(gradients[2])

    for found, gradient in sim.run(body, 4):
        assert found == spoilt
        torch.testing.assert_close(gradient, VALUES[2])


FUSED = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "adam, lr in a tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1), fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "sgd with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_fused_step_of_gradients_that_lie_otherwise_is_that_of_one_device(name, count) -> None:
    shapes = [(3,), (5, 3), (2, 2), (4,)][:count]
    whole = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]
    lying = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), None, (Shard(0), Replicate())]

    def stepped(parameters, given) -> list[torch.Tensor]:
        optimizer = FUSED[name](parameters)
        for _ in range(3):
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in parameters]

    def body() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (3,))
        pairs = [
            [x.clone() if where is None else distribute_tensor(x, mesh, [where[side]]) for side, x in enumerate(pair)]
            for pair, where in zip(zip(whole, gradients, strict=True), lying, strict=False)
        ]
        return stepped([pair[0].requires_grad_() for pair in pairs], [pair[1] for pair in pairs])

    expected = stepped([x.clone().requires_grad_() for x in whole], gradients)
    for found in sim.run(body, 3):
        torch.testing.assert_close(found, expected)

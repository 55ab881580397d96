"""Random operators: the numbers of one device, whatever the sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import Replicate, Shard, current_world, distribute_tensor, init_device_mesh, rand, randn, sim

DRAWS = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "rand_like": torch.rand_like,
    "dropout": lambda x: F.dropout(x + 1, 0.4),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)]], ids=str)
def test_the_numbers_are_those_of_one_device(name, placements) -> None:
    torch.manual_seed(7)
    dense = [DRAWS[name](torch.zeros(5, 4)) for _ in range(2)]

    def body():
        torch.manual_seed(7)
        mesh = init_device_mesh("cpu", (2,))
        return [DRAWS[name](distribute_tensor(torch.zeros(5, 4), mesh, placements)).full_tensor() for _ in range(2)]

    for drawn in sim.run(body, 2):
        torch.testing.assert_close(drawn, dense)


def test_factories_draw_like_torch() -> None:
    torch.manual_seed(3)
    dense = torch.rand(5, 3), torch.randn(4)

    def body():
        torch.manual_seed(3)
        mesh = init_device_mesh("cpu", (2,))
        made = rand(5, 3, device_mesh=mesh, placements=[Shard(0)]), randn(4, device_mesh=mesh)
        return tuple(each.full_tensor() for each in made)

    for drawn in sim.run(body, 2):
        torch.testing.assert_close(drawn, dense)


def test_replicas_agree_though_the_ranks_have_drawn_by_themselves() -> None:
    def body():
        torch.manual_seed(5)
        torch.randn(1 + 3 * current_world().rank)
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(16), mesh, [Replicate()])
        first = torch.rand_like(x).to_local()
        torch.randn(2 * current_world().rank)
        return first, F.dropout(x, 0.5).to_local(), torch.bernoulli(x * 0.5).to_local()

    one, other = sim.run(body, 2)
    torch.testing.assert_close(one, other)


def test_the_same_seed_again_repeats_the_numbers() -> None:
    def body():
        x = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])
        drawn = []
        for _ in range(2):
            torch.manual_seed(9)
            drawn.append(torch.rand_like(x).full_tensor())
        return (*drawn, torch.rand_like(x).full_tensor())

    for first, second, later in sim.run(body, 2):
        torch.testing.assert_close(first, second)
        assert not torch.equal(second, later)


def test_recomputation_draws_the_same_numbers() -> None:
    def body(reentrant):
        x = distribute_tensor(torch.ones(4, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
        F.dropout(x, 0.5)
        x.requires_grad_()
        y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        return y.full_tensor().detach(), x.grad.full_tensor()

    for reentrant in (False, True):
        for kept, gradient in sim.run(body, 2, reentrant):
            torch.testing.assert_close(gradient, kept)


def test_distributed_and_plain_draws_share_one_stream() -> None:
    torch.manual_seed(0)
    dense = [torch.randn(3), torch.rand(4), torch.rand(3)]

    def body():
        mesh = init_device_mesh("cpu", (2,))
        rand(5, device_mesh=mesh)
        torch.manual_seed(0)
        return torch.randn(3), rand(4, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.rand(3)

    torch.testing.assert_close(list(sim.run(body, 2)[0]), dense)


def test_one_rank_that_draws_by_itself_disturbs_nobody() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(1)
        if current_world().rank == 1:
            torch.rand(7)
        before = torch.get_rng_state()
        drawn = rand(8, device_mesh=mesh, placements=[Replicate()]).to_local()
        return drawn, torch.equal(torch.get_rng_state(), before)

    (one, _), (other, untouched) = sim.run(body, 2)
    torch.testing.assert_close(one, other)
    assert untouched

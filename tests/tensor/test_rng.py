"""Random operators: the numbers of one device, whatever the sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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

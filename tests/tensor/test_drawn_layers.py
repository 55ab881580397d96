"""Layers that draw: the same numbers whatever the sharding, each rank keeping its part."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire

PLACEMENTS = (Shard(0), Shard(1), Replicate())


def drawn(run, x: torch.Tensor, world: int = 2) -> list[torch.Tensor]:
    def body() -> list[torch.Tensor]:
        mesh, found = init_device_mesh("cpu", (world,)), []
        for placement in PLACEMENTS:
            torch.manual_seed(3)
            found.append(run(distribute_tensor(x, mesh, [placement])).full_tensor())
        return found

    return [item for items in sim.run(body, world) for item in items]


def test_dropout_is_that_of_one_rank() -> None:
    x = torch.rand(5, 6) + 1
    torch.manual_seed(3)
    want = F.dropout(x, 0.4)
    assert all(torch.equal(found, want) for found in drawn(lambda own: F.dropout(own, 0.4), x))


def test_fused_dropout_keeps_what_it_does_not_drop_and_moves_nothing() -> None:
    x = torch.rand(5, 6) + 1
    found = drawn(lambda own: torch.native_dropout(own, 0.4, True)[0], x)
    assert all(torch.equal(item, found[0]) for item in found)
    kept = found[0] != 0
    torch.testing.assert_close(found[0][kept], x[kept] / 0.6)
    assert 0 < kept.sum() < x.numel()

    def body() -> list[str]:
        own, sent = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(0)]), []
        torch.native_dropout(own, 0.4, True)
        with wire.observing(lambda transmission: sent.append(transmission.op)):
            torch.native_dropout(own, 0.4, True)
        return sent

    assert sim.run(body, 2) == [["broadcast"], ["broadcast"]]  # the random state, and no data


def test_randomised_slopes_are_those_of_one_rank() -> None:
    x = torch.randn(5, 6)
    torch.manual_seed(3)
    want = F.rrelu(x, 0.1, 0.9, training=True)
    assert all(torch.equal(found, want) for found in drawn(lambda own: F.rrelu(own, 0.1, 0.9, training=True), x))


def test_places_of_a_pool_are_those_of_the_first_rank() -> None:
    x = torch.randn(3, 4, 9, 9)

    def body(placement) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(7 + mesh.get_rank())  # each rank draws its own places
        return F.fractional_max_pool2d(distribute_tensor(x, mesh, [placement]), 3, output_size=4).full_tensor()

    torch.manual_seed(7)
    want = F.fractional_max_pool2d(x, 3, output_size=4)
    for placement in (*PLACEMENTS, Shard(2)):
        assert all(torch.equal(found, want) for found in sim.run(body, 2, placement))

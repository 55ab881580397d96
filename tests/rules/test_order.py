"""The largest entries along cut dims: those of one rank, and only what may be among them is exchanged."""

from __future__ import annotations

import pytest
import torch

from shardwise import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire

S0, R = Shard(0), Replicate()
LYING = [(S0, Shard(1)), (S0, S0), (StridedShard(0, 2), R), (R, S0)]
WHOLE = torch.randperm(90, generator=torch.Generator().manual_seed(2)).float().view(45, 2)
SPOILT = WHOLE.clone()
SPOILT[7, 0] = SPOILT[44, 1] = torch.nan
SPOILT[3, 0] = SPOILT[20:, 1] = -torch.inf

FINDS = {
    "topk": lambda x: x.topk(3, 0),
    "least": lambda x: x.topk(2, 0, largest=False),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "behind": lambda x: x.kthvalue(x.shape[0] - 1, 0, keepdim=True),
    "much": lambda x: x.topk(x.shape[0] // 2, 0),
}


@pytest.mark.parametrize("what", FINDS)
@pytest.mark.parametrize("given", [WHOLE, SPOILT, WHOLE[:37].long(), WHOLE[:4]], ids=["all", "spoilt", "long", "few"])
def test_the_first_entries_are_those_of_one_rank(what: str, given: torch.Tensor) -> None:
    want = FINDS[what](given)

    def body() -> list[tuple[torch.Tensor, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (3, 2))
        found = [FINDS[what](distribute_tensor(given, mesh, places)) for places in LYING]
        return [(values.full_tensor(), where.full_tensor()) for values, where in found]

    for values, where in sim.run(body, 6)[5]:
        torch.testing.assert_close(values, want[0], equal_nan=True)
        taken = given.gather(0, where.view(-1, 2)).view(values.shape)
        torch.testing.assert_close(taken, want[0], equal_nan=True)


def test_few_entries_are_exchanged() -> None:
    def body() -> int:
        x = distribute_tensor(torch.rand(400), init_device_mesh("cpu", (2,)), [S0])
        sent = []
        with wire.observing(lambda transmission: sent.append(transmission.bytes)):
            assert x.topk(4).values.placements == (R,)
        return sum(sent)

    assert max(sim.run(body, 2)) <= 4 * (4 + 8)  # a value and a place each


def test_gradients_go_to_the_entries_that_were_found() -> None:
    dense = WHOLE[:, 0].clone().requires_grad_()
    (dense.topk(3).values * torch.arange(3.0)).sum().backward()

    def body() -> torch.Tensor:
        x = distribute_tensor(WHOLE[:, 0], init_device_mesh("cpu", (4,)), [S0]).requires_grad_()
        (x.topk(3).values * distribute_tensor(torch.arange(3.0), x.device_mesh, [R])).sum().backward()
        return x.grad.full_tensor()

    torch.testing.assert_close(sim.run(body, 4)[0], dense.grad)


def test_what_is_pending_is_summed_first() -> None:
    def body() -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        part = torch.tensor([5.0, 1.0, 3.0]) * (1 - 2 * mesh.get_local_rank()) + torch.tensor([0.0, 2.0, 1.0])
        return DTensor.from_local(part, mesh, [Partial()]).topk(2).values.full_tensor().tolist()

    assert sim.run(body, 2)[0] == [4.0, 2.0]


def test_no_entry_of_a_cut_dim_is_an_empty_one() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for whole, places in ((torch.randn(5), [S0, R]), (torch.randn(5, 3), [S0, S0]), (WHOLE, [Shard(1), S0])):
            want, found = whole.topk(0, 0), distribute_tensor(whole, mesh, places).topk(0, 0)
            for one, other in zip(found, want, strict=True):
                assert one.shape == other.shape
                assert one.full_tensor().dtype is other.dtype
                assert one.full_tensor().shape == other.shape

    sim.run(body, 4)

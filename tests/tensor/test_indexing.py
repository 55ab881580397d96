"""Indexing distributed tensors as programs write it: lists, plain index tensors, masks, in place and with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire
from shardwise.errors import MixedTensorError

X = torch.arange(35.0).reshape(7, 5)
MASK = torch.tensor([True, False, True, True, False, False, True])
PLACEMENTS = (Shard(0), Shard(1), Replicate())

READS = {
    "list": lambda x: x[[0, -1, 3]],
    "list beside": lambda x: x[:, [-1]],
    "tensor": lambda x: x[torch.tensor([[5, 0], [2, -7]])],
    "two": lambda x: x[torch.tensor([5, 0, 0]), torch.tensor([[1], [-1]])],
    "mask": lambda x: x[MASK],
    "mask of all": lambda x: x[X > 17],
    "index_select": lambda x: x.index_select(0, torch.tensor([6, 6, 1])),
    "gather": lambda x: x.gather(0, torch.tensor([[6, 0, 3, 3, 1]])),
    "take": lambda x: x.take(torch.tensor([34, 0])),
    "embedding": lambda x: F.embedding(torch.tensor([[6, 0], [1, 1]]), x),
}


def number(x):
    x[[1, -1]] = 5.0


def row(x):
    x[torch.tensor([0, 4])] = x[torch.tensor([5, 5])]


def masked(x):
    x[MASK] = -1.0


def added(x):
    x[[2, 2, 3]] += 1.0


def accumulated(x):
    x.index_put_((torch.tensor([2, 2, 6]),), torch.tensor(1.0), accumulate=True)


def filled(x):
    x.index_fill_(0, torch.tensor([0, -1]), 9.0)


def scattered(x):
    x.scatter_(0, torch.tensor([[6, 0, 3, 3, 1]]), 2.0)


WRITES = (number, row, masked, added, accumulated, filled, scattered)


@pytest.mark.parametrize("name", READS)
def test_what_is_read_and_its_gradient(name: str) -> None:
    read = READS[name]
    dense = X.clone().requires_grad_()
    want = read(dense)
    (want**2).sum().backward()

    def body() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for placement in PLACEMENTS:
            x = distribute_tensor(X, mesh, [placement]).requires_grad_()
            found = read(x)
            (found**2).sum().backward()
            assert torch.equal(found.full_tensor(), want)
            assert torch.equal(x.grad.full_tensor(), dense.grad)

    sim.run(body, 3)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_place_stays_where_it_lies(write) -> None:
    want = X.clone()
    write(want)

    def body() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for placement in PLACEMENTS:
            x = distribute_tensor(X.clone(), mesh, [placement])
            write(x)
            assert x.placements == (placement,)
            assert torch.equal(x.full_tensor(), want)

    sim.run(body, 3)


def test_rows_are_written_by_the_ranks_that_hold_them() -> None:
    def body() -> list[wire.Transmission]:
        x, sent = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(0)]), []
        with wire.observing(sent.append):
            for write in (number, masked, accumulated, filled, scattered):
                write(x)
        return sent

    assert sim.run(body, 2) == [[], []]


def test_plain_tensors_are_indices_and_nothing_else() -> None:
    def body() -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(MixedTensorError, match="plain"):
            x.index_add(0, torch.tensor([0]), torch.ones(1, 5))
        with pytest.raises(MixedTensorError, match="plain"):
            x + torch.ones(7, 5)

    sim.run(body, 2)


def test_an_index_out_of_range_is_refused_on_every_rank() -> None:
    def body() -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        for bad in (lambda: x[[7]], lambda: x.index_select(0, torch.tensor([-1])), lambda: x[[-8]]):
            with pytest.raises(IndexError, match="out of range"):
                bad()

    sim.run(body, 2)


def test_a_write_over_a_pending_tensor_reduces_it() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(X, mesh, [Shard(0)]).sum(0)
        assert x.placements == (Partial("sum"),)
        x.sqrt_().clamp_min_(8.0)
        assert x.placements == (Partial("sum"),)
        torch.testing.assert_close(x.full_tensor(), X.sum(0).sqrt().clamp_min(8.0))

    sim.run(body, 2)

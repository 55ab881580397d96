"""One element of a dim that axes cut: every view of it stays where it is, and is written through."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardwise import (
    InplaceError,
    Owned,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
    sim,
)
from shardwise.comm import wire

DENSE = torch.arange(1.0, 9.0)
COMPLEX = torch.complex(DENSE, -DENSE)

LAYOUTS = {
    (4,): [[Shard(0)], [StridedShard(0, 2)], [RaggedShard(0, (1, 0, 4, 3))]],
    (2, 2): [
        [Shard(0), Shard(0)],
        [StridedShard(0, 2), Shard(0)],
        [Shard(0), Replicate()],
        [Partial(), Shard(0)],
        [RaggedShard(0, (3, 5)), Shard(0)],
    ],
}

VIEWS = {
    "view": lambda e: e.view(1, 1),
    "view back": lambda e: e.view(1).view(()),
    "unsqueeze": lambda e: e.unsqueeze(-1),
    "squeeze": lambda e: e.squeeze(0),
    "unsqueeze in place": lambda e: e.unsqueeze_(0),
    "squeeze in place": lambda e: e.view(1).squeeze_(),
    "permute": lambda e: e.permute(()),
    "transpose": lambda e: e.view(1, 1).mT,
    "flatten": lambda e: e.flatten(),
    "unflatten": lambda e: e.view(1).unflatten(0, (1, 1)),
    "none": lambda e: e[None, ...],
    "select": lambda e: e.unsqueeze(0)[-1],
    "slice": lambda e: e.unsqueeze(0)[:1],
    "nothing": lambda e: e.unsqueeze(0)[1:],
    "split": lambda e: e.view(1).split(1)[0],
    "diagonal": lambda e: e.view(1, 1).diagonal(),
    "unfold": lambda e: e.unfold(0, 1, 1),
    "no window": lambda e: e.view(1).unfold(0, 0, 1),
    "as strided": lambda e: e.as_strided((1,), (1,)),
    "as strided without dims": lambda e: e.as_strided((), ()),
    "as strided to nothing": lambda e: e.as_strided((0,), (1,)),
    "dtype": lambda e: e.view(e.dtype),
    "pairs": lambda e: torch.view_as_real(e) if e.is_complex() else e,
    "pairs and back": lambda e: torch.view_as_complex(torch.view_as_real(e)) if e.is_complex() else e,
    "one of a pair": lambda e: torch.view_as_real(e)[1] if e.is_complex() else e,
    "real": lambda e: e.real,
    "imaginary": lambda e: e.imag if e.is_complex() else e,
    "conjugate": lambda e: e.conj(),
    "repeated": lambda e: e.repeat(2, 1),
}


@pytest.mark.parametrize("whole", [DENSE, COMPLEX], ids=["real", "complex"])
@pytest.mark.parametrize("mesh_shape", LAYOUTS)
def test_every_view_of_an_element_is_exact_without_communication_and_written_through(mesh_shape, whole) -> None:
    def body():
        mesh = init_device_mesh("cpu", mesh_shape)
        for placements in LAYOUTS[mesh_shape]:
            for name, view in VIEWS.items():
                dense, x, sent = whole.clone(), distribute_tensor(whole, mesh, placements), []
                with wire.observing(sent.append):
                    wanted, seen = view(dense[5]), view(x[5])
                assert not sent, name
                assert torch.equal(seen.full_tensor(), wanted), (name, placements)
                wanted.mul_(2), seen.mul_(2)
                assert torch.equal(x.full_tensor(), dense), (name, placements)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # conjugates of plain tensors
        sim.run(body, 4)


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "dtype" and "in place" not in name])
def test_gradients_through_a_view_of_an_element_are_those_of_the_whole(name) -> None:
    dense = COMPLEX.clone().requires_grad_()
    VIEWS[name](dense[5]).abs().square().sum().backward()

    def body():
        x = distribute_tensor(COMPLEX, init_device_mesh("cpu", (4,)), [Shard(0)]).requires_grad_()
        VIEWS[name](x[5]).abs().square().sum().backward()
        return x.grad.full_tensor()

    for found in sim.run(body, 4):
        torch.testing.assert_close(found, dense.grad)


def test_what_shares_memory_is_refused_to_be_written_on_every_rank_or_written() -> None:
    def body():
        x = distribute_tensor(DENSE, init_device_mesh("cpu", (4,)), [Shard(0)])
        assert x[5].placements == (Owned(2),)
        for write in (lambda y: y.add_(1), lambda y: y.copy_(y + 1), lambda y: torch.add(y, 1, out=y)):
            with pytest.raises(InplaceError, match="one place in memory"):
                write(x[5].expand(3))
        distribute_tensor(torch.zeros(3, 8), x.device_mesh, [Shard(1)]).add_(1)  # a call like the next
        with pytest.raises(InplaceError, match="one place in memory"):
            x.expand(3, 8).add_(1)
        x[5].expand(3).fill_(7)
        return x.full_tensor()

    expected = DENSE.clone()
    expected[5] = 7
    assert all(torch.equal(found, expected) for found in sim.run(body, 4))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_is_a_view_of_nothing(shape) -> None:
    def body():
        mesh = init_device_mesh("cpu", (4,))
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            x = distribute_tensor(torch.ones(shape), mesh, [placement]).requires_grad_()
            y = x.as_strided([0], [1])
            y.sum().backward()
            assert y.shape == (0,)
            assert x.grad.shape == shape

    sim.run(body, 4)

"""What enters several modules in a row enters once: fewer collectives, the same values and gradients."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from parallel.models import assert_same_gradients, line, tensor, twins
from shardwise import Replicate, Shard, current_world
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

NATIVE = torch.ops._c10d_functional


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
IN_PARTS = {
    "norm": SequenceParallel(sequence_dim=0),
    "gate": ColwiseParallel(input_layouts=Shard(0)),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


@pytest.mark.world(2, 4)
def test_a_gated_block_reduces_once_each_way() -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x, y = (tensor(8, 4).requires_grad_() for _ in range(2))
    with CommDebugMode() as seen:
        found = parallel(x)
        found.pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    assert seen.get_comm_counts() == {NATIVE.all_reduce: 2}
    assert_close(found, plain(y))
    assert_close(x.grad, y.grad)
    assert_same_gradients(parallel, plain)


@pytest.mark.world(2)
def test_what_lies_in_parts_is_gathered_once() -> None:
    parallel, plain = twins(Gated, IN_PARTS, line())
    rank, whole = current_world().rank, tensor(8, 4)
    x, y = whole.chunk(2)[rank].clone().requires_grad_(), whole.clone().requires_grad_()
    with CommDebugMode() as seen:
        found = parallel(x)
    assert seen.get_comm_counts() == {NATIVE.all_gather_into_tensor: 1, NATIVE.reduce_scatter_tensor: 1}
    found.pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    assert_close(x.grad, y.grad.chunk(2)[rank])
    assert_same_gradients(parallel, plain)


@pytest.mark.world(2)
def test_what_is_written_to_in_between_enters_anew() -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x = tensor(3, 4)
    first = parallel.gate(x)
    x.mul_(2)
    for found, module in ((first, plain.gate), (parallel.gate(x), plain.gate)):
        size = module.weight.shape[0] // 2
        assert found.shape == (3, size)
    assert_close(parallel.down(parallel.gate(x)), plain.down(plain.gate(x)))


@pytest.mark.world(2)
def test_what_entered_without_gradients_enters_anew_with_them() -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x, y = (tensor(3, 4).requires_grad_() for _ in range(2))
    with torch.no_grad():
        parallel.gate(x)
    parallel.down(parallel.gate(x)).sum().backward()
    plain.down(plain.gate(y)).sum().backward()
    assert_close(x.grad, y.grad)


@pytest.mark.world(2)
def test_every_pass_gives_its_own_gradient() -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x, y = (tensor(3, 4).requires_grad_() for _ in range(2))
    for _ in range(3):
        parallel.down(parallel.gate(x)).sum().backward()
        plain.down(plain.gate(y)).sum().backward()
    assert_close(x.grad, y.grad)


@pytest.mark.world(2)
def test_what_entered_is_not_kept_alive() -> None:
    parallel, _ = twins(Gated, PLAN, line())
    x = tensor(3, 4).requires_grad_() * 2
    parallel.gate(x)
    assert "entered" in current_world().memory
    dead = weakref.ref(x)
    del x
    gc.collect()
    assert dead() is None
    assert "entered" not in current_world().memory


@pytest.mark.world(2)
def test_another_layout_enters_anew() -> None:
    parallel, plain = twins(Gated, {"gate": ColwiseParallel(output_layouts=Replicate())}, line())
    x = tensor(4, 4)
    assert_close(parallel.gate(x), plain.gate(x))
    other, _ = twins(Gated, {"up": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())}, line())
    assert other.up(x).shape == (8, 8)

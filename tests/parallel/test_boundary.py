"""What enters several modules in a row enters once: fewer collectives, the same values and gradients."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from parallel.models import assert_same_gradients, line, tensor, twins
from shardwise import Replicate, Shard, current_world
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, RowwiseParallel

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


WRITES = {
    "in place": lambda x: x.mul_(2),
    "by its data": lambda x: x.data.mul_(2),
    "other data": lambda x: setattr(x, "data", x.detach() * 2),
    "through numpy": lambda x: x.numpy().__imul__(2),
    "by a collective": lambda x: dist.all_reduce(x),
    "on one rank": lambda x: x.mul_(2) if current_world().rank else x.copy_(x * 2),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_whatever_is_written_in_between_is_seen(name, layout) -> None:
    style = ColwiseParallel(input_layouts=layout, output_layouts=Replicate())
    parallel, plain = twins(Gated, {"gate": style}, line())
    whole = tensor(4, 4)
    x = whole.clone() if layout.is_replicate() else whole.chunk(2)[current_world().rank].clone()
    if name == "by a collective" and not layout.is_replicate():
        x = whole[:2].clone()
        whole = torch.cat([x, x])
    with torch.no_grad():
        assert_close(parallel.gate(x), plain.gate(whole))
        WRITES[name](x)
        assert_close(parallel.gate(x), plain.gate(2 * whole))


@pytest.mark.world(2)
@pytest.mark.parametrize("grad", [False, True])
def test_what_asks_for_gradients_later_gets_them(grad) -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x, y = tensor(3, 4), tensor(3, 4).requires_grad_()
    with torch.set_grad_enabled(grad):
        parallel.gate(x)
    parallel.down(parallel.gate(x.requires_grad_())).sum().backward()
    plain.down(plain.gate(y)).sum().backward()
    assert_close(x.grad, y.grad)


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)], ids=str)
def test_normal_tensors_enter_in_inference_mode(layout) -> None:
    style = ColwiseParallel(input_layouts=layout, output_layouts=Replicate())
    parallel, plain = twins(Gated, {"gate": style}, line())
    whole = tensor(4, 4)
    x = whole.clone() if layout.is_replicate() else whole.chunk(2)[current_world().rank].clone()
    for given in (x, x.clone().requires_grad_()):
        with torch.inference_mode():
            assert_close(parallel.gate(given), plain.gate(whole))


@pytest.mark.world(2)
def test_what_is_changed_in_the_graph_enters_anew() -> None:
    parallel, plain = twins(Gated, PLAN, line())
    x, y = (tensor(3, 4).requires_grad_() for _ in range(2))
    for module, source in ((parallel, x), (plain, y)):
        between = source * 1
        first = module.down(module.gate(between.clone())).sum()
        between.mul_(3)
        (first + module.down(module.up(between)).sum()).backward()
    assert_close(x.grad, y.grad)


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

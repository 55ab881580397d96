"""Cross-entropy of logits cut by class: the values and gradients of the whole, without gathering the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import shardwise
from parallel.models import line, tensor
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.parallel import loss_parallel

TARGET = torch.tensor([0, 7, 3, 4, 3])
WEIGHT = tensor(8, seed=5).abs()
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "ignore_index": 3, "reduction": "none"},
]


def both(
    logits: torch.Tensor,
    target: torch.Tensor,
    mesh: shardwise.DeviceMesh,
    placements: list[shardwise.Placement],
    **options,
) -> None:
    """Compare value and gradient in parallel with those of plain torch."""
    whole = logits.clone().requires_grad_()
    wanted = F.cross_entropy(whole, target, **options)
    cut = shardwise.distribute_tensor(logits, mesh, placements).requires_grad_()
    with loss_parallel():
        found = F.cross_entropy(cut, target, **options)
        found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert_close(found.full_tensor(), wanted)
    assert cut.grad.placements == tuple(placements)
    assert_close(cut.grad.full_tensor(), whole.grad)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_options(options: dict[str, object]) -> None:
    both(tensor(5, 8), TARGET, line(), [Shard(1)], **options)


@pytest.mark.world(4)
@pytest.mark.parametrize("classes", [9, 10, 5])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_uneven_and_empty_parts(classes: int, reduction: str) -> None:
    both(tensor(5, classes), TARGET % classes, line(), [Shard(1)], reduction=reduction)


@pytest.mark.world(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(2), Shard(1)], [Shard(1), Shard(1)]], ids=repr)
def test_tokens_cut_as_well(reduction: str, placements: list[shardwise.Placement]) -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    target = torch.tensor([[0, 7, 3], [4, 2, 1], [5, 5, 0]])
    both(tensor(3, 8, 3), target, mesh, placements, reduction=reduction, ignore_index=5)


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_full(dtype: torch.dtype) -> None:
    logits = tensor(4, 512).to(dtype)
    cut = shardwise.distribute_tensor(logits, line(), [Shard(1)])
    with loss_parallel():
        found = F.log_softmax(cut, 1)
    assert found.dtype is dtype
    assert_close(found.full_tensor(), F.log_softmax(logits, 1))


@pytest.mark.world(2)
def test_images() -> None:
    target = torch.arange(12).view(2, 2, 3) % 5
    both(tensor(2, 5, 2, 3), target, line(), [Shard(1)])


@pytest.mark.world(2)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_classes_that_are_whole_take_a_plain_target_too(placement: shardwise.Placement) -> None:
    both(tensor(5, 8), TARGET, line(), [placement])


@pytest.mark.world(2)
def test_distributed_target_and_backward_outside() -> None:
    logits, mesh = tensor(5, 8), line()
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole, TARGET).backward()
    cut = shardwise.distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, shardwise.distribute_tensor(TARGET, mesh, [Replicate()]))
    loss.backward()
    assert_close(cut.grad.full_tensor(), whole.grad)


@pytest.mark.world(2)
def test_the_logits_are_not_sent() -> None:
    tokens, classes = 16, 1024
    cut = shardwise.distribute_tensor(tensor(tokens, classes), line(), [Shard(1)]).requires_grad_()
    with loss_parallel(), CommDebugMode() as sent:
        F.cross_entropy(cut, torch.arange(tokens)).backward()
    assert 0 < sum(each.bytes for each in sent.transmissions) < 4 * tokens * cut.dtype.itemsize


@pytest.mark.world(2)
def test_an_entropy_of_the_log_softmax() -> None:
    logits = tensor(3, 8)
    whole = logits.clone().requires_grad_()
    cut = shardwise.distribute_tensor(logits, line(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        for x in (whole, cut):
            scores = F.log_softmax(x, 1)
            (scores * scores.exp()).sum().backward()
    assert_close(cut.grad.full_tensor(), whole.grad)


@pytest.mark.world(2)
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError("interrupted")
    cut = shardwise.distribute_tensor(tensor(5, 8), line(), [Shard(1)])
    with pytest.raises(shardwise.MixedTensorError):
        F.cross_entropy(cut, TARGET)
    assert isinstance(F.log_softmax(cut, 1), DTensor)

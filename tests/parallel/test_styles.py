"""Modules in parallel give the values and gradients of the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import shardwise
from parallel.models import Block, assert_same_gradients, line, mlp, tensor, twins
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.errors import DistributedTwiceError, ParallelPlanError, PlacementError
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MLP = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(shardwise.current_world().size, dim)[shardwise.current_world().rank]


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("hidden", [8, 6, 3])
def test_mlp(hidden: int) -> None:
    parallel, plain = twins(lambda: mlp(4, hidden), MLP, line())
    x, y = (tensor(5, 4).requires_grad_() for _ in range(2))
    found, wanted = parallel(x), plain(y)
    assert type(found) is torch.Tensor
    assert_close(found, wanted)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert_close(x.grad, y.grad)
    assert_same_gradients(parallel, plain)


@pytest.mark.world(2)
def test_mlp_sums_once_forward_and_once_backward() -> None:
    parallel, _ = twins(mlp, MLP, line())
    x = tensor(5, 4).requires_grad_()
    with CommDebugMode() as forward:
        y = parallel(x)
    with CommDebugMode() as backward:
        y.sum().backward()
    once = {torch.ops._c10d_functional.all_reduce: 1}
    assert forward.get_comm_counts() == backward.get_comm_counts() == once


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("frozen", [False, True])
def test_block_with_sequence_parallel_norm(frozen: bool) -> None:
    cut = Shard(1)
    plan = {"norm": SequenceParallel()}
    plan |= {name: ColwiseParallel(input_layouts=cut) for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel(output_layouts=cut) for name in ("out", "down")}
    parallel, plain = twins(Block, plan, line())
    for block in (parallel, plain):
        block.norm.weight.requires_grad_(not frozen)
    x = tensor(2, 8, 8)
    found, wanted = parallel(mine(x, 1)), plain(x)
    assert_close(found, mine(wanted, 1))
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert_same_gradients(parallel, plain)


@pytest.mark.world(2)
def test_gradients_lie_as_their_parameters() -> None:
    parallel, _ = twins(lambda: nn.LayerNorm(6), SequenceParallel(), line())
    parallel(tensor(2, 4, 6).float()).sum().backward()
    assert all(parameter.grad.placements == (Replicate(),) for parameter in parallel.parameters())


@pytest.mark.world(2)
def test_sequence_parallel_parameters_agree_however_they_were_made() -> None:
    torch.manual_seed(shardwise.current_world().rank)
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    parallelize_module(norm, line(), SequenceParallel())
    every = DTensor.from_local(norm.weight.to_local().detach()[None], line(), [Shard(0)]).full_tensor()
    assert_close(every[0], every[1], rtol=0, atol=0)


@pytest.mark.world(2)
@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(6), lambda: nn.Dropout(0.0), lambda: nn.LayerNorm(6)])
def test_sequence_parallel_modules(make: type[nn.Module]) -> None:
    parallel, plain = twins(make, SequenceParallel(use_local_output=True), line())
    x = tensor(2, 4, 6).float()
    found, wanted = parallel(mine(x, 1)), plain(x)
    assert_close(found, mine(wanted, 1))


@pytest.mark.world(2, 4)
@pytest.mark.parametrize(
    "style",
    [
        RowwiseParallel(input_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(output_layouts=Shard(1)),
    ],
    ids=repr,
)
def test_embedding(style: RowwiseParallel | ColwiseParallel) -> None:
    parallel, plain = twins(lambda: nn.Embedding(11, 4), style, line())
    tokens = torch.tensor([[1, 10, 3, 5], [0, 6, 9, 10]])
    found, wanted = parallel(tokens), plain(tokens)
    assert_close(found, mine(wanted, 1) if style.output_layouts == (Shard(1),) else wanted)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert_same_gradients(parallel, plain)


@pytest.mark.world(4)
def test_one_axis_of_a_larger_mesh() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel, plain = twins(mlp, MLP, mesh["tp"])
    assert all(parameter.device_mesh is mesh["tp"] for parameter in parallel.parameters())
    x = tensor(4, 4, seed=mesh.get_local_rank("dp"))
    assert_close(parallel(x), plain(x))


@pytest.mark.world(2)
def test_keyword_input_and_distributed_input() -> None:
    mesh = line()
    parallel, plain = twins(lambda: nn.Linear(4, 6).double(), ColwiseParallel(use_local_output=False), mesh)
    x = tensor(4, 4)
    lying = shardwise.distribute_tensor(x, mesh, [Shard(0)])
    for found in (parallel(input=x), parallel(lying)):
        assert found.placements == (Shard(1),)
        assert_close(found.full_tensor(), plain(x))


@pytest.mark.world(2)
def test_frozen_parameters_stay_frozen() -> None:
    for make, style in ((nn.Linear(4, 4), ColwiseParallel()), (nn.LayerNorm(4), SequenceParallel())):
        make.weight.requires_grad_(False)
        parallelize_module(make, line(), style)
        assert (make.weight.requires_grad, make.bias.requires_grad) == (False, True)


class Two(nn.Module):
    """Gives its inputs back, and notes of what kind they were."""

    def forward(self, x: torch.Tensor, count: int, *, mask: torch.Tensor | None = None) -> tuple[object, int, object]:
        self.seen = x, mask
        return x, count, mask


@pytest.mark.world(2)
@pytest.mark.parametrize("local", [False, True])
def test_prepare_input(local: bool) -> None:
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Replicate()},
        desired_input_kwarg_layouts={"mask": Shard(0)},
        use_local_output=local,
    )
    module, x = parallelize_module(Two(), line(), style), tensor(4, 3)
    _, count, _ = module(mine(x, 0), 7, mask=x)
    seen, mask = module.seen
    assert count == 7
    assert isinstance(seen, DTensor) is isinstance(mask, DTensor) is not local
    assert_close(seen if local else seen.to_local(), x)
    assert_close(mask if local else mask.to_local(), mine(x, 0))


@pytest.mark.world(2)
def test_prepare_output() -> None:
    style = PrepareModuleOutput(
        output_layouts=(Replicate(), None, None), desired_output_layouts=(Shard(0), None, None), use_local_output=False
    )
    x = tensor(4, 3)
    found, count, mask = parallelize_module(Two(), line(), style)(x, 3)
    assert (count, mask) == (3, None)
    assert found.placements == (Shard(0),)
    assert_close(found.to_local(), mine(x, 0))


@pytest.mark.world(2)
def test_prepare_input_and_output_of_one_tensor() -> None:
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    module = parallelize_module(nn.Softmax(dim=0), line(), style)
    x = tensor(4, 3)
    found = module(mine(x, 0))
    assert type(found) is torch.Tensor
    assert_close(found, mine(x.softmax(0), 0))


def test_layouts_must_match() -> None:
    with pytest.raises(ParallelPlanError, match="desired_input_layouts"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(ParallelPlanError, match="desired_input_kwarg_layouts"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)})


@pytest.mark.world(2)
def test_number_and_kind_of_inputs_must_match() -> None:
    style = PrepareModuleInput(input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Replicate(), Replicate()))
    module = parallelize_module(Two(), line(), style)
    with pytest.raises(ParallelPlanError, match="one layout for each"):
        module(tensor(4), 7, 8)
    with pytest.raises(ParallelPlanError, match="not int"):
        module(tensor(4), 7)


@pytest.mark.world(4)
def test_a_distributed_input_on_another_mesh_is_refused() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel, _ = twins(mlp, MLP, mesh["tp"])
    x = shardwise.distribute_tensor(tensor(4, 4), mesh, [Shard(0), Replicate()])
    with pytest.raises(PlacementError, match="another mesh"):
        parallel(x)


@pytest.mark.world(2)
def test_a_module_takes_one_style_only() -> None:
    module = parallelize_module(nn.Linear(4, 4), line(), ColwiseParallel())
    with pytest.raises(DistributedTwiceError, match="Linear"):
        parallelize_module(module, line(), ColwiseParallel())
    with pytest.raises(ParallelPlanError, match="knows Linear and Embedding, not Conv2d"):
        parallelize_module(nn.Conv2d(2, 2, 1), line(), RowwiseParallel())


@pytest.mark.world(2)
def test_parameters_that_lie_otherwise_already_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(shardwise.distribute_tensor(module.weight.detach(), line(), [Shard(1)]))
    with pytest.raises(ParallelPlanError, match=r"Linear\.weight is distributed already"):
        parallelize_module(module, line(), ColwiseParallel())

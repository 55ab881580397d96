"""Plans: which modules they name, and what they refuse."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import shardwise
from parallel.models import line, mlp
from shardwise import DTensor, Replicate, Shard
from shardwise.errors import ParallelPlanError
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(3))
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def distributed(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.1.up", ["layers.1.up"]),
        ("layers.*.up", ["layers.0.up", "layers.1.up", "layers.2.up"]),
        ("layers.[02].d*", ["layers.0.down", "layers.2.down"]),
    ],
)
def test_patterns_match_part_by_part(pattern: str, found: list[str]) -> None:
    model = parallelize_module(Model(), line(), {pattern: ColwiseParallel()})
    assert distributed(model) == [f"{name}.{own}" for name in found for own in ("weight", "bias")]


@pytest.mark.world(2)
def test_the_empty_name_is_the_module_itself() -> None:
    torch.manual_seed(shardwise.current_world().rank)
    linear = nn.Linear(4, 4)
    before = linear.weight.detach().clone()
    assert parallelize_module(linear, line(), {"": ColwiseParallel()}, src_data_rank=None) is linear
    assert torch.equal(linear.weight.to_local(), before.chunk(2)[shardwise.current_world().rank])


@pytest.mark.parametrize(
    ("typo", "close"), [("layers.0.upp", "layers.0.up"), ("layer.*.up", "layers.0.up"), ("hed", "head")]
)
def test_a_name_that_matches_nothing_is_refused_before_anything_changes(typo: str, close: str) -> None:
    model = Model()
    with pytest.raises(ParallelPlanError, match=re.escape(close)) as raised:
        parallelize_module(model, line(), {"embed": RowwiseParallel(), typo: ColwiseParallel()})
    assert repr(typo) in str(raised.value)
    assert distributed(model) == []


@pytest.mark.world(4)
def test_a_mesh_of_several_axes_is_refused() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ParallelPlanError, match=re.escape('mesh["tp"]')):
        parallelize_module(mlp(), mesh, {"0": ColwiseParallel()})


def test_what_is_not_a_plan_is_refused() -> None:
    for plan in ("0", {"0": "colwise"}, [ColwiseParallel()]):
        with pytest.raises(ParallelPlanError, match="style"):
            parallelize_module(mlp(), line(), plan)
    with pytest.warns(UserWarning, match="no plan"):
        parallelize_module(mlp(), line())
    with pytest.raises(ParallelPlanError, match="no mesh"):
        parallelize_module(mlp(), None, {"0": ColwiseParallel()})


@pytest.mark.world(2)
def test_the_current_mesh_is_the_default() -> None:
    mesh = line()
    with mesh:
        model = parallelize_module(mlp(), parallelize_plan={"0": ColwiseParallel()})
    assert model[0].weight.device_mesh is mesh


@pytest.mark.world(2)
def test_tied_parameters_stay_tied() -> None:
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
    model = parallelize_module(Model(), line(), plan)
    assert model.head.weight is model.embed.weight
    model.head(model.embed(torch.arange(4))).sum().backward()
    assert model.embed.weight.grad.placements == (Shard(0),)


@pytest.mark.world(2)
def test_tied_parameters_cannot_lie_in_two_ways() -> None:
    plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    with pytest.raises(ParallelPlanError, match=r"Linear\.weight is distributed already"):
        parallelize_module(Model(), line(), plan)


@pytest.mark.world(2)
def test_a_style_may_put_another_module_in_place() -> None:
    class Silent(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: shardwise.DeviceMesh) -> nn.Module:
            return nn.Identity()

    model = parallelize_module(Model(), line(), {"layers.0.up": Silent(), "layers.1": SequenceParallel()})
    assert isinstance(model.layers[0]["up"], nn.Identity)
    assert all(parameter.placements == (Replicate(),) for parameter in model.layers[1].parameters())

"""Explanations say what a call means and moves, and do nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode, explain, explanation


def grid() -> shardwise.DeviceMesh:
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def part(*shape: int, dp: shardwise.Placement, tp: shardwise.Placement) -> shardwise.DTensor:
    return shardwise.zeros(*shape, device_mesh=grid(), placements=[dp, tp])


@pytest.mark.world(4)
def test_a_product_that_needs_nothing() -> None:
    x, w = part(4, 8, dp=Shard(0), tp=Shard(1)), part(8, 6, dp=Replicate(), tp=Shard(0))
    call, *lines = explanation(torch.mm, x, w).splitlines()
    assert call.startswith("aten.mm.default(f32[4@dp, 8@tp], f32[8@tp, 6]) on ")
    assert lines == ["  means  m k * k n -> m n", "  moves  nothing", "  gives  f32[4@dp, 6]{sum@tp}"]


@pytest.mark.world(4)
def test_moves_name_steps_and_bytes() -> None:
    lines = explanation(torch.softmax, part(4, 8, dp=Shard(0), tp=Shard(1)), 1).splitlines()
    step = "all_to_all(tp, dim 1 -> dim 0)"
    assert lines[2] == f"  moves  f32[4@dp, 8@tp] to f32[4@dp@tp, 8] by {step} ({2 * 4 * 4 // 2} bytes)"


@pytest.mark.world(4)
def test_what_an_operator_decomposes_into_comes_indented() -> None:
    x, w, b = part(4, 8, dp=Shard(0), tp=Replicate()), part(6, 8, dp=Replicate(), tp=Shard(0)), torch.zeros(())
    names = [
        line.partition("(")[0]
        for line in explanation(lambda x, w: x @ w.t(), x, w).splitlines()
        if line.startswith("aten")
    ]
    assert names == ["aten.t.default", "aten.mm.default"]
    target = shardwise.zeros(4, dtype=torch.int64, device_mesh=grid(), placements=[Shard(0), Replicate()])
    assert "\n  aten.div.Tensor(" in explanation(F.cross_entropy, x + b, target)


@pytest.mark.world(4)
def test_nothing_is_run_and_nothing_is_sent() -> None:
    x = part(4, 8, dp=Shard(0), tp=Shard(1))
    with CommDebugMode() as sent:
        explanation(torch.Tensor.add_, x, 1)
        explanation(F.dropout, x)
        explanation(torch._foreach_mul_, [x, x], 2.0)
        explanation(torch.softmax, x, 1)
    assert sent.get_total_counts() == 0
    assert x.to_local().abs().max() == 0


@pytest.mark.world(4)
def test_a_refusal_is_raised() -> None:
    with pytest.raises(shardwise.ViewError, match="tp"):
        explanation(torch.Tensor.view, part(5, 4, dp=Replicate(), tp=Shard(1)), 4, 5)


def test_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shardwise.sim.run(lambda: explain(torch.relu, part(4, 8, dp=Replicate(), tp=Replicate())), 4)
    assert capsys.readouterr().out.count("aten.relu.default") == 1

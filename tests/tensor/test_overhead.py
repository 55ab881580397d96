"""What a warm call costs, counted in Python calls of ours: a slow-down shows without a clock."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, current_world, dry_world, init_device_mesh, use_world
from shardwise.tensor import dispatch

HOME = str(Path(shardwise.__file__).parent)
CALLS = 12

WARM: dict[str, Callable[[DTensor, DTensor], object]] = {
    "add": lambda x, w: x + x,
    "times a number": lambda x, w: x * 2.0,
    "relu": lambda x, w: torch.relu(x),
    "mm": lambda x, w: x @ w,
    "sum": lambda x, w: x.sum(0),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "layer norm": lambda x, w: F.layer_norm(x, (16,)),
    "view": lambda x, w: x.view(-1, 4, 4),
    "transpose": lambda x, w: x.transpose(0, 1),
    "slice": lambda x, w: x[:, 2:8],
    "cat": lambda x, w: torch.cat([x, x], 1),
    "in place": lambda x, w: x.add_(x),
    "a number in place": lambda x, w: x.add_(0.5),
    "mean": lambda x, w: x.mean(),
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "list in place": lambda x, w: torch._foreach_lerp_([x] * 20, [x] * 20, 0.5),
    "detach": lambda x, w: x.detach(),
    "to_local": lambda x, w: x.to_local(),
    "redistribute to the same": lambda x, w: x.redistribute(placements=[Shard(0), Replicate()]),
}


@pytest.fixture(autouse=True)
def _remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PLANS", 16384)  # whatever the environment says


def calls_of(function: Callable[[], object]) -> list[str]:
    """The functions of shardwise that run in ``function``, in order."""
    seen: list[str] = []

    def watch(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            seen.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", WARM)
def test_a_warm_call_takes_few_calls_of_ours(name) -> None:
    with use_world(dry_world(0, 64)):
        mesh = init_device_mesh("cpu", (8, 8))
        x = DTensor.from_local(torch.ones(4, 16), mesh, [Shard(0), Replicate()])
        w = DTensor.from_local(torch.ones(16, 4), mesh, [Replicate(), Shard(1)])
        WARM[name](x, w)
        seen = calls_of(lambda: WARM[name](x, w))
    assert len(seen) <= CALLS, " ".join(seen)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_many_parameters_calls_us_no_more_often_than_one_of_few(fused) -> None:
    """But for the tensors that are made and read, and numbers not seen before: no plan is made anew with each step."""
    for_each = ("_wrap", "_local", "_local_of", "is_replicated", "grad", "_cast")

    def calls(count: int) -> list[str]:
        given = [torch.nn.Parameter(x.clone()) for _ in range(count)]
        for parameter in given:
            parameter.grad = parameter.detach().clone()
        optimizer = torch.optim.AdamW(given, foreach=not fused, fused=fused)
        optimizer.step()
        optimizer.step()
        return [name for name in calls_of(optimizer.step) if name not in for_each]

    with use_world(dry_world(0, 4)):
        x = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)])
        few, many = calls(2), calls(20)
    assert len(many) == len(few)
    assert "prepare" not in many


def test_memory_is_bounded_however_many_shapes_come() -> None:
    with use_world(dry_world(0, 2)):
        mesh = init_device_mesh("cpu", (2,))
        current_world().memory.clear()
        for size in range(1, 300):
            x = DTensor.from_local(torch.ones(size, 2), mesh, [Shard(0)])
            torch.relu(x) + 1
        memory = current_world().memory
        assert len(memory["plans"].outlines) < 10, "outlines do not depend on sizes"
        assert len(memory["result dtypes"]) < 10, "dtypes do not depend on sizes"
        plans = memory["plans"]
        for number in range(40000):
            plans.remember(("filler", number), next(iter(plans.values())))
        assert len(plans) + len(plans.elder) <= 16384


def test_what_is_used_outlives_what_is_not(monkeypatch) -> None:
    with use_world(dry_world(0, 2)):
        mesh = init_device_mesh("cpu", (2,))
        current_world().memory.clear()
        often, once = (DTensor.from_local(torch.ones(size, 2), mesh, [Shard(0)]) for size in (3, 5))
        torch.exp(once)
        torch.exp(often)
        plans = current_world().memory["plans"]
        ready = next(iter(plans.values()))
        prepared = []
        fresh = dispatch.fitted
        monkeypatch.setattr(dispatch, "fitted", lambda *call: prepared.append(call) or fresh(*call))
        for number in range(40000):
            plans.remember(("filler", number), ready)
            if number % 4000 == 0:
                torch.exp(often)
        assert not prepared
        torch.exp(once)
        assert prepared


def test_threads_share_what_is_remembered(monkeypatch) -> None:
    """Few plans are kept, so that each thread drops what the others look for."""
    monkeypatch.setattr(dispatch, "PLANS", 32)
    world, failed = dry_world(0, 2), list[object]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            with use_world(world):
                mesh = init_device_mesh("cpu", (2,))
                for _ in range(400):
                    part = torch.randn(draw.randrange(1, 60), 8)
                    x = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                    found = (torch.relu(x) * 2).view(-1, 2, 4).sum(2).to_local()
                    assert torch.equal(found, (torch.relu(part) * 2).view(-1, 2, 4).sum(2)), part.shape
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []

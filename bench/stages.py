"""Where the microseconds of a warm call go, beside the whole of the same call of torch.distributed.tensor.

A call enters from C++ (*entry*: measured on a tensor class that does nothing), makes its key and finds its plan (*key
and look-up*: what is left of the dispatcher), runs the *local op* and *wraps* its result. The rest is what torch itself
does before and after.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.tensor import dispatch
from shardwise.tensor.bindings import direct

Call = Callable[[], object]
aten = torch.ops.aten

# A name, the call as users write it, and the operator and arguments that it arrives as.
CALLS = {
    "relu": (lambda x, w: torch.relu(x), aten.relu.default, lambda x, w: (x,)),
    "add": (lambda x, w: x + x, aten.add.Tensor, lambda x, w: (x, x)),
    "mm": (lambda x, w: x @ w, aten.mm.default, lambda x, w: (x, w)),
}


class Bare(torch.Tensor):
    """A wrapper whose operators do nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def make(shape: tuple[int, ...]) -> Bare:
        return torch.Tensor._make_wrapper_subclass(Bare, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


def microseconds(call: Call, times: int = 400) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The median microseconds of each call, measured in turn."""
    for call in calls.values():
        microseconds(call)
    samples = [{name: microseconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(sample[name] for sample in samples) for name in calls}


def stages(name: str, meshes: tuple[object, object], rounds: int) -> dict[str, float]:
    """The microseconds of each stage of ours, of our whole call and of theirs."""
    call, op, arguments = CALLS[name]
    pairs = []
    for api, mesh in zip((shardwise, torch.distributed.tensor), meshes, strict=True):
        lying = [api.Shard(0), api.Replicate()], [api.Replicate(), api.Shard(1)]
        parts = torch.randn(4, 16), torch.randn(16, 4)
        pairs.append([api.DTensor.from_local(part, mesh, own) for part, own in zip(parts, lying, strict=True)])
    (x, w), (their_x, their_w) = pairs
    bare, bare_w = Bare.make((32, 16)), Bare.make((16, 32))
    args, local = arguments(x, w), arguments(x.to_local(), w.to_local())
    made, kernel = call(x, w), direct(op)
    part, spec = made.to_local(), made._spec
    found = medians(
        {
            "entry": lambda: call(bare, bare_w),
            "dispatcher": lambda: dispatch.run(shardwise.DTensor, op, args, {}),
            "local op": lambda: kernel(*local),
            "wrap": lambda: shardwise.DTensor._wrap(part, spec),
            "whole call": lambda: call(x, w),
            "theirs": lambda: call(their_x, their_w),
        },
        rounds,
    )
    found["key and look-up"] = found.pop("dispatcher") - found["local op"] - found["wrap"]
    return found


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Samples of each stage.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(rounds: int, target: Path | None) -> None:
    """Print the stages of each call in microseconds, and as shares of torch's whole call."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    makers = shardwise.init_device_mesh, dist.init_device_mesh
    meshes = tuple(make("cpu", (8, 8), mesh_dim_names=("dp", "tp")) for make in makers)
    rows = []
    for name in CALLS:
        found = stages(name, meshes, rounds)
        theirs = found.pop("theirs")
        for stage, ours in found.items():
            rows.append({"name": f"{name}: {stage}", "unit": "us", "ours": ours, "theirs": theirs})
            click.echo(f"{name + ': ' + stage:24} {ours:7.2f} us   of torch's {theirs:7.2f} us: {ours / theirs:5.2f}")
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

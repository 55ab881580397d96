"""Train a byte-level GPT on a mesh of ranks: data parallel, tensor parallel, with sequence parallel norms.

The same script runs simulated, on real processes, and alone::

    shardwise sim -n 8 examples/train_gpt.py --mesh dp=2,tp=4 --check
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2 --check
    python examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import torch
from rich.console import Console
from torch import Tensor, nn

import shardwise
from gpt import GPT, Attention, Config, FeedForward, batches, loss_of
from report import Report, compare, console_of, draw, progress, show_communication
from shardwise import DeviceMesh, DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode, visualize_sharding

AXES = ("dp", "tp")
TOLERANCE = 1e-4


class Refusal(Exception):
    """What the user asked for cannot be done; the text says why, in one sentence."""


# ---------------------------------------------------------------------------------------------- the model on a mesh


def distribute(model: GPT, mesh: DeviceMesh) -> GPT:
    """Lay the parameters of ``model`` over ``mesh`` (axes dp and tp), in place.

    Between the layers, activations are cut along the batch over dp and along the sequence over tp; attention and feed
    forward see whole sequences, and cut their heads and hidden units over tp.
    """
    for module in list(model.modules()):
        if isinstance(module, Attention):
            column, row = (module.query, module.key, module.value), module.out
        elif isinstance(module, FeedForward):
            column, row = (module.up,), module.down
        else:
            continue
        for linear in column:
            place(linear, mesh, weight=Shard(0), bias=Shard(0))
        place(row, mesh, weight=Shard(1), bias=Replicate())
        shardwise.distribute_module(module, mesh, input_fn=gather_sequence, output_fn=scatter_sequence)
    shardwise.distribute_module(model, mesh)
    return model


def place(linear: nn.Linear, mesh: DeviceMesh, **over_tp: shardwise.Placement) -> None:
    for name, placement in over_tp.items():
        whole = getattr(linear, name)
        setattr(linear, name, nn.Parameter(shardwise.distribute_tensor(whole.data, mesh, [Replicate(), placement])))


def gather_sequence(module: nn.Module, inputs: tuple[DTensor], mesh: DeviceMesh) -> DTensor:
    return inputs[0].redistribute(mesh, [Shard(0), Replicate()])


def scatter_sequence(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> DTensor:
    return output.redistribute(mesh, [Shard(0), Shard(1)])


def reduce_gradients(model: nn.Module) -> None:
    """Add up what the ranks hold of each gradient, so that it lies like its parameter."""
    for parameter in model.parameters():
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


# ---------------------------------------------------------------------------------------------- training


def train(
    model: GPT,
    data: list[tuple[Tensor, Tensor]],
    lay: Callable[[Tensor], Tensor],
    after_backward: Callable[[nn.Module], None],
    report: Report,
    rate: float,
) -> list[float]:
    """One AdamW step for each batch; returns the losses. ``lay`` puts tokens [batch, sequence] where they belong."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step, (tokens, targets) in enumerate(data):
        places = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        loss = loss_of(model, lay(tokens), lay(places), lay(targets))
        optimizer.zero_grad()
        loss.backward()
        after_backward(model)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return losses


def train_on_mesh(
    config: Config, mesh: DeviceMesh, data: list[tuple[Tensor, Tensor]], seed: int, rate: float, report: Report
) -> tuple[GPT, list[float], CommDebugMode]:
    """Train a fresh GPT on ``mesh``; returns it with its losses and what the training sent."""
    torch.manual_seed(seed)
    model = distribute(GPT(config), mesh)

    def lay(tokens: Tensor) -> Tensor:
        return shardwise.distribute_tensor(tokens, mesh, [Shard(0), Shard(1)], src_data_rank=None)

    with CommDebugMode() as sent:
        losses = train(model, data, lay, reduce_gradients, report, rate)
    return model, losses, sent


def train_alone(
    config: Config, data: list[tuple[Tensor, Tensor]], seed: int, rate: float, report: Report
) -> tuple[GPT, list[float]]:
    """Train the same GPT in plain PyTorch on this rank alone; returns it with its losses."""
    torch.manual_seed(seed)
    model = GPT(config)
    return model, train(model, data, lambda tokens: tokens, lambda _: None, report, rate)


# ---------------------------------------------------------------------------------------------- what the user sees


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv)
    world = shardwise.current_world()
    console = console_of(world.rank)
    try:
        config, text, shape = check(options, world.size)
    except Refusal as refusal:
        if world.rank == 0:
            print(f"train_gpt: {refusal}", file=sys.stderr)
        return 2
    mesh = shardwise.init_device_mesh("cpu", tuple(shape[axis] for axis in AXES), mesh_dim_names=AXES)
    data = batches(text, config, options.batch, options.steps, options.seed)
    tokens = options.batch * options.context
    console.print(
        f"{mesh}, {len(text):,} bytes of text, {options.steps} steps of {options.batch} x {config.context} bytes"
    )
    alone = None
    if options.check and world.rank == 0:
        with progress(console, "alone", options.steps, tokens) as report:
            _, alone = train_alone(config, data, options.seed, options.rate, report)
    with progress(console, "mesh", options.steps, tokens) as report:
        model, losses, sent = train_on_mesh(config, mesh, data, options.seed, options.rate, report)
    show_communication(console, sent, options.steps)
    console.print("\nblocks.0.feed_forward.up.weight:")
    visualize_sharding(model.blocks[0].feed_forward.up.weight)
    return finish(console, options, losses, alone) if world.rank == 0 else 0


def finish(console: Console, options: argparse.Namespace, losses: list[float], alone: list[float] | None) -> int:
    """Compare and draw the curves; 0, or 1 if they part."""
    draw(losses, alone, options.png)
    console.print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}, curve in {options.png}")
    if alone is None:
        return 0
    worst = compare(console, losses, alone)
    agreed = worst <= TOLERANCE
    console.print(f"{'the curves agree' if agreed else 'THE CURVES PART'}: at most {worst:.1e} apart, relative")
    return 0 if agreed else 1


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on a mesh of ranks.")
    parser.add_argument("--mesh", help="sizes of the axes, like dp=2,tp=4 (default: all ranks on dp)")
    parser.add_argument("--text", type=Path, help="a text to learn (default: CPython's help topics)")
    parser.add_argument("--check", action="store_true", help="train on one rank in plain PyTorch too, and compare")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--untied", action="store_true", help="a head with a weight of its own")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path("train_gpt.png"), help="where the loss curve goes")
    return parser.parse_args(argv)


def check(options: argparse.Namespace, ranks: int) -> tuple[Config, bytes, dict[str, int]]:
    """What the options mean; raises `Refusal` where they do not fit."""
    shape = read_mesh(options.mesh, ranks)
    for name in ("steps", "batch", "context", "layers", "width", "heads"):
        if getattr(options, name) < 1:
            raise Refusal(f"--{name} must be at least 1, not {getattr(options, name)}.")
    if not 0 < options.rate < math.inf:
        raise Refusal(f"--rate must be a positive number, not {options.rate}.")
    if not 0 <= options.seed < 2**63:
        raise Refusal(f"--seed must be from 0 to 2^63 - 1, not {options.seed}.")
    if options.png.suffix != ".png" or options.png.is_dir() or not options.png.parent.is_dir():
        raise Refusal(f"--png {options.png} is not a .png file in a folder that exists.")
    if options.width % options.heads:
        raise Refusal(f"{options.heads} heads do not divide a width of {options.width}.")
    if options.heads % shape["tp"]:
        raise Refusal(f"{options.heads} heads cannot be shared equally by tp={shape['tp']} ranks.")
    if options.batch % shape["dp"]:
        raise Refusal(f"a batch of {options.batch} cannot be shared equally by dp={shape['dp']} ranks.")
    config = Config(options.layers, options.width, options.heads, options.context, not options.untied)
    return config, read_text(options.text, options.context), shape


def read_mesh(text: str | None, ranks: int) -> dict[str, int]:
    if text is None:
        return {"dp": ranks, "tp": 1}
    shape, given = dict.fromkeys(AXES, 1), set()
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES:
            raise Refusal(f"--mesh {text}: there is no axis {name!r}, only {' and '.join(AXES)}.")
        if name in given:
            raise Refusal(f"--mesh {text} gives the size of {name} twice.")
        given.add(name)
        if not size.isdecimal() or int(size) < 1:
            raise Refusal(f"--mesh {text}: the size of {name} must be a positive number, not {size!r}.")
        shape[name] = int(size)
    if math.prod(shape.values()) != ranks:
        raise Refusal(f"--mesh {text} needs {math.prod(shape.values())} ranks, and there are {ranks}.")
    return shape


def read_text(path: Path | None, context: int) -> bytes:
    name = path or "CPython's help"
    try:
        text = "\n".join(topics.topics.values()).encode() if path is None else path.read_bytes()
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}.") from error
    if len(text) < context + 2:
        raise Refusal(f"{name} has {len(text)} bytes, too few for sequences of {context}.")
    return text


if __name__ == "__main__":
    sys.exit(main())

"""What the examples show: a progress bar, curves side by side, a table of communication, a picture of a curve."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardwise.debug import CommDebugMode

Report = Callable[[int, float], None]


def console_of(rank: int) -> Console:
    """The terminal on rank 0, and nothing elsewhere."""
    return Console(file=sys.stdout if rank == 0 else io.StringIO(), highlight=False)


@contextlib.contextmanager
def progress(console: Console, title: str, steps: int, tokens: int) -> Iterator[Report]:
    """A bar over ``steps`` of ``tokens`` each; the block calls what it yields with every step and its loss."""
    figures = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s")
    bar = Progress(
        TextColumn(f"{title:6}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        figures,
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task(title, total=steps, loss=float("nan"), speed=0.0)
    start = time.perf_counter()

    def report(step: int, loss: float) -> None:
        bar.update(task, completed=step + 1, loss=loss, speed=(step + 1) * tokens / (time.perf_counter() - start))

    with bar:
        yield report


def show_communication(console: Console, sent: CommDebugMode, steps: int) -> None:
    """A table of what this rank sent in a step, by mesh axis and kind of collective."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for transmission in sent.transmissions:
        key = (transmission.axis or "world", transmission.op)
        counts[key] += 1
        sizes[key] += transmission.bytes
    table = Table(
        "axis", "collective", "calls a step", "bytes a step", title=f"\nsent by rank 0 in each of {steps} steps"
    )
    for axis, op in sorted(counts):
        table.add_row(axis, op, f"{counts[axis, op] / steps:,.1f}", f"{sizes[axis, op] / steps:,.0f}")
    console.print(table if counts else "\nnothing was sent")


def compare(console: Console, on_mesh: list[float], alone: list[float]) -> float:
    """Print two loss curves side by side; returns the largest relative difference."""
    table = Table("step", "on the mesh", "alone", "relative difference", title="\nloss")
    apart = [abs(one - other) / abs(other) for one, other in zip(on_mesh, alone, strict=True)]
    for step, row in enumerate(zip(on_mesh, alone, apart, strict=True)):
        table.add_row(str(step), f"{row[0]:.6f}", f"{row[1]:.6f}", f"{row[2]:.1e}")
    console.print(table)
    return max(apart)


def draw(on_mesh: list[float], alone: list[float] | None, path: Path) -> None:
    """Write the curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(on_mesh, label="on the mesh")
    if alone is not None:
        axes.plot(alone, "--", label="alone, plain PyTorch")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="byte-level GPT")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

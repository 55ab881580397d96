"""What `import shardwise` costs on top of `import torch`, beside torch's own distributed tensors: whole processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

PROGRAMS = {
    "torch": "import torch",
    "shardwise": "import torch, shardwise",
    "torch.distributed.tensor": "import torch, torch.distributed.tensor",
}


def seconds(program: str) -> float:
    """Wall time of a whole Python process that runs ``program``."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


def medians(rounds: int) -> dict[str, float]:
    """Median seconds of each program; the programs take turns, after one round that only warms the disk's cache."""
    times = [{name: seconds(program) for name, program in PROGRAMS.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(each[name] for each in times) for name in PROGRAMS}


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often each program runs.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows to this file.")
def main(rounds: int, target: Path | None) -> None:
    """Print the median time of each import, and its difference to `import torch`."""
    found = medians(rounds)
    for name, program in PROGRAMS.items():
        click.echo(f"{program:42} {found[name]:6.3f} s   on top of torch {found[name] - found['torch']:+6.3f} s")
    ours, theirs = (found[name] - found["torch"] for name in ("shardwise", "torch.distributed.tensor"))
    if target:
        target.write_text(
            json.dumps([{"name": "import, on top of torch", "unit": "s", "ours": ours, "theirs": theirs}])
        )


if __name__ == "__main__":
    main()

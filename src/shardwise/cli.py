"""The command ``shardwise``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardwise.debug.operators import page
from shardwise.sim.script import run_script


@click.group()
@click.version_option(package_name="shardwise")
def main() -> None:
    """Sharded tensors for PyTorch: tools for the command line."""


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="How many ranks to simulate.")
@click.option(
    "--output",
    type=click.Choice(["rank0", "all"]),
    default="rank0",
    show_default=True,
    help="Whose standard output to show.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sim(ranks: int, output: str, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGUMENTS as every rank of a simulated world, in this process.

    The script may use torch.distributed as under torchrun.
    """
    sys.exit(run_script(script, arguments, ranks, everybody=output == "all"))


@main.command()
def operators() -> None:
    """Print what each operator means and costs, as Markdown."""
    click.echo(page(), nl=False)

"""Run the benchmarks of this folder and print one table.

python bench/run.py             all of them
python bench/run.py overhead    those whose name contains a word
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
Row = dict[str, str | float]


def measure(program: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        subprocess.run([sys.executable, program, "--json", result], check=True, stdout=subprocess.DEVNULL)
        rows: list[Row] = json.loads(result.read_text())
    return rows


def tabulate(results: dict[str, list[Row]]) -> Table:
    table = Table("benchmark", "what")
    for heading in ("shardwise", "torch", "unit", "ratio"):
        table.add_column(heading, justify="right")
    for name, rows in results.items():
        for row in rows:
            ours, theirs = float(row["ours"]), float(row["theirs"])
            table.add_row(
                name, str(row["name"]), f"{ours:.4g}", f"{theirs:.4g}", str(row["unit"]), f"{ours / theirs:.2f}"
            )
        table.add_section()
    return table


@click.command()
@click.argument("words", nargs=-1)
def main(words: tuple[str, ...]) -> None:
    """Run the benchmarks whose name contains one of WORDS (all, if none is given) and print one table."""
    programs = [path for path in sorted(HERE.glob("*.py")) if path.name != "run.py"]
    chosen = [path for path in programs if not words or any(word in path.stem for word in words)]
    if not chosen:
        raise click.UsageError(
            f"no benchmark is called like {', '.join(words)}; there are: {', '.join(path.stem for path in programs)}"
        )
    results, failed = {}, []
    for path in chosen:
        click.echo(f"running {path.name} ...", err=True)
        try:
            results[path.stem] = measure(path)
        except subprocess.CalledProcessError:
            failed.append(path.name)
    Console(width=110).print(tabulate(results))
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwise.cli import main

SCRIPT = "import sys, torch.distributed as dist\nprint(dist.get_rank(), dist.get_world_size(), *sys.argv[1:])\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_sim_runs_a_script_and_passes_its_arguments(script: Path) -> None:
    result = call("sim", "-n", 3, script, "-n", "7", "--output", "there", "--help")
    assert result.exit_code == 0
    assert result.stdout == "0 3 -n 7 --output there --help\n"


def test_sim_shows_all_ranks(script: Path) -> None:
    assert call("sim", "-n", 2, "--output", "all", script).stdout == "[rank 0] 0 2\n[rank 1] 1 2\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", 0, "SCRIPT"], "0 is not in the range"),
        (["SCRIPT"], "Missing option '-n'"),
        (["-n", 2, "no/such.py"], "does not exist"),
        (["-n", 2, "--output", "some", "SCRIPT"], "'some' is not one of"),
    ],
)
def test_sim_refuses_in_one_sentence(script: Path, arguments: list[object], complaint: str) -> None:
    result = call("sim", *(script if argument == "SCRIPT" else argument for argument in arguments))
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_the_command_exits_as_the_script_does(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import torch.distributed as dist\nraise SystemExit(3 if dist.get_rank() else 0)\n")
    command = [sys.executable, "-c", "from shardwise.cli import main; main()", "sim", "-n", "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.sim.script import run_script

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


TORCHRUN = """
    import os
    import sys

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1) * int(os.environ["RANK"])
    dist.all_reduce(x)
    print(dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], x.item(), *sys.argv[1:])
    dist.destroy_process_group()
"""


def test_a_script_for_torchrun(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(write(TORCHRUN), ["--flag", "3"], 4) == 0
    assert capsys.readouterr().out == "0 0 4 6.0 --flag 3\n"


def test_everybody_is_heard(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(write(TORCHRUN), [], 3, everybody=True) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] {r} {r} 3 3.0" for r in range(3)]


def test_the_process_is_as_before(write: Write) -> None:
    before = (sys.modules["__main__"], sys.argv, list(sys.path), dict(os.environ), sys.stdout)
    run_script(write(TORCHRUN), ["x"], 2)
    assert (sys.modules["__main__"], sys.argv, list(sys.path), dict(os.environ), sys.stdout) == before


def test_each_rank_has_its_own_main_module(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
        import pickle
        from dataclasses import dataclass, field

        import torch.distributed as dist

        @dataclass
        class Shared:
            rank: int = field(default=0)

        if __name__ == "__main__":
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, Shared(dist.get_rank()))
            print(found, all(type(each) is Shared for each in found), __file__[-9:])
    """
    assert run_script(write(script), [], 2) == 0
    assert capsys.readouterr().out == "[Shared(rank=0), Shared(rank=1)] True script.py\n"


def test_modules_beside_the_script(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_the_script.py").write_text("WORD = 'found'\n")
    assert run_script(write("import beside_the_script; print(beside_the_script.WORD)"), [], 2) == 0
    assert capsys.readouterr().out == "found\n"


@pytest.mark.parametrize(
    ("leave", "code", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('no such mesh')", 1, "no such mesh\n"),
        ("dist.get_rank() == 1 and sys.exit(5); dist.get_rank() == 0 and dist.barrier()", 5, ""),
    ],
)
def test_exit_codes(write: Write, capsys: pytest.CaptureFixture[str], leave: str, code: int, error: str) -> None:
    assert run_script(write(f"import sys, torch.distributed as dist\n{leave}"), [], 2) == code
    assert capsys.readouterr().err == error


def test_an_exception_is_shown_from_the_script_on(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("import torch.distributed as dist\ndef fail(): 1 / 0\nif dist.get_rank() == 1: fail()\n")
    assert run_script(path, [], 2) == 1
    error = capsys.readouterr().err
    assert error.startswith(f'Traceback (most recent call last):\n  File "{path}", line 3')
    assert error.endswith("RankError: rank 1 of 2 raised ZeroDivisionError: division by zero\n")
    assert error.count("File") == 2


def test_a_deadlock_is_shown_without_a_traceback(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("import torch.distributed as dist\nif dist.get_rank() == 1:\n    dist.barrier()\n")
    assert run_script(path, [], 2) == 1
    error = capsys.readouterr().err
    assert error.startswith("DeadlockError: ")
    assert "rank 0 has finished" in error
    assert "script.py:3" in error


def test_a_script_that_does_not_parse(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(write("def"), [], 2) == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_standard_error_names_the_rank(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys, torch.distributed as dist\nprint('half', end='', file=sys.stderr)\nprint(dist.get_rank())"
    assert run_script(write(script), [], 2) == 0
    captured = capsys.readouterr()
    assert captured.out == "0\n"
    assert captured.err == "half[rank 1] half\n"

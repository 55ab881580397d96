from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.world(2, 3)
    def test_sizes(world, tmp_path):
        x = torch.ones(())
        dist.all_reduce(x)
        assert x == world.size and tmp_path.exists()

    @pytest.mark.world(4)
    @pytest.mark.parametrize("value", [1, 2])
    def test_without_the_fixture(value):
        assert dist.get_world_size() == 4

    @pytest.mark.world(3)
    def test_fails(world):
        dist.barrier()
        assert world.rank != 1

    @pytest.mark.world(2)
    class TestMethods:
        def test_method(self, world):
            assert world.kind == "simulated"

        def test_skip(self, world):
            pytest.skip("not now")

    @pytest.mark.world(2)
    def test_deadlock(world):
        if world.rank:
            dist.barrier()

    def test_unmarked(world):
        pass

    def test_plain():
        assert not dist.is_initialized()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("project") / "test_project.py"
    path.write_text(textwrap.dedent(TESTS))
    return run_pytest(path)


def run_pytest(path: Path) -> str:
    """Run pytest on a file of another project, with no plugin but this one."""
    command = [sys.executable, "-m", "pytest", "-p", "shardwise.sim.testing", "-rA", "-p", "no:cacheprovider", path]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=path.parent, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "PASSED test_project.py::test_sizes[world2]",
        "PASSED test_project.py::test_sizes[world3]",
        "PASSED test_project.py::TestMethods::test_method[world2]",
        "PASSED test_project.py::test_plain",
        "FAILED test_project.py::test_fails[world3] - ",
        "FAILED test_project.py::test_deadlock[world2] - shardwise",
        "ERROR test_project.py::test_unmarked - ",
    ],
)
def test_outcomes(report: str, line: str) -> None:
    assert line in report, report


def test_counts(report: str) -> None:
    assert "2 failed, 6 passed, 1 skipped, 1 error" in report, report


def test_a_failure_is_the_tests_own_with_the_rank_named(report: str) -> None:
    section = report[report.index("test_fails[world3] __") :]
    assert "assert 1 != 1" in section
    assert "on rank 1 of 3" in section


def test_a_mark_needs_sizes(tmp_path: Path) -> None:
    path = tmp_path / "test_wrong.py"
    path.write_text("import pytest\n@pytest.mark.world('two')\ndef test(world): pass\n")
    assert "pytest.mark.world needs sizes, as in world(2, 4)" in run_pytest(path)

"""The documentation is true: its Python runs, its examples give what they show, what it names exists."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("bench/*.md"))]
MODULES = sorted((ROOT / "src/shardwise").rglob("*.py"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|txt))`")
MAKE = re.compile(r"\bmake ([a-z][\w-]*)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_of(page: str) -> str:
    """The page's Python blocks at the lines where they stand, everything else blank: tracebacks point into the page."""
    lines = [""] * (page.count("\n") + 1)
    for block in FENCE.finditer(page):
        if block[1] == "python":
            start = page.count("\n", 0, block.start(2))
            lines[start : start + block[2].count("\n")] = block[2].splitlines()
    return "\n".join(lines)


def commands_of(page: str) -> str:
    """What the page says to type: its console blocks and its inline code."""
    blocks = [block[2] for block in FENCE.finditer(page) if block[1] in ("console", "sh", "bash", "shell")]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", FENCE.sub("", page))])


def run_doctest(test: doctest.DocTest) -> str:
    """Run one docstring's examples; the report of what failed, empty if nothing did."""
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    return "".join(report)


def docstrings(path: Path) -> list[tuple[str, int, str]]:
    """Name, line and text of each docstring in a module that shows an example."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    found = [(getattr(node, "name", "module"), node, ast.get_docstring(node)) for node in nodes]
    return [(name, node.body[0].lineno, text) for name, node, text in found if text and ">>>" in text]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=relative)
def test_python_in_pages_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(python_of(page.read_text()))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{relative(page)} (same line numbers as {script.name}):\n{done.stderr}"


@pytest.mark.parametrize("path", [path for path in MODULES if docstrings(path)], ids=relative)
def test_examples_in_docstrings(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    parser = doctest.DocTestParser()
    tests = [
        parser.get_doctest(text, dict(vars(module)), f"{module.__name__}.{name}", relative(path), line - 1)
        for name, line, text in docstrings(path)
    ]
    failures = [report for test in tests if (report := run_doctest(test))]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE.findall(commands_of(page.read_text()))) <= targets


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_named_exist(page: Path) -> None:
    text = page.read_text()
    links = [name for name in LINK.findall(text) if not (page.parent / name).exists()]
    paths = [name for name in PATH.findall(text) if not any((at / name).exists() for at in (ROOT, page.parent))]
    assert links + paths == []


def test_readme_shows_what_to_run() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {"demo", "test"} <= set(MAKE.findall(commands_of(readme)))
    assert "```python" in readme


def test_python_keeps_its_lines() -> None:
    page = "# Title\n\n```python\nx = 1\n```\n\n```console\n$ make test\n```\n\n```python\nassert x == 1\n```\n"
    assert [line for line in enumerate(python_of(page).split("\n"), 1) if line[1]] == [
        (4, "x = 1"),
        (12, "assert x == 1"),
    ]
    assert MAKE.findall(commands_of(page)) == ["test"]


def test_wrong_examples_are_reported() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", "sum.py", 0)
    assert "Expected:" in run_doctest(test)

"""Run a script, unchanged, as every rank: each has its own ``__main__``, RANK and output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO

from shardwise.errors import CollectiveError, RankError
from shardwise.mesh.world import current_world
from shardwise.sim.possessions import Environment, MainModule
from shardwise.sim.simulate import Simulation


def run_script(path: Path, arguments: Sequence[str], world_size: int, *, everybody: bool = False) -> int:
    """Run the script at ``path`` as every rank of a world of ``world_size``; return the exit code.

    Only rank 0 is heard on the standard output, or ``everybody``, line by line with the rank named. The first rank that
    fails or exits with a code other than 0 ends the run.
    """
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return 1
    modules = [_main_module(path) for _ in range(world_size)]
    names = _variables(0, world_size)
    variables = [_variables(rank, world_size) for rank in range(world_size)]
    simulation = Simulation(world_size, own=[(Environment([*names]), variables), (MainModule(), modules)])
    with _arguments(path, arguments), _output(lambda: simulation.lockstep.running, everybody):
        try:
            simulation.run(lambda: _execute(code, modules[current_world().rank]))
        except (RankError, CollectiveError) as error:
            failure = error
        else:
            return 0
    return _report(failure)


def _execute(code: CodeType, module: ModuleType) -> None:
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def _main_module(path: Path) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = __builtins__
    return module


def _variables(rank: int, size: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def _report(failure: RankError | CollectiveError) -> int:
    cause = failure.__cause__
    if isinstance(cause, SystemExit):
        if not isinstance(cause.code, int):
            print(cause.code, file=sys.stderr)
        return cause.code if isinstance(cause.code, int) else 1
    if cause is not None:
        traceback.print_exception(type(cause), cause, cause.__traceback__)
    print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _arguments(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv, sys.path
    sys.argv = [str(path), *arguments]
    sys.path = [os.path.dirname(os.path.abspath(path)), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before


@contextlib.contextmanager
def _output(running: Callable[[], int], everybody: bool) -> Iterator[None]:
    output = RankStream(sys.stdout, running, prefix_first=everybody, others=everybody)
    errors = RankStream(sys.stderr, running, prefix_first=everybody, others=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            output.finish()
            errors.finish()


class RankStream(io.TextIOBase):
    """A text stream that knows which rank writes: rank 0 passes unchanged, others line by line with their rank."""

    def __init__(self, stream: TextIO, running: Callable[[], int], *, prefix_first: bool, others: bool) -> None:
        self._stream = stream
        self._running = running
        self._prefix_first = prefix_first
        self._others = others
        self._begun: dict[int, str] = {}

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        rank = self._running()
        if rank == 0 and not self._prefix_first:
            return self._stream.write(text)
        if rank == 0 or self._others:
            *lines, self._begun[rank] = (self._begun.get(rank, "") + text).split("\n")
            for line in lines:
                self._stream.write(f"[rank {rank}] {line}\n")
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._running() == 0 and not self._prefix_first and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def finish(self) -> None:
        """Write the lines that were begun and not ended."""
        for rank, text in self._begun.items():
            if text:
                self._stream.write(f"[rank {rank}] {text}\n")
        self._begun.clear()
        self._stream.flush()

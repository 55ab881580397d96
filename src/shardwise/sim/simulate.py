"""Run a function as every rank of a world, in one process."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

from shardwise.errors import RankError, WorldError, message
from shardwise.mesh.world import World, use_world
from shardwise.sim.agreement import Agreements
from shardwise.sim.lockstep import Lockstep, RankThread, Unwound
from shardwise.sim.meeting import Channel
from shardwise.sim.possessions import NumpyRandom, Possession, PythonRandom, TorchDistributed, TorchRandom
from shardwise.sim.request import PACKAGE
from shardwise.sim.torch_world import ChannelKey, RankWorld, torch_replaced

P = ParamSpec("P")
T = TypeVar("T")

Own = tuple[Possession[Any], Sequence[object]]

_one_run = threading.Lock()  # what the ranks swap belongs to the process, so runs come one after the other


def run(fn: Callable[P, T], world_size: int, *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Call ``fn(*args, **kwargs)`` as every rank of a world of ``world_size``; return what each rank returned.

    The ranks are threads that take turns, so a run is deterministic; each has its own world, its own groups in
    `torch.distributed`, and its own random numbers, which start from the caller's state. Arguments are shared, not
    copied. Collectives work on tensors of the CPU.

    Raises `DeadlockError` if every rank waits, `CollectiveMismatchError` if the ranks of a group call different things,
    and `RankError` if ``fn`` raises on a rank.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from shardwise.sim import run
    >>> def total():
    ...     x = torch.tensor(dist.get_rank())
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> run(total, 4)
    [6, 6, 6, 6]
    """
    return Simulation(world_size).run(lambda: fn(*args, **kwargs))


class Simulation:
    """A run of ``size`` ranks; ``own`` are further things that each rank has its own of, with what it starts from."""

    def __init__(self, size: int, own: Sequence[Own] = ()) -> None:
        if not isinstance(size, int) or size < 1:
            raise WorldError(message("no such world", asked=f"a world of {size!r} ranks", do="a whole number from 1"))
        self.size = size
        self.lockstep = Lockstep(size, self._swap)
        self._agreements = Agreements(self.lockstep)
        self._own = own
        self._possessions: list[Possession[Any]] = []
        self._kept: list[list[object]] = []
        self._worlds: list[RankWorld] = []

    def run(self, body: Callable[[], T]) -> list[T]:
        """Call ``body`` as every rank."""
        results: dict[int, T] = {}

        def start(rank: int) -> Callable[[], None]:
            context, modes = contextvars.copy_context(), Modes()
            return lambda: context.run(self._run_rank, rank, modes, body, results)

        with _alone(), torch_replaced(), self._worlds_made():
            self.lockstep.drive([start(rank) for rank in range(self.size)])
        failure, self.lockstep.failure = self.lockstep.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame
        return [results[rank] for rank in range(self.size)]

    def _run_rank(self, rank: int, modes: Modes, body: Callable[[], T], results: dict[int, T]) -> None:
        torch_world = self._worlds[rank]
        world = World("simulated", rank, self.size, torch_world.make_group, exchange=self._agreements.of(rank))
        with use_world(world), modes.entered():
            try:
                results[rank] = body()
            except Unwound:
                raise
            except BaseException as error:
                self.lockstep.end(self._rank_error(rank, error))
            finally:
                for group in torch_world.groups:
                    group.finish()

    def _rank_error(self, rank: int, error: BaseException) -> RankError:
        raised = RankError(f"rank {rank} of {self.size} raised {type(error).__name__}: {error}")
        raised.rank = rank
        raised.__cause__ = error.with_traceback(without_machinery(error.__traceback__))
        return raised

    @contextlib.contextmanager
    def _worlds_made(self) -> Iterator[None]:
        outer = c10d._world
        prefix = f"{outer.prefix}/{outer.rank}" if isinstance(outer, RankWorld) else "sim"
        channels: dict[ChannelKey, Channel] = {}
        self._worlds = [RankWorld(rank, self.size, self.lockstep, channels, prefix) for rank in range(self.size)]
        started_from: list[Possession[Any]] = [TorchRandom(), PythonRandom(), NumpyRandom()]
        own = [(TorchDistributed(), self._worlds), *self._own]
        self._possessions = [*started_from, *(possession for possession, _ in own)]
        before = [possession.take() for possession in self._possessions]
        start = before[: len(started_from)]
        self._kept = [[*start, *(values[rank] for _, values in own)] for rank in range(self.size)]
        try:
            self._give(self._kept[0])
            yield
        finally:
            self._give(before)
            for world in self._worlds:
                world.close()

    def _swap(self, leaving: int, coming: int) -> None:
        if leaving != coming:
            self._kept[leaving] = [possession.take() for possession in self._possessions]
            self._give(self._kept[coming])

    def _give(self, kept: Sequence[object]) -> None:
        for possession, value in zip(self._possessions, kept, strict=True):
            possession.give(value)


class Modes:
    """The modes of the thread that makes it, to be entered in another: gradients, inference, autocast."""

    def __init__(self) -> None:
        self.gradients = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.autocast: Mapping[str, torch.dtype] = {
            device_type: torch.get_autocast_dtype(device_type)
            for device_type in ("cpu", "cuda")
            if torch.is_autocast_enabled(device_type)
        }

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            yield


def without_machinery(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames at its start in which this package calls the rank's program."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    nested = isinstance(threading.current_thread(), RankThread)
    with contextlib.nullcontext() if nested else _one_run:
        yield

"""Who runs: the threads of a simulated run take turns, and exactly one has the turn.

A rank keeps its turn until it has to wait. Then the turn goes to the next rank, in the order of the ranks, that can go
on; so the same program always interleaves in the same way. If none can go on, the run is dead, and every rank is told.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from shardwise.errors import DeadlockError, WorldError, message
from shardwise.sim.request import Place, place_text, user_place


class Awaited(Protocol):
    """Something that a rank waits for."""

    @property
    def done(self) -> bool: ...

    def text(self, rank: int) -> str: ...


class Unwound(BaseException):
    """Takes a rank out of its program when the run has ended; not an `Exception`, so that programs let it pass."""


class RankThread(threading.Thread):
    """The thread of one rank."""

    def __init__(self, rank: int, body: Callable[[], None]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank = rank
        self._body: Callable[[], None] | None = body

    def run(self) -> None:
        body, self._body = self._body, None
        assert body is not None
        body()


class Lockstep:
    """The turns of ``size`` ranks; ``swap(leaving, coming)`` is called whenever the turn passes."""

    GRACE = 1.0  # seconds that a rank gets to come to its next collective when the caller breaks off the run
    PULSE = 0.5  # seconds between the moments at which the caller's thread wakes to handle signals
    PATIENCE = 1000  # times that each rank may ask in vain whether something is done, with nobody launching anything

    def __init__(self, size: int, swap: Callable[[int, int], None]) -> None:
        self.running = 0
        self.failure: BaseException | None = None
        self._swap = swap
        self._turns = [_taken() for _ in range(size)]
        self._over = _taken()
        self._alive = [True] * size
        self._awaited: list[Awaited | None] = [None] * size
        self._asked: list[Awaited | None] = [None] * size
        self._asked_in_vain = 0
        self._begun = False
        self._open = True
        self._threads: list[RankThread] = []

    def drive(self, bodies: list[Callable[[], None]]) -> None:
        """Run each rank's body on its own thread, in turns, until all have left."""
        self._threads = [RankThread(rank, self._in_turn(rank, body)) for rank, body in enumerate(bodies)]
        try:
            for thread in self._threads:
                thread.start()
            self._begun = True
            self._turns[0].release()
            # Woken now and then: a signal that the kernel gave to another thread is handled only when this one runs.
            while not self._over.acquire(timeout=self.PULSE):
                pass
        except BaseException as error:
            self._break_off(error)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._open = False

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Block ``rank`` until ``awaited`` is done; the others run meanwhile."""
        self.check(rank)
        while not awaited.done:
            self._awaited[rank] = awaited
            following = self._next(rank)
            if following is None:
                self.end(self._deadlock())
            self._pass(rank, following)
            self._turns[rank].acquire()
            self.check()
        self._awaited[rank] = None

    def give_way(self, rank: int, asked: Awaited) -> None:
        """Let the next rank that can go on have a turn, because ``rank`` asks whether ``asked`` is done."""
        self.check(rank)
        self._asked[rank] = asked
        self._asked_in_vain += 1
        if self._asked_in_vain > self.PATIENCE * len(self._alive):
            self.end(self._deadlock())
        following = self._next(rank)
        if following is not None and following != rank:
            self._pass(rank, following)
            self._turns[rank].acquire()
            self.check()
        self._asked[rank] = None

    def launch(self, rank: int) -> None:
        """Note that ``rank`` launches something."""
        self.check(rank)
        self._asked_in_vain = 0

    def end(self, failure: BaseException) -> NoReturn:
        """End the run because of ``failure``, and take the rank that has the turn out of its program."""
        if self.failure is None:
            self.failure = failure
        raise Unwound

    def check(self, rank: int | None = None) -> None:
        """Take the rank that has the turn out of its program if the run has ended; refuse it the groups of ``rank``."""
        if self.failure is not None:
            raise Unwound
        if not self._open:
            raise WorldError(
                message(
                    "the simulated run has ended", asked="a collective on one of its groups", do="call it in the run"
                )
            )
        if rank is not None and rank != self.running:
            raise WorldError(
                message(
                    "a process group belongs to one rank, and this is another's",
                    asked=f"a collective of rank {self.running} on a group of rank {rank}",
                    do="look the group up in each rank; a compiled function without DTensors among its inputs is shared"
                    " by the ranks: compile it in each, after torch.compiler.reset()",
                )
            )

    def _in_turn(self, rank: int, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self._turns[rank].acquire()
            try:
                if self.failure is None:
                    body()
            except Unwound:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            finally:
                self._leave(rank)

        return run

    def _leave(self, rank: int) -> None:
        self._alive[rank] = False
        following = self._next(rank) if self.failure is None else None
        if following is None and any(self._alive):
            self.failure = self.failure or self._deadlock()
            following = self._alive.index(True)
        if following is None:
            self._over.release()
        else:
            self._pass(rank, following)

    def _pass(self, rank: int, following: int) -> None:
        self._swap(rank, following)
        self.running = following
        self._turns[following].release()

    def _next(self, rank: int) -> int | None:
        size = len(self._alive)
        for step in range(1, size + 1):
            candidate = (rank + step) % size
            if self._alive[candidate]:
                awaited = self._awaited[candidate]
                if awaited is None or awaited.done:
                    return candidate
        return None

    def _deadlock(self) -> DeadlockError:
        frames = sys._current_frames()
        lines = []
        for rank, thread in enumerate(self._threads):
            awaited = self._awaited[rank] or self._asked[rank]
            if not self._alive[rank] or awaited is None:
                lines.append(f"rank {rank} has finished")
            else:
                place = user_place(frames.get(thread.ident or 0))
                lines.append(f"rank {rank} waits{_at(place, awaited.text(rank))}")
        return DeadlockError(
            message(
                "every rank waits or has finished, and none can go on",
                got="\n".join(lines),
                do="let every rank of a group call the same collectives, in the same order",
            )
        )

    def _break_off(self, error: BaseException) -> None:
        self.failure = self.failure or error
        if not self._begun:
            self._alive = [thread.ident is not None for thread in self._threads]
            if not any(self._alive):
                return
            self._turns[self._alive.index(True)].release()
        # One request can be lost: in a callback of the interpreter, say, whose exceptions are printed and forgotten.
        while not self._over.acquire(timeout=self.GRACE):
            thread = self._threads[self.running]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Unwound))


def _at(place: Place, text: str) -> str:
    where = place_text(place)
    return f" in {text}" if text.endswith(where) else f" at {where} for {text}"


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock

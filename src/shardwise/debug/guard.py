"""Mismatched collectives become errors on real process groups too."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from shardwise.comm import guard as comm_guard
from shardwise.comm import wire


class guard:
    """From now on, let the ranks of a group compare what they are about to do before each collective starts.

    As a context manager, until the end of the block; else until `stop`. All ranks turn it on and off at the same place.
    The environment variable ``SHARDWISE_GUARD=1`` turns it on for a whole program. The ranks compare over the store of
    `torch.distributed`, which takes about a millisecond a collective: the operation, shape, dtype, reduction and splits
    in the order of the group's calls, and the lines of the program if ``lines`` is set. Where they differ, every rank
    raises `CollectiveMismatchError`; where a rank does not come within ``timeout`` seconds (by default
    ``SHARDWISE_GUARD_TIMEOUT`` in the environment, or 60), every rank that has come raises `CollectiveTimeoutError`.
    Both list rank by rank what was called and where. The collectives of compiled regions are not compared, nor are
    those of `shardwise.sim`, which always compares.

    >>> import shardwise, shardwise.debug, torch
    >>> from shardwise.collectives import all_reduce
    >>> with shardwise.debug.guard(timeout=5):
    ...     total = all_reduce(torch.ones(2), "sum", None)
    """

    def __init__(self, timeout: float | None = None, *, lines: bool = False) -> None:
        self._stop: Callable[[], None] = wire.watch(comm_guard.Guard(timeout, lines=lines))

    def stop(self) -> None:
        """Compare no more."""
        self._stop()

    def __enter__(self) -> guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

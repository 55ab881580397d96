"""Where the ranks of a group meet: the n-th call of one rank on a group belongs with the n-th calls of the others.

The last rank to come moves the data for everybody. Ranks that come with different calls are told so at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import CollectiveMismatchError, message
from shardwise.sim.exchange import MOVE, Disagreement
from shardwise.sim.request import Request, Terms


class Meeting:
    """The calls of a group that belong together; done when all have come and the data has moved."""

    __slots__ = ("done", "missing", "name", "requests", "terms")

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.requests: dict[int, Request | None] = dict.fromkeys(ranks)
        self.missing = len(ranks)
        self.terms: Terms = ()
        self.name = name
        self.done = False

    def join(self, request: Request) -> None:
        """Let one rank come; the last one moves the data."""
        self.requests[request.rank] = request
        self.missing -= 1
        self.terms = self.terms or request.terms
        if request.terms != self.terms:
            raise self._mismatch()
        if not self.missing:
            self._move()
            self.done = True

    def text(self, rank: int) -> str:
        """What ``rank`` waits for."""
        request = self.requests[rank]
        absent = [member for member, other in self.requests.items() if other is None]
        return f"{request} over {self.name} (not called by {_ranks_text(absent)}) at {request.line if request else '?'}"

    def _move(self) -> None:
        requests = [request for request in self.requests.values() if request is not None]
        try:
            with torch.inference_mode(), plain_torch():
                MOVE[requests[0].op](requests)
        except Disagreement as error:
            raise self._mismatch(str(error)) from None

    def _mismatch(self, reason: str | None = None) -> CollectiveMismatchError:
        lines = [f"rank {rank} {_call_text(request)}" for rank, request in self.requests.items()]
        return CollectiveMismatchError(
            message(
                f"the ranks of {self.name} call different things",
                got="\n".join([*lines, *([reason] if reason else [])]),
                do="let every rank of a group call the same collectives, in the same order, with fitting shapes",
            )
        )


class Message(Meeting):
    """A piece from one rank to another: the sender's request stands first, whoever came first."""

    __slots__ = ()

    def join(self, request: Request) -> None:
        self.requests[request.rank] = request
        self.missing -= 1
        if not self.missing:
            self._move()
            self.done = True

    def accept(self, source: int) -> None:
        """Let a receiver that takes from anybody know whom it takes from."""
        receiver = next(request for request in self.requests.values() if request is not None)
        self.requests = {source: None, receiver.rank: receiver}

    @property
    def source(self) -> int:
        return next(iter(self.requests))


class Channel:
    """A group's meetings in the order of its calls, and its messages in the order of their sending."""

    ANYBODY = -1

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.name = f"group {ranks if len(ranks) > 1 else f'({ranks[0]})'}"
        self._calls = dict.fromkeys(ranks, 0)
        self._meetings: dict[int, Meeting] = {}
        self._sent: dict[tuple[int, int], deque[Message]] = {}  # by receiver and tag
        self._expected: dict[tuple[int, int], deque[Message]] = {}

    def call(self, request: Request) -> Meeting:
        """Join the meeting that this rank's next call on the group belongs to."""
        number = self._calls[request.rank]
        self._calls[request.rank] = number + 1
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = Meeting(self.ranks, self.name)
        meeting.join(request)
        if meeting.done:
            del self._meetings[number]
        return meeting

    def send(self, request: Request, target: int, tag: int) -> Message:
        """Offer a piece to ``target``; done when it is received."""
        expected = self._expected.get((target, tag), deque())
        for found in expected:
            if found.source in (request.rank, self.ANYBODY):
                expected.remove(found)
                found.accept(request.rank)
                found.join(request)
                return found
        offered = Message((request.rank, target), self.name)
        offered.join(request)
        self._sent.setdefault((target, tag), deque()).append(offered)
        return offered

    def receive(self, request: Request, source: int, tag: int) -> Message:
        """Take a piece from ``source``, or from whoever sent first if it is `ANYBODY`."""
        sent = self._sent.get((request.rank, tag), deque())
        for found in sent:
            if source in (found.source, self.ANYBODY):
                sent.remove(found)
                found.join(request)
                return found
        awaited = Message((source, request.rank), self.name)
        awaited.join(request)
        self._expected.setdefault((request.rank, tag), deque()).append(awaited)
        return awaited


def plain_torch() -> contextlib.AbstractContextManager[object]:
    """Hide the modes of the rank that happens to run from work that is done for all ranks."""
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


def _call_text(request: Request | None) -> str:
    return "has not come yet" if request is None else f"calls {request} at {request.line}"


def _ranks_text(ranks: Sequence[int]) -> str:
    if Channel.ANYBODY in ranks:
        return "any rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

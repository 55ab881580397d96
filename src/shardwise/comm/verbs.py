"""What the functional collectives do: each linear collective beside its adjoint, started now or under autograd.

A `Verb` packs its input, sends it over the wire, and says how what arrives is laid out. One autograd function serves
them all, because the gradient of a verb is its adjoint, which is a verb too; so gradients of any order follow. Verbs of
one kind can be started together, on several tensors that are sent at once; so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.comm.place import Place

Unpack: TypeAlias = Callable[[], object] | None


class Verb:
    """One linear collective: what is packed and sent, how the result is laid out, and the verb of its gradient."""

    late = False  # whether the native operator may still read its input after it has returned

    def __init__(self, place: Place) -> None:
        self.group, self.axis = self.place = place

    def pack(self, x: Tensor) -> Tensor:
        return x

    def send(self, packed: Tensor) -> Tensor:
        raise NotImplementedError

    def send_all(self, packed: list[Tensor]) -> list[Tensor]:
        return [self.send(one) for one in packed]

    def lay(self, sent: Tensor) -> tuple[Tensor, Unpack]:
        return sent, None

    def adjoint(self) -> Verb:
        raise NotImplementedError

    def exported(self, x: Tensor) -> Tensor:
        """The result, out of operators whose gradients torch knows: an export drops those of autograd functions."""
        return self.lay(wire.wait(self.send(self.pack(x))))[0]


class AllReduce(Verb):
    """Sum or average; its own adjoint."""

    def __init__(self, place: Place, op: str) -> None:
        super().__init__(place)
        self.op = op

    def send(self, packed: Tensor) -> Tensor:
        return wire.all_reduce(packed, self.op, self.group, axis=self.axis)

    def send_all(self, packed: list[Tensor]) -> list[Tensor]:
        return wire.all_reduce_coalesced(packed, self.op, self.group, axis=self.axis)

    def adjoint(self) -> Verb:
        return self

    def exported(self, x: Tensor) -> Tensor:
        return _averaged(wire.wait(wire.all_reduce(x, "sum", self.group, axis=self.axis)), self)


class Gather(Verb):
    """Join along a dim, of which each part is divided by the group's size if ``averaged``."""

    late = True

    def __init__(self, place: Place, dim: int, averaged: bool) -> None:
        super().__init__(place)
        self.dim, self.averaged = dim, averaged

    def pack(self, x: Tensor) -> Tensor:
        return x / self.group.size if self.averaged else x

    def send(self, packed: Tensor) -> Tensor:
        return wire.all_gather(packed, self.group, axis=self.axis)

    def send_all(self, packed: list[Tensor]) -> list[Tensor]:
        return wire.all_gather_coalesced(packed, self.group, axis=self.axis)

    def lay(self, sent: Tensor) -> tuple[Tensor, Unpack]:
        parts, shape = self._parts(sent)
        if parts is sent:
            return sent, None
        if prod(shape[: self.dim]) == 1:
            return parts.view(shape), None
        whole = sent.new_empty(shape)
        return whole, partial(whole.view(parts.shape).copy_, parts)

    def _parts(self, sent: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        size, dim = self.group.size, self.dim
        if dim == 0 or size == 1:
            return sent, tuple(sent.shape)
        parts = sent.view(size, sent.shape[0] // size, *sent.shape[1:]).movedim(0, dim)
        return parts, (*parts.shape[:dim], size * parts.shape[dim + 1], *parts.shape[dim + 2 :])

    def exported(self, x: Tensor) -> Tensor:
        parts, shape = self._parts(wire.wait(self.send(x)))
        return parts.reshape(shape)

    def adjoint(self) -> Verb:
        return ReduceScatter(self.place, "avg" if self.averaged else "sum", self.dim)


class ReduceScatter(Verb):
    """Sum or average, of which each rank gets its part of a dim."""

    late = True

    def __init__(self, place: Place, op: str, dim: int) -> None:
        super().__init__(place)
        self.op, self.dim = op, dim

    def pack(self, x: Tensor) -> Tensor:
        return split_rows(x, self.dim, self.group.size)

    def send(self, packed: Tensor) -> Tensor:
        return wire.reduce_scatter(packed, self.op, self.group, axis=self.axis)

    def send_all(self, packed: list[Tensor]) -> list[Tensor]:
        return wire.reduce_scatter_coalesced(packed, self.op, self.group, axis=self.axis)

    def lay(self, sent: Tensor) -> tuple[Tensor, Unpack]:
        return sent.squeeze(0), None

    def adjoint(self) -> Verb:
        return Gather(self.place, self.dim, self.op == "avg")

    def exported(self, x: Tensor) -> Tensor:
        total = wire.wait(wire.reduce_scatter(self.pack(x), "sum", self.group, axis=self.axis))
        return _averaged(self.lay(total)[0], self)


def _averaged(total: Tensor, verb: AllReduce | ReduceScatter) -> Tensor:
    return total / verb.group.size if verb.op == "avg" else total


class Exchange(Verb):
    """Rows of dim 0 from everyone to everyone."""

    late = True

    def __init__(self, place: Place, received: list[int], sent: list[int]) -> None:
        super().__init__(place)
        self.received, self.sent = received, sent

    def send(self, packed: Tensor) -> Tensor:
        return wire.all_to_all(packed, self.received, self.sent, self.group, axis=self.axis)

    def adjoint(self) -> Verb:
        return Exchange(self.place, self.sent, self.received)


class Broadcast(Verb):
    """The tensor of one rank, at all."""

    def __init__(self, place: Place, source: int) -> None:
        super().__init__(place)
        self.source = source

    def send(self, packed: Tensor) -> Tensor:
        return wire.broadcast(packed, self.source, self.group, axis=self.axis)

    def adjoint(self) -> Verb:
        return _Collect(self.place, self.source)

    def exported(self, x: Tensor) -> Tensor:
        mine = x if self.group.index == self.source else x.masked_fill(torch.ones_like(x).bool(), 0)
        return wire.wait(wire.all_reduce(mine, "sum", self.group, axis=self.axis))


class _Collect(Broadcast):
    """The sum of all ranks' tensors at one rank, zeros at the others."""

    def send(self, packed: Tensor) -> Tensor:
        total = wire.wait(wire.all_reduce(packed, "sum", self.group, axis=self.axis))
        # A masked fill, not a branch: the same graph is traced on all ranks, and none drops the sum as unused.
        return total.masked_fill(total.new_full((), self.group.index != self.source, dtype=torch.bool), 0)

    def adjoint(self) -> Verb:
        return Broadcast(self.place, self.source)


class SumForward(Verb):
    """A sum whose gradient passes unchanged."""

    def send(self, packed: Tensor) -> Tensor:
        return wire.all_reduce(packed, "sum", self.group, axis=self.axis)

    def adjoint(self) -> Verb:
        return SumBackward(self.place)

    def exported(self, x: Tensor) -> Tensor:
        return wire.wait(self.send(x.detach())) + (x - x.detach())


class SumBackward(Verb):
    """The input itself; its gradient is summed."""

    late = True

    def send(self, packed: Tensor) -> Tensor:
        return packed

    def adjoint(self) -> Verb:
        return SumForward(self.place)

    def exported(self, x: Tensor) -> Tensor:
        total = wire.wait(wire.all_reduce(x, "sum", self.group, axis=self.axis))
        return x.detach() + (total - total.detach())


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, verb: Verb, pending: bool) -> Tensor:
        ctx.verb = verb
        result = _start(verb, x, pending)
        return result if pending else result.detach()  # not a view, so that the caller may change it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return cast(Tensor, _Collective.apply(gradient, ctx.verb.adjoint(), False)), None, None  # type: ignore[no-untyped-call]


class _Collectives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, verbs: Sequence[Verb], pending: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.verbs = verbs
        results = _start_all(verbs, xs, pending)
        return tuple(results if pending else [result.detach() for result in results])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        wanted = [(verb.adjoint(), one) for verb, one, need in zip(ctx.verbs, gradients, needed, strict=True) if need]
        verbs, given = [verb for verb, _ in wanted], [one for _, one in wanted]
        # A compiled backward has no second order, and torch.compile mistakes the arguments of a nested function.
        start = _start_all if torch.compiler.is_compiling() else _apply_all
        found = iter(start(verbs, given, False))
        return None, None, *(next(found) if need else None for need in needed)


def carry_all(verbs: Sequence[Verb], xs: Sequence[Tensor]) -> list[Tensor]:
    """`carry` verbs of one kind on several tensors, sending together all that have one dtype."""
    xs = [x.wait() if isinstance(x, AsyncCollectiveTensor) else x for x in xs]
    if any(map(differentiated, xs)):
        if torch.compiler.is_exporting():
            return [verb.exported(x) for verb, x in zip(verbs, xs, strict=True)]
        if torch.compiler.is_compiling():
            xs = [x.view_as(x) for x in xs]  # torch.compile takes no tensor twice
        return _apply_all(verbs, xs, not wire.is_traced())
    return _start_all(verbs, xs, not wire.is_traced())


def _apply_all(verbs: Sequence[Verb], xs: Sequence[Tensor], pending: bool) -> list[Tensor]:
    return list(_Collectives.apply(verbs, pending, *xs))  # type: ignore[no-untyped-call]


def _start_all(verbs: Sequence[Verb], xs: Sequence[Tensor], pending: bool) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [place for place, x in enumerate(xs) if x.dtype is dtype]
        sent = verbs[places[0]].send_all([_packed(verbs[place], xs[place], pending) for place in places])
        for place, one in zip(places, sent, strict=True):
            results[place] = _laid(verbs[place], one, pending)
    return [results[place] for place in range(len(xs))]


def carry(verb: Verb, x: Tensor) -> Tensor:
    """Start ``verb`` on ``x``; the result is pending, except while a graph is traced. Gradients pass."""
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    if differentiated(x):
        if torch.compiler.is_exporting():
            return verb.exported(x)
        return cast(Tensor, _Collective.apply(x, verb, not wire.is_traced()))  # type: ignore[no-untyped-call]
    return _start(verb, x, not wire.is_traced())


def _start(verb: Verb, x: Tensor, pending: bool) -> Tensor:
    return _laid(verb, verb.send(_packed(verb, x, pending)), pending)


def _packed(verb: Verb, x: Tensor, pending: bool) -> Tensor:
    packed = verb.pack(x)
    return _kept(packed, x) if pending and (verb.late or verb.group.size == 1) else packed


def _laid(verb: Verb, sent: Tensor, pending: bool) -> Tensor:
    if not pending:
        result, unpack = verb.lay(wire.wait(sent))
        if unpack is not None:
            unpack()
        return result
    result, unpack = verb.lay(sent)
    if unpack is not None:
        wire.unpacking(result, sent, unpack)
    return AsyncCollectiveTensor(result)


def _kept(packed: Tensor, x: Tensor) -> Tensor:
    packed = packed.contiguous()
    return packed.clone() if packed.data_ptr() == x.data_ptr() else packed


def differentiated(x: Tensor) -> bool:
    """Whether autograd records what is done with ``x``."""
    return x.requires_grad and torch.is_grad_enabled()


def split_rows(x: Tensor, dim: int, size: int) -> Tensor:
    """Cut ``dim`` in ``size`` equal parts and stack them along a new dim 0."""
    return x.reshape((*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])).movedim(dim, 0)

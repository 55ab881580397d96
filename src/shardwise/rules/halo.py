"""Convolutions over cut dims of space: ranks exchange the borders that their kernels reach into.

A rank computes its part of the result. For that it needs an interval of the input that overlaps what others hold: it
fetches the rest, and in the gradient it gives back what belongs to them. Which rank sends what to whom follows from
sizes alone, so uneven and empty shards, strides and dilations need no special treatment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from shardwise.comm import wire
from shardwise.mesh.world import Group
from shardwise.rules.equation import Strategy
from shardwise.rules.rule import Call, Placing
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec

aten = torch.ops.aten
Interval = tuple[int, int]
Sizes = Sequence[int]


class Window(NamedTuple):
    """How a convolution reads one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    @property
    def reach(self) -> int:
        """How far the last element of the kernel lies from the first."""
        return self.dilation * (self.kernel - 1)

    def sources(self, start: int, stop: int) -> Interval:
        """Which inputs the outputs from ``start`` to ``stop`` are made of, padding included.

        >>> Window(kernel=3, stride=2, padding=1, dilation=1, transposed=False).sources(0, 4)
        (-1, 8)
        """
        if stop <= start:
            return 0, 0
        if self.transposed:
            first = -(-(start + self.padding - self.reach) // self.stride)
            return first, (stop - 1 + self.padding) // self.stride + 1
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach + 1


@dataclass(frozen=True, slots=True)
class Border:
    """What one dim needs: ``held`` and ``needed`` are the inputs of each member of ``group``, ``wanted`` with padding.

    ``made`` are the outputs of this rank.
    """

    dim: int
    group: Group
    name: str
    window: Window
    held: tuple[Interval, ...]
    needed: tuple[Interval, ...]
    wanted: Interval
    made: Interval

    @property
    def low(self) -> int:
        """What is added in front of the needed inputs, or of the outputs of a transposed convolution (or taken off)."""
        if self.window.transposed:
            return self.needed[self.group.index][0] * self.window.stride - self.made[0] - self.window.padding
        return self.needed[self.group.index][0] - self.wanted[0]

    def high(self, length: int) -> int:
        """The same behind ``length`` inputs or outputs."""
        if self.window.transposed:
            return self.made[1] - self.made[0] - self.low - length
        return self.wanted[1] - self.wanted[0] - self.low - length

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """The needed inputs, from what each rank holds."""
        me = self.group.index
        if self.held == self.needed:
            return x
        sent = [_common(self.held[me], needed) for needed in self.needed]
        arriving = [_length(_common(held, self.needed[me])) for held in self.held]
        return self._exchanged(x, self.held[me][0], sent, arriving)

    def give_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of what this rank holds, from that of what each needed."""
        me = self.group.index
        if self.held == self.needed:
            return gradient
        sent = [_common(held, self.needed[me]) for held in self.held]
        arriving = [_common(self.held[me], needed) for needed in self.needed]
        pieces = self._exchanged(gradient, self.needed[me][0], sent, [_length(piece) for piece in arriving])
        start, stop = self.held[me]
        shape = [stop - start if dim == self.dim else size for dim, size in enumerate(gradient.shape)]
        total, place = gradient.new_zeros(shape), 0
        for first, last in arriving:
            length = last - first
            if length:
                total.narrow(self.dim, first - start, length).add_(pieces.narrow(self.dim, place, length))
            place += length
        return total

    def _exchanged(self, x: torch.Tensor, origin: int, sent: list[Interval], arriving: list[int]) -> torch.Tensor:
        rows = x.movedim(self.dim, 0)
        packed = torch.cat([rows[start - origin : stop - origin] for start, stop in sent])
        lengths = [_length(piece) for piece in sent]
        moved = wire.wait(wire.all_to_all(packed, arriving, lengths, self.group, axis=self.name))
        return moved.movedim(0, self.dim).contiguous()


def _common(one: Interval, other: Interval) -> Interval:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (one[0], one[0])


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


# --- strategies


def forward_strategies(call: Call) -> list[Strategy]:
    """Each dim of space may be cut, in the input and the result alike."""
    bias = None if call.operands[2] is None else Replicate()
    dims = _space(call, 0)
    return [Strategy((Shard(dim), Replicate(), bias), (Shard(dim),)) for dim in dims]


def backward_strategies(call: Call) -> list[Strategy]:
    wanted = call.args[10]

    def outputs(dim: int) -> tuple[Placement | None, ...]:
        roles: tuple[Placement, ...] = (Shard(dim), Partial("sum"), Partial("sum"))
        return tuple(role if asked else None for role, asked in zip(roles, wanted, strict=True))

    return [Strategy((Shard(dim), Shard(dim), Replicate()), outputs(dim)) for dim in _space(call, 1)]


def _space(call: Call, operand: int) -> range:
    x = call.operands[operand]
    assert x is not None, call
    return range(2, len(x.shape))


# --- borders


def borders(x: Spec, y: Spec, weight: Sizes, options: Sequence[object], coordinate: tuple[int, ...]) -> list[Border]:
    """The borders of the cut dims; ``options`` are stride, padding, dilation and whether transposed."""
    stride, padding, dilation, transposed = options
    found = []
    for dim in range(2, x.ndim):
        axes = tuple(axis for axis, role in enumerate(x.placements) if role == Shard(dim))
        if axes:
            at = dim - 2
            window = Window(weight[dim], _at(stride, at), _at(padding, at), _at(dilation, at), bool(transposed))
            found.append(_border(x, y, dim, axes, window, coordinate))
    return found


def _at(values: object, place: int) -> int:
    assert isinstance(values, (list, tuple)), values
    return int(values[place if len(values) > 1 else 0])


def _border(x: Spec, y: Spec, dim: int, axes: tuple[int, ...], window: Window, coordinate: tuple[int, ...]) -> Border:
    members = []
    for place in product(*(range(x.mesh.shape[axis]) for axis in axes)):
        own = list(coordinate)
        for axis, index in zip(axes, place, strict=True):
            own[axis] = index
        members.append(tuple(own))
    made = [_whole(y, dim, member) for member in members]
    wanted = [window.sources(*outputs) for outputs in made]
    needed = tuple((min(max(0, low), x.shape[dim]), max(0, min(high, x.shape[dim]))) for low, high in wanted)
    group = x.mesh.axes_group(axes)
    name = "+".join(x.mesh.axis_names[axis] for axis in axes)
    held = tuple(_whole(x, dim, member) for member in members)
    ordered = tuple((low, max(low, high)) for low, high in needed)
    return Border(dim, group, name, window, held, ordered, wanted[group.index], made[group.index])


def _whole(spec: Spec, dim: int, coordinate: tuple[int, ...]) -> Interval:
    intervals = spec.intervals(dim, coordinate)
    return intervals[0] if intervals else (spec.shape[dim], spec.shape[dim])


# --- running


def _padded(x: torch.Tensor, edges: list[Border]) -> torch.Tensor:
    """``x`` with what is added (or taken off) on both sides of the dims."""
    amounts = [0] * (2 * x.dim())
    for edge in edges:
        place = 2 * (x.dim() - 1 - edge.dim)
        amounts[place : place + 2] = edge.low, edge.high(x.shape[edge.dim])
    return aten.constant_pad_nd.default(x, amounts) if any(amounts) else x


def _unpadded(gradient: torch.Tensor, edges: list[Border], shape: Sizes) -> torch.Tensor:
    amounts = [0] * (2 * gradient.dim())
    for edge in edges:
        place = 2 * (gradient.dim() - 1 - edge.dim)
        amounts[place : place + 2] = -edge.low, -edge.high(shape[edge.dim])
    return aten.constant_pad_nd.default(gradient, amounts) if any(amounts) else gradient


def _inside(values: Sizes, edges: list[Border], ndim: int) -> list[int]:
    """Padding of the dims that are whole: that of the others has been taken care of."""
    listed = [_at(values, dim) for dim in range(ndim - 2)]
    for edge in edges:
        listed[edge.dim - 2] = 0
    return listed


@dataclass(frozen=True, slots=True)
class Halo:
    """A convolution of one rank, its borders known; ``groups`` are those of its channels."""

    edges: list[Border]
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int

    def options(self, ndim: int) -> tuple[object, ...]:
        padding, extra = _inside(self.padding, self.edges, ndim), _inside(self.output_padding, self.edges, ndim)
        return self.stride, padding, self.dilation, self.transposed, extra, self.groups

    def fetched(self, x: torch.Tensor) -> torch.Tensor:
        for edge in self.edges:
            x = edge.fetch(x)
        return x if self.transposed else _padded(x, self.edges)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...]
    ) -> torch.Tensor:
        wide = self.fetched(x)
        if 0 in wide.shape or 0 in shape or weight.numel() == 0:
            result = x.new_zeros(shape)
        else:
            result = aten.convolution.default(wide, weight, None, *self.options(x.dim()))
            result = _padded(result, self.edges) if self.transposed else result
        return result if bias is None else result + bias.reshape([-1, *[1] * (x.dim() - 2)])

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        wide = self.fetched(x)
        x_gradient, weight_gradient = wide.new_zeros(wide.shape), weight.new_zeros(weight.shape)
        if 0 not in wide.shape and 0 not in gradient.shape and weight.numel():
            shape = self._shape_made(wide.shape, weight.shape)
            reaching = _unpadded(gradient, self.edges, shape) if self.transposed else gradient
            mask = [*wanted[:2], False]
            one, other, _ = aten.convolution_backward.default(
                reaching, wide, weight, None, *self.options(x.dim()), mask
            )
            x_gradient, weight_gradient = (x_gradient if one is None else one), other
        others = [0, *range(2, x.dim())]
        return (
            self._returned(x_gradient, x.shape) if wanted[0] else None,
            weight_gradient if wanted[1] else None,
            gradient.sum(others) if wanted[2] else None,
        )

    def _shape_made(self, wide: Sizes, weight: Sizes) -> list[int]:
        shape = list(wide)
        for edge in self.edges:
            shape[edge.dim] = (wide[edge.dim] - 1) * edge.window.stride + edge.window.reach + 1
        return shape

    def _returned(self, gradient: torch.Tensor, own: Sizes) -> torch.Tensor:
        if not self.transposed:
            lengths = list(gradient.shape)
            for edge in self.edges:
                lengths[edge.dim] = _length(edge.needed[edge.group.index])
            gradient = _unpadded(gradient, self.edges, lengths)
        for edge in reversed(self.edges):
            gradient = edge.give_back(gradient)
        assert prod(gradient.shape) == prod(own), (gradient.shape, own)
        return gradient


def halo(call: Call, placing: Placing, x: int, y: Spec | None, first: int, groups: int) -> Halo | None:
    """What the local call must do, or None if no dim of space is cut.

    ``x`` is which operand the input is, ``first`` where the options stand among the arguments.
    """
    spec, weight = placing.inputs[x], call.operands[x + 1]
    assert spec is not None, call
    assert y is not None, call
    assert weight is not None, call
    stride, padding, dilation, transposed, output_padding = call.args[first : first + 5]
    options = (stride, padding, dilation, transposed)
    edges = borders(spec, y, weight.shape, options, placing.coordinate)
    return Halo(edges, stride, padding, dilation, transposed, output_padding, groups) if edges else None

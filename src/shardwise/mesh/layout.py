"""Layouts: functions from an index to an integer, given by nested sizes and strides, and their algebra.

``Layout((2, 4), (4, 1))`` sends the coordinate ``(i, j)`` to ``4 * i + j``. An index runs over the coordinates in
row-major order, the last one fastest. Sizes may be nested: ``Layout(((2, 2), 4), ((8, 1), 2))`` has two axes, the first
of which is made of two modes. The operations are those of CuTe's layout algebra (NVIDIA CUTLASS, "CuTe Layout
Algebra"), written for row-major order. All laws are stated in the docstrings and hold at every coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from shardwise._value import derived, value
from shardwise.errors import MeshError, message

Nested: TypeAlias = int | tuple["Nested", ...]
Mode: TypeAlias = tuple[int, int]  # size, stride


@value
class Layout:
    """A function from ``0 .. size - 1`` to the integers, given by nested ``sizes`` and ``strides``.

    Sizes are at least 1, strides at least 0, both nested alike.

    Raises:
        MeshError: the sizes or strides are not such integers, or are not nested alike.

    >>> Layout((2, 3), (1, 2)).values()
    (0, 2, 4, 1, 3, 5)
    """

    sizes: Nested
    strides: Nested

    def __post_init__(self) -> None:
        if not all(size >= 1 and stride >= 0 for size, stride in _modes(self.sizes, self.strides)):
            raise MeshError(
                message("a layout needs sizes of 1 or more and strides of 0 or more", got=(self.sizes, self.strides))
            )

    @staticmethod
    def row_major(sizes: Nested) -> Layout:
        """The layout that counts: its value at each index is the index.

        >>> Layout.row_major((2, 4))
        Layout((2, 4), (4, 1))
        """
        return _row_major(sizes, 1)

    @staticmethod
    def join(axes: Sequence[Layout]) -> Layout:
        """The layout with these axes: ``join(axes)(i, j, ...) == axes[0](i) + axes[1](j) + ...``."""
        return Layout(tuple(axis.sizes for axis in axes), tuple(axis.strides for axis in axes))

    @derived
    def axes(self) -> tuple[Layout, ...]:
        """One layout for each top-level entry of the sizes."""
        if isinstance(self.sizes, int) or isinstance(self.strides, int):
            return (self,)
        return tuple(map(Layout, self.sizes, self.strides))

    @derived
    def modes(self) -> tuple[Mode, ...]:
        """All (size, stride) pairs, nesting removed."""
        return tuple(_modes(self.sizes, self.strides))

    @derived
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @derived
    def size(self) -> int:
        """How many indices there are."""
        return math.prod(size for size, _ in self.modes)

    @derived
    def cosize(self) -> int:
        """One more than the largest value."""
        return 1 + sum((size - 1) * stride for size, stride in self.modes)

    def __call__(self, *coordinate: int) -> int:
        """The value at an index, or at a coordinate of one index for each axis.

        >>> Layout((2, 3), (1, 2))(4), Layout((2, 3), (1, 2))(1, 1)
        (3, 3)
        """
        if len(coordinate) == 1:
            return sum(
                digit * stride for digit, (_, stride) in zip(self._digits(coordinate[0]), self.modes, strict=True)
            )
        return sum(axis(index) for axis, index in zip(self.axes, coordinate, strict=True))

    def values(self) -> tuple[int, ...]:
        """The values at all indices, in order."""
        found = [0]
        for size, stride in self.modes:
            found = [before + digit * stride for before in found for digit in range(size)]
        return tuple(found)

    def coalesce(self) -> Layout:
        """The same function with the fewest modes, nesting removed: a normal form for functions.

        >>> Layout(((2, 3), 4), ((12, 4), 1)).coalesce()
        Layout(24, 1)
        """
        kept: list[Mode] = []
        for size, stride in self.modes:
            if size == 1:
                continue
            if kept and kept[-1][1] == size * stride:
                kept[-1] = (kept[-1][0] * size, stride)
            else:
                kept.append((size, stride))
        return _of_modes(kept)

    def compose(self, other: Layout) -> Layout:
        """Self after other: ``a.compose(b)(i) == a(b(i))`` at every index ``i`` of ``b``.

        The result is nested like other, a mode of which may become several.

        Raises:
            MeshError: other leaves the domain of self, or the result is no layout.

        >>> Layout((4, 2), (1, 4)).compose(Layout(4, 2))
        Layout(4, 1)
        """
        if other.cosize > self.size:
            raise _cannot_compose(self, other)
        reach = [0] * len(self.modes)
        made = _nest(other.sizes, iter([_pick(self, other, mode, reach) for mode in other.modes]))
        # a sum of steps may carry from one mode of self to the next, and self is not linear across a carry
        if any(steps >= size for steps, (size, _) in zip(reach, self.modes, strict=True)):
            raise _cannot_compose(self, other)
        return made

    def complement(self, size: int) -> Layout:
        """What is missing to reach all of ``0 .. size - 1``, coalesced, largest stride first.

        The law: ``join((a.complement(n), a))`` takes every value of ``0 .. n - 1`` exactly once.

        Raises:
            MeshError: self takes a value twice, or does not tile ``0 .. size - 1``.

        >>> Layout(4, 2).complement(16)
        Layout((2, 2), (8, 1))
        """
        gaps: list[Mode] = []
        reached = 1
        for extent, stride in sorted(self._proper, key=lambda mode: mode[1]):
            if stride == 0 or stride % reached:
                raise MeshError(message(f"{self} has no complement: its values do not tile the integers below {size}"))
            gaps.append((stride // reached, reached))
            reached = stride * extent
        if size % reached:
            raise MeshError(message(f"{self} has no complement: {reached} does not divide {size}"))
        gaps.append((size // reached, reached))
        return _of_modes(gaps[::-1]).coalesce()

    def divide(self, tile: Layout) -> Layout:
        """Cut self in tiles: axis 0 walks from tile to tile, axis 1 within one.

        The law: ``a.divide(t) == join((a.compose(t.complement(a.size)), a.compose(t)))``.

        >>> Layout(8, 1).divide(Layout(4, 2))
        Layout((2, 4), (1, 2))
        """
        return Layout.join((self.compose(tile.complement(self.size)), self.compose(tile)))

    def invert(self) -> Layout:
        """The way back: ``a.invert()(a(i)) == i`` and ``a(a.invert()(v)) == v``.

        Raises:
            MeshError: self does not take every value of ``0 .. size - 1`` exactly once.

        >>> Layout((2, 3), (1, 2)).invert()
        Layout((3, 2), (1, 3))
        """
        if not self.separated or self.cosize != self.size:
            raise MeshError(message(f"{self} has no inverse: it does not take every value below {self.size}"))
        return _of_modes([(size, place) for (size, _), place in self._descending])

    def project(self, point: int) -> int:
        """The index along self of a point of the space that self and its complement tile.

        The law: ``a.project(a(i) + a.complement(n)(j)) == i``.

        >>> Layout(4, 2).project(13)
        2
        """
        index = 0
        for size, stride in self.modes:
            index = index * size + (point // stride % size if size > 1 else 0)
        return index

    def find(self, point: int) -> int | None:
        """The index at which self has this value, None if it never has.

        >>> Layout((2, 3), (1, 5)).find(6), Layout((2, 3), (1, 5)).find(2)
        (4, None)
        """
        if not self.separated:
            values = self.values()
            return values.index(point) if point in values else None
        index = 0
        for (size, stride), place in self._descending:
            digit = max(0, min(point // stride, size - 1))
            index, point = index + digit * place, point - digit * stride
        return index if point == 0 else None

    @derived
    def separated(self) -> bool:
        """Whether each stride is larger than all that the smaller ones reach, so that values are found by division."""
        reached = 0
        for (size, stride), _ in self._descending[::-1]:
            if stride <= reached:
                return False
            reached += (size - 1) * stride
        return True

    def overlaps(self, other: Layout) -> bool:
        """Whether two layouts that each tile the same space share a direction.

        >>> Layout(4, 2).overlaps(Layout(2, 1)), Layout(4, 2).overlaps(Layout(2, 4))
        (False, True)
        """
        return any(
            max(mine, yours) < min(mine * size, yours * extent)
            for size, mine in self._proper
            for extent, yours in other._proper
        )

    @derived
    def _proper(self) -> tuple[Mode, ...]:
        return tuple(mode for mode in self.modes if mode[0] > 1)

    @derived
    def _places(self) -> tuple[int, ...]:
        return tuple(stride for _, stride in Layout.row_major(tuple(size for size, _ in self.modes)).modes)

    @derived
    def _descending(self) -> tuple[tuple[Mode, int], ...]:
        pairs = [pair for pair in zip(self.modes, self._places, strict=True) if pair[0][0] > 1]
        return tuple(sorted(pairs, key=lambda pair: -pair[0][1]))

    def _digits(self, index: int) -> list[int]:
        digits = []
        for size, _ in reversed(self.modes):
            index, digit = divmod(index, size)
            digits.append(digit)
        return digits[::-1]

    def __repr__(self) -> str:
        return f"Layout({self.sizes}, {self.strides})"


@value
class RankMap:
    """Which rank sits at each position of a mesh: ``start + layout(position)``, or a table where no layout does it.

    >>> RankMap.read((4, 6, 8, 10), (2, 2))
    RankMap(layout=Layout(4, 2), start=4, table=None)
    >>> RankMap.read((2, 0, 1), (3,)).position(1)
    2
    """

    layout: Layout
    start: int
    table: tuple[int, ...] | None

    @staticmethod
    def read(ranks: Sequence[int], shape: Sequence[int]) -> RankMap:
        """The map of these ranks, row-major over ``shape``; a table only if no layout with that shape has them."""
        places = [place for _, place in Layout.row_major(tuple(shape)).modes]
        strides = [ranks[place] - ranks[0] if size > 1 else 0 for size, place in zip(shape, places, strict=True)]
        if min(strides, default=0) >= 0:
            layout = Layout(tuple(shape), tuple(strides)).coalesce()
            if layout.separated and all(
                ranks[0] + step == rank for step, rank in zip(layout.values(), ranks, strict=True)
            ):
                return RankMap(layout, ranks[0], None)
        return RankMap(Layout.row_major(math.prod(shape)), 0, tuple(ranks))

    @property
    def largest(self) -> int:
        """The largest rank."""
        return self.start + self.layout.cosize - 1 if self.table is None else max(self.table)

    @property
    def counts(self) -> bool:
        """Whether rank and position are the same."""
        return self.table is None and self.start == 0 and self.layout is Layout.row_major(self.layout.size).coalesce()

    def ranks(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The ranks at these positions."""
        if self.table is not None:
            return tuple(self.table[position] for position in positions)
        if self.counts:
            return tuple(positions)
        return tuple(self.start + self.layout(position) for position in positions)

    def position(self, rank: int) -> int | None:
        """Where this rank sits, None if nowhere."""
        return self.layout.find(rank - self.start) if self.table is None else self._positions.get(rank)

    def __str__(self) -> str:
        size = self.layout.size
        shown = range(size) if size <= 8 else (0, 1, size - 1)
        texts = [str(rank) for rank in self.ranks(shown)]
        return f"[{', '.join(texts if size <= 8 else [*texts[:2], '...', texts[2]])}]"

    @derived
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.table or ())}


def _modes(sizes: Nested, strides: Nested) -> Iterator[Mode]:
    if isinstance(sizes, tuple) and isinstance(strides, tuple) and len(sizes) == len(strides):
        for size, stride in zip(sizes, strides, strict=True):
            yield from _modes(size, stride)
    elif type(sizes) is int and type(strides) is int:
        yield sizes, strides
    else:
        raise MeshError(message("sizes and strides must be integers, nested alike", got=f"{sizes!r} and {strides!r}"))


def _row_major(sizes: Nested, stride: int) -> Layout:
    if isinstance(sizes, int):
        return Layout(sizes, stride)
    axes: list[Layout] = []
    for entry in reversed(sizes):
        axes.append(_row_major(entry, stride))
        stride *= axes[-1].size
    return Layout.join(axes[::-1])


def _of_modes(modes: Sequence[Mode]) -> Layout:
    if not modes:
        return Layout(1, 0)
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(size for size, _ in modes), tuple(stride for _, stride in modes))


def _pick(layout: Layout, other: Layout, mode: Mode, reach: list[int]) -> Layout:
    left, step = mode
    picked: list[Mode] = []
    for place in range(len(layout.modes) - 1, -1, -1):
        size, stride = layout.modes[place]
        if left == 1:
            break
        if step % size == 0:
            step //= size
            continue
        room = -(-size // step)
        taken = left if left < room else room
        if left > room and (size % step or left % room):
            raise _cannot_compose(layout, other)
        reach[place] += (taken - 1) * step
        picked.append((taken, stride * step))
        left, step = left // taken, 1
    if left > 1:
        raise _cannot_compose(layout, other)
    return _of_modes(picked[::-1]).coalesce()


def _nest(sizes: Nested, parts: Iterator[Layout]) -> Layout:
    if isinstance(sizes, int):
        return next(parts)
    return Layout.join([_nest(entry, parts) for entry in sizes])


def _cannot_compose(layout: Layout, other: Layout) -> MeshError:
    return MeshError(message(f"{layout} and {other} do not compose to a layout", asked=f"{layout}.compose({other})"))

"""How a tensor lies on one mesh axis: placements, and the arithmetic of cutting a dim.

A placement knows sizes and intervals only. Who moves what between placements is the business of `redistribute`.
Placements act from the first mesh axis to the last: each cuts what the axes before it left of its dim.
"""

from __future__ import annotations

from operator import index as as_int
from typing import ClassVar

import torch

from shardwise._value import value
from shardwise.errors import PlacementError, message

Intervals = tuple[tuple[int, int], ...]

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "norm")
LINEAR = frozenset(("sum", "avg"))  # reductions that may be done in any order among each other
BITWISE = frozenset(("band", "bor", "bxor"))


@value
class Placement:
    """How a tensor lies on one mesh axis; the base of all placements."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a `Shard` (of ``dim``, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction is pending (by ``reduce_op``, if given)."""
        return False


@value
class Replicate(Placement):
    """Every rank of the axis holds the whole tensor."""

    _recent: ClassVar[dict[object, Placement]] = {}

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@value
class Cut(Placement):
    """A placement that cuts one dim of the tensor into a part for each rank of the axis."""

    dim: int

    def intervals(self, size: int, parts: int, index: int) -> Intervals:
        """Which [start, stop) intervals of a dim of ``size`` the rank ``index`` of ``parts`` holds, in order."""
        raise NotImplementedError

    def at(self, dim: int) -> Cut:
        """The same cut of another dim."""
        raise NotImplementedError

    def local_size(self, size: int, parts: int, index: int) -> int:
        """The size that rank ``index`` of ``parts`` holds of a dim of ``size``."""
        return sum(stop - start for start, stop in self.intervals(size, parts, index))

    def take(self, tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """The part of ``tensor`` that rank ``index`` of ``parts`` holds; a view of it, if the part is one interval."""
        pieces = [
            tensor.narrow(self.dim, start, stop - start)
            for start, stop in self.intervals(tensor.shape[self.dim], parts, index)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


@value
class Shard(Cut):
    """The dim ``dim`` is cut into one contiguous part a rank, by the rule of ``torch.chunk``.

    The parts have ceil(size / ranks) elements; the last ones may be smaller or empty.

    >>> [Shard(0).local_size(5, 4, index) for index in range(4)]
    [2, 2, 1, 0]
    """

    _recent: ClassVar[dict[object, Placement]] = {}

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", as_int(self.dim))

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Size and offset of the part of ``rank`` when ``curr_local_size`` elements are cut into ``num_chunks``."""
        chunk = -(-curr_local_size // num_chunks)
        start = min(chunk * rank, curr_local_size)
        return min(chunk, curr_local_size - start), start

    def intervals(self, size: int, parts: int, index: int) -> Intervals:
        length, start = self.local_shard_size_and_offset(size, parts, index)
        return ((start, start + length),)

    def at(self, dim: int) -> Shard:
        return Shard(dim)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@value
class StridedShard(Cut):
    """The dim ``dim`` is seen as ``split_factor`` equal blocks, and each block is cut by the rule of `Shard`.

    This is what a flattened dim becomes when a part of it other than the first was cut.

    >>> StridedShard(0, split_factor=2).intervals(8, 2, 1)
    ((2, 4), (6, 8))
    """

    dim: int
    split_factor: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", as_int(self.dim))
        object.__setattr__(self, "split_factor", as_int(self.split_factor))
        if self.split_factor < 1:
            raise PlacementError(
                message("a split factor is at least 1", got=f"split_factor={self.split_factor}", do="Shard(dim)")
            )

    def intervals(self, size: int, parts: int, index: int) -> Intervals:
        cut = Shard.local_shard_size_and_offset
        blocks = [cut(size, self.split_factor, block) for block in range(self.split_factor)]
        pieces = [(offset, *cut(length, parts, index)) for length, offset in blocks]
        return tuple((offset + start, offset + start + length) for offset, length, start in pieces)

    def at(self, dim: int) -> StridedShard:
        return StridedShard(dim, self.split_factor)

    def __repr__(self) -> str:
        return f"StridedShard(dim={self.dim}, split_factor={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@value
class RaggedShard(Cut):
    """The dim ``dim`` is cut into one contiguous part a rank, of the ``sizes`` given: one for each rank, 0 if empty.

    This is what a slice of a sharded dim is, and what parts of sizes that follow no rule make up. Where an axis before
    this one has left more or less of the dim than the sizes add up to, it is cut in their proportion: so sizes of which
    only one is not 0 put all there is on that rank.

    >>> [RaggedShard(0, (2, 0, 3)).intervals(5, 3, index) for index in range(3)]
    [((0, 2),), ((2, 2),), ((2, 5),)]
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", as_int(self.dim))
        object.__setattr__(self, "sizes", tuple(map(as_int, self.sizes)))
        if min(self.sizes, default=-1) < 0:
            raise PlacementError(
                message("sizes of parts are 0 or more", got=f"sizes={self.sizes}", do="give one size for each rank")
            )

    def intervals(self, size: int, parts: int, index: int) -> Intervals:
        if len(self.sizes) != parts:
            raise PlacementError(message(f"{self!r} does not fit an axis of {parts} ranks", do=f"give {parts} sizes"))
        total = sum(self.sizes)
        if not total:
            return ((0, size),) if index == 0 else ((size, size),)
        before = sum(self.sizes[:index])
        return ((before * size // total, (before + self.sizes[index]) * size // total),)

    def at(self, dim: int) -> RaggedShard:
        return RaggedShard(dim, self.sizes)

    def __repr__(self) -> str:
        return f"RaggedShard(dim={self.dim}, sizes={self.sizes})"

    def __str__(self) -> str:
        return f"_R({self.dim}, {', '.join(map(str, self.sizes))})"


@value
class Owned(Placement):
    """One rank of the axis, ``index``, holds the tensor, which has no dims; what the others hold does not count.

    This is what one element of a dim that the axis cuts is.
    """

    index: int

    def __repr__(self) -> str:
        return f"Owned(index={self.index})"

    def __str__(self) -> str:
        return f"O({self.index})"


@value
class Partial(Placement):
    """Every rank holds a part of a reduction that is still to be done: the tensor is ``reduce_op`` over the ranks.

    A ``norm`` is the root of the sum of squares of parts that have one sign, and has that sign.
    """

    _recent: ClassVar[dict[object, Placement]] = {}

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                message("no such reduction", asked=f"Partial({self.reduce_op!r})", do=f"one of {', '.join(REDUCE_OPS)}")
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def is_defined(self, dtype: torch.dtype) -> bool:
        """Whether the reduction can be done for ``dtype``: only what is exact or rounds as the dtype does.

        >>> Partial("avg").is_defined(torch.int64)
        False
        """
        if dtype.is_complex:
            return self.reduce_op in LINEAR
        if self.reduce_op == "norm":
            return dtype.is_floating_point
        if dtype.is_floating_point:
            return self.reduce_op not in BITWISE
        return self.reduce_op != "avg"

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"

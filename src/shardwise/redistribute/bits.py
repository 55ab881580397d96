"""Cuts into equal parts by powers of two, as bits: what each bit of a position is told by.

A position in a dim of 2^n elements has n bits. A cut over an axis of 2^k ranks has the rank's index there tell k of
them: the first that no cut before it tells, after those of the blocks that a strided shard skips. So what two ranks
have in common is told by the bits that both layouts tell, and the largest load of a rank is a formula, where counting
takes a step for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.sharding.placement import Cut, Placement, Shard, StridedShard

Bit = tuple[int, int]  # an axis, and which bit of the index on it
Told = list[Bit | None]  # for each bit of the positions of all dims, what tells it


def told(sizes: Sequence[int], parts: Sequence[int], placements: Sequence[Placement]) -> Told | None:
    """What tells each bit of positions in a tensor of ``sizes``; None if the parts are not equal powers of two.

    >>> told((8,), (2, 2), (Shard(0), StridedShard(0, split_factor=2)))
    [(0, 0), None, (1, 0)]
    """
    if any(size & (size - 1) or not size for size in (*sizes, *parts)):
        return None
    dims: list[Told] = [[None] * (size.bit_length() - 1) for size in sizes]
    for axis, (placement, count) in enumerate(zip(placements, parts, strict=True)):
        if placement.is_replicate() or placement.is_partial() or count == 1:
            continue
        skipped = _skipped(placement)
        if skipped is None or not isinstance(placement, Cut):
            return None
        free = [place for place, bit in enumerate(dims[placement.dim]) if bit is None][skipped:]
        if len(free) < count.bit_length() - 1:
            return None
        for index, place in enumerate(free[: count.bit_length() - 1]):
            dims[placement.dim][place] = (axis, index)
    return [bit for dim in dims for bit in dim]


def _skipped(placement: Placement) -> int | None:
    if isinstance(placement, Shard):
        return 0
    factor = placement.split_factor if isinstance(placement, StridedShard) else 0
    return None if not factor or factor & (factor - 1) else factor.bit_length() - 1


def traffic(have: Told, want: Told, parts: Sequence[int], apart: Sequence[int]) -> tuple[int, int]:
    """The most elements that a rank sends and that one receives, when what lies as ``have`` is to lie as ``want``.

    Groups go over all axes but those ``apart``, which ``have`` does not cut. Holders of the same part share the work.
    """
    bits = {bit for axis, count in enumerate(parts) if axis not in apart for bit in _bits(axis, count)}
    common = 1 << sum(one is None and other is None for one, other in zip(have, want, strict=True))
    pairs = [(one, other) for one, other in zip(have, want, strict=True) if one is not None and other is not None]
    within = [(one, other) for one, other in pairs if other in bits]
    replicas = bits.difference(have)  # bits of the index by which holders of one part differ
    crossed = any(one != other and other not in replicas for one, other in within)
    holders = 0 if crossed else 1 << (len(replicas) - sum(other in replicas for _, other in within))
    messages = (1 << (len(bits) - len(within))) - holders
    kept = 0 if any(one != other for one, other in pairs) else common
    sent = common * -(-messages // (1 << len(replicas)))
    return sent, (1 << want.count(None)) - kept


def _bits(axis: int, count: int) -> Iterator[Bit]:
    return ((axis, index) for index in range(count.bit_length() - 1))


def is_between(had: Told, has: Told, needs: Told) -> bool:
    """Whether each rank then has what it needs of what it had, and nothing that it neither had nor needs.

    What a rank has lies in what it had or in what it needs, for every rank alike, if one of them is told no bit
    otherwise. And what it had and needs it still has if each bit is told as one of them tells it, whenever they meet.
    """
    if not any(all(one is None or one == other for one, other in zip(side, has, strict=True)) for side in (had, needs)):
        return False
    same = _classes([pair for pair in zip(had, needs, strict=True) if None not in pair])
    return all(
        bit is None or any(one is not None and same.get(one, one) == same.get(bit, bit) for one in pair)
        for bit, *pair in zip(has, had, needs, strict=True)
    )


def _classes(pairs: Sequence[tuple[Bit | None, Bit | None]]) -> dict[Bit | None, Bit | None]:
    """For each bit in ``pairs`` one that stands for all that are equal to it, if the bits of each pair are."""
    same: dict[Bit | None, Bit | None] = {}
    for one, other in pairs:
        here, there = same.get(one, one), same.get(other, other)
        same.update({bit: here for bit, stands in same.items() if stands == there})
        same.update({one: here, other: here, there: here})
    return same

"""Carry steps out on a local tensor.

Every rank of a group does the same: what is sent, padded or trimmed follows from the spec and the rank's coordinate,
never from what the local tensor looks like. Each move is started (`_start`) and gives a `Sent`: what will arrive, and
how to lay it out once it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.mesh.world import Group
from shardwise.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    intersect,
    length,
    local_sizes,
)
from shardwise.sharding.placement import Cut, Intervals, Shard
from shardwise.sharding.spec import Spec

Held = tuple[Intervals, ...]  # for each dim, which positions of the global tensor


class Box(NamedTuple):
    """A part of a local tensor: its shape, and where it lies along the dims that it does not fill."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Intervals], ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)


class Sent(NamedTuple):
    """A move under way: the tensor that arrives once waited for, and what makes it the result (nothing, if it is)."""

    tensor: Tensor
    unpack: Callable[[Tensor], Tensor] | None = None


def run(local: Tensor, src: Spec, steps: tuple[Step, ...]) -> Tensor:
    """Carry ``steps`` out on ``local``, which lies as ``src`` says, and return the new local tensor.

    Every rank of the mesh calls it alike; a rank outside the mesh gets ``local`` back. The result shares no memory with
    ``local``, unless there is nothing to do.
    """
    coordinate = src.mesh.get_coordinate() if steps else None
    if coordinate is not None:
        for spec, step in _stages(src, steps):
            local = _finish(_start(step, spec, local, coordinate))
    return local


def run_async(local: Tensor, src: Spec, steps: tuple[Step, ...]) -> Tensor:
    """Like `run`, but the last step may still be on the wire: then an `AsyncCollectiveTensor` is returned."""
    coordinate = src.mesh.get_coordinate() if steps else None
    moves = _stages(src, steps)
    if coordinate is None or not moves:
        return local
    for spec, step in moves[:-1]:
        local = _finish(_start(step, spec, local, coordinate))
    spec, step = moves[-1]
    sent = _start(step, spec, local, coordinate)
    if isinstance(sent, Sent) and sent.unpack is None:
        return AsyncCollectiveTensor(sent.tensor)
    return _finish(sent)


@lru_cache(maxsize=4096)
def _stages(src: Spec, steps: tuple[Step, ...]) -> tuple[tuple[Spec, Step], ...]:
    """Each step with the spec that it starts from, without those on axes of one rank, where nothing changes."""
    moves = []
    for step in steps:
        if src.mesh.shape[step.axis] > 1:
            moves.append((src, step))
        src = step.after(src)
    return tuple(moves)


def _start(step: Step, spec: Spec, local: Tensor, coordinate: tuple[int, ...]) -> Sent | Tensor:
    match step:
        case Slice():
            part = step.cut.take(local, spec.mesh.shape[step.axis], coordinate[step.axis])
            return part.clone(memory_format=torch.contiguous_format)
        case MakePartial():
            return _make_partial(step, local, coordinate)
    group = spec.mesh.axis_group(step.axis)
    match step:
        case AllReduce():
            return _all_reduce(step, local, group)
        case AllGather():
            return _all_gather(step, spec.size_before(step.axis, coordinate), local, group)
        case ReduceScatter():
            return _reduce_scatter(step, local, group)
        case AllToAll():
            return _all_to_all(step, spec, local, coordinate, group)
    raise AssertionError(f"not a step: {step}")


def _finish(sent: Sent | Tensor) -> Tensor:
    if not isinstance(sent, Sent):
        return sent
    arrived = wire.wait(sent.tensor)
    return arrived if sent.unpack is None else sent.unpack(arrived)


def _make_partial(step: MakePartial, local: Tensor, coordinate: tuple[int, ...]) -> Tensor:
    if coordinate[step.axis] == 0 or step.reduce_op not in ("sum", "product", "bxor"):
        return local.clone()
    return torch.ones_like(local) if step.reduce_op == "product" else torch.zeros_like(local)


def _all_reduce(step: AllReduce, local: Tensor, group: Group) -> Sent:
    if not _compares(step.reduce_op, local.dtype):
        return Sent(wire.all_reduce(local, step.reduce_op, group, axis=step.name))
    ranked = wire.all_reduce(_ranked(local, step.reduce_op), step.reduce_op, group, axis=step.name)
    return Sent(ranked, lambda arrived: _unranked(arrived, local.dtype))


# Backends lose what is not a number when they compare. As integers in the same order, such numbers stand beyond the
# infinities: the bits of a float rank it among those of its sign, and those of a negative one the other way round.
_RANKS = {torch.float64: torch.int64}


def _compares(reduce_op: str, dtype: torch.dtype) -> bool:
    return reduce_op in ("max", "min") and dtype.is_floating_point


def _ranked(local: Tensor, reduce_op: str) -> Tensor:
    wide = local if local.dtype is torch.float64 else local.float()
    spoilt = torch.full((), torch.nan if reduce_op == "max" else -torch.nan, dtype=wide.dtype, device=wide.device)
    bits = torch.where(wide.isnan(), spoilt, wide).view(_RANKS.get(wide.dtype, torch.int32))
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _unranked(ranks: Tensor, dtype: torch.dtype) -> Tensor:
    bits = torch.where(ranks < 0, ranks ^ torch.iinfo(ranks.dtype).max, ranks)
    return bits.view(torch.float64 if dtype is torch.float64 else torch.float32).to(dtype)


def _all_gather(step: AllGather, size: int, local: Tensor, group: Group) -> Sent:
    """Gather the parts of a dim that is ``size`` long when whole."""
    cut, parts = step.cut, group.size
    widest = max(local_sizes(cut, size, parts))
    padded = _pad(local, cut.dim, widest)
    gathered = wire.all_gather(padded, group, axis=step.name)
    if not isinstance(cut, Shard):
        return Sent(gathered, lambda whole: _sort(whole.view(parts, *padded.shape), cut, size))
    if cut.dim > 0:
        return Sent(gathered, lambda whole: _trim(_join(whole.view(parts, *padded.shape), cut.dim), cut.dim, size))
    # Only the last parts are padded, so the padding lies at the end.
    return Sent(gathered) if widest * parts == size else Sent(gathered, lambda whole: whole.narrow(0, 0, size))


def _reduce_scatter(step: ReduceScatter, local: Tensor, group: Group) -> Sent:
    cut, parts = step.cut, group.size
    sizes = local_sizes(cut, local.shape[cut.dim], parts)
    own, widest = sizes[group.index], max(sizes)
    if _compares(step.reduce_op, local.dtype):
        ranks = _deal(_ranked(local, step.reduce_op), cut, parts, widest)
        part = wire.reduce_scatter(ranks, step.reduce_op, group, axis=step.name)
        return Sent(part, lambda arrived: _unranked(_trim(arrived, cut.dim, own), local.dtype))
    reduced = wire.reduce_scatter(_deal(local, cut, parts, widest), step.reduce_op, group, axis=step.name)
    return Sent(reduced) if own == widest else Sent(reduced, lambda part: _trim(part, cut.dim, own))


def _deal(local: Tensor, cut: Cut, parts: int, widest: int) -> Tensor:
    """The part of each rank, padded to ``widest`` along the dim that is cut, one after the other along dim 0."""
    if not isinstance(cut, Shard):
        return torch.cat([_pad(cut.take(local, parts, index), cut.dim, widest) for index in range(parts)])
    padded = _pad(local, cut.dim, parts * widest)
    return padded if cut.dim == 0 else _split(padded, cut.dim, parts).flatten(0, 1)


def _split(local: Tensor, dim: int, parts: int) -> Tensor:
    """``dim`` in ``parts`` equal pieces, stacked along a new first dim."""
    return torch.unflatten(local, dim, (parts, local.shape[dim] // parts)).movedim(dim, 0)


def _join(pieces: Tensor, dim: int) -> Tensor:
    """The pieces, stacked along the first dim, put together along ``dim``: undoes `_split`."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def _sort(pieces: Tensor, cut: Cut, size: int) -> Tensor:
    """The pieces, stacked along the first dim and padded, put together so that each interval stands in its place."""
    placed = []
    for index, piece in enumerate(pieces):
        position = 0
        for start, stop in cut.intervals(size, len(pieces), index):
            placed.append((start, stop, piece.narrow(cut.dim, position, stop - start)))
            position += stop - start
    return torch.cat([part for _, _, part in sorted(placed, key=lambda item: item[:2])], cut.dim)


def _pad(local: Tensor, dim: int, size: int) -> Tensor:
    if local.shape[dim] == size:
        return local
    padded = local.new_zeros((*local.shape[:dim], size, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded


def _trim(padded: Tensor, dim: int, size: int) -> Tensor:
    return padded.narrow(dim, 0, size).contiguous()


def _all_to_all(step: AllToAll, spec: Spec, local: Tensor, coordinate: tuple[int, ...], group: Group) -> Sent:
    source, cut, parts = step.source, step.cut, group.size
    if _swaps_evenly(source, cut, spec.size_before(step.axis, coordinate), local.shape[cut.dim], parts):
        rows = [1] * parts
        pieces = _split(local, cut.dim, parts)
        return _exchange(pieces, rows, rows, step.name, group, lambda arrived: _join(arrived, source.dim))
    after = step.after(spec)
    outgoing, incoming = _boxes(spec, after, step.axis, coordinate)
    result = local.new_empty(after.local_shape(coordinate))
    sent, received = [box.volume for box in outgoing], [box.volume for box in incoming]
    buffer = torch.cat([_select(local, box).reshape(-1) for box in outgoing])
    return _exchange(
        buffer, received, sent, step.name, group, lambda arrived: _fill(result, incoming, arrived, received)
    )


def _swaps_evenly(source: Cut, cut: Cut, size: int, cross: int, parts: int) -> bool:
    swaps = isinstance(source, Shard) and isinstance(cut, Shard) and source.dim != cut.dim
    return swaps and size % parts == 0 and cross % parts == 0


def _exchange(
    buffer: Tensor,
    received: list[int],
    sent: list[int],
    axis: str,
    group: Group,
    unpack: Callable[[Tensor], Tensor],
) -> Sent:
    if not buffer.is_complex():
        return Sent(wire.all_to_all(buffer, received, sent, group, axis=axis), unpack)
    # Not every backend exchanges complex numbers.
    pairs = torch.view_as_real(buffer.resolve_conj())
    arriving = wire.all_to_all(pairs, received, sent, group, axis=axis)
    return Sent(arriving, lambda arrived: unpack(torch.view_as_complex(arrived)))


@lru_cache(maxsize=4096)
def _boxes(src: Spec, dst: Spec, axis: int, coordinate: tuple[int, ...]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """For each rank of ``axis``: what of the local tensor it is sent, and where what it sends lies in the result."""
    peers = [(*coordinate[:axis], index, *coordinate[axis + 1 :]) for index in range(src.mesh.shape[axis])]
    held, wanted = _held(src, coordinate), _held(dst, coordinate)
    outgoing = tuple(_common(held, _held(dst, peer), within=held) for peer in peers)
    incoming = tuple(_common(_held(src, peer), wanted, within=wanted) for peer in peers)
    return outgoing, incoming


def _held(spec: Spec, coordinate: tuple[int, ...]) -> Held:
    return tuple(spec.intervals(dim, coordinate) for dim in range(spec.ndim))


def _common(held: Held, wanted: Held, within: Held) -> Box:
    """What lies in both, as a box of the local tensor that holds ``within``."""
    common = [intersect(*pair) for pair in zip(held, wanted, strict=True)]
    located = [_locate(intervals, whole) for intervals, whole in zip(common, within, strict=True)]
    cuts = [(dim, located[dim]) for dim, whole in enumerate(within) if length(common[dim]) != length(whole)]
    return Box(tuple(map(length, common)), tuple(cuts))


def _locate(intervals: Intervals, within: Intervals) -> Intervals:
    """Where ``intervals``, parts of those of ``within``, lie if those of ``within`` stand one after the other."""
    located, position = [], 0
    for low, high in within:
        parts = intersect(intervals, ((low, high),))
        located += [(start - low + position, stop - low + position) for start, stop in parts]
        position += high - low
    return tuple(located)


def _select(local: Tensor, box: Box) -> Tensor:
    for dim, intervals in box.cuts:
        pieces = [local.narrow(dim, start, stop - start) for start, stop in intervals or ((0, 0),)]
        local = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return local


def _fill(result: Tensor, boxes: Sequence[Box], arrived: Tensor, volumes: list[int]) -> Tensor:
    for box, flat in zip(boxes, torch.split(arrived, volumes), strict=True):
        _place(result, box.cuts, flat.view(box.shape))
    return result


def _place(target: Tensor, cuts: tuple[tuple[int, Intervals], ...], piece: Tensor) -> None:
    """Copy ``piece`` to where it lies in ``target``."""
    if not cuts:
        target.copy_(piece)
        return
    (dim, intervals), *rest = cuts
    position = 0
    for start, stop in intervals:
        part = piece.narrow(dim, position, stop - start)
        _place(target.narrow(dim, start, stop - start), tuple(rest), part)
        position += stop - start

"""Carry steps out on a local tensor.

Every rank of a group does the same: what is sent, padded or trimmed follows from the spec and the rank's coordinate,
never from what the local tensor looks like. Each move is started (`_start`) and gives a `Sent`: what will arrive, and
how to lay it out once it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.mesh.world import Group
from shardwise.redistribute.carriers import Carrier, carrier
from shardwise.redistribute.parcels import Box, Parcels, parcels, places
from shardwise.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    local_sizes,
)
from shardwise.sharding.placement import Cut, Intervals, Owned, Shard
from shardwise.sharding.spec import Spec

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

Stage = tuple[Spec, Step]
Coordinate = tuple[int, ...]


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
        for stage in _stages(src, steps):
            local = finish(_start(stage, local, coordinate))
        local = src.meta.lay_out(local)
    return local


def reading(src: Spec, steps: tuple[Step, ...]) -> Callable[[Tensor], Tensor]:
    """`run` from ``src`` for a tensor that is only read here and now: where it keeps a part, nothing is copied."""
    coordinate = src.mesh.get_coordinate()
    index = None if coordinate is None else _kept(src, steps, coordinate)
    return partial(run, src=src, steps=steps) if index is None else itemgetter(index)


def _kept(src: Spec, steps: tuple[Step, ...], coordinate: Coordinate) -> tuple[slice, ...] | None:
    """What ``steps`` keep, if they do nothing but that, and it is an interval of each dim."""
    kept = [range(size) for size in src.local_shape(coordinate)]
    for step in steps:
        if not isinstance(step, Slice):
            return None
        for axis, cut in zip(step.axes, step.cuts, strict=True):
            intervals = cut.intervals(len(kept[cut.dim]), src.mesh.shape[axis], coordinate[axis])
            if len(intervals) != 1:
                return None
            kept[cut.dim] = kept[cut.dim][slice(*intervals[0])]
    return tuple([slice(own.start, own.stop) for own in kept])


def run_async(local: Tensor, src: Spec, steps: tuple[Step, ...]) -> Tensor:
    """Like `run`, but the last collective may still be on the wire: then an `AsyncCollectiveTensor` is returned."""
    if wire.is_traced():
        return run(local, src, steps)
    coordinate = src.mesh.get_coordinate() if steps else None
    if coordinate is None:
        return local
    stages = _stages(src, steps)
    last = max([0, *(place for place, (_, step) in enumerate(stages) if not isinstance(step, Slice | MakePartial))])
    for stage in stages[:last]:
        local = finish(_start(stage, local, coordinate))
    sent = _start(stages[last], local, coordinate)
    spec, step = stages[-1]
    return finish_later(_followed(sent, stages[last + 1 :], coordinate), step.after(spec), coordinate)


def _followed(sent: Sent | Tensor, stages: tuple[Stage, ...], coordinate: Coordinate) -> Sent | Tensor:
    """``sent`` with the steps that send nothing done to what arrives."""
    if not stages:
        return sent

    def after(local: Tensor) -> Tensor:
        for stage in stages:
            local = finish(_start(stage, local, coordinate))
        return local

    if not isinstance(sent, Sent):
        return after(sent)
    unpack = sent.unpack
    return Sent(sent.tensor, after if unpack is None else lambda arrived: after(unpack(arrived)))


@lru_cache(maxsize=4096)
def _stages(src: Spec, steps: tuple[Step, ...]) -> tuple[Stage, ...]:
    """Each step, as it fits, with the spec that it starts from."""
    stages: list[Stage] = []
    for step in steps:
        src = stages[-1][1].after(src) if stages else src
        stages.append((src, step.fitting(src) if isinstance(step, AllGather) else step))
    return tuple(stages)


def _start(stage: Stage, local: Tensor, coordinate: Coordinate) -> Sent | Tensor:
    spec, step = stage
    if not spec.shape and _lies_elsewhere(step, spec, coordinate):
        return local.clone()
    match step:
        case Slice():
            return _slice(step, spec, local, coordinate)
        case MakePartial():
            return _make_partial(step, local, coordinate)
    group = spec.mesh.axes_group(step.group)
    match step:
        case AllReduce():
            return _all_reduce(step, local, group)
        case AllGather():
            return _all_gather(step, spec, local, coordinate, group)
        case ReduceScatter():
            return _reduce_scatter(step, spec, local, coordinate, group)
        case AllToAll():
            return _all_to_all(step, spec, local, coordinate, group)
    raise AssertionError(f"not a step: {step}")


def _lies_elsewhere(step: Step, spec: Spec, coordinate: Coordinate) -> bool:
    """Whether, by the axes that the step leaves alone, no rank of the group here has or is to have the tensor."""
    owners = [(axis, own.index) for axis, own in enumerate(spec.placements) if isinstance(own, Owned)]
    return any(axis not in step.axes and coordinate[axis] != index for axis, index in owners)


def finish(sent: Sent | Tensor) -> Tensor:
    """Wait for a move, and return its result."""
    if not isinstance(sent, Sent):
        return sent
    arrived = wire.wait(sent.tensor)
    return arrived if sent.unpack is None else sent.unpack(arrived).contiguous()


def finish_later(sent: Sent | Tensor, spec: Spec, coordinate: Coordinate | None) -> Tensor:
    """The result of a move, the part of ``spec`` at ``coordinate``, which waits at its first use."""
    if not isinstance(sent, Sent):
        return spec.meta.lay_out(sent)
    unpack, arriving = sent.unpack, sent.tensor
    if unpack is None:
        if spec.meta.row_major:
            return AsyncCollectiveTensor(arriving)
        unpack = Tensor.detach
    # What travels may be of another dtype than what it stands for.
    result = spec.meta.lay_out(arriving.new_empty(spec.local_shape(coordinate), dtype=spec.meta.dtype))
    wire.unpacking(result, arriving, lambda: result.copy_(unpack(arriving)))
    return AsyncCollectiveTensor(result)


def _slice(step: Slice, spec: Spec, local: Tensor, coordinate: Coordinate) -> Tensor:
    for axis, cut in zip(step.axes, step.cuts, strict=True):
        local = cut.take(local, spec.mesh.shape[axis], coordinate[axis])
    return local.clone(memory_format=torch.contiguous_format)


def _make_partial(step: MakePartial, local: Tensor, coordinate: Coordinate) -> Tensor:
    if step.reduce_op not in ("sum", "product", "bxor", "norm") or not any(coordinate[axis] for axis in step.axes):
        return local.clone()
    return torch.ones_like(local) if step.reduce_op == "product" else torch.zeros_like(local)


def _all_reduce(step: AllReduce, local: Tensor, group: Group) -> Sent:
    stands = carrier(step.reduce_op, local.dtype)
    if stands is None:
        return Sent(wire.all_reduce(local, step.reduce_op, group, axis=step.name))
    return Sent(wire.all_reduce(stands.there(local), stands.reduce_op, group, axis=step.name), stands.back)


def _all_gather(step: AllGather, spec: Spec, local: Tensor, coordinate: Coordinate, group: Group) -> Sent:
    gathered, cuts = wire.all_gather(local, group, axis=step.name), step.cuts
    if step.along_dim_0:
        return Sent(gathered)
    whole, parts = step.after(spec).local_shape(coordinate), step.parts(spec)
    if all(isinstance(cut, Shard) for cut in cuts):
        order = _order(cuts, local.ndim)
        return Sent(gathered, lambda arrived: arrived.view(*parts, *local.shape).permute(order).reshape(whole))
    boxes, result = places(whole, parts, cuts), local.new_empty(whole)
    return Sent(gathered, lambda arrived: _fill(result, zip(boxes, arrived.chunk(group.size), strict=True)))


def _reduce_scatter(step: ReduceScatter, spec: Spec, local: Tensor, coordinate: Coordinate, group: Group) -> Sent:
    own, parts = step.after(spec).local_shape(coordinate), step.parts(spec)
    stands = carrier(step.reduce_op, local.dtype)
    if step.is_exchanged(spec):
        return _reduce_parts(step, local, places(tuple(local.shape), parts, step.cuts), group, stands)
    reduce_op, summed = (step.reduce_op, local) if stands is None else (stands.reduce_op, stands.there(local))
    if all(isinstance(cut, Shard) for cut in step.cuts):
        dealt = _deal(summed, step.cuts, parts, own)
    else:
        dealt = torch.cat([_select(summed, box) for box in places(tuple(local.shape), parts, step.cuts)])
    reduced = wire.reduce_scatter(dealt, reduce_op, group, axis=step.name)
    return Sent(reduced, None if stands is None else stands.back)


def _reduce_parts(
    step: ReduceScatter, local: Tensor, boxes: tuple[Box, ...], group: Group, stands: Carrier | None
) -> Sent:
    """Every rank is sent its part of each term, of whatever size, and reduces them in the order of ranks."""
    here, own = group.index, boxes[group.index]
    sent = [0 if index == here else box.volume for index, box in enumerate(boxes)]
    received = [0 if index == here else own.volume for index in range(group.size)]
    outgoing = torch.cat([_select(local, box).reshape(-1) for index, box in enumerate(boxes) if index != here])
    kept = _select(local, own)

    def reduced(arrived: Tensor) -> Tensor:
        terms = list(arrived.view(group.size - 1, *own.shape))
        terms.insert(here, kept)
        if stands is not None:
            return stands.back(reduce(REDUCE[stands.reduce_op], map(stands.there, terms)))
        total: Tensor = reduce(REDUCE[step.reduce_op], terms)
        return total / group.size if step.reduce_op == "avg" else total

    return Sent(wire.all_to_all(outgoing, received, sent, group, axis=step.name), reduced)


def _deal(local: Tensor, cuts: tuple[Cut, ...], parts: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """The parts of all ranks, which are equally large, one after the other along dim 0."""
    if all(cut.dim == 0 for cut in cuts):
        return local
    order, sizes = _order(cuts, local.ndim), (*parts, *own)
    back = [order.index(place) for place in range(len(order))]
    split = local.reshape([sizes[place] for place in order])
    return split.permute(back).reshape(prod(parts) * own[0], *own[1:])


def _order(cuts: tuple[Cut, ...], ndim: int) -> list[int]:
    """The axes of the group, then the dims of a part, in the order in which they make up the whole."""
    places = []
    for dim in range(ndim):
        places += [place for place, cut in enumerate(cuts) if cut.dim == dim]
        places.append(len(cuts) + dim)
    return places


def _all_to_all(step: AllToAll, spec: Spec, local: Tensor, coordinate: Coordinate, group: Group) -> Sent | Tensor:
    if (root := step.root) is not None:
        owner = 0
        for place, parts in zip(root, step.parts(spec), strict=True):
            owner = owner * parts + place
        return Sent(wire.broadcast(local, owner, group, axis=step.name))
    after = step.after(spec).local_shape(coordinate)
    if not _is_dealt(step, local, after, group.size):
        own, talks = _parcels(step, spec, coordinate, group.index)
        return exchange(local, local.new_empty(after), own, talks, group, step.name)
    source, aim = step.sources[0], step.aims[0]
    assert isinstance(source, Shard), source
    if isinstance(aim, Shard):
        pieces = torch.unflatten(local, aim.dim, (group.size, after[aim.dim])).movedim(aim.dim, 0)
    else:
        pieces = local.expand(group.size, *local.shape)
    if source.dim:
        rows = [1] * group.size
        sent = wire.all_to_all(pieces, rows, rows, group, axis=step.name)
        order = _order((source,), local.ndim)
        return Sent(sent, lambda arrived: arrived.view(pieces.shape).permute(order).reshape(after))
    received = list(local_sizes(source, after[0], group.size))
    return Sent(wire.all_to_all(pieces.flatten(0, 1), received, [len(local)] * group.size, group, axis=step.name))


def _is_dealt(step: AllToAll, local: Tensor, after: tuple[int, ...], ranks: int) -> bool:
    """Whether a rank sends equal pieces to all, and what arrives is equally large too, or follows along dim 0."""
    if len(step.axes) > 1 or 0 in after:
        return False
    source, aim = step.sources[0], step.aims[0]
    if not isinstance(source, Shard) or (source.dim and after[source.dim] % ranks):
        return False
    if isinstance(aim, Shard):
        return aim.dim != source.dim and not local.shape[aim.dim] % ranks
    return aim.is_replicate()


@lru_cache(maxsize=4096)
def _parcels(step: AllToAll, spec: Spec, coordinate: Coordinate, index: int) -> tuple[Parcels, bool]:
    """The parcels of the rank that has this index in its group, and whether any rank of the mesh sends any."""
    return parcels(step.grid(spec, coordinate), index), any(step.traffic(spec))


def exchange(local: Tensor, result: Tensor, own: Parcels, talks: bool, group: Group, name: str) -> Sent | Tensor:
    """Send and receive this rank's parcels, and fill ``result``; nothing is sent unless anybody ``talks``."""
    held, kept = own.kept
    if kept.volume:
        _place(result, kept.cuts, _select(local, held))
    if not talks:
        return result
    sent, received = [0] * group.size, [0] * group.size
    for splits, parcels_ in ((sent, own.outgoing), (received, own.incoming)):
        for peer, box in parcels_:
            splits[peer] = box.volume
    pieces = [_select(local, box).reshape(-1) for _, box in own.outgoing]
    buffer = torch.cat(pieces) if pieces else local.new_empty(0)
    arriving = wire.all_to_all(buffer, received, sent, group, axis=name)
    volumes = [box.volume for _, box in own.incoming]
    boxes = [box for _, box in own.incoming]
    return Sent(arriving, lambda flat: _fill(result, zip(boxes, flat.split(volumes), strict=True)))


def _select(local: Tensor, box: Box) -> Tensor:
    for dim, intervals in box.cuts:
        pieces = [local.narrow(dim, start, stop - start) for start, stop in intervals or ((0, 0),)]
        local = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return local


def _fill(result: Tensor, pieces: Iterable[tuple[Box, Tensor]]) -> Tensor:
    for box, piece in pieces:
        _place(result, box.cuts, piece.view(box.shape))
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

"""Views of parts that follow no equation: where the results lie, found from where the elements go, without a move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import torch

from shardwise.redistribute.planner import price
from shardwise.rules.images import Boxes, Image
from shardwise.sharding.fitting import Box, fit, intersect, merged, volume
from shardwise.sharding.placement import Cut, Intervals, Owned, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta, misfits

Placements = tuple[Placement, ...]
Metas = Sequence[TensorMeta | None]

TRIED = 512  # how many other placements are tried, before a refusal advises to replicate


def relabelled(spec: Spec, image: Image, metas: Metas) -> tuple[Spec, ...] | None:
    """Where the results lie if every element stays where it is; None if no placements say that."""
    axes = involved(spec, image)
    if any(isinstance(spec.placements[axis], Partial) for axis in axes):
        return None
    found: dict[tuple[int, ...], Boxes] = {}
    for place in product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        coordinate = [0] * spec.mesh.ndim
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        part = _part(spec, tuple(coordinate), image.touched)
        boxes = (None,) * len(metas) if part is None else image.boxes(part)
        if boxes is None:
            return None
        found[place] = boxes
    results = []
    factors = frozenset(own.split_factor for own in spec.placements if isinstance(own, StridedShard))
    for output, meta in enumerate(metas):
        assert meta is not None, metas
        parts = {place: boxes[output] for place, boxes in found.items()}
        counts = [spec.mesh.shape[axis] for axis in axes]
        passing = set(image.kept[output].values())
        dims = sorted(range(len(meta.shape)), key=lambda dim: dim in passing)
        fitted = fit(meta.shape, counts, parts, exact=image.exact, factors=factors, dims=dims)
        if fitted is None:
            return None
        laid = dict(zip(axes, fitted, strict=True))
        placements = [
            laid[axis] if axis in laid else _passing(own, image, output, meta)
            for axis, own in enumerate(spec.placements)
        ]
        result = Spec(spec.mesh, tuple(placements), meta)
        if any(misfits(result)):
            return None
        results.append(result)
    return tuple(results)


def involved(spec: Spec, image: Image) -> tuple[int, ...]:
    """The axes that cut a dim that the image touches, hold the tensor on one rank, or pend what does not pass."""

    def matters(own: Placement) -> bool:
        if isinstance(own, Cut):
            return own.dim in image.touched
        return isinstance(own, Owned) or (isinstance(own, Partial) and not image.pends)

    roles = zip(spec.placements, spec.mesh.shape, strict=True)
    return tuple(axis for axis, (own, parts) in enumerate(roles) if parts > 1 and matters(own))


def _passing(own: Placement, image: Image, output: int, meta: TensorMeta) -> Placement:
    if isinstance(own, Cut) and own.dim in image.kept[output]:
        return own.at(image.kept[output][own.dim])
    if isinstance(own, (Cut, Owned)):  # an axis of one rank
        return Shard(min(own.dim, len(meta.shape) - 1)) if isinstance(own, Cut) and meta.shape else Replicate()
    return own


def _part(spec: Spec, coordinate: tuple[int, ...], dims: frozenset[int] | None = None) -> Box | None:
    """What lies at ``coordinate``, the dims other than ``dims`` taken whole; None if it is nothing."""
    for own, parts, index in zip(spec.placements, spec.mesh.shape, coordinate, strict=True):
        if isinstance(own, Owned) and own.index != index and parts > 1:
            return None
    box = tuple(
        merged(spec.intervals(dim, coordinate)) if dims is None or dim in dims else ((0, size),)
        for dim, size in enumerate(spec.shape)
    )
    return box if volume(box) else None


def local_view(
    spec: Spec, image: Image, outputs: tuple[Spec, ...], coordinate: tuple[int, ...], *, copies: bool, listed: bool
) -> Callable[..., object]:
    """What the rank at ``coordinate`` does: the results of its part, and nothing, or zeros, where it has no part."""
    part, results = _part(spec, coordinate), tuple(_part(output, coordinate) for output in outputs)
    shapes = [(output.local_shape(coordinate), output.meta.dtype) for output in outputs]
    nothing = not any(volume(result) for result in results)

    def run(x: torch.Tensor, *_: object) -> object:
        made = [None] * len(shapes) if nothing or part is None else image.run(x, part, results)
        found = [
            x.new_zeros(shape, dtype=dtype) if one is None else one.clone() if copies else one
            for one, (shape, dtype) in zip(made, shapes, strict=True)
        ]
        return found if listed else found[0]

    return run


# --- several operands, joined along a dim


def may_join(specs: Sequence[Spec], dim: int) -> bool:
    """Whether operands that lie like these, of whatever sizes, may be joined without a move.

    Where an axis cuts two of them evenly along ``dim``, the parts of a rank do not follow each other.
    """
    roles = list(zip(*(spec.placements for spec in specs), strict=True))
    if any(isinstance(own, (Partial, Owned, StridedShard)) for axis in roles for own in axis):
        return False
    return all(sum(isinstance(own, Shard) and own.dim == dim for own in axis) < 2 for axis in roles)


def joined(specs: Sequence[Spec], dim: int, meta: TensorMeta) -> Spec | None:
    """Where a joined tensor lies if each rank joins what it has of the operands; None if no placements say that.

    Of an operand that is replicated a rank may take what it likes.
    """
    mesh = specs[0].mesh
    axes = [axis for axis in range(mesh.ndim) if any(not spec.placements[axis].is_replicate() for spec in specs)]
    parts: dict[tuple[int, ...], Box | None] = {}
    places = [range(parts) if axis in axes else range(1) for axis, parts in enumerate(mesh.shape)]
    for coordinate in product(*places):
        found = [box for box, spec in _shifted(specs, dim, coordinate) if not spec.is_replicated and volume(box)]
        sides = {(*box[:dim], *box[dim + 1 :]) for box in found}
        if len(sides) > 1:
            return None
        along = merged([interval for box in found for interval in box[dim]])
        place = tuple([coordinate[axis] for axis in axes])
        parts[place] = (*found[0][:dim], along, *found[0][dim + 1 :]) if found else None
    order = [dim, *(other for other in range(len(meta.shape)) if other != dim)]
    fitted = fit(meta.shape, [mesh.shape[axis] for axis in axes], parts, exact=False, dims=order)
    if fitted is None or any(isinstance(own, StridedShard) for own in fitted):
        return None
    laid = dict(zip(axes, fitted, strict=True))
    result = Spec(mesh, tuple(laid.get(axis, Replicate()) for axis in range(mesh.ndim)), meta)
    covered = all(
        sum(volume(own) for own in _taken(specs, dim, result, coordinate)) == volume(_part(result, coordinate))
        for coordinate in product(*places)
    )
    return result if covered else None


def _shifted(specs: Sequence[Spec], dim: int, coordinate: tuple[int, ...]) -> Iterator[tuple[Box, Spec]]:
    """What each operand has at ``coordinate``, in positions of the joined tensor."""
    start = 0
    for spec in specs:
        box = tuple(spec.intervals(at, coordinate) for at in range(spec.ndim))
        yield (*box[:dim], tuple((low + start, high + start) for low, high in box[dim]), *box[dim + 1 :]), spec
        start += spec.shape[dim]


def _taken(specs: Sequence[Spec], dim: int, result: Spec, coordinate: tuple[int, ...]) -> Iterator[Box]:
    """What is taken of each operand at ``coordinate``, in positions of the joined tensor."""
    wanted = _part(result, coordinate) or tuple(() for _ in result.shape)
    for box, _ in _shifted(specs, dim, coordinate):
        yield tuple(intersect(own, want) for own, want in zip(box, wanted, strict=True))


def local_join(
    specs: Sequence[Spec], dim: int, result: Spec, coordinate: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    """What the rank at ``coordinate`` does to join its parts."""
    held = [box for box, _ in _shifted(specs, dim, coordinate)]
    taken = list(_taken(specs, dim, result, coordinate))
    shape, dtype = result.local_shape(coordinate), result.meta.dtype

    def run(tensors: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
        pieces = [
            _picked(x, own, inside) for x, own, inside in zip(tensors, held, taken, strict=True) if volume(inside)
        ]
        # A rank that has nothing of some operand does not see its dtype.
        return torch.cat(pieces, dim).to(dtype) if pieces else tensors[0].new_zeros(shape, dtype=dtype)

    return run


def _picked(x: torch.Tensor, held: Box, inside: Box) -> torch.Tensor:
    for dim, (own, wanted) in enumerate(zip(held, inside, strict=True)):
        if own != wanted:
            pieces = [x.narrow(dim, start, stop - start) for start, stop in _located(own, wanted)]
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return x


def _located(held: Intervals, wanted: Intervals) -> Iterator[tuple[int, int]]:
    """Where the ``wanted`` intervals stand among those that are held, one after the other."""
    position = 0
    for low, high in held:
        for start, stop in intersect(wanted, ((low, high),)):
            yield start - low + position, stop - low + position
        position += high - low


def nearest(spec: Spec, image: Image, metas: Metas) -> Spec | None:
    """The cheapest redistribution after which every element can stay where it is; None if there is none."""
    best, least = None, float("inf")
    for count, candidate in enumerate(_candidates(spec, involved(spec, image))):
        if count > TRIED:
            break
        cost = price(spec, candidate)
        if cost < least and relabelled(candidate, image, metas) is not None:
            best, least = candidate, cost
    return best


def _candidates(spec: Spec, axes: tuple[int, ...]) -> Iterator[Spec]:
    lying: list[Placement] = [*map(Shard, range(spec.ndim)), Replicate()]
    yield spec.with_placements(_laid(spec, axes, [Replicate()] * len(axes)))
    for count in range(1, len(axes) + 1):
        for changed in combinations(axes, count):
            for chosen in product(lying, repeat=count):
                yield spec.with_placements(_laid(spec, changed, chosen))


def _laid(spec: Spec, axes: Sequence[int], chosen: Sequence[Placement]) -> Placements:
    laid = dict(zip(axes, chosen, strict=True))
    return tuple(laid.get(axis, own) for axis, own in enumerate(spec.placements))

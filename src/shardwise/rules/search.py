"""Searches and scans along a dim that is cut: each rank looks at its own part, and little is exchanged.

A search for an extreme reduces the values first, then the positions of those that reach them: the first one wins, as
on one rank. A scan runs on each part, and takes up what the parts before it came to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardwise.rules.parts import is_cut, local_of, lying, positions, settled, spec_of, whole_along
from shardwise.rules.pattern import along, named, text, wrap
from shardwise.rules.rule import Rule
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta

aten = torch.ops.aten
Op = torch._ops.OpOverload
Meaning = Callable[..., "str | Rule"]
Results = torch.Tensor | tuple[torch.Tensor, ...]


def is_whole(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether every rank holds all of ``dims``."""
    spec = spec_of(x)
    return spec is None or not any(is_cut(placement, dims) for placement in spec.placements)


# --- extremes and where they are


def extreme(x: torch.Tensor, dims: Sequence[int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme over ``dims``, which are kept with size 1, and the position of the first that reaches it."""
    spec, local = spec_of(x), local_of(x)
    assert spec is not None, x
    reduce = torch.amax if kind == "max" else torch.amin
    dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
    local = local.to(dtype)
    shape = [1 if dim in dims else size for dim, size in enumerate(spec.shape)]
    here = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
    nothing = any(local.shape[dim] == 0 for dim in dims)

    def over(found: torch.Tensor, by: Callable[..., torch.Tensor], identity: float, pending: str) -> torch.Tensor:
        part = found.new_full(here, identity) if nothing else by(found, list(dims), keepdim=True)
        placements = [Partial(pending) if is_cut(role, dims) else role for role in spec.placements]
        return lying(x, part, placements, TensorMeta.contiguous(shape, part.dtype))

    values = settled(over(local, reduce, _worst(dtype, kind), kind))
    reached = (local == local_of(values)) | (local != local)  # what is not a number wins
    missed = math.prod(spec.shape)
    places = settled(over(torch.where(reached, _flat(spec, dims, local), missed), torch.amin, missed, "min"))
    return values.to(x.dtype), places


def _worst(dtype: torch.dtype, kind: str) -> float:
    if dtype.is_floating_point:
        return -math.inf if kind == "max" else math.inf
    return torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max


def _flat(spec: Spec, dims: Sequence[int], local: torch.Tensor) -> torch.Tensor:
    """The position over ``dims``, flattened, of each entry of ``local``."""
    total = torch.zeros((1,) * local.ndim, dtype=torch.int64, device=local.device)
    for dim in dims:
        own = positions(spec, dim, local.device)
        total = total * spec.shape[dim] + own.view(*(-1 if at == dim else 1 for at in range(local.ndim)))
    return total


def _searched(op: Op, kind: str, gives: Callable[..., Results]) -> Callable[..., Results]:
    def search(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Results:
        dims = list(range(x.ndim)) if dim is None else [wrap(dim, x.ndim)]
        x = settled(x)
        if is_whole(x, dims) or x.is_complex():
            found: Results = op(
                whole_along(x, dims), *([] if dim is None and not op_takes_none(op) else [dim]), keepdim
            )
            return found
        values, places = extreme(x, dims, kind)
        if not keepdim:
            values, places = aten.squeeze.dims(values, dims), aten.squeeze.dims(places, dims)
        return gives(values, places)

    return search


def op_takes_none(op: Op) -> bool:
    """Whether the dim of a search may be left out."""
    return str(op._schema.arguments[1].type).startswith("Optional")


def reduced(x: TensorMeta, dim: int | None, keepdim: bool, outputs: int) -> str:
    """A reduction of one dim, or of all, each of which must be on one rank."""
    gone = range(len(x.shape)) if dim is None else [wrap(dim, len(x.shape))]
    names = ["1" if at in gone else name for at, name in enumerate(named(len(x.shape)))]
    left = names if keepdim else [name for name in names if name != "1"]
    return f"f({text(along(x, gone))}) -> {', '.join([text(left)] * outputs)}"


def search(op: Op, kind: str, outputs: int) -> Meaning:
    """The rule of an operator that finds an extreme: its value and place where it has two outputs, else its place."""
    find = _searched(op, kind, (lambda values, places: (values, places)) if outputs == 2 else lambda _, places: places)

    def meaning(x: TensorMeta, dim: int | None = None, keepdim: bool = False) -> str | Rule:
        whole = reduced(x, dim, keepdim, outputs)
        return Rule(whole, expand=find) if x.shape and 0 not in x.shape else whole

    return meaning


def truth(op: Op, kind: str) -> Meaning:
    """The rule of ``any`` (the largest of the truth values) or ``all`` (the least)."""

    def over(x: torch.Tensor, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> torch.Tensor:
        listed = _listed(x.ndim, dims)
        if not listed:
            return x != 0
        truths = (x != 0).to(torch.uint8)
        reduce = aten.amax.default if kind == "max" else aten.amin.default
        result: torch.Tensor = settled(reduce(truths, listed, keepdim)).to(
            torch.uint8 if x.dtype is torch.uint8 else torch.bool
        )
        return result

    def meaning(x: TensorMeta, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> str | Rule:
        gone = _listed(len(x.shape), dims)
        names = ["1" if at in gone else name for at, name in enumerate(named(len(x.shape)))]
        left = names if keepdim else [name for name in names if name != "1"]
        whole = f"f({text(along(x, gone))}) -> {text(left)}"
        return Rule(whole, expand=over) if 0 not in x.shape else whole

    return meaning


def _listed(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    if dims is None or not ndim:
        return list(range(ndim))
    return [wrap(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)]


# --- scans

Before = Callable[[Sequence[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def scan(op: Op, outputs: int, take_up: Before) -> Meaning:
    """The rule of a scan; ``take_up`` brings what earlier parts came to into the scan of a part."""

    def over(x: torch.Tensor, dim: int, *rest: object) -> Results:
        dim = wrap(dim, x.ndim)
        x = settled(x)
        axis = _only_cut(x, dim)
        if axis is None:
            found: Results = _called(op, whole_along(x, [dim]), dim, rest)
            return found
        results = _scanned(op, x, dim, rest, axis, take_up)
        return results if outputs == 2 else results[0]

    def meaning(x: TensorMeta, dim: int, *_rest: object) -> Rule:
        names = text(along(x, [dim]))
        linear = op is aten.cumsum.default
        left = names if linear else f"f({names})"
        return Rule(f"{left} -> {', '.join([names] * outputs)}", expand=over if x.shape else None)

    return meaning


def _called(op: Op, x: torch.Tensor, dim: int, rest: Sequence[object]) -> Results:
    found: Results = op(x, dim, dtype=rest[0]) if rest else op(x, dim)
    return found


def _only_cut(x: torch.Tensor, dim: int) -> int | None:
    """The axis that cuts ``dim`` in consecutive pieces, if there is one and no other."""
    spec = spec_of(x)
    cuts = [axis for axis, role in enumerate(spec.placements) if is_cut(role, [dim])] if spec is not None else []
    plain = spec is not None and len(cuts) == 1 and isinstance(spec.placements[cuts[0]], Shard)
    return cuts[0] if plain else None


def _scanned(
    op: Op, x: torch.Tensor, dim: int, rest: Sequence[object], axis: int, take_up: Before
) -> tuple[torch.Tensor, ...]:
    spec = spec_of(x)
    assert spec is not None, x
    coordinate, parts = spec.mesh.get_coordinate(), spec.mesh.shape[axis]
    local = local_of(x)
    metas = _metas(op, spec.meta, dim, rest)
    found = (
        _called(op, local, dim, rest)
        if coordinate is not None
        else tuple(local.new_empty(local.shape, dtype=meta.dtype) for meta in metas)
    )
    own = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(own) == 2 and coordinate is not None and local.shape[dim]:
        own[1] = own[1] + positions(spec, dim, local.device)[0]
    last = [_last(part, dim) for part in own]
    shared = [_shared(x, part, dim, axis, meta) for part, meta in zip(last, metas, strict=True)]
    if coordinate is not None:
        cut = spec.placements[axis]
        assert isinstance(cut, Cut), cut
        holding = [at for at in range(coordinate[axis]) if cut.local_size(spec.shape[dim], parts, at)]
        before = [tuple(part.narrow(dim, at, 1) for part in shared) for at in holding]
        own = list(take_up(before, tuple(own))) if before else own
    return tuple(lying(x, part.contiguous(), spec.placements, meta) for part, meta in zip(own, metas, strict=True))


def _last(part: torch.Tensor, dim: int) -> torch.Tensor:
    """The last entry along ``dim``, or something in its place."""
    if part.ndim and part.shape[dim]:
        return part.narrow(dim, part.shape[dim] - 1, 1)
    return part.new_zeros([1 if at == dim else size for at, size in enumerate(part.shape)])


def _shared(x: torch.Tensor, part: torch.Tensor, dim: int, axis: int, meta: TensorMeta) -> torch.Tensor:
    """What all ranks along ``axis`` hold, ``part`` being one entry along ``dim`` of each."""
    spec = spec_of(x)
    assert spec is not None, x
    shape = [spec.mesh.shape[axis] if at == dim else size for at, size in enumerate(meta.shape)]
    joined = lying(x, part.contiguous(), spec.placements, TensorMeta.contiguous(shape, meta.dtype))
    wanted: list[Placement] = [Replicate() if at == axis else role for at, role in enumerate(spec.placements)]
    whole: torch.Tensor = joined.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return local_of(whole)


def _metas(op: Op, meta: TensorMeta, dim: int, rest: Sequence[object]) -> list[TensorMeta]:
    x = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    found = _called(op, x, dim, rest)
    return [TensorMeta.of(part) for part in (found if isinstance(found, (tuple, list)) else (found,))]


def summed(before: Sequence[tuple[torch.Tensor, ...]], own: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (own[0] + sum(part for (part,) in before),)


def multiplied(before: Sequence[tuple[torch.Tensor, ...]], own: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (own[0] * math.prod((part for (part,) in before), start=torch.ones_like(before[0][0])),)


def exponentially_summed(
    before: Sequence[tuple[torch.Tensor, ...]], own: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    total = own[0]
    for (part,) in before:
        total = torch.logaddexp(part, total)
    return (total,)


def extended(beats: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Before:
    """The running extreme; where parts tie, the later one counts, and so does what is not a number."""

    def take_up(before: Sequence[tuple[torch.Tensor, ...]], own: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        best, place = before[0]
        for value, where in [*before[1:], own]:
            later = (value != value) | ((best == best) & beats(value, best))
            best, place = torch.where(later, value, best), torch.where(later, where, place)
        return best, place

    return take_up


RULES: dict[str, str | Meaning | Rule] = {
    "max.dim": search(aten.max.dim, "max", 2),
    "min.dim": search(aten.min.dim, "min", 2),
    "argmax": search(aten.argmax.default, "max", 1),
    "argmin": search(aten.argmin.default, "min", 1),
    "any": truth(aten.any.dims, "max"),
    "all": truth(aten.all.dims, "min"),
    "_is_any_true": truth(aten.any.dims, "max"),
    "_is_all_true": truth(aten.all.dims, "min"),
    "cumsum": scan(aten.cumsum.default, 1, summed),
    "cumprod": scan(aten.cumprod.default, 1, multiplied),
    "logcumsumexp": scan(aten.logcumsumexp.default, 1, exponentially_summed),
    "cummax": scan(aten.cummax.default, 2, extended(torch.ge)),
    "cummin": scan(aten.cummin.default, 2, extended(torch.le)),
}

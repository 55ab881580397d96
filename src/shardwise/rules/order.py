"""Operators that put the entries along a dim in order; of a cut dim, only entries that may be asked for are exchanged.

The k largest of all are among the k largest of each part. Sorting needs the dim whole.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from shardwise.rules.parts import is_cut, local_of, lying, positions, settled, spec_of, whole_along
from shardwise.rules.pattern import along, text, without, wrap
from shardwise.rules.rule import Rule
from shardwise.sharding.placement import Replicate, Shard
from shardwise.sharding.spec import Spec, TensorMeta

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]
PLACE = torch.int64


def _two_along(x: TensorMeta, dim: int, keepdim: bool = True) -> str:
    dims = along(x, [dim])
    after = dims if keepdim else without(dims, dim)
    return f"f({text(dims)}) -> {text(after)}, {text(after)}"


def sort(x: TensorMeta, dim: int = -1, descending: bool = False) -> str:
    return _two_along(x, dim)


def sort_stable(x: TensorMeta, stable: bool | None, dim: int = -1, descending: bool = False) -> str:
    return _two_along(x, dim)


def topk(x: TensorMeta, k: int, dim: int = -1, *_: object) -> Rule:
    return Rule(_two_along(x, dim), expand=_largest if x.shape and 0 not in x.shape else None)


def kthvalue(x: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return Rule(_two_along(x, dim, keepdim), expand=_kth if x.shape and 0 not in x.shape else None)


def _largest(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> Pair:
    return _of_candidates(x, dim, k, largest, lambda found, at: aten.topk.default(found, k, at, largest, is_sorted))


def _kth(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """The k-th least is the greatest but one, two, and so on, if these are fewer."""
    behind = x.shape[dim] - k + 1
    if k <= behind:
        found = _of_candidates(x, dim, k, False, lambda found, at: aten.kthvalue.default(found, k, at, True))
    else:
        found = _of_candidates(
            x, dim, behind, True, lambda found, at: aten.kthvalue.default(found, found.shape[at] - behind + 1, at, True)
        )
    return found if keepdim else (aten.squeeze.dim(found[0], dim), aten.squeeze.dim(found[1], dim))


def _of_candidates(
    x: torch.Tensor, dim: int, k: int, largest: bool, choose: Callable[[torch.Tensor, int], Pair]
) -> Pair:
    """What ``choose`` finds in ``x`` along ``dim``, seeing of a cut dim only the ``k`` first entries of each part."""
    dim, x = wrap(dim, x.ndim), settled(x)
    spec = spec_of(x)
    if spec is None:
        return choose(x, dim)
    counts = [min(k, size) for size in _sizes(spec, dim)]
    bytes_each = spec.meta.dtype.itemsize + PLACE.itemsize
    if k * len(counts) * bytes_each >= spec.shape[dim] * spec.meta.dtype.itemsize:
        return choose(whole_along(x, [dim]), dim)
    values, places = _first(x, spec, dim, k, largest)
    kept = torch.tensor([at * k + rank for at, count in enumerate(counts) for rank in range(count)], dtype=PLACE)
    values, places = (_together(x, part, spec, dim, k, kept) for part in (values, places))
    found, where = choose(values, dim)
    return found, aten.gather.default(places, dim, where)


def _sizes(spec: Spec, dim: int) -> list[int]:
    """How much of ``dim`` each rank along the axes that cut it holds, the last axis running fastest."""
    own = spec.mesh.get_coordinate() or (0,) * spec.mesh.ndim
    lying_so = zip(spec.placements, spec.mesh.shape, own, strict=True)
    places = [range(parts) if is_cut(role, [dim]) else [here] for role, parts, here in lying_so]
    return [spec.local_shape(coordinate)[dim] for coordinate in product(*places)]


def _first(x: torch.Tensor, spec: Spec, dim: int, k: int, largest: bool) -> Pair:
    """The first ``k`` entries of this rank's part and where they stand in the whole, filled up to ``k``."""
    local = local_of(x)
    if spec.mesh.get_coordinate() is None:
        return local, local.new_empty(local.shape, dtype=PLACE)
    values, where = aten.topk.default(local, min(k, local.shape[dim]), dim, largest, True)
    places = positions(spec, dim, local.device)[where]
    missing = k - values.shape[dim]
    if not missing:
        return values, places
    shape = [missing if at == dim else size for at, size in enumerate(values.shape)]
    return tuple(torch.cat([part, part.new_zeros(shape)], dim) for part in (values, places))  # type: ignore[return-value]


def _together(x: torch.Tensor, part: torch.Tensor, spec: Spec, dim: int, k: int, kept: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, of which the entries ``kept`` are not there to fill up."""
    cutting = [is_cut(role, [dim]) for role in spec.placements]
    ranks = 1
    for cuts, parts in zip(cutting, spec.mesh.shape, strict=True):
        ranks *= parts if cuts else 1
    placements = [Shard(dim) if cuts else role for cuts, role in zip(cutting, spec.placements, strict=True)]
    shape = [k * ranks if at == dim else size for at, size in enumerate(spec.shape)]
    joined = lying(x, part.contiguous(), placements, TensorMeta.contiguous(shape, part.dtype))
    after = [Replicate() if cuts else role for cuts, role in zip(cutting, spec.placements, strict=True)]
    whole: torch.Tensor = joined.redistribute(placements=after)  # type: ignore[attr-defined]
    local = local_of(whole)
    if spec.mesh.get_coordinate() is not None:
        local = local.index_select(dim, kept.to(local.device))
    shape[dim] = len(kept)
    return lying(x, local, after, TensorMeta.contiguous(shape, part.dtype))


RULES: dict[str, str | Rule | Callable[..., str | Rule]] = {
    "topk": topk,
    "sort": sort,
    "sort.stable": sort_stable,
    "kthvalue": kthvalue,
}

"""Operators that may copy where the view in them is impossible: `reshape` and its like take the cheapest road.

Torch makes them of views before a tensor subclass sees them, and a view that has moved would be taken for one that has
not: what is written to it would reach nobody. So they are met earlier, at a dispatch key that only tensors marked with
`MARKED` have, and that lets every other operator through. What has moved, a view in torch, is not to be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from shardwise.errors import RuleError, ViewError, message
from shardwise.mesh.world import current_world
from shardwise.rules.strided import Views, views_of
from shardwise.sharding.placement import Partial, Replicate
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.dispatch import redistributed, unseen

KEY = "TESTING_ONLY_GenericWrapper"  # no tensor of torch's own has it
MARKED = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))
ROADS = 4096  # how many ways around an impossible view a rank remembers

Binding = Callable[..., torch.Tensor]

MAY_COPY: dict[str, Binding] = {
    "reshape": torch.Tensor.reshape,
    "reshape_as": torch.Tensor.reshape_as,
    "flatten.using_ints": torch._C.TensorBase.flatten,
    "unflatten.int": torch._C.TensorBase.unflatten,
    "ravel": torch.Tensor.ravel,
}


def by_the_cheapest_road(name: str, call: Binding) -> Binding:
    """``call`` as a view where that is exact, else after the cheapest redistribution, which `explicit` forbids."""

    def run(x: torch.Tensor, *args: object) -> torch.Tensor:
        with _Excluded(MARKED):
            roads = current_world().memory.get("roads")
            road = roads.get((x._spec, name, *map(_lasting, args))) if roads else None  # type: ignore[attr-defined]
            if road is None:
                try:
                    return call(x, *args)
                except ViewError as refusal:
                    if refusal.placements is None:
                        raise
                    road = refusal.with_traceback(None).placements  # frames would keep the tensors
                _remember((x._spec, name, *map(_lasting, args)), road)  # type: ignore[attr-defined]
            found = call(redistributed(f"aten.{name}", x, road), *args)
            return unseen(found, x._spec) if _is_view_in_torch(x, found) else found  # type: ignore[attr-defined]

    return run


_Excluded = torch._C._ExcludeDispatchKeyGuard


def _is_view_in_torch(x: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether a program may count on writing to ``x`` through ``found``; gradients are nobody's view."""
    if torch._C._current_graph_task_id() != -1:
        return False
    meta: TensorMeta = x._spec.meta  # type: ignore[attr-defined]
    if meta.is_packed:
        return True
    try:
        torch.empty_strided(meta.shape, meta.stride, device="meta").view(found.shape)
    except RuntimeError:
        return False
    return True


def _remember(key: object, road: object) -> None:
    roads = current_world().memory.setdefault("roads", {})
    if len(roads) >= ROADS:
        roads.clear()
    roads[key] = road


def _lasting(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.shape
    return tuple(argument) if isinstance(argument, list) else argument


def as_strided(x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> torch.Tensor:
    """``as_strided`` as the views that it is, so that parts and gradients stay where they are; else as torch has it."""
    if storage_offset and x._is_view() and x._base is not None and x._base.numel() != x.numel():
        raise RuleError(
            message(
                "an offset counts from the start of the memory, of which this tensor is a part",
                asked=f"as_strided({x._spec}, {size}, {stride}, {storage_offset})",  # type: ignore[attr-defined]
                do="write it with views, or call clone() first",
            )
        )
    refusals = []
    for views in views_of(x._spec.meta, size, stride, storage_offset or 0):  # type: ignore[attr-defined]
        try:
            return _seen(x, views)
        except ViewError as refusal:
            refusals.append(refusal)
    if refusals:
        raise _no_view(x, size, stride, storage_offset) from refusals[0]
    with _Excluded(MARKED):
        return x.as_strided(size, stride, storage_offset)


def as_strided_copy(
    x: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> torch.Tensor:
    """A copy of what `as_strided` gives, for which ``x`` moves where that is no view."""
    try:
        return as_strided(x, size, stride, storage_offset).clone(memory_format=torch.contiguous_format)
    except ViewError:
        with _Excluded(MARKED):
            return torch.as_strided_copy(x, size, stride, storage_offset)


def _no_view(x: torch.Tensor, size: list[int], stride: list[int], offset: int | None) -> ViewError:
    spec: Spec = x._spec  # type: ignore[attr-defined]
    lying = tuple([own if isinstance(own, Partial) else Replicate() for own in spec.placements])
    refused = ViewError(
        message(
            "as_strided is a view, and a view never communicates: the parts of the ranks are no shards of the result",
            asked=f"as_strided({spec}, {size}, {stride}, {offset or 0})",
            do=f"first .redistribute(placements={list(lying)})",
        )
    )
    refused.placements = lying
    return refused


def tensor_split(x: torch.Tensor, given: int | list[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    """``tensor_split``; where it is refused, the advice is good for all of its pieces."""
    with _Excluded(MARKED):
        try:
            return x.tensor_split(given, dim)
        except ViewError:
            lengths = _lengths(x.shape[dim], given)
            if min(lengths) >= 0:
                x.split(lengths, dim)
            raise


def _lengths(size: int, given: int | list[int]) -> list[int]:
    if isinstance(given, int):
        return [size // given + (at < size % given) for at in range(given)]
    return [stop - start for start, stop in pairwise([0, *(len(range(size)[:stop]) for stop in given), size])]


def _seen(x: torch.Tensor, views: Views) -> torch.Tensor:
    for name, args in views:
        x = getattr(x, name)(*args)
    return x


def _at_the_key() -> tuple[torch.library.Library, ...]:
    others, own = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)
    for name, call in MAY_COPY.items():
        own.impl(name, by_the_cheapest_road(name, call))
    own.impl("as_strided", as_strided)
    own.impl("as_strided_copy", as_strided_copy)
    for name in ("tensor_split.sections", "tensor_split.indices"):
        own.impl(name, tensor_split)
    return others, own


REGISTERED = _at_the_key()  # for as long as the process lives

"""Operators that may copy where the view in them is impossible: `reshape` and its like take the cheapest road.

Torch makes them of views before a tensor subclass sees them, and a view that has moved would be taken for one that has
not: what is written to it would reach nobody. So they are met earlier, at a dispatch key that only tensors marked with
`MARKED` have, and that lets every other operator through.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.errors import ViewError
from shardwise.mesh.world import current_world
from shardwise.tensor.dispatch import redistributed

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
            if road is not None:
                return call(redistributed(f"aten.{name}", x, road), *args)
            try:
                return call(x, *args)
            except ViewError as refusal:
                if refusal.placements is None:
                    raise
                road = refusal.placements
            _remember((x._spec, name, *map(_lasting, args)), road)  # type: ignore[attr-defined]
            return call(redistributed(f"aten.{name}", x, road), *args)

    return run


_Excluded = torch._C._ExcludeDispatchKeyGuard


def _remember(key: object, road: object) -> None:
    roads = current_world().memory.setdefault("roads", {})
    if len(roads) >= ROADS:
        roads.clear()
    roads[key] = road


def _lasting(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.shape
    return tuple(argument) if isinstance(argument, list) else argument


def _at_the_key() -> tuple[torch.library.Library, ...]:
    others, own = torch.library.Library("_", "IMPL", KEY), torch.library.Library("aten", "IMPL", KEY)
    others.fallback(torch.library.fallthrough_kernel)
    for name, call in MAY_COPY.items():
        own.impl(name, by_the_cheapest_road(name, call))
    return others, own


REGISTERED = _at_the_key()  # for as long as the process lives

"""Where plain tensors become distributed and distributed ones plain: the inputs and outputs of one module.

Modules side by side (the gate and the way up of an MLP; queries, keys and values) take the same tensor. Where it enters
without a move, and gradients are wanted, what entered last and enters again is the same distributed tensor, so that the
gradients are summed before they move. It shares the memory of what entered: whatever is written there is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.compiler import is_dynamo_compiling

from shardwise.errors import ParallelPlanError, PlacementError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.sharding.placement import Cut, Placement
from shardwise.tensor.dtensor import DTensor

Layouts: TypeAlias = Placement | Sequence[Placement | None]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that entered and where it stood in the graph, in what way, and as what."""

    source: weakref.ref[torch.Tensor]
    node: object
    way: tuple[object, ...]
    result: DTensor

    def is_of(self, x: torch.Tensor, way: tuple[object, ...]) -> bool:
        """Whether ``x`` entering that way is this."""
        return self.source() is x and self.node is x.grad_fn and self.way == way and _is_alias(self.result, x)


def _is_alias(entered: DTensor, x: torch.Tensor) -> bool:
    local = entered._local_tensor
    same = local is not x and local.data_ptr() == x.data_ptr() and local.dtype is x.dtype
    return same and local.shape == x.shape and local.stride() == x.stride()


def carry_in(
    x: torch.Tensor, mesh: DeviceMesh, given: Placement, needed: Placement | None, features: int | None = None
) -> DTensor:
    """`enter`, then `place`; once for what enters several times in a row without a move, and wants a gradient."""
    moves = isinstance(x, DTensor) or (needed is not None and needed is not given)
    if is_dynamo_compiling() or moves or not (torch.is_grad_enabled() and x.requires_grad):
        return place(enter(x, mesh, given, features), needed)
    memory = current_world().memory
    last: Crossing | None = memory.get("entered")
    way = (mesh, given, features)
    if last is not None and last.is_of(x, way):
        return last.result
    result = enter(x, mesh, given, features)
    if _is_alias(result, x):

        def forget(source: object) -> None:
            if (known := memory.get("entered")) is not None and known.source is source:
                del memory["entered"]

        memory["entered"] = Crossing(weakref.ref(x, forget), x.grad_fn, way, result)
    return result


def enter(x: torch.Tensor, mesh: DeviceMesh, layout: Placement, features: int | None = None) -> DTensor:
    """The distributed tensor of which ``x``, if it is plain, is this rank's part.

    ``features`` is the global size of the last dim where the module knows it: then the parts of it may be uneven.
    """
    if isinstance(x, DTensor):
        return _on_mesh(x, mesh)
    if features is None or not isinstance(layout, Cut) or layout.dim % x.ndim != x.ndim - 1:
        return DTensor.from_local(x, mesh, (layout,))
    shape = (*x.shape[:-1], features)
    return DTensor.from_local(x.contiguous(), mesh, (layout,), shape=shape)


def _on_mesh(x: DTensor, mesh: DeviceMesh) -> DTensor:
    if x.device_mesh is mesh:
        return x
    raise PlacementError(
        message(
            "a module of a parallel plan got a DTensor on another mesh than its own",
            asked=f"a tensor on {mesh}",
            got=f"{x._spec} on {x.device_mesh}",
            do="hand it this rank's part, a plain tensor, or a DTensor on the mesh that the plan was applied with",
        )
    )


def place(x: DTensor, layout: Placement | None) -> DTensor:
    """``x`` as ``layout`` says; as it is if that is None."""
    return x if layout is None else x.redistribute(placements=(layout,))


def leave(x: torch.Tensor, layout: Placement | None, local: bool) -> torch.Tensor:
    """An output as ``layout`` says; with ``local`` this rank's part of it, a plain tensor."""
    if not isinstance(x, DTensor):
        return x
    placed = place(x, layout)
    return placed.to_local() if local else placed


@dataclass(frozen=True, slots=True)
class Boundary:
    """What happens to a list of inputs or outputs: how plain ones lie, how all are to lie, what is handed on."""

    mesh: DeviceMesh
    given: tuple[Placement | None, ...] | None
    desired: tuple[Placement | None, ...] | None
    local: bool


def place_each(items: tuple[object, ...], boundary: Boundary, what: str) -> tuple[object, ...]:
    """Carry each of ``items`` over the boundary; raises `ParallelPlanError` if there are more or fewer than layouts."""
    if boundary.given is None or boundary.desired is None:
        return items
    if len(items) != len(boundary.given):
        raise ParallelPlanError(
            message(
                f"one layout for each input or output: {len(boundary.given)}, not {len(items)}",
                asked=f"layouts {list(boundary.given)}",
                got=f"{what} {[type(item).__name__ for item in items]}",
                do="give a layout for each; None leaves one alone",
            )
        )
    every = zip(items, boundary.given, boundary.desired, strict=True)
    return tuple(_carry(item, boundary.mesh, given, desired, boundary.local) for item, given, desired in every)


def place_named(
    items: Mapping[str, object],
    mesh: DeviceMesh,
    given: Mapping[str, Placement],
    desired: Mapping[str, Placement],
    local: bool,
) -> dict[str, object]:
    """Carry keyword inputs over the boundary, those for which there are layouts."""
    return {name: _carry(item, mesh, given.get(name), desired.get(name), local) for name, item in items.items()}


def _carry(item: object, mesh: DeviceMesh, given: Placement | None, desired: Placement | None, local: bool) -> object:
    if given is None or item is None:
        return item
    if not isinstance(item, torch.Tensor):
        raise ParallelPlanError(
            message(
                f"only a tensor can have a layout, not {type(item).__name__}",
                asked=f"{type(item).__name__} as {given!r}",
                do="give None as the layout of this input or output",
            )
        )
    if not local:
        return carry_in(item, mesh, given, desired)
    return leave(enter(item, mesh, given), desired, local)

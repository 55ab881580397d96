"""`local_map`: a function of local tensors, called on distributed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.utils import _pytree as pytree

from shardwise.comm import wire
from shardwise.errors import PlacementError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.placement import Cut, Placement
from shardwise.sharding.spec import Spec, TensorMeta, normalize
from shardwise.tensor.dtensor import DTensor

Places = Sequence[Placement] | None


def local_map(
    func: Callable[..., object] | None = None,
    out_placements: Places | Sequence[Places] = None,
    in_placements: Sequence[Places] | None = None,
    in_grad_placements: Sequence[Places] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., object]:
    """Make a function of local tensors one of distributed tensors: it sees this rank's parts.

    ``out_placements`` says how each output lies (one list for a single output, None for what is no tensor);
    ``in_placements`` how each flattened input must lie (None for what is no tensor); ``in_grad_placements`` how the
    gradients that ``func`` gives for its inputs make up the global ones. Inputs that lie otherwise are an error
    (`PlacementError`), or with ``redistribute_inputs`` are moved. Without ``func`` it is a decorator.

    >>> import shardwise, shardwise.sim, torch
    >>> from shardwise import Replicate, Shard, init_device_mesh
    >>> def body():
    ...     mesh = init_device_mesh("cpu", (2,))
    ...     double = shardwise.local_map(lambda x: 2 * x, [Shard(0)], ([Shard(0)],), device_mesh=mesh)
    ...     return double(shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])).full_tensor().tolist()
    >>> shardwise.sim.run(body, 2)[0]
    [2.0, 2.0, 2.0, 2.0]
    """
    options = (out_placements, in_placements, in_grad_placements, device_mesh)
    if func is None:
        return lambda function: local_map(function, *options, redistribute_inputs=redistribute_inputs)

    @functools.wraps(func)
    def mapped(*args: object, **kwargs: object) -> object:
        flat, tree = pytree.tree_flatten((args, kwargs))
        distributed = [item for item in flat if isinstance(item, DTensor)]
        mesh = device_mesh or (distributed[0].device_mesh if distributed else None)
        if mesh is None:
            return func(*args, **kwargs)
        moved = _inputs(flat, mesh, in_placements, redistribute_inputs)
        gradients = in_grad_placements or [None] * len(flat)
        local = [
            item.to_local(grad_placements=back) if isinstance(item, DTensor) else item
            for item, back in zip(moved, gradients, strict=True)
        ]
        own_args, own_kwargs = pytree.tree_unflatten(local, tree)
        uneven = any(_is_uneven(item._spec) for item in moved if isinstance(item, DTensor))
        return _outputs(func(*own_args, **own_kwargs), mesh, out_placements, uneven)

    return mapped


def _inputs(flat: list[object], mesh: DeviceMesh, wanted: Sequence[Places] | None, moves: bool) -> list[object]:
    if wanted is None:
        return flat
    if len(wanted) != len(flat):
        raise PlacementError(
            message(
                "local_map needs one entry of in_placements for each input",
                asked=f"{len(wanted)} entries",
                got=f"{len(flat)} inputs",
                do="use None for an input that is no tensor",
            )
        )
    return [_input(item, mesh, places, moves) for item, places in zip(flat, wanted, strict=True)]


def _input(item: object, mesh: DeviceMesh, places: Places, moves: bool) -> object:
    if not isinstance(item, DTensor) or places is None:
        return item
    target = normalize(places, mesh, item.ndim)
    if item.placements == target and item.device_mesh is mesh:
        return item
    if not moves:
        raise PlacementError(
            message(
                "an input of local_map lies otherwise than in_placements says",
                asked=f"{list(target)} on {mesh}",
                got=f"{item._spec} on {item.device_mesh}",
                do="redistribute it first, or pass redistribute_inputs=True",
            )
        )
    return item.redistribute(mesh, target)


def _is_uneven(spec: Spec) -> bool:
    share = list(spec.shape)
    for placement, parts in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(placement, Cut):
            if share[placement.dim] % parts:
                return True
            share[placement.dim] //= parts
    return False


def _outputs(result: object, mesh: DeviceMesh, out_placements: Places | Sequence[Places], uneven: bool) -> object:
    flat, tree = pytree.tree_flatten(result)
    each = bool(out_placements) and not isinstance(cast(Sequence[object], out_placements)[0], Placement)
    wanted = cast(Sequence[Places], out_placements if each else [out_placements] * len(flat))
    if len(wanted) != len(flat):
        raise PlacementError(
            message(
                "local_map needs one entry of out_placements for each output", asked=wanted, got=f"{len(flat)} outputs"
            )
        )
    made = [_output(item, mesh, places, uneven) for item, places in zip(flat, wanted, strict=True)]
    return pytree.tree_unflatten(made, tree)


def _output(item: object, mesh: DeviceMesh, places: Places, uneven: bool) -> object:
    if places is None or not isinstance(item, torch.Tensor):
        return item
    if not uneven:
        return DTensor.from_local(item, mesh, places)
    meta = TensorMeta.contiguous(_gathered_shape(item, mesh, normalize(places, mesh, item.ndim)), item.dtype)
    return DTensor.from_local(item, mesh, places, shape=meta.shape, stride=meta.stride)


def _gathered_shape(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """The global shape, from the sizes that all ranks hold: where the inputs are uneven it cannot be inferred."""
    sizes = list(local.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if isinstance(placement, Cut):
            own = torch.tensor([sizes[placement.dim]], device=local.device)
            every = wire.wait(wire.all_gather(own, mesh.axis_group(axis), axis=mesh.axis_names[axis]))
            sizes[placement.dim] = int(every.sum())
    return tuple(sizes)

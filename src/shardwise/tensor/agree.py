"""Whether what the ranks hand in as parts can be the parts of one tensor."""

from __future__ import annotations

import torch

from shardwise.comm import wire
from shardwise.errors import PlacementError, message
from shardwise.sharding.placement import Replicate
from shardwise.sharding.spec import Spec


def check_local_shape(local: torch.Tensor, spec: Spec) -> None:
    """Raise `PlacementError` unless this rank's part has the shape that the spec gives it."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None or tuple(local.shape) == spec.local_shape(coordinate):
        return
    raise PlacementError(
        message(
            "the local tensor is not this rank's part of the global one",
            asked=f"from_local of {list(local.shape)} as {spec} on {spec.mesh}",
            got=f"at {coordinate} of the mesh the part must have the shape {list(spec.local_shape(coordinate))}",
            do="give the shape= and stride= of the global tensor whose parts follow the rule of torch.chunk",
        )
    )


def check_locals(local: torch.Tensor, spec: Spec) -> None:
    """Compare shape and, over replicated axes, contents across the mesh; raise `PlacementError` naming the rank."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return
    group = spec.mesh.axes_group(tuple(range(spec.mesh.ndim)))
    mine = torch.tensor([local.ndim, *spec.shape], dtype=torch.int64, device=local.device)
    every = wire.wait(wire.all_gather(mine, group)).view(group.size, -1)
    odd = [rank for rank, row in zip(group.ranks, every.tolist(), strict=True) if row != every[0].tolist()]
    if odd:
        raise PlacementError(message("the ranks hold parts of different shapes", got=f"rank {odd[0]} differs: {every}"))
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate):
            _check_replicas(local, spec, axis)


def _check_replicas(local: torch.Tensor, spec: Spec, axis: int) -> None:
    group = spec.mesh.axis_group(axis)
    parts = wire.wait(wire.all_gather(local.contiguous().reshape(1, *local.shape), group))
    for rank, part in zip(group.ranks, parts, strict=True):
        if not torch.equal(part, parts[0]):
            name = spec.mesh.axis_names[axis]
            raise PlacementError(
                message(
                    f"the tensor is not the same on the ranks of axis {name}, where it is to be replicated",
                    got=f"rank {rank} differs from rank {group.ranks[0]}",
                    do="broadcast it first, or use distribute_tensor",
                )
            )

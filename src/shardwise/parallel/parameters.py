"""The parameters of a module that a style lays over a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from shardwise.errors import DistributedTwiceError, ParallelPlanError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.placement import Placement, Replicate
from shardwise.tensor.api import distribute_tensor
from shardwise.tensor.dtensor import DTensor


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Placement], source: int | None
) -> None:
    """Distribute the parameters of ``module`` by name, and replicate what ``layouts`` does not name, buffers too.

    Gradients come to lie as their parameters do. Raises `DistributedTwiceError` if the module has been distributed
    before, `ParallelPlanError` if a parameter lies otherwise already.
    """
    _check_new(module, layouts)
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                layout = layouts.get(name, Replicate()) if part is module else Replicate()
                where = ".".join(filter(None, (type(module).__name__, path, name)))
                part.register_parameter(name, _placed(parameter, mesh, layout, source, where))
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                part._buffers[name] = distribute_tensor(buffer, mesh, [Replicate()], src_data_rank=source)
    module._shardwise_distributed = True  # type: ignore[assignment]


def _check_new(module: nn.Module, layouts: Mapping[str, Placement]) -> None:
    kind = type(module).__name__
    if getattr(module, "_shardwise_distributed", False):
        what = f"this {kind} has been distributed before"
        raise DistributedTwiceError(message(what, do="give each module one style, and apply the plan once"))
    if "weight" in layouts and "weight" not in module._parameters:
        what, found = f"this {kind} has no parameter weight of its own", f"parameters {list(module._parameters)}"
        raise ParallelPlanError(message(what, got=found, do="remove parametrizations first"))


def _placed(
    parameter: nn.Parameter, mesh: DeviceMesh, layout: Placement, source: int | None, where: str
) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        made = distribute_tensor(parameter.detach(), mesh, [layout], src_data_rank=source)
        placed = nn.Parameter(made, parameter.requires_grad)
        if placed.requires_grad:
            placed.register_hook(_laid_like(made.placements))
        return placed
    if parameter.device_mesh is mesh and parameter.placements == (layout,):
        return parameter
    raise ParallelPlanError(
        message(
            f"the parameter {where} is distributed already, and otherwise",
            asked=f"{layout!r} on {mesh}",
            got=f"{parameter._spec} on {parameter.device_mesh}",
            do="apply the plan to the plain module first, and shard over further axes afterwards",
        )
    )


def _laid_like(placements: tuple[Placement, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gradient hook. What is pending in a gradient is then summed once, and not at each of its uses."""

    def lay(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.redistribute(placements=placements) if isinstance(gradient, DTensor) else gradient

    return lay

"""The functions around `DTensor`: distributing tensors and modules, and making distributed tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import wire
from shardwise.errors import ArgumentError, DistributedTwiceError, LeafError, PlacementError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import Group, saying
from shardwise.sharding.placement import Cut, Partial, Placement, Replicate
from shardwise.sharding.spec import Spec, TensorMeta, check_sizes, normalize
from shardwise.tensor.dtensor import DTensor, mesh_or_current

Placements = Sequence[Placement]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a whole ``tensor`` (a leaf) over a mesh; every rank calls it.

    The values are those of the rank with index ``src_data_rank`` on each axis, which sends them; with None every rank
    takes its part of its own tensor, without communication. ``placements`` default to replicated. Raises
    `PlacementError` if the placements do not fit, or the tensor is distributed already and otherwise.

    >>> import shardwise, shardwise.sim, torch
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     return shardwise.distribute_tensor(torch.arange(5), mesh, [shardwise.Shard(0)]).to_local().tolist()
    >>> shardwise.sim.run(body, 2)
    [[0, 1, 2], [3, 4]]
    """
    mesh = mesh_or_current(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            message(
                "distribute_tensor takes a tensor", got=f"a {type(tensor).__name__}", do="torch.as_tensor(...) first"
            )
        )
    wanted = normalize(placements or [Replicate()] * mesh.ndim, mesh, tensor.ndim)
    _check_source(src_data_rank, mesh)
    if isinstance(tensor, DTensor):
        return _already(tensor, mesh, wanted)
    if not tensor.is_leaf:
        raise LeafError(
            message(
                "distribute_tensor takes a leaf tensor",
                got="a tensor with a gradient function",
                do="detach it first, or use DTensor.from_local, which is differentiable",
            )
        )
    tensor = tensor if not (tensor.is_conj() or tensor.is_neg()) else tensor.resolve_conj().resolve_neg()
    spec = Spec(mesh, wanted, _copied(TensorMeta.of(tensor)))
    check_sizes(spec)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        local = torch.empty((0,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)
    else:
        local = _distributed(tensor.detach(), spec, coordinate, src_data_rank)
    made = DTensor._wrap(local, spec, tensor.requires_grad)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made  # type: ignore[return-value]


def _copied(meta: TensorMeta) -> TensorMeta:
    """The meta of a copy, which torch lays without gaps and with every element in its own place."""
    if meta.row_major:
        return meta
    laid = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    return TensorMeta.of(torch.empty_like(laid))


def _check_source(source: int | None, mesh: DeviceMesh) -> None:
    if source is None or all(0 <= source < size for size in mesh.shape):
        return
    raise PlacementError(
        message(
            "src_data_rank is an index on every axis of the mesh",
            asked=f"src_data_rank={source} on {mesh}",
            do=f"an index from 0 to {min(mesh.shape) - 1}, or None to send nothing",
        )
    )


def _already(tensor: DTensor, mesh: DeviceMesh, wanted: tuple[Placement, ...]) -> DTensor:
    if tensor.device_mesh is not mesh or tensor.placements != wanted:
        raise PlacementError(
            message(
                "the tensor is distributed already, and otherwise",
                asked=f"placements {list(wanted)} on {mesh}",
                got=f"{tensor._spec} on {tensor.device_mesh}",
                do="use .redistribute(placements=...)",
            )
        )
    return tensor


def _distributed(tensor: torch.Tensor, spec: Spec, coordinate: tuple[int, ...], source: int | None) -> torch.Tensor:
    part = tensor
    for axis, placement in enumerate(spec.placements):
        group = spec.mesh.axis_group(axis)
        if isinstance(placement, Cut):
            part = _scattered(part, placement, group, spec.mesh.axis_names[axis], source)
        else:
            if source is not None and group.size > 1:
                part = wire.wait(wire.broadcast(part.contiguous(), source, group, axis=spec.mesh.axis_names[axis]))
            if isinstance(placement, Partial):
                part = _partial_value(part, placement, coordinate[axis], group.size)
    part = spec.meta.lay_out(part)
    shared = torch._C._is_alias_of(part, tensor)  # type: ignore[attr-defined]
    return part.clone(memory_format=torch.preserve_format) if shared else part


def _scattered(part: torch.Tensor, cut: Cut, group: Group, axis: str, source: int | None) -> torch.Tensor:
    if source is None or group.size == 1:
        return cut.take(part, group.size, group.index)
    pieces = [cut.take(part, group.size, index) for index in range(group.size)]
    own = pieces[group.index]
    sends = group.index == source
    sent = torch.cat([piece.reshape(-1) for piece in pieces]) if sends else part.new_empty(0)
    received = [own.numel() if index == source else 0 for index in range(group.size)]
    splits = [piece.numel() if sends else 0 for piece in pieces]
    return wire.wait(wire.all_to_all(sent, received, splits, group, axis=axis)).view(own.shape)


def _partial_value(part: torch.Tensor, placement: Partial, index: int, size: int) -> torch.Tensor:
    if placement.reduce_op in ("min", "max", "avg", "band", "bor"):
        return part
    if placement.reduce_op in ("sum", "norm"):
        return part if index == 0 else torch.zeros_like(part)
    return part if index == 0 else torch.ones_like(part)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., object] | None = None,
    output_fn: Callable[..., object] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of ``module`` distributed, in place, and return it.

    ``partition_fn(name, submodule, mesh)`` distributes what it wants to; what it leaves is replicated.
    ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` run before and after forward. Raises
    `DistributedTwiceError` if the module has been distributed before.
    """
    mesh = mesh_or_current(device_mesh)
    if getattr(module, "_shardwise_distributed", False):
        raise DistributedTwiceError(
            message("this module has been distributed before", got=type(module).__name__, do="distribute it once")
        )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, part in module.named_modules():
        if partition_fn is not None:
            before = dict(part._parameters)
            partition_fn(name, part, mesh)
            _keep_ties(part, before, made)
        replicate_rest(part, mesh, made)
    if input_fn is not None:
        module.register_forward_pre_hook(_before(input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(_after(output_fn, mesh))
    module._shardwise_distributed = True  # type: ignore[assignment]
    return module


def _keep_ties(
    module: nn.Module, before: dict[str, nn.Parameter | None], made: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Note what each parameter became; one that became something elsewhere is that here too."""
    for name, parameter in before.items():
        now = module._parameters.get(name)
        if parameter is not None and now is not None and now is not parameter:
            module._parameters[name] = made.setdefault(parameter, now)


def replicate_rest(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate the plain parameters and buffers that ``module`` itself holds; ``made`` is what others became."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter.data, DTensor):
            if parameter not in made:
                whole = distribute_tensor(parameter.data, mesh, [Replicate()] * mesh.ndim)
                made[parameter] = nn.Parameter(whole, parameter.requires_grad)
            module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim)


def _before(function: Callable[..., object], mesh: DeviceMesh) -> Callable[..., object]:
    if len(inspect.signature(function).parameters) == 2:
        return lambda module, inputs: function(inputs, mesh)
    return lambda module, inputs: function(module, inputs, mesh)


def _after(function: Callable[..., object], mesh: DeviceMesh) -> Callable[..., object]:
    if len(inspect.signature(function).parameters) == 2:
        return lambda module, inputs, outputs: function(outputs, mesh)
    return lambda module, inputs, outputs: function(module, outputs, mesh)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within the block, plain tensors beside distributed ones are taken as replicated: the same on every rank."""
    with saying("implicit replication"):
        yield


@contextmanager
def replicate_unknown() -> Iterator[None]:
    """Within the block, an operator that has no sharding rule runs on whole tensors, on every rank the same.

    Its operands are replicated (which shows in traces like any move), and so are its results. A warning names each such
    operator once. Outside of the block such an operator raises `RuleError`.
    """
    with saying("replicate unknown"):
        yield

"""Distributed tensors from nothing: `zeros`, `ones`, `empty`, `full`, `rand`, `randn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.placement import Partial, Placement, Replicate
from shardwise.sharding.spec import Spec, TensorMeta, normalize
from shardwise.tensor.dtensor import DTensor, mesh_or_current
from shardwise.tensor.rng import stream

Placements = Sequence[Placement]
Size = int | Sequence[int]


def zeros(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A distributed tensor of zeros; ``size`` is global. Raises `PlacementError` if the placements do not fit.

    >>> import shardwise, shardwise.sim
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     return tuple(shardwise.zeros(4, 3, device_mesh=mesh, placements=[shardwise.Shard(0)]).to_local().shape)
    >>> shardwise.sim.run(body, 2)
    [(2, 3), (2, 3)]
    """
    return _filled(size, 0, dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A distributed tensor of ones; ``size`` is global. Raises `PlacementError` if the placements do not fit."""
    return _filled(size, 1, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Size,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A distributed tensor of ``fill_value``; ``size`` is global. Raises `PlacementError` as `zeros` does."""
    inferred = dtype or torch.full((), fill_value).dtype
    return _filled((size,), fill_value, inferred, layout, requires_grad, device_mesh, placements)


def empty(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """A distributed tensor without values; ``size`` is global. Raises `PlacementError` as `zeros` does."""
    return _filled(size, None, dtype, layout, requires_grad, device_mesh, placements)


def rand(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Uniform random numbers in [0, 1), the same as ``torch.rand`` with this seed gives on one device."""
    return _drawn(torch.rand, size, dtype, layout, requires_grad, device_mesh, placements)


def randn(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Standard normal random numbers, the same as ``torch.randn`` with this seed gives on one device."""
    return _drawn(torch.randn, size, dtype, layout, requires_grad, device_mesh, placements)


def _spec(size: tuple[Size, ...], dtype: torch.dtype | None, mesh: DeviceMesh, placements: Placements | None) -> Spec:
    flat = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    shape = tuple(int(length) for length in flat)  # type: ignore[arg-type]
    own = normalize(tuple(placements or [Replicate()] * mesh.ndim), mesh, len(shape))
    return Spec(mesh, own, TensorMeta.contiguous(shape, dtype or torch.get_default_dtype()))


def _filled(
    size: tuple[Size, ...],
    value: float | None,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
) -> DTensor:
    mesh = mesh_or_current(device_mesh)
    spec = _spec(size, dtype, mesh, placements)
    coordinate = mesh.get_coordinate()
    local = torch.empty(spec.local_shape(coordinate), dtype=spec.meta.dtype, layout=layout, device=mesh.device_type)
    if value is not None:
        local.fill_(value)
        _share(local, spec, coordinate)
    return DTensor._wrap(local, spec, requires_grad)


def _share(local: torch.Tensor, spec: Spec, coordinate: tuple[int, ...] | None) -> None:
    """Where a sum, product or norm is pending, only the first rank of the axis holds the value."""
    for placement, index in zip(spec.placements, coordinate or (), strict=False):
        if isinstance(placement, Partial) and index > 0 and placement.reduce_op in ("sum", "product", "bxor", "norm"):
            local.fill_(1 if placement.reduce_op == "product" else 0)


def _drawn(
    draw: Callable[..., torch.Tensor],
    size: tuple[Size, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
) -> DTensor:
    mesh = mesh_or_current(device_mesh)
    spec = _spec(size, dtype, mesh, placements)
    coordinate = mesh.get_coordinate()
    made: Any = torch.empty(spec.local_shape(coordinate), dtype=spec.meta.dtype, device=mesh.device_type)
    if coordinate is not None:
        with stream(mesh, made.device):
            whole = draw(spec.shape, dtype=spec.meta.dtype, layout=layout, device=made.device)
        made = spec.take(whole, coordinate).clone()
        _share(made, spec, coordinate)
    return DTensor._wrap(made, spec, requires_grad)

"""What the outputs of views look like: shapes and strides follow from those of what they are views of."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from shardwise.sharding.spec import TensorMeta, packed

Op = torch._ops.OpOverload
Args = tuple[object, ...]
Kwargs = dict[str, object]
Law = Callable[[Op, Args, Kwargs], tuple[TensorMeta | None, ...] | None]


def _of_dims(law: Callable[..., tuple[list[int], list[int]] | None]) -> Law:
    """The law of a view from what it does to the sizes and strides of one tensor; None where torch is to be asked."""

    def view(op: Op, args: Args, kwargs: Kwargs) -> tuple[TensorMeta | None, ...] | None:
        own = args[0]
        if not isinstance(own, TensorMeta) or kwargs:
            return None
        found = law(own.shape, own.stride, *args[1:])
        return None if found is None else (TensorMeta(tuple(found[0]), tuple(found[1]), own.dtype),)

    return view


Sizes = tuple[int, ...]
Dims = tuple[list[int], list[int]] | None


def _view(shape: Sizes, stride: Sizes, size: Sizes) -> Dims:
    if stride != packed(shape) or 0 in shape or any(entry == 0 or entry < -1 for entry in size):
        return None
    count, known, open_dims = prod(shape), 1, 0
    for entry in size:
        if entry == -1:
            open_dims += 1
        else:
            known *= entry
    if open_dims > 1 or count % known or (not open_dims and known != count):
        return None
    after = [count // known if entry == -1 else entry for entry in size]
    return after, list(packed(after))


def _permute(shape: Sizes, stride: Sizes, dims: Sizes) -> Dims:
    ndim = len(shape)
    order = [dim + ndim if dim < 0 else dim for dim in dims]
    if sorted(order) != list(range(ndim)):
        return None
    return [shape[dim] for dim in order], [stride[dim] for dim in order]


def _transpose(shape: Sizes, stride: Sizes, one: int, other: int) -> Dims:
    ndim = len(shape)
    if not (-ndim <= one < ndim and -ndim <= other < ndim):
        return None
    sizes, steps = list(shape), list(stride)
    sizes[one], sizes[other] = sizes[other], sizes[one]
    steps[one], steps[other] = steps[other], steps[one]
    return sizes, steps


def _t(shape: Sizes, stride: Sizes) -> Dims:
    return (list(shape[::-1]), list(stride[::-1])) if len(shape) <= 2 else None


def _unsqueeze(shape: Sizes, stride: Sizes, dim: int) -> Dims:
    ndim = len(shape)
    if not -ndim - 1 <= dim <= ndim:
        return None
    dim %= ndim + 1
    step = shape[dim] * stride[dim] if dim < ndim else 1
    return [*shape[:dim], 1, *shape[dim:]], [*stride[:dim], step, *stride[dim:]]


def _select(shape: Sizes, stride: Sizes, dim: int, index: int) -> Dims:
    ndim = len(shape)
    if not -ndim <= dim < ndim or not -shape[dim] <= index < shape[dim]:
        return None
    dim %= ndim
    return [*shape[:dim], *shape[dim + 1 :]], [*stride[:dim], *stride[dim + 1 :]]


def _slice(
    shape: Sizes, stride: Sizes, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Dims:
    if not -len(shape) <= dim < len(shape) or step < 1:
        return None
    sizes, steps = list(shape), list(stride)
    sizes[dim] = len(range(shape[dim])[slice(start, end, step)])
    steps[dim] *= step
    return sizes, steps


aten = torch.ops.aten
VIEWS: dict[Op, Law] = {
    aten._unsafe_view.default: _of_dims(_view),
    aten.permute.default: _of_dims(_permute),
    aten.select.int: _of_dims(_select),
    aten.slice.Tensor: _of_dims(_slice),
    aten.t.default: _of_dims(_t),
    aten.transpose.int: _of_dims(_transpose),
    aten.unsqueeze.default: _of_dims(_unsqueeze),
    aten.view.default: _of_dims(_view),
}

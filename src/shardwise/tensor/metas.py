"""What the outputs of an operator look like: by torch's own kernels on the ``meta`` device, or quicker.

Many of torch's meta kernels are written in Python and take milliseconds. Where the answer follows from the shapes by a
short law, the law is here; where it does not (other strides, mixed dtypes), torch is asked. A test compares every law
with torch on the operator database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch._prims_common import suggest_memory_format

from shardwise.mesh.world import current_world
from shardwise.sharding.spec import TensorMeta
from shardwise.tensor.signature import signature
from shardwise.tensor.view_metas import VIEWS

Op = torch._ops.OpOverload
Args = tuple[object, ...]
Kwargs = dict[str, object]
Metas = tuple[TensorMeta | None, ...]

Law = Callable[[Op, Args, Kwargs], Metas | None]

DTYPES = 4096  # how many dtypes of results a rank remembers


def output_metas(op: Op, args: Args, kwargs: Kwargs) -> Metas:
    """The metas of the outputs of ``op``, `TensorMeta` standing for tensors among its arguments."""
    if signature(op).returns in ("other", "nothing"):
        return ()
    law = LAWS.get(op) or (_pointwise if torch.Tag.pointwise in op.tags else None)
    found = None if law is None else law(op, args, kwargs)
    return ask_torch(op, args, kwargs) if found is None else found


def ask_torch(op: Op, args: Args, kwargs: Kwargs) -> Metas:
    """The same by torch's own meta kernels, mended where they forget in which order dims lie in memory."""
    given = {name: _meta(argument) for name, argument in kwargs.items()}
    if given.get("device") is not None:
        given["device"] = torch.device("meta")
    given.pop("pin_memory", None)
    results = op(*(_meta(argument) for argument in args), **given)
    found = [results] if isinstance(results, torch.Tensor) else results
    metas = tuple(TensorMeta.of(result) if isinstance(result, torch.Tensor) else None for result in found)
    mended = MENDED.get(op)
    return metas if mended is None or metas[0] is None else (mended(args, metas[0]), *metas[1:])


def _meta(argument: object) -> object:
    if isinstance(argument, TensorMeta):
        return torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype, device="meta")
    if isinstance(argument, (list, tuple)):
        return [_meta(item) for item in argument]
    if isinstance(argument, torch.Generator):
        return None
    return argument


# --- what meta kernels forget


def _in_format(meta: TensorMeta, memory_format: torch.memory_format) -> TensorMeta:
    like = torch.empty(meta.shape, device="meta", memory_format=memory_format)
    return TensorMeta(meta.shape, like.stride(), meta.dtype)


def _format_of(argument: object) -> torch.memory_format:
    tensor = _meta(argument)
    assert isinstance(tensor, torch.Tensor), argument
    return suggest_memory_format(tensor)


def _format_kept(args: Args, meta: TensorMeta) -> TensorMeta:
    return _in_format(meta, _format_of(args[0]))


def _rolled(args: Args, meta: TensorMeta) -> TensorMeta:
    return _format_kept(args, meta) if len(args) > 2 and args[2] else meta  # without dims, it is flattened


def _convolved(args: Args, meta: TensorMeta) -> TensorMeta:
    last = torch.channels_last in map(_format_of, args[:2])
    images = len(meta.shape) == 4
    return _in_format(meta, torch.channels_last) if last and images else meta


def _powered(args: Args, meta: TensorMeta) -> TensorMeta:
    truths = isinstance(args[0], TensorMeta) and args[0].dtype is torch.bool and isinstance(args[1], bool)
    return TensorMeta(meta.shape, meta.stride, torch.bool) if truths else meta


def _totalled(args: Args, meta: TensorMeta) -> TensorMeta:
    if len(args) < 2 or args[1] not in ([], ()):
        return meta
    keeps = len(args) > 2 and args[2]  # no dims mean all of them
    return TensorMeta.contiguous((1,) * len(meta.shape) if keeps else (), meta.dtype)


def _iterated(args: Args, meta: TensorMeta) -> TensorMeta:
    stride = ask_torch(torch.ops.aten.add.Tensor, args[:2], {})[0]
    return meta if stride is None else TensorMeta(meta.shape, stride.stride, meta.dtype)


# --- laws


def _pointwise(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    """One output, broadcast from packed operands, one of which has its shape already: packed as well."""
    operands = [item for item in args if item.__class__ is TensorMeta]
    if kwargs:
        operands += [item for item in kwargs.values() if item.__class__ is TensorMeta]
        if kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format or kwargs.get("layout"):
            return None
    if not operands or signature(op).returns != "tensor":
        return None
    largest = None
    for meta in operands:
        if meta.is_packed:
            if largest is None or (meta.shape != largest.shape and _extent(meta) > _extent(largest)):
                largest = meta
        elif any(meta.stride):  # one element spread over all says nothing of an order
            return None
    if largest is None:
        return None
    for meta in operands:
        if meta.shape != largest.shape and not _broadcasts(meta.shape, largest.shape):
            return None
    dtype = _dtype(op, args, kwargs)
    return None if dtype is None else (TensorMeta(largest.shape, largest.stride, dtype),)


def _extent(meta: TensorMeta) -> tuple[int, int]:
    return len(meta.shape), prod(meta.shape)


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    if len(shape) > len(whole):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(whole), strict=False))


def _dtype(op: Op, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The dtype of the result, by the operands' dtypes, which of them have no dims, and the other arguments."""
    try:
        key = (
            op,
            torch.get_default_dtype(),
            _kinds(args),
            tuple((name, _kinds((item,))) for name, item in kwargs.items()),
        )
        known = current_world().memory.setdefault("result dtypes", {})
        found: torch.dtype | None = known.get(key)
    except TypeError:  # an argument that cannot be remembered
        return None
    if found is None:
        found = _tried_dtype(op, args, kwargs)
        if found is None:
            return None
        if len(known) >= DTYPES:
            known.clear()
        known[key] = found
    return found


def _tried_dtype(op: Op, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The dtype that the operator gives for tensors of one element.

    On the CPU, if it has a kernel for them: many meta kernels of pointwise operators load all of torch.compile first.
    """
    if not signature(op).is_random:
        given = {name: _one_element(item) for name, item in kwargs.items() if name not in ("device", "pin_memory")}
        try:
            result = op(*[_one_element(item) for item in args], **given)
        except (RuntimeError, NotImplementedError, ZeroDivisionError):
            result = None
        if isinstance(result, torch.Tensor):
            return result.dtype
    answer = ask_torch(op, args, kwargs)[0]
    return None if answer is None else answer.dtype


def _one_element(argument: object) -> object:
    if isinstance(argument, TensorMeta):
        return torch.ones((1,) * len(argument.shape), dtype=argument.dtype, device="cpu")
    if isinstance(argument, (list, tuple)):
        return [_one_element(item) for item in argument]
    return argument


def _kinds(args: Sequence[object]) -> tuple[object, ...]:
    return tuple(
        (item.dtype, not item.shape)
        if isinstance(item, TensorMeta)
        else (type(item), *_kinds(item))
        if isinstance(item, (list, tuple))
        else type(item)
        if isinstance(item, (int, float, complex))
        else item
        for item in args
    )


def _one_dtype(metas: Sequence[object]) -> torch.dtype | None:
    """The floating dtype that all tensors share, if they do and are contiguous."""
    found = [meta for meta in metas if isinstance(meta, TensorMeta)]
    dtypes = {meta.dtype for meta in found}
    alike = (
        len(dtypes) == 1 and found[0].dtype in (torch.float32, torch.float64) and all(meta.is_packed for meta in found)
    )
    return found[0].dtype if alike else None


def _like_first(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    first = args[0]
    if not isinstance(first, TensorMeta) or kwargs or _one_dtype(args) is None or True in args[2:]:
        return None
    return (first,)


def _cat(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    items = args[0]
    dim = args[1] if len(args) > 1 else 0
    if not isinstance(items, (list, tuple)) or not isinstance(dim, int) or kwargs or not items:
        return None
    dtype = _one_dtype(items)
    shapes = [item.shape for item in items if isinstance(item, TensorMeta)]
    if dtype is None or len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        return None
    dim %= len(shapes[0])
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1:
        return None
    joined = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    return (TensorMeta.contiguous(joined, dtype),)


def _layer_norm(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, normalized = args[0], args[1]
    dtype = _one_dtype(args)
    if dtype is None or not isinstance(own, TensorMeta) or not isinstance(normalized, (list, tuple)):
        return None
    kept = len(own.shape) - len(normalized)
    statistics = TensorMeta.contiguous((*own.shape[:kept], *(1 for _ in normalized)), dtype)
    return own, statistics, statistics


def _layer_norm_backward(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, weight, bias, mask = args[1], args[5], args[6], args[7]
    if _one_dtype(args) is None or not isinstance(mask, (list, tuple)):
        return None
    wanted = zip((own, weight, bias), mask, strict=True)
    return tuple(meta if asked and isinstance(meta, TensorMeta) else None for meta, asked in wanted)


def _product(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    """Products of matrices, with a bias before them or without: rows of the first matrix, columns of the second."""
    left, right = args[-2:] if len(args) < 4 else args[1:3]
    if not isinstance(left, TensorMeta) or not isinstance(right, TensorMeta) or left.dtype is not right.dtype or kwargs:
        return None
    ranks = {len(left.shape), len(right.shape)}
    if ranks != {2} and ranks != {3}:
        return None
    if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
        return None
    return (TensorMeta.contiguous((*left.shape[:-1], right.shape[-1]), left.dtype),)


def _layer(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, weight = args[:2]
    dtype = _one_dtype(args)
    if dtype is None or not isinstance(own, TensorMeta) or not isinstance(weight, TensorMeta):
        return None
    if len(weight.shape) != 2 or own.shape[-1:] != weight.shape[1:]:
        return None
    bias = args[2] if len(args) > 2 else None
    if isinstance(bias, TensorMeta) and bias.shape != weight.shape[:1]:
        return None
    return (TensorMeta.contiguous((*own.shape[:-1], weight.shape[0]), dtype),)


def _layer_backward(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, grad, weight, mask = args
    if not isinstance(own, TensorMeta) or not isinstance(grad, TensorMeta) or not isinstance(weight, TensorMeta):
        return None
    dtype = own.dtype
    if not isinstance(mask, (list, tuple)):
        return None
    wanted = zip((own.shape, weight.shape, grad.shape[-1:]), mask, strict=True)
    return tuple(TensorMeta.contiguous(shape, dtype) if asked else None for shape, asked in wanted)


def _reduction(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own = args[0]
    dims = args[1] if len(args) > 1 else None
    keeps = args[2] if len(args) > 2 else False
    if not isinstance(own, TensorMeta) or not own.is_packed or not own.shape or 0 in own.shape:
        return None
    ndim = len(own.shape)
    given = (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, (list, tuple)) else ()
    if any(not -ndim <= dim < ndim for dim in given) or not isinstance(keeps, bool):
        return None
    gone = {dim % ndim for dim in given or range(ndim)}
    if given and len(gone) != len(given):
        return None
    dtype = _dtype(op, args, kwargs)
    left = [1 if dim in gone else size for dim, size in enumerate(own.shape) if keeps or dim not in gone]
    return None if dtype is None else (TensorMeta.contiguous(left, dtype),)


def _embedding(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    table, indices = args[:2]
    if not isinstance(table, TensorMeta) or not isinstance(indices, TensorMeta) or len(table.shape) != 2:
        return None
    if not indices.is_packed or not table.is_packed:
        return None
    return (TensorMeta.contiguous((*indices.shape, table.shape[1]), table.dtype),)


def _nll_loss(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    scores, reduction = args[0], args[3]
    if not isinstance(scores, TensorMeta) or _one_dtype((scores,)) is None:
        return None
    scalar = TensorMeta.contiguous((), scores.dtype)
    rows = scores.shape[: len(scores.shape) - 1]
    return (TensorMeta.contiguous(rows, scores.dtype) if reduction == 0 else scalar), scalar


def _loss(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    """The losses of all elements, or one number."""
    whole, place = _pointwise(op, args, kwargs), signature(op).names.index("reduction")
    if whole is None or whole[0] is None:
        return None
    reduction = args[place] if len(args) > place else kwargs.get("reduction", 1)
    return whole if reduction == 0 else (TensorMeta.contiguous((), whole[0].dtype),)


def _gather(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, index = args[0], args[2]
    if not isinstance(own, TensorMeta) or not isinstance(index, TensorMeta):
        return None
    return (TensorMeta.contiguous(index.shape, own.dtype),)


def _group_norm(op: Op, args: Args, kwargs: Kwargs) -> Metas | None:
    own, batch, groups = args[0], args[3], args[6]
    dtype = _one_dtype(args)
    if dtype is None or not isinstance(own, TensorMeta) or not isinstance(batch, int) or not isinstance(groups, int):
        return None
    statistics = TensorMeta.contiguous((batch, groups), dtype)
    return own, statistics, statistics


aten = torch.ops.aten
MENDED: dict[Op, Callable[[Args, TensorMeta], TensorMeta]] = {
    aten.convolution.default: _convolved,
    aten.roll.default: _rolled,
    aten.nansum.default: _totalled,
    aten.pow.Tensor_Scalar: _powered,
    aten.copysign.Tensor: _iterated,
    aten.floor_divide.default: _iterated,
    aten.div.Tensor_mode: _iterated,
    **dict.fromkeys(
        (
            aten.reflection_pad2d.default,
            aten.reflection_pad3d.default,
            aten.replication_pad2d.default,
            aten.replication_pad3d.default,
            aten.pixel_shuffle.default,
            aten.channel_shuffle.default,
            aten.native_channel_shuffle.default,
            aten.max_unpool2d.default,
        ),
        _format_kept,
    ),
}

LAWS: dict[Op, Law] = {
    aten.addmm.default: _product,
    aten.bmm.default: _product,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.linear.default: _layer,
    aten.linear_backward.default: _layer_backward,
    aten.mean.dim: _reduction,
    aten.mm.default: _product,
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.sum.dim_IntList: _reduction,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _like_first),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _like_first),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default, aten.tril.default, aten.triu.default), _like_first),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.logsumexp.default), _reduction),
    **dict.fromkeys((aten.mean.default, aten.sum.default, aten.any.default, aten.all.default), _reduction),
    **dict.fromkeys((aten.any.dim, aten.all.dim), _reduction),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss),
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default), _loss),
    aten.soft_margin_loss.default: _loss,
    aten.multi_margin_loss_backward.default: lambda op, args, kwargs: _like_first(op, (args[1],), {}),
    aten.multilabel_margin_loss_backward.default: lambda op, args, kwargs: _like_first(op, (args[1],), {}),
    aten.nll_loss_backward.default: lambda op, args, kwargs: _like_first(op, (args[1],), kwargs),
    **VIEWS,
}

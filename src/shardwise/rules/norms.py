"""Normalisations: the dims over which statistics are taken are whole, or their moments are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch._prims_common import suggest_memory_format

from shardwise.rules.empty import unless_empty, zeros
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.placement import Partial, Replicate
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Run = Callable[..., object]
Sizes = Sequence[int]
MaybeTensor = torch.Tensor | None
Three = tuple[MaybeTensor, MaybeTensor, MaybeTensor]


def _split(x: TensorMeta, normalized_shape: Sizes) -> tuple[str, str, str]:
    """The batch dims, the normalized dims, and what the statistics have in place of the latter."""
    normalized = len(normalized_shape)
    batch = " ".join(f"b{dim}" for dim in range(len(x.shape) - normalized))
    return batch, " ".join(f"[n{dim}]" for dim in range(normalized)), " ".join(["1"] * normalized)


def layer_norm(x: TensorMeta, normalized_shape: Sizes, weight: object, bias: object, eps: float) -> str:
    batch, dims, ones = _split(x, normalized_shape)
    return f"f({batch} {dims}, {dims}, {dims}) -> {batch} {dims}, {batch} {ones}, {batch} {ones}"


def layer_norm_backward(grad: object, x: TensorMeta, normalized_shape: Sizes, *_: object) -> str:
    batch, dims, ones = _split(x, normalized_shape)
    left = [f"{batch} {dims}", f"{batch} {dims}", f"{batch} {ones}", f"{batch} {ones}", dims, dims]
    return f"{' / '.join(left)} -> {batch} {dims}, {dims}, {dims}"


def rms_norm(x: TensorMeta, normalized_shape: Sizes, weight: object, eps: float | None) -> str:
    batch, dims, ones = _split(x, normalized_shape)
    return f"f({batch} {dims}, {dims}) -> {batch} {dims}, {batch} {ones}"


def rms_norm_backward(grad: object, x: TensorMeta, normalized_shape: Sizes, *_: object) -> str:
    batch, dims, ones = _split(x, normalized_shape)
    return f"{batch} {dims} / {batch} {dims} / {batch} {ones} / {dims} -> {batch} {dims}, {dims}"


# --- groups of channels


def _inner(x: TensorMeta) -> str:
    return " ".join(f"[x{dim}]" for dim in range(len(x.shape) - 2))


def group_norm(x: TensorMeta, *_: object) -> str:
    dims = f"n (g [c]) {_inner(x)}"
    return f"f({dims}, (g [c]), (g [c])) -> {dims}, n g, n g"


def group_norm_backward(grad: object, x: TensorMeta, *_: object) -> str:
    dims = f"n (g [c]) {_inner(x)}"
    return f"{dims} / {dims} / n g / n g / (g [c]) -> {dims}, (g [c]), (g [c])"


def _group_norm_local(call: Call, placing: Placing) -> Run:
    return _counted(call, placing, sizes_at=3, statistics=placing.outputs[1])


def _group_norm_backward_local(call: Call, placing: Placing) -> Run:
    return _counted(call, placing, sizes_at=5, statistics=placing.inputs[2])


def _counted(call: Call, placing: Placing, sizes_at: int, statistics: object) -> Run:
    """The call with the local N, C, HxW and number of groups."""
    batch, channels, *space = placing.input_shape()
    shape = statistics.local_shape(placing.coordinate)  # type: ignore[attr-defined]
    sizes = (batch, channels, prod(space), shape[1])
    after = call.args[sizes_at + 4 :]
    if batch * channels == 0:
        return zeros(call, placing)
    # The kernels take their input to be packed.
    return lambda *args: call.op(*(_packed(arg) for arg in args[:sizes_at]), *sizes, *after)


def _packed(arg: object) -> object:
    return arg.contiguous() if isinstance(arg, torch.Tensor) else arg


# --- batches


def batch_norm(
    x: TensorMeta,
    weight: object,
    bias: object,
    running_mean: object,
    running_var: object,
    training: bool,
    momentum: float,
    eps: float,
) -> Rule:
    """With given statistics each element stands for itself; those of a batch are taken over all ranks."""
    return Rule(expand=batch_norm_training if training or running_mean is None else batch_norm_given)


def _space(x: TensorMeta) -> str:
    return " ".join(f"x{dim}" for dim in range(len(x.shape) - 2))


def _statistics_dims(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(statistic: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = aten.view.default(statistic, [1, -1, *[1] * (like.dim() - 2)])
    return found


def _in_format(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y`` in the memory format that ``x`` suggests, which may be another than that of ``x``."""
    return y if x.is_contiguous() else y.contiguous(memory_format=suggest_memory_format(x))


def _settled(moments: torch.Tensor) -> torch.Tensor:
    """Moments that are used more than once, reduced over the ranks once: what is pending becomes whole."""
    placements = getattr(moments, "placements", ())
    if not any(isinstance(role, Partial) for role in placements):
        return moments
    roles = [Replicate() if isinstance(role, Partial) else role for role in placements]
    found: torch.Tensor = moments.redistribute(placements=roles)  # type: ignore[attr-defined]
    return found


def batch_norm_training(
    x: torch.Tensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Three:
    """``native_batch_norm`` by the moments of the whole batch; the running statistics are brought up to date."""
    dims = _statistics_dims(x)
    wide = x.float() if x.dtype.itemsize < 4 else x
    mean = _settled(aten.mean.dim(wide, dims))
    centred = wide - _per_channel(mean, x)
    var = _settled(aten.mean.dim(centred * centred, dims))
    inverse = aten.rsqrt.default(var + eps)
    result = centred * _per_channel(inverse, x)
    if weight is not None:
        result = result * _per_channel(weight, x)
    if bias is not None:
        result = result + _per_channel(bias, x)
    _follow(running_mean, mean, momentum)
    count = prod(x.shape[dim] for dim in dims)
    _follow(running_var, var * (count / max(count - 1, 1)), momentum)
    return _in_format(result.to(x.dtype), x), mean, inverse


def batch_norm_given(
    x: torch.Tensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Three:
    """``native_batch_norm`` by given statistics: one scale and one shift for each channel.

    Nothing is saved for the gradient; on the CPU torch says so by tensors without elements.
    """
    scale = aten.rsqrt.default(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    result = aten.addcmul.default(_per_channel(shift, x), x, _per_channel(scale, x))
    saved = [aten.new_zeros.default(running_mean, [0 if x.device.type == "cpu" else x.shape[1]]) for _ in range(2)]
    return _in_format(result.to(x.dtype), x), saved[0], saved[1]


def _follow(running: MaybeTensor, new: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running * (1 - momentum) + new.to(running.dtype) * momentum)


def batch_norm_backward(
    grad: TensorMeta,
    x: TensorMeta,
    weight: object,
    running_mean: object,
    running_var: object,
    save_mean: object,
    save_invstd: object,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> str | Rule:
    if train or running_mean is None:
        return Rule(expand=batch_norm_training_backward)
    dims = f"n c {_space(x)}"
    return f"{dims} / {dims} / c / c / c / _ / _ -> {dims}, c, c"


def batch_norm_training_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Three:
    """The gradients of `batch_norm_training`: the mean gradient and its part along the normal input are taken out."""
    dims = _statistics_dims(x)
    count = prod(x.shape[dim] for dim in dims)
    normal = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
    sums = [aten.sum.dim_IntList(grad, dims), aten.sum.dim_IntList(grad * normal, dims)]
    bias_grad, weight_grad = aten.unbind.int(_settled(aten.stack.default(sums)))
    centred = grad - _per_channel(bias_grad / count, x) - normal * _per_channel(weight_grad / count, x)
    scale = inverse if weight is None else inverse * weight
    x_grad = centred * _per_channel(scale, x)
    kind = mean.dtype if weight is None else weight.dtype
    results = (x_grad.to(x.dtype), weight_grad.to(kind), bias_grad.to(kind))
    return tuple(result if wanted else None for result, wanted in zip(results, output_mask, strict=True))  # type: ignore[return-value]


def without_running(x: TensorMeta, weight: object, bias: object, training: bool, momentum: float, eps: float) -> Rule:
    """No statistics are kept, so they are those of the batch."""

    def expand(x: torch.Tensor, weight: MaybeTensor, bias: MaybeTensor, *_: object) -> Three:
        return batch_norm_training(x, weight, bias, None, None, True, momentum, eps)

    return Rule(expand=expand)


def fused_batch_norm(
    x: torch.Tensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    *options: float,
) -> tuple[MaybeTensor, ...]:
    """Batch norms that return a fourth tensor, their own memory of the forward pass; ours needs none."""
    momentum, eps = options[-2:]
    three = batch_norm_training(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *three, aten.new_empty.default(x, [0], dtype=torch.uint8)


def fused_batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: torch.Tensor,
) -> Three:
    return batch_norm_training_backward(
        grad, x, weight, running_mean, running_var, mean, inverse, update, eps, output_mask
    )


def cudnn_batch_norm_backward(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
    reserve: torch.Tensor,
) -> Three:
    return batch_norm_training_backward(grad, x, weight, None, None, mean, inverse, True, eps, [True] * 3)


RULES = {
    "native_layer_norm": Rule(layer_norm, local=unless_empty),
    "native_layer_norm_backward": Rule(layer_norm_backward, local=unless_empty),
    "_fused_rms_norm": Rule(rms_norm, local=unless_empty),
    "_fused_rms_norm_backward": Rule(rms_norm_backward, local=unless_empty),
    "native_group_norm": Rule(group_norm, local=_group_norm_local),
    "native_group_norm_backward": Rule(group_norm_backward, local=_group_norm_backward_local),
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit.no_stats": without_running,
    "_batch_norm_with_update": Rule(expand=fused_batch_norm),
    "cudnn_batch_norm": Rule(expand=fused_batch_norm),
    "batch_norm_backward": Rule(expand=fused_batch_norm_backward),
    "cudnn_batch_norm_backward": Rule(expand=cudnn_batch_norm_backward),
    "native_batch_norm_backward": Rule(batch_norm_backward, local=unless_empty),
}

"""Operators of neural networks: softmax, dropout, convolution, pooling, resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.rules.empty import unless_empty, zeros
from shardwise.rules.pattern import along, text
from shardwise.rules.rule import Call, Placing, Rule, called
from shardwise.sharding.spec import TensorMeta

Run = Callable[..., object]
Sizes = Sequence[int]


# --- along one dim


def softmax(x: TensorMeta, dim: int, *_: object) -> str:
    dims = text(along(x, [dim]))
    return f"f({dims}) -> {dims}"


def softmax_backward(grad: TensorMeta, output: TensorMeta, dim: int, *_: object) -> str:
    dims = text(along(grad, [dim]))
    return f"{dims} / {dims} -> {dims}"


def glu(x: TensorMeta, dim: int = -1) -> str:
    return softmax(x, dim)


def glu_backward(grad: TensorMeta, x: TensorMeta, dim: int) -> str:
    return softmax_backward(grad, x, dim)


# --- convolution


class Kernel:
    """The dims of a convolution as text; with groups, channels are ``(g c)`` in and ``(g o)`` out."""

    def __init__(self, x: TensorMeta, transposed: bool, groups: int, *, inputs: str = "c") -> None:
        space = range(len(x.shape) - 2)
        size = " ".join(f"[x{dim}]" for dim in space)
        kernel = " ".join(f"[k{dim}]" for dim in space)
        image = " ".join(f"[y{dim}]" for dim in space)
        into, out = (f"(g {inputs})", "(g o)") if groups > 1 else (inputs, "o")
        self.x = f"n {into} {size}"
        self.weight = f"{into} o {kernel}" if transposed else f"{out} {inputs} {kernel}"
        self.bias = out
        self.y = f"n {out} {image}"


def convolution(
    x: TensorMeta,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> str:
    k = Kernel(x, transposed, groups)
    return f"{k.x} * {k.weight} + {k.bias} -> {k.y}"


def convolution_backward(
    grad: TensorMeta,
    x: TensorMeta,
    weight: TensorMeta,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> str:
    # The bias' gradient knows no input channels: cutting them would count it once a rank.
    k = Kernel(x, transposed, groups, inputs="[c]" if output_mask[2] else "c")
    return f"{k.y} / {k.x} / {k.weight} -> {k.x}, {k.weight}, {k.bias}"


def _convolution_local(call: Call, placing: Placing) -> Run:
    x, weight, y = placing.input_shape(0), placing.input_shape(1), placing.output_shape()
    if 0 in x[:2] or 0 in weight[:2] or 0 in y:
        return _only_bias(y)
    groups = _groups(call, x, weight, y)
    rest = (*call.args[3:8], groups)
    return lambda x, weight, bias, *_: call.op(x, weight, bias, *rest)


def _groups(call: Call, x: Sizes, weight: Sizes, y: Sizes) -> int:
    """How many groups the local channels make."""
    if call.args[-1 if len(call.args) == 9 else -2] == 1:
        return 1
    transposed = call.args[6 if len(call.args) == 9 else 7]
    return y[1] // weight[1] if transposed else x[1] // weight[1]


def _only_bias(shape: Sizes) -> Run:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: object) -> torch.Tensor:
        zeros = x.new_zeros(shape)
        return zeros if bias is None else zeros + bias.reshape(-1, *[1] * (len(shape) - 2))

    return run


def _convolution_backward_local(call: Call, placing: Placing) -> Run:
    y, x, weight = (placing.input_shape(at) for at in range(3))
    if 0 in x[:2] or 0 in weight[:2] or 0 in y:
        return zeros(call, placing)
    bias_sizes = None if call.args[3] is None else [y[1]]
    rest = (bias_sizes, *call.args[4:9], _groups(call, x, weight, y), call.args[10])
    return lambda grad, x, weight, *_: call.op(grad, x, weight, *rest)


# --- over space: pooling, resampling, padding by what is inside


def spatial(ndim: int, form: str) -> Callable[..., str]:
    """An operator over the last ``ndim`` dims; ``form`` says how operands ``{x}`` and results ``{y}`` are joined."""

    def meaning(x: TensorMeta, *_: object) -> str:
        batch = " ".join(f"b{dim}" for dim in range(len(x.shape) - ndim))
        inside = " ".join(f"[x{dim}]" for dim in range(ndim))
        outside = " ".join(f"[y{dim}]" for dim in range(ndim))
        return form.format(x=f"{batch} {inside}", y=f"{batch} {outside}")

    return meaning


def _resized_local(call: Call, placing: Placing) -> Run:
    """The gradients of resampling are told the shape of their result."""
    if 0 in placing.input_shape():
        return zeros(call, placing)
    shape, run = placing.output_shape(), called(call.op)
    return lambda grad, output_size, input_size, *rest: run(grad, output_size, shape, *rest)


def over(ndim: int, form: str) -> Rule:
    return Rule(spatial(ndim, form), local=unless_empty)


LINEAR, LINEAR_BACKWARD, SAVED_BACKWARD = "{x} -> {y}", "{x} -> {y}", "{x} / {y} -> {y}"
PICKS, PICKS_BACKWARD = "f({x}) -> {y}, {y}", "{x} / {y} / {x} -> {y}"

POOLS = {
    "avg_pool2d": over(2, LINEAR),
    "avg_pool2d_backward": over(2, SAVED_BACKWARD),
    "avg_pool3d": over(3, LINEAR),
    "avg_pool3d_backward": over(3, SAVED_BACKWARD),
    "max_pool2d_with_indices": over(2, PICKS),
    "max_pool2d_with_indices_backward": over(2, PICKS_BACKWARD),
    "max_pool3d_with_indices": over(3, PICKS),
    "max_pool3d_with_indices_backward": over(3, PICKS_BACKWARD),
    "_adaptive_avg_pool2d": over(2, LINEAR),
    "_adaptive_avg_pool2d_backward": over(2, SAVED_BACKWARD),
    "_adaptive_avg_pool3d": over(3, LINEAR),
    "_adaptive_avg_pool3d_backward": over(3, SAVED_BACKWARD),
    "adaptive_max_pool2d": over(2, PICKS),
    "adaptive_max_pool2d_backward": over(2, PICKS_BACKWARD),
    "adaptive_max_pool3d": over(3, PICKS),
    "adaptive_max_pool3d_backward": over(3, PICKS_BACKWARD),
}

PADS = {
    f"{kind}_pad{ndim}d{suffix}": over(ndim, form)
    for kind in ("reflection", "replication")
    for ndim in (1, 2, 3)
    for suffix, form in (("", LINEAR), ("_backward", SAVED_BACKWARD))
}

RESAMPLING = {
    f"{name}{suffix}": Rule(spatial(ndim, LINEAR), local=_resized_local if suffix else unless_empty)
    for name, ndim in {
        "upsample_nearest1d": 1,
        "upsample_nearest2d": 2,
        "upsample_nearest3d": 3,
        "_upsample_nearest_exact1d": 1,
        "_upsample_nearest_exact2d": 2,
        "_upsample_nearest_exact3d": 3,
        "upsample_linear1d": 1,
        "upsample_bilinear2d": 2,
        "upsample_bicubic2d": 2,
        "upsample_trilinear3d": 3,
        "_upsample_bilinear2d_aa": 2,
        "_upsample_bicubic2d_aa": 2,
    }.items()
    for suffix in ("", "_backward")
}

RULES = {
    "_softmax": softmax,
    "_log_softmax": softmax,
    "_safe_softmax": softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": softmax_backward,
    "glu": glu,
    "glu_backward": glu_backward,
    "native_dropout": "f(...) -> ..., ...",
    "convolution": Rule(convolution, local=_convolution_local),
    "convolution_backward": Rule(convolution_backward, local=_convolution_backward_local),
    **POOLS,
    **PADS,
    **RESAMPLING,
}

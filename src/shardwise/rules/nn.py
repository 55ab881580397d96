"""Operators of neural networks: softmax, dropout, convolution, pooling, resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm import wire
from shardwise.rules import halo
from shardwise.rules.empty import unless_empty, zeros
from shardwise.rules.pattern import along, named, text
from shardwise.rules.rule import Call, Placing, Rule, called
from shardwise.sharding.placement import Intervals
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Run = Callable[..., object]
Two = tuple[torch.Tensor, torch.Tensor]
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


# --- per element, with several results


def log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``log(sigmoid(x))``, and what its gradient would reuse."""
    buffer = torch.exp(-x.abs())
    return torch.clamp(x, max=0) - torch.log1p(buffer), buffer


def log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The gradient of `log_sigmoid`; the buffer is not read, for some devices leave it empty."""
    return grad * torch.sigmoid(-x)


# --- random: what is drawn is drawn for the whole tensor, and each rank keeps its part


def dropout(x: torch.Tensor, p: float, train: bool | None) -> Two:
    """``native_dropout`` through one draw, so that it gives the same whatever the sharding."""
    if train is False or p == 0:
        return aten.clone.default(x), aten.ones_like.default(x, dtype=torch.bool)
    mask = aten.bernoulli_.float(aten.empty_like.default(x, dtype=torch.bool), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def fused_dropout(x: torch.Tensor, keep: float, generator: torch.Generator | None = None) -> Two:
    mask = aten.bernoulli_.float(aten.empty_like.default(x, dtype=torch.uint8), keep, generator=generator)
    return x * mask * (1 / keep), mask


def rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float,
    upper: float,
    training: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """``rrelu_with_noise``: slopes are drawn one after the other where ``x`` is negative, so ``x`` is seen whole."""
    if not training:
        found: torch.Tensor = aten.leaky_relu.default(x, (lower + upper) / 2)
        return found
    drawn: Two = aten.rrelu_with_noise_functional.default(x, noise, lower, upper, True, generator)
    noise.copy_(drawn[1])
    return drawn[0]


# --- three factors


def trilinear(
    a: TensorMeta, b: TensorMeta, c: TensorMeta, lacks_a: Sizes, lacks_b: Sizes, lacks_c: Sizes, summed: Sizes, *_: int
) -> str:
    """The product of three tensors, each without some dims of the whole, over which it broadcasts; some are summed."""
    names = named(len(a.shape) + len(lacks_a))
    factors = [
        text(name for dim, name in enumerate(names) if dim not in lacks) for lacks in (lacks_a, lacks_b, lacks_c)
    ]
    return f"{' * '.join(factors)} -> {text(name for dim, name in enumerate(names) if dim not in summed)}"


def _trilinear_local(call: Call, placing: Placing) -> Run:
    return zeros(call, placing) if any(0 in placing.input_shape(at) for at in range(3)) else call.op


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
    groups = 1 if 0 in weight else _groups(call, x, weight, y)
    over = halo.halo(call, placing, 0, placing.outputs[0], 3, groups)
    if over is not None:
        return lambda x, weight, bias, *_: over.forward(x, weight, bias, y)
    if 0 in x[:2] or 0 in weight[:2] or 0 in y:
        return _only_bias(y)
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
    groups = 1 if 0 in weight else _groups(call, x, weight, y)
    over = halo.halo(call, placing, 1, placing.inputs[0], 4, groups)
    if over is not None:
        return lambda grad, x, weight, *_: over.backward(grad, x, weight, call.args[10])
    if 0 in x[:2] or 0 in weight[:2] or 0 in y:
        return zeros(call, placing)
    bias_sizes = None if call.args[3] is None else [y[1]]
    rest = (bias_sizes, *call.args[4:9], groups, call.args[10])
    return lambda grad, x, weight, *_: call.op(grad, x, weight, *rest)


# --- over space: pooling, resampling, padding by what is inside


def spatial(ndim: int, form: str) -> Callable[..., str]:
    """An operator over the last ``ndim`` dims; ``form`` says how operands ``{x}`` and results ``{y}`` are joined."""

    def meaning(x: TensorMeta, *_: object) -> str:
        batch = " ".join(f"b{dim}" for dim in range(len(x.shape) - ndim))
        inside = " ".join(f"[x{dim}]" for dim in range(ndim))
        outside = " ".join(f"[y{dim}]" for dim in range(ndim))
        rule = form.format(x=f"{batch} {inside}", y=f"{batch} {outside}")
        return rule if x.dtype.is_floating_point or rule.startswith("f(") else _opaque(rule)

    return meaning


def _opaque(rule: str) -> str:
    """The rule for integers: averages are rounded, so that parts of a sum do not average to the parts of an average."""
    left, _, right = rule.partition("->")
    return f"f({left.replace('/', ',').strip()}) ->{right}"


def _resized_local(call: Call, placing: Placing) -> Run:
    """The gradients of resampling are told the shape of their result."""
    if 0 in placing.input_shape():
        return zeros(call, placing)
    shape, run = placing.output_shape(), called(call.op)
    return lambda grad, output_size, input_size, *rest: run(grad, output_size, shape, *rest)


def sampled(ndim: int) -> Rule:
    """Pooling at places drawn for each channel: each rank has drawn its own, so those of the first are taken by all."""
    return Rule(spatial(ndim, "f({x}, _) -> {y}, {y}"), local=_sampled_local, plain=("random_samples",))


def _sampled_local(call: Call, placing: Placing) -> Run:
    spec = placing.inputs[0]
    assert spec is not None, call
    group = spec.mesh.axes_group(tuple(range(spec.mesh.ndim)))
    empty = zeros(call, placing) if 0 in placing.input_shape() else None

    def run(x: torch.Tensor, kernel_size: Sizes, output_size: Sizes, samples: torch.Tensor) -> object:
        agreed = wire.wait(wire.broadcast(samples.contiguous(), 0, group))
        if empty is not None:
            return empty(x)
        batch = spec.ndim - len(output_size)
        for dim in range(batch):
            agreed = held(agreed, dim + 2 - batch, spec.intervals(dim, placing.coordinate))
        return call.op(x, kernel_size, output_size, agreed)

    return run


def held(x: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """The intervals of a dim, joined."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals], dim)


def columns(x: TensorMeta, *_: object) -> str:
    """Channels and places in the kernel become one dim, channels first."""
    batch = "n " if len(x.shape) == 4 else ""
    return f"{batch}c [h] [w] -> {batch}(c [k]) [places]"


def images(x: TensorMeta, *_: object) -> str:
    batch = "n " if len(x.shape) == 3 else ""
    return f"{batch}(c [k]) [places] -> {batch}c [h] [w]"


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

UNPOOLS = {
    "max_unpool2d": over(2, "{x} / {x} -> {y}"),
    "max_unpool3d": over(3, "{x} / {x} -> {y}"),
    "fractional_max_pool2d": sampled(2),
    "fractional_max_pool2d_backward": over(2, PICKS_BACKWARD),
    "fractional_max_pool3d": sampled(3),
    "fractional_max_pool3d_backward": over(3, PICKS_BACKWARD),
}

COLUMNS = {
    "im2col": Rule(columns, local=unless_empty),
    "col2im": Rule(images, local=unless_empty),
}

# Where to look is cut freely: the gradient of what is looked at adds up.
SAMPLERS = {
    "grid_sampler_2d": Rule("n c [h] [w] / n y x [at] -> n c y x", local=unless_empty),
    "grid_sampler_2d_backward": Rule(
        "n c y x / n c [h] [w] / n y x [at] -> n c [h] [w], n y x [at]", local=unless_empty
    ),
    "grid_sampler_3d": Rule("n c [d] [h] [w] / n z y x [at] -> n c z y x", local=unless_empty),
    "grid_sampler_3d_backward": Rule(
        "n c z y x / n c [d] [h] [w] / n z y x [at] -> n c [d] [h] [w], n z y x [at]", local=unless_empty
    ),
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
    "native_dropout": Rule(expand=dropout),
    "_fused_dropout": Rule(expand=fused_dropout),
    "rrelu_with_noise": Rule(expand=rrelu),
    "rrelu_with_noise_functional": "f(..., ...) -> ..., ...",
    "rrelu_with_noise_backward": "... / ... / ... -> ...",
    "_trilinear": Rule(trilinear, local=_trilinear_local),
    "_pdist_forward": "f(_) -> _",
    "_pdist_backward": "f(_, _, _) -> _",
    "convolution": Rule(convolution, local=_convolution_local, exchanging=halo.forward_strategies),
    "convolution_backward": Rule(
        convolution_backward, local=_convolution_backward_local, exchanging=halo.backward_strategies
    ),
    "log_sigmoid_forward": Rule(expand=log_sigmoid),
    "log_sigmoid_backward": Rule(expand=log_sigmoid_backward),
    "_prelu_kernel_backward": "... / ... / ... -> ..., ...",
    **POOLS,
    **UNPOOLS,
    **COLUMNS,
    **SAMPLERS,
    **PADS,
    **RESAMPLING,
}

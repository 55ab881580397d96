"""Products, reductions, norms and scans.

A reduced dim is a name missing on the right: what is left pending is what the operator itself does. Where that is
no reduction that ranks can finish for each other (a median, a variance), the dim is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardwise.rules.equation import Strategy
from shardwise.rules.parts import settled
from shardwise.rules.pattern import along, named, text, wrap
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.placement import Replicate, Shard
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Dims = int | Sequence[int] | None
Number = bool | int | float
Meaning = Callable[..., "str | Rule"]

PRODUCTS: dict[str, str] = {
    "mm": "m k * k n -> m n",
    "bmm": "b m k * b k n -> b m n",
    "mv": "m k * k -> m",
    "dot": "k * k -> ",
    "vdot": "k * k -> ",
    "addmm": "m n + m k * k n -> m n",
    "baddbmm": "b m n + b m k * b k n -> b m n",
    "addbmm": "m n + b m k * b k n -> m n",
    "addmv": "m + m k * k -> m",
    "addr": "m n + m * n -> m n",
    "ger": "m * n -> m n",
    "_addmm_activation": "f(m n, m [k], [k] n) -> m n",
}


def crossed(x: TensorMeta, _other: TensorMeta, dim: int = -1) -> str:
    names = text(along(x, [dim]))
    return f"{names} * {names} -> {names}"


# --- a layer: one operator with one gradient, in which no dims of a batch are flattened


def _batch(x: TensorMeta) -> str:
    return " ".join(f"b{dim}" for dim in range(len(x.shape) - 1))


def layer(x: TensorMeta, *_: object) -> str:
    """A linear layer.

    >>> layer(TensorMeta.contiguous((2, 3, 4), torch.float32))
    'b0 b1 k * n k + n -> b0 b1 n'
    """
    return f"{_batch(x)} k * n k + n -> {_batch(x)} n"


def layer_backward(x: TensorMeta, _grad: TensorMeta, _weight: TensorMeta, mask: Sequence[bool]) -> str:
    # The gradient of the bias knows no k: cutting that would count it once a rank.
    k = "[k]" if mask[2] else "k"
    return f"/ {_batch(x)} {k} * {_batch(x)} n / n {k} -> {_batch(x)} {k}, n {k}, n"


def _layer_beside(call: Call) -> Sequence[Strategy]:
    """With a bias, whose gradient every rank along k has."""
    x, _, _, mask = call.args
    last = Shard(len(x.shape) - 1)
    results = last if mask[0] else None, Shard(1) if mask[1] else None, Replicate()
    return [Strategy((last, Replicate(), Shard(1)), results)] if mask[2] else []


def _layer_backward_local(call: Call, _placing: Placing) -> Callable[..., object]:
    of_x, of_weight, of_bias = call.args[3]

    def run(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *_: object) -> object:
        rows = math.prod(x.shape[:-1])
        flat = grad.reshape(rows, grad.shape[-1])
        return (
            flat.mm(weight).view(x.shape) if of_x else None,
            flat.t().mm(x.reshape(rows, x.shape[-1])) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )

    return run


LAYERS: dict[str, Meaning | Rule] = {
    "linear": layer,
    "linear_backward": Rule(layer_backward, local=_layer_backward_local, beside=_layer_beside),
}


# --- reductions


def dims_of(x: TensorMeta, dims: Dims) -> tuple[int, ...]:
    """The dims that a reduction reduces; none named means all.

    >>> dims_of(TensorMeta.contiguous((2, 3), torch.float32), -1)
    (1,)
    """
    ndim = len(x.shape)
    if dims is None or dims == [] or dims == ():
        return tuple(range(ndim))
    listed = (dims,) if isinstance(dims, int) else dims
    return tuple(wrap(dim, ndim) for dim in listed) if ndim else ()


def reduced(x: TensorMeta, dims: Dims, keepdim: bool) -> list[str]:
    """The names of the dims of ``x`` that are left once ``dims`` are reduced."""
    gone = dims_of(x, dims)
    names = ["1" if dim in gone else name for dim, name in enumerate(named(len(x.shape)))]
    return names if keepdim else [name for name in names if name != "1"]


def contracted(x: TensorMeta, dims: Dims = None, keepdim: bool = False) -> str:
    """A reduction that ranks can finish for each other.

    >>> contracted(TensorMeta.contiguous((2, 3), torch.float32), 0, True)
    'd0 d1 -> 1 d1'
    """
    return f"{text(named(len(x.shape)))} -> {text(reduced(x, dims, keepdim))}"


def whole(x: TensorMeta, dims: Dims = None, keepdim: bool = False, outputs: int = 1) -> str:
    """A reduction that needs each reduced dim on one rank."""
    left = text(along(x, dims_of(x, dims)))
    return f"f({left}) -> {', '.join([text(reduced(x, dims, keepdim))] * outputs)}"


def all_dims(x: TensorMeta, *_rest: object, dtype: object = None) -> str:
    return contracted(x)


def given_dims(x: TensorMeta, dims: Dims = None, keepdim: bool = False, *_rest: object) -> str:
    return contracted(x, dims, keepdim)


def whole_dims(x: TensorMeta, dims: Dims = None, keepdim: bool = False, *_rest: object) -> str:
    return whole(x, dims, keepdim)


def whole_dims_in_two(x: TensorMeta, dims: Dims = None, keepdim: bool = False, *_rest: object) -> str:
    return whole(x, dims, keepdim, outputs=2)


def whole_tensor(x: TensorMeta, *_rest: object) -> str:
    return whole(x)


def opaque(x: TensorMeta, dims: Dims = None, keepdim: bool = False, *_rest: object) -> str:
    """A sum over a function of each element."""
    return f"f({text(named(len(x.shape)))}) -> {text(reduced(x, dims, keepdim))}"


def variance(x: TensorMeta, dims: Dims = None, correction: object = None, keepdim: bool = False) -> Rule:
    return Rule(whole(x, dims, keepdim), expand=sum_of_squares)


def deviation(x: TensorMeta, dims: Dims = None, correction: object = None, keepdim: bool = False) -> Rule:
    return Rule(whole(x, dims, keepdim), expand=lambda *args: sum_of_squares(*args).sqrt())


def with_mean(x: TensorMeta, dims: Dims = None, correction: float | None = None, keepdim: bool = False) -> Rule:
    def both(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_of_squares(x, dims, correction, keepdim), _mean(x, dims, keepdim)

    return Rule(whole(x, dims, keepdim, outputs=2), expand=both)


def deviation_with_mean(
    x: TensorMeta, dims: Dims = None, correction: float | None = None, keepdim: bool = False
) -> Rule:
    def both(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_of_squares(x, dims, correction, keepdim).sqrt(), _mean(x, dims, keepdim)

    return Rule(whole(x, dims, keepdim, outputs=2), expand=both)


def _mean(x: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
    mean: torch.Tensor = aten.mean.dim(x, list(dims_of(TensorMeta.of(x), dims)), keepdim)
    return mean


def least_and_most(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    listed = list(dims_of(TensorMeta.of(x), dim))
    return aten.amin.default(x, listed, keepdim), aten.amax.default(x, listed, keepdim)


def sum_of_squares(
    x: torch.Tensor, dims: Dims = None, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    """The variance, in two passes that communicate only what is reduced already."""
    listed = list(dims_of(TensorMeta.of(x), dims))
    count = math.prod(x.shape[dim] for dim in listed)
    apart = x - aten.mean.dim(x, listed, True)
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    total: torch.Tensor = aten.sum.dim_IntList(square, listed, keepdim)
    result: torch.Tensor = total / max(count - (1 if correction is None else correction), 0)
    return result


def log_of_sum(x: torch.Tensor, dims: Dims, keepdim: bool = False) -> torch.Tensor:
    """`logsumexp`, in two passes that communicate only what is reduced already."""
    listed = list(dims_of(TensorMeta.of(x), dims))
    top = settled(aten.amax.default(x, listed, True))
    top = top.masked_fill(top.abs() == math.inf, 0)
    total = aten.sum.dim_IntList((x - top).exp(), listed, keepdim).log()
    result: torch.Tensor = total + (top if keepdim else aten.squeeze.dims(top, listed))
    return result


def log_sum(x: TensorMeta, dims: Dims, keepdim: bool = False) -> Rule | str:
    if not x.dtype.is_floating_point or any(x.shape[dim] == 0 for dim in dims_of(x, dims)):
        return whole(x, dims, keepdim)
    return Rule(whole(x, dims, keepdim), expand=log_of_sum)


def extremes(x: TensorMeta, dim: int | None = None, keepdim: bool = False) -> str | Rule:
    meaning = whole(x, dim, keepdim, outputs=2)
    return Rule(meaning, expand=least_and_most) if 0 not in x.shape else meaning


def mean_locally(call: Call, placing: Placing) -> Callable[..., object]:
    """The mean of uneven parts is not the mean of their means: their sums over the global count add up to it.

    The sums are taken as wide as the kernel takes them, since a sum may overflow where the mean does not.
    """
    x, *rest = call.args
    dims, keepdim = (dims_of(x, rest[0]), rest[1]) if len(rest) > 1 else (dims_of(x, None), False)
    shape, result = placing.input_shape(), call.outputs[0]
    held, count = (math.prod(sizes[dim] for dim in dims) for sizes in (shape, x.shape))
    if held == count or result is None:
        return call.op
    dtype = result.dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    if wide is dtype:
        return lambda local, *_: torch.sum(local, dims, keepdim, dtype=wide).div_(count)
    return lambda local, *_: torch.sum(local, dims, keepdim, dtype=wide).div_(count).to(dtype)


def filling(value: Callable[[torch.dtype], Number]) -> Callable[[Call, Placing], Callable[..., object]]:
    """Run the reduction, or fill with its identity element ``value`` where this rank has nothing to reduce."""

    def local(call: Call, placing: Placing) -> Callable[..., object]:
        meta = call.outputs[0]
        assert meta is not None, call
        if not placing.is_pending() or all(placing.input_shape()):
            return call.op
        shape, dtype = placing.output_shape(), meta.dtype
        return lambda x, *rest: torch.full(shape, value(dtype), dtype=dtype, device=x.device)

    return local


def lowest(dtype: torch.dtype) -> Number:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def nothing(_dtype: torch.dtype) -> Number:
    return 0


MAX = Rule(given_dims, reduce="max", local=filling(lowest))
MIN = Rule(given_dims, reduce="min", local=filling(highest))
MEAN = Rule(given_dims, local=mean_locally)

REDUCTIONS: dict[str, str | Meaning | Rule] = {
    "sum.default": all_dims,
    "sum.dim_IntList": given_dims,
    "nansum": opaque,
    "mean.default": Rule(all_dims, local=mean_locally),
    "mean.dim": MEAN,
    "prod.default": Rule(all_dims, reduce="product"),
    "prod.dim_int": Rule(given_dims, reduce="product"),
    "amax": MAX,
    "amin": MIN,
    "max.default": Rule(all_dims, reduce="max", local=filling(lowest)),
    "min.default": Rule(all_dims, reduce="min", local=filling(highest)),
    "aminmax": extremes,
    "count_nonzero": opaque,
    "count_nonzero.dim_IntList": opaque,
    "var.correction": variance,
    "std.correction": deviation,
    "var_mean.correction": with_mean,
    "std_mean.correction": deviation_with_mean,
    "logsumexp": log_sum,
    "median.default": whole_tensor,
    "nanmedian.default": whole_tensor,
    "median.dim": whole_dims_in_two,
    "nanmedian.dim": whole_dims_in_two,
    "mode": whole_dims_in_two,
    "trace": "[a] [b] -> ",
}


# --- norms


def norm(
    x: TensorMeta, order: Number | None = 2, dims: Dims = None, keepdim: bool = False, *_rest: object
) -> str | Rule:
    """Some orders leave a norm, a sum, a maximum or a minimum pending; the others are roots of sums."""
    if order in (2, None):
        return Rule(contracted(x, dims, keepdim), reduce="norm")
    meaning = opaque(x, dims, keepdim)
    if order in (0, 1):
        return meaning
    if order in (math.inf, -math.inf):
        reduce, identity = ("max", nothing) if order and order > 0 else ("min", highest)
        return Rule(meaning, reduce=reduce, local=filling(identity))
    return Rule(whole(x, dims, keepdim), expand=root_of_sum)


def root_of_sum(
    x: torch.Tensor,
    order: float,
    dims: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The norm of another order, in such a way that only what is reduced already is communicated."""
    result = (dtype or x.dtype).to_real()
    wide = torch.float32 if result.itemsize < 4 else result
    if dtype is not None and dtype is not x.dtype:
        x = x.to(dtype)
    size = x.abs().to(wide)
    listed = list(dims_of(TensorMeta.of(size), dims))
    root: torch.Tensor = aten.sum.dim_IntList(size**order, listed, keepdim) ** (1 / order)
    return root.to(result)


NORMS: dict[str, str | Meaning | Rule] = {
    "linalg_vector_norm": norm,
    "norm.Scalar": norm,
    "norm.ScalarOpt_dim": norm,
    "norm.ScalarOpt_dim_dtype": norm,
}


RULES: dict[str, str | Meaning | Rule] = {"linalg_cross": crossed, **PRODUCTS, **LAYERS, **REDUCTIONS, **NORMS}

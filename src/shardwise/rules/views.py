"""Views: the same elements under other dims.

A view is an equation with composed dims, ``(d0 d1) -> d0 d1``, so what lies where follows from the text alone and
nothing has to move. Any pending reduction passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

import torch

from shardwise.errors import RuleError, message
from shardwise.rules.empty import unless_empty
from shardwise.rules.images import Image, emptied, pairing, regrouping, rescaling, spreading, unpairing
from shardwise.rules.pattern import along, named, same, text, without, wrap
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Run = Callable[..., object]
Sizes = Sequence[int]


# --- views that regroup dims


def regroup(before: Sizes, after: Sizes) -> tuple[list[str], list[str]]:
    """The dims of two shapes with the same elements in the same order, as products of common factors.

    Where the shapes have no common refinement, the dims in question are whole.

    >>> regroup((2, 12), (8, 3))
    (['d0', '(d1 d2)'], ['(d0 d1)', 'd2'])
    """
    if prod(before) == 0:
        return _regroup_empty(before, after)
    left: list[str] = []
    right: list[str] = []
    for own, others in _groups(before, after):
        pair = _refined(own, others, len(left) + len(right))
        left += pair[0]
        right += pair[1]
    return left, right


def _groups(before: Sizes, after: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """Pairs of runs of dims, as short as can be, that hold the same number of elements."""
    one = other = 0
    while one < len(before) or other < len(after):
        own, others = before[one : one + 1], after[other : other + 1]
        if own != others and 1 in own:
            others = ()
        elif own != others and 1 in others:
            own = ()
        while prod(own) != prod(others):
            if prod(own) < prod(others):
                own = before[one : one + len(own) + 1]
            else:
                others = after[other : other + len(others) + 1]
        yield own, others
        one, other = one + len(own), other + len(others)


def _refined(own: Sizes, others: Sizes, first: int) -> tuple[list[str], list[str]]:
    if own == others:
        return [f"d{first}"], [f"d{first}"]
    bounds = sorted({*accumulate(own, mul, initial=1), *accumulate(others, mul, initial=1)})
    if any(high % low for low, high in pairwise(bounds)):
        return [f"[l{first + dim}]" for dim in range(len(own))], [f"[r{first + dim}]" for dim in range(len(others))]
    return _factors(own, bounds, first), _factors(others, bounds, first)


def _factors(sizes: Sizes, bounds: Sizes, first: int) -> list[str]:
    dims = []
    for low, high in pairwise(accumulate(sizes, mul, initial=1)):
        names = [f"d{first + factor}" for factor, bound in enumerate(bounds) if low <= bound < high]
        dims.append(f"({' '.join(names)})" if len(names) > 1 else names[0] if names else "1")
    return dims


def _regroup_empty(before: Sizes, after: Sizes) -> tuple[list[str], list[str]]:
    # Without elements nothing tells which dims belong together, but a common beginning does.
    common = next(
        (dim for dim, (size, other) in enumerate(zip(before, after, strict=False)) if size != other),
        min(len(before), len(after)),
    )
    left = [f"d{dim}" if dim < common else f"[l{dim}]" for dim in range(len(before))]
    return left, [f"d{dim}" if dim < common else f"[r{dim}]" for dim in range(len(after))]


def view(x: TensorMeta, size: Sizes, *_: object) -> str:
    """``view`` and its like; one size may be -1."""
    left, right = regroup(x.shape, _sized(x, size))
    return same([left], [right])


def view_image(x: TensorMeta, size: Sizes, *_: object) -> Image:
    after = _sized(x, size)
    return _regrouped(x.shape, after)


def _regrouped(before: Sizes, after: Sizes) -> Image:
    if prod(before) == 0:
        return regrouping(before, after, [(before, after)])
    return regrouping(before, after, list(_groups(before, after)))


def _sized(x: TensorMeta, size: Sizes) -> tuple[int, ...]:
    known = prod(entry for entry in size if entry != -1)
    return tuple(prod(x.shape) // max(known, 1) if entry == -1 else entry for entry in size)


def _view_local(call: Call, placing: Placing) -> Run:
    shape = placing.output_shape()
    run = torch.Tensor.view if call.op in (aten.view.default, aten._reshape_alias.default) else call.op._op
    return lambda x, *_: run(x, shape)


def view_dtype(x: TensorMeta, dtype: torch.dtype) -> str:
    if dtype is x.dtype:
        return "same(...) -> ..."
    if dtype.itemsize == x.dtype.itemsize:
        return "f(...) -> ..."
    dims = along(x, [-1])
    return f"f({text(dims)}) -> {text(dims)}"


def dtype_image(x: TensorMeta, dtype: torch.dtype) -> Image | None:
    return rescaling(len(x.shape), x.dtype, dtype) if x.shape else None


def real_image(x: TensorMeta) -> Image:
    return pairing(len(x.shape))


def complex_image(x: TensorMeta) -> Image:
    return unpairing(len(x.shape))


def as_strided(x: TensorMeta, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> str:
    order = None if storage_offset else _order(x, size, stride)
    if order is not None:
        return permute(x, order)
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + (storage_offset or 0)
    if 0 not in size and (reach > prod(x.shape) or x != TensorMeta.contiguous(x.shape, x.dtype)):
        raise _as_strided_error(x, size, stride, storage_offset)
    whole = [f"[{name}]" for name in named(len(x.shape))]
    return same([whole], [[f"[{name}]" for name in named(len(size), "s")]])


def _as_strided_error(x: TensorMeta, size: Sizes, stride: Sizes, offset: int | None) -> RuleError:
    return RuleError(
        message(
            "as_strided asks for memory that a distributed tensor does not have in one piece",
            asked=f"as_strided({x}, size={list(size)}, stride={list(stride)}, storage_offset={offset})",
            do="write it with views, or call contiguous() first and stay within its elements",
        )
    )


def as_strided_image(x: TensorMeta, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Image | None:
    return emptied(len(x.shape)) if 0 in size else None


def _order(x: TensorMeta, size: Sizes, stride: Sizes) -> list[int] | None:
    """The order of dims of which ``size`` and ``stride`` are those of ``x``; None if there is none."""
    own, asked = (list(zip(*pair, strict=True)) for pair in ((x.shape, x.stride), (size, stride)))
    if sorted(own) != sorted(asked):
        return None
    pairs = zip(*(sorted(range(len(side)), key=side.__getitem__) for side in (asked, own)), strict=True)
    return [dim for _, dim in sorted(pairs)]


def _as_strided_local(call: Call, placing: Placing) -> Run:
    x, size, stride, offset = call.args[:4]
    order = None if offset else _order(x, size, stride)
    keep = aten.alias.default if call.op is aten.as_strided.default else aten.clone.default
    if order is not None:
        return lambda local, *_: keep(local.permute(order))

    def run(local: torch.Tensor, *_: object) -> object:
        packed = local.contiguous()
        return call.op(packed, size, stride, packed.storage_offset() + (offset or 0))

    return run


# --- views that name, order, add and drop dims


def transpose(x: TensorMeta, dim0: int, dim1: int) -> str:
    dims = named(len(x.shape))
    after = list(dims)
    if dims:
        after[dim0], after[dim1] = dims[dim1], dims[dim0]
    return same([dims], [after])


def t(x: TensorMeta) -> str:
    dims = named(len(x.shape))
    return same([dims], [dims[::-1]])


def permute(x: TensorMeta, order: Sizes) -> str:
    dims = named(len(x.shape))
    return same([dims], [[dims[dim] for dim in order]])


def unsqueeze(x: TensorMeta, dim: int) -> str:
    dims = named(len(x.shape))
    after = list(dims)
    after.insert(dim % (len(dims) + 1), "1")
    return same([dims], [after])


def squeeze(x: TensorMeta, dims: int | Sizes | None = None) -> str:
    gone = squeezed(x, dims)
    before = ["1" if dim in gone else name for dim, name in enumerate(named(len(x.shape)))]
    return same([before], [without(before, *gone)] if gone else [before])


def squeeze_image(x: TensorMeta, dims: int | Sizes | None = None) -> Image:
    gone = squeezed(x, dims)
    return _regrouped(x.shape, [size for dim, size in enumerate(x.shape) if dim not in gone])


def unsqueeze_image(x: TensorMeta, dim: int) -> Image:
    after = list(x.shape)
    after.insert(dim % (len(after) + 1), 1)
    return _regrouped(x.shape, after)


def squeezed(x: TensorMeta, dims: int | Sizes | None) -> list[int]:
    """The dims that ``squeeze`` drops."""
    ndim = len(x.shape)
    asked = range(ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return sorted({wrap(dim, ndim) for dim in asked if ndim and x.shape[wrap(dim, ndim)] == 1})


def _squeeze_local(call: Call, placing: Placing) -> Run:
    # Only dims whose global size is 1, whatever the local sizes are.
    gone = squeezed(call.args[0], call.args[1] if len(call.args) > 1 else None)
    return lambda x, *_: aten.squeeze.dims(x, gone)


def _squeeze_copy_local(call: Call, placing: Placing) -> Run:
    run = _squeeze_local(call, placing)
    return lambda x, *rest: aten.clone.default(run(x, *rest))


def expand(x: TensorMeta, size: Sizes, implicit: bool = False) -> str:
    new = len(size) - len(x.shape)
    dims = named(len(size))
    before = [
        "1" if old == 1 and wanted not in (1, -1) else name
        for old, wanted, name in zip(x.shape, size[new:], dims[new:], strict=True)
    ]
    return same([before], [dims])


def expand_image(x: TensorMeta, size: Sizes, implicit: bool = False) -> Image:
    new = len(size) - len(x.shape)
    after = [*size[:new], *(old if wanted == -1 else wanted for old, wanted in zip(x.shape, size[new:], strict=True))]
    return spreading(x.shape, after)


def _expand_local(call: Call, placing: Placing) -> Run:
    shape = placing.output_shape()
    return lambda x, *_: call.op(x, shape)


RULES = {
    "view": Rule(view, local=_view_local, image=view_image),
    "view.dtype": Rule(view_dtype, local=unless_empty, image=dtype_image),
    "view_copy": Rule(view, local=_view_local, image=view_image),
    "view_copy.dtype": Rule(view_dtype, local=unless_empty, image=dtype_image),
    "_unsafe_view": Rule(view, local=_view_local, image=view_image),
    "_reshape_alias": Rule(view, local=_view_local, image=view_image),
    "_reshape_copy": Rule(view, local=_view_local, image=view_image),
    "as_strided": Rule(as_strided, local=_as_strided_local, image=as_strided_image),
    "as_strided_copy": Rule(as_strided, local=_as_strided_local),
    "transpose": transpose,
    "transpose_copy": transpose,
    "t": t,
    "t_copy": t,
    "permute": permute,
    "permute_copy": permute,
    "unsqueeze": Rule(unsqueeze, image=unsqueeze_image),
    "unsqueeze_copy": Rule(unsqueeze, image=unsqueeze_image),
    "squeeze": Rule(squeeze, local=_squeeze_local, image=squeeze_image),
    "squeeze_copy": Rule(squeeze, local=_squeeze_copy_local, image=squeeze_image),
    "expand": Rule(expand, local=_expand_local, image=expand_image),
    "expand_copy": Rule(expand, local=_expand_local, image=expand_image),
    "lift_fresh": "same(...) -> ...",
    "_pin_memory": "same(...) -> ...",
    "view_as_real": Rule("... -> ... [pair]", image=real_image),
    "view_as_complex": Rule("... [pair] -> ...", local=unless_empty, image=complex_image),
}

"""Operators that relabel, move, repeat or leave out elements without looking at them.

Views are equations with composed dims: ``(d0 d1) -> d0 d1``. Such operators are ``same( )``: any pending reduction
passes, because every element of the result is an element of the input (or a zero, which is a zero in every part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

import torch

from shardwise.errors import RuleError, message
from shardwise.rules.pattern import along, named, text, without, wrap
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
END = torch.iinfo(torch.int64).max
Run = Callable[..., object]
Sizes = Sequence[int]


def same(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> str:
    """The text of an operator that moves elements.

    >>> same([["d0", "d1"]], [["d1", "d0"]])
    'same(d0 d1) -> d1 d0'
    """
    left, right = (", ".join(text(dims) for dims in side) for side in (inputs, outputs))
    return f"same({left}) -> {right}"


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
    known = prod(entry for entry in size if entry != -1)
    after = tuple(prod(x.shape) // max(known, 1) if entry == -1 else entry for entry in size)
    left, right = regroup(x.shape, after)
    return same([left], [right])


def _view_local(call: Call, placing: Placing) -> Run:
    shape = placing.output_shape()
    run = aten.view.default if call.op is aten._reshape_alias.default else call.op
    return lambda x, *_: run(x, shape)


def view_dtype(x: TensorMeta, dtype: torch.dtype) -> str:
    if dtype.itemsize == x.dtype.itemsize:
        return "f(...) -> ..."
    dims = along(x, [-1])
    return f"f({text(dims)}) -> {text(dims)}"


def as_strided(x: TensorMeta, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> str:
    if _is_unchanged(x, size, stride, storage_offset):
        return "same(...) -> ..."
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if storage_offset or reach > prod(x.shape) or x != TensorMeta.contiguous(x.shape, x.dtype):
        raise RuleError(
            message(
                "as_strided asks for memory that a distributed tensor does not have in one piece",
                asked=f"as_strided({x}, size={list(size)}, stride={list(stride)}, storage_offset={storage_offset})",
                do="write it with views, or call contiguous() first and stay within its elements",
            )
        )
    whole = [f"[{name}]" for name in named(len(x.shape))]
    return same([whole], [[f"[{name}]" for name in named(len(size), "s")]])


def _is_unchanged(x: TensorMeta, size: Sizes, stride: Sizes, storage_offset: int | None) -> bool:
    return tuple(size) == x.shape and tuple(stride) == x.stride and not storage_offset


def _as_strided_local(call: Call, placing: Placing) -> Run:
    x, size, stride, offset = call.args[:4]
    if _is_unchanged(x, size, stride, offset):
        return lambda local, *_: aten.alias.default(local)

    def run(local: torch.Tensor, *_: object) -> object:
        packed = local.contiguous()
        return call.op(packed, size, stride, packed.storage_offset())

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


def _expand_local(call: Call, placing: Placing) -> Run:
    shape = placing.output_shape()
    return lambda x, *_: call.op(x, shape)


def repeat(x: TensorMeta, repeats: Sizes) -> str:
    new = len(repeats) - len(x.shape)
    before, after = [], named(new, "n")
    for dim, (size, times) in enumerate(zip(x.shape, repeats[new:], strict=True)):
        usable = size > 0 and times > 0
        before.append(f"d{dim}" if usable else f"[d{dim}]")
        after.append(f"d{dim}" if times == 1 else f"([r{dim}] d{dim})" if usable else f"[z{dim}]")
    return same([before], [after])


def _repeat_local(call: Call, placing: Placing) -> Run:
    x, repeats = call.args[:2]
    new = len(repeats) - len(x.shape)
    local = [*placing.output_shape()[:new], *repeats[new:]]
    return lambda x, *_: call.op(x, local)


# --- parts of a dim


def _is_all(size: int, start: int | None, end: int | None, step: int) -> bool:
    begins = start is None or start == 0 or start <= -size
    return begins and (end is None or end >= size) and step == 1


def slice_(x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str:
    if _is_all(x.shape[dim], start, end, step):
        return "same(...) -> ..."
    dims = along(x, [dim])
    return same([dims], [dims])


def _slice_local(call: Call, placing: Placing) -> Run:
    x, dim, start, end, step = call.args
    if _is_all(x.shape[dim], start, end, step):
        return lambda x, *_: call.op(x, dim, 0, END, 1)
    return call.op


def select(x: TensorMeta, dim: int, index: int) -> str:
    dims = along(x, [dim])
    return same([dims], [without(dims, dim)])


def split(x: TensorMeta, split_size: int | Sizes, dim: int = 0) -> str:
    size = x.shape[dim]
    dims = along(x, [dim])
    if not isinstance(split_size, int):
        return same([dims], [dims] * len(split_size))
    return same([dims], [dims] * (-(-size // split_size) if size else 1))


def unbind(x: TensorMeta, dim: int = 0) -> str:
    dims = along(x, [dim])
    return same([dims], [without(dims, dim)] * x.shape[dim])


def diagonal(x: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    dims = along(x, [dim1, dim2])
    return same([dims], [[*without(dims, dim1, dim2), "[diagonal]"]])


def unfold(x: TensorMeta, dimension: int, size: int, step: int) -> str:
    dims = along(x, [dimension])
    return same([dims], [[*dims, "[window]"] if dims else ["[window]"]])


def dims_whole(x: TensorMeta, dims: int | Sizes, *_: object) -> str:
    """Elements move within some dims only."""
    before = along(x, [dims] if isinstance(dims, int) else dims)
    return same([before], [before])


def roll(x: TensorMeta, shifts: Sizes, dims: Sizes = ()) -> str:
    return dims_whole(x, dims or range(len(x.shape)))


def rot90(x: TensorMeta, k: int, dims: Sizes) -> str:
    before = along(x, dims)
    after = list(before)
    if k % 2:
        after[dims[0]], after[dims[1]] = before[dims[1]], before[dims[0]]
    return same([before], [after])


# --- joining


def cat(tensors: Sequence[TensorMeta], dim: int = 0) -> str:
    ndim = max(len(x.shape) for x in tensors)
    along_dim = [f"[{name}]" if at == dim % ndim else name for at, name in enumerate(named(ndim))]
    # A tensor of shape (0,) may be joined to anything.
    inputs = [["[nothing]"] if x.shape == (0,) and ndim > 1 else along_dim for x in tensors]
    return same(inputs, [along_dim])


def stack(tensors: Sequence[TensorMeta], dim: int = 0) -> str:
    dims = named(len(tensors[0].shape))
    after = list(dims)
    after.insert(dim % (len(dims) + 1), "[stacked]")
    return same([dims] * len(tensors), [after])


# --- writing into zeros: the gradients of parts


def slice_backward(grad: TensorMeta, sizes: Sizes, dim: int, start: int, end: int, step: int) -> str:
    return "same(...) -> ..." if _is_all(sizes[dim], start, end, step) else dims_whole(grad, dim)


def _slice_backward_local(call: Call, placing: Placing) -> Run:
    _, sizes, dim, start, end, step = call.args
    bounds = (0, END, 1) if _is_all(sizes[dim], start, end, step) else (start, end, step)
    shape = placing.output_shape()
    return lambda grad, *_: call.op(grad, shape, dim, *bounds)


def select_backward(grad: TensorMeta, sizes: Sizes, dim: int, index: int) -> str:
    dims = [f"[{name}]" if at == dim % len(sizes) else name for at, name in enumerate(named(len(sizes)))]
    return same([without(dims, dim)], [dims])


def diagonal_backward(grad: TensorMeta, sizes: Sizes, offset: int, dim1: int, dim2: int) -> str:
    matrix = {dim1 % len(sizes), dim2 % len(sizes)}
    dims = [f"[{name}]" if at in matrix else name for at, name in enumerate(named(len(sizes)))]
    return same([[*without(dims, dim1, dim2), "[diagonal]"]], [dims])


def unfold_backward(grad: TensorMeta, sizes: Sizes, dim: int, size: int, step: int) -> str:
    dims = [f"[{name}]" if at == wrap(dim, len(sizes)) else name for at, name in enumerate(named(len(sizes)))]
    # Windows overlap, and add up: only sums pass.
    before = [*dims, "[window]"] if dims else ["[window]"]
    return f"{text(before)} -> {text(dims)}"


def _sized_local(call: Call, placing: Placing) -> Run:
    # The second argument is the shape of the result.
    shape, rest = placing.output_shape(), call.args[2:]
    return lambda grad, *_: call.op(grad, shape, *rest)


# --- writing into a copy


def slice_scatter(
    x: TensorMeta, src: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> str:
    dims = along(x, [dim])
    return same([dims, dims], [dims])


def select_scatter(x: TensorMeta, src: TensorMeta, dim: int, index: int) -> str:
    dims = along(x, [dim])
    return same([dims, without(dims, dim)], [dims])


def diagonal_scatter(x: TensorMeta, src: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    dims = along(x, [dim1, dim2])
    return same([dims, [*without(dims, dim1, dim2), "[diagonal]"]], [dims])


# --- triangles and borders


def _triangle_local(call: Call, placing: Placing) -> Run:
    x, diagonal = call.args[:2]
    rows, columns = len(x.shape) - 2, len(x.shape) - 1
    if not (placing.cuts(0, rows) or placing.cuts(0, columns)):
        return call.op
    row, column = (_positions(placing, dim) for dim in (rows, columns))
    keeps_lower = call.op.name().startswith("aten::tril")

    def run(local: torch.Tensor, *_: object) -> torch.Tensor:
        distance = (column - row[:, None]).to(local.device)
        kept = distance <= diagonal if keeps_lower else distance >= diagonal
        return torch.where(kept, local, torch.zeros((), dtype=local.dtype, device=local.device))

    return run


def _positions(placing: Placing, dim: int) -> torch.Tensor:
    spec = placing.inputs[0]
    assert spec is not None, placing
    pieces = [torch.arange(start, stop) for start, stop in spec.intervals(dim, placing.coordinate)]
    return torch.cat([torch.arange(0), *pieces])


def constant_pad_nd(x: TensorMeta, pad: Sizes, value: float = 0) -> str:
    padded = [len(x.shape) - 1 - place // 2 for place, size in enumerate(pad) if size]
    dims = text(along(x, padded))
    return f"same({dims}) -> {dims}" if value == 0 else f"f({dims}) -> {dims}"


VIEWS = {
    "view": Rule(view, local=_view_local),
    "view.dtype": view_dtype,
    "view_copy": Rule(view, local=_view_local),
    "view_copy.dtype": view_dtype,
    "_unsafe_view": Rule(view, local=_view_local),
    "_reshape_alias": Rule(view, local=_view_local),
    "_reshape_copy": Rule(view, local=_view_local),
    "as_strided": Rule(as_strided, local=_as_strided_local),
    "transpose": transpose,
    "transpose_copy": transpose,
    "t": t,
    "t_copy": t,
    "permute": permute,
    "permute_copy": permute,
    "unsqueeze": unsqueeze,
    "unsqueeze_copy": unsqueeze,
    "squeeze": Rule(squeeze, local=_squeeze_local),
    "squeeze_copy": Rule(squeeze, local=_squeeze_copy_local),
    "expand": Rule(expand, local=_expand_local),
    "expand_copy": Rule(expand, local=_expand_local),
    "lift_fresh": "same(...) -> ...",
    "_pin_memory": "same(...) -> ...",
    "view_as_real": "... -> ... [pair]",
    "view_as_complex": "... [pair] -> ...",
}

PARTS = {
    "slice": Rule(slice_, local=_slice_local),
    "select": select,
    "split": split,
    "split_with_sizes": split,
    "unsafe_split": split,
    "unsafe_split_with_sizes": split,
    "split_copy": split,
    "split_with_sizes_copy": split,
    "unbind": unbind,
    "unbind_copy": unbind,
    "diagonal": diagonal,
    "diagonal_copy": diagonal,
    "unfold": unfold,
    "unfold_copy": unfold,
}

MOVES = {
    "cat": cat,
    "stack": stack,
    "flip": dims_whole,
    "roll": roll,
    "rot90": rot90,
    "repeat": Rule(repeat, local=_repeat_local),
    "tril": Rule("same(...) -> ...", local=_triangle_local),
    "triu": Rule("same(...) -> ...", local=_triangle_local),
    "constant_pad_nd": constant_pad_nd,
}

WRITES = {
    "slice_backward": Rule(slice_backward, local=_slice_backward_local),
    "select_backward": Rule(select_backward, local=_sized_local),
    "diagonal_backward": Rule(diagonal_backward, local=_sized_local),
    "unfold_backward": Rule(unfold_backward, local=_sized_local),
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "diagonal_scatter": diagonal_scatter,
}

RULES = {**VIEWS, **PARTS, **MOVES, **WRITES}

"""Operators that move, repeat, join or leave out elements without looking at them.

Such operators are ``same( )``: any pending reduction passes, because every element of the result is an element of the
input, or a zero, which is a zero in every part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from shardwise.rules.empty import unless_empty
from shardwise.rules.images import (
    Image,
    Joining,
    Stride,
    diagonal_scattering,
    diagonals,
    emptied,
    regrouping,
    scattering,
    spreading,
    strides,
    window_scattering,
    windows,
)
from shardwise.rules.pattern import along, named, same, text, without, wrap
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
END = torch.iinfo(torch.int64).max
Run = Callable[..., object]
Sizes = Sequence[int]


# --- repeating and rearranging blocks


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


def repeat_image(x: TensorMeta, repeats: Sizes) -> Image | None:
    new = len(repeats) - len(x.shape)
    once = all(1 in pair for pair in zip(x.shape, repeats[new:], strict=True))
    after = [size * times for size, times in zip([1] * new + list(x.shape), repeats, strict=True)]
    return spreading(x.shape, after) if once else None


def diag_embed(x: TensorMeta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    ndim = len(x.shape) + 1
    matrix = sorted({dim1 % ndim, dim2 % ndim})
    dims = [f"[{name}]" if at == len(x.shape) - 1 else name for at, name in enumerate(named(len(x.shape)))]
    after = dims[:-1]
    for at in matrix:
        after.insert(at, f"[m{at}]")
    return same([dims], [after])


def pixel_shuffle(x: TensorMeta, factor: int) -> str:
    batch = named(len(x.shape) - 3)
    return same([[*batch, "(c [r] [q])", "h", "w"]], [[*batch, "c", "(h [r])", "(w [q])"]])


def pixel_unshuffle(x: TensorMeta, factor: int) -> str:
    batch = named(len(x.shape) - 3)
    return same([[*batch, "c", "(h [r])", "(w [q])"]], [[*batch, "(c [r] [q])", "h", "w"]])


def channel_shuffle(x: TensorMeta, groups: int) -> str:
    return dims_whole(x, 1)


# --- parts of a dim


def _is_all(size: int, start: int | None, end: int | None, step: int) -> bool:
    begins = start is None or start == 0 or start <= -size
    return begins and (end is None or end >= size) and step == 1


def slice_(x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str | Rule:
    if _is_all(x.shape[dim], start, end, step):
        return Rule("same(...) -> ...", local=_all_local, image=slice_image)
    dims = along(x, [dim])
    return same([dims], [dims])


def _all_local(call: Call, placing: Placing) -> Run:
    dim = call.args[1]
    return lambda x, *_: call.op(x, dim, 0, END, 1)


def _slice_stride(size: int, start: int | None, end: int | None, step: int) -> Stride:
    positions = range(size)[slice(start, end, step)]
    return Stride(positions.start, len(positions), step)


def slice_image(x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Image:
    dim = wrap(dim, len(x.shape))
    return strides(len(x.shape), dim, [_slice_stride(x.shape[dim], start, end, step)])


def select_image(x: TensorMeta, dim: int, index: int) -> Image:
    dim = wrap(dim, len(x.shape))
    return strides(len(x.shape), dim, [Stride(index % x.shape[dim], 1, drop=True)])


def split_image(x: TensorMeta, split_size: int | Sizes, dim: int = 0) -> Image:
    dim = wrap(dim, len(x.shape))
    size = x.shape[dim]
    sizes = split_size
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, max(sizes, 1))] or [0]
    starts = accumulate(sizes, initial=0)
    return strides(len(x.shape), dim, [Stride(start, count) for start, count in zip(starts, sizes, strict=False)])


def unbind_image(x: TensorMeta, dim: int = 0) -> Image:
    dim = wrap(dim, len(x.shape))
    return strides(len(x.shape), dim, [Stride(index, 1, drop=True) for index in range(x.shape[dim])])


def diagonal_image(x: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Image:
    ndim = len(x.shape)
    return diagonals(x.shape, offset, wrap(dim1, ndim), wrap(dim2, ndim))


def unfold_image(x: TensorMeta, dimension: int, size: int, step: int) -> Image:
    if not size:
        return emptied(len(x.shape))
    if not x.shape:
        return spreading((), (1,))
    dim = wrap(dimension, len(x.shape))
    return windows(x.shape[dim], len(x.shape), dim, size, step)


def slice_backward_image(grad: TensorMeta, sizes: Sizes, dim: int, start: int, end: int, step: int) -> Image:
    dim = wrap(dim, len(sizes))
    return scattering(sizes, dim, _slice_stride(sizes[dim], start, end, step))


def select_backward_image(grad: TensorMeta, sizes: Sizes, dim: int, index: int) -> Image:
    dim = wrap(dim, len(sizes))
    return scattering(sizes, dim, Stride(index % sizes[dim], 1, drop=True))


def narrow_copy(x: TensorMeta, dim: int, start: int, length: int) -> str:
    return dims_whole(x, dim)


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
    """An odd turn reverses one of the dims only, an even one both or none."""
    first, second = (wrap(dim, len(x.shape)) for dim in dims)
    before = along(x, {0: (), 1: (second,), 2: (first, second), 3: (first,)}[k % 4])
    after = list(before)
    if k % 2:
        after[dims[0]], after[dims[1]] = before[dims[1]], before[dims[0]]
    return same([before], [after])


# --- joining


def cat(tensors: Sequence[TensorMeta], dim: int = 0) -> str:
    ndim = max(len(x.shape) for x in tensors)
    dim = wrap(dim, ndim)
    names, first = named(ndim), tensors[0]
    if len(tensors) > 1 and all(len(x.shape) == ndim and x.shape[dim] == first.shape[dim] != 0 for x in tensors):
        joined = [f"({len(tensors)} {name})" if at == dim else name for at, name in enumerate(names)]
        return same([names] * len(tensors), [joined])
    along_dim = [f"[{name}]" if at == dim else name for at, name in enumerate(names)]
    # A tensor of shape (0,) may be joined to anything.
    inputs = [["[nothing]"] if x.shape == (0,) and ndim > 1 else along_dim for x in tensors]
    return same(inputs, [along_dim])


def cat_image(tensors: Sequence[TensorMeta], dim: int = 0) -> Joining | None:
    ndim = max(len(x.shape) for x in tensors)
    return Joining(dim % ndim) if all(len(x.shape) == ndim for x in tensors) else None


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


def diagonal_backward_image(grad: TensorMeta, sizes: Sizes, offset: int, dim1: int, dim2: int) -> Image:
    return diagonal_scattering(sizes, offset, wrap(dim1, len(sizes)), wrap(dim2, len(sizes)))


def unfold_backward_image(grad: TensorMeta, sizes: Sizes, dim: int, size: int, step: int) -> Image | None:
    if not sizes:
        return regrouping((1,), (), [((1,), ())]) if size else None
    return window_scattering(sizes, wrap(dim, len(sizes)), size, step) if size else None


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
    everything = x.shape == src.shape and step > 0
    dims = along(x, [] if everything else [dim])
    return same([dims, dims], [dims])


def select_scatter(x: TensorMeta, src: TensorMeta, dim: int, index: int) -> str:
    dims = along(x, [dim])
    return same([dims, without(dims, dim)], [dims])


def as_strided_scatter(x: TensorMeta, src: TensorMeta, *_: object) -> str:
    own, written = ([f"[{name}]" for name in named(len(item.shape), prefix)] for item, prefix in ((x, "d"), (src, "s")))
    return same([own, written], [own])


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


PARTS = {
    "slice": Rule(slice_, image=slice_image),
    "slice_copy": Rule(slice_, image=slice_image),
    "select": Rule(select, image=select_image),
    "select_copy": Rule(select, image=select_image),
    "narrow_copy": narrow_copy,
    "split": Rule(split, image=split_image),
    "split_with_sizes": Rule(split, image=split_image),
    "unsafe_split": Rule(split, image=split_image),
    "unsafe_split_with_sizes": Rule(split, image=split_image),
    "split_copy": Rule(split, image=split_image),
    "split_with_sizes_copy": Rule(split, image=split_image),
    "unbind": Rule(unbind, image=unbind_image),
    "unbind_copy": Rule(unbind, image=unbind_image),
    "diagonal": Rule(diagonal, image=diagonal_image),
    "diagonal_copy": Rule(diagonal, image=diagonal_image),
    "unfold": Rule(unfold, image=unfold_image),
    "unfold_copy": Rule(unfold, image=unfold_image),
}

MOVES = {
    "cat": Rule(cat, image=cat_image),
    "stack": stack,
    "flip": dims_whole,
    "roll": roll,
    "rot90": rot90,
    "repeat": Rule(repeat, local=_repeat_local, image=repeat_image),
    "tril": Rule("same(...) -> ...", local=_triangle_local),
    "triu": Rule("same(...) -> ...", local=_triangle_local),
    "constant_pad_nd": constant_pad_nd,
    "diag_embed": diag_embed,
    "pixel_shuffle": Rule(pixel_shuffle, local=unless_empty),
    "pixel_unshuffle": Rule(pixel_unshuffle, local=unless_empty),
    "channel_shuffle": Rule(channel_shuffle, local=unless_empty),
    "native_channel_shuffle": Rule(channel_shuffle, local=unless_empty),
}

WRITES = {
    "slice_backward": Rule(slice_backward, local=_slice_backward_local, image=slice_backward_image),
    "select_backward": Rule(select_backward, local=_sized_local, image=select_backward_image),
    "diagonal_backward": Rule(diagonal_backward, local=_sized_local, image=diagonal_backward_image),
    "unfold_backward": Rule(unfold_backward, local=_sized_local, image=unfold_backward_image),
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "as_strided_scatter": as_strided_scatter,
    "diagonal_scatter": diagonal_scatter,
}

RULES = {**PARTS, **MOVES, **WRITES}

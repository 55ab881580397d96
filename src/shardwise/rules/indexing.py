"""Operators that read or write the elements that an index names, and those that put a dim in order.

The dim that is indexed is whole; the dims of the index and the others are cut. Rows of an embedding are cut as well:
each rank looks up the rows that it holds, and what it does not find is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.rules.pattern import along, named, text, without, wrap
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.placement import Intervals
from shardwise.sharding.spec import Spec, TensorMeta

aten = torch.ops.aten
Run = Callable[..., object]
MaybeMeta = TensorMeta | None


def whole(x: TensorMeta, prefix: str = "w") -> str:
    """All dims of ``x``, each whole."""
    return text(f"[{name}]" for name in named(len(x.shape), prefix))


# --- one index tensor along one dim


def index_select(x: TensorMeta, dim: int, index: TensorMeta) -> str:
    if not x.shape:
        return "... / _ -> ..."
    before = along(x, [dim])
    after = list(before)
    after[wrap(dim, len(before))] = "i"
    return f"{text(before)} / {'i' if index.shape else '1'} -> {text(after)}"


def _beside(x: TensorMeta, index: TensorMeta, dim: int, own: str, other: str) -> tuple[str, str]:
    """The dims of a tensor and an index tensor of the same rank: besides ``dim`` they match where they are as long."""
    place = wrap(dim, len(x.shape))
    pairs = [
        (own, other) if at == place else (f"d{at}", f"d{at}") if size == length else (f"[a{at}]", f"[b{at}]")
        for at, (size, length) in enumerate(zip(x.shape, index.shape, strict=True))
    ]
    return text(left for left, _ in pairs), text(right for _, right in pairs)


def _match(*tensors: TensorMeta) -> bool:
    """Whether all have the same number of dims, and some: an index without elements may have another rank."""
    return len({len(x.shape) for x in tensors}) == 1 and tensors[0].shape != ()


def gather(x: TensorMeta, dim: int, index: TensorMeta, sparse_grad: bool = False) -> str:
    if not _match(x, index):
        return f"{whole(x)} / {whole(index)} -> {whole(index)}"
    left, right = _beside(x, index, dim, "[size]", "i")
    return f"{left} / {right} -> {right}"


def scatter(x: TensorMeta, dim: int, index: TensorMeta, source: object, *_: object) -> str:
    """Later elements win, or reduce, in the order of the index: its dim is whole."""
    if isinstance(source, TensorMeta):
        return _scatter(x, dim, index, source, "f({x}, {i}, {s}) -> {x}", "[j]")
    return _scatter(x, dim, index, index, "f({x}, {i}) -> {x}", "[j]")


def scatter_add(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> Rule:
    """Linear in what is added, which may be cut along the index: then the parts add up."""
    return Rule(_scatter(x, dim, index, source, "{x} + {i} * {s} -> {x}", "i"), pends=False)


def _scatter(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, form: str, own: str) -> str:
    if not _match(x, index, source):
        return form.format(x="_", i="_", s="_") if "f(" in form else "f(_, _, _) -> _"
    place = wrap(dim, len(x.shape))
    names: tuple[list[str], list[str], list[str]] = ([], [], [])
    for at, sizes in enumerate(zip(x.shape, index.shape, source.shape, strict=True)):
        agree = sizes[1] == sizes[2] and (at == place or sizes[0] == sizes[1])
        chosen = (f"[a{at}]", f"[b{at}]", f"[c{at}]")
        if agree:
            chosen = ("[size]", own, own) if at == place else (f"d{at}",) * 3
        for side, name in zip(names, chosen, strict=True):
            side.append(name)
    x_dims, index_dims, source_dims = (text(side) for side in names)
    return form.format(x=x_dims, i=index_dims, s=source_dims)


def _one_dim(x: TensorMeta, dim: int, index: TensorMeta) -> tuple[str, list[str], str]:
    dims = along(x, [dim])
    source = list(dims)
    if source:
        source[wrap(dim, len(dims))] = "i"
    return text(dims), source, "i" if index.shape else "1"


def index_add(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, alpha: float = 1) -> Rule | str:
    if not x.shape or not source.shape:
        return "f(_, _, _) -> _"
    dims, from_, i = _one_dim(x, dim, index)
    return Rule(f"{dims} + {i} * {text(from_)} -> {dims}", pends=False)


def index_copy(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> str:
    if not x.shape or not source.shape:
        return "f(_, _, _) -> _"
    dims, from_, _ = _one_dim(x, dim, index)
    return f"f({dims}, [i], {text(from_).replace('i', '[i]')}) -> {dims}"


def index_reduce(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, *_: object) -> str:
    return index_copy(x, dim, index, source)


def index_fill(x: TensorMeta, dim: int, index: TensorMeta, value: object) -> str:
    dims = text(along(x, [dim]))
    return f"f({dims}, _{', ...' if isinstance(value, TensorMeta) else ''}) -> {dims}"


def take(x: TensorMeta, index: TensorMeta) -> str:
    return f"{whole(x)} / {text(named(len(index.shape), 'i'))} -> {text(named(len(index.shape), 'i'))}"


def put(x: TensorMeta, index: TensorMeta, source: TensorMeta, accumulate: bool = False) -> str:
    return "f(_, _, _) -> _"


def masked_scatter(x: TensorMeta, mask: TensorMeta, source: TensorMeta) -> str:
    return "f(_, _, _) -> _"


def masked_scatter_backward(grad: TensorMeta, mask: TensorMeta, *_: object) -> str:
    return "f(_, _) -> _"


# --- several index tensors


class Indexed:
    """The dims of ``x[indices]`` as text: of ``x``, of each index tensor, and of the result.

    Index tensors broadcast to dims ``i``; they stand where the indexed dims stood, or in front if those lie apart. A
    boolean mask names as many elements as are true in it, which no rank can tell from a part.
    """

    def __init__(self, x: TensorMeta, indices: Sequence[MaybeMeta], *, own: str = "i{}") -> None:
        ndim = len(x.shape)
        masks = [index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices]
        covered: list[int] = []
        place = 0
        for index, mask in zip(indices, masks, strict=True):
            width = len(index.shape) if index is not None and mask else 1
            covered += range(place, place + width) if index is not None else ()
            place += width
        # A mask stands for one index tensor of one dim for each dim that it covers.
        lengths = [
            1 if mask else len(index.shape) for index, mask in zip(indices, masks, strict=True) if index is not None
        ]
        self.ndim = max(lengths, default=0)
        self.names = [f"[m{dim}]" if any(masks) else own.format(dim) for dim in range(self.ndim)]
        self.x = [f"[d{dim}]" if dim in covered else f"d{dim}" for dim in range(ndim)]
        self.indices = [self._of_index(index, mask) for index, mask in zip(indices, masks, strict=True)]
        self.result = self._result(covered)

    def _of_index(self, index: MaybeMeta, mask: bool) -> str:
        if index is None or mask:
            return "_"
        return text(self.names[self.ndim - len(index.shape) :])

    def _result(self, covered: Sequence[int]) -> list[str]:
        if not covered:
            return list(self.x)
        together = list(covered) == list(range(covered[0], covered[-1] + 1))
        front = covered[0] if together else 0
        left = [name for dim, name in enumerate(self.x) if dim not in covered]
        return [*left[:front], *self.names, *left[front:]]


def index(x: TensorMeta, indices: Sequence[MaybeMeta]) -> str:
    dims = Indexed(x, indices)
    return f"{' / '.join([text(dims.x), *dims.indices])} -> {text(dims.result)}"


def index_put(
    x: TensorMeta, indices: Sequence[MaybeMeta], values: TensorMeta, accumulate: bool = False, unsafe: bool = False
) -> str | Rule:
    """Where several values meet, one wins, unless they accumulate: then the index is cut, and the parts add up."""
    dims = Indexed(x, indices, own="i{}" if accumulate else "[i{}]")
    own = text(dims.x)
    put = dims.result[max(0, len(dims.result) - len(values.shape)) :]
    ones = ["1"] * (len(values.shape) - len(put))
    if any("[" in name for name in dims.names) or not accumulate:
        return f"f({', '.join([own, *dims.indices, text([*ones, *put])])}) -> {own}"
    return Rule(f"{own} + {' * '.join([*dims.indices, text([*ones, *put])])} -> {own}", pends=False)


# --- embeddings


def embedding(weight: TensorMeta, indices: TensorMeta, *_: object) -> str:
    i = " ".join(named(len(indices.shape), "i"))
    return f"v h / {i or '...'} -> {i} h"


def _is_held_whole(held: Intervals, size: int) -> bool:
    return held == ((0, size),)


def _held(spec: Spec | None, placing: Placing) -> tuple[Intervals, int]:
    assert spec is not None, placing
    return spec.intervals(0, placing.coordinate), spec.shape[0]


def _local_rows(indices: torch.Tensor, held: Intervals, missing: int) -> torch.Tensor:
    """Where the rows that ``indices`` name lie among those held; ``missing`` for the others."""
    rows = torch.full_like(indices, missing)
    before = 0
    for start, stop in held:
        rows = torch.where((indices >= start) & (indices < stop), indices - start + before, rows)
        before += stop - start
    return rows


def _embedding_local(call: Call, placing: Placing) -> Run:
    held, size = _held(placing.inputs[0], placing)
    if _is_held_whole(held, size):
        return call.op

    def run(weight: torch.Tensor, indices: torch.Tensor, *_: object) -> torch.Tensor:
        rows = _local_rows(indices, held, -1)
        if weight.shape[0] == 0:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        found: torch.Tensor = aten.embedding.default(weight, rows.clamp(min=0))
        return found.masked_fill((rows < 0).unsqueeze(-1), 0)

    return run


def embedding_backward(
    grad: TensorMeta, indices: TensorMeta, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> str:
    names = named(len(indices.shape), "i")
    if scale_grad_by_freq:  # by how often an index occurs on all ranks
        names = [f"[{name}]" for name in names]
    i = " ".join(names)
    return f"{i} h / {i or '...'} -> v h"


def _embedding_backward_local(call: Call, placing: Placing) -> Run:
    held, size = _held(placing.outputs[0], placing)
    if _is_held_whole(held, size):
        return call.op
    padding, scale = call.args[3:5]
    count = sum(stop - start for start, stop in held)

    def run(grad: torch.Tensor, indices: torch.Tensor, *_: object) -> torch.Tensor:
        # Rows of other ranks, and the padding, gather in one row more, which is the padding's: it stays zero.
        rows = _local_rows(torch.where(indices == padding, -1, indices), held, count)
        found: torch.Tensor = aten.embedding_dense_backward.default(grad, rows, count + 1, count, scale)
        return found.narrow(0, 0, count)

    return run


# --- order


def _two_along(x: TensorMeta, dim: int, keepdim: bool = True) -> str:
    dims = along(x, [dim])
    after = dims if keepdim else without(dims, dim)
    return f"f({text(dims)}) -> {text(after)}, {text(after)}"


def topk(x: TensorMeta, k: int, dim: int = -1, *_: object) -> str:
    return _two_along(x, dim)


def sort(x: TensorMeta, dim: int = -1, descending: bool = False) -> str:
    return _two_along(x, dim)


def sort_stable(x: TensorMeta, stable: bool | None, dim: int = -1, descending: bool = False) -> str:
    return _two_along(x, dim)


def kthvalue(x: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> str:
    return _two_along(x, dim, keepdim)


def searchsorted(sequence: TensorMeta, values: object, *_: object) -> str:
    """A sequence is whole; several sequences are searched each for its own values."""
    own = named(len(values.shape) if isinstance(values, TensorMeta) else 0)
    batch = [*own[:-1], "[sorted]"] if len(sequence.shape) > 1 else ["[sorted]"]
    return f"f({text(batch)}, {text(own)}, {text(batch)}) -> {text(own)}"


def bucketize(values: TensorMeta, boundaries: TensorMeta, *_: object) -> str:
    return "f(..., _) -> ..."


RULES = {
    "index_select": index_select,
    "gather": gather,
    "scatter": scatter,
    "scatter_add": scatter_add,
    "scatter_reduce": scatter,
    "index_add": index_add,
    "index_copy": index_copy,
    "index_reduce": index_reduce,
    "index_fill": index_fill,
    "take": take,
    "put": put,
    "masked_scatter": masked_scatter,
    "masked_scatter_backward": masked_scatter_backward,
    "index.Tensor": index,
    "_unsafe_index.Tensor": index,
    "index_put": index_put,
    "_unsafe_index_put": index_put,
    "_index_put_impl": index_put,
    "embedding": Rule(embedding, local=_embedding_local),
    "embedding_dense_backward": Rule(embedding_backward, local=_embedding_backward_local),
    "topk": topk,
    "sort": sort,
    "sort.stable": sort_stable,
    "kthvalue": kthvalue,
    "searchsorted.Tensor": searchsorted,
    "bucketize.Tensor": bucketize,
}

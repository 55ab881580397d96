"""Operators that read or write the elements that an index names, and those that put a dim in order.

Dims of the index and dims beside the indexed one are cut freely. The indexed dim is cut as well: each rank reads the
places that it holds, and what it does not find is zero, so that the parts add up; and each rank writes to the places
that it holds, while what is meant for others goes to a place beyond the end, which is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shardwise.rules.pattern import named, text, wrap
from shardwise.rules.rule import Call, Placing, Rule, called
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
    before = named(len(x.shape))
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


def _wrapped(index: torch.Tensor, size: int, from_end: bool) -> torch.Tensor:
    """The index counted from the front, all of it checked; only some operators count from the end as well."""
    inside = ((index >= (-size if from_end else 0)) & (index < size)).all()
    if index.device.type != "cpu":
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(f"index out of range for a dim of size {size}: {index.min()} to {index.max()}")
    return torch.where(index < 0, index + size, index)


def _places(
    index: torch.Tensor, spec: Spec, dim: int, placing: Placing, missing: int, *, from_end: bool = False
) -> torch.Tensor:
    """Where this rank holds what ``index`` names in ``dim``, or ``missing``."""
    rows = _wrapped(index, spec.shape[dim], from_end)
    return _local_rows(rows, spec.intervals(dim, placing.coordinate), missing)


def _along_local(call: Call, placing: Placing) -> Run:
    """Reading along one dim: what other ranks hold is zero here."""
    x, dim = call.args[:2]
    dim, spec = wrap(dim, len(x.shape)), placing.inputs[0]
    if spec is None or not placing.cuts(0, dim):
        return call.op

    def run(x: torch.Tensor, _dim: int, index: torch.Tensor, *rest: object) -> torch.Tensor:
        rows = _places(index, spec, dim, placing, -1)
        if x.shape[dim] == 0:
            return x.new_zeros(placing.output_shape())
        found = called(call.op)(x, dim, rows.clamp(min=0), *rest)
        assert isinstance(found, torch.Tensor), call
        lacking = rows < 0
        if rows.dim() < x.dim():
            lacking = lacking.reshape([-1, *[1] * (x.dim() - dim - 1)])
        return found.masked_fill(lacking, 0)

    return run


def _write_along_local(call: Call, placing: Placing) -> Run:
    """Writing along one dim: what other ranks hold is written beyond the end, and dropped."""
    x, dim = call.args[:2]
    dim, spec = wrap(dim, len(x.shape)), placing.inputs[0]
    from_end = "index_fill" in call.op.name()
    if spec is None or not placing.cuts(0, dim):
        return call.op

    def run(x: torch.Tensor, _dim: int, index: torch.Tensor, *rest: object) -> torch.Tensor:
        length = x.shape[dim]
        rows = _places(index, spec, dim, placing, length, from_end=from_end)
        written = called(call.op)(_longer(x, dim), dim, rows, *rest)
        assert isinstance(written, torch.Tensor), call
        return written.narrow(dim, 0, length)

    return run


def _longer(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` with one place more in ``dim``."""
    return torch.cat([x, x.new_zeros([1 if at == dim else size for at, size in enumerate(x.shape)])], dim)


def _match(*tensors: TensorMeta) -> bool:
    """Whether all have the same number of dims, and some: an index without elements may have another rank."""
    return len({len(x.shape) for x in tensors}) == 1 and tensors[0].shape != ()


def gather(x: TensorMeta, dim: int, index: TensorMeta, sparse_grad: bool = False) -> str:
    if not _match(x, index):
        return f"{whole(x)} / {whole(index)} -> {whole(index)}"
    left, right = _beside(x, index, dim, "size", "i")
    return f"{left} / {right} -> {right}"


def scatter(x: TensorMeta, dim: int, index: TensorMeta, source: object, *reduce: object) -> str | Rule:
    """Later elements win, or reduce, in the order of the index: its dim is whole. Linear in all values together."""
    if not isinstance(source, TensorMeta):
        return _scatter(x, dim, index, index, "f({x}, {i}) -> {x}", "[j]")
    if reduce in (("add",), ("sum",), ("sum", True)):
        return scatter_add(x, dim, index, source)
    form = "{x} / {i} / {s} -> {x}" if reduce == ("multiply",) else "f({x}, {i}, {s}) -> {x}"
    return _scatter(x, dim, index, source, form if reduce else "{x} + / {i} * {s} -> {x}", "[j]")


def scatter_add(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> Rule:
    """Linear in what is added, which may be cut along the index: then the parts add up."""
    return Rule(_scatter(x, dim, index, source, "{x} + / {i} * {s} -> {x}", "i"), local=_write_along_local)


def _scatter(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, form: str, own: str) -> str:
    if not _match(x, index, source):
        return form.format(x="_", i="_", s="_") if "{s}" not in form else "f(_, _, _) -> _"
    place = wrap(dim, len(x.shape))
    names: tuple[list[str], list[str], list[str]] = ([], [], [])
    for at, sizes in enumerate(zip(x.shape, index.shape, source.shape, strict=True)):
        agree = sizes[1] == sizes[2] and (at == place or sizes[0] == sizes[1])
        chosen = (f"[a{at}]", f"[b{at}]", f"[c{at}]")
        if agree:
            chosen = (f"d{at}", own, own) if at == place else (f"d{at}",) * 3
        elif at == place:
            chosen = (f"d{at}", f"[b{at}]", f"[c{at}]")
        for side, name in zip(names, chosen, strict=True):
            side.append(name)
    x_dims, index_dims, source_dims = (text(side) for side in names)
    return form.format(x=x_dims, i=index_dims, s=source_dims)


def _one_dim(x: TensorMeta, dim: int, index: TensorMeta) -> tuple[str, list[str], str]:
    dims = named(len(x.shape))
    source = list(dims)
    if source:
        source[wrap(dim, len(dims))] = "i"
    return text(dims), source, "i" if index.shape else "1"


def index_add(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, alpha: float = 1) -> Rule | str:
    if not x.shape or not source.shape:
        return "f(_, _, _) -> _"
    dims, from_, i = _one_dim(x, dim, index)
    return Rule(f"{dims} + / {i} * {text(from_)} -> {dims}", local=_write_along_local)


def index_copy(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> str:
    return _along_index(x, dim, index, source, "{x} + / {i} * {s} -> {x}")


def index_reduce(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, *_: object) -> str:
    return _along_index(x, dim, index, source, "f({x}, {i}, {s}) -> {x}")


def _along_index(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, form: str) -> str:
    if not x.shape or not source.shape:
        return "f(_, _, _) -> _"
    dims, from_, i = _one_dim(x, dim, index)
    whole_source = ["[i]" if name == "i" else name for name in from_]
    return form.format(x=dims, i=i.replace("i", "[i]"), s=text(whole_source))


def index_fill(x: TensorMeta, dim: int, index: TensorMeta, value: object) -> str:
    dims = text(named(len(x.shape)))
    return f"{dims} + / _ * ... -> {dims}" if isinstance(value, TensorMeta) else f"f({dims}, _) -> {dims}"


def take(x: TensorMeta, index: TensorMeta) -> str:
    return f"{whole(x)} / {text(named(len(index.shape), 'i'))} -> {text(named(len(index.shape), 'i'))}"


def put(x: TensorMeta, index: TensorMeta, source: TensorMeta, accumulate: bool = False) -> str:
    if index.shape != source.shape:
        return f"{whole(x)} + / _ * {whole(source, 's')} -> {whole(x)}"
    places = text(named(len(index.shape), "i")) if accumulate else whole(index, "i")
    return f"{whole(x)} + / {places} * {places} -> {whole(x)}"


def masked_scatter(x: TensorMeta, mask: TensorMeta, source: TensorMeta) -> str:
    result = whole(max(x, mask, key=lambda item: len(item.shape)))
    return f"{result} + / _ * {whole(source, 's')} -> {result}"


def masked_scatter_backward(grad: TensorMeta, mask: TensorMeta, *_: object) -> str:
    return "f(_, _) -> _"


# --- several index tensors


MASKS = (torch.bool, torch.uint8)


class Indexed:
    """The dims of ``x[indices]`` as text: of ``x``, of each index tensor, and of the result.

    Index tensors broadcast to dims ``i``; they stand where the indexed dims stood, or in front if those lie apart. A
    boolean mask names as many elements as are true in it, which no rank can tell from a part.
    """

    def __init__(self, x: TensorMeta, indices: Sequence[MaybeMeta], *, own: str = "i{}", writes: bool = False) -> None:
        ndim = len(x.shape)
        masks = [index is not None and index.dtype in MASKS for index in indices]
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
        self.covered = covered
        read_by_mask = any(masks) and not writes
        self.x = [f"[d{dim}]" if dim in covered and read_by_mask else f"d{dim}" for dim in range(ndim)]
        self.indices = [self._of_index(index, mask) for index, mask in zip(indices, masks, strict=True)]
        together = covered == list(range(covered[0], covered[-1] + 1)) if covered else True
        self.front = covered[0] if covered and together else 0
        self.result = self._result(covered)

    def _of_index(self, index: MaybeMeta, mask: bool) -> str:
        if index is None or mask:
            return "_"
        return text(self.names[self.ndim - len(index.shape) :])

    def _result(self, covered: Sequence[int]) -> list[str]:
        left = [name for dim, name in enumerate(self.x) if dim not in covered]
        return [*left[: self.front], *self.names, *left[self.front :]]


def index(x: TensorMeta, indices: Sequence[MaybeMeta]) -> str:
    dims = Indexed(x, indices)
    return f"{' / '.join([text(dims.x), *dims.indices])} -> {text(dims.result)}"


def index_put(
    x: TensorMeta, indices: Sequence[MaybeMeta], values: TensorMeta, accumulate: bool = False, unsafe: bool = False
) -> str | Rule:
    """Where several values meet, one wins, unless they accumulate: then the index is cut, and the parts add up."""
    dims = Indexed(x, indices, own="i{}" if accumulate else "[i{}]", writes=True)
    own = text(dims.x)
    put = dims.result[max(0, len(dims.result) - len(values.shape)) :]
    ones = ["1"] * (len(values.shape) - len(put))
    if _fills(x, indices, values, accumulate):
        mask = next(place for place, index in enumerate(indices) if index is not None)
        beside = [text(dims.x[mask : mask + len(dims.covered)]) if at == mask else "_" for at in range(len(indices))]
        put = ["1" if name == "[m0]" else name for name in put]
        return f"{' / '.join([f'{own} +', *beside])} * {text([*ones, *put])} -> {own}"
    written = f"{' / '.join([f'{own} +', *dims.indices])} * {text([*ones, *put])} -> {own}"
    if any("[" in name for name in dims.names) or not accumulate:
        return written
    return Rule(written, local=_index_put_local)


def _fills(x: TensorMeta, indices: Sequence[MaybeMeta], values: TensorMeta, accumulate: bool) -> bool:
    """Whether the same is written wherever a mask is true: to each element, or row, for itself."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in MASKS or accumulate:
        return False
    place, mask = given[0]
    behind = len(x.shape) - place - len(mask.shape)
    return len(values.shape) <= behind or values.shape[-1 - behind] == 1


def _cut_dims(call: Call, placing: Placing) -> list[int]:
    """The dims that are indexed and cut."""
    return [dim for dim in Indexed(*call.args[:2]).covered if placing.cuts(0, dim)]


def _index_local(call: Call, placing: Placing) -> Run:
    cut, spec = _cut_dims(call, placing), placing.inputs[0]
    if spec is None or not cut:
        return call.op

    def run(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        rows = {dim: _places(_given(indices[dim]), spec, dim, placing, -1, from_end=True) for dim in cut}
        if 0 in [x.shape[dim] for dim in cut]:
            return x.new_zeros(placing.output_shape())
        found: torch.Tensor = call.op(
            x, [rows[dim].clamp(min=0) if dim in rows else own for dim, own in enumerate(indices)]
        )
        lacking = functools.reduce(torch.logical_or, [row < 0 for row in rows.values()])
        return found.masked_fill(_beside_rest(lacking, call, found.dim()), 0)

    return run


def _given(index: torch.Tensor | None) -> torch.Tensor:
    assert index is not None
    return index


def _beside_rest(lacking: torch.Tensor, call: Call, ndim: int) -> torch.Tensor:
    """What is known of each place of the index, aligned with the dims of the result."""
    dims = Indexed(call.args[0], call.args[1])
    behind = ndim - dims.front - dims.ndim
    return lacking.reshape([*lacking.shape, *[1] * behind])


def _by_places(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The indices with the places where a mask is true in its stead."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:
            found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


def _index_put_local(call: Call, placing: Placing) -> Run:
    cut, spec = _cut_dims(call, placing), placing.inputs[0]
    if spec is None or not cut or _fills(*call.args[:4]):
        return call.op

    def run(x: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: object) -> torch.Tensor:
        own, longer = _by_places(indices), x
        for dim in cut:
            own[dim] = _places(_given(own[dim]), spec, dim, placing, x.shape[dim], from_end=True)
            longer = _longer(longer, dim)
        written: torch.Tensor = call.op(longer, own, *rest)
        return written[tuple(slice(size) for size in x.shape)]

    return run


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
        _check_rows(indices, size)
        rows = _local_rows(indices, held, -1)
        if weight.shape[0] == 0:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        found: torch.Tensor = aten.embedding.default(weight, rows.clamp(min=0))
        return found.masked_fill((rows < 0).unsqueeze(-1), 0)

    return run


def _check_rows(indices: torch.Tensor, size: int) -> None:
    # On an accelerator to look would mean to wait; the kernels of CPUs look as well.
    if indices.device.type == "cpu" and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise IndexError(f"index out of range: indices from {int(indices.min())} to {int(indices.max())}, {size} rows")


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


# --- search in what is sorted


def searchsorted(sequence: TensorMeta, values: object, *_: object) -> str:
    """A sequence is whole; several sequences are searched each for its own values."""
    own = named(len(values.shape) if isinstance(values, TensorMeta) else 0)
    batch = [*own[:-1], "[sorted]"] if len(sequence.shape) > 1 else ["[sorted]"]
    return f"f({text(batch)}, {text(own)}, {text(batch)}) -> {text(own)}"


def bucketize(values: TensorMeta, boundaries: TensorMeta, *_: object) -> str:
    return "f(..., _) -> ..."


INDEX = ("index",)
BAGS = (
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward",
)
SEVERAL = ("indices",)

RULES = {
    "index_select": Rule(index_select, local=_along_local, plain=INDEX),
    "gather": Rule(gather, local=_along_local, plain=INDEX),
    "scatter": Rule(scatter, local=_write_along_local, plain=INDEX),
    "scatter_add": Rule(scatter_add, local=_write_along_local, plain=INDEX),
    "scatter_reduce": Rule(scatter, local=_write_along_local, plain=INDEX),
    "index_add": Rule(index_add, local=_write_along_local, plain=INDEX),
    "index_copy": Rule(index_copy, local=_write_along_local, plain=INDEX),
    "index_reduce": Rule(index_reduce, local=_write_along_local, plain=INDEX),
    "index_fill": Rule(index_fill, local=_write_along_local, plain=INDEX),
    "take": Rule(take, plain=INDEX),
    "put": Rule(put, plain=INDEX),
    "masked_scatter": Rule(masked_scatter, plain=("mask",)),
    "masked_scatter_backward": Rule(masked_scatter_backward, plain=("mask",)),
    "index.Tensor": Rule(index, local=_index_local, plain=SEVERAL),
    "_unsafe_index.Tensor": Rule(index, local=_index_local, plain=SEVERAL),
    "index_put": Rule(index_put, local=_index_put_local, plain=SEVERAL),
    "_unsafe_index_put": Rule(index_put, local=_index_put_local, plain=SEVERAL),
    "_index_put_impl": Rule(index_put, local=_index_put_local, plain=SEVERAL),
    "embedding": Rule(embedding, local=_embedding_local, plain=SEVERAL),
    "embedding_dense_backward": Rule(embedding_backward, local=_embedding_backward_local, plain=SEVERAL),
    # Bags are cut by offsets that are data.
    **dict.fromkeys(BAGS, Rule(measured=True, plain=("indices", "offsets"))),
    "searchsorted.Tensor": searchsorted,
    "bucketize.Tensor": bucketize,
}

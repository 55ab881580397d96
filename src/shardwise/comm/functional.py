"""Functional collectives: asynchronous, differentiable, each beside its gradient.

Every function starts a collective over a group and returns an `AsyncCollectiveTensor` that waits when it is first read;
while a graph is traced it waits at once, so that the graph does. The input is never changed, and changing it after the
call does not change the result.

**Gradients.** The loss is the *sum* of all ranks' losses. Then the gradient of a collective is its adjoint: that of a
sum over ranks is the same sum of the ranks' gradients, gathering and reduce-scattering are each other's, an exchange is
undone by the exchange with the splits swapped, and a broadcast's gradients are summed at its source. Whether a tensor
needs a gradient must be the same on all ranks of the group, because its gradient is computed by all of them. Code that
computes *one* loss, the same on all ranks, needs the other convention: `sum_forward` and `sum_backward`.

**Groups.** ``group`` is None for the world, a process group or its name, a `Group`, a list of ranks, a list of such
lists (the one with this rank counts), a 1-D `DeviceMesh`, or ``(mesh, axis)`` with the axis by index or name. ``tag``
is there for PyTorch's sake.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm import wire
from shardwise.comm.async_tensor import AsyncCollectiveTensor
from shardwise.comm.place import GroupLike, Place, place_of
from shardwise.comm.verbs import (
    AllReduce,
    Broadcast,
    Exchange,
    Gather,
    ReduceScatter,
    SumBackward,
    SumForward,
    carry,
    carry_all,
    differentiated,
    split_rows,
)
from shardwise.errors import CollectiveError, message
from shardwise.mesh.world import Group


def all_reduce(self: Tensor, reduceOp: str, group: GroupLike, tag: str = "") -> Tensor:
    """Combine the tensors of all ranks element by element: every rank gets the result, of the shape of ``self``.

    ``reduceOp`` is sum, avg, product, min, max, band, bor or bxor. The gradient of sum (avg) is the sum (avg) of all
    ranks' gradients; that of min and max goes to the ranks that hold the extreme, in equal shares.

    >>> import torch
    >>> from shardwise.comm.functional import all_reduce
    >>> all_reduce(torch.arange(3.0), "sum", None).wait()  # alone in the world
    tensor([0., 1., 2.])
    """
    op, place = _reduction(reduceOp, self.dtype), place_of(group)
    if op not in _LINEAR and differentiated(self):
        return _reduced(all_gather_single(self.unsqueeze(0), 0, place.group), op)
    return carry(AllReduce(place, op), self)


def all_gather_single(self: Tensor, gather_dim: int, group: GroupLike, tag: str = "") -> Tensor:
    """Join the equally large tensors of all ranks along ``gather_dim``; scalars are joined to a vector.

    The gradient is the sum of all ranks' gradients, of which each rank gets its part.
    """
    x = self if self.ndim else self.unsqueeze(0)
    return carry(Gather(place_of(group), _dim(x, gather_dim, "gather"), False), x)


def reduce_scatter_single(
    self: Tensor, reduceOp: str, scatter_dim: int, group: GroupLike, tag: str = "", *, pad: bool = False
) -> Tensor:
    """Combine the tensors of all ranks as `all_reduce` does, and give each rank its part of ``scatter_dim``.

    The group's size must divide that dim (`CollectiveError` otherwise), unless ``pad`` lets zeros be added at its end
    until it does: the parts are equally large, and the last ones end with what the zeros give. The gradient of sum is
    the ranks' gradients, gathered along the dim.

    >>> import torch
    >>> from shardwise.comm.functional import reduce_scatter_single
    >>> from shardwise.sim import run
    >>> run(lambda: reduce_scatter_single(torch.ones(3), "sum", 0, None, pad=True).tolist(), 2)
    [[2.0, 2.0], [2.0, 0.0]]
    """
    place = place_of(group)
    x = _padded(self, _dim(self, scatter_dim, "scatter"), place.group.size) if pad else self
    verb = _scattering(x, reduceOp, scatter_dim, place)
    if verb.op not in _LINEAR and differentiated(x):
        parts = split_rows(x, verb.dim, place.group.size)
        ones = [1] * place.group.size
        return _reduced(all_to_all_single(parts, ones, ones, place.group), verb.op)
    return carry(verb, x)


def all_to_all_single(
    self: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: GroupLike,
    tag: str = "",
) -> Tensor:
    """Send ``input_split_sizes[i]`` rows of dim 0 to rank ``i`` of the group; get ``output_split_sizes[i]`` from it.

    Sizes may differ and be zero; without any, dim 0 is cut in equal parts. The gradient goes back the way it came.
    """
    place = place_of(group)
    received, sent = _splits(self, output_split_sizes, input_split_sizes, place.group)
    return carry(Exchange(place, received, sent), self)


def broadcast(self: Tensor, src: int, group: GroupLike, tag: str = "") -> Tensor:
    """Give every rank the tensor of the rank with index ``src`` in the group.

    All ranks pass the same shape and dtype. The gradient is summed at the source; the others' inputs get zeros.
    """
    place = place_of(group)
    _member(src, place.group, f"broadcast from index {src}")
    return carry(Broadcast(place, src), self)


def permute_tensor(self: Tensor, src_dst: Sequence[int], group: GroupLike, tag: str = "") -> Tensor:
    """Send the tensor of the rank with index ``i`` in the group to the one with index ``src_dst[i]``.

    ``src_dst`` is a permutation of the group's indices, all tensors have the same shape. The gradient goes back.

    >>> import torch
    >>> from shardwise.comm.functional import permute_tensor
    >>> permute_tensor(torch.ones(2), [0], None).wait()
    tensor([1., 1.])
    """
    place = place_of(group)
    size, index = place.group.size, place.group.index
    if sorted(src_dst) != list(range(size)):
        raise CollectiveError(
            message(
                "the pairs are no permutation of the group",
                asked=f"permute_tensor with {list(src_dst)} over ranks {list(place.group.ranks)}",
                do=f"give each of 0 to {size - 1} once: where the tensor of rank i of the group goes",
            )
        )
    sent = [int(other == src_dst[index]) for other in range(size)]
    received = [int(src_dst[other] == index) for other in range(size)]
    return carry(Exchange(place, received, sent), self.unsqueeze(0)).squeeze(0)


def wait_tensor(tensor: Tensor) -> Tensor:
    """Wait for the result of a collective and return it as a plain tensor; gradients pass.

    >>> import torch
    >>> from shardwise.comm.functional import wait_tensor
    >>> wait_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    return tensor if differentiated(tensor) else wire.wait(tensor)


def sum_forward(self: Tensor, group: GroupLike, tag: str = "") -> Tensor:
    """Sum over the ranks; the gradient passes unchanged. For one loss that is the same on all ranks.

    It leaves a region where each rank computes a part of a sum; `sum_backward` enters it.
    """
    return carry(SumForward(place_of(group)), self)


def sum_backward(self: Tensor, group: GroupLike, tag: str = "") -> Tensor:
    """The tensor itself; its gradient is summed over the ranks. For one loss that is the same on all ranks.

    It enters a region where each rank uses the same tensor for a part of the work; `sum_forward` leaves it.
    """
    return carry(SumBackward(place_of(group)), self)


def all_reduce_coalesced(self: Sequence[Tensor], reduceOp: str, group: GroupLike, tag: str = "") -> list[Tensor]:
    """`all_reduce` of several tensors, sent together; each result may be used on its own."""
    place = place_of(group)
    verbs = [AllReduce(place, _reduction(reduceOp, x.dtype)) for x in self]
    if any(verb.op not in _LINEAR and differentiated(x) for verb, x in zip(verbs, self, strict=True)):
        return [all_reduce(x, reduceOp, place.group) for x in self]
    return carry_all(verbs, self)


def all_gather_single_coalesced(self: Sequence[Tensor], group: GroupLike, tag: str = "") -> list[Tensor]:
    """`all_gather_single` of several tensors along dim 0, sent together; each result may be used on its own."""
    verb = Gather(place_of(group), 0, False)
    return carry_all([verb] * len(self), [x if x.ndim else x.unsqueeze(0) for x in self])


def reduce_scatter_single_coalesced(
    inputs: Sequence[Tensor], reduceOp: str, scatter_dim: Sequence[int], group: GroupLike, tag: str = ""
) -> list[Tensor]:
    """`reduce_scatter_single` of several tensors, each along its own dim, sent together.

    Each result may be used on its own.
    """
    place = place_of(group)
    if len(scatter_dim) != len(inputs):
        asked = f"reduce_scatter of {len(inputs)} tensors along dims {list(scatter_dim)}"
        raise CollectiveError(message("one dim for each tensor is needed", asked=asked))
    pairs = list(zip(inputs, scatter_dim, strict=True))
    verbs = [_scattering(x, reduceOp, dim, place) for x, dim in pairs]
    if any(verb.op not in _LINEAR and differentiated(x) for verb, x in zip(verbs, inputs, strict=True)):
        return [reduce_scatter_single(x, reduceOp, dim, place.group) for x, dim in pairs]
    return carry_all(verbs, inputs)


all_gather_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single
all_gather_into_tensor_coalesced = all_gather_single_coalesced
reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
all_gather_single_autograd = all_gather_tensor_autograd = all_gather_single
reduce_scatter_single_autograd = reduce_scatter_tensor_autograd = reduce_scatter_single
all_to_all_single_autograd = all_to_all_single


# --- what may be asked

_LINEAR = ("sum", "avg")
_PADS = {"reduce_scatter": ", as pad=True does"}
_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def _reduction(reduce_op: str, dtype: torch.dtype) -> str:
    op = str(reduce_op).lower()
    if op not in _OPS:
        raise CollectiveError(message(f"no such reduction: {reduce_op!r}", do=f"one of {', '.join(_OPS)}"))
    if dtype.is_complex and op not in _LINEAR:
        possible: tuple[str, ...] = _LINEAR
    elif dtype.is_floating_point and op in ("band", "bor", "bxor"):
        possible = _OPS[:5]
    elif op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        possible = tuple(name for name in _OPS if name != "avg")
    else:
        return op
    asked = f"{op} of {str(dtype).removeprefix('torch.')} tensors"
    raise CollectiveError(
        message(f"{op} has no meaning for this dtype", asked=asked, do=f"one of {', '.join(possible)}")
    )


def _reduced(stacked: Tensor, op: str) -> Tensor:
    if op == "product":
        return stacked.prod(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _scattering(x: Tensor, reduce_op: str, dim: int, place: Place) -> ReduceScatter:
    verb = ReduceScatter(place, _reduction(reduce_op, x.dtype), _dim(x, dim, "scatter"))
    _divides(x, verb.dim, place.group, "reduce_scatter")
    return verb


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = -x.shape[dim] % size
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def _dim(x: Tensor, dim: int, verb: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        dims = f"dims {-x.ndim} to {x.ndim - 1}" if x.ndim else "no dims"
        raise CollectiveError(
            message(f"dim out of range: {dim}", asked=f"{verb} along dim {dim}", got=f"a tensor with {dims}")
        )
    return dim % x.ndim


def _divides(x: Tensor, dim: int, group: Group, verb: str) -> None:
    if x.shape[dim] % group.size:
        raise CollectiveError(
            message(
                f"dim {dim} of size {x.shape[dim]} is not divisible by the group's size {group.size}",
                asked=f"{verb} along dim {dim} of a tensor of shape {tuple(x.shape)} over ranks {list(group.ranks)}",
                do=f"pad dim {dim} to a multiple of {group.size}{_PADS.get(verb, '')}",
            )
        )


def _splits(
    x: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None, group: Group
) -> tuple[list[int], list[int]]:
    asked = (
        f"all_to_all of shape {tuple(x.shape)} over {group.size} ranks with splits {input_splits} to {output_splits}"
    )
    if not x.ndim:
        raise CollectiveError(message("a scalar has no rows to exchange", asked=asked))
    if output_splits is None and input_splits is None:
        _divides(x, 0, group, "all_to_all")
        equal = [x.shape[0] // group.size] * group.size
        return equal, equal
    if output_splits is None or input_splits is None:
        raise CollectiveError(message("output and input splits are given both or neither", asked=asked))
    if len(output_splits) != group.size or len(input_splits) != group.size:
        raise CollectiveError(message("a split size for each rank of the group is needed", asked=asked))
    if sum(input_splits) != x.shape[0]:
        got = f"splits that add up to {sum(input_splits)}, and {x.shape[0]} rows"
        raise CollectiveError(message("the input split sizes do not add up to dim 0", asked=asked, got=got))
    if output_splits[group.index] != input_splits[group.index]:
        got = f"{input_splits[group.index]} rows to itself, {output_splits[group.index]} from itself"
        raise CollectiveError(message("a rank receives from itself what it sends to itself", asked=asked, got=got))
    return list(output_splits), list(input_splits)


def _member(index: int, group: Group, asked: str) -> None:
    if not 0 <= index < group.size:
        do = f"an index from 0 to {group.size - 1}, which counts in the group"
        raise CollectiveError(
            message("no such rank in the group", asked=f"{asked} of ranks {list(group.ranks)}", do=do)
        )

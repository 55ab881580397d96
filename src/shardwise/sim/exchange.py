"""What a collective does to the buffers of all its ranks, once every rank has come.

Reductions go in the order of the ranks and accumulate half precision in float32, so a result depends neither on who
came last nor on the thread that computes it, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.errors import CollectiveError, message
from shardwise.sim.request import Request, tensor_text

Requests = Sequence[Request]
Pieces = Sequence[torch.Tensor | None]


class Disagreement(Exception):
    """Two ranks that agree on the call but not on the pieces that one sends to the other."""


def _minimum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.minimum(total, part, out=total)


def _maximum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.maximum(total, part, out=total)


COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": _minimum,
    "max": _maximum,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def reduced(parts: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """Combine ``parts`` (equal shapes) in their order into a new tensor, float32 for half precision."""
    first = parts[0]
    narrow = first.is_floating_point() and first.element_size() < 4
    total = first.to(torch.float32 if narrow else first.dtype, copy=True)
    combine = COMBINE[reduce_op]
    for part in parts[1:]:
        combine(total, part.to(total.dtype))
    if reduce_op == "avg":
        total.div_(len(parts), rounding_mode=None if total.is_floating_point() or total.is_complex() else "trunc")
    return total


def check_reduction(reduce_op: str, tensor: torch.Tensor) -> None:
    """Refuse a reduction that has no meaning for the dtype, before anybody waits for it."""
    whole_numbers = not tensor.is_floating_point() and not tensor.is_complex()
    refused = (
        reduce_op not in COMBINE
        or (reduce_op in ("band", "bor", "bxor") and not whole_numbers)
        or (reduce_op in ("min", "max") and tensor.is_complex())
        or (reduce_op == "avg" and tensor.dtype == torch.bool)
    )
    if refused:
        raise CollectiveError(
            message(f"no reduction {reduce_op!r} of {tensor_text(tensor)}", do=f"one of {', '.join(COMBINE)}")
        )


def all_reduce(requests: Requests) -> None:
    for index in range(len(requests[0].inputs)):
        total = reduced([request.inputs[index] for request in requests], requests[0].reduce_op)
        for request in requests:
            request.outputs[index].copy_(total)


def reduce(requests: Requests) -> None:
    for index, output in enumerate(requests[_root(requests)].outputs):
        output.copy_(reduced([request.inputs[index] for request in requests], requests[0].reduce_op))


def reduce_scatter_tensor(requests: Requests) -> None:
    size = len(requests)
    for index in range(len(requests[0].inputs)):
        total = reduced([request.inputs[index] for request in requests], requests[0].reduce_op)
        for request, part in zip(requests, total.reshape(size, -1).unbind(0), strict=True):
            request.outputs[index].copy_(part.view(request.outputs[index].shape))


def reduce_scatter(requests: Requests) -> None:
    totals = [
        reduced([request.inputs[index] for request in requests], requests[0].reduce_op)
        for index in range(len(requests))
    ]
    for request, total in zip(requests, totals, strict=True):
        request.outputs[0].copy_(total)


def all_gather_into_tensor(requests: Requests) -> None:
    for index in range(len(requests[0].inputs)):
        whole = torch.cat([request.inputs[index].reshape(-1) for request in requests])
        for request in requests:
            request.outputs[index].copy_(whole.view(request.outputs[index].shape))


def broadcast(requests: Requests) -> None:
    root = _root(requests)
    for source, *outputs in zip(requests[root].inputs, *(request.outputs for request in requests), strict=True):
        for index, output in enumerate(outputs):
            if index != root:
                output.copy_(source)


def barrier(requests: Requests) -> None:
    """Nothing moves."""


def all_gather(requests: Requests) -> None:
    size = len(requests)
    _deliver(requests, [[request.inputs[0]] * size for request in requests], [request.outputs for request in requests])


def all_to_all(requests: Requests) -> None:
    _deliver(requests, [request.inputs for request in requests], [request.outputs for request in requests])


def all_to_all_single(requests: Requests) -> None:
    sent, received = [], []
    for request in requests:
        assert request.splits is not None
        sent.append(request.inputs[0].split(list(request.splits[0])))
        received.append(request.outputs[0].split(list(request.splits[1])))
    _deliver(requests, sent, received)


def scatter(requests: Requests) -> None:
    root = _root(requests)
    nothing: Pieces = [None] * len(requests)
    sent = [request.inputs if index == root else nothing for index, request in enumerate(requests)]
    received = [_only(root, request.outputs[0], len(requests)) for request in requests]
    _deliver(requests, sent, received)


def gather(requests: Requests) -> None:
    root = _root(requests)
    nothing: Pieces = [None] * len(requests)
    sent = [_only(root, request.inputs[0], len(requests)) for request in requests]
    received = [request.outputs if index == root else nothing for index, request in enumerate(requests)]
    _deliver(requests, sent, received)


def send(requests: Requests) -> None:
    """The two ends of a message: the sender, then the receiver."""
    sender, receiver = requests
    _deliver(requests, [[None, sender.inputs[0]], [None, None]], [[None, None], [receiver.outputs[0], None]])


def _root(requests: Requests) -> int:
    return [request.rank for request in requests].index(requests[0].root or 0)


def _only(index: int, piece: torch.Tensor, size: int) -> Pieces:
    return [piece if place == index else None for place in range(size)]


def _deliver(requests: Requests, sent: Sequence[Pieces], received: Sequence[Pieces]) -> None:
    moves = [
        (source, target, sent[source][target], received[target][source])
        for source in range(len(requests))
        for target in range(len(requests))
    ]
    for source, target, piece, buffer in moves:
        _check(requests[source].rank, requests[target].rank, piece, buffer)
    for _, _, piece, buffer in moves:
        if piece is not None and buffer is not None:
            buffer.copy_(piece)


def _check(source: int, target: int, piece: torch.Tensor | None, buffer: torch.Tensor | None) -> None:
    if (piece is None) != (buffer is None):
        raise Disagreement(f"only one of rank {source} and rank {target} takes part in the piece from {source}")
    if piece is not None and buffer is not None and (piece.shape != buffer.shape or piece.dtype != buffer.dtype):
        raise Disagreement(
            f"rank {source} sends {tensor_text(piece)} to rank {target}, which expects {tensor_text(buffer)}"
        )


MOVE: dict[str, Callable[[Requests], None]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter": reduce_scatter,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "barrier": barrier,
    "send": send,
}

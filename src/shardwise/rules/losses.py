"""Losses: their means are over global counts, whatever the sizes of the local parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

import torch

from shardwise.rules.empty import zeros
from shardwise.rules.rule import Call, Placing, Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)  # torch's numbers for reduction=
Run = Callable[..., object]
Loss = tuple[torch.Tensor, torch.Tensor]


def _reduction(call: Call) -> tuple[int, int]:
    position = next(at for at, argument in enumerate(call.op._schema.arguments) if argument.name == "reduction")
    return position, call.args[position]


def _count(shapes: Sequence[Sequence[int]]) -> int:
    return prod(torch.broadcast_shapes(*map(tuple, shapes)))


# --- losses of one element each


def _mean_local(call: Call, placing: Placing) -> Run:
    position, reduction = _reduction(call)
    if reduction != MEAN or not placing.is_pending():
        return call.op
    shapes = [placing.input_shape(at) for at, operand in enumerate(call.operands) if operand is not None]
    share = _share(_count(shapes), _count([operand.shape for operand in call.operands if operand is not None]))

    def run(*args: object) -> torch.Tensor:
        # A mean over nothing is not a number, but its sum is zero.
        found: torch.Tensor = call.op(*args[:position], MEAN if share else SUM, *args[position + 1 :])
        return found * share

    return run


def _share(held: int, count: int) -> float:
    return held / count if count else 1.0


def _mean_backward_local(call: Call, placing: Placing) -> Run:
    position, reduction = _reduction(call)
    own = call.operands[1]
    assert own is not None, call
    if reduction != MEAN or not any(placing.cuts(1, dim) for dim in range(len(own.shape))):
        return call.op
    share = _share(prod(placing.input_shape(1)), prod(own.shape))

    def run(grad: torch.Tensor, *rest: object) -> object:
        return call.op(grad * share, *rest) if share else call.op(grad, *rest[: position - 1], SUM, *rest[position:])

    return run


FORWARD = Rule("f(..., ...) -> ...", local=_mean_local)
BACKWARD = Rule("... / ... / ... -> ...", local=_mean_backward_local)

ELEMENTWISE = {
    "mse_loss": FORWARD,
    "mse_loss_backward": BACKWARD,
    "smooth_l1_loss": FORWARD,
    "smooth_l1_loss_backward": BACKWARD,
    "huber_loss": FORWARD,
    "huber_loss_backward": BACKWARD,
    "soft_margin_loss": FORWARD,
    "soft_margin_loss_backward": BACKWARD,
    "binary_cross_entropy": Rule("f(..., ..., ...) -> ...", local=_mean_local),
    "binary_cross_entropy_backward": Rule("... / ... / ... / ... -> ...", local=_mean_backward_local),
    "binary_cross_entropy_with_logits": Rule("f(..., ..., ..., ...) -> ...", local=_mean_local),
}


# --- the negative log likelihood


def nll_loss_forward(x: object, target: object, weight: object, reduction: int, ignore_index: int) -> str | Rule:
    """The mean is the sum over the total weight, which depends on the data of all ranks."""
    return Rule(expand=nll_mean) if reduction == MEAN else _nll("f({x}, {target}, [c]) -> {loss}, ...", x, reduction)


def nll_mean(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore: int) -> Loss:
    """The mean of ``nll_loss``: of the ranks' data only two scalars are reduced."""
    forward = aten.nll_loss2d_forward.default if x.dim() == 4 else aten.nll_loss_forward.default
    loss, total = forward(x, target, weight, SUM, ignore)
    # The identity, but not a linear one: here the pending sum is reduced, once for both uses.
    total = aten.clamp.default(total, -math.inf)
    return loss / total, total


def _nll(template: str, x: object, reduction: int) -> str:
    shape = getattr(x, "shape", ())
    dims = ["n", "[c]", *(f"x{dim}" for dim in range(len(shape) - 2))] if len(shape) > 1 else ["[c]"]
    target = " ".join(name for name in dims if name != "[c]") or "..."
    return template.format(x=" ".join(dims), target=target, loss=target if reduction == NONE else "...")


def _nll_local(call: Call, placing: Placing) -> Run:
    _, reduction = _reduction(call)
    if reduction != NONE or not placing.is_pending(1):
        return call.op

    def run(*args: object) -> Loss:
        loss, total = call.op(*args)
        return loss, torch.zeros_like(total)  # unused, but it is summed over the ranks

    return run


def nll_loss_backward(
    grad: object, x: object, target: object, weight: object, reduction: int, ignore_index: int, total: object
) -> str:
    return _nll("{loss} / {x} / {target} / [c] / ... -> {x}", x, reduction)


NLL = {
    "nll_loss_forward": Rule(nll_loss_forward, local=_nll_local),
    "nll_loss2d_forward": Rule(nll_loss_forward, local=_nll_local),
    "nll_loss_backward": nll_loss_backward,
    "nll_loss2d_backward": nll_loss_backward,
}

# --- margins: each sample has one loss over its classes


def _rows(x: TensorMeta, form: str, reduction: int) -> str:
    if len(x.shape) < 2:
        return form.format(n="_", row="_", loss="_", c="_")
    return form.format(n="n", row="n [c]", loss="n" if reduction == NONE else "...", c="[c]")


def multi_margin_loss(x: TensorMeta, target: object, p: float, margin: float, weight: object, reduction: int) -> str:
    return _rows(x, "f({row}, {n}, {c}) -> {loss}", reduction)


def multi_margin_loss_backward(
    grad: object, x: TensorMeta, target: object, p: float, margin: float, weight: object, reduction: int
) -> str:
    return _rows(x, "{loss} / {row} / {n} / {c} -> {row}", reduction)


def multilabel_margin_loss(x: TensorMeta, target: object, reduction: int) -> str:
    return _rows(x, "f({row}, {row}) -> {loss}, {row}", reduction)


def multilabel_margin_loss_backward(
    grad: object, x: TensorMeta, target: object, reduction: int, is_target: object
) -> str:
    return _rows(x, "{loss} / {row} / {row} / {row} -> {row}", reduction)


def _mean_rows_local(call: Call, placing: Placing) -> Run:
    _, reduction = _reduction(call)
    own = call.operands[0]
    assert own is not None, call
    if 0 in placing.input_shape():
        return zeros(call, placing)
    if reduction != MEAN or not placing.is_pending():
        return call.op
    share = _share(prod(placing.input_shape()), prod(own.shape))

    def run(*args: object) -> object:
        found = call.op(*args)
        return (found[0] * share, found[1]) if isinstance(found, tuple) else found * share

    return run


def _mean_rows_backward_local(call: Call, placing: Placing) -> Run:
    return zeros(call, placing) if 0 in placing.input_shape(1) else _mean_backward_local(call, placing)


MARGINS = {
    "multi_margin_loss": Rule(multi_margin_loss, local=_mean_rows_local),
    "multi_margin_loss_backward": Rule(multi_margin_loss_backward, local=_mean_rows_backward_local),
    "multilabel_margin_loss_forward": Rule(multilabel_margin_loss, local=_mean_rows_local),
    "multilabel_margin_loss_backward": Rule(multilabel_margin_loss_backward, local=_mean_rows_backward_local),
}

# --- on whole operands: what lies where follows from the lengths of sequences and bags

WHOLE = {
    "_ctc_loss": Rule(measured=True),
    "_ctc_loss_backward": Rule(measured=True),
    "torch_nn::_linear_cross_entropy_batch_chunked": Rule(measured=True),
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": Rule(measured=True),
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction_backward": Rule(measured=True),
}

RULES = {**ELEMENTWISE, **NLL, **MARGINS, **WHOLE}

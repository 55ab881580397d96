"""Operators that work on each element by itself: only what lets a pending reduction pass is written here.

Whatever torch tags as pointwise and is not named here is ``f(..., ...) -> ...``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from shardwise.rules.rule import Call, Placing, Rule, called
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Number = bool | int | float | complex
Meaning = Callable[..., "str | Rule"]

SAME = "clone alias detach lift positive alias_copy detach_copy"
LINEAR_AND_RISING = "deg2rad rad2deg"
LINEAR_AND_FALLING = "neg"
LINEAR = "_conj_physical conj_physical zero"
RISING = (
    "relu exp exp2 expm1 sigmoid tanh ceil floor round trunc sign erf atan sinh asinh hardsigmoid special_log_ndtr "
    "round.decimals"
)
FALLING = "erfc"
OPAQUE_OF_TWO = "floor_divide _prelu_kernel"
# The gradient comes first, and the gradient of a gradient is the same; what was saved stays as it is.
LINEAR_IN_THE_FIRST = (
    "threshold_backward gelu_backward sigmoid_backward tanh_backward silu_backward leaky_relu_backward elu_backward "
    "hardtanh_backward hardsigmoid_backward hardswish_backward softplus_backward logit_backward hardshrink_backward "
    "softshrink_backward mish_backward polar"
)


def scaled(left: str = "...") -> Meaning:
    """An operator that multiplies by its second argument, or divides by it."""

    def meaning(_x: TensorMeta, number: Number, *_rest: object) -> str:
        sign = _sign(number)
        return f"{'+' if sign > 0 else '-'}({left}) -> ..." if sign else f"{left} -> ..."

    return meaning


def _sign(number: Number) -> int:
    if isinstance(number, complex) or not math.isfinite(number) or number == 0:
        return 0
    return 1 if number > 0 else -1


def once(call: Call, placing: Placing) -> Callable[..., object]:
    """A number is added to a pending sum by one rank: for the others it is 0."""
    if not placing.is_pending():
        return call.op
    run = called(call.op)
    if placing.adds():
        return run
    at, number = next((at, item) for at, item in enumerate(call.args[1:], start=1) if isinstance(item, Number))
    zero = type(number)(0)
    return lambda *args: run(*args[:at], zero, *args[at + 1 :])


def shifted(_x: TensorMeta, _number: Number, _alpha: Number = 1) -> Rule:
    return Rule("+(...) -> ...", local=once)


def added(x: object, other: object, _alpha: Number = 1) -> str | Rule:
    """``x + alpha * other``: a number in the place of a tensor only shifts the other."""
    if isinstance(other, TensorMeta):
        return "... + ... -> ..." if isinstance(x, TensorMeta) else "f(..., ...) -> ..."
    return Rule("+(... / ...) -> ...", local=once)


def subtracted_from(_x: TensorMeta, _number: Number, alpha: Number = 1) -> Rule:
    return Rule({1: "-(...) -> ...", -1: "+(...) -> ..."}.get(_sign(alpha), "... -> ..."), local=once)


def divided(_x: object, _other: object, rounding_mode: str | None = None) -> str:
    return "... / ... -> ..." if rounding_mode is None else "f(..., ...) -> ..."


def quotient(_x: object, other: TensorMeta | Number) -> str:
    return "f(..., ...) -> ..." if isinstance(other, Number) and other == 0 else "... / ... -> ..."


def divided_by_number(x: TensorMeta, number: Number, rounding_mode: str | None = None) -> str:
    return str(scaled()(x, number)) if rounding_mode is None and number != 0 else "f(...) -> ..."


def cast(x: TensorMeta, dtype: torch.dtype | None = None, *_rest: object) -> str:
    if dtype is None or dtype is x.dtype:
        return "same(...) -> ..."
    return "+(...) -> ..." if dtype.is_floating_point or dtype.is_complex else "... -> ..."


def copied(x: TensorMeta, source: TensorMeta, *_rest: object) -> str:
    """What was in ``x`` does not matter, so any pending reduction that both have is one of the copy."""
    return "same(..., ...) -> ..." if x.dtype is source.dtype else "... + ... -> ..."


def filled(_x: TensorMeta, value: Number) -> str | Rule:
    return "... -> ..." if value == 0 else Rule("... -> ...", local=once)


def chosen(condition: TensorMeta, _yes: object, _no: object) -> str:
    """Linear in both branches together; the condition, a boolean, is never pending."""
    return "... * ... + ... -> ..." if condition.dtype is torch.bool else "f(..., ..., ...) -> ..."


def masked(_x: TensorMeta, _mask: TensorMeta, value: Number) -> str | Rule:
    return "... * ... -> ..." if value == 0 else Rule("... * ... -> ...", local=once)


def clamped(_x: TensorMeta, *_bounds: object) -> str:
    return "up(...) -> ..."


def powered(_x: TensorMeta, exponent: Number) -> str:
    if isinstance(exponent, complex) or not math.isfinite(exponent) or exponent != int(exponent) or exponent < 1:
        return "f(...) -> ..."
    return "+(...) -> ..." if exponent == 1 else "up(...) -> ..." if exponent % 2 else "f(...) -> ..."


def leaky(_x: TensorMeta, slope: Number = 0.01) -> str:
    return "up(...) -> ..." if _sign(slope) > 0 or slope == 0 else "f(...) -> ..."


def exponential_unit(_x: TensorMeta, *slopes: Number) -> str:
    return "up(...) -> ..." if all(_sign(slope) > 0 for slope in slopes) else "f(...) -> ..."


def threshold(_x: TensorMeta, threshold: float, value: float) -> str:
    return "up(...) -> ..." if value <= threshold else "f(...) -> ..."


def soft(_x: TensorMeta, beta: float = 1, _threshold: float = 20) -> str:
    return "up(...) -> ..." if _sign(beta) > 0 else "f(...) -> ..."


def each(names: str, meaning: str) -> dict[str, str | Meaning | Rule]:
    """The same meaning for several operators."""
    return dict.fromkeys(names.split(), meaning)


def of_sign(meaning: Meaning) -> Rule:
    """A ``meaning`` that asks no more of a float than its sign, and whether it is 0 or not finite."""
    return Rule(meaning, loose=True)


RULES: dict[str, str | Meaning | Rule] = {
    **each(SAME, "same(...) -> ..."),
    **each(LINEAR_AND_RISING, "+(...) -> ..."),
    **each(LINEAR_AND_FALLING, "-(...) -> ..."),
    **each(LINEAR, "... -> ..."),
    **each(RISING, "up(...) -> ..."),
    **each(FALLING, "down(...) -> ..."),
    **each(LINEAR_IN_THE_FIRST, "... / ... -> ..."),
    **each(OPAQUE_OF_TWO, "f(..., ...) -> ..."),
    "_conj": "... -> ...",
    "_neg_view": "... -> ...",
    "hardswish": "f(...) -> ...",
    "floor_divide.Scalar": "f(...) -> ...",
    "_to_copy": cast,
    "copy": copied,
    "fill.Scalar": of_sign(filled),
    "fill.Tensor": "... + ... -> ...",
    "add.Tensor": of_sign(added),
    "add.Scalar": of_sign(shifted),
    "sub.Tensor": of_sign(added),
    "sub.Scalar": of_sign(shifted),
    "rsub.Tensor": "... + ... -> ...",
    "rsub.Scalar": of_sign(subtracted_from),
    "complex": "... + ... -> ...",
    "mul.Tensor": "... * ... -> ...",
    "mul.Scalar": of_sign(scaled()),
    "native_dropout_backward": "... * ... -> ...",
    "div.Tensor": of_sign(quotient),
    "div.Scalar": of_sign(divided_by_number),
    "div.Tensor_mode": divided,
    "div.Scalar_mode": of_sign(divided_by_number),
    "ldexp.Tensor": "... / ... -> ...",
    "addcmul": "... + ... * ... -> ...",
    "addcdiv": "... + ... / ... -> ...",
    "lerp.Scalar": "... + ... -> ...",
    "lerp.Tensor": "... + ... / ... -> ...",
    "where.self": chosen,
    "masked_fill.Scalar": of_sign(masked),
    "masked_fill.Tensor": "... * ... + ... -> ...",
    "clamp": of_sign(clamped),
    "clamp_min": of_sign(clamped),
    "clamp_max": of_sign(clamped),
    "clamp.Tensor": "f(..., ..., ...) -> ...",
    "clamp_min.Tensor": "f(..., ...) -> ...",
    "clamp_max.Tensor": "f(..., ...) -> ...",
    "hardtanh": clamped,
    "threshold": threshold,
    "leaky_relu": of_sign(leaky),
    "elu": exponential_unit,
    "celu": exponential_unit,
    "softplus": soft,
    "pow.Tensor_Scalar": powered,
}

"""Operators that make a tensor in the likeness of another whose elements they do not read, and those that draw numbers.

What is drawn is the dispatcher's business: a rule only says which dims may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.pattern import along, named, text
from shardwise.rules.rule import Call, Placing, Rule, called
from shardwise.sharding.spec import TensorMeta, dense

Run = Callable[..., object]
Sizes = Sequence[int]

LIKE = "like(...) -> ..."


def new(x: TensorMeta, size: Sizes, *_: object) -> str:
    """A new tensor may lie in any way; a dim that is as long as that of ``x`` is cut with it."""
    before, after = named(len(x.shape), "x"), named(len(size), "n")
    for dim, (own, length) in enumerate(zip(x.shape, size, strict=False)):
        if own == length:
            before[dim] = after[dim] = f"d{dim}"
    return f"like({text(before)}) -> {text(after)}"


def _new_local(call: Call, placing: Placing) -> Run:
    shape, run = placing.output_shape(), called(call.op)
    return lambda x, size, *rest: run(x, shape, *rest)


def _new_strided_local(call: Call, placing: Placing) -> Run:
    size, stride = call.args[1:3]
    shape, run = placing.output_shape(), called(call.op)
    if shape == tuple(size):
        return run
    packed = dense(shape, stride)
    return lambda x, _size, _stride, *rest: run(x, shape, packed, *rest)


def multinomial(x: TensorMeta, *_: object) -> str:
    dims = along(x, [-1])
    return f"f({text(dims)}) -> {text([*dims[:-1], '[samples]'])}"


def each(names: str, rule: str | Rule) -> dict[str, str | Rule]:
    """The same rule for several operators."""
    return dict.fromkeys(names.split(), rule)


RULES = {
    # A sum of zeros is zero, whatever is pending.
    "zeros_like": "same(...) -> ...",
    **each("ones_like full_like empty_like rand_like randn_like randint_like", LIKE),
    "randint_like.Tensor": "like(..., _) -> ...",
    "randint_like.Tensor_generator": "like(..., _) -> ...",
    **each("new_zeros new_ones new_full new_empty", Rule(new, local=_new_local)),
    "new_empty_strided": Rule(new, local=_new_strided_local),
    **each("uniform normal_functional exponential geometric log_normal cauchy random bernoulli.p", LIKE),
    "normal_": Rule(LIKE, in_place=True),
    "bernoulli": "f(...) -> ...",
    "bernoulli.Tensor": "f(..., ...) -> ...",
    "poisson": "f(...) -> ...",
    "normal.Tensor_float": "f(...) -> ...",
    "normal.float_Tensor": "f(...) -> ...",
    "normal.Tensor_Tensor": "f(..., ...) -> ...",
    "multinomial": multinomial,
}

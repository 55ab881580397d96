"""The shortest way into a kernel: the bindings that `torch.relu` and its like are, in place of operator overloads.

An overload goes through a boxed call that takes about three times as long. A binding finds the same overload from the
same arguments; a test holds that it gives the same results for every operator listed here.

A number beside tensors is made a tensor of float64 by torch, and cast to their dtype by a second kernel, anew in each
call and for each entry of a list. `casting` does so once for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

FUNCTIONS = """
    abs add addcdiv addcmul addmm amax amin argmax argmin baddbmm bitwise_and bitwise_not bitwise_or bmm cat ceil
    clamp clone cos cumsum div embedding eq erf exp floor ge gt isnan le log log1p logical_not logsumexp lt maximum mean
    minimum mm mul native_layer_norm ne neg pow prod reciprocal relu rsqrt rsub sigmoid sign sin sqrt stack sub sum
    tanh tril triu where convolution index_select gather ones_like zeros_like full_like split
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
"""
NEURAL = "linear gelu silu elu hardswish leaky_relu"
METHODS = """
    detach expand masked_fill permute select squeeze t transpose unbind unfold unsqueeze view
    add_ mul_ div_ sub_ copy_ zero_ fill_ addcmul_ addcdiv_ lerp_ sqrt_ clamp_ neg_ exp_
"""
LISTS = """
    _foreach_add_ _foreach_mul_ _foreach_div_ _foreach_sub_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_
    _foreach_sqrt _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_neg _foreach_sqrt_
    _foreach_norm
"""


def _named(owner: object, names: str) -> dict[str, Callable[..., object]]:
    return {name: getattr(owner, name) for name in names.split()}


BINDINGS: dict[str, Callable[..., object]] = {
    **_named(torch._C._VariableFunctions, FUNCTIONS + LISTS),
    **_named(torch._C._nn, NEURAL),
    **_named(torch._C._linalg, "linalg_vector_norm"),  # type: ignore[attr-defined]
    **_named(torch.Tensor, METHODS),
}


def direct(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The quickest callable that does what ``op`` does to plain tensors, with the same arguments.

    >>> direct(torch.ops.aten.relu.default)(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if op.namespace != "aten" or op._overloadname.endswith("out") or _takes_alpha(op):
        return op._op
    return BINDINGS.get(op._schema.name.removeprefix("aten::"), op._op)


def _takes_alpha(op: torch._ops.OpOverload) -> bool:
    """Whether a number stands last in the arguments that a binding takes by name only."""
    return any(argument.name == "alpha" and not argument.kwarg_only for argument in op._schema.arguments)


ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
NUMBERS = 1024  # how many are remembered
_modes = torch._C._len_torch_dispatch_stack


def casting(op: torch._ops.OpOverload, other: object, dtypes: set[torch.dtype]) -> Callable[..., object] | None:
    """What to take for ``other``, the number or numbers beside tensors of ``dtypes`` on CPUs, given all arguments.

    None to take it as it comes: only for float32 it is known to be the same bit for bit (half precision computes with
    the number as it is), and only arithmetic has a variant with tensors for each with numbers.
    """
    stem, overload = op._schema.name.removeprefix("aten::"), op._overloadname
    if dtypes != {torch.float32} or stem.removeprefix("_foreach_").rstrip("_") not in ARITHMETIC:
        return None
    if stem.startswith("_foreach_"):
        given = other if isinstance(other, (list, tuple)) else [other]
        floats = all(item.__class__ is float for item in given)
        return _cast_each if floats and overload in ("Scalar", "ScalarList") else None
    return _cast_one if other.__class__ is float and overload == "Tensor" else None


@lru_cache(maxsize=NUMBERS)
def _cast(number: float) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.scalar_tensor(number, dtype=torch.float64, device="cpu").float()


def _cast_one(args: list[object]) -> object:
    number = args[1]
    return number if _modes() or not number else _cast(number)  # 0.0 and -0.0 are one key


def _cast_each(args: list[object]) -> object:
    tensors, given = args[0], args[1]
    assert isinstance(tensors, list), tensors
    if isinstance(given, list):
        return given if _modes() or not all(given) else [*map(_cast, given)]
    return given if _modes() or not given else [_cast(given)] * len(tensors)

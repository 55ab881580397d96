"""Operators that mean nothing on a distributed tensor, and why: they are refused by name.

They speak of memory, of which every rank has a part only, or give tensors that are not dense.
"""

from __future__ import annotations

import torch

from shardwise.errors import RuleError, message
from shardwise.rules.parts import spec_of
from shardwise.rules.rule import Rule

MEMORY = "resize_ resize_as_ resize resize_as set_"
SPARSE = """
    _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc _sparse_softmax _sparse_log_softmax
    _sparse_addmm _sparse_mm_reduce_impl sspaddmm
"""
NESTED = "_nested_tensor_from_tensor_list"
STORED_OTHERWISE = "to_mkldnn quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic"


def refused(name: str, reason: str, do: str) -> Rule:
    """A rule that raises `RuleError`, whatever the arguments."""

    def refuse(*args: object) -> object:
        flat = [one for item in args for one in (item if isinstance(item, (list, tuple)) else [item])]
        given = [str(spec_of(one) or "a plain tensor") for one in flat if isinstance(one, torch.Tensor)]
        raise RuleError(message(f"aten.{name}: {reason}", asked=f"{name}({', '.join(given)})", do=do))

    return Rule(expand=refuse, plain=("self", "mat1", "mat2", "source"))


# By name: why, and what to do instead.
REASONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        MEMORY.split(),
        (
            "it says what memory a tensor has, and of a distributed one every rank has a part",
            "make a new tensor: x.new_empty(size), x.reshape(size) or x.clone()",
        ),
    ),
    **dict.fromkeys(
        SPARSE.split(),
        ("a distributed tensor is dense, and so are its parts", "work on x.to_local() or x.full_tensor()"),
    ),
    **dict.fromkeys(
        NESTED.split(), ("a nested tensor has no shape that ranks could share", "nest the .to_local() of each")
    ),
    **dict.fromkeys(
        STORED_OTHERWISE.split(), ("a distributed tensor is strided", "work on x.to_local() or x.full_tensor()")
    ),
}

RULES: dict[str, Rule] = {name: refused(name, *why) for name, why in REASONS.items()}

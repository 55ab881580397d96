"""Made-up calls of operators: arguments that a schema allows, to see what a rule says of them.

Tensors have four entries in every dim, so that shapes fit each other; what they hold does not matter, for only their
`TensorMeta` is made up. Ranks and dtypes are tried until torch's own meta kernels and the rule agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.errors import ShardwiseError
from shardwise.rules.equation import parse
from shardwise.rules.rule import Call, Rule, choices, resolve
from shardwise.rules.table import make_call, slots
from shardwise.sharding.spec import TensorMeta
from shardwise.tensor.metas import output_metas

Op = torch._ops.OpOverload
SIZE = 4
REFUSALS = (ShardwiseError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
RANKS = (3, 2, 4, 1, 5, 0)

# What arguments are called in torch's schemas, and what is taken for them.
INDICES = frozenset(["index", "indices", "target", "sorter", "repeats", "ind", "self_indices"])
MASKS = frozenset(["mask", "condition", "where"])
DIMS = frozenset(["dim", "dims", "axis", "axes", "reduction_dims", "expand1", "expand2", "expand3", "sumdim"])
WINDOWS = frozenset(["kernel_size", "stride", "padding", "dilation", "output_padding", "output_size", "pad"])
NAMED: Mapping[str, object] = {
    "dim0": 0,
    "dim1": 1,
    "dim2": 1,
    "axis0": 0,
    "axis1": 1,
    "k": 1,
    "start": 1,
    "groups": 1,
    "reduction": 0,
    "reduce": "sum",
    "dtype": torch.float32,
    "p": 0.5,
    "norm_type": 2.0,
    "ord": 2.0,
    "shifts": [1],
    "split_size": 2,
    "chunks": 2,
    "dropout_p": 0.0,
    "mode": "reduced",
    "driver": None,
    "UPLO": "L",
    "normalized_shape": [SIZE],
    "N": SIZE,
    "C": SIZE,
    "HxW": SIZE,
    "group": 2,
}
TYPED = {"bool": False, "float": 0.5, "number": 2, "int": 1, "str": "sum"}
# Where other arguments show more of what the operator means.
BETTER: Mapping[str, Mapping[str, object]] = {
    "view": {"size": [SIZE * SIZE, SIZE]},
    "view_copy": {"size": [SIZE * SIZE, SIZE]},
    "_unsafe_view": {"size": [SIZE * SIZE, SIZE]},
    "_reshape_copy": {"size": [SIZE * SIZE, SIZE]},
    "_reshape_alias": {"size": [SIZE * SIZE, SIZE], "stride": [SIZE, 1]},
    "as_strided": {"size": [SIZE * SIZE, SIZE], "stride": [SIZE, 1]},
    "as_strided_copy": {"size": [SIZE * SIZE, SIZE], "stride": [SIZE, 1]},
    "permute": {"dims": [2, 0, 1]},
    "permute_copy": {"dims": [2, 0, 1]},
    "expand": {"size": [2, SIZE, SIZE, SIZE]},
    "expand_copy": {"size": [2, SIZE, SIZE, SIZE]},
    "new_empty_strided": {"size": [SIZE, SIZE], "stride": [SIZE, 1]},
    "split_with_sizes": {"split_sizes": [1, 3]},
    "split_with_sizes_copy": {"split_sizes": [1, 3]},
    "unsafe_split_with_sizes": {"split_sizes": [1, 3]},
    "select_backward": {"input_sizes": [SIZE, SIZE]},
    "repeat": {"repeats": [2, 1, 1]},
    "narrow_copy": {"length": 2},
    "roll": {"dims": [2]},
}
RANKED = {"permute": 3, "permute_copy": 3, "glu_backward": 3, "select_backward": 1, "repeat": 3}


def example(op: Op, rule: Rule) -> Call | None:
    """A call of ``op`` of which ``rule`` says what it means, or None if none was found.

    >>> from shardwise.rules.table import lookup
    >>> softmax = torch.ops.aten._softmax.default
    >>> example(softmax, lookup(softmax)).args
    (f32[4, 4, 4], 2, False)
    """
    tries = [args for ndim in _ranks(op) for args in _arguments(op, ndim)]
    found = (_call(op, rule, args, outputs) for outputs in (True, False) for args in tries)
    return next((call for call in found if call is not None), None)


def _ranks(op: Op) -> Sequence[int]:
    name = _name(op)
    told = re.search(r"([123])d(_|$)", name)
    if name in RANKED:
        return (RANKED[name],)
    if "loss" in name:
        return (2, 4)
    return (int(told[1]) + 2,) if told else (4,) if "_attention" in name else RANKS


def _name(op: Op) -> str:
    return op._schema.name.rpartition("::")[2]


def _call(op: Op, rule: Rule, args: tuple[object, ...], outputs: bool) -> Call | None:
    """The call, if torch can tell how its results look (or nobody asks for ``outputs``), and the rule what it means."""
    try:
        call = make_call(op, args, {}, output_metas(op, *by_kind(op, args)) if outputs else ())
        _, meaning = resolve(rule, call)
        if isinstance(meaning, str) and meaning:
            parse(meaning)
        if meaning != "" and outputs:
            choices(rule, call)
        return call
    except REFUSALS:
        return None


def by_kind(op: Op, args: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """All arguments in schema order, as positional ones and those that must be named."""
    positional = sum(not argument.kwarg_only for argument in op._schema.arguments)
    names = [slot.name for slot in slots(op)]
    return tuple(args[:positional]), dict(zip(names[positional:], args[positional:], strict=True))


def _arguments(op: Op, ndim: int) -> Iterator[tuple[object, ...]]:
    tensors = sum(slot.kind == "tensor" for slot in slots(op))
    for others in dict.fromkeys((ndim, max(ndim - 1, 0), 1)):
        if tensors < 2 and others != ndim:
            continue
        for index in (torch.int64, torch.float32):
            yield tuple(_argument(op, at, ndim, others, index) for at in range(len(slots(op))))


def _argument(op: Op, at: int, ndim: int, others: int, index: torch.dtype) -> object:
    argument, slot = op._schema.arguments[at], slots(op)[at]
    kind, better = str(argument.type), BETTER.get(_name(op), {})
    if slot.kind == "tensor":
        if kind.startswith("Optional") and slot.name not in INDICES:
            return None
        leads = slot.name == "self" if "loss" in _name(op) else at == 0
        return _tensor(slot.name, ndim if leads else others, index)
    if slot.kind == "tensors":
        return [_tensor(slot.name, ndim if at == 0 else 1, index)] * 2
    if slot.name in better:
        return better[slot.name]
    if argument.has_default_value() and not (slot.name in (*DIMS, "start") and slot.default in (None, [])):
        return slot.default
    return _static(slot.name, kind, ndim)


def _tensor(name: str, ndim: int, index: torch.dtype) -> TensorMeta:
    dtype = torch.bool if name in MASKS else index if name in INDICES else torch.float32
    return TensorMeta.contiguous((SIZE,) * ndim, dtype)


def _static(name: str, kind: str, ndim: int) -> object:
    if name in NAMED:
        return NAMED[name]
    last = max(ndim - 1, 0)
    if "List" in kind:
        if name in DIMS:
            return [last] if ndim else []
        if "bool" in kind:
            return [True] * 3
        if name in WINDOWS:
            return [1 if name in ("stride", "dilation") else 0 if "padding" in name else 2] * max(ndim - 2, 1)
        return [SIZE] * ndim
    if name in DIMS:
        return last
    return None if kind.startswith("Optional") else TYPED.get(kind, 1)

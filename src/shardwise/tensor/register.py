"""`register_sharding`: rules of users, with the signature that PyTorch's own has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.errors import RuleError, message
from shardwise.rules.equation import Strategy
from shardwise.rules.rule import Rule
from shardwise.rules.table import register_rule
from shardwise.sharding.placement import Placement
from shardwise.tensor.signature import signature

Op = torch._ops.OpOverload
Roles = Sequence[Placement | None]
Listing = Callable[..., Sequence[tuple[Roles, Roles]]]


def register_sharding(op: Op | Sequence[Op]) -> Callable[[Listing], Listing]:
    """Decorate a function that lists how ``op`` may be sharded over one mesh axis.

    The function gets the arguments of the operator, with `TensorMeta` (shape, stride, dtype) for tensors, and returns a
    list of pairs: the placements of the outputs, and those of the inputs with None for what is no tensor.

    >>> import shardwise, torch
    >>> @shardwise.register_sharding(torch.ops.aten.erfinv.default)
    ... def erfinv(x):
    ...     return [([shardwise.Replicate()], [shardwise.Replicate()]), ([shardwise.Shard(0)], [shardwise.Shard(0)])]
    >>> shardwise.unregister_rule("erfinv")
    """
    ops = [op] if isinstance(op, torch._ops.OpOverload) else list(op)

    def register(function: Listing) -> Listing:
        for each in ops:
            name = each._schema.name + (f".{each._schema.overload_name}" if each._schema.overload_name else "")
            register_rule(name, Rule(_meaning(each, function)))
        return function

    return register


def _meaning(op: Op, function: Listing) -> Callable[..., Sequence[Strategy]]:
    traits = signature(op)
    tensors = [place for place, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]

    def meaning(*args: object) -> Sequence[Strategy]:
        named = dict(zip(traits.names[traits.positional :], args[traits.positional :], strict=True))
        answer = function(*args[: traits.positional], **named)
        return [Strategy(_roles(op, inputs, tensors, args), tuple(outputs)) for outputs, inputs in answer]

    return meaning


def _roles(op: Op, inputs: Roles, tensors: Sequence[int], args: Sequence[object]) -> tuple[Placement | None, ...]:
    if len(inputs) == len(tensors) and len(tensors) != len(args):
        return tuple(inputs)
    if len(inputs) != len(args):
        raise RuleError(
            message(
                f"the sharding registered for {op} does not fit it",
                asked=f"{len(inputs)} input placements: {inputs}",
                got=f"{len(args)} arguments",
                do="give one entry for each argument, None for what is no tensor",
            )
        )
    return tuple(inputs[place] for place in tensors)

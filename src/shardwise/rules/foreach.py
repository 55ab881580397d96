"""`_foreach_*`: one operator over lists of tensors is the operator without the prefix, entry by entry.

Which one is found by matching schemas, so there is no table here, and each entry may lie in its own way. A fused step
of an optimizer is the same step for each entry: of lists of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

PREFIX, FUSED = "_foreach_", "_fused_"
ALSO_KNOWN_AS = {"norm": "linalg_vector_norm", "maximum": "clamp_min", "minimum": "clamp_max"}
ENTRY_OF = {"List[Tensor]": "Tensor", "List[number]": "number"}


@dataclass(frozen=True, slots=True)
class Base:
    """The operator on one entry; ``lists`` tells which arguments have an entry each, ``names`` what it calls them.

    ``listed`` is whether it takes an entry as a list of one.
    """

    op: torch._ops.OpOverload
    lists: tuple[bool, ...]
    names: tuple[str, ...]
    positional: int
    listed: bool = False


def foreach_base(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that a `_foreach_` operator applies to each entry, or None if ``op`` is no such operator.

    >>> foreach_base(torch.ops.aten._foreach_add_.List)
    <OpOverload(op='aten.add_', overload='Tensor')>

    A fused step of an optimizer is its own base.
    """
    base = _base(op)
    return None if base is None else base.op


def foreach_entries(
    op: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """The arguments of `foreach_base` for each entry of the lists."""
    base = _base(op)
    assert base is not None, op
    given = [kwargs.get(argument.name, argument.default_value) for argument in op._schema.arguments]
    given[: len(args)] = args
    length = len(given[base.lists.index(True)])  # type: ignore[arg-type]
    calls = []
    for entry in range(length):
        own = slice(entry, entry + 1) if base.listed else entry
        items = [item[own] if many else item for item, many in zip(given, base.lists, strict=True)]  # type: ignore[index]
        named = dict(zip(base.names[base.positional :], items[base.positional :], strict=True))
        calls.append((tuple(items[: base.positional]), named))
    return calls


def foreach_position(op: torch._ops.OpOverload, where: int | str) -> int:
    """Which argument of a list operator stands at the position, or has the name, ``where`` of `foreach_base`."""
    base = _base(op)
    assert base is not None, op
    name = base.op._schema.arguments[where].name if isinstance(where, int) else where
    return base.names.index(name)


@cache
def _base(op: torch._ops.OpOverload) -> Base | None:
    schema = op._schema
    stem = schema.name.removeprefix("aten::")
    lists = tuple(str(argument.type) in ENTRY_OF for argument in schema.arguments)
    if stem.startswith(FUSED) and not schema.returns and lists[0] and not op._overloadname.endswith("out"):
        own = tuple(argument.name for argument in schema.arguments)
        return Base(op, lists, own, sum(not argument.kwarg_only for argument in schema.arguments), listed=True)
    if not stem.startswith(PREFIX) or op._overloadname.endswith("out"):
        return None
    stem = stem.removeprefix(PREFIX)
    bare = stem.rstrip("_")
    for name in (stem, ALSO_KNOWN_AS.get(bare, bare) + stem[len(bare) :]):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            names = _matched(schema, getattr(packet, overload)._schema)
            if names is not None:
                return _described(schema, getattr(packet, overload), names)
    return None


def _described(schema: torch.FunctionSchema, op: torch._ops.OpOverload, names: tuple[str, ...]) -> Base:
    lists = tuple(str(argument.type) in ENTRY_OF for argument in schema.arguments)
    wanted = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    alike = [given == want for given, want in zip(names, wanted, strict=False)]
    positional = alike.index(False) if False in alike else len(alike)
    return Base(op, lists, names, positional)


def _matched(schema: torch.FunctionSchema, base: torch.FunctionSchema) -> tuple[str, ...] | None:
    arguments = {argument.name: argument for argument in base.arguments}
    if base.overload_name.endswith("out") or len(base.arguments) < len(schema.arguments):
        return None
    names = []
    for place, given in enumerate(schema.arguments):
        found = arguments.get(given.name, base.arguments[place])
        kind = str(given.type)
        if str(found.type) not in (ENTRY_OF.get(kind, kind), f"Optional[{ENTRY_OF.get(kind, kind)}]"):
            return None
        names.append(found.name)
    needed = [argument.name for argument in base.arguments if not argument.has_default_value()]
    return tuple(names) if set(needed) <= set(names) else None

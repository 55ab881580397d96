"""What the schema of an operator says that dispatch must know: which arguments are tensors, which are written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

SIZES = re.compile(r"SymInt(?:\[\d*\])?\?* (\w+)")


@dataclass(frozen=True, slots=True)
class Signature:
    """The shape of an operator's schema.

    ``names`` and ``defaults`` are those of all arguments in order; ``written`` the positions of the arguments that the
    operator writes to; ``viewed`` those that an output aliases without being written; ``returns`` is ``tensor``,
    ``tensors`` (a tuple), ``list``, ``other`` or ``nothing``; ``relabels`` is whether it changes the shape of its first
    argument in place, writing no element; ``sizes`` are the positions of sizes and indices, which may be symbols.
    """

    names: tuple[str, ...]
    defaults: tuple[object, ...]
    positional: int
    written: tuple[int, ...]
    viewed: tuple[int, ...]
    returns: str
    is_random: bool
    is_composite: bool
    relabels: bool
    sizes: tuple[int, ...]

    @property
    def is_view(self) -> bool:
        """Whether an output shares storage with an argument that is not written."""
        return bool(self.viewed)


@cache
def signature(op: torch._ops.OpOverload) -> Signature:
    """Read the schema of ``op``; remembered for each operator."""
    schema = op._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    returned = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    viewed = tuple(
        place
        for place, alias in enumerate(aliases)
        if alias is not None and not alias.is_write and (alias.before_set & returned or "*" in alias.after_set)
    )
    names = tuple(argument.name for argument in schema.arguments)
    return Signature(
        names=names,
        defaults=tuple(argument.default_value for argument in schema.arguments),
        positional=sum(not argument.kwarg_only for argument in schema.arguments),
        written=tuple(place for place, alias in enumerate(aliases) if alias is not None and alias.is_write),
        viewed=viewed,
        returns=_returns(schema),
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_composite=op._can_decompose(),
        relabels=torch.Tag.inplace_view in op.tags,
        sizes=tuple(names.index(name) for name in SIZES.findall(str(schema).partition("->")[0])),
    )


def _returns(schema: torch._C.FunctionSchema) -> str:
    kinds = [str(result.type) for result in schema.returns]
    if not kinds:
        return "nothing"
    if kinds == ["List[Tensor]"]:
        return "list"
    if any(kind != "Tensor" for kind in kinds):
        return "other"
    return "tensor" if len(kinds) == 1 else "tensors"

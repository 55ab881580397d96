"""One lookup from an operator to its rule, and the variants that follow from a schema.

What the families and users name are functional operators. An in-place operator means what its functional form means,
written over operand 0; an ``out=`` operator takes the outputs' storage as further operands; whatever torch tags as
pointwise, and no family names, is an opaque function of each element.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch._decomp import decomposition_table

from shardwise.errors import InplaceError, RuleError, message
from shardwise.mesh.world import current_world
from shardwise.rules import (
    algebra,
    answers,
    attention,
    creation,
    gathered,
    indexing,
    linalg,
    lists,
    losses,
    nn,
    norms,
    order,
    pointwise,
    refused,
    search,
    shape,
    views,
)
from shardwise.rules.equation import parse
from shardwise.rules.foreach import foreach_base, foreach_entries
from shardwise.rules.images import Image, Joining
from shardwise.rules.rule import Call, Placing, Rule, Strategies, called
from shardwise.sharding.spec import TensorMeta

__all__ = ["foreach_base", "foreach_entries", "lookup", "make_call", "register_rule", "unregister_rule"]

FAMILIES: Sequence[Mapping[str, object]] = tuple(
    family.RULES
    for family in (
        pointwise,
        algebra,
        views,
        shape,
        indexing,
        nn,
        norms,
        attention,
        losses,
        linalg,
        creation,
        answers,
        gathered,
        search,
        order,
        lists,
        refused,
    )
)

_user_rules: dict[str, Rule] = {}
_planned: weakref.WeakSet[Planned] = weakref.WeakSet()


class Planned(Protocol):
    """What was planned by rules, and is void when they change."""

    def clear(self) -> None: ...


def void_when_rules_change(planned: Planned) -> None:
    """Clear ``planned`` whenever a user's rule comes or goes."""
    _planned.add(planned)


def _rules_changed() -> None:
    _lookup.cache_clear()
    for planned in list(_planned):
        planned.clear()


def lookup(op: torch._ops.OpOverload) -> Rule | None:
    """The rule of an operator: a user's own first, then the families', then what its schema and tags say.

    >>> lookup(torch.ops.aten.mm.default).meaning
    'm k * k n -> m n'
    """
    return _lookup(op)


def register_rule(name: str, rule: str | Rule | Callable[..., object]) -> None:
    """Give an operator a rule, in place of any that it has.

    ``name`` is ``"mylib::op"`` or ``"mylib::op.overload"``, without ``mylib::`` for torch's own operators. ``rule`` is
    the text of an equation, a function of the operator's arguments that returns one, or a `Rule`. Raises
    `EquationError` if a text does not parse.
    """
    made = as_rule(rule)
    if isinstance(made.meaning, str) and made.meaning:
        parse(made.meaning)
    _user_rules[name.removeprefix("aten::")] = made
    _rules_changed()


def unregister_rule(name: str) -> None:
    """Take back what `register_rule` gave; raises `RuleError` if there is no such rule."""
    if _user_rules.pop(name.removeprefix("aten::"), None) is None:
        raise RuleError(message(f"no rule was registered for {name}", got=", ".join(_user_rules) or "none"))
    _rules_changed()


def as_rule(entry: object) -> Rule:
    """What a table holds, as a `Rule`."""
    return entry if isinstance(entry, Rule) else Rule(entry)  # type: ignore[arg-type]


@cache
def _lookup(op: torch._ops.OpOverload) -> Rule | None:
    return _out(op) or _named(op) or _in_place(op) or _pointwise(op) or _decomposed(op)


def _named(op: torch._ops.OpOverload) -> Rule | None:
    name = op._schema.name.removeprefix("aten::")
    # What is written to is an operand more, of which the families know nothing.
    return _find(name, op._schema.overload_name or "default", () if _written(op) else FAMILIES)


def _find(name: str, overload: str, families: Sequence[Mapping[str, object]] = FAMILIES) -> Rule | None:
    for rules in (_user_rules, *families):
        for key in (f"{name}.{overload}", name):
            if key in rules:
                return as_rule(rules[key])
    return None


# --- variants


def out_of_place(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional operator of one that writes over its first operand; its arguments are the same, in order.

    >>> out_of_place(torch.ops.aten.relu_.default)
    <OpOverload(op='aten.relu', overload='default')>
    """
    name, arguments = op._schema.name.removeprefix("aten::"), op._schema.arguments
    if not name.endswith("_") or name.endswith("__") or not _writes(op._schema, 0):
        return None
    found = _functional(name[:-1], arguments)
    names = [argument.name for argument in arguments]
    return found if found is not None and [own.name for own in found._schema.arguments] == names else None


def is_variant(op: torch._ops.OpOverload) -> bool:
    """Whether the rule of an operator is derived from another's: it writes to ``out=``, or over its first operand.

    >>> is_variant(torch.ops.aten.add_.Tensor), is_variant(torch.ops.aten.add.Tensor)
    (True, False)
    """
    return bool(_written(op)) or (_named(op) is None and _in_place(op) is not None)


def _in_place(op: torch._ops.OpOverload) -> Rule | None:
    name = op._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__") or not _writes(op._schema, 0):
        return None
    functional = _functional(name[:-1], op._schema.arguments)
    found = _find(name[:-1], functional._schema.overload_name or "default") if functional else None
    found = found or _find(name[:-1], op._schema.overload_name or "default") or _pointwise(functional or op)
    found = found or (_decomposed(functional) if functional else None)
    if found is None:
        return None
    if torch.Tag.inplace_view in op.tags:  # only relabels: the result may lie otherwise, and nothing is written
        return found
    return _varied(found, functional or op, tuple(range(len(op._schema.arguments))), in_place=True)


def _out(op: torch._ops.OpOverload) -> Rule | None:
    functional, places = _without_out(op)
    found = None if functional is None else _lookup(functional)
    if found is None or functional is None:
        return None
    if found.measured:
        return Rule(expand=_writing(called(functional), places))
    written = len(op._schema.arguments) - len(places)
    return _varied(found, functional, places, out=written)


def _without_out(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload | None, tuple[int, ...]]:
    """The functional operator of one with ``out=``, and where its arguments stand among those of ``op``."""
    arguments = op._schema.arguments
    kept = [
        place for place, argument in enumerate(arguments) if not (argument.kwarg_only and _writes(op._schema, place))
    ]
    if len(kept) == len(arguments):
        return None, ()
    functional = _functional(op._schema.name.removeprefix("aten::"), [arguments[place] for place in kept])
    if functional is None:
        return None, ()
    order = [arguments[place].name for place in kept]
    return functional, tuple(kept[order.index(argument.name)] for argument in functional._schema.arguments)


def written_out(op: torch._ops.OpOverload) -> Callable[..., object] | None:
    """For an operator with ``out=``: its functional form, whose results are copied into what they must fit."""
    functional, places = _without_out(op)
    return None if functional is None else _writing(called(functional), places)


def _written(op: torch._ops.OpOverload) -> list[int]:
    """The places of the keyword-only arguments that an operator writes to."""
    return [
        place
        for place, argument in enumerate(op._schema.arguments)
        if argument.kwarg_only and _writes(op._schema, place)
    ]


def _writes(schema: torch.FunctionSchema, place: int) -> bool:
    alias = schema.arguments[place].alias_info if place < len(schema.arguments) else None
    return alias is not None and alias.is_write


def _functional(name: str, arguments: Sequence[torch.Argument]) -> torch._ops.OpOverload | None:
    packet = getattr(torch.ops.aten, name, None)
    wanted = {(argument.name, str(argument.type)) for argument in arguments}
    for overload in packet.overloads() if packet is not None else ():
        op: torch._ops.OpOverload = getattr(packet, overload)
        if {(argument.name, str(argument.type)) for argument in op._schema.arguments} == wanted:
            return op
    return None


def _pointwise(op: torch._ops.OpOverload) -> Rule | None:
    schema = op._schema
    tensors = _tensors(op)
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if not tensors or any("List" in str(argument.type) for argument in tensors):
        return None
    return Rule(f"f({', '.join('...' for _ in tensors)}) -> {', '.join('...' for _ in schema.returns)}")


def _decomposed(op: torch._ops.OpOverload) -> Rule | None:
    """Torch's own way to write an operator in terms of others; random ones would draw other numbers by it."""
    if op._can_decompose() or foreach_base(op) is not None:  # made of others already
        return None
    # torch's primitives, of which some decompositions are made, say what they are among the other operators
    found = op._overloadpacket.impl_aten if op.namespace == "prims" else decomposition_table.get(op)
    if found is None or torch.Tag.nondeterministic_seeded in op.tags or not _tensors(op):
        return None
    run = called(op, found)

    def expand(*args: object) -> object:
        memory = current_world().memory
        under_way, implicit = memory.get("decomposing", ()), memory.get("implicit replication", False)
        if op in under_way:
            raise RuleError(message(f"{op} has no sharding rule, and is part of its own decomposition"))
        # The plain tensors that a decomposition makes are the same on every rank.
        memory.update({"decomposing": (*under_way, op), "implicit replication": True})
        try:
            return run(*args)
        finally:
            memory.update({"decomposing": under_way, "implicit replication": implicit})

    return Rule(expand=expand)


def _tensors(op: torch._ops.OpOverload) -> list[torch.Argument]:
    return [argument for argument in op._schema.arguments if "Tensor" in str(argument.type)]


def _varied(
    rule: Rule, functional: torch._ops.OpOverload, places: tuple[int, ...], *, out: int = 0, in_place: bool = False
) -> Rule:
    """The rule of a variant whose arguments at ``places`` are those of the functional operator, in its order."""

    def meaning(*args: object) -> str | Strategies | Rule:
        assert callable(rule.meaning), rule
        answer = rule.meaning(*(args[place] for place in places))
        return _varied(answer, functional, places, out=out, in_place=in_place) if isinstance(answer, Rule) else answer

    def local(call: Call, placing: Placing) -> Callable[..., object]:
        assert rule.local is not None, rule
        operands = call.operands[: len(call.operands) - out]
        args = tuple(call.args[place] for place in places)
        run = rule.local(replace(call, op=functional, args=args, operands=operands), placing)
        return call.op if run is functional else _writing(run, places)

    def image(*args: object) -> Image | Joining | None:
        assert rule.image is not None, rule
        return rule.image(*(args[place] for place in places))

    return replace(
        rule,
        meaning=meaning if callable(rule.meaning) else rule.meaning,
        local=None if rule.local is None else local,
        expand=None if rule.expand is None else _writing(rule.expand, places),
        image=image if in_place and rule.image is not None else None,
        out=out,
        in_place=in_place,
    )


def _writing(run: Callable[..., object], places: tuple[int, ...]) -> Callable[..., object]:
    """``run`` on the arguments at ``places``, its results copied into the others, if none into the first."""

    def written(*args: object) -> object:
        results = run(*(args[place] for place in places))
        targets: list[Any] = [args[place] for place in range(len(args)) if place not in places] or [args[0]]
        several: Sequence[Any] = results if isinstance(results, (tuple, list)) else (results,)
        pairs = list(zip(targets, several, strict=False))
        for target, result in pairs:
            _check_fits(target, result)
        for target, result in pairs:
            target.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return written


def _check_fits(target: torch.Tensor, result: torch.Tensor) -> None:
    if target.shape != result.shape or not torch.can_cast(result.dtype, target.dtype):
        raise InplaceError(
            message(
                "a tensor of another shape or dtype cannot take the result",
                asked=f"to write to {TensorMeta.of(target)}",
                got=f"the result is {TensorMeta.of(result)}",
                do="use what the operator returns without out=",
            )
        )


# --- calls


@dataclass(frozen=True, slots=True)
class Slot:
    """An argument of a schema: ``kind`` is ``tensor``, ``tensors`` (a list of them) or ``other``."""

    name: str
    default: object
    kind: str


@cache
def slots(op: torch._ops.OpOverload) -> tuple[Slot, ...]:
    """The arguments of an operator in schema order, keyword-only ones included."""
    kinds = {
        "Tensor": "tensor",
        "Optional[Tensor]": "tensor",
        "List[Tensor]": "tensors",
        "List[Optional[Tensor]]": "tensors",
    }
    return tuple(
        Slot(argument.name, argument.default_value, kinds.get(str(argument.type), "other"))
        for argument in op._schema.arguments
    )


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def number_meta(number: object) -> TensorMeta:
    """The meta of a number that stands in a tensor's place."""
    return TensorMeta((), (), NUMBERS.get(type(number), torch.float64))


def make_call(
    op: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    outputs: Sequence[TensorMeta | None],
) -> Call:
    """The call of ``op`` on global tensors: metas stand for them in the arguments; ``outputs`` are flattened."""
    filled: list[object] = list(args)
    operands: list[TensorMeta | None] = []
    fixed: list[int] = []
    given = len(filled)
    for place, slot in enumerate(slots(op)):
        if place >= given:
            filled.append(kwargs.get(slot.name, slot.default))
        if slot.kind == "other":
            continue
        item = filled[place]
        for entry in item if isinstance(item, (list, tuple)) else (item,):
            if entry is not None and not isinstance(entry, TensorMeta):
                fixed.append(len(operands))
                entry = number_meta(entry)
            operands.append(entry)
    return Call(op, tuple(filled), tuple(operands), tuple(outputs), frozenset(fixed))

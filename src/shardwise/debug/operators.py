"""The page about operators: what each means, what it costs when its operands lie cut, and what is refused.

``shardwise operators`` prints it. Everything in it is asked of the rules themselves: where a rule is a function of the
arguments, it is asked about a made-up call, which the page shows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.debug.example import REFUSALS, example
from shardwise.debug.refused import REFUSED, UNCOVERED, WITHOUT_TENSORS
from shardwise.rules.equation import APART, ELLIPSIS, LINEAR, Equation, parse
from shardwise.rules.foreach import foreach_base
from shardwise.rules.refused import REASONS
from shardwise.rules.rule import Call, Rule, resolve
from shardwise.rules.table import is_variant, lookup
from shardwise.sharding.spec import TensorMeta

Op = torch._ops.OpOverload

INTRODUCTION = """\
# Operators

What each operator of PyTorch means on distributed tensors, and what it costs when its operands lie cut over a mesh
axis. The page is made by `shardwise operators > docs/operators.md`, from the rules themselves.

The notation is that of [equation](../src/shardwise/rules/equation.py): dims have names, `[d]` is needed whole, a name
that is missing on the right is contracted, `*`, `+` and `/` say how a pending sum passes. Where the equation depends on
the arguments, it is shown for those in parentheses. In-place, `out=` and `_foreach_` variants mean the same as
the operator, and are derived from the schemas; they share its row. An operator that is not here is made of others by
PyTorch itself (`matmul`, `einsum`, `cross_entropy_loss`, `scaled_dot_product_attention` and {composite} more), or
stands under [what is refused](#what-is-refused).

*Free* dims may be cut: nothing is sent, and the result lies as the operands do. Where operands are cut in different
ways, the cheapest change that makes them alike is made first. A dim that is *gathered* is made whole on every rank if
it is cut. What is *pending* (a sum, say, of which each rank holds a part) passes through where the last column says so,
and is reduced before the operator where not.
"""


class Row(NamedTuple):
    """A line of the table: an operator, its overloads and variants, what it means and costs."""

    name: str
    overloads: tuple[str, ...]
    variants: tuple[str, ...]
    means: str
    costs: str


def page() -> str:
    """The page as Markdown.

    >>> page().splitlines()[0]
    '# Operators'
    """
    rows, composite, uncovered = _sorted_out()
    lines = [
        INTRODUCTION.format(composite=composite - 4),
        "| operator | variants | means | costs |",
        "| --- | --- | --- | --- |",
        *(f"| {_labels(row)} | {_code(row.variants)} | {row.means} | {row.costs} |" for row in rows),
        "",
        *_refusals(uncovered),
    ]
    return "\n".join(lines) + "\n"


def _labels(row: Row) -> str:
    shown = [row.name if overload == "default" else f"{row.name}.{overload}" for overload in row.overloads]
    return _code(shown)


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


# --- which operators there are


def _operators() -> Iterator[tuple[str, Op]]:
    for full in sorted(set(torch._C._dispatch_get_all_op_names())):
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten":
            continue
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if isinstance(op, torch._ops.OpOverload):
            yield name, op


def _sorted_out() -> tuple[list[Row], int, list[str]]:
    """The rows, how many operators are made of others by torch, and the names of those that nothing covers."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    variants: dict[str, set[str]] = defaultdict(set)
    composite: set[str] = set()
    covered: set[str] = set()
    left: set[str] = set()
    for name, op in _operators():
        base, rule = foreach_base(op), lookup(op)
        if rule is not None and is_variant(op):
            own = name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name
            variants[own].add(name if own != name else "out=")
            covered.update((name, own))
        elif rule is not None:
            means, costs = _told(op, rule)
            groups[name, means, costs].append(op._schema.overload_name or "default")
            covered.add(name)
        elif base is not None:
            variants[base._schema.name.rpartition("::")[2].rstrip("_")].add(name)
            covered.add(name)
        else:
            (composite if op._can_decompose() else left).add(name)
    rows = [
        Row(
            name,
            tuple(sorted(overloads, key=lambda one: (one != "default", one))),
            tuple(sorted(variants[name])),
            *told,
        )
        for (name, *told), overloads in sorted(groups.items())
    ]
    return rows, len(composite - covered), sorted(left - covered - composite)


# --- what a rule says


def _told(op: Op, rule: Rule) -> tuple[str, str]:
    """What an operator means, and what it costs, in words."""
    why = REASONS.get(op._schema.name.rpartition("::")[2])
    if why is not None:
        return f"refused: {why[0]}", "nothing"
    if rule.measured:
        return "a result as large as the data say", "everything is gathered"
    call = example(op, rule) if callable(rule.meaning) or rule.meaning == "" else None
    if call is not None:
        rule, meaning = resolve(rule, call)
    else:
        meaning = rule.meaning if not callable(rule.meaning) else ""
    if not isinstance(meaning, str):
        return "; ".join(f"`{strategy}`" for strategy in meaning), "everything is gathered"
    if meaning == "":
        return _expanded(rule, call), "as they do"
    text = re.sub(r" +", " ", meaning).replace("( ", "(").strip()
    shown = f"`{text}`" if call is None else f"`{text}` {_arguments(call)}"
    return shown, _cost(parse(meaning), rule)


def _arguments(call: Call) -> str:
    """The arguments of a made-up call, without what follows from defaults."""
    given = list(call.args)
    arguments = call.op._schema.arguments
    while (
        given and arguments[len(given) - 1].has_default_value() and given[-1] == arguments[len(given) - 1].default_value
    ):
        given.pop()
    return f"for ({', '.join(str(item) for item in given if item is not None)})"


def _cost(equation: Equation, rule: Rule) -> str:
    left, right = _names(equation.operands), _names(equation.outputs)
    results = [_names([pattern]) for pattern in equation.outputs if pattern != APART]
    kept = [name for name in left if all(name in names for names in results) and name not in equation.whole]
    contracted = [name for name in left if name not in (*kept, *equation.whole)]
    new = [name for name in right if name not in (*left, *equation.whole, *ELLIPSIS)]
    whole = [name for name in left if name in equation.whole]
    parts = []
    if kept or new:
        parts.append(f"{_dims([*kept, *new])} free")
    if contracted and equation.shape == "like":
        parts.append(f"{_dims(contracted)} free")
    elif contracted and rule.reduce is not None:
        parts.append(f"{_dims(contracted)} free, and leaves a pending {rule.reduce}")
    elif contracted:
        parts.append(f"{_dims(contracted)} gathered")
    if whole:
        parts.append(f"{_dims(whole)} {_made_whole(rule)}")
    apart = [str(place) for place, pattern in enumerate(equation.operands) if pattern == APART]
    if apart:
        parts.append(f"operand {', '.join(apart)} gathered" if len(equation.operands) > 1 else "gathered")
    return "; ".join([*parts, *_passing(equation, rule)]) or "nothing to cut"


def _made_whole(rule: Rule) -> str:
    if rule.expand is not None:
        return "cut: each rank works on its part, and the little that it comes to is exchanged"
    if rule.exchanging is not None:
        return "cut: ranks exchange the borders that kernels overlap, or gather"
    return "stays in place where the parts are parts of the result, else gathered" if rule.image else "gathered"


def _passing(equation: Equation, rule: Rule) -> Iterator[str]:
    if not equation.operands:
        return
    shape = equation.shape
    if rule.pends and shape in LINEAR and rule.reduce == "sum" and len(equation.divisors) < len(equation.operands):
        yield "sums pass"
    if rule.pends and shape == "same":
        yield "all that is pending passes"
    if shape == "like":
        yield "what is pending is not read"
    if rule.pends and shape in ("up", "+", "down", "-"):
        yield "extremes pass"


def _names(patterns: Sequence[Sequence[tuple[str, ...]]]) -> list[str]:
    found = [name for pattern in patterns if pattern != APART for dim in pattern for name in dim]
    return list(dict.fromkeys(found))


def _dims(names: Sequence[str]) -> str:
    if ELLIPSIS[0] in names:
        rest = [name for name in names if name != ELLIPSIS[0]]
        return ", ".join(["every dim" if not rest else "batch dims", *(f"`{name}`" for name in rest)])
    return _code(names)


# --- operators in terms of others


class _Recorded(TorchDispatchMode):
    """Writes down which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Op,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.names[func._schema.name.rpartition("::")[2]] = None
        return func(*args, **dict(kwargs or {}))


def _expanded(rule: Rule, call: Call | None) -> str:
    """The operators that an expansion runs, where it can be tried on tensors without elements."""
    if call is None or rule.expand is None:
        return "other operators"
    recorded, blank = _Recorded(), [_blank(item) for item in call.args]
    try:
        with recorded:
            rule.expand(*blank)
    except REFUSALS:
        return "other operators"
    names = [name for name in recorded.names if name not in ("detach", call.op._schema.name.rpartition("::")[2])]
    return f"made of {_code(names)}" if names else "other operators"


def _blank(item: object) -> object:
    if isinstance(item, TensorMeta):
        return torch.zeros(item.shape, dtype=item.dtype)
    return [_blank(entry) for entry in item] if isinstance(item, (list, tuple)) else item


# --- what is refused


def _refusals(uncovered: Sequence[str]) -> Iterator[str]:
    yield "## What is refused"
    yield ""
    yield "Of PyTorch's operator database, whose samples are laid out at random on three ranks by the tests:"
    yield ""
    yield "| operator | why |"
    yield "| --- | --- |"
    yield from (f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items()))
    yield ""
    yield "Operators that have neither a rule nor a decomposition; they raise `RuleError`:"
    yield ""
    yield "| operators | why |"
    yield "| --- | --- |"
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in uncovered:
        op = getattr(torch.ops.aten, name)
        first = getattr(op, op.overloads()[0])
        grouped[_why_uncovered(name, first)].append(name)
    yield from (f"| {_code(names)} | {why} |" for why, names in sorted(grouped.items()))


def _why_uncovered(name: str, op: Op) -> str:
    if not any("Tensor" in str(argument.type) for argument in op._schema.arguments if not argument.kwarg_only):
        return WITHOUT_TENSORS
    return next(why for pattern, why in UNCOVERED if re.search(pattern, name))

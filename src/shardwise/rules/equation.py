"""The notation of rules: what an operator means, over named dims, and the correct ways to run it on one mesh axis.

::

    m k * k n -> m n        names may be sharded; a name missing on the right is contracted (a pending sum)
    [d]                     the op needs this dim whole on every rank
    (a b) -> a b            composed dims: views
    a -> (2 a)              a number: a factor of that size, whole
    ...                     broadcast dims, aligned right
    1                       a dim of size one
    _                       a tensor of any shape, whole: the same on every rank, never pending
    *  +  /                 linear in the joined operands (`a / b`, `/ b * a`: in `a` only): how a pending sum may pass
    f( )  up( )  down( )    opaque / rising / falling function: up and down let a pending max or min pass
    +( )  -( )              linear, and rising / falling as well
    same( )                 the same elements, elsewhere: lets any pending reduction pass
    like( )                 the elements are not read: any may be missing or pending, and nothing is left pending
    ,                       operands with no algebra between them

A strategy speaks of one axis, with the placements as roles: `Shard(dim)` for a cut dim (`StridedShard` inside a
composed one), `Replicate()` for whole, `Partial(op)` for pending.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from shardwise._value import value
from shardwise.errors import EquationError, message
from shardwise.sharding.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard

Dim = tuple[str, ...]
Pattern = tuple[Dim, ...]
ELLIPSIS: Dim = ("...",)
APART: Pattern = (("_",),)

TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|\d+|[\[\]()*/+,])")
WRAPPED = re.compile(r"\s*(f|up|down|\+|-|same|like)\((.*)\)\s*$", re.DOTALL)
RISING, FALLING, LINEAR = ("up", "+"), ("down", "-"), ("linear", "+", "-")
SWAPPED = {"max": "min", "min": "max"}


class Strategy(NamedTuple):
    """One correct way to run an op on one axis: a role for each operand (None if absent) and each output."""

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    def __repr__(self) -> str:
        left, right = (
            " ".join("-" if role is None else str(role) for role in side) for side in (self.inputs, self.outputs)
        )
        return f"{left} -> {right}"


class Size(NamedTuple):
    """How much of a named dim a rank holds (the most any rank does), and whether all ranks hold the same."""

    length: int
    even: bool


Sizes = Mapping[str, Size]


@value
class Equation:
    """A parsed rule text; ``terms`` are operands whose products add up, ``divisors`` those that are never pending."""

    text: str
    operands: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]
    shape: str
    terms: tuple[tuple[int, ...], ...]
    divisors: tuple[int, ...]
    whole: frozenset[str]


@lru_cache(maxsize=4096)
def parse(text: str) -> Equation:
    """Read the text of a rule; `EquationError` shows where it does not follow the grammar.

    >>> parse("m k * k n -> m n").terms
    ((0, 1),)
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise _bad(text, "one '->' between operands and outputs")
    wrapped = WRAPPED.match(left)
    shape, body = (wrapped[1], wrapped[2]) if wrapped else ("linear", left)
    whole: set[str] = set()
    operands, joints = _side(body, whole, text)
    outputs, commas = _side(right, whole, text) if right.strip() else (((),), [""])  # nothing: one tensor without dims
    if any(joint != "," for joint in commas[1:]) or commas[:1] == ["/"]:
        raise _bad(text, "only ',' between outputs")
    terms, divisors = _terms(joints)
    if shape == "linear" and any(joint.startswith(",") for joint in joints):
        shape = "f"
    return Equation(text, operands, outputs, shape, terms, divisors, frozenset(whole))


def _bad(text: str, expected: str) -> EquationError:
    return EquationError(message("the rule does not parse", asked=repr(text), got=f"expected {expected}", do=__doc__))


def _side(body: str, whole: set[str], text: str) -> tuple[tuple[Pattern, ...], list[str]]:
    """The operands of a side, and by what each is joined to those before it."""
    patterns: list[list[Dim]] = [[]]
    joints = [""]
    bracket = False
    composed: list[str] | None = None
    for token in _tokens(body, text):
        if token in "[]":
            bracket = token == "["
        elif token == "(":
            composed = []
        elif token == ")":
            patterns[-1].append(tuple(composed or ()))
            composed = None
        elif token == "/" and not patterns[-1]:
            joints[-1] += token
        elif token in "*/+,":
            joints.append(token)
            patterns.append([])
        else:
            if composed is None:
                patterns[-1].append(() if token == "1" else (token,))
            elif token != "1":
                composed.append(token)
            if (bracket or token.isdigit()) and token != "1":
                whole.add(token)
    if bracket or composed is not None:
        raise _bad(text, "a closing bracket")
    if not body.strip():
        return (), []
    return tuple(tuple(pattern) for pattern in patterns), joints


def _tokens(body: str, text: str) -> Iterator[str]:
    position, end = 0, len(body.rstrip())
    while position < end:
        found = TOKEN.match(body, position)
        if not found:
            raise _bad(text, f"a name, bracket or sign at {body[position:]!r}")
        yield found[1]
        position = found.end()


def _terms(joints: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    terms: list[list[int]] = []
    for operand, joint in enumerate(joints):
        if joint[:1] in ("*", "/") and terms:
            terms[-1].append(operand)
        else:
            terms.append([operand])
    divisors = [operand for operand, joint in enumerate(joints) if joint.endswith("/")]
    return tuple(tuple(term) for term in terms), tuple(divisors)


class Bound:
    """An equation fitted to the global shapes of a call: every dim of every tensor has its names.

    ``operands`` holds a shape for each operand, None for an absent one; ``fixed`` are operands that are numbers, which
    can be nothing but whole; ``steady`` those that cannot be pending; ``passes`` the pending reductions that the
    dtypes let pass.
    """

    def __init__(
        self,
        equation: Equation,
        operands: Sequence[tuple[int, ...] | None],
        outputs: Sequence[tuple[int, ...] | None],
        *,
        reduce: str | None = "sum",
        fixed: frozenset[int] = frozenset(),
        steady: frozenset[int] = frozenset(),
        passes: frozenset[str] = frozenset(REDUCE_OPS),
    ) -> None:
        self.equation, self.reduce, self.passes, self.fixed = equation, reduce, passes, fixed
        self.steady = fixed.union(steady, equation.divisors, _apart(equation.operands))
        self.apart = _apart(equation.outputs)
        inputs = _expand(equation, _aligned(equation, operands), operands)
        results = _expand(equation, equation.outputs if outputs else (), outputs)  # what only writes returns nothing
        shapes = [*operands, *outputs]
        self.sizes: dict[str, Size] = _sizes(equation, [*inputs, *results], shapes)
        self.inputs = [_unbroadcast(names, shape, self.sizes) for names, shape in zip(inputs, operands, strict=True)]
        self.results = results  # with the names of dims of one element too
        self.outputs = [_unbroadcast(names, shape, self.sizes) for names, shape in zip(results, outputs, strict=True)]
        absent = {operand for operand, shape in enumerate(operands) if shape is None and operand not in self.steady}
        self.terms = [term for term in equation.terms if not absent.intersection(term)]

    def labels(self) -> list[str]:
        """What the strategies are called: ``whole``, ``cut NAME``, ``pend sum 0 2`` and so on; alike on every axis."""
        used = {name for pattern in [*self.inputs, *self.outputs] if pattern for dim in pattern for name in dim}
        names = [name for name in self.sizes if name in used and name not in self.equation.whole]
        return ["whole", *(f"cut {name}" for name in names), *self._pending_labels()]

    def _pending_labels(self) -> list[str]:
        if not self.inputs:
            return []
        if self.equation.shape in LINEAR and self.reduce == "sum":
            return [*self._linear_labels(), *self._labels_passing(self._monotone())]
        return self._labels_passing(self._monotone())

    def _linear_labels(self) -> list[str]:
        choices = product(*([operand for operand in term if operand not in self.steady] for term in self.terms))
        carriers = [" ".join(map(str, choice)) for choice in choices if choice]
        return [f"pend {op} {carrier}" for carrier in carriers for op in ("sum", "avg") if op in self.passes]

    def _monotone(self) -> tuple[str, ...]:
        shape = self.equation.shape
        if shape in RISING or shape in FALLING:
            return ("max", "min")
        if shape in ("same", "like"):
            return REDUCE_OPS
        # A reduction of one operand passes on what it does itself.
        return (
            (self.reduce,)
            if shape == "linear" and self.reduce and self.reduce != "sum" and len(self.inputs) == 1
            else ()
        )

    def _labels_passing(self, ops: tuple[str, ...]) -> list[str]:
        return [] if self.steady - self.fixed else [f"pass {op}" for op in ops if op in self.passes]

    def stands_alone(self, label: str) -> bool:
        """Whether ``label`` cuts a name that is nowhere part of a composed dim: any cut of it will do, strided too."""
        kind, _, name = label.partition(" ")
        patterns = [pattern for pattern in (*self.inputs, *self.outputs) if pattern]
        return kind == "cut" and all(len(dim) == 1 for pattern in patterns for dim in pattern if name in dim)

    def strategy(self, label: str, parts: int, sizes: Sizes) -> Strategy | None:
        """The strategy called ``label`` on an axis of ``parts`` ranks, or None where these sizes do not allow it."""
        kind, _, rest = label.partition(" ")
        if kind == "whole":
            return self._all(Replicate(), Replicate())
        if kind == "cut":
            return self._cut(rest, parts, sizes)
        if kind == "pass":
            after = Partial(SWAPPED[rest] if self.equation.shape in FALLING else rest)
            return self._all(Partial(rest), Replicate() if self.equation.shape == "like" else after)
        op, *carriers = rest.split(" ")
        return self._pend(Partial(op), {int(operand) for operand in carriers})

    def after(self, label: str, parts: int, sizes: Sizes) -> Sizes:
        """The sizes that the next axis finds when this one follows the strategy ``label``."""
        kind, _, name = label.partition(" ")
        if kind != "cut":
            return sizes
        size = sizes[name]
        return {**sizes, name: Size(-(-size.length // parts), size.even and size.length % parts == 0)}

    def _all(self, role: Placement, result: Placement) -> Strategy:
        inputs = tuple(
            Replicate() if operand in self.fixed else None if names is None else role
            for operand, names in enumerate(self.inputs)
        )
        return Strategy(inputs, self._results(result))

    def _results(self, role: Placement) -> tuple[Placement | None, ...]:
        return tuple(
            None if names is None else Replicate() if output in self.apart else role
            for output, names in enumerate(self.outputs)
        )

    def _pend(self, role: Placement, carriers: set[int]) -> Strategy:
        inputs = tuple(
            role if operand in carriers else None if names is None and operand not in self.fixed else Replicate()
            for operand, names in enumerate(self.inputs)
        )
        return Strategy(inputs, self._results(role))

    def _cut(self, name: str, parts: int, sizes: Sizes) -> Strategy | None:
        inputs = [_role(names, name, parts, sizes) for names in self.inputs]
        outputs = [_role(names, name, parts, sizes) for names in self.outputs]
        if "impossible" in inputs or "impossible" in outputs:
            return None
        roles: list[Placement | None] = [
            Replicate() if operand in self.fixed else role  # type: ignore[misc]
            for operand, role in enumerate(inputs)
        ]
        contracted = [at for at, role in enumerate(outputs) if role == Replicate() and at not in self.apart]
        if contracted and self.equation.shape != "like":
            if self.reduce is None:
                return None
            for operand in self._untouched(roles):
                if operand is None:
                    return None
                roles[operand] = Partial(self.reduce)
            outputs = [Partial(self.reduce) if at in contracted else role for at, role in enumerate(outputs)]
        return Strategy(tuple(roles), tuple(outputs))  # type: ignore[arg-type]

    def _untouched(self, roles: list[Placement | None]) -> Iterator[int | None]:
        if self.equation.shape not in LINEAR:
            return
        for term in self.terms:
            if not any(isinstance(roles[operand], (Shard, StridedShard)) for operand in term):
                yield next((operand for operand in term if operand not in self.steady), None)


def _apart(patterns: Sequence[Pattern]) -> frozenset[int]:
    return frozenset(at for at, pattern in enumerate(patterns) if pattern == APART)


def _role(names: Pattern | None, name: str, parts: int, sizes: Sizes) -> Placement | str | None:
    if names is None:
        return None
    places = [dim for dim, factors in enumerate(names) if name in factors]
    if not places:
        return Replicate()
    factors = names[places[0]]
    position = factors.index(name)
    before, after = factors[:position], factors[position + 1 :]
    blocks = prod(sizes[factor].length for factor in before)
    tail = prod(sizes[factor].length for factor in after)
    own = sizes[name]
    leads_evenly = tail == 1 or (own.even and own.length % parts == 0)
    if len(places) > 1 or not leads_evenly or not all(sizes[factor].even for factor in before):
        return "impossible"
    return Shard(places[0]) if blocks == 1 else StridedShard(places[0], blocks)


def _expand(
    equation: Equation, patterns: Sequence[Pattern], shapes: Sequence[tuple[int, ...] | None]
) -> list[Pattern | None]:
    if len(patterns) != len(shapes):
        raise EquationError(
            message(
                "the rule has another number of tensors than the call",
                asked=repr(equation.text),
                got=f"{len(shapes)} tensors: {list(shapes)}",
                do=f"write {len(shapes)} operands or outputs",
            )
        )
    return [
        None if shape is None else _fill(equation, pattern, shape)
        for pattern, shape in zip(patterns, shapes, strict=True)
    ]


def _aligned(equation: Equation, shapes: Sequence[tuple[int, ...] | None]) -> Sequence[Pattern]:
    if len(equation.terms) < 2 or len(shapes) != len(equation.operands):
        return equation.operands
    # In a sum, an operand with fewer dims than its pattern broadcasts: it is aligned right.
    return [
        pattern if shape is None or ELLIPSIS in pattern else pattern[max(0, len(pattern) - len(shape)) :]
        for pattern, shape in zip(equation.operands, shapes, strict=True)
    ]


def _fill(equation: Equation, pattern: Pattern, shape: tuple[int, ...]) -> Pattern:
    if pattern == APART:
        return ((),) * len(shape)
    extra = len(shape) - (len(pattern) - 1 if ELLIPSIS in pattern else len(pattern))
    if extra < 0 or (extra and ELLIPSIS not in pattern):
        raise EquationError(
            message(
                "the rule does not fit the tensor",
                asked=repr(equation.text),
                got=f"a tensor of shape {list(shape)} for {' '.join('(' + ' '.join(dim) + ')' for dim in pattern)}",
                do="name as many dims as the tensor has, or write ...",
            )
        )
    if ELLIPSIS not in pattern:
        return pattern
    at = pattern.index(ELLIPSIS)
    return (*pattern[:at], *((f".{place}",) for place in reversed(range(extra))), *pattern[at + 1 :])


def _sizes(
    equation: Equation, patterns: Sequence[Pattern | None], shapes: Sequence[tuple[int, ...] | None]
) -> dict[str, Size]:
    found = {name: int(name) for name in equation.whole if name.isdigit()}
    composed: list[tuple[Dim, int]] = []
    for pattern, shape in zip(patterns, shapes, strict=True):
        for names, size in zip(pattern or (), shape or (), strict=True):
            if len(names) > 1:
                composed.append((names, size))
            elif names and found.setdefault(names[0], size) != size and names[0] not in equation.whole:
                found[names[0]] = _agreed(equation, names[0], found[names[0]], size)
    while composed:
        solvable = [entry for entry in composed if sum(name not in found for name in entry[0]) <= 1]
        if not solvable:
            names, size = composed[0]
            raise EquationError(
                message("sizes cannot be told", asked=repr(equation.text), got=f"({' '.join(names)}) of {size}")
            )
        for names, size in solvable:
            known = prod(found[name] for name in names if name in found)
            found.update({name: size // max(known, 1) for name in names if name not in found})
        composed = [entry for entry in composed if entry not in solvable]
    return {name: Size(size, True) for name, size in found.items()}


def _agreed(equation: Equation, name: str, one: int, other: int) -> int:
    if 1 not in (one, other):
        raise EquationError(
            message("a name has two sizes", asked=repr(equation.text), got=f"{name} of {one} and of {other}")
        )
    return other if one == 1 else one


def _unbroadcast(names: Pattern | None, shape: tuple[int, ...] | None, sizes: Sizes) -> Pattern | None:
    if names is None or shape is None:
        return None
    return tuple(
        () if len(dim) == 1 and size == 1 and sizes[dim[0]].length != 1 else dim
        for dim, size in zip(names, shape, strict=True)
    )

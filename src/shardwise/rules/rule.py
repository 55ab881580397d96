"""What the tables of rules hold: a meaning, and what the local call must do differently.

A meaning is the text of an equation, a list of strategies, or a function that returns either. The function is called
with the operator's arguments (defaults filled in), `TensorMeta` standing for tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import RuleError
from shardwise.rules.equation import Bound, Sizes, Strategy, parse
from shardwise.rules.images import Image, Joining
from shardwise.sharding.placement import REDUCE_OPS, Cut, Partial
from shardwise.sharding.spec import Spec, TensorMeta

Strategies = Sequence[Strategy]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator on global tensors: `TensorMeta` stands for tensors, defaults are filled in.

    ``args`` has a place for every argument of the schema, keyword-only ones included. ``operands`` are the tensor
    arguments flattened in that order (None where an optional one is absent); ``fixed`` are the operands for which a
    number was given; ``outputs`` the results, flattened.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    operands: tuple[TensorMeta | None, ...]
    outputs: tuple[TensorMeta | None, ...]
    fixed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the tensors of a call lie once the strategies are chosen, seen from the rank at ``coordinate``."""

    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    coordinate: tuple[int, ...]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of an output."""
        spec = self.outputs[index]
        assert spec is not None, index
        return spec.local_shape(self.coordinate)

    def input_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of an operand."""
        spec = self.inputs[index]
        assert spec is not None, index
        return spec.local_shape(self.coordinate)

    def cuts(self, index: int, dim: int) -> bool:
        """Whether any axis cuts ``dim`` of an operand."""
        spec = self.inputs[index]
        return spec is not None and any(isinstance(role, Cut) and role.dim == dim for role in spec.placements)

    def is_pending(self, index: int = 0) -> bool:
        """Whether a reduction of an output is pending on any axis."""
        spec = self.outputs[index]
        return spec is not None and any(isinstance(role, Partial) for role in spec.placements)

    def adds(self, index: int = 0) -> bool:
        """Whether this rank is the one that adds to an output what is to be in a pending sum once."""
        spec = self.outputs[index]
        assert spec is not None, index
        roles = zip(spec.placements, self.coordinate, strict=True)
        return all(place == 0 for role, place in roles if isinstance(role, Partial) and role.reduce_op == "sum")


Local = Callable[[Call, Placing], Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator means.

    ``meaning``  the text of an equation, strategies, or a function of the call's arguments that returns one or a Rule
    ``reduce``   what a contracted name leaves pending; None: a name cannot be contracted
    ``local``    given the call and the placing, the function to run on local tensors, called with the op's arguments in
                 schema order (keyword-only ones last); None, or the operator as the function: the operator itself
    ``pends``    whether a pending sum may pass where the text is linear (not for booleans, say)
    ``contiguous``  the local call relies on a cut dim being one interval (so a `StridedShard` will not do)
    ``expand``   the operator written in terms of others, run on the distributed tensors themselves, called with the
                 arguments in schema order: where there is no meaning, or where every strategy would have to communicate
    ``image``    given the arguments, where the elements of any part of operand 0 go, or that all operands are joined:
                 for parts that no equation cuts
    ``out``      how many of the last operands are what the outputs are written to: they lie as the outputs do
    ``loose``    a meaning that is a function says the same for all finite floats of one sign (0 has none)
    ``in_place`` the first output is operand 0 written over: the two lie alike
    ``measured`` what comes out is known only once it is there (how many elements are not zero, say): every operand is
                 whole, and so is every result, whose shape is measured
    ``apart``    the entries of its lists have nothing to do with each other, and may lie on different meshes: where
                 there is more than one, ``expand`` it is
    ``exchanging`` given the call, strategies beside those of the meaning, by which the local calls of the ranks of an
                 axis talk to each other: they exchange borders, say
    ``beside``   given the call, strategies beside those of the meaning, which no text can say
    ``plain``    names of arguments for which a plain tensor is taken as replicated: indices and masks, mostly, which
                 programs write down themselves, and torch as well
    """

    meaning: str | Strategies | Callable[..., str | Strategies | Rule] = ""
    reduce: str | None = "sum"
    local: Local | None = None
    pends: bool = True
    contiguous: bool = False
    expand: Callable[..., object] | None = None
    image: Callable[..., Image | Joining | None] | None = None
    out: int = 0
    in_place: bool = False
    loose: bool = False
    measured: bool = False
    apart: bool = False
    plain: tuple[str, ...] = ()
    exchanging: Callable[[Call], Strategies] | None = None
    beside: Callable[[Call], Strategies] | None = None


@dataclass(slots=True)
class Choices:
    """The strategies of one call, by label; the sizes of named dims change from axis to axis."""

    sizes: Sizes
    local: Local | None
    bound: Bound | None = None
    listed: dict[str, Strategy] = field(default_factory=dict)
    out: int = 0
    in_place: bool = False
    contiguous: bool = False

    @property
    def labels(self) -> list[str]:
        """What the strategies are called; the first that fits without a move is taken."""
        return [*([] if self.bound is None else self.bound.labels()), *self.listed]

    def strategy(self, label: str, parts: int, sizes: Sizes) -> Strategy | None:
        """The strategy of that label on an axis of ``parts`` ranks, or None where the sizes do not allow it."""
        found = self.listed[label] if label in self.listed else self._bound(label).strategy(label, parts, sizes)
        if found is None or (self.in_place and found.inputs[0] != found.outputs[0]):
            return None
        return Strategy(found.inputs + found.outputs[: self.out], found.outputs) if self.out else found

    def takes_any_cut(self, label: str) -> bool:
        """Whether the `Shard` roles of the strategy stand for any cut of these dims."""
        return label not in self.listed and not self.contiguous and self._bound(label).stands_alone(label)

    def after(self, label: str, parts: int, sizes: Sizes) -> Sizes:
        """The sizes that the next axis finds."""
        return sizes if label in self.listed else self._bound(label).after(label, parts, sizes)

    def _bound(self, label: str) -> Bound:
        assert self.bound is not None, label
        return self.bound


def choices(rule: Rule, call: Call) -> Choices:
    """All strategies of a call under a rule; raises `RuleError` or `EquationError` if the rule does not fit it."""
    rule, meaning = resolve(rule, call)
    if not isinstance(meaning, str):
        listed = {f"listed {index}": strategy for index, strategy in enumerate(meaning)}
        return Choices({}, rule.local, None, listed, rule.out, rule.in_place)
    bound = Bound(
        parse(meaning),
        [None if meta is None else meta.shape for meta in call.operands[: len(call.operands) - rule.out]],
        [None if meta is None else meta.shape for meta in call.outputs],
        reduce=_left_pending(rule, call),
        fixed=call.fixed,
        steady=frozenset(place for place, meta in enumerate(call.operands) if meta and meta.dtype is torch.bool),
        passes=_passing(call) if rule.pends else frozenset(),
    )
    more = {"exchange": rule.exchanging, "beside": rule.beside}
    listed = {
        f"{kind} {index}": strategy
        for kind, listing in more.items()
        for index, strategy in enumerate(() if listing is None else listing(call))
    }
    return Choices(
        bound.sizes,
        rule.local,
        bound,
        listed,
        out=rule.out,
        in_place=rule.in_place,
        contiguous=rule.contiguous,
    )


def resolve(rule: Rule, call: Call) -> tuple[Rule, str | Strategies]:
    """The rule and its meaning for this call, functions of the arguments having been asked."""
    meaning: Any = rule.meaning
    while callable(meaning):
        answer = meaning(*call.args)
        if isinstance(answer, Rule):
            rule, meaning = answer, answer.meaning
        else:
            meaning = answer
    if meaning == "" and rule.expand is None:
        raise RuleError(f"{call.op} has an empty rule")
    return rule, meaning


def _left_pending(rule: Rule, call: Call) -> str | None:
    dtypes = {meta.dtype for meta in call.outputs if meta is not None}
    if rule.reduce is None or torch.bool in dtypes:
        return None
    return rule.reduce if all(map(Partial(rule.reduce).is_defined, dtypes)) else None


def _passing(call: Call) -> frozenset[str]:
    """The pending reductions that the dtypes of a call let pass, whatever it means.

    Rounding and overflow are not linear: integers do not average, floats do not add up once they are truncated, and
    sums that wrap around at 2^n stay right only while the width stays.
    """
    if any(isinstance(item, float) and not math.isfinite(item) for item in call.args):
        return frozenset()  # 0 * inf is not 0
    given = {meta.dtype for place, meta in enumerate(call.operands) if meta is not None and place not in call.fixed}
    given.discard(torch.bool)
    found = {meta.dtype for meta in call.outputs if meta is not None}
    if torch.bool in found:
        return frozenset()
    passes = {op for op in REDUCE_OPS if all(map(Partial(op).is_defined, given | found))}
    integers = {dtype for dtype in given | found if _is_integer(dtype)}
    truncates = any(_is_integer(dtype) for dtype in found) and not all(_is_integer(dtype) for dtype in given)
    widens = len(integers | found) > 1 and any(dtype.itemsize < 4 for dtype in integers)
    if truncates or widens:
        passes.discard("sum")
    return frozenset(passes)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def called(op: torch._ops.OpOverload, by: Callable[..., object] | None = None) -> Callable[..., object]:
    """``op``, or ``by`` in its place, to be called with all of the arguments of ``op`` in schema order."""
    run_it = by or op
    positional = sum(not argument.kwarg_only for argument in op._schema.arguments)
    names = [argument.name for argument in op._schema.arguments[positional:]]

    def run(*args: object) -> object:
        return run_it(*args[:positional], **dict(zip(names, args[positional:], strict=True)))

    return run

"""What a plan is whatever the sizes: the second memory of dispatch, for shapes that were never seen.

Calls are alike if they differ in nothing but the sizes of dims of two elements and more. Where no size decides about
the plan of one, the calls like it have the same plan but for the metas of their results; if it moves something, those
of about the same size have.

The law: strategies come from the meaning, which is asked anew if it was told from sizes that changed, and from names
of dims. Sizes enter only where a name is part of a composed dim that is no multiple (those sizes are compared), where a
dim has one element (that is part of what is alike), where two operands share a name (then they must share the size),
and in prices, which are asked of rough sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.mesh.mesh import DeviceMesh
from shardwise.redistribute.planner import rough_sizes
from shardwise.rules.equation import Bound, Pattern, Strategy
from shardwise.rules.rule import Call, Choices, Rule, Strategies
from shardwise.rules.told import told_from
from shardwise.sharding.placement import Placement
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.asked import Asked, Op, sizes_among

Dims = tuple[tuple[int, int], ...]
# A result like a tensor of the call; or (tensor, dim) for each of its dims, None for one of size 1, and its dtype.
Result = int | tuple[tuple[tuple[int, int] | None, ...], torch.dtype]
DECIDING = ("reduce", "pends", "contiguous", "out", "in_place")  # what of a rule its strategies depend on
Sized = tuple[tuple[int, int, int], ...]  # (tensor, dim, size)


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan without sizes.

    ``rule`` is the operator's, ``meant`` what it came to for the call. ``operands`` says for each operand which of the
    distributed tensors of the call it is; a dim is given as (one of those tensors, its dim). ``goals`` say how operands
    that move are to lie, ``placements`` how the results lie. The dims of each entry of ``same`` agree; those of
    ``read``, which are part of composed ones, have the sizes that come with them, and ``given`` are the sizes among the
    arguments; else the strategies called ``labels`` are asked anew (None if they cannot be). If the dims of ``told``
    have the sizes that come with them, and the arguments have ``given``, the meaning is the same and need not be asked;
    it must be if ``told`` is None. ``results`` are the shapes and dtypes of packed results from packed operands, with
    the sizes that those must have; None where torch, or a law, must be asked. The local call is that of the rank at
    ``coordinate``.
    """

    rule: Rule
    meant: Rule
    operands: tuple[int | None, ...]
    goals: tuple[tuple[Placement, ...] | None, ...]
    placements: tuple[tuple[Placement, ...] | None, ...]
    same: tuple[Dims, ...]
    read: Sized
    labels: tuple[str, ...] | None
    told: Sized | None
    given: tuple[object, ...]
    results: tuple[tuple[Result | None, ...], Sized] | None
    coordinate: tuple[int, ...]

    @property
    def moves(self) -> bool:
        """Whether an operand moves."""
        return any(goal is not None for goal in self.goals)

    def fits(self, specs: Sequence[Spec]) -> bool:
        """Whether the sizes of ``specs`` are such that this is their plan."""
        for dims in self.same:
            first, dim = dims[0]
            size = specs[first].meta.shape[dim]
            for tensor, dim in dims[1:]:
                if specs[tensor].meta.shape[dim] != size:
                    return False
        return True

    def has_sizes(self, op: Op, args: Sequence[object], specs: Sequence[Spec]) -> bool:
        """Whether the factors of composed dims have the sizes that they have in this outline."""
        return not self.read or (_have(specs, self.read) and self._is_given(op, args))

    def is_told(self, op: Op, args: Sequence[object], specs: Sequence[Spec]) -> bool:
        """Whether the meaning is known to be the same."""
        return self.told is not None and _have(specs, self.told) and self._is_given(op, args)

    def is_meant(self, rule: Rule, meaning: str | Strategies) -> bool:
        """Whether a call whose rule came to this has the strategies of this one."""
        own = self.meant
        return meaning == own.meaning and all(getattr(rule, name) == getattr(own, name) for name in DECIDING)

    def _is_given(self, op: Op, args: Sequence[object]) -> bool:
        return not self.given or self.given == sizes_among(op, args)

    def targets(self, specs: Sequence[Spec]) -> tuple[Spec | None, ...]:
        """How the operands are to lie."""
        inputs = [None if place is None else specs[place] for place in self.operands]
        return tuple(
            [
                spec if spec is None or goal is None else spec.with_placements(goal)
                for spec, goal in zip(inputs, self.goals, strict=True)
            ]
        )

    def placed(self, mesh: DeviceMesh, metas: Sequence[TensorMeta | None]) -> tuple[Spec | None, ...]:
        """How results like ``metas`` lie."""
        return tuple(
            [
                None if meta is None or lying is None else Spec(mesh, lying, meta)
                for meta, lying in zip(metas, self.placements, strict=True)
            ]
        )

    def outputs(self, specs: Sequence[Spec]) -> tuple[Spec | None, ...] | None:
        """How the results lie, if the shapes of the operands are all that there is to know."""
        if self.results is None:
            return None
        results, sizes = self.results
        if not _have(specs, sizes) or not all(spec.meta.is_packed for spec in specs):
            return None
        return tuple(
            [
                None if result is None or lying is None else _lying(specs, result, lying)
                for result, lying in zip(results, self.placements, strict=True)
            ]
        )


def _lying(specs: Sequence[Spec], result: Result, placements: tuple[Placement, ...]) -> Spec:
    if isinstance(result, int):
        spec = specs[result]
        return spec if spec.placements == placements else Spec(spec.mesh, placements, spec.meta)
    shape, dtype = result
    return Spec(specs[0].mesh, placements, TensorMeta.contiguous(_shape(shape, specs), dtype))


def _shape(shape: tuple[tuple[int, int] | None, ...], specs: Sequence[Spec]) -> tuple[int, ...]:
    return tuple([1 if place is None else specs[place[0]].meta.shape[place[1]] for place in shape])


def _have(specs: Sequence[Spec], sized: Sized) -> bool:
    return not sized or all(specs[tensor].meta.shape[dim] == size for tensor, dim, size in sized)


def likeness(key: tuple[object, ...]) -> tuple[object, ...]:
    """The key of a call without the sizes of its distributed tensors.

    >>> likeness(("aten.relu", 2.0))
    ('aten.relu', 2.0)
    """
    return tuple([item.likeness if isinstance(item, Spec) else item for item in key])


def roughly(alike: tuple[object, ...], specs: Sequence[Spec]) -> tuple[object, ...]:
    """What is `likeness` to calls that move nothing, for those that do: with rough sizes."""
    return alike, *[rough_sizes(spec.shape) for spec in specs]


def outline_of(
    asked: Asked,
    rule: Rule,
    meant: Rule,
    call: Call,
    ways: Choices,
    chosen: Sequence[tuple[str, Strategy]],
    targets: Sequence[Spec | None],
    outputs: Sequence[Spec | None],
) -> Outline | None:
    """The outline of a plan; None where the ranks talk in the local call, which sizes decide about."""
    bound, specs = ways.bound, asked.specs
    if asked.coordinate is None or (bound and any(strategy in ways.listed.values() for _, strategy in chosen)):
        return None
    count = iter(range(len(specs)))
    operands = tuple(None if spec is None else next(count) for spec in specs)
    same, read = ((), ()) if bound is None else _dims(bound, operands)
    present = [spec for spec in specs if spec is not None]
    told = told_from(rule, call, meant.meaning)
    return Outline(
        rule,
        meant,
        operands,
        tuple(
            None if target is None or target is spec else target.placements
            for spec, target in zip(specs, targets, strict=True)
        ),
        tuple(None if spec is None else spec.placements for spec in outputs),
        same,
        _sized(read, present),
        _labels(ways, chosen, asked) if read else None,
        None if told is None else _sized(told, present),
        sizes_among(asked.op, asked.args),
        None if bound is None else _results(call, bound, operands, present),
        asked.coordinate,
    )


def _labels(ways: Choices, chosen: Sequence[tuple[str, Strategy]], asked: Asked) -> tuple[str, ...] | None:
    """What the strategies are called, if those are what their names say and not made for how the operands lie."""
    sizes = ways.sizes
    for parts, (label, strategy) in zip(asked.mesh.shape, chosen, strict=True):
        if ways.strategy(label, parts, sizes) != strategy:
            return None
        sizes = ways.after(label, parts, sizes)
    return tuple(label for label, _ in chosen)


def _results(
    call: Call, bound: Bound, operands: Sequence[int | None], specs: Sequence[Spec]
) -> tuple[tuple[Result | None, ...], Sized] | None:
    """The results by the names of their dims, and the sizes for which they are so: a whole dim may have several."""
    if not all(spec.meta.is_packed for spec in specs):
        return None
    places = {names: place for names, place in _placed(bound.inputs, operands) if names}
    whole, uses_whole = bound.equation.whole, False
    results: list[Result | None] = []
    for place, (meta, pattern) in enumerate(zip(call.outputs, bound.results, strict=True)):
        if meta is None or pattern is None:
            results.append(None)
            continue
        if place in bound.apart or not meta.is_packed or any(names and names not in places for names in pattern):
            return None
        shape = tuple([places[names] if names else None for names in pattern])
        if meta.shape != _shape(shape, specs):
            return None
        uses_whole = uses_whole or any(whole.intersection(names) for names in pattern)
        alike = (place for place, spec in enumerate(specs) if spec.meta is meta and _is_own(shape, place))
        results.append(next(alike, (shape, meta.dtype)))
    # The size of a whole dim may depend on those of all whole dims.
    held = [place for names, place in _placed(bound.inputs, operands) if uses_whole and whole.intersection(names)]
    return tuple(results), _sized(tuple(held), specs)


def _is_own(shape: tuple[tuple[int, int] | None, ...], tensor: int) -> bool:
    """Whether these are the dims of a tensor, or those that must have the sizes of them."""
    return all(place is None or place == (tensor, dim) for dim, place in enumerate(shape))


def _sized(dims: Dims, specs: Sequence[Spec]) -> Sized:
    return tuple((tensor, dim, specs[tensor].shape[dim]) for tensor, dim in dims)


def _dims(bound: Bound, operands: Sequence[int | None]) -> tuple[tuple[Dims, ...], Dims]:
    patterns = [pattern for pattern in (*bound.inputs, *bound.outputs) if pattern]
    composed = {name for pattern in patterns for dim in pattern if not _is_multiple(dim) for name in dim}
    found: dict[str, list[tuple[int, int]]] = {}
    read = []
    for names, place in _placed(bound.inputs, operands):
        if composed.intersection(names):
            read.append(place)
        elif names and names[0] not in bound.equation.whole:
            found.setdefault(names[0], []).append(place)
    return tuple(tuple(places) for places in found.values() if len(places) > 1), tuple(read)


def _is_multiple(dim: tuple[str, ...]) -> bool:
    """Whether a dim is of one name, or so many times that: its size decides about nothing."""
    return len(dim) < 2 or all(name.isdigit() for name in dim[:-1])


def _placed(
    patterns: Sequence[Pattern | None], operands: Sequence[int | None]
) -> Iterator[tuple[tuple[str, ...], tuple[int, int]]]:
    for pattern, tensor in zip(patterns, operands, strict=False):  # the last operands may be what is written to
        if pattern is not None and tensor is not None:
            yield from ((names, (tensor, dim)) for dim, names in enumerate(pattern))

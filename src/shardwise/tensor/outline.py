"""What a plan is whatever the sizes: the second memory of dispatch, for shapes that were never seen.

Calls are alike if they differ in nothing but the sizes of dims of two elements and more. Where no size decides about
the plan of one, the calls like it have the same plan but for the metas of their results; if it moves something, those
of about the same size have.

The law: strategies come from the meaning, which is asked anew if it is a function, and from the names of dims. Sizes
enter only where a name is part of a composed dim (those sizes are compared), where a dim has one element (that is part
of what is alike), where two operands share a name (then they must share the size), and in prices, which are asked of
rough sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.redistribute.planner import rough_sizes
from shardwise.rules.equation import Bound, Pattern, Strategy
from shardwise.rules.rule import Choices, Rule, Strategies
from shardwise.sharding.placement import Placement
from shardwise.sharding.spec import Spec

Dims = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan without sizes.

    ``operands`` says for each operand which of the distributed tensors of the call it is; a dim is given as (one of
    those tensors, its dim). ``rule`` and ``meaning`` are what the strategies came from; ``goals`` say how operands that
    move are to lie, ``placements`` how the results lie. The dims of each entry of ``same`` agree; ``sizes`` are those
    of the dims of ``read``.
    """

    rule: Rule
    meaning: str | Strategies
    operands: tuple[int | None, ...]
    goals: tuple[tuple[Placement, ...] | None, ...]
    placements: tuple[tuple[Placement, ...] | None, ...]
    same: tuple[Dims, ...]
    read: Dims
    sizes: tuple[int, ...]

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
        if self.read:
            return all(
                specs[tensor].meta.shape[dim] == size for (tensor, dim), size in zip(self.read, self.sizes, strict=True)
            )
        return True


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
    rule: Rule,
    meaning: str | Strategies,
    ways: Choices,
    chosen: Sequence[Strategy],
    specs: Sequence[Spec | None],
    targets: Sequence[Spec | None],
    outputs: Sequence[Spec | None],
) -> Outline | None:
    """The outline of a plan; None where the ranks talk in the local call, which sizes decide about."""
    bound = ways.bound
    if bound is not None and any(strategy in ways.listed.values() for strategy in chosen):
        return None
    count = iter(range(len(specs)))
    operands = tuple(None if spec is None else next(count) for spec in specs)
    same, read = ((), ()) if bound is None else _dims(bound, operands)
    present = [spec for spec in specs if spec is not None]
    return Outline(
        rule,
        meaning,
        operands,
        tuple(
            None if target is None or target is spec else target.placements
            for spec, target in zip(specs, targets, strict=True)
        ),
        tuple(None if spec is None else spec.placements for spec in outputs),
        same,
        read,
        tuple(present[tensor].shape[dim] for tensor, dim in read),
    )


def _dims(bound: Bound, operands: Sequence[int | None]) -> tuple[tuple[Dims, ...], Dims]:
    composed = {
        name for pattern in (*bound.inputs, *bound.outputs) for dim in pattern or () if len(dim) > 1 for name in dim
    }
    found: dict[str, list[tuple[int, int]]] = {}
    read = []
    for names, place in _placed(bound.inputs, operands):
        if composed.intersection(names):
            read.append(place)
        elif names and names[0] not in bound.equation.whole:
            found.setdefault(names[0], []).append(place)
    return tuple(tuple(places) for places in found.values() if len(places) > 1), tuple(read)


def _placed(
    patterns: Sequence[Pattern | None], operands: Sequence[int | None]
) -> Iterator[tuple[tuple[str, ...], tuple[int, int]]]:
    for pattern, tensor in zip(patterns, operands, strict=False):  # the last operands may be what is written to
        if pattern is not None and tensor is not None:
            yield from ((names, (tensor, dim)) for dim, names in enumerate(pattern))

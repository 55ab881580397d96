"""From an operator's meaning and where its operands lie to a plan: on each mesh axis the cheapest correct strategy.

Everything here is decided from global facts (specs, sizes, static arguments), so that all ranks decide alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.errors import InplaceError, RuleError, ViewError, message
from shardwise.mesh.world import current_world
from shardwise.redistribute.planner import plan, price, rough
from shardwise.redistribute.steps import Step
from shardwise.rules.equation import Sizes, Strategy
from shardwise.rules.images import Image, Joining
from shardwise.rules.rule import Call, Choices, Placing, Rule, called, choices, resolve
from shardwise.rules.table import lookup, make_call, out_of_place, written_out
from shardwise.sharding.placement import Cut, Owned, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec
from shardwise.tensor.asked import Asked, Op
from shardwise.tensor.metas import Metas, output_metas
from shardwise.tensor.outline import Outline, outline_of
from shardwise.tensor.relabel import joined, local_join, local_view, may_join, nearest, relabelled
from shardwise.tensor.signature import Signature, signature

Specs = Sequence[Spec | None]
Advice = tuple[object, ...] | None  # placements of the first operand


@dataclass(frozen=True, slots=True)
class Move:
    """An operand that must lie otherwise before the local call: its place among the operands, and the steps."""

    operand: int
    source: Spec
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class OpPlan:
    """What dispatch remembers of a call: what to move, what to run on the local tensors, how the results lie.

    ``local`` takes the arguments as they came if ``normalized`` is False, else all of them in schema order.
    ``expand`` stands in place of all the rest: the operator written in terms of others. With ``measured`` the results
    are whole, and nothing is known of them beforehand; ``lasts`` is whether the plan may be used again. ``outline`` is
    what calls that differ in sizes only have in common with this one, if anything.
    """

    local: Callable[..., Any]
    moves: tuple[Move, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    normalized: bool = False
    expand: Callable[..., Any] | None = None
    measured: bool = False
    lasts: bool = True
    outline: Outline | None = None


def propagate(asked: Asked, *, whole: bool = False) -> OpPlan:
    """Plan a call (with ``whole``: on whole operands only).

    Raises `RuleError`, `ViewError` or `InplaceError` where there is no correct way to run it.
    """
    given = lookup(asked.op)
    if given is None:
        return _unknown(asked)
    rule, traits = given, signature(asked.op)
    if rule.meaning == "" and rule.expand is not None:
        return OpPlan(asked.op, expand=rule.expand)
    metas = None if rule.measured else _metas(asked)
    if metas is None:
        return _measured(asked)
    call = make_call(asked.op, asked.args, asked.kwargs, metas)
    rule, meaning = resolve(rule, call)
    if meaning == "":
        return OpPlan(asked.op, expand=rule.expand)
    meant = replace(rule, meaning=meaning)
    ways = choices(meant, call)
    try:
        chosen = None
        if rule.image is not None and not whole and (traits.relabels or not traits.written):
            free = None if _prefers_image(asked, traits) else _choose(asked, traits, call, ways, rule, whole, free=True)
            found = _relabelled(asked, traits, call, rule.image) if free is None else None
            if found is not None:
                return found
            chosen = free
        chosen = chosen or _choose(asked, traits, call, ways, rule, whole)
    except InplaceError:
        expand = _reducing(asked)
        if expand is None:
            raise
        return OpPlan(asked.op, expand=expand)
    if chosen is None:
        return OpPlan(asked.op, expand=rule.expand)
    targets = _targets(asked, chosen)
    made = _plan(asked, call, ways, chosen, targets)
    if whole or asked.coordinate is None or (made.moves and _moves_by_size(asked, call, rule)):
        return made
    return replace(made, outline=outline_of(asked, given, meant, call, ways, chosen, targets, made.outputs))


def _reducing(asked: Asked) -> Callable[..., object] | None:
    """An operator that writes over a pending tensor, on the reduced one: the result is made pending like the target."""
    functional, target = out_of_place(asked.op), asked.specs[0]
    if functional is None or target is None or not any(isinstance(role, Partial) for role in target.placements):
        return None
    run = called(functional)
    return lambda target, *args: target.copy_(run(target, *args))


def _metas(asked: Asked) -> Metas | None:
    try:
        return output_metas(asked.op, asked.args, asked.kwargs)
    except NotImplementedError:  # torch has no meta kernel for it
        return None


def _measured(asked: Asked) -> OpPlan:
    """Run on whole operands; what the results look like will be seen, and nothing is written to before."""
    expand = written_out(asked.op)
    if expand is not None:
        return OpPlan(asked.op, expand=expand)
    call = make_call(asked.op, asked.args, asked.kwargs, ())
    whole = Strategy(tuple(None if meta is None else Replicate() for meta in call.operands), ())
    ways = Choices({}, None, listed={"whole": whole})
    chosen = _choose(asked, signature(asked.op), call, ways, Rule(), whole=True)
    assert chosen is not None, asked
    return replace(_plan(asked, call, ways, chosen, _targets(asked, chosen)), measured=True)


def _unknown(asked: Asked) -> OpPlan:
    memory = current_world().memory
    if not memory.get("replicate unknown"):
        raise RuleError(
            message(
                f"{asked.op} is not supported on DTensors: it has no sharding rule",
                asked=asked,
                do="shardwise.register_rule(...) for it, or run it under shardwise.replicate_unknown()",
            )
        )
    made = replace(_measured(asked), lasts=False)
    warned = memory.setdefault("replicated unknown", set())
    if asked.op not in warned:
        warned.add(asked.op)
        warnings.warn(f"{asked.op} has no sharding rule: it runs on whole tensors, on every rank", stacklevel=2)
    return made


Chosen = tuple[str, Strategy]


def _prefers_image(asked: Asked, traits: Signature) -> bool:
    """Whether a gradient of a part lies raggedly as the part does: then the gradient of the whole may lie better."""
    spec = asked.specs[0]
    return (
        not (traits.viewed or traits.relabels)
        and spec is not None
        and any(isinstance(own, RaggedShard) for own in spec.placements)
    )


def _relabelled(
    asked: Asked, traits: Signature, call: Call, image_of: Callable[..., Image | Joining | None]
) -> OpPlan | None:
    """The plan in which every element stays where it is; None if there is none, and the operator may move them."""
    image, spec, viewed = image_of(*call.args), asked.specs[0], traits.viewed or traits.relabels
    if isinstance(image, Joining):
        return _joined(asked, call, image)
    if image is None or spec is None:
        return None
    outputs = relabelled(spec, image, call.outputs)
    if outputs is None:
        if viewed:
            raise _no_view(asked, spec, nearest(spec, image, call.outputs))
        return None
    if asked.coordinate is None:
        return OpPlan(asked.op, (), outputs)
    copies = not viewed and image.exact and asked.op is not torch.ops.aten._unsafe_view.default
    listed = traits.returns != "tensor"
    local = local_view(spec, image, outputs, asked.coordinate, copies=copies, listed=listed)
    return OpPlan(local, (), outputs, normalized=True)


def _moves_by_size(asked: Asked, call: Call, rule: Rule) -> bool:
    """Whether operands of other sizes, lying like these, might stay where they are."""
    image = None if rule.image is None else rule.image(*call.args)
    specs = [spec for spec in asked.specs if spec is not None]
    return may_join(specs, image.dim) if isinstance(image, Joining) else image is not None


def _joined(asked: Asked, call: Call, image: Joining) -> OpPlan | None:
    specs, meta = [spec for spec in asked.specs if spec is not None], call.outputs[0]
    result = joined(specs, image.dim, meta) if meta is not None and may_join(specs, image.dim) else None
    if result is None or asked.coordinate is None:
        return None if result is None else OpPlan(asked.op, (), (result,))
    return OpPlan(local_join(specs, image.dim, result, asked.coordinate), (), (result,), normalized=True)


def _no_view(asked: Asked, spec: Spec, other: Spec | None) -> ViewError:
    changed = [
        axis for axis in range(spec.mesh.ndim) if other is None or other.placements[axis] is not spec.placements[axis]
    ]
    cuts = [(axis, own) for axis in changed if isinstance(own := spec.placements[axis], Cut)]
    sizes = "; ".join(
        f"axis {spec.mesh.axis_names[axis]} cuts dim {own.dim} into {_sizes(spec, axis)}" for axis, own in cuts
    )
    other = other or spec.with_placements([Replicate()] * spec.mesh.ndim)
    refused = ViewError(
        message(
            f"{asked.op} is a view, and a view never communicates: the parts of the ranks are no shards of the result",
            asked=asked,
            got=sizes or None,
            do=f"first .redistribute(placements={list(other.placements)}), which is {other}",
        )
    )
    refused.placements = other.placements
    return refused


def _sizes(spec: Spec, axis: int) -> tuple[int, ...]:
    """The sizes of the parts that ``axis`` cuts, on the first ranks of the other axes."""
    own = spec.placements[axis]
    assert isinstance(own, Cut), own
    parts = spec.mesh.shape[axis]
    size = spec.size_before(axis, (0,) * spec.mesh.ndim)
    return tuple(own.local_size(size, parts, index) for index in range(parts))


def _choose(
    asked: Asked, traits: Signature, call: Call, ways: Choices, rule: Rule, whole: bool, free: bool = False
) -> list[Chosen] | None:
    """A strategy for each axis; None if an axis would need moves, and the rule has a way around (or ``free``)."""
    written, viewed = _operands_at(call, asked, traits.written), _operands_at(call, asked, traits.viewed)
    if traits.relabels:
        written, viewed = (), (0,)
    chosen: list[Chosen] = []
    current = list(asked.specs)
    sizes = ways.sizes
    for axis, parts in enumerate(asked.mesh.shape):
        ways_here = _ways(ways, parts, sizes, current, axis, call, whole)
        kept = (way for way in ways_here if _keeps(way[1], current, axis, written))
        pick = next((way for way in kept if _moves_nothing(way[1], current, axis)), None)
        if pick is None and (free or rule.expand is not None):
            return None
        if pick is None:
            all_ways = list(_ways(ways, parts, sizes, current, axis, call, whole))
            allowed = [way for way in all_ways if _keeps(way[1], current, axis, written)]
            pick = _cheapest(allowed, current, axis, viewed)
        if pick is None:
            advice = _replicated_first(asked, axis, lambda asked: _choose(asked, traits, call, ways, rule, whole, free))
            raise _refusal(asked, axis, all_ways, allowed, viewed, advice)
        chosen.append(pick)
        current = _after(current, axis, pick[1].inputs)
        sizes = ways.after(pick[0], parts, sizes)
    return chosen


def _ways(
    ways: Choices, parts: int, sizes: Sizes, current: Specs, axis: int, call: Call, whole: bool
) -> Iterator[Chosen]:
    """Every strategy that the sizes allow on ``axis``, under its label."""
    for label in ways.labels:
        strategy = ways.strategy(label, parts, sizes)
        if strategy is not None:
            for variant in _variants(label, strategy, current, axis, ways, call):
                if not whole or all(role is None or role.is_replicate() for role in variant.inputs):
                    yield label, variant


def _operands_at(call: Call, asked: Asked, places: tuple[int, ...]) -> tuple[int, ...]:
    if not places:
        return ()
    names = signature(asked.op).names
    found: list[int] = []
    operand = 0
    for place, argument in enumerate(call.args[: len(names)]):
        count = _count(call.op, place, argument)
        if place in places:
            found.extend(range(operand, operand + count))
        operand += count
    return tuple(found)


def _count(op: Op, place: int, argument: object) -> int:
    kind = str(op._schema.arguments[place].type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return 1
    if kind in ("List[Tensor]", "List[Optional[Tensor]]") and isinstance(argument, (list, tuple)):
        return len(argument)
    return 0


def _variants(
    label: str, strategy: Strategy, current: Specs, axis: int, ways: Choices, call: Call
) -> Iterator[Strategy]:
    yield strategy
    lying = dict.fromkeys(spec.placements[axis] for spec in current if spec is not None)
    if ways.takes_any_cut(label):
        pairs = list(zip(strategy.inputs, current, strict=True))
        others = [own.at(0) for own in lying if isinstance(own, (StridedShard, RaggedShard))]
        for cut in sorted(set(others), key=repr):
            # Only as an operand of the dim in question lies: another dim may have another size.
            if not any(_lies_so(spec, axis, cut, role) for role, spec in pairs):
                continue
            yield _varied(strategy, cut, current, axis)
    if strategy.outputs and all(role is None or role.is_replicate() for role in (*strategy.inputs, *strategy.outputs)):
        for own in lying:
            if isinstance(own, Owned) and not any(meta is not None and meta.shape for meta in call.outputs):
                yield _varied(strategy, own, current, axis)


def _lies_so(spec: Spec | None, axis: int, cut: Cut, role: Placement | None) -> bool:
    return spec is not None and isinstance(role, Shard) and spec.placements[axis] is cut.at(role.dim)


def _varied(strategy: Strategy, lying: Placement, current: Specs, axis: int) -> Strategy:
    """``strategy`` with its shards cut as ``lying`` is; or, if that is on one rank, done where it lies."""
    if isinstance(lying, Cut):
        inputs, outputs = (
            tuple(lying.at(role.dim) if isinstance(role, Shard) else role for role in side) for side in strategy
        )
        return Strategy(inputs, outputs)
    there = [spec is not None and spec.placements[axis] is lying for spec in current]
    roles = zip(strategy.inputs, there, strict=True)
    inputs = tuple(lying if own and role is not None else role for role, own in roles)
    return Strategy(inputs, tuple(None if role is None else lying for role in strategy.outputs))


def _keeps(strategy: Strategy, current: Specs, axis: int, written: tuple[int, ...]) -> bool:
    for number, operand in enumerate(written):
        spec = current[operand]
        if spec is None:
            continue
        if strategy.inputs[operand] != spec.placements[axis]:
            return False
        if number < len(strategy.outputs) and strategy.outputs[number] != spec.placements[axis]:
            return False
    return True


def _moves_nothing(strategy: Strategy, current: Specs, axis: int) -> bool:
    return all(
        spec is None or role is None or spec.placements[axis] is role
        for spec, role in zip(current, strategy.inputs, strict=True)
    )


def _cheapest(allowed: list[Chosen], current: Specs, axis: int, viewed: tuple[int, ...]) -> Chosen | None:
    best, least = None, float("inf")
    roughly = [None if spec is None else rough(spec) for spec in current]
    # What is written to a pending tensor may have to become pending itself.
    reachable = [way for way in allowed if _reachable(way[1], current, axis)]
    for way in reachable or [way for way in allowed if _reachable(way[1], current, axis, from_cuts=True)]:
        costs = [
            0.0
            if spec is None or role is None or spec.placements[axis] is role
            else price(spec, _placed(spec, axis, role))
            for spec, role in zip(roughly, way[1].inputs, strict=True)
        ]
        if sum(costs) < least and not any(costs[operand] for operand in viewed):
            best, least = way, sum(costs)
    return best


def _reachable(strategy: Strategy, current: Specs, axis: int, *, from_cuts: bool = False) -> bool:
    # A pending result is made of a whole tensor: to make one of shards gains nothing, of another reduction cannot be.
    return all(
        spec is None
        or not isinstance(role, Partial)
        or spec.placements[axis] is role
        or spec.placements[axis].is_replicate()
        or (from_cuts and isinstance(spec.placements[axis], Cut))
        for spec, role in zip(current, strategy.inputs, strict=True)
    )


def _placed(spec: Spec, axis: int, role: Placement) -> Spec:
    return spec.with_placements((*spec.placements[:axis], role, *spec.placements[axis + 1 :]))


def _after(current: Specs, axis: int, roles: Specs | tuple[Placement | None, ...]) -> list[Spec | None]:
    return [
        spec if spec is None or not isinstance(role, Placement) else _placed(spec, axis, role)
        for spec, role in zip(current, roles, strict=True)
    ]


def _targets(asked: Asked, chosen: list[Chosen]) -> tuple[Spec | None, ...]:
    """How the operands are to lie."""
    inputs = [way.inputs for _, way in chosen]
    return tuple(
        None if spec is None else spec.with_placements(_column(inputs, operand, spec.placements))
        for operand, spec in enumerate(asked.specs)
    )


def _plan(asked: Asked, call: Call, ways: Choices, chosen: list[Chosen], targets: tuple[Spec | None, ...]) -> OpPlan:
    outputs = tuple(
        None if meta is None else Spec(asked.mesh, _column([way.outputs for _, way in chosen], place, ()), meta)
        for place, meta in enumerate(call.outputs)
    )
    moves = tuple(
        [
            Move(operand, source, plan(source, target))
            for operand, (source, target) in enumerate(zip(asked.specs, targets, strict=True))
            if source is not None and target is not None and source is not target
        ]
    )
    if ways.local is None or asked.coordinate is None:
        return OpPlan(asked.op, moves, outputs)
    local = ways.local(call, Placing(targets, outputs, asked.coordinate))
    return OpPlan(local, moves, outputs, normalized=local is not asked.op)


def rebound(outline: Outline, call: Call, specs: Sequence[Spec]) -> Outline | None:
    """``outline`` where a name of a composed dim has another size: by strategies of the same labels, if there are any.

    None if there are not, or if they would move what stays in place by ``outline``, or let stay what moves.
    """
    ways = choices(outline.meant, call)
    inputs = [None if place is None else specs[place] for place in outline.operands]
    sizes, known, chosen = ways.sizes, ways.labels, []
    for parts, label in zip(specs[0].mesh.shape, outline.labels or (), strict=True):
        strategy = ways.strategy(label, parts, sizes) if label in known else None
        if strategy is None:
            return None
        chosen.append(strategy)
        sizes = ways.after(label, parts, sizes)
    columns = [
        _column([way.inputs for way in chosen], place, own.placements) if own else None
        for place, own in enumerate(inputs)
    ]
    goals = tuple(
        None if own is None or column == own.placements else column for own, column in zip(inputs, columns, strict=True)
    )
    if [goal is None for goal in goals] != [goal is None for goal in outline.goals]:
        return None
    placements = tuple(
        None if lying is None else _column([way.outputs for way in chosen], place, ())
        for place, lying in enumerate(outline.placements)
    )
    return replace(outline, goals=goals, placements=placements)


def _column(
    roles: list[tuple[Placement | None, ...]], place: int, default: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    column = [row[place] for row in roles]
    return tuple(default[axis] if role is None else role for axis, role in enumerate(column))


def _replicated_first(asked: Asked, axis: int, choose: Callable[[Asked], object]) -> Advice:
    """How operand 0 is to lie for the call to be possible: replicated on this axis, and where else it must be."""
    spec = asked.specs[0]
    if spec is None or spec.placements[axis].is_replicate():
        return None
    other = _placed(spec, axis, Replicate())
    try:
        choose(replace(asked, specs=(other, *asked.specs[1:])))
    except (ViewError, InplaceError) as refusal:
        return refusal.placements
    except RuleError:
        return (Replicate(),) * asked.mesh.ndim
    return other.placements


def _refusal(
    asked: Asked,
    axis: int,
    all_ways: list[Chosen],
    allowed: list[Chosen],
    viewed: tuple[int, ...],
    advice: Advice,
) -> Exception:
    name = asked.mesh.axis_names[axis]
    first = f"first .redistribute(placements={list(advice or (Replicate(),) * asked.mesh.ndim)})"
    if not all_ways:
        return RuleError(message(f"{asked.op} cannot run on shards of these sizes", asked=asked, do=first))
    refused = ViewError if viewed else InplaceError
    what = (
        f"is a view, and a view never communicates; this one would have to on axis {name}"
        if viewed
        else f"would change how the tensor it writes to is sharded over axis {name}"
    )
    made = refused(
        message(
            f"{asked.op} {what}",
            asked=asked,
            got=f"on axis {name} it can run as: {'; '.join(str(way) for _, way in (allowed if viewed else all_ways))}",
            do=first if viewed else f"use the out-of-place operator, or {first}",
        )
    )
    made.placements = advice
    return made

"""The judge of rules: it tries a strategy on real tensors and compares with the whole answer.

Operands are cut or split as the roles of the strategy say, the operator runs on each part, and what comes out is held
against the part of the whole result that its role promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import ShardwiseError
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import dry_world, use_world
from shardwise.rules.equation import Strategy
from shardwise.rules.rule import Call, Placing, Rule, called, choices, resolve
from shardwise.rules.table import lookup, make_call, slots
from shardwise.sharding.placement import Cut, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta

Args = Sequence[object]
Kwargs = Mapping[str, object]
Result = torch.Tensor | None

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 5e-4, torch.complex64: 5e-4}


@dataclass(frozen=True)
class Trial:
    """A call on real tensors: all arguments in schema order, the call as rules see it, and the whole results."""

    op: torch._ops.OpOverload
    args: tuple[object, ...]
    call: Call
    results: tuple[Result, ...]
    rule: Rule


def trial(op: torch._ops.OpOverload, args: Args, kwargs: Kwargs, rule: Rule | None = None) -> Trial | None:
    """The call run whole, or None if the operator has no rule, cannot be run so, or is of sparse tensors."""
    rule = rule or lookup(op)
    if rule is None:
        return None
    filled = tuple(
        args[place] if place < len(args) else kwargs.get(slot.name, slot.default)
        for place, slot in enumerate(slots(op))
    )
    try:
        results = tuple(flatten(called(op)(*_with(filled, [_copy(item) for item in operands(filled, op)], op))))
        results = results if op._schema.returns else ()
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None
    tensors = [item for item in (*operands(filled, op), *results) if isinstance(item, torch.Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    metas: list[object] = [
        TensorMeta.of(item) if isinstance(item, torch.Tensor) else item for item in operands(filled, op)
    ]
    results = results if op._schema.returns else ()
    outputs = [None if result is None else TensorMeta.of(result) for result in results]
    return Trial(op, filled, make_call(op, _with(filled, metas, op), {}, outputs), results, rule)


def strategies_of(
    op: torch._ops.OpOverload, args: Args, kwargs: Kwargs, parts: int, *, rule: Rule | None = None
) -> list[Strategy]:
    """What the rule of ``op`` claims for this call on an axis of ``parts`` ranks.

    >>> strategies_of(torch.ops.aten.neg.default, (torch.ones(3),), {}, 2)[1]
    S(0) -> S(0)
    """
    made = trial(op, args, kwargs, rule)
    return [] if made is None else [strategy for strategy, _ in _claims(made, parts)]


def check(
    op: torch._ops.OpOverload, args: Args, kwargs: Kwargs, strategy: Strategy, parts: int, *, rule: Rule | None = None
) -> str | None:
    """What is wrong with running ``op`` by ``strategy`` on ``parts`` ranks; None if the answer is that of one rank."""
    made = trial(op, args, kwargs, rule)
    return None if made is None else check_trial(made, strategy, parts)


def problems(
    op: torch._ops.OpOverload, args: Args, kwargs: Kwargs, *, sizes: Iterable[int] = (2, 3), rule: Rule | None = None
) -> list[str]:
    """Everything that is wrong with what the rule of ``op`` claims for this call, on axes of these sizes."""
    made = trial(op, args, kwargs, rule)
    if made is None:
        return []
    found = []
    try:
        expanded = check_expanded(made)
        if expanded:
            found.append(f"{op} {shown(made.call)} expanded: {expanded}")
        for parts in sizes:
            for strategy in tried(made, parts):
                wrong = check_trial(made, strategy, parts)
                if wrong:
                    found.append(f"{op} {shown(made.call)} on {parts} ranks by {strategy}: {wrong}")
    except NotImplementedError:  # the rule says that this use has none
        return found
    except ShardwiseError as error:
        found.append(f"{op} {shown(made.call)}: {type(error).__name__}: {error}")
    return found


def shown(call: Call) -> str:
    metas = {id(meta): meta for meta in call.operands}
    return f"({', '.join(str(metas.get(id(arg), arg)) for arg in call.args)})"


def _claims(made: Trial, parts: int) -> Iterator[tuple[Strategy, bool]]:
    """The strategies of a call, and whether their cuts stand for any cut of these dims."""
    _, meaning = resolve(made.rule, made.call)
    if isinstance(meaning, str) and not meaning:
        return
    chosen = choices(made.rule, made.call)
    for label in chosen.labels:
        if label.startswith("exchange"):  # the parts of one rank after the other cannot talk
            continue
        strategy = chosen.strategy(label, parts, chosen.sizes)
        if strategy is not None:
            yield strategy, chosen.takes_any_cut(label)


def tried(made: Trial, parts: int) -> Iterator[Strategy]:
    for strategy, takes_any_cut in _claims(made, parts):
        yield strategy
        if takes_any_cut:
            cut = StridedShard(0, 2) if parts == 2 else RaggedShard(0, (2, *[1] * (parts - 1)))
            yield Strategy(_cut_like(cut, strategy.inputs), _cut_like(cut, strategy.outputs))


def _cut_like(cut: Cut, roles: Sequence[Placement | None]) -> tuple[Placement | None, ...]:
    return tuple(cut.at(role.dim) if isinstance(role, Shard) else role for role in roles)


def check_trial(made: Trial, strategy: Strategy, parts: int) -> str | None:
    """`check` for a call that has been run whole."""
    shares = [
        _shares(item, role, parts) for item, role in zip(operands(made.args, made.op), strategy.inputs, strict=True)
    ]
    if any(share is None for share in shares):
        return "a role that its operand cannot have"
    runs = choices(made.rule, made.call)
    found: list[list[Result]] = []
    for index in range(parts):
        items = [share[index] for share in shares if share is not None]
        try:
            with use_world(dry_world(index, parts)):
                local: Callable[..., object] = made.op
                if runs.local is not None:
                    local = runs.local(made.call, _placing(made, strategy, parts, index))
                run = called(made.op) if local is made.op else local
                found.append(list(flatten(run(*_with(made.args, items, made.op)))))
        except Exception as error:
            return f"rank {index} raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return _judge(made, strategy, found)


def _placing(made: Trial, strategy: Strategy, parts: int, index: int) -> Placing:
    mesh = DeviceMesh("cpu", list(range(parts)))
    inputs, outputs = (
        tuple(
            None if meta is None or role is None else Spec(mesh, (role,), meta)
            for meta, role in zip(metas, roles, strict=True)
        )
        for metas, roles in ((made.call.operands, strategy.inputs), (made.call.outputs, strategy.outputs))
    )
    return Placing(inputs, outputs, (index,))


def check_expanded(made: Trial) -> str | None:
    rule, _ = resolve(made.rule, made.call)
    if rule.expand is None:
        return None
    items = [_copy(item) for item in operands(made.args, made.op)]
    whole = [Replicate() if result is not None else None for result in made.results]
    found = list(flatten(rule.expand(*_with(made.args, items, made.op))))
    return _judge(made, Strategy(tuple(Replicate() for _ in items), tuple(whole)), [found])


# --- operands and results


def operands(filled: Args, op: torch._ops.OpOverload) -> list[object]:
    """The entries of all arguments that hold tensors, flattened: tensors, numbers in a tensor's place, None."""
    found: list[object] = []
    for item, slot in zip(filled, slots(op), strict=True):
        if slot.kind != "other":
            found.extend(item if isinstance(item, (list, tuple)) else [item])
    return found


def _with(filled: Args, items: Sequence[object], op: torch._ops.OpOverload) -> tuple[object, ...]:
    left = iter(items)
    return tuple(
        item if slot.kind == "other" else [next(left) for _ in item] if isinstance(item, (list, tuple)) else next(left)
        for item, slot in zip(filled, slots(op), strict=True)
    )


def flatten(results: object) -> Iterator[Result]:
    """The tensors that an operator returned, and None where it returned none."""
    if results is None or isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, (list, tuple)):
        for result in results:
            yield from flatten(result)


def _copy(item: object) -> object:
    return item.clone() if isinstance(item, torch.Tensor) else item


def _shares(item: object, role: Placement | None, parts: int) -> list[object] | None:
    if not isinstance(item, torch.Tensor) or role is None or isinstance(role, Replicate):
        return [_copy(item) for _ in range(parts)]
    if isinstance(role, Cut):
        return [role.take(item, parts, index).clone() for index in range(parts)]
    assert isinstance(role, Partial), role
    split = SPLITS.get(role.reduce_op)
    return None if split is None or item.dtype is torch.bool else list(split(item, parts))


# --- splitting a tensor into parts that reduce to it


def _noise(item: torch.Tensor) -> torch.Tensor:
    if item.dtype.is_floating_point or item.dtype.is_complex:
        return torch.randn(item.shape, dtype=item.dtype)
    return torch.randint(0, 4, item.shape).to(item.dtype)


def _summands(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    others = [_noise(item) for _ in range(parts - 1)]
    return [*others, item - sum(others, torch.zeros_like(item))]


def _averaged(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return _summands(item * parts, parts)


def _factors(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    signs = [1 - 2 * torch.randint(0, 2, item.shape).to(item.dtype) for _ in range(parts - 1)]
    return [*signs, item * math.prod(signs, start=torch.ones_like(item))]


def _lowered(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    holder = torch.randint(0, parts, item.shape)
    less = item - _noise(item).abs()
    return [torch.where((holder == index) | (less > item), item, less) for index in range(parts)]


def _raised(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    holder = torch.randint(0, parts, item.shape)
    more = item + _noise(item).abs()
    return [torch.where((holder == index) | (more < item), item, more) for index in range(parts)]


def _crossed(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    others = [_noise(item) for _ in range(parts - 1)]
    last = item
    for other in others:
        last = last ^ other
    return [*others, last]


def _shared(item: torch.Tensor, parts: int) -> list[torch.Tensor]:
    weights = torch.rand(parts, *item.shape, dtype=torch.float64).add(0.1)
    return [(item * share.sqrt()).to(item.dtype) for share in weights / weights.sum(0)]


SPLITS = {
    "sum": _summands,
    "avg": _averaged,
    "product": _factors,
    "max": _lowered,
    "min": _raised,
    "bor": lambda item, parts: [item, *(item & _noise(item) for _ in range(parts - 1))],
    "band": lambda item, parts: [item, *(item | _noise(item) for _ in range(parts - 1))],
    "bxor": _crossed,
    "norm": _shared,
}


# --- the verdict


def _judge(made: Trial, strategy: Strategy, found: list[list[Result]]) -> str | None:
    tolerance = _tolerance(made.call)
    if not made.op._schema.returns:
        return None
    if any(len(results) != len(made.results) for results in found):
        return f"{len(found[0])} results in place of {len(made.results)}"
    for place, (whole, role) in enumerate(zip(made.results, strategy.outputs, strict=True)):
        if whole is None or role is None:
            continue
        parts = [results[place] for results in found]
        wrong = _judge_one(whole, role, [part for part in parts if part is not None], tolerance)
        if wrong:
            return f"output {place} {wrong}" if len(made.results) > 1 else wrong
    return None


def _judge_one(whole: torch.Tensor, role: Placement, parts: list[torch.Tensor], tolerance: float) -> str | None:
    count = len(parts)
    promised = [role.take(whole, count, index) if isinstance(role, Cut) else whole for index in range(count)]
    for index, (part, promise) in enumerate(zip(parts, promised, strict=True)):
        if part.shape != promise.shape or part.dtype != promise.dtype:
            return (
                f"is {part.dtype}{list(part.shape)} on rank {index}, "
                f"where {promise.dtype}{list(promise.shape)} was promised"
            )
    if tolerance == math.inf:
        return None
    if isinstance(role, Partial):
        return _differs(_joined(parts, role.reduce_op), whole, "reduced", tolerance)
    wrong = (
        _differs(part, promise, f"rank {index}", tolerance)
        for index, (part, promise) in enumerate(zip(parts, promised, strict=True))
    )
    return next(filter(None, wrong), None)


def _tolerance(call: Call) -> float:
    """That of the coarsest dtype in the call; without bounds where the results are random or undefined."""
    if torch.Tag.nondeterministic_seeded in call.op.tags or "empty" in call.op._schema.name:
        return math.inf
    metas = [meta for place, meta in enumerate(call.operands) if meta is not None and place not in call.fixed]
    dtypes = {meta.dtype for meta in [*metas, *filter(None, call.outputs)]}
    inexact = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((TOLERANCE.get(dtype, 5e-2) for dtype in inexact), default=0.0)


def _joined(parts: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = JOINS[reduce_op](total, part)
    return total / len(parts) if reduce_op == "avg" else total


JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "norm": lambda one, other: torch.hypot(one, other).copysign(torch.where(one == 0, other, one)),
}


def _differs(found: torch.Tensor, expected: torch.Tensor, where: str, tolerance: float) -> str | None:
    if expected.numel() == 0:
        return None
    if where == "reduced" and (expected.dtype.is_floating_point or expected.dtype.is_complex):
        # What overflowed does not add up, on any number of ranks.
        kept = expected.isfinite()
        found, expected = torch.where(kept, found, 0), torch.where(kept, expected, 0)
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        equal = bool((found == expected).all())
    else:
        scale = float(torch.where(expected.isfinite(), expected, 0).abs().max())
        equal = torch.allclose(found, expected, rtol=tolerance, atol=tolerance * (1 + scale), equal_nan=True)
    return None if equal else f"{where}: {_some(found)} in place of {_some(expected)}"


def _some(tensor: torch.Tensor) -> str:
    flat = tensor.flatten()[:4].tolist()
    return f"{flat}{'...' if tensor.numel() > 4 else ''}"

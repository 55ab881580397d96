"""One operator call on distributed tensors: key, remembered plan, moves, local op, wrap.

The tensor class hands itself down as ``kind``: it has ``_spec`` and ``_local_tensor``, and ``kind._wrap(local, spec)``
makes one. So the class and the dispatcher do not import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import InplaceError, MixedTensorError, PlacementError, message
from shardwise.mesh.world import World, current_world
from shardwise.redistribute import execute
from shardwise.redistribute.steps import Step
from shardwise.rules.foreach import foreach_base
from shardwise.rules.table import generation, lookup
from shardwise.sharding.placement import Replicate
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.propagate import Asked, Op, OpPlan, propagate
from shardwise.tensor.rng import draws, plan_random
from shardwise.tensor.signature import Signature, signature

PLANS = 16384

Place = tuple[int | str, int]


@dataclass(frozen=True, slots=True)
class Ready:
    """An `OpPlan` beside where its operands stand among the arguments: ``place`` is (position or name, item or -1)."""

    local: Callable[..., Any]
    moves: tuple[tuple[Place, Spec, tuple[Step, ...]], ...]
    outputs: tuple[Spec | None, ...]
    returns: str
    written: tuple[Place, ...]
    normalized: bool
    expand: Callable[..., Any] | None
    each: tuple[Ready | None, ...] | None = None


def run(kind: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on arguments of which some are distributed tensors of the class ``kind``."""
    world = current_world()
    memory = world.memory
    key: list[Any] = [op, generation(), memory.get("implicit replication")]
    local_args = [_local(argument, kind, key) for argument in args]
    local_kwargs = {}
    for name, argument in kwargs.items():
        key.append(name)
        local_kwargs[name] = _local(argument, kind, key)
    plans: dict[Any, Ready] = memory.setdefault("plans", {})
    whole_key = tuple(key)
    ready = plans.get(whole_key)
    if ready is None:
        ready = _prepare(world, kind, op, args, kwargs)
        _remember(plans, whole_key, ready)
    if ready.expand is not None:
        return ready.expand(*_in_schema_order(op, args, kwargs))
    if ready.each is not None:
        return _run_each(kind, op, args, kwargs, ready)
    for place, source, steps in ready.moves:
        _replace(local_args, local_kwargs, place, source, steps)
    if ready.normalized:
        result = ready.local(*_in_schema_order(op, tuple(local_args), local_kwargs))
    else:
        result = ready.local(*local_args, **local_kwargs)
    return _wrapped(kind, ready, result, args, kwargs)


def _local(argument: Any, kind: Any, key: list[Any]) -> Any:
    cls = type(argument)
    if cls is kind:
        key.append(argument._spec)
        return argument._local_tensor
    if cls is list or cls is tuple:
        key.append(len(argument))
        return [_local(item, kind, key) for item in argument]
    # 1, 1.0 and True are equal as keys, and not the same to an operator
    key.append(cls)
    if isinstance(argument, torch.Tensor):
        if isinstance(argument, kind):
            key[-1] = argument._spec
            return argument._local_tensor
        key.append((argument.dtype, tuple(argument.shape), argument.stride()))
    else:
        key.append(argument)
    return argument


def _remember(plans: dict[Any, Ready], key: Any, ready: Ready) -> None:
    if len(plans) >= PLANS:
        for old in list(plans)[: PLANS // 2]:
            del plans[old]
    plans[key] = ready


def _replace(args: list[Any], kwargs: dict[str, Any], place: Place, source: Spec, steps: tuple[Step, ...]) -> None:
    where, item = place
    holder: Any = args if isinstance(where, int) else kwargs
    if item >= 0:
        holder, where = holder[where], item
    holder[where] = execute.run(holder[where], source, steps)


def _in_schema_order(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    traits = signature(op)
    return [
        args[place] if place < len(args) else kwargs.get(name, traits.defaults[place])
        for place, name in enumerate(traits.names)
    ]


def _wrapped(kind: Any, ready: Ready, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    returns = ready.returns
    if returns == "nothing":
        return None
    if ready.written:
        targets = [_at(args, kwargs, place) for place in ready.written]
        return targets[0] if returns == "tensor" else tuple(targets)
    if returns == "tensor":
        return kind._wrap(result, ready.outputs[0])
    if returns == "other":
        return result
    wrapped = [
        kind._wrap(part, spec) if spec is not None and part is not None else part
        for part, spec in zip(result, ready.outputs, strict=True)
    ]
    return wrapped if returns == "list" else tuple(wrapped)


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    where, item = place
    found = args[where] if isinstance(where, int) else kwargs[where]
    return found if item < 0 else found[item]


def _prepare(world: World, kind: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
    base = foreach_base(op)
    if base is not None:
        return _prepare_foreach(world, kind, op, base, args, kwargs)
    traits = signature(op)
    if traits.is_composite and lookup(op) is None:
        return Ready(op, (), (), "other", (), False, _decompose(op))
    places = list(_places(op, traits, args, kwargs))
    asked = _ask(kind, op, args, kwargs, places)
    plan = plan_random(asked) if draws(asked) else propagate(asked)
    _check_written(asked, plan, traits)
    return _ready(plan, traits, places, asked)


def _decompose(op: Op) -> Callable[..., Any]:
    count = signature(op).positional
    names = signature(op).names

    def decompose(*args: Any) -> Any:
        return op.decompose(*args[:count], **dict(zip(names[count:], args[count:], strict=True)))

    return decompose


def _ready(plan: OpPlan, traits: Signature, places: list[Place], asked: Asked) -> Ready:
    written = tuple(place for place in places if _position(place, traits) in traits.written)
    moves = tuple((places[move.operand], move.source, move.steps) for move in plan.moves)
    local = plan.local
    if asked.coordinate is None and plan.expand is None:
        local, moves = _absent(plan.outputs, traits.returns), ()
    return Ready(local, moves, plan.outputs, traits.returns, written, plan.normalized, plan.expand)


def _position(place: Place, traits: Signature) -> int:
    return place[0] if isinstance(place[0], int) else traits.names.index(place[0])


def _absent(outputs: tuple[Spec | None, ...], returns: str) -> Callable[..., Any]:
    """What a rank outside the mesh does in place of the local op: nothing, with empty results."""

    def absent(*args: Any, **kwargs: Any) -> Any:
        made = [None if spec is None else torch.empty((0,) * spec.ndim, dtype=spec.meta.dtype) for spec in outputs]
        return made[0] if returns == "tensor" and made else made

    return absent


def _places(op: Op, traits: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Place]:
    """Where each tensor operand stands, in schema order; one that is left out has a place all the same."""
    for position, (name, argument) in enumerate(zip(traits.names, op._schema.arguments, strict=True)):
        where: int | str = position if position < len(args) else name
        given = args[position] if position < len(args) else kwargs.get(name)
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            yield where, -1
        elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            yield from ((where, item) for item in range(len(given or ())))


def _ask(kind: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[Place]) -> Asked:
    operands = [_operand(args, kwargs, place) for place in places]
    distributed = [operand for operand in operands if isinstance(operand, kind)]
    meshes = {operand._spec.mesh for operand in distributed}
    if len(meshes) != 1:
        raise _cross_mesh(op, distributed)
    mesh = meshes.pop()
    specs = tuple(_spec_of(operand, kind, mesh, op) for operand in operands)
    return Asked(op, _metas(args, kind), _metas(kwargs, kind), specs, mesh, mesh.get_coordinate())


def _operand(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    where, item = place
    found = args[where] if isinstance(where, int) else kwargs.get(where)
    return found[item] if item >= 0 and found is not None else found


def _spec_of(operand: Any, kind: Any, mesh: Any, op: Op) -> Spec | None:
    if not isinstance(operand, torch.Tensor):
        return None
    if isinstance(operand, kind):
        spec: Spec = operand._spec
        return spec
    if operand.ndim == 0 or current_world().memory.get("implicit replication"):
        return Spec(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(operand))
    raise MixedTensorError(
        message(
            f"{op}: got mixed torch.Tensor and DTensor",
            asked=f"{op} with a plain {TensorMeta.of(operand)} beside a DTensor on {mesh}",
            do="distribute_tensor(plain, mesh, [Replicate()]) first, or run it under shardwise.implicit_replication()",
        )
    )


def _metas(argument: Any, kind: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument._spec.meta if isinstance(argument, kind) else TensorMeta.of(argument)
    if isinstance(argument, dict):
        return {name: _metas(item, kind) for name, item in argument.items()}
    if isinstance(argument, (list, tuple)):
        items = [_metas(item, kind) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    return argument


def _cross_mesh(op: Op, distributed: list[Any]) -> Exception:
    found = "; ".join(f"{operand._spec} on {operand._spec.mesh}" for operand in distributed)
    return PlacementError(
        message(
            f"{op}: the DTensors lie on different meshes (cross-mesh operators are not supported)",
            got=found,
            do="bring them to one mesh first, for example through .full_tensor() and distribute_tensor",
        )
    )


def _check_written(asked: Asked, plan: OpPlan, traits: Signature) -> None:
    for position, output in zip(traits.written, plan.outputs, strict=False):
        before = asked.args[position] if position < len(asked.args) else asked.kwargs.get(traits.names[position])
        if output is not None and isinstance(before, TensorMeta) and output.meta.shape != before.shape:
            raise InplaceError(
                message(
                    f"{asked.op} would change the shape of the tensor it writes to",
                    asked=asked,
                    got=f"{before} would become {output.meta}",
                    do="use the out-of-place operator",
                )
            )


def _prepare_foreach(world: World, kind: Any, op: Op, base: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready:
    traits = signature(op)
    length = len(args[0])
    each = tuple(_prepare_entry(world, kind, base, op, args, kwargs, entry) for entry in range(length))
    simple = all(ready is None or (ready.expand is None and not ready.normalized) for ready in each)
    if not simple:
        return Ready(op, (), (), traits.returns, (), False, None, each)
    moves = []
    outputs: list[Spec | None] = []
    for entry, ready in enumerate(each):
        outputs.extend([None] if ready is None else ready.outputs)
        for (where, _), source, steps in () if ready is None else ready.moves:
            stands = _place_in(op, args, kwargs, where, base)
            moves.append(((stands, entry), source, steps))
    written = tuple((position, entry) for position in traits.written for entry in range(length))
    return Ready(op._op, tuple(moves), tuple(outputs), traits.returns, written, False, None)


def _prepare_entry(
    world: World, kind: Any, base: Op, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], entry: int
) -> Ready | None:
    own_args, own_kwargs = _entry(op, base, args, kwargs, entry)
    if not any(isinstance(argument, kind) for argument in (*own_args, *own_kwargs.values())):
        return None
    return _prepare(world, kind, base, own_args, own_kwargs)


def _entry(
    op: Op, base: Op, args: tuple[Any, ...], kwargs: dict[str, Any], entry: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one entry of a foreach call, for its base operator."""
    count = signature(base).positional
    names = signature(base).names
    ordered = [item[entry] if isinstance(item, (list, tuple)) else item for item in args]
    given = {name: item[entry] if isinstance(item, (list, tuple)) else item for name, item in kwargs.items()}
    extra = dict(zip(names[count:], ordered[count:], strict=False))
    return tuple(ordered[:count]), {**extra, **given}


def _place_in(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], where: int | str, base: Op) -> int | str:
    if isinstance(where, int) or where in kwargs:
        return where
    return signature(base).names.index(where)


def _run_each(kind: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], ready: Ready) -> Any:
    base = foreach_base(op)
    assert base is not None, op
    assert ready.each is not None, op
    results = []
    for entry in range(len(ready.each)):
        own_args, own_kwargs = _entry(op, base, args, kwargs, entry)
        results.append(base(*own_args, **own_kwargs))
    return None if ready.returns == "nothing" else results

"""The cold side of dispatch: from a call that was never seen to something ready to run.

The tensor class hands itself down as ``kind``: it has ``_spec`` and ``_local_tensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from shardwise.errors import InplaceError, MixedTensorError, PlacementError, WorldError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute
from shardwise.redistribute.planner import plan
from shardwise.redistribute.steps import Step
from shardwise.rules.foreach import foreach_base, foreach_entries, foreach_position
from shardwise.rules.rule import Placing, resolve
from shardwise.rules.table import lookup, make_call
from shardwise.sharding.placement import Replicate
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.asked import Asked, Op
from shardwise.tensor.bindings import casting, direct
from shardwise.tensor.metas import output_metas
from shardwise.tensor.outline import Outline
from shardwise.tensor.propagate import OpPlan, propagate, rebound
from shardwise.tensor.rng import draws, plan_random
from shardwise.tensor.signature import Signature, signature

Place = tuple[int | str, int]
Move = tuple[Place, Spec, tuple[Step, ...]]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """An `OpPlan` beside where its operands stand among the arguments: a place is (position or name, item or -1).

    ``quick`` is the local call where the result is one tensor: one of the spec ``wraps``, or else the first argument,
    written over. It takes the arguments, of which those in ``moving`` have been moved by what stands beside their
    positions, and ``tail`` after them. ``row_major`` says whether what it makes is contiguous; None for a view, which
    lies as what it is a view of. ``number`` says what the local call takes for its second argument, if that is a number
    or a list of them (see `casting`).
    Where ``measured`` is a mesh, the results are whole on it, of whatever shape they come. A plan that does not last is
    made anew for each call.
    ``expand`` and ``each`` stand in place of all the rest: the operator in terms of others, or entry by entry.
    ``views`` is whether results share memory with an argument; ``outline`` what is common to calls of other sizes, if
    all tensors of this one are distributed and stand in schema order.
    """

    local: Callable[..., Any]
    moves: tuple[Move, ...]
    outputs: tuple[Spec | None, ...]
    returns: str
    written: tuple[Place, ...] = ()
    normalized: bool = False
    expand: Callable[..., Any] | None = None
    each: bool = False
    quick: Callable[..., Any] | None = None
    moving: tuple[tuple[int, Callable[..., Any]], ...] = ()
    number: Callable[..., Any] | None = None
    wraps: Spec | None = None
    measured: DeviceMesh | None = None
    relabels: bool = False
    lasts: bool = True
    tail: tuple[Any, ...] = ()
    row_major: bool | None = None
    views: bool = False
    outline: Outline | None = None

    def again(self, local: Callable[..., Any], moves: tuple[Move, ...], outputs: tuple[Spec | None, ...]) -> Ready:
        """The same for a call of other sizes."""
        wraps = None if self.wraps is None else outputs[0]
        return Ready(
            local,
            moves,
            outputs,
            self.returns,
            self.written,
            self.normalized,
            quick=None if self.quick is None else local,
            number=self.number,
            moving=() if self.quick is None else _moving(moves),
            wraps=wraps,
            relabels=self.relabels,
            tail=self.tail,
            row_major=None if wraps is None or self.views else wraps.meta.row_major,
            views=self.views,
        )


def _moving(moves: tuple[Move, ...]) -> tuple[tuple[int, Callable[..., Any]], ...]:
    return tuple([(place[0], execute.reading(source, steps)) for place, source, steps in moves])  # type: ignore[misc]


def prepare(kind: Any, op: Op, args: Args, kwargs: Kwargs, known: Callable[..., Ready]) -> Ready:
    """Plan a call; ``known(op, args, kwargs)`` gives what is ready for one entry of a list operator."""
    traits, rule = signature(op), lookup(op)
    several = any(isinstance(item, (list, tuple)) and len(item) > 1 for item in args)
    if rule is not None and rule.apart and several:
        return Ready(op, (), (), traits.returns, expand=rule.expand)
    base = foreach_base(op)
    if base is not None and (rule is None or (base is op and several)):
        return _prepare_foreach(kind, op, args, kwargs, known)
    if traits.is_composite and rule is None:
        return Ready(op, (), (), "other", expand=_decompose(op, traits))
    places = list(places_of(op, traits, args, kwargs))
    carried = _carrying(kind, op, args, kwargs, places)
    if carried is not None:
        return Ready(op, (), (), traits.returns, expand=carried)
    asked = ask(kind, op, args, kwargs, places)
    plan = plan_random(asked) if draws(asked) else propagate(asked)
    if not traits.relabels:
        _check_written(asked, plan, traits)
    if plan.expand is not None:
        plain = [
            (_position(place, traits), place[1], spec)
            for place, spec in zip(places, asked.specs, strict=True)
            if spec is not None and spec.ndim and not isinstance(_operand(args, kwargs, place), kind)
        ]
        expand = _dressing(kind, plan.expand, plain) if plain else plan.expand
        return Ready(plan.local, (), (), traits.returns, expand=expand)
    ready = _ready(plan, traits, places, asked, args, kwargs)
    if plan.outline is None or not _in_key_order(kind, args, kwargs, places):
        return ready
    return replace(ready, outline=plan.outline)


def _in_key_order(kind: Any, args: Args, kwargs: Kwargs, places: Sequence[Place]) -> bool:
    """Whether all tensors of a call are distributed, and its key has their specs in schema order."""
    operands = [(place, _operand(args, kwargs, place)) for place in places]
    return all(
        isinstance(operand, kind) and isinstance(place[0], int)
        for place, operand in operands
        if isinstance(operand, torch.Tensor)
    )


def fitted(known: Ready, kind: Any, op: Op, args: Args, kwargs: Kwargs, specs: Sequence[Spec]) -> Ready | None:
    """What is ready for a call with the distributed tensors ``specs``, by that of a call like it, ``known``.

    None if it is not its plan.
    """
    outline = known.outline
    if outline is None or not outline.fits(specs):
        return None
    bound, local = outline.has_sizes(op, args, specs), outline.meant.local
    told = bound and outline.is_told(op, args, specs)
    outputs = outline.outputs(specs) if told else None
    if outputs is not None and local is None:
        return known.again(known.local, _moved(known, outline, specs), outputs)
    if not bound and outline.labels is None:
        return None
    given, named = _metas(args, kind), _metas(kwargs, kind)
    metas = output_metas(op, given, named) if outputs is None else _metas_of(outputs)
    run, call = known.local, None
    if local is not None or not told:
        call = make_call(op, given, named, metas)
        if not told:
            rule, meaning = resolve(outline.rule, call)
            if not outline.is_meant(rule, meaning):
                return None
            local = rule.local
        found = outline if bound else rebound(outline, call, specs)
        if found is None:
            return None
        outline = found
    outputs = outputs or outline.placed(specs[0].mesh, metas)
    if call is not None:
        run = op if local is None else local(call, Placing(outline.targets(specs), outputs, outline.coordinate))
        if known.normalized is (run is op):
            return None
        run = run if known.normalized else known.local
    if known.written and not (known.relabels or _keeps_places(known, args, kwargs, outputs)):
        return None
    return known.again(run, _moved(known, outline, specs), outputs)


def _moved(known: Ready, outline: Outline, specs: Sequence[Spec]) -> tuple[Move, ...]:
    if not known.moves:
        return ()
    inputs = [None if place is None else specs[place] for place in outline.operands]
    pairs = [
        (source, target)
        for source, target in zip(inputs, outline.targets(specs), strict=True)
        if source is not None and target is not None and source is not target
    ]
    places = [place for place, _, _ in known.moves]
    return tuple((place, source, plan(source, target)) for place, (source, target) in zip(places, pairs, strict=True))


def _metas_of(specs: Sequence[Spec | None]) -> tuple[TensorMeta | None, ...]:
    return tuple([None if spec is None else spec.meta for spec in specs])


def _keeps_places(known: Ready, args: Args, kwargs: Kwargs, outputs: tuple[Spec | None, ...]) -> bool:
    """Whether what is written to keeps its shape, and is not at several places one in memory."""
    pairs = [(_operand(args, kwargs, place), output) for place, output in zip(known.written, outputs, strict=False)]
    return all(
        output is None or (target.shape == output.shape and not _overlaps(target.shape, target.stride()))
        for target, output in pairs
    )


def reads_no_numbers(op: Op) -> bool:
    """Whether plans for ``op`` are the same for all finite floats of one sign (0 has none)."""
    rule = lookup(foreach_base(op) or op)
    if rule is None or rule.loose or rule.local is not None or rule.expand is not None:
        return rule is not None and rule.loose
    return isinstance(rule.meaning, str)


def in_schema_order(op: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """All arguments of ``op``, defaults filled in."""
    traits = signature(op)
    return [
        args[place] if place < len(args) else kwargs.get(name, traits.defaults[place])
        for place, name in enumerate(traits.names)
    ]


def _decompose(op: Op, traits: Signature) -> Callable[..., Any]:
    count, names = traits.positional, traits.names

    def decompose(*args: Any) -> Any:
        return op.decompose(*args[:count], **dict(zip(names[count:], args[count:], strict=True)))

    return decompose


def _ready(plan: OpPlan, traits: Signature, places: list[Place], asked: Asked, args: Args, kwargs: Kwargs) -> Ready:
    if plan.measured:
        return _ready_to_measure(plan, traits, places, asked)
    written = tuple(place for place in places if _position(place, traits) in traits.written)
    moves = tuple((places[move.operand], move.source, move.steps) for move in plan.moves)
    local = direct(asked.op) if plan.local is asked.op else plan.local
    if asked.coordinate is None:
        local, moves = _absent(plan.outputs, traits.returns), ()
    by_position = all(isinstance(where, int) and item < 0 for (where, item), _, _ in moves)
    in_order = by_position and not (plan.normalized and kwargs) and not (moves and traits.is_view)
    simple = traits.returns == "tensor" and in_order and not traits.relabels
    wraps = plan.outputs[0] if simple and not written else None
    quick = local if wraps is not None or (simple and written == ((0, -1),)) else None
    tail = traits.defaults[len(args) :] if plan.normalized else ()
    return Ready(
        local,
        moves,
        plan.outputs,
        traits.returns,
        written,
        plan.normalized,
        quick=quick,
        moving=() if quick is None else _moving(moves),
        number=_number(asked) if quick is not None and not plan.normalized else None,
        wraps=wraps,
        relabels=traits.relabels,
        tail=tail,
        row_major=None if wraps is None or traits.is_view else wraps.meta.row_major,
        views=traits.is_view,
    )


def _number(asked: Asked) -> Callable[..., Any] | None:
    if asked.coordinate is None or asked.mesh.device_type != "cpu" or len(asked.args) < 2:
        return None
    return casting(asked.op, asked.args[1], {spec.meta.dtype for spec in asked.specs if spec is not None})


def _ready_to_measure(plan: OpPlan, traits: Signature, places: list[Place], asked: Asked) -> Ready:
    written = tuple(place for place in places if _position(place, traits) in traits.written)
    moves = tuple((places[move.operand], move.source, move.steps) for move in plan.moves)
    local = plan.local
    if asked.coordinate is None:
        empty = tuple(torch.empty(0) for _ in asked.op._schema.returns)
        local, moves = lambda *_, **__: empty[0] if traits.returns == "tensor" else empty, ()
    return Ready(local, moves, (), traits.returns, written, measured=asked.mesh, lasts=plan.lasts)


def _dressing(kind: Any, expand: Callable[..., Any], plain: list[tuple[int, int, Spec]]) -> Callable[..., Any]:
    """``expand`` on arguments of which the ``plain`` tensors, taken as replicated, become distributed ones."""

    def run(*args: Any) -> Any:
        dressed = list(args)
        for position, item, spec in plain:
            if item < 0:
                dressed[position] = kind._wrap(dressed[position], spec)
            else:
                dressed[position] = list(dressed[position])
                dressed[position][item] = kind._wrap(dressed[position][item], spec)
        return expand(*dressed)

    return run


def _position(place: Place, traits: Signature) -> int:
    return place[0] if isinstance(place[0], int) else traits.names.index(place[0])


def _absent(outputs: tuple[Spec | None, ...], returns: str) -> Callable[..., Any]:
    """What a rank outside the mesh does in place of the local op: nothing, with empty results."""

    def absent(*args: Any, **kwargs: Any) -> Any:
        made = [None if spec is None else torch.empty((0,) * spec.ndim, dtype=spec.meta.dtype) for spec in outputs]
        return made[0] if returns == "tensor" and made else made

    return absent


def places_of(op: Op, traits: Signature, args: Args, kwargs: Kwargs) -> Iterator[Place]:
    """Where each tensor operand stands, in schema order; one that is left out has a place all the same."""
    for position, (name, argument) in enumerate(zip(traits.names, op._schema.arguments, strict=True)):
        where: int | str = position if position < len(args) else name
        given = args[position] if position < len(args) else kwargs.get(name)
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            yield where, -1
        elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            yield from ((where, item) for item in range(len(given or ())))


def ask(kind: Any, op: Op, args: Args, kwargs: Kwargs, places: Sequence[Place]) -> Asked:
    """The call as propagation sees it; raises `PlacementError` for two meshes, `MixedTensorError` for plain tensors."""
    operands = [_operand(args, kwargs, place) for place in places]
    distributed = [operand for operand in operands if isinstance(operand, kind)]
    meshes = {operand._spec.mesh for operand in distributed}
    if len(meshes) != 1:
        raise _cross_mesh(op, distributed)
    mesh = meshes.pop()
    if mesh.size() > current_world().size:
        raise WorldError(
            message(
                f"{op}: the mesh of the DTensor is larger than the world",
                got=f"{mesh} in {current_world()}",
                do="use it in the world that it was made for; out of a simulated run, return plain tensors",
            )
        )
    trusted = _trusted(op)
    specs = tuple(
        _spec_of(operand, kind, mesh, op, bool(trusted) and _name(place, op) in trusted)
        for operand, place in zip(operands, places, strict=True)
    )
    return Asked(op, _metas(args, kind), _metas(kwargs, kind), specs, mesh, mesh.get_coordinate())


def _carrying(kind: Any, op: Op, args: Args, kwargs: Kwargs, places: list[Place]) -> Callable[..., Any] | None:
    """For a call over several meshes of the same ranks: to carry what has no dims to the mesh of the rest, and run it.

    Such a number, the norm of some gradients for example, is the same on every rank once nothing of it is pending. So
    it also serves a plain tensor that is written to, which is each rank's own.
    """
    traits = signature(op)
    distributed = [one for one in (_operand(args, kwargs, place) for place in places) if isinstance(one, kind)]
    targets = [_operand(args, kwargs, place) for place in places if _position(place, traits) in traits.written]
    mesh = next((one._spec.mesh for one in distributed if one.ndim), distributed[0]._spec.mesh if distributed else None)
    if (
        targets
        and not any(isinstance(one, kind) or one is None for one in targets)
        and any(one.ndim for one in targets)
    ):
        mesh = None
    foreign = [one for one in distributed if one._spec.mesh is not mesh]
    if not foreign or any(one.ndim or (mesh and set(one._spec.mesh.ranks) != set(mesh.ranks)) for one in foreign):
        return None
    positional = signature(op).positional
    names = signature(op).names[positional:]

    def carry(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [carry(entry) for entry in item]
        if not isinstance(item, kind) or item._spec.mesh is mesh:
            return item
        whole = item.redistribute(placements=[Replicate()] * item._spec.mesh.ndim)
        if mesh is None:
            return whole._local_tensor
        return kind._wrap(whole._local_tensor, Spec(mesh, (Replicate(),) * mesh.ndim, item._spec.meta))

    def run(*args: Any) -> Any:
        moved = [carry(item) for item in args]
        return op(*moved[:positional], **dict(zip(names, moved[positional:], strict=True)))

    return run


def _operand(args: Args, kwargs: Kwargs, place: Place) -> Any:
    where, item = place
    found = args[where] if isinstance(where, int) else kwargs.get(where)
    return found[item] if item >= 0 and found is not None else found


def _name(place: Place, op: Op) -> str:
    return place[0] if isinstance(place[0], str) else signature(op).names[place[0]]


def _trusted(op: Op) -> tuple[str, ...]:
    """The arguments of ``op`` for which a plain tensor is taken to be the same on every rank."""
    rule = lookup(op)
    return () if rule is None else rule.plain


def _spec_of(operand: Any, kind: Any, mesh: Any, op: Op, trusted: bool) -> Spec | None:
    if not isinstance(operand, torch.Tensor):
        return None
    if isinstance(operand, kind):
        spec: Spec = operand._spec
        return spec
    if trusted or operand.numel() == 1 or is_replicated():
        return Spec(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(operand))
    raise MixedTensorError(
        message(
            f"{op}: got mixed torch.Tensor and DTensor",
            asked=f"{op} with a plain {TensorMeta.of(operand)} beside a DTensor on {mesh}{_within()}",
            do="distribute_tensor(plain, mesh, [Replicate()]) first, or run it under shardwise.implicit_replication()",
        )
    )


def _within() -> str:
    """Which function of torch, written in Python, has called: it may have made the plain tensor itself."""
    frame, name = sys._getframe(1), ""
    while frame is not None and _module(frame).startswith("shardwise."):
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and _module(frame).startswith("torch."):
        own = frame.f_code.co_name
        name = name if own.startswith("_") or _module(frame).startswith(("torch.nn.modules", "torch._ops")) else own
        frame = frame.f_back  # type: ignore[assignment]
    return f", within torch's {name}" if name else ""


def _module(frame: FrameType) -> str:
    found: str = frame.f_globals.get("__name__", "")
    return found


def is_replicated() -> bool:
    """Whether plain tensors beside distributed ones are the same on every rank.

    Users may have said so, or torch, around tensors that it makes itself; and what its formulas for gradients make
    beside distributed tensors, they make on every rank.
    """
    if current_world().memory.get("implicit replication") or torch._C._get_dtensor_allow_implicit_replication():
        return True
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


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


# Kernels that may write to elements that share memory.
OVER_ITSELF = frozenset({"fill_", "zero_", "masked_fill_", "index_fill_", "index_put_", "tril_", "triu_"})


def _check_written(asked: Asked, plan: OpPlan, traits: Signature) -> None:
    for position, output in zip(traits.written, plan.outputs, strict=False):
        before = asked.args[position] if position < len(asked.args) else asked.kwargs.get(traits.names[position])
        if isinstance(before, TensorMeta) and not (plan.local is asked.op and asked.op._opname in OVER_ITSELF):
            _check_apart(asked, before)
        if output is not None and isinstance(before, TensorMeta) and output.meta.shape != before.shape:
            raise InplaceError(
                message(
                    f"{asked.op} would change the shape of the tensor it writes to",
                    asked=asked,
                    got=f"{before} would become {output.meta}",
                    do="use the out-of-place operator",
                )
            )


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return 0 not in shape and any(n > 1 and not step for n, step in zip(shape, stride, strict=True))


def _check_apart(asked: Asked, target: TensorMeta) -> None:
    """Refuse what torch refuses, and a part may not show: to write to elements that share memory."""
    if _overlaps(target.shape, target.stride):
        what = f"{asked.op} would write to elements of which several are one place in memory"
        raise InplaceError(message(what, asked=asked, do="clone() it first, or use the out-of-place operator"))


def _stands_apart(ready: Ready) -> bool:
    """Whether what is ready for an entry is more than the kernel, so that a list of entries cannot be one call."""
    return ready.expand is not None or ready.normalized or ready.each or ready.measured is not None


def _any_of(kind: Any, items: Sequence[Any]) -> bool:
    """Whether a tensor of the class ``kind`` is among ``items``, or in the lists among them."""
    return any(isinstance(item, kind) or (isinstance(item, (list, tuple)) and _any_of(kind, item)) for item in items)


def _prepare_foreach(kind: Any, op: Op, args: Args, kwargs: Kwargs, known: Callable[..., Ready]) -> Ready:
    base, traits = foreach_base(op), signature(op)
    entries = foreach_entries(op, args, kwargs)
    each = [known(base, own, named) if _any_of(kind, (*own, *named.values())) else None for own, named in entries]
    in_all = tuple([move for ready in each if ready is not None for move in ready.moves])
    if any(ready is not None and _stands_apart(ready) for ready in each):
        return Ready(op, in_all, (), traits.returns, each=True)
    moves: list[Move] = []
    common: list[list[Move]] = [[] for _ in entries]
    outputs: list[Spec | None] = []
    for entry, ready in enumerate(each):
        outputs.extend([None] if ready is None else ready.outputs)
        for (where, _), source, steps in () if ready is None else ready.moves:
            position = foreach_position(op, where)
            stands = position if position < len(args) else traits.names[position]
            given = args[position] if position < len(args) else kwargs[traits.names[position]]
            if isinstance(given, (list, tuple)):
                moves.append(((stands, entry), source, steps))
            else:
                common[entry].append(((stands, -1), source, steps))
    if any(other != common[0] for other in common):  # what is one for all entries cannot lie in two ways
        return Ready(op, in_all, (), traits.returns, each=True)
    written = tuple((position, entry) for position in traits.written for entry in range(len(entries)))
    moved = (*common[0], *moves) if common else ()
    items = [item for item in args[0] if isinstance(item, kind)]
    on_cpu = len(args) > 1 and all(item._spec.mesh.device_type == "cpu" for item in items)
    number = casting(op, args[1], {item.dtype for item in args[0]}) if on_cpu else None
    return Ready(direct(op), moved, tuple(outputs), traits.returns, written, number=number)

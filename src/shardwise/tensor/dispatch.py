"""One operator call on distributed tensors: key, remembered plan, moves, local op, wrap.

The tensor class hands itself down as ``kind``: it has ``_spec`` and ``_local_tensor``, and ``kind._wrap(local, spec)``
makes one. So the class and the dispatcher do not import each other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from math import isfinite
from operator import attrgetter
from typing import Any

import torch

from shardwise.errors import InplaceError, ViewError, message
from shardwise.mesh.mesh import DeviceMesh
from shardwise.mesh.world import current_world
from shardwise.redistribute import execute
from shardwise.redistribute.planner import plan
from shardwise.redistribute.steps import Step
from shardwise.rules.foreach import foreach_base, foreach_entries
from shardwise.rules.table import void_when_rules_change
from shardwise.sharding.placement import Replicate
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.asked import Op, roughened
from shardwise.tensor.explicit import forbid
from shardwise.tensor.outline import likeness, roughly
from shardwise.tensor.prepare import (
    Args,
    Kwargs,
    Place,
    Ready,
    fitted,
    in_schema_order,
    is_replicated,
    prepare,
    reads_no_numbers,
)

# How many plans a rank remembers; with SHARDWISE_CACHE=0 in the environment, none.
PLANS = 0 if os.environ.get("SHARDWISE_CACHE") == "0" else 16384
NUMBERS = frozenset({int, bool, complex, float})
_default_dtype = torch.get_default_dtype
_graph_task = torch._C._current_graph_task_id
_is_inference = torch.is_inference_mode_enabled
SPEC, LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")
LISTS = frozenset({list, tuple, torch.Size})
VIEWS_MAY_MOVE = "views may move"  # said by a rank of a call in which nobody sees the views, nor writes to them


class Plans(dict[Any, Ready]):
    """What a rank remembers of the calls that it has made.

    Beside the plans, by operator, specs and static arguments: ``outlines``, those with an outline, by what calls of
    other sizes have in common with them; ``loose`` says of which operators the floats do not matter. Plans are kept in
    two generations, so that those not used for long are dropped: when there are many, all become ``elder``, and the
    elder ones go.
    """

    __slots__ = ("__weakref__", "elder", "loose", "outlines")

    def __init__(self) -> None:
        self.elder: dict[Any, Ready] = {}
        self.loose: dict[Any, bool] = {}
        self.outlines: dict[Any, Ready] = {}
        void_when_rules_change(self)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def clear(self) -> None:
        super().clear()
        self.elder.clear()
        self.loose.clear()
        self.outlines.clear()

    def is_loose(self, op: Op) -> bool:
        named = op._op
        loose = self.loose.get(named)
        if loose is None:
            loose = self.loose[named] = reads_no_numbers(op)
        return loose

    def remember(self, key: Any, ready: Ready) -> None:
        if len(self) >= PLANS // 2:
            self.elder = dict(self)
            super().clear()
        if PLANS:
            self[key] = ready

    def remember_outline(self, key: Any, ready: Ready) -> None:
        if len(self.outlines) >= PLANS:
            self.outlines.clear()
        if PLANS:
            self.outlines[key] = ready


def run(kind: Any, op: Op, args: Args, kwargs: Kwargs | None) -> Any:
    """Run ``op`` on arguments of which some are distributed tensors of the class ``kind``."""
    memory = current_world().memory
    try:
        plans: Plans = memory["plans"]
    except KeyError:
        plans = _plans()
    # Of the operator the builtin, since the overload around it is hashed by Python code; the dtype is what integers
    # become beside floats.
    named = op._op
    key: list[Any] = [named, _default_dtype()]
    local_args: list[Any] = []
    for argument in args:
        if argument.__class__ is kind:
            key.append(argument._spec)
            local_args.append(argument._local_tensor)
        elif argument.__class__ is int:
            key.append(int)
            key.append(argument)
            local_args.append(argument)
        elif argument.__class__ is float and argument and isfinite(argument) and plans.loose.get(named):
            key.append("+" if argument > 0 else "-")
            local_args.append(argument)
        elif argument is None:
            key.append(None)
            local_args.append(None)
        else:
            local_args.append(_local(argument, kind, key, plans, op))
    local_kwargs: Kwargs = {}
    if kwargs:
        for name, argument in kwargs.items():
            key.append(name)
            local_kwargs[name] = _local(argument, kind, key, plans, op)
    exact = tuple(key)
    ready: Ready | None = plans.get(exact)
    if ready is None:
        try:
            ready = _prepared(plans, exact, kind, op, args, kwargs or {})
        except ViewError as refusal:
            return _moved_first(kind, op, args, kwargs or {}, refusal)
    quick = ready.quick
    if quick is None or (ready.views and _is_inference() and not args[0].is_inference()):
        return _run(kind, op, args, kwargs or {}, ready, local_args, local_kwargs)
    spec = ready.wraps
    if spec is None and "unseen" in memory:
        _check_seen(op, args[:1], memory["unseen"])
    if ready.moving:
        _move(op, ready, local_args)
    if ready.number is not None:
        local_args[1] = ready.number(local_args)
    if ready.tail:
        local_args.extend(ready.tail)
    result = quick(*local_args, **local_kwargs) if local_kwargs else quick(*local_args)
    if spec is None:
        if _graph_task() != -1:
            _write_back([args[0]])
        return args[0]
    if ready.row_major is None:
        if result.is_neg() or result.is_conj():
            return _marked(kind._wrap(result, spec), result)
    elif result.is_contiguous() is not ready.row_major:
        result = spec.meta.lay_out(result)
    return kind._wrap(result, spec)


def _move(op: Op, ready: Ready, local_args: list[Any]) -> None:
    forbid(op, ready.moves)
    for position, moved in ready.moving:
        local_args[position] = moved(local_args[position])


def _local(argument: Any, kind: Any, key: list[Any], plans: Plans, op: Op) -> Any:
    cls = argument.__class__
    if cls is kind:
        key.append(argument._spec)
        return argument._local_tensor
    if cls in LISTS:
        key.append(len(argument))
        classes = {*map(type, argument)}
        if len(classes) == 1:
            if kind in classes:
                key += map(SPEC, argument)
                return [*map(LOCAL, argument)]
            if int in classes:
                key.append(int)
                key += argument
                return list(argument)
            if float in classes and all(argument) and all(map(isfinite, argument)) and plans.is_loose(op):
                key += ["+" if item > 0 else "-" for item in argument]
                return list(argument)
        return [_local(item, kind, key, plans, op) for item in argument]
    if cls is float and argument and isfinite(argument) and (plans.loose.get(op._op) or plans.is_loose(op)):
        key.append("+" if argument > 0 else "-")
    elif cls in NUMBERS:
        # 1, 1.0 and True are equal as keys, and not the same to an operator
        key.append(cls)
        key.append(argument)
    elif isinstance(argument, torch.Tensor):
        return _local_of(argument, kind, key)
    else:
        key.append(argument)
    return argument


def _local_of(argument: torch.Tensor, kind: Any, key: list[Any]) -> torch.Tensor:
    if isinstance(argument, kind):
        key.append(argument._spec)
        return argument._local_tensor  # type: ignore[no-any-return]
    if not argument.ndim:
        key.append(argument.dtype)
        return argument
    backward = _graph_task() != -1
    key.append((is_replicated(), backward, argument.dtype, tuple(argument.shape), argument.stride()))
    return argument


def _plans() -> Plans:
    memory = current_world().memory
    plans: Plans | None = memory.get("plans")
    if plans is None:
        plans = memory["plans"] = Plans()
    return plans


def _prepared(plans: Plans, key: Any, kind: Any, op: Op, args: Args, kwargs: Kwargs) -> Ready:
    kept = plans.elder.pop(key, None)
    if kept is not None:
        plans.remember(key, kept)
        return kept
    rough = roughened(op, args)
    alike = likeness(key if rough is args else _key(kind, op, rough, kwargs))
    specs = [item for item in key if item.__class__ is Spec]
    known = plans.outlines.get(alike) or plans.outlines.get(roughly(alike, specs))
    ready = None if known is None else fitted(known, kind, op, args, kwargs, specs)
    if ready is None:
        ready = prepare(kind, op, args, kwargs, lambda *entry: ready_for(kind, *entry))
        if ready.outline is not None:
            plans.remember_outline(roughly(alike, specs) if ready.outline.moves else alike, ready)
    if ready.lasts:
        plans.remember(key, ready)
    return ready


def _key(kind: Any, op: Op, args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, ...]:
    plans = _plans()
    key: list[Any] = [op._op, _default_dtype()]
    for argument in args:
        _local(argument, kind, key, plans, op)
    for name, argument in kwargs.items():
        key.append(name)
        _local(argument, kind, key, plans, op)
    return tuple(key)


def ready_for(kind: Any, op: Op, args: Args, kwargs: Kwargs) -> Ready:
    """What is ready for a call: remembered, or prepared now."""
    plans = _plans()
    exact = _key(kind, op, args, kwargs)
    ready = plans.get(exact)
    return _prepared(plans, exact, kind, op, args, kwargs) if ready is None else ready


def _run(
    kind: Any, op: Op, args: Args, kwargs: Kwargs, ready: Ready, local_args: list[Any], local_kwargs: Kwargs
) -> Any:
    if ready.views and _is_inference() and not args[0].is_inference():
        with torch.inference_mode(False):  # a view of a normal tensor is one, whatever the mode
            return _run(kind, op, args, kwargs, ready, local_args, local_kwargs)
    if ready.expand is not None:
        return ready.expand(*in_schema_order(op, args, kwargs))
    if ready.written and "unseen" in current_world().memory:
        targets = [_at(args, kwargs, place) for place in ready.written]
        _check_seen(op, [target for target in targets if isinstance(target, kind)], current_world().memory["unseen"])
    if ready.moves:
        forbid(op, ready.moves)
    if ready.each:
        return run_each(op, args, kwargs, ready)
    for place, source, steps in ready.moves:
        _replace(local_args, local_kwargs, place, source, steps)
    if ready.number is not None:
        local_args[1] = ready.number(local_args)
    if ready.relabels:  # the local tensor may be known elsewhere, and keeps its shape there
        local_args[0] = local_args[0].view_as(local_args[0])
    if ready.normalized and local_kwargs:
        result = ready.local(*in_schema_order(op, tuple(local_args), local_kwargs))
    else:
        result = ready.local(*local_args, *ready.tail, **local_kwargs)
    if ready.relabels:
        return _relabelled(op, args, kwargs, result, ready)
    return wrapped(kind, ready, result, args, kwargs)


def _moved_first(kind: Any, op: Op, args: Args, kwargs: Kwargs, refusal: ViewError) -> Any:
    # A backward pass reshapes gradients by views; nobody sees their memory, so they may move first.
    in_backward = _graph_task() != -1
    if refusal.placements is None or not (in_backward or current_world().memory.get(VIEWS_MAY_MOVE)):
        raise refusal
    moved = redistributed(op, args[0], refusal.placements)
    if in_backward:
        _stand_ins()[_storage(moved)] = args[0], moved
    return run(kind, op, (moved, *args[1:]), kwargs)


def _stand_ins() -> dict[int, tuple[Any, Any]]:
    """The tensors of this backward pass that a moved one stands in for, by its memory: what is written there is theirs.

    They are remembered until the pass ends.
    """
    passes, task = current_world().memory.setdefault("stand-ins", {}), _graph_task()
    if task not in passes:
        passes[task] = {}
        torch.autograd.Variable._execution_engine.queue_callback(lambda: passes.pop(task, None))
    found: dict[int, tuple[Any, Any]] = passes[task]
    return found


def unseen(made: Any, origin: Spec) -> Any:
    """``made``, which is no view of the tensor like ``origin`` that torch says it is one of: not to be written to."""
    found, base = current_world().memory.setdefault("unseen", {}), _base(made)
    key = id(base)
    found[key] = weakref.ref(base, lambda _: found.pop(key, None)), origin
    return made


def _base(tensor: Any) -> Any:
    return tensor._base if tensor._is_view() else tensor


def _check_seen(op: Op, targets: Sequence[Any], unseen: dict[int, tuple[Any, Spec]]) -> None:
    for target in targets:
        _, origin = unseen.get(id(_base(target)), (None, None))
        if origin is not None:
            raise InplaceError(
                message(
                    f"{op} would write to a view that has moved, and not to the tensor that it is a view of",
                    asked=f"{op} on {target._spec}",
                    got=f"a view of {origin}, whose parts are no shards of it",
                    do="clone() it first, or redistribute that tensor before taking the view",
                )
            )


def _storage(tensor: Any) -> int:
    found: int = tensor._local_tensor.untyped_storage()._cdata
    return found


def _write_back(targets: list[Any]) -> None:
    passes = current_world().memory.get("stand-ins")
    stand_ins = passes.get(_graph_task(), {}) if passes else {}
    for target in targets if stand_ins else ():
        origin, moved = stand_ins.get(_storage(target), (None, None))
        if origin is not None:
            origin.copy_(moved)


def redistributed(what: object, tensor: Any, placements: Any) -> Any:
    """``tensor`` lying as ``placements`` say, where the operator ``what`` needs that by itself."""
    spec: Spec = tensor._spec
    forbid(what, [((0, -1), spec, plan(spec, spec.with_placements(placements)))])
    return tensor.redistribute(placements=placements)


def _replace(args: list[Any], kwargs: Kwargs, place: Place, source: Spec, steps: tuple[Step, ...]) -> None:
    where, item = place
    holder: Any = args if isinstance(where, int) else kwargs
    if item >= 0:
        holder, where = holder[where], item
    holder[where] = execute.run(holder[where], source, steps)


def wrapped(kind: Any, ready: Ready, result: Any, args: Args, kwargs: Kwargs) -> Any:
    """The local ``result`` as what the operator returns: distributed tensors, or the very arguments it has written."""
    returns = ready.returns
    if returns == "nothing":
        return None
    if ready.written:
        targets = [_at(args, kwargs, place) for place in ready.written]
        if _graph_task() != -1:
            _write_back([target for target in targets if isinstance(target, kind)])
        return targets[0] if returns == "tensor" else tuple(targets)
    if ready.measured is not None:
        return _measured(kind, ready.measured, result)
    if returns == "other":
        return result
    made, wrap, views = [], kind._wrap, ready.views
    for part, spec in zip([result] if returns == "tensor" else result, ready.outputs, strict=True):
        if spec is None or part is None:
            made.append(part)
        elif views:
            one = wrap(part, spec)
            made.append(_marked(one, part) if part.is_neg() or part.is_conj() else one)
        else:
            made.append(wrap(part if part.is_contiguous() is spec.meta.row_major else spec.meta.lay_out(part), spec))
    if returns == "tensor":
        return made[0]
    return made if returns == "list" else tuple(made)


def _marked(made: Any, part: torch.Tensor) -> Any:
    """``made``, which says of itself that it is a conjugate or negative that is still to be resolved if ``part`` is."""
    torch._C._set_conj(made, part.is_conj())
    torch._C._set_neg(made, part.is_neg())
    return made


def _measured(kind: Any, mesh: DeviceMesh, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return kind._wrap(result, Spec(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(result)))
    if isinstance(result, (list, tuple)):
        made = [_measured(kind, mesh, item) for item in result]
        return made if isinstance(result, list) else tuple(made)
    return result


def _relabelled(op: Op, args: Args, kwargs: Kwargs, result: torch.Tensor, ready: Ready) -> Any:
    """The first argument, which has another shape from now on."""
    target = args[0]
    target._local_tensor, target._spec = result, ready.outputs[0]
    with torch._C._DisableTorchDispatch():  # the tensor itself knows its shape, and has no elements
        op(*args, **kwargs)
    return target


def _at(args: Args, kwargs: Kwargs, place: Place) -> Any:
    where, item = place
    found = args[where] if isinstance(where, int) else kwargs[where]
    return found if item < 0 else found[item]


def run_each(op: Op, args: Args, kwargs: Kwargs, ready: Ready) -> Any:
    """Run a list operator entry by entry."""
    base = foreach_base(op)
    assert base is not None, op
    results = [base(*own, **named) for own, named in foreach_entries(op, args, kwargs)]
    return None if ready.returns == "nothing" else results

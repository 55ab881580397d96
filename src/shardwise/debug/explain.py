"""Why a call does what it does: the meaning of each operator in it, what must move first, how the results lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.mesh.world import current_world
from shardwise.redistribute.planner import stages
from shardwise.redistribute.steps import Step
from shardwise.rules.rule import resolve
from shardwise.rules.table import foreach_base, lookup, make_call
from shardwise.sharding.spec import Spec
from shardwise.tensor import dispatch
from shardwise.tensor.asked import Asked, Op
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.metas import output_metas
from shardwise.tensor.prepare import Ready, ask, in_schema_order, places_of
from shardwise.tensor.signature import signature

__all__ = ["explain", "explanation"]


def explain(op: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Print the `explanation` of the call ``op(*args, **kwargs)``, on the first rank of the world only."""
    text = explanation(op, *args, **kwargs)
    if current_world().rank == 0:
        print(text)


def explanation(op: Callable[..., object], *args: object, **kwargs: object) -> str:
    """How the call ``op(*args, **kwargs)`` is planned, for each operator in it; nothing is run and nothing is sent.

    For each operator: the call, what it means (the equation of its rule), what moves first and how many bytes a rank
    sends for it, and how the result lies. Raises what the call would raise for want of a plan.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.debug import explanation
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = shardwise.zeros(4, 8, device_mesh=mesh, placements=[shardwise.Shard(1)])
    ...     w = shardwise.zeros(8, 6, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     return explanation(torch.mm, x, w)
    >>> print(shardwise.sim.run(body, 2)[0])
    aten.mm.default(f32[4, 8@tp], f32[8@tp, 6]) on DeviceMesh('cpu', tp=2)
      means  m k * k n -> m n
      moves  nothing
      gives  f32[4, 6]{sum@tp}
    """
    told = _Told()
    with torch.no_grad(), told:
        op(*args, **kwargs)
    return "\n".join(told.lines)


class _Told(TorchDispatchMode):
    """Plans the operators that come by, and writes the plans down instead of carrying them out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.depth = 0

    def __torch_dispatch__(
        self,
        func: Op,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, named))):
            return func(*args, **named)
        asked = ask(DTensor, func, args, named, list(places_of(func, signature(func), args, named)))
        ready = dispatch.ready_for(DTensor, func, args, named)
        self.lines.extend("  " * self.depth + line for line in _lines(asked, ready))
        if ready.expand is None and not ready.each:
            return dispatch.wrapped(DTensor, ready, _results(asked, ready), args, named)
        self.depth += 1
        with self:
            if ready.expand is not None:
                result = ready.expand(*in_schema_order(func, args, named))
            else:
                result = dispatch.run_each(func, args, named, ready)
        self.depth -= 1
        return result


def _lines(asked: Asked, ready: Ready) -> Iterator[str]:
    yield str(asked)
    yield f"  means  {_meaning(asked)}"
    if ready.expand is not None or ready.each:
        yield "  runs as"
        return
    moves = [f"  moves  {_move(source, steps)}" for _, source, steps in ready.moves]
    yield from moves or ["  moves  nothing"]
    yield f"  gives  {', '.join(str(spec) for spec in ready.outputs if spec is not None) or 'no tensor'}"


def _meaning(asked: Asked) -> str:
    base = foreach_base(asked.op)
    if base is not None:
        return f"{base} of each entry"
    rule = lookup(asked.op)
    if rule is None:
        return "the operators that it decomposes into"
    call = make_call(asked.op, asked.args, asked.kwargs, output_metas(asked.op, asked.args, asked.kwargs))
    _, meaning = resolve(rule, call)
    return (meaning or "other operators") if isinstance(meaning, str) else "; ".join(map(str, meaning))


def _move(source: Spec, steps: tuple[Step, ...]) -> str:
    target, sent = source, 0
    for spec, step in stages(source, steps):
        target, sent = step.after(spec), sent + step.bytes(spec)
    return f"{source} to {target} by {', '.join(map(str, steps)) or 'nothing'} ({sent} bytes)"


def _results(asked: Asked, ready: Ready) -> object:
    """What the local call would give, without data."""
    made = [
        None if spec is None else torch.empty(spec.local_shape(asked.coordinate), dtype=spec.meta.dtype, device="meta")
        for spec in ready.outputs
    ]
    return made[0] if ready.returns == "tensor" and made else made

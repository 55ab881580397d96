"""`explicit`: a block within which no operator may redistribute by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import RedistributeError, message
from shardwise.mesh.world import current_world
from shardwise.redistribute.planner import stages
from shardwise.redistribute.steps import Step
from shardwise.sharding.spec import Spec

Moves = Sequence[tuple[object, Spec, tuple[Step, ...]]]  # of what, from where


@contextmanager
def explicit(enable: bool = True, *, strict: bool = False) -> Iterator[None]:
    """Within the block, an operator that would communicate to redistribute its operands raises `RedistributeError`.

    The error names the operator, the moves and their bytes. `redistribute`, `full_tensor` and gradients of these are
    explicit and go on working; what sends nothing, such as keeping a part of a replicated tensor, is allowed unless
    ``strict``. ``enable=False`` allows everything again within an outer block.

    >>> import shardwise, shardwise.sim, torch
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = shardwise.ones(4, 4, device_mesh=mesh, placements=[shardwise.Shard(1)])
    ...     with shardwise.explicit():
    ...         try:
    ...             x.softmax(1)
    ...         except shardwise.RedistributeError as error:
    ...             return str(error).splitlines()[0]
    >>> shardwise.sim.run(body, 2)[0]
    'aten._softmax.default would redistribute by itself, sending 16 bytes'
    """
    memory = current_world().memory
    before = memory.get("explicit")
    memory["explicit"] = ("strict" if strict else "sending") if enable else None
    try:
        yield
    finally:
        memory["explicit"] = before


def forbid(what: object, moves: Moves) -> None:
    """Raise `RedistributeError` if ``what`` may not do these moves by itself, here and now."""
    asked = current_world().memory.get("explicit")
    if asked is None:
        return
    sent = sum(step.bytes(spec) for _, source, steps in moves for spec, step in stages(source, steps))
    if sent or asked == "strict":
        raise RedistributeError(
            message(
                f"{what} would redistribute by itself, sending {sent} bytes",
                asked="no implicit redistribution: this runs within shardwise.explicit()",
                got="; ".join(f"{source}: {', '.join(map(str, steps))}" for _, source, steps in moves),
                do="redistribute the operands first, or leave the block",
            )
        )

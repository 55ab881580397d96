"""Operators over lists whose entries belong together otherwise than `_foreach_` ones: fused optimizers, scaling.

Each entry may lie in its own way and on its own mesh, and be plain among distributed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.errors import InplaceError, message
from shardwise.rules.parts import settled, spec_of
from shardwise.rules.rule import Rule, called
from shardwise.sharding.spec import Spec, TensorMeta

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]

FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"


def stepped(*args: object) -> str:
    """A step of an optimizer for one parameter: the same for each element."""
    tensors = [item for item in args if item is None or isinstance(item, TensorMeta)]
    count = len(tensors) + sum(len(item) for item in args if isinstance(item, (list, tuple)))
    return f"f({', '.join(['...'] * count)}) -> "


def laid_out(op: torch._ops.OpOverload) -> Callable[..., None]:
    """The step ``op`` of one parameter whose gradient or states lie otherwise than it: they are laid as it is."""
    run = called(op)

    def step(parameters: Tensors, *others: object) -> None:
        spec = spec_of(parameters[0])
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []

        def lay(item: object) -> object:
            if isinstance(item, (list, tuple)):
                return [lay(entry) for entry in item]
            own = spec_of(item) if isinstance(item, torch.Tensor) else None
            if spec is None or own is None or not own.ndim or own.placements == spec.placements:
                return item
            assert isinstance(item, torch.Tensor), item
            made: torch.Tensor = item.redistribute(placements=spec.placements)  # type: ignore[attr-defined]
            moved.append((item, made))
            return made

        given = [lay(item) for item in others] if spec is not None and not _is_pending(spec) else []
        if not moved:
            raise InplaceError(
                message(f"{op} cannot write to such a parameter", asked=str(spec), do="redistribute it to Replicate()")
            )
        run(parameters, *given)
        for item, made in moved:
            item.copy_(made)

    return step


def _is_pending(spec: Spec) -> bool:
    return any(placement.is_partial() for placement in spec.placements)


# --- gradient scaling


def _mesh(x: torch.Tensor) -> object:
    spec = spec_of(x)
    return None if spec is None else spec.mesh


def unscaled(tensors: Tensors, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply each tensor by ``inverse_scale`` in place, and tell by ``found_inf`` whether any was not finite."""
    counts: dict[object, list[torch.Tensor]] = {}
    for x in tensors:
        counts.setdefault(_mesh(x), []).append((~torch.isfinite(x)).sum(dtype=torch.float32))
        x.mul_(inverse_scale.to(x.dtype))
    for broken in counts.values():
        total = settled(torch.stack(broken).sum())
        found_inf.copy_(torch.maximum(total.clamp(max=1), found_inf))


RULES: dict[str, Rule] = {
    **{
        f"{name}.{overload}": Rule(stepped, loose=True, expand=laid_out(getattr(getattr(aten, name), overload)))
        for name in FUSED.split()
        for overload in getattr(aten, name).overloads()
        if not overload.endswith("out")
    },
    "_amp_foreach_non_finite_check_and_unscale_": Rule(expand=unscaled, apart=True),
}

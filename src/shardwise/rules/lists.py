"""Operators over lists whose entries belong together otherwise than `_foreach_` ones: fused optimizers, scaling.

Each entry may lie in its own way and on its own mesh, and be plain among distributed ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rules.parts import settled, spec_of
from shardwise.rules.rule import Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]

FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"


def stepped(*args: object) -> str:
    """A step of an optimizer for one parameter: the same for each element."""
    tensors = [item for item in args if item is None or isinstance(item, TensorMeta)]
    count = len(tensors) + sum(len(item) for item in args if isinstance(item, (list, tuple)))
    return f"f({', '.join(['...'] * count)}) -> "


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
    **dict.fromkeys(FUSED.split(), Rule(stepped, loose=True)),
    "_amp_foreach_non_finite_check_and_unscale_": Rule(expand=unscaled, apart=True),
}

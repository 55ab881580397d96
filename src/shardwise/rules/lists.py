"""Operators over lists whose entries belong together otherwise than `_foreach_` ones: fused optimizers, norms, scaling.

Each entry may lie in its own way and on its own mesh, and be plain among distributed ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardwise.rules.parts import settled, spec_of
from shardwise.rules.rule import Rule
from shardwise.sharding.spec import TensorMeta

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]
Number = bool | int | float

FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"


def stepped(*args: object) -> str:
    """A step of an optimizer for one parameter: the same for each element."""
    tensors = [item for item in args if item is None or isinstance(item, TensorMeta)]
    count = len(tensors) + sum(len(item) for item in args if isinstance(item, (list, tuple)))
    return f"f({', '.join(['...'] * count)}) -> "


def one_by_one(op: torch._ops.OpOverload) -> Callable[..., None]:
    """``op`` for each entry of its lists."""
    positional = sum(not argument.kwarg_only for argument in op._schema.arguments)
    names = [argument.name for argument in op._schema.arguments[positional:]]

    def run(*args: object) -> None:
        first = args[0]
        assert isinstance(first, (list, tuple)), op
        for entry in range(len(first)):
            own = [item[entry : entry + 1] if isinstance(item, (list, tuple)) else item for item in args]
            op(*own[:positional], **dict(zip(names, own[positional:], strict=True)))

    return run


def _fused() -> dict[str, Rule]:
    rules = {}
    for name in FUSED.split():
        for overload in getattr(aten, name).overloads():
            op = getattr(getattr(aten, name), overload)
            if not overload.endswith("out"):
                rules[f"{name}.{overload}"] = Rule(stepped, expand=one_by_one(op), apart=True)
    return rules


# --- norms of many tensors, reduced together


def norms(tensors: Tensors, order: Number = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each tensor; those of one mesh are reduced in one go."""
    found: list[torch.Tensor] = list(tensors)
    groups: dict[object, list[int]] = {}
    for place, x in enumerate(tensors):
        groups.setdefault((_mesh(x), x.dtype), []).append(place)
    for places in groups.values():
        own = [tensors[place] for place in places]
        made = _norms_of_mesh(own, float(order), dtype) if _mesh(own[0]) else _plain_norms(own, order, dtype)
        for place, norm in zip(places, made, strict=True):
            found[place] = norm
    return found


def _mesh(x: torch.Tensor) -> object:
    spec = spec_of(x)
    return None if spec is None else spec.mesh


def _plain_norms(tensors: Tensors, order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    return [aten.linalg_vector_norm.default(x, order, None, False, dtype=dtype) for x in tensors]


def _norms_of_mesh(tensors: Tensors, order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if order == -math.inf:
        return _plain_norms(tensors, order, dtype)
    inner = 1.0 if order in (0.0, 1.0) else order
    wide = [x if dtype is None else x.to(dtype) for x in tensors]
    if order == math.inf or order == 0:
        parts = [aten.linalg_vector_norm.default(x, order) for x in wide]
    else:
        parts = [_powers(x, inner) for x in wide]
    total = settled(torch.stack(parts))
    root = total if inner == 1 or order == math.inf else total.sqrt() if inner == 2 else total ** (1 / inner)
    return list(root.to((dtype or tensors[0].dtype).to_real()).unbind())


def _powers(x: torch.Tensor, order: float) -> torch.Tensor:
    size = x.abs()
    if size.dtype.itemsize < 4:
        size = size.float()
    return (size * size if order == 2 else size if order == 1 else size**order).sum()


# --- gradient scaling


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
    **_fused(),
    "_foreach_norm.Scalar": Rule(expand=norms, apart=True),
    "_amp_foreach_non_finite_check_and_unscale_": Rule(expand=unscaled, apart=True),
}

"""A call of an operator as propagation sees it: global facts only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.mesh.mesh import DeviceMesh
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor.signature import signature

Op = torch._ops.OpOverload


@dataclass(frozen=True, slots=True)
class Asked:
    """A call as propagation sees it: static arguments as they are, `TensorMeta` for tensors, their specs."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    specs: tuple[Spec | None, ...]
    mesh: DeviceMesh
    coordinate: tuple[int, ...] | None

    def __str__(self) -> str:
        specs = iter([spec for spec in self.specs if spec is not None])

        def text(argument: object) -> str:
            if isinstance(argument, TensorMeta):
                return repr(next(specs))
            if isinstance(argument, (list, tuple)):
                return "[" + ", ".join(text(item) for item in argument) + "]"
            return repr(argument)

        given = [text(argument) for argument in self.args]
        given += [f"{name}={text(argument)}" for name, argument in self.kwargs.items()]
        return f"{self.op}({', '.join(given)}) on {self.mesh}"


def sizes_among(op: Op, args: Sequence[object]) -> tuple[object, ...]:
    """The sizes and indices among the arguments of ``op``."""
    given = len(args)
    found = [args[place] for place in signature(op).sizes if place < given]
    return tuple([tuple(item) if isinstance(item, (list, tuple)) else item for item in found])


def roughened(op: Op, args: Sequence[object]) -> Sequence[object]:
    """The arguments of ``op`` with nothing left of sizes and indices but whether they are 0, 1 or -1, and the sign."""
    places = signature(op).sizes
    if not places:
        return args
    rough = list(args)
    for place in places:
        if place < len(rough):
            item = rough[place]
            rough[place] = [_rough(size) for size in item] if isinstance(item, (list, tuple)) else _rough(item)
    return rough


def _rough(size: object) -> object:
    return size if type(size) is not int else max(-2, min(2, size))

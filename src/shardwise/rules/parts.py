"""What an expansion may know of the tensors it is given: which part of them lies on this rank.

An expansion is written in operators on whole tensors. Where a rank must look at its own part first, and then at a
little of everybody's, it takes the part from here and makes a distributed tensor of what it has found. Plain tensors
are whole: they have no spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.sharding.placement import Cut, Partial, Placement, Replicate
from shardwise.sharding.spec import Spec, TensorMeta


def spec_of(x: torch.Tensor) -> Spec | None:
    """How ``x`` lies, or None if it is a plain tensor."""
    return getattr(x, "_spec", None)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor."""
    local: torch.Tensor = x._local_tensor  # type: ignore[attr-defined]
    return local


def lying(x: torch.Tensor, local: torch.Tensor, placements: Sequence[Placement], meta: TensorMeta) -> torch.Tensor:
    """A distributed tensor on the mesh of ``x``, of which ``local`` is this rank's part."""
    spec = spec_of(x)
    assert spec is not None, x
    made: torch.Tensor = type(x)._wrap(local, Spec(spec.mesh, tuple(placements), meta))  # type: ignore[attr-defined]
    return made


def settled(x: torch.Tensor) -> torch.Tensor:
    """``x`` with nothing pending."""
    return _moved(x, lambda placement: isinstance(placement, Partial))


def whole_along(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """``x`` with nothing pending, and nobody holding less than all of ``dims``."""
    return _moved(x, lambda placement: isinstance(placement, Partial) or is_cut(placement, dims))


def is_cut(placement: Placement, dims: Sequence[int]) -> bool:
    """Whether the placement cuts one of ``dims``."""
    return isinstance(placement, Cut) and placement.dim in dims


def _moved(x: torch.Tensor, must: Callable[[Placement], bool]) -> torch.Tensor:
    spec = spec_of(x)
    if spec is None or not any(map(must, spec.placements)):
        return x
    wanted = [Replicate() if must(placement) else placement for placement in spec.placements]
    moved: torch.Tensor = x.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return moved


def positions(spec: Spec, dim: int, device: torch.device) -> torch.Tensor:
    """Where the entries of a dim that this rank holds stand in the global dim."""
    coordinate = spec.mesh.get_coordinate()
    held = spec.intervals(dim, coordinate) if coordinate is not None else ()
    pieces = [torch.arange(start, stop, device=device) for start, stop in held]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)

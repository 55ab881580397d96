"""Layouts made from whole tensors by torch alone, to hold redistribution against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.world import dry_world, use_world
from shardwise.sharding.placement import Owned, Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from shardwise.sharding.spec import Spec, TensorMeta

AXES = ("dp", "tp", "pp", "ep")
NEUTRAL = {"sum": 0, "bxor": 0, "norm": 0, "product": 1}
COMBINE: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda terms: reduce(torch.add, terms),
    "avg": lambda terms: reduce(torch.add, terms) / len(terms),
    "product": lambda terms: reduce(torch.mul, terms),
    "min": lambda terms: reduce(torch.minimum, terms),
    "max": lambda terms: reduce(torch.maximum, terms),
    "band": lambda terms: reduce(torch.bitwise_and, terms),
    "bor": lambda terms: reduce(torch.bitwise_or, terms),
    "bxor": lambda terms: reduce(torch.bitwise_xor, terms),
    "norm": lambda terms: reduce(torch.hypot, terms).copysign(reduce(torch.add, terms)),
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of ``shape``, in the current world."""
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])


def dry_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of ``shape``, seen from a world without data."""
    with use_world(dry_world(0, prod(shape))):
        return mesh_of(shape)


def spec_of(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Spec:
    """A spec of a contiguous tensor."""
    return Spec(mesh, tuple(placements), TensorMeta.contiguous(shape, dtype))


def placed(ndim: int, axes: int, *more: Placement) -> list[tuple[Placement, ...]]:
    """All placements on ``axes`` mesh axes: replicated, sharded by each dim, a sum pending, and ``more``."""
    one: list[Placement] = [Replicate(), *map(Shard, range(ndim)), Partial(), *more]
    return list(itertools.product(one, repeat=axes))


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The coordinate of each rank."""
    return list(itertools.product(*map(range, shape)))


def chunk(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
    """``parts`` chunks by the rule of `torch.chunk`, the missing ones empty."""
    chunks = list(tensor.chunk(parts, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (parts - len(chunks))


def cut(tensor: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    """What each of ``parts`` ranks holds of a tensor that lies so; of a pending reduction, the first holds it all."""
    match placement:
        case Shard():
            return chunk(tensor, parts, placement.dim)
        case StridedShard():
            blocks = [
                chunk(block, parts, placement.dim) for block in chunk(tensor, placement.split_factor, placement.dim)
            ]
            return [torch.cat(pieces, placement.dim) for pieces in zip(*blocks, strict=True)]
        case RaggedShard():
            shares = [sum(placement.sizes[:index]) for index in range(parts + 1)]
            bounds = [share * tensor.shape[placement.dim] // shares[-1] for share in shares]
            return [tensor.narrow(placement.dim, *_span(*pair)) for pair in itertools.pairwise(bounds)]
        case Owned():
            return [tensor if index == placement.index else torch.zeros_like(tensor) for index in range(parts)]
        case Partial():
            return terms(tensor, placement.reduce_op, parts)
    return [tensor] * parts


def _span(start: int, stop: int) -> tuple[int, int]:
    return start, stop - start


def terms(tensor: Tensor, reduce_op: str, parts: int) -> list[Tensor]:
    """Different terms whose reduction is the tensor."""
    if reduce_op in ("sum", "avg"):
        noise = [torch.full_like(tensor, index + 1) for index in range(parts - 1)]
        last = tensor * (parts if reduce_op == "avg" else 1) - sum(noise)
        return [*noise, last]
    neutral = torch.full_like(tensor, NEUTRAL[reduce_op]) if reduce_op in NEUTRAL else tensor
    return [neutral] * (parts - 1) + [tensor]


def distributed(tensor: Tensor, spec: Spec) -> dict[tuple[int, ...], Tensor]:
    """The local tensor of each coordinate, cut axis by axis."""
    locals_ = {(): tensor}
    for placement, parts in zip(spec.placements, spec.mesh.shape, strict=True):
        locals_ = {
            (*coordinate, index): piece
            for coordinate, local in locals_.items()
            for index, piece in enumerate(cut(local, placement, parts))
        }
    return locals_


def reduced(locals_: dict[tuple[int, ...], Tensor], spec: Spec) -> dict[tuple[int, ...], Tensor]:
    """The local tensors with what is pending done, from the last axis to the first."""
    for axis, placement in reversed(list(enumerate(spec.placements))):
        if isinstance(placement, Partial):
            along = range(spec.mesh.shape[axis])
            peers = {key: [locals_[(*key[:axis], index, *key[axis + 1 :])] for index in along] for key in locals_}
            locals_ = {key: COMBINE[placement.reduce_op](group) for key, group in peers.items()}
    return locals_


def settled(spec: Spec) -> Spec:
    """The spec with what is pending done."""
    return spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])

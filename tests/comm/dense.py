"""What the collectives mean: on the list of all ranks' tensors, in plain torch, differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise import collectives as c

Tensors = Sequence[Tensor]
World = list[int]

BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def reduced(xs: Tensors, op: str) -> Tensor:
    """The tensors of all ranks, combined."""
    if op in BITS:
        return functools.reduce(BITS[op], xs)
    stacked = torch.stack(tuple(xs))
    functions: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.mean(0),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }
    return functions[op]().to(stacked.dtype)


def exchanged(xs: Tensors, splits: Sequence[Sequence[int]]) -> list[Tensor]:
    """``splits[i][j]`` rows go from rank i to rank j."""
    parts = [x.split(list(split)) for x, split in zip(xs, splits, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]


def uneven(n: int) -> list[list[int]]:
    """Splits with zeros in them: of 2n rows, rank i sends two to each of the others but none to the one after it."""
    rows = [[2] * n for _ in range(n)]
    for rank in range(n):
        rows[rank][(rank + 1) % n] -= 2
        rows[rank][rank] += 2
    return rows


# name: (the call on one rank with its index, all ranks' results), for tensors of shape (2n, 3, n)
CASES: dict[str, tuple[Callable[[Tensor, World, int], Tensor], Callable[[Tensors], Sequence[Tensor]]]] = {
    **{
        f"all_reduce {op}": (
            lambda x, g, r, op=op: c.all_reduce(x, op, g),
            lambda xs, op=op: [reduced(xs, op)] * len(xs),
        )
        for op in ("sum", "avg", "product", "min", "max")
    },
    **{
        f"all_gather {dim}": (
            lambda x, g, r, dim=dim: c.all_gather_tensor(x, dim, g),
            lambda xs, dim=dim: [torch.cat(tuple(xs), dim)] * len(xs),
        )
        for dim in (0, 1, 2, -1)
    },
    **{
        f"reduce_scatter {op} {dim}": (
            lambda x, g, r, op=op, dim=dim: c.reduce_scatter_tensor(x, op, dim, g),
            lambda xs, op=op, dim=dim: reduced(xs, op).chunk(len(xs), dim),
        )
        for op, dim in (("sum", 0), ("avg", -1), ("sum", 2), ("product", 0), ("max", 2), ("min", -3))
    },
    "all_to_all even": (
        lambda x, g, r: c.all_to_all_single(x, None, None, g),
        lambda xs: exchanged(xs, [[2] * len(xs)] * len(xs)),
    ),
    "all_to_all uneven": (
        lambda x, g, r: c.all_to_all_single(x, [row[r] for row in uneven(len(g))], uneven(len(g))[r], g),
        lambda xs: exchanged(xs, uneven(len(xs))),
    ),
    "broadcast": (lambda x, g, r: c.broadcast(x, len(g) - 1, g), lambda xs: [xs[-1]] * len(xs)),
    "permute": (
        lambda x, g, r: c.permute_tensor(x, [(i + 1) % len(g) for i in range(len(g))], g),
        lambda xs: [xs[(r - 1) % len(xs)] for r in range(len(xs))],
    ),
}


def sample(rank: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers of which sums, averages and products are exact in every dtype, with ties between ranks."""
    whole = torch.arange(2 * n * 3 * n).reshape(2 * n, 3, n)
    drawn = (whole * 7 + rank * 5 + whole // 3) % 4
    return (drawn * 12 if dtype.is_floating_point or dtype.is_complex else drawn).to(dtype)

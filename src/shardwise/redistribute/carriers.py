"""What a pending reduction travels as, where backends cannot reduce its terms as they are, and how wide that is.

No backend reduces 16-bit integers, or knows a norm; and all lose what is not a number when they compare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor


class Carrier(NamedTuple):
    """A reduction that is done as another one, ``reduce_op``, of numbers of ``dtype`` that stand for its terms."""

    reduce_op: str
    dtype: torch.dtype
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


@lru_cache(maxsize=256)
def carrier(reduce_op: str, dtype: torch.dtype) -> Carrier | None:
    """What stands for terms of ``dtype`` in a reduction by ``reduce_op``; None if they stand for themselves."""
    if reduce_op == "norm":
        return Carrier("sum", torch.float64, _squared, partial(_rooted, dtype=dtype))
    if reduce_op in ("max", "min") and dtype.is_floating_point:
        ranks = torch.int64 if dtype is torch.float64 else torch.int32
        return Carrier(reduce_op, ranks, partial(_ranked, reduce_op=reduce_op), partial(_unranked, dtype=dtype))
    if dtype is torch.int16:
        return Carrier(reduce_op, torch.int32, torch.Tensor.int, torch.Tensor.short)  # wraps around as it would have
    return None


def width(reduce_op: str, dtype: torch.dtype) -> int:
    """The bytes in which a backend reduces a term of ``dtype``."""
    found = carrier(reduce_op, dtype)
    return dtype.itemsize if found is None else found.dtype.itemsize


# In double precision the square of a float keeps all its digits, and its root is the float.


def _squared(local: Tensor) -> Tensor:
    wide = local.double()
    return wide * wide.abs()


def _rooted(squares: Tensor, dtype: torch.dtype) -> Tensor:
    return squares.abs().sqrt().copysign(squares).to(dtype)


# As integers in the same order, what is not a number stands beyond the infinities: the bits of a float rank it among
# those of its sign, and those of a negative one the other way round. Of 16 bits it would be one value too many for a
# float of 16 bits to stand for.


def _ranked(local: Tensor, reduce_op: str) -> Tensor:
    wide = local if local.dtype is torch.float64 else local.float()
    spoilt = torch.full((), torch.nan if reduce_op == "max" else -torch.nan, dtype=wide.dtype, device=wide.device)
    bits = torch.where(wide.isnan(), spoilt, wide).view(torch.int64 if wide.dtype is torch.float64 else torch.int32)
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _unranked(ranks: Tensor, dtype: torch.dtype) -> Tensor:
    bits = torch.where(ranks < 0, ranks ^ torch.iinfo(ranks.dtype).max, ranks)
    return bits.view(torch.float64 if dtype is torch.float64 else torch.float32).to(dtype)

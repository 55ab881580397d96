"""Which views an `as_strided` is: found from sizes and strides alone, the same memory in the same shape."""

from __future__ import annotations

import random

import torch

from shardwise.rules.strided import views_of
from shardwise.sharding.spec import TensorMeta


def a_view(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    dim = draw.randrange(x.ndim) if x.ndim else 0
    kind = draw.choice(["narrow", "steps", "select", "permute", "unsqueeze", "expand", "view"])
    if kind == "narrow" and x.ndim:
        start = draw.randrange(x.shape[dim])
        return x.narrow(dim, start, draw.randint(1, x.shape[dim] - start))
    if kind == "steps" and x.ndim:
        return x[(*[slice(None)] * dim, slice(0, None, draw.choice([2, 3])))]
    if kind == "select" and x.ndim:
        return x.select(dim, draw.randrange(x.shape[dim]))
    if kind == "expand":
        return x.expand([2, *(3 if size == 1 else -1 for size in x.shape)])
    if kind == "view" and x.is_contiguous() and x.numel() % 2 == 0:
        return x.view(2, -1)
    return x.permute(draw.sample(range(x.ndim), x.ndim)) if kind == "permute" else x.unsqueeze(dim)


def test_every_view_of_packed_memory_is_found() -> None:
    draw = random.Random(0)
    for _ in range(1500):
        shape = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.choice([1, 2, 3]))]
        x = torch.arange(torch.Size(shape).numel()).view(shape).permute(draw.sample(range(len(shape)), len(shape)))
        y = x
        for _ in range(draw.choice([1, 2, 3])):
            y = a_view(draw, y)
        ways = views_of(TensorMeta.of(x), y.shape, y.stride(), y.storage_offset())
        assert ways, (shape, x.stride(), y.shape, y.stride())
        for views in ways:
            found = x
            for name, args in views:
                found = getattr(found, name)(*args)
            assert torch.equal(found, y)
            assert found.storage_offset() == y.storage_offset()
            strides = zip(y.shape, found.stride(), y.stride(), strict=True)
            assert all(size == 1 or one == other for size, one, other in strides)


def test_what_overlaps_or_has_gaps_is_none() -> None:
    x = TensorMeta.contiguous((4, 4), torch.float32)
    assert views_of(x, (3, 2), (1, 1), 0) == []  # windows
    assert views_of(x, (3, 3), (5, 4), 0) == []
    assert views_of(TensorMeta((4, 4), (8, 1), torch.float32), (2, 2), (4, 1), 0) == []


def test_of_memory_with_gaps_the_dims_that_it_has_are_found() -> None:
    whole = torch.arange(32).view(4, 8)
    for x in (whole[:, :4], whole[:, ::2], whole[:, :4].t(), whole[:, :1].expand(4, 3)):
        for size, stride in (((3,), (8,)), ((), ()), ((1, 4), (0, 8)), ((2, 3), (0, 8))):
            (views,) = views_of(TensorMeta.of(x), size, stride, 0)
            found = x
            for name, args in views:
                found = getattr(found, name)(*args)
            assert torch.equal(found, x.as_strided(size, stride))

"""Convolutions over cut dims of space, in the simulator: what plain torch computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire
from shardwise.rules.halo import Window

CASES = {  # sizes of space, kernel, options
    "seam": ((8,), (3,), {"padding": 1}),
    "uneven": ((7,), (3,), {"padding": 1}),
    "no padding": ((9,), (4,), {}),
    "strided": ((11,), (3,), {"stride": 2, "padding": 1}),
    "leaps": ((11,), (1,), {"stride": 3}),
    "dilated": ((9,), (3,), {"dilation": 2, "padding": 3}),
    "kernel wider than a shard": ((5,), (5,), {"padding": 2}),
    "padding wider than the input": ((2,), (3,), {"padding": 4}),
    "groups": ((6,), (3,), {"padding": 1, "groups": 2}),
    "two dims": ((5, 6), (3, 2), {"padding": (1, 0)}),
    "three dims": ((4, 3, 5), (2, 3, 3), {"padding": 1}),
}


def compared(world: int, shape: tuple[int, ...], placements, size, kernel, options, *, transposed: bool) -> list[str]:
    groups = options.get("groups", 1)
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    x, w, b = torch.randn(2, 4, *size), torch.randn(*channels, *kernel), torch.randn(6)
    run = getattr(F, f"conv{'_transpose' * transposed}{len(size)}d")
    dense = [item.clone().requires_grad_() for item in (x, w, b)]
    whole = run(*dense, **options)
    weights = torch.randn(whole.shape)
    (whole * weights).sum().backward()

    def body() -> list[str]:
        mesh = init_device_mesh("cpu", shape)
        given = zip((x, w, b), placements, strict=True)
        own = [distribute_tensor(item, mesh, place).requires_grad_() for item, place in given]
        sent: list[str] = []
        with wire.observing(lambda transmission: sent.append(transmission.op)):
            found = run(*own, **options)
        (found * distribute_tensor(weights, mesh, [Replicate()] * len(shape))).sum().backward()
        torch.testing.assert_close(found.full_tensor(), whole, rtol=1e-4, atol=1e-4)
        for one, other in zip(own, dense, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-3)
        return sent

    return sim.run(body, world)[0]


# A transposed convolution has no kernel that is wider than its input.
WAYS = [(case, way) for case in CASES for way in (False, True) if not (way and "wider than the input" in case)]


@pytest.mark.parametrize(("case", "transposed"), WAYS)
def test_a_cut_dim_of_space_exchanges_borders_only(case: str, transposed: bool) -> None:
    size, kernel, options = CASES[case]
    for world in (2, 3, 4):
        for dim in range(len(size)):
            places = [Shard(2 + dim)], [Replicate()], [Replicate()]
            sent = compared(world, (world,), places, size, kernel, options, transposed=transposed)
            assert set(sent) <= {"all_to_all"}


def test_two_axes_cut_height_and_width() -> None:
    places = [Shard(2), Shard(3)], [Replicate()] * 2, [Replicate()] * 2
    sent = compared(4, (2, 2), places, (5, 7), (3, 3), {"padding": 1}, transposed=False)
    assert sent == ["all_to_all", "all_to_all"]


def test_two_axes_cut_the_same_dim_or_the_batch_beside_it() -> None:
    whole = [Replicate()] * 2
    for first in (Shard(2), Shard(0), Shard(1)):
        places = [first, Shard(2)], whole, whole
        compared(4, (2, 2), places, (9,), (3,), {"stride": 2, "padding": 1}, transposed=False)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_window_knows_its_sources(transposed: bool) -> None:
    window = Window(kernel=3, stride=2, padding=1, dilation=2, transposed=transposed)
    x = torch.arange(1.0, 10.0).reshape(1, 1, -1).requires_grad_()
    run = F.conv_transpose1d if transposed else F.conv1d
    y = run(x, torch.ones(1, 1, 3), stride=2, padding=1, dilation=2)
    for at in range(y.shape[-1]):
        (touched,) = torch.autograd.grad(y[0, 0, at], x, retain_graph=True)
        low, high = window.sources(at, at + 1)
        assert set(touched[0, 0].nonzero().flatten().tolist()) <= set(range(low, high))


def test_nothing_is_sent_where_kernels_do_not_overlap() -> None:
    places = [Shard(2)], [Replicate()], [Replicate()]
    assert compared(2, (2,), places, (8,), (2,), {"stride": 2}, transposed=False) == []

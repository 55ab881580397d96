"""The strides of a part are in the order of the whole's, so that kernels and views that look at them are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, sim


def line(size):
    return init_device_mesh("cpu", (size,))


@pytest.mark.parametrize("size", [2, 4])
def test_attention_after_a_move_that_leaves_one_element_a_rank(size) -> None:
    q = torch.randn(4, 8, 6, 4)

    def body():
        k = distribute_tensor(q, line(size), [Shard(3)]).redistribute(placements=[Shard(0)])
        return F.scaled_dot_product_attention(distribute_tensor(q, line(size), [Shard(0)]), k, k).full_tensor()

    for full in sim.run(body, size):
        torch.testing.assert_close(full, F.scaled_dot_product_attention(q, q, q))


def test_views_of_what_was_transposed_and_moved() -> None:
    z, w = torch.randn(2, 6, 4, 8), torch.randn(5, 8)

    def body():
        moved = distribute_tensor(z, line(4), [Shard(2)]).transpose(1, 2).redistribute(placements=[Replicate()])
        back = moved.transpose(1, 2)
        return back.reshape(2, 6, 32).full_tensor(), F.linear(back, distribute_tensor(w, line(4))).full_tensor()

    for flat, projected in sim.run(body, 4):
        torch.testing.assert_close(flat, z.reshape(2, 6, 32))
        torch.testing.assert_close(projected, F.linear(z, w))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_parts_follow_the_order_of_the_whole(placement) -> None:
    def body():
        x = distribute_tensor(torch.randn(4, 8, 6), line(2), [placement]).permute(2, 0, 1)
        made = [x.exp(), x + x.transpose(1, 2).transpose(1, 2), x.redistribute(placements=[Shard(2)]), x.contiguous()]
        return [(each.stride(), each.to_local().stride(), each.to_local().shape) for each in made]

    for whole, part, shape in sim.run(body, 2)[0]:
        wide = [dim for dim, size in enumerate(shape) if size > 1]
        assert sorted(wide, key=lambda dim: whole[dim]) == sorted(wide, key=lambda dim: part[dim])

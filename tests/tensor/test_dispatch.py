"""One operator call on distributed tensors: plans, in-place and mixed calls, lists."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import (
    DTensor,
    InplaceError,
    MixedTensorError,
    Partial,
    PlacementError,
    RedistributeError,
    Replicate,
    RuleError,
    Shard,
    ViewError,
    WorldError,
    current_world,
    distribute_tensor,
    explicit,
    implicit_replication,
    init_device_mesh,
    register_rule,
    replicate_unknown,
    sim,
    unregister_rule,
)
from shardwise.comm import wire


def line(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("x",))


def counted(function):
    """What ``function`` returns, and the collectives that it needed."""
    sent = []
    with wire.observing(lambda transmission: sent.append(transmission.op)):
        result = function()
    return result, sent


def test_operators_that_lie_right_need_no_communication() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Replicate()])
        up = distribute_tensor(torch.randn(6, 8), mesh, [Replicate(), Shard(1)])
        down = distribute_tensor(torch.randn(8, 6), mesh, [Replicate(), Shard(0)])
        out, sent = counted(lambda: F.gelu(x @ up) @ down + x)
        return sent, out.placements

    assert sim.run(body, 4) == [([], (Shard(0), Partial()))] * 4


def test_a_nonlinear_function_reduces_first() -> None:
    parts = torch.randn(3, 4)

    def body():
        mesh = line(3)
        pending = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [Partial()])
        result, sent = counted(lambda: pending.exp())
        return result.full_tensor(), sent

    for full, sent in sim.run(body, 3):
        torch.testing.assert_close(full, parts.sum(0).exp())
        assert len(sent) == 1


def test_a_number_is_added_once_to_a_pending_sum() -> None:
    def body():
        pending = distribute_tensor(torch.arange(4.0), line(), [Shard(0)]).sum()
        return (pending + 1).item(), (pending * 2).item(), (pending * 2).placements, (1 - pending).item()

    assert sim.run(body, 2) == [(7.0, 12.0, (Partial(),), -5.0)] * 2


def test_equal_keys_of_different_types_have_plans_of_their_own() -> None:
    """1, 1.0 and True are equal; adding them to integers gives integers, floats and integers."""

    def body():
        x = distribute_tensor(torch.arange(4), line(), [Shard(0)])
        for number in (1, 1.0, True, 1, 1.0):
            dense = torch.arange(4) + number
            result = x + number
            assert result.dtype == dense.dtype
            torch.testing.assert_close(result.full_tensor(), dense)

    sim.run(body, 2)


def test_other_arguments_have_plans_of_their_own() -> None:
    dense = torch.randn(4, 4)

    def body():
        x = distribute_tensor(dense, line(), [Shard(0)])
        for _ in range(2):
            for dim, keepdim in ((0, False), (0, True), (1, False), (1, True)):
                torch.testing.assert_close(x.sum(dim, keepdim).full_tensor(), dense.sum(dim, keepdim))
            for alpha in (1, 2.5):
                torch.testing.assert_close(torch.add(x, x, alpha=alpha).full_tensor(), dense + alpha * dense)

    sim.run(body, 2)


def test_plans_are_remembered_for_a_rank_and_bounded() -> None:
    def body():
        x = distribute_tensor(torch.ones(4), line(), [Shard(0)])
        x + x
        plans = current_world().memory["plans"]
        before = len(plans)
        x + x
        return len(plans) - before

    assert sim.run(body, 2) == [0, 0]


def test_another_default_dtype_is_another_plan() -> None:
    def body():
        x = distribute_tensor(torch.arange(1, 7), line(), [Shard(0)])
        programs = [lambda x: x / 2, lambda x: x * 1.5, torch.sqrt, lambda x: x.sum() / 4]
        before = [program(x) for program in programs]
        torch.set_default_dtype(torch.float64)
        try:
            after = [program(x) for program in programs]
        finally:
            torch.set_default_dtype(torch.float32)
        return [[(y.dtype, y.to_local().dtype) for y in found] for found in (before, after)]

    for found in sim.run(body, 2):
        for dtypes, dtype in zip(found, (torch.float32, torch.float64), strict=True):
            assert dtypes == [(dtype, dtype)] * 4


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_pending_factor_of_a_list_is_reduced_for_the_entries_that_need_it(order) -> None:
    """A whole entry may be multiplied by what is pending; a pending one may not."""

    def body():
        mesh = line()
        part = torch.full((2,), 1.0 + mesh.get_local_rank())
        factor, pending = (DTensor.from_local(x, mesh, [Partial()]) for x in (part[0], part))
        whole, cut = (distribute_tensor(torch.ones(2), mesh, [how]) for how in (Replicate(), Shard(0)))
        entries = [(pending, whole, cut)[place] for place in order]
        products = torch._foreach_mul(entries, factor)
        torch.ops.aten._foreach_add_.Tensor(written := [x.clone() for x in entries], factor)
        return [x.full_tensor()[0].item() for x in (*products, *written)]

    for found in sim.run(body, 2):
        assert found == [(9, 3, 3)[place] for place in order] + [(6, 4, 4)[place] for place in order]


def test_a_list_is_not_half_written_where_an_entry_may_not_communicate() -> None:
    def body():
        mesh = line()
        factor, pending = (DTensor.from_local(x, mesh, [Partial()]) for x in (torch.ones(()), torch.ones(2)))
        whole = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        with explicit(), pytest.raises(RedistributeError, match="_foreach_add_"):
            torch.ops.aten._foreach_add_.Tensor([pending, whole], factor)
        return pending.full_tensor().tolist(), whole.full_tensor().tolist()

    assert sim.run(body, 2) == [([2, 2], [1, 1])] * 2


def test_numbers_that_change_at_each_step_need_no_plans_of_their_own() -> None:
    """Only the sign of a number, and whether it is 0 or not finite, can say how a pending reduction passes."""

    def body():
        made = distribute_tensor(torch.arange(1.0, 5.0), line(), [Shard(0)])
        pending, sizes = DTensor.from_local(torch.ones(4), line(), [Partial("max")]), []
        for number in (1.5, -2.5, 0.0, 2.5, math.inf, -1.5):
            dense = torch.arange(1.0, 5.0)
            for x, whole in ((made.clone(), dense.clone()), (pending, torch.ones(4))):
                torch.testing.assert_close((x * number).full_tensor(), whole * number)
                torch.testing.assert_close((x + number).full_tensor(), whole + number)
                torch.testing.assert_close(torch.sub(x, x, alpha=number).full_tensor(), whole - number * whole)
            for place in range(2):
                torch._foreach_div_([x := made.clone(), made.clone()], [number, number + place])
                torch.testing.assert_close(x.full_tensor(), dense / number)
            sizes.append(len(current_world().memory["plans"]))
        return sizes

    for sizes in sim.run(body, 2):
        assert sizes[3] == sizes[2], "a second positive number"
        assert sizes[5] == sizes[4], "a second negative number"


def test_a_new_rule_voids_what_was_planned() -> None:
    def body():
        x = distribute_tensor(torch.arange(4.0), line(1), [Shard(0)])
        assert torch.erfinv(x).placements == (Shard(0),)
        register_rule("erfinv", "f([n]) -> [n]")
        after = torch.erfinv(x).placements
        unregister_rule("erfinv")
        return after

    assert sim.run(body, 1) == [(Replicate(),)]


def test_in_place_operators_write_to_the_same_tensor() -> None:
    dense = torch.randn(5, 2)

    def body():
        x = distribute_tensor(dense, line(), [Shard(0)])
        same = x.mul_(2).add_(distribute_tensor(dense, line(), [Replicate()]), alpha=3)
        assert same is x
        return x.full_tensor(), x.placements

    for full, placements in sim.run(body, 2):
        torch.testing.assert_close(full, 5 * dense)
        assert placements == (Shard(0),)


def test_writing_over_a_pending_tensor_reduces_it_and_leaves_it_pending() -> None:
    def body():
        pending = distribute_tensor(torch.arange(4.0), line(), [Shard(0)]).sum()
        same = pending.exp_()
        return same is pending, pending.placements, pending.item()

    for kept, placements, total in sim.run(body, 2):
        assert (kept, placements) == (True, (Partial(),))
        assert total == pytest.approx(math.exp(6))


@torch.library.custom_op("shardwise_tests::reverse_rows", mutates_args=("x",))
def reverse_rows(x: torch.Tensor) -> None:
    x.copy_(x.flip(0))


def test_an_in_place_operator_that_would_move_its_target_is_refused_unchanged() -> None:
    def body():
        x = distribute_tensor(torch.arange(4.0), line(), [Shard(0)])
        before = x.to_local().clone()
        with replicate_unknown(), pytest.raises(InplaceError, match=r"reverse_rows.*\n.*asked .*f32\[4@x\]"):
            reverse_rows(x)
        assert torch.equal(x.to_local(), before)

    sim.run(body, 2)


def test_out_operators_fill_the_given_tensor() -> None:
    dense = torch.randn(4, 3)

    def body():
        x = distribute_tensor(dense, line(), [Shard(0)])
        out = distribute_tensor(torch.zeros(4, 3), line(), [Shard(0)])
        assert torch.exp(x, out=out) is out
        return out.full_tensor()

    for full in sim.run(body, 2):
        torch.testing.assert_close(full, dense.exp())


def test_views_share_storage_and_never_communicate() -> None:
    def body():
        x = distribute_tensor(torch.zeros(4, 6), line(), [Shard(0)])
        (_, sent) = counted(lambda: x.view(4, 2, 3).transpose(0, 1).add_(1))
        assert sent == []
        with pytest.raises(ViewError, match="never communicates"):
            x.view(3, 8)
        return x.full_tensor()

    for full in sim.run(body, 2):
        torch.testing.assert_close(full, torch.ones(4, 6))


def test_plain_tensors_beside_distributed_ones() -> None:
    def body():
        x = distribute_tensor(torch.ones(4), line(), [Shard(0)])
        assert (x + torch.tensor(2.0)).full_tensor().tolist() == [3.0] * 4
        with pytest.raises(MixedTensorError, match=r"mixed torch\.Tensor and DTensor"):
            x + torch.ones(4)
        with implicit_replication(), implicit_replication():
            pass
        with implicit_replication():
            assert (x + torch.arange(4)).full_tensor().tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(MixedTensorError):
            x + torch.arange(4)

    sim.run(body, 2)


def test_tensors_of_two_meshes_are_refused() -> None:
    def body():
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Shard(0)])
        y = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2, 2)), [Shard(0), Replicate()])
        with pytest.raises(PlacementError, match="different meshes"):
            x + y

    sim.run(body, 4)


def test_an_operator_without_a_rule_names_itself_and_the_remedy() -> None:
    def body():
        x = distribute_tensor(torch.rand(4, 4), line(), [Shard(0)])
        with pytest.raises(RuleError, match=r"reversed_rows.*\n.*asked .*f32\[4@x, 4\](.*\n)*.*register_rule"):
            reversed_rows(x)

    sim.run(body, 2)


@torch.library.custom_op("shardwise_tests::reversed_rows", mutates_args=())
def reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def test_unknown_operators_run_on_whole_tensors_where_that_is_allowed() -> None:
    def body():
        x = distribute_tensor(torch.arange(5.0), line(), [Shard(0)])
        with replicate_unknown(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            y, sent = counted(lambda: reversed_rows(x))
            reversed_rows(x)
        with pytest.raises(RuleError):
            reversed_rows(x)
        return y.full_tensor().tolist(), y.placements, sent, len(warned)

    assert sim.run(body, 2)[0] == ([4.0, 3.0, 2.0, 1.0, 0.0], (Replicate(),), ["all_to_all"], 1)


def test_what_is_known_only_afterwards_is_measured() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.tensor([3, 0, 3, 1, 0]), mesh, [Shard(0), Replicate()])
        found = x.nonzero(), *x.unique(return_counts=True), x.masked_select(x > 0)
        return [part.full_tensor().tolist() for part in found], found[0].placements

    expected = [[[0], [2], [3]], [0, 1, 3], [2, 1, 2], [3, 3, 1]]
    assert sim.run(body, 4) == [(expected, (Replicate(), Replicate()))] * 4


def test_torchs_own_decompositions_stand_in_for_rules() -> None:
    x = torch.randn(5, 4, 3)

    def body():
        given = distribute_tensor(x, line(), [Shard(1)])
        return torch.renorm(given, 2, 0, 0.5).full_tensor(), torch.dist(given, given * 2, 3).full_tensor()

    renormed, distance = sim.run(body, 2)[0]
    torch.testing.assert_close(renormed, torch.renorm(x, 2, 0, 0.5))
    torch.testing.assert_close(distance, torch.dist(x, x * 2, 3))


def test_shapes_change_in_place_without_communication() -> None:
    def body():
        x = distribute_tensor(torch.arange(6.0).view(1, 3, 2), line(), [Shard(1)])
        local = x.to_local()
        _, sent = counted(lambda: x.squeeze_(0).t_())
        return sent, tuple(x.shape), x.placements, x.full_tensor().tolist(), tuple(local.shape)

    shape, placements, whole = (2, 3), (Shard(1),), [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert sim.run(body, 2) == [([], shape, placements, whole, (1, size, 2)) for size in (2, 1)]


def test_a_pending_sum_is_shifted_and_filled_once() -> None:
    def body():
        mesh = init_device_mesh("cpu", (3,))
        pending = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        _, sent = counted(lambda: pending.add_(0.5).mul_(2))
        shifted = pending.full_tensor().tolist()
        return sent, shifted, pending.fill_(7).full_tensor().tolist(), pending.placements

    assert sim.run(body, 3) == [([], [7.0] * 4, [7.0] * 4, (Partial(),))] * 3


def test_plain_tensors_of_torchs_own_gradients_are_the_same_on_every_rank() -> None:
    x = torch.rand(5, 3) + 0.5

    def body():
        given = distribute_tensor(x, line(), [Shard(1)]).requires_grad_()
        given.cumprod(0).sum().backward()
        return given.grad.full_tensor()

    whole = x.clone().requires_grad_()
    whole.cumprod(0).sum().backward()
    torch.testing.assert_close(sim.run(body, 2)[0], whole.grad)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_over_mixed_parameters(optimizer, foreach) -> None:
    dense = [torch.randn(4, 3), torch.randn(5), torch.randn(3), torch.randn(2, 2)]
    options = {"lr": 0.1, "foreach": foreach} | ({"momentum": 0.9} if optimizer is torch.optim.SGD else {})

    def steps(parameters):
        made = optimizer(parameters, **options)
        for _ in range(3):
            made.zero_grad()
            sum((parameter**2).sum() for parameter in parameters).backward()
            made.step()
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]

    def body():
        placed = zip(dense, [Shard(0), Shard(0), Replicate()], strict=False)
        mine = [nn.Parameter(distribute_tensor(t.clone(), line(), [p])) for t, p in placed]
        return steps([*mine, nn.Parameter(dense[3].clone())])

    def only_distributed():
        mine = [nn.Parameter(distribute_tensor(t.clone(), line(), [Shard(0)])) for t in dense]
        return steps(mine)

    expected = steps([nn.Parameter(t.clone()) for t in dense])
    run = only_distributed
    for got in sim.run(run, 2):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other.detach())


def test_linear_on_batch_and_sequence_shards() -> None:
    """[batch@dp, seq@tp, hidden] through nn.Linear, forward and backward, without communication but for the weight."""
    x, layer = torch.randn(4, 6, 8), nn.Linear(8, 5)

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh))
        bias = nn.Parameter(distribute_tensor(layer.bias.data, mesh))
        out, sent = counted(lambda: F.linear(mine, weight, bias))
        _, sent_back = counted(lambda: out.sum().backward())
        return out.full_tensor(), sent + sent_back, mine.grad.full_tensor(), weight.grad.full_tensor()

    dense = x.clone().requires_grad_()
    layer(dense).sum().backward()
    for out, sent, gradient, of_weight in sim.run(body, 4):
        torch.testing.assert_close(out, layer(x))
        assert sent == []
        torch.testing.assert_close(gradient, dense.grad)
        torch.testing.assert_close(of_weight, layer.weight.grad)


def test_inference_mode_takes_composite_operators_apart() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)

    def body():
        with torch.inference_mode():
            mine = distribute_tensor(x, line(), [Shard(0)])
            return F.linear(mine, distribute_tensor(w, line())).full_tensor()

    for full in sim.run(body, 2):
        torch.testing.assert_close(full, F.linear(x, w))


def test_a_tensor_of_a_run_that_has_ended_is_refused() -> None:
    x = sim.run(lambda: distribute_tensor(torch.ones(4), line(), [Shard(0)]), 2)[0]
    with pytest.raises(WorldError, match="larger than the world"):
        x.sum()
    with pytest.raises(WorldError, match=r"no ranks \[1\] here"):
        x.full_tensor()

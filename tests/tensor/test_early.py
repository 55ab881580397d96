"""Operators that are met before torch's own code: on distributed tensors they say what they say on plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise import (
    DTensor,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    explicit,
    init_device_mesh,
    sim,
)
from shardwise.errors import ShardwiseError

S0, R = Shard(0), Replicate()


@pytest.mark.parametrize("indices", [[2, 5], [4], 3])
def test_a_tensor_splits_at_the_entries_of_a_tensor(indices: int | list[int]) -> None:
    whole, places = torch.arange(10.0), torch.tensor(indices)
    want = torch.tensor_split(whole, places)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(whole, mesh, [S0]).requires_grad_()
        for placement in [R, S0][: 1 + places.ndim]:
            found = x.tensor_split(distribute_tensor(places, mesh, [placement]))
            assert [part.full_tensor().tolist() for part in found] == [part.tolist() for part in want]
            plain = torch.tensor_split(whole, distribute_tensor(places, mesh, [placement]))
            assert [part.tolist() for part in plain] == [part.tolist() for part in want]
        found[-1].sum().backward()
        assert x.grad is not None
        assert x.grad.sum().item() == want[-1].numel()

    sim.run(body, 2)


def test_it_splits_under_inference_and_refuses_to_gather_where_that_is_forbidden() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, places = torch.arange(6.0), distribute_tensor(torch.tensor([1, 4]), mesh, [S0])
        with torch.inference_mode():
            found = torch.tensor_split(distribute_tensor(x, mesh, [R]), places)
            assert [part.full_tensor().tolist() for part in found] == [[0], [1, 2, 3], [4, 5]]
        with explicit(), pytest.raises(ShardwiseError, match="tensor_split"):
            torch.tensor_split(distribute_tensor(x, mesh, [R]), places)

    sim.run(body, 2)


@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8), (2, 3, 4, 6, 8)])
def test_causal_attention_without_a_kernel_of_its_own(shape: tuple[int, ...]) -> None:
    wholes = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]

    def attended(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        return [out, *torch.autograd.grad((out**2).sum(), tensors)]

    want = attended([whole.clone().requires_grad_() for whole in wholes])

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for places in ([S0] * 3, [Shard(len(shape) - 2)] * 3, [R, S0, Shard(len(shape) - 1)]):
            own = [
                distribute_tensor(x, mesh, [place]).requires_grad_() for x, place in zip(wholes, places, strict=True)
            ]
            for part, wanted in zip(attended(own), want, strict=True):
                torch.testing.assert_close(part.full_tensor(), wanted)

    sim.run(body, 2)


def test_a_mask_of_the_caller_is_not_taken_for_one_of_torchs_own() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(3, 4, 8), mesh, [S0])
        with pytest.raises(MixedTensorError):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4))

    sim.run(body, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_of_a_sign_lies_as_the_tensor_does(dtype: torch.dtype) -> None:
    whole = torch.randn(5, dtype=dtype)
    dense = whole.clone().requires_grad_()
    (torch.sgn(dense).abs() * dense.clone().sgn_().abs()).sum().backward()

    def body() -> None:
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [S0]).requires_grad_()
        (torch.sgn(x).abs() * x.clone().sgn_().abs()).sum().backward()
        assert x.grad.placements == (S0,)
        torch.testing.assert_close(x.grad.full_tensor(), dense.grad)

    sim.run(body, 2)


def test_a_gradient_that_torch_makes_plain_lies_as_the_tensor_does() -> None:
    whole = torch.randn(5)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = nn.Parameter(distribute_tensor(whole, mesh, [S0]))
        sign = nn.Parameter(distribute_tensor(whole, mesh, [S0]))
        for _ in range(2):  # copysign has zeros for the gradient of its second operand
            torch.copysign(x, sign).sum().backward()
            assert isinstance(sign.grad, DTensor)
            assert sign.grad is sign.grad
            assert sign.grad.placements == (S0,)
        torch.optim.AdamW([x, sign], weight_decay=0.0).step()
        torch.testing.assert_close(sign.full_tensor().detach(), whole)
        part = torch.ones(3 - mesh.get_local_rank()).requires_grad_()
        signs = DTensor.from_local(part, mesh, [S0], shape=(5,), stride=(1,))
        torch.copysign(x, signs).sum().backward()
        torch.copysign(x, signs.redistribute(placements=[R])).sum().backward()
        assert part.grad.tolist() == [0.0] * len(part)

    sim.run(body, 2)


VIEWING = {
    "trapezoid": lambda x: torch.trapezoid(x, dim=0),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dx=2.0, dim=0),
    "repeat_interleave": lambda x: x.repeat_interleave(3),
    "stft": lambda x: torch.stft(x[:, 0], 3, hop_length=2, return_complex=True),
    "hfft2": lambda x: torch.fft.hfft2(x),
    "instance_norm": lambda x: F.instance_norm(x[None]),
}


@pytest.mark.parametrize("name", VIEWING)
@pytest.mark.filterwarnings("ignore")
def test_what_a_composite_operator_views_on_its_way_may_move_first(name: str) -> None:
    whole = torch.randn(5, 6, dtype=torch.float64)
    dense = whole.clone().requires_grad_()
    want = VIEWING[name](dense)
    want.abs().sum().backward()

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for places in ([S0, S0], [Shard(1), S0], [S0, Shard(1)]):
            x = distribute_tensor(whole, mesh, places).requires_grad_()
            found = VIEWING[name](x)
            found.abs().sum().backward()
            torch.testing.assert_close(found.full_tensor(), want)
            torch.testing.assert_close(x.grad.full_tensor(), dense.grad)

    sim.run(body, 4)


def test_that_does_not_move_where_moves_are_forbidden() -> None:
    def body() -> None:
        x = distribute_tensor(torch.randn(5, 6), init_device_mesh("cpu", (2, 2)), [S0, S0])
        with explicit(), pytest.raises(ShardwiseError, match="would redistribute by itself"):
            torch.trapezoid(x, dim=0)

    sim.run(body, 4)


@pytest.mark.parametrize("share", [0.3, torch.tensor(0.3, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_quantiles_along_a_dim_mask_the_places_that_they_make(function, share: float | torch.Tensor) -> None:
    whole = torch.randn(4, 3, dtype=torch.float64)
    whole[1, 2] = torch.nan
    dense = whole.clone().requires_grad_()
    want = function(dense, share, 0, keepdim=True)
    want.nansum().backward()

    def body() -> None:
        for places in ([S0], [Shard(1)], [R]):
            x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), places).requires_grad_()
            found = function(x, share, 0, keepdim=True)
            found.nansum().backward()
            torch.testing.assert_close(found.full_tensor(), want, equal_nan=True)
            torch.testing.assert_close(x.grad.full_tensor(), dense.grad, equal_nan=True)

    sim.run(body, 2)


LYING = [[R, R], [S0, R], [Shard(1), S0], [R, Shard(2)], [S0, Shard(2)]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lying", LYING, ids=str)
def test_a_layer_is_one_operator_with_one_gradient(lying, bias) -> None:
    """And that gradient has one: values, gradients and second gradients are those of one rank, over uneven parts."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3, 6), (7, 6), (7,))[: 3 if bias else 2]
    plain = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def results(operands):
        y = F.linear(*operands)
        first = torch.autograd.grad(y.pow(3).sum(), operands, create_graph=True)
        return y, *first, *torch.autograd.grad(sum(one.pow(2).sum() for one in first), operands)

    want = results([one.clone().requires_grad_() for one in plain])

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for weight in ([R, R], [S0, R], [R, Shard(1)], [Shard(1), S0]):
            ways = (lying, weight, [R, R])
            own = [distribute_tensor(one, mesh, way).requires_grad_() for one, way in zip(plain, ways, strict=False)]
            for one, other in zip(results(own), want, strict=True):
                torch.testing.assert_close(one.full_tensor(), other)

    sim.run(body, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_layer_has_the_gradients_that_are_asked_for(dtype) -> None:
    x, weight = torch.randn(5, 6, dtype=dtype), torch.randn(7, 6, dtype=dtype)

    def gradient(x, weight, place):
        operand = (x, weight)[place].requires_grad_()
        (first,) = torch.autograd.grad(F.linear(x, weight).abs().pow(3).sum(), operand, create_graph=True)
        return torch.autograd.grad(first.abs().sum(), operand)[0]

    want = [gradient(x.clone(), weight.clone(), place) for place in range(2)]

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for place in range(2):
            own = [distribute_tensor(one.clone(), mesh, [S0]) for one in (x, weight)]
            torch.testing.assert_close(gradient(*own, place).full_tensor(), want[place])

    sim.run(body, 2)


def test_the_gradient_of_a_layer_lies_as_its_input_and_moves_nothing() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(4, 2, 6), mesh, [S0, R]).requires_grad_()
        weight = distribute_tensor(torch.ones(8, 6), mesh, [R, S0]).requires_grad_()
        with explicit():
            F.linear(x, weight).sum().backward()
        assert x.grad.placements == (S0, Partial())
        assert weight.grad.placements == (Partial(), S0)

    sim.run(body, 4)


@pytest.mark.parametrize("learned", [(True, False), (False, True), (False, False)])
def test_a_layer_keeps_no_more_than_its_gradients_need(learned) -> None:
    """So what is not kept may be written to before the backward pass."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, weight, bias = (distribute_tensor(torch.ones(shape), mesh, [R]) for shape in ((4, 6), (4, 6), (4,)))
        y = F.linear(x.requires_grad_(learned[0]), weight.requires_grad_(learned[1]), bias.requires_grad_())
        with torch.no_grad():
            for one, grows in ((x, learned[0]), (weight, learned[1])):
                if grows:
                    one.mul_(2)
        y.sum().backward()
        for one, grows in ((x, learned[0]), (weight, learned[1])):
            assert not grows or torch.equal(one.grad.full_tensor(), torch.full((4, 6), 4.0))

    sim.run(body, 2)


def test_who_counts_products_sees_those_of_a_layer_and_of_its_gradients() -> None:
    def counted(x, weight) -> int:
        with FlopCounterMode(display=False) as counter:
            F.linear(x.requires_grad_(), weight.requires_grad_()).sum().backward()
        return counter.get_total_flops()

    def body() -> None:
        mesh, plain = init_device_mesh("cpu", (2,)), (torch.ones(5, 6), torch.ones(8, 6))
        assert counted(*(distribute_tensor(one, mesh, [R]) for one in plain)) == counted(*plain)

    sim.run(body, 2)


@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (5,), (1,), ()])
def test_the_bias_of_a_layer_may_have_any_shape_that_broadcasts(shape) -> None:
    plain = torch.randn(4, 6), torch.randn(5, 6), torch.randn(shape)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for way in (S0, R):
            found = F.linear(*(distribute_tensor(one, mesh, [way if one is plain[0] else R]) for one in plain))
            torch.testing.assert_close(found.full_tensor(), F.linear(*plain))

    sim.run(body, 2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_anomalies_of_gradients_are_found() -> None:
    def body() -> None:
        x = distribute_tensor(torch.tensor([1.0, 0.0, 2.0, 3.0]), init_device_mesh("cpu", (2,)), [S0]).requires_grad_()
        with torch.autograd.set_detect_anomaly(True):
            (x * 2).sum().backward()
            with pytest.raises(RuntimeError, match="returned nan"):
                (x.sqrt() * 0).sum().backward()

    sim.run(body, 2)

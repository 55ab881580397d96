"""Tensors whose parts follow no rule: written through views, computed with, moved, and made from local parts."""

from __future__ import annotations

import pytest
import torch

from shardwise import (
    DTensor,
    Partial,
    PlacementError,
    RaggedShard,
    RedistributeError,
    Replicate,
    Shard,
    ViewError,
    distribute_tensor,
    explicit,
    init_device_mesh,
    sim,
)
from shardwise.comm import wire

DENSE = torch.arange(20.0).view(5, 4)


def line(ranks: int = 4):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))


def ragged(mesh=None):
    return distribute_tensor(DENSE, mesh or line(), [RaggedShard(0, (1, 0, 3, 1))])


WRITES = {
    "slice": lambda x: x[:2].zero_(),
    "entry": lambda x: x[1].fill_(5),
    "item": lambda x: x.__setitem__(3, 7.0),
    "copy": lambda x: x[:2].copy_(x[3:]),
    "element": lambda x: x[4][1].mul_(3),
    "steps": lambda x: x[::2].add_(1),
    "pieces": lambda x: [piece.mul_(factor) for factor, piece in enumerate(x.split(2))],
    "rows": lambda x: [row.add_(at) for at, row in enumerate(x.unbind())],
    "chunk": lambda x: x.chunk(2)[1].neg_(),
    "diagonal": lambda x: x.diagonal(1).zero_(),
    "flat": lambda x: x.view(-1)[4:12].fill_(-1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard(0, (1, 0, 3, 1)), Replicate()], ids=str)
def test_what_is_written_to_a_view_is_written_to_the_tensor(name, placement) -> None:
    expected = DENSE.clone()
    WRITES[name](expected)

    def body():
        x = distribute_tensor(DENSE, line(), [placement])
        WRITES[name](x)
        return x.placements, x.to_local(), x._spec.take(expected, x.device_mesh.get_coordinate())

    for placements, local, wanted in sim.run(body, 4):
        assert placements == (placement,)
        torch.testing.assert_close(local, wanted)


FUNCTIONS = {
    "pointwise": lambda x, y: (x + 1) * x.sin(),
    "two": lambda x, y: x * y,
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean(0),
    "max": lambda x, y: x.max(),
    "var": lambda x, y: x.var(),
    "norm": lambda x, y: x.norm(),
    "matmul beside": lambda x, y: x @ torch.ones_like(y).t(),
    "matmul along": lambda x, y: x.t() @ y,
    "softmax": lambda x, y: x.softmax(0),
    "cumsum": lambda x, y: x.cumsum(0),
    "sort": lambda x, y: x.sort(0, descending=True)[0],
    "cat": lambda x, y: torch.cat([x, y]),
    "transposed": lambda x, y: x.t().contiguous(),
    "tril": lambda x, y: x.tril(),
    "argmax": lambda x, y: x.argmax(0),
    "entry": lambda x, y: x[2] + y[0],
    "element": lambda x, y: x[3][1] * y,
    "mask": lambda x, y: torch.where(x > 7, x, y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("other", [Replicate(), Shard(0), Shard(1), RaggedShard(0, (1, 0, 3, 1))], ids=str)
def test_functions_of_ragged_shards_are_those_of_the_whole(name, other) -> None:
    weight = torch.linspace(-1, 1, 20).view(5, 4)
    expected = FUNCTIONS[name](DENSE, weight)
    for found in sim.run(
        lambda: FUNCTIONS[name](ragged(), distribute_tensor(weight, line(), [other])).full_tensor(), 4
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1), RaggedShard(0, (0, 5, 0, 0))], ids=str)
def test_ragged_shards_move_to_any_other_and_back(target) -> None:
    def body():
        x = ragged().requires_grad_()
        there = x.redistribute(placements=[target])
        back = there.redistribute(placements=x.placements)
        (back * back).sum().backward()
        return there.full_tensor().detach(), back.to_local().detach(), x.to_local().detach(), x.grad.full_tensor()

    for full, back, own, gradient in sim.run(body, 4):
        assert torch.equal(full, DENSE)
        assert torch.equal(back, own)
        assert torch.equal(gradient, 2 * DENSE)


def test_sizes_that_do_not_fit_are_refused() -> None:
    def body():
        with pytest.raises(PlacementError, match="add up to 4, and there are 5"):
            distribute_tensor(DENSE, line(), [RaggedShard(0, (1, 1, 1, 1))])
        with pytest.raises(PlacementError, match="4 sizes are needed"):
            distribute_tensor(DENSE, line(), [RaggedShard(0, (4, 1))])

    sim.run(body, 4)


def test_parts_of_any_sizes_are_found_by_asking_all_ranks() -> None:
    sizes = (2, 0, 2, 1)

    def body():
        mesh = line()
        local = DENSE.split(sizes)[mesh.get_local_rank()]
        for given in ({}, {"shape": (5, 4)}, {"shape": (5, 4), "stride": (4, 1)}):
            x = DTensor.from_local(local, mesh, [Shard(0)], run_check=True, **given)
            assert x.placements == (RaggedShard(0, sizes),)
            assert torch.equal(x.full_tensor(), DENSE)
        if mesh.get_local_rank() == 1:
            with pytest.raises(PlacementError, match="run_check=True"):
                DTensor.from_local(local, mesh, [RaggedShard(0, (2, 1, 1, 1))])
        return DTensor.from_local(local, mesh, [RaggedShard(0, sizes)]).sum().item()

    assert sim.run(body, 4) == [DENSE.sum().item()] * 4


def test_parts_that_follow_the_rule_stay_plain_shards() -> None:
    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        local = DENSE.chunk(2)[mesh.get_local_rank(0)].t().contiguous().t()
        x = DTensor.from_local(local, mesh, [Shard(0), Partial()], run_check=True)
        return x.placements, tuple(x.shape), x.stride()

    assert sim.run(body, 4) == [((Shard(0), Partial()), (5, 4), (1, 5))] * 4


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (torch.ones(2, 3), "dim 1 has the size 3 on rank 2, and 4 on rank 0"),
        (torch.ones(2, 4, dtype=torch.float64), "rank 2 has torch.float64, and rank 0 has torch.float32"),
        (torch.ones(2), r"rank 2 has \[2\], and rank 0 has \[2, 4\]"),
        (torch.ones(2, 4, device="meta"), "rank 2 has meta, and rank 0 has cpu"),
        (torch.ones(2, 4).to_sparse(), "rank 2 has a tensor of torch.sparse_coo, and rank 0 has a plain tensor"),
        (torch.ones(2, 4, requires_grad=True), "requires a gradient(.|\n)*rank 2 has True, and rank 0 has False"),
        ([1.0], "rank 2 has a list, and rank 0 has a plain tensor"),
        (torch.tensor(1.0), r"rank 2 has \[\], and rank 0 has \[2, 4\]"),
    ],
)
def test_the_rank_that_differs_is_named(odd, what) -> None:
    def body():
        mesh = line()
        local = odd if mesh.get_local_rank() == 2 else torch.ones(2, 4)
        with pytest.raises(PlacementError, match=f"{what}(.|\n)*do "):
            DTensor.from_local(local, mesh, [Shard(0)], run_check=True)

    sim.run(body, 4)


ARGUMENTS = {
    "placements": [[Shard(0)], [Shard(1)]],
    "shape": [(8, 4), None],
    "stride": [(4, 1), (1, 8)],
    "grad_placements": [None, [Replicate()]],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_differ_from_rank_to_rank_are_refused_on_every_rank(name) -> None:
    def body():
        mesh = line()
        given = {"placements": [Shard(0)], name: ARGUMENTS[name][mesh.get_local_rank() == 3]}
        with pytest.raises(PlacementError, match=f"do not agree on .*{name}(.|\n)*rank 3 has"):
            DTensor.from_local(torch.ones(2, 4), mesh, run_check=True, **given)

    sim.run(body, 4)


def test_reshape_moves_where_view_refuses_and_explicit_forbids_it() -> None:
    def body():
        x = distribute_tensor(DENSE, line(), [Shard(1)])
        with pytest.raises(ViewError, match=r"axis x cuts dim 1 into \(1, 1, 1, 1\)") as refused:
            x.view(4, 5)
        assert refused.value.placements == (Replicate(),)
        with explicit(), pytest.raises(RedistributeError, match=r"aten\.reshape.* would redistribute by itself"):
            x.reshape(4, 5)
        with explicit():
            flat = x.flatten()
            with explicit(False):
                assert torch.equal(x.reshape([4, -1]).full_tensor(), DENSE.view(4, 5))
        return flat.unflatten(0, (5, 4)).placements

    assert sim.run(body, 4) == [(Shard(1),)] * 4


def test_explicit_allows_what_sends_nothing_unless_strict() -> None:
    def body():
        x, whole = (distribute_tensor(DENSE, line(), [placement]) for placement in (Shard(0), Replicate()))
        with explicit():
            x + whole
            with pytest.raises(RedistributeError, match=r"aten.softmax|aten._softmax.*sending \d+ bytes"):
                x.softmax(0)
        with explicit(strict=True), pytest.raises(RedistributeError, match="sending 0 bytes"):
            x + whole
        return x.softmax(0).full_tensor()

    torch.testing.assert_close(sim.run(body, 4), [DENSE.softmax(0)] * 4)


VIEWS = {
    "slice": lambda x: x[1:3],
    "entry": lambda x: x[3],
    "element": lambda x: x[3][1],
    "steps": lambda x: x[::2],
    "row": lambda x: x.unbind()[2],
    "piece": lambda x: x.split(2)[1],
    "flat": lambda x: x.view(-1),
    "diagonal": lambda x: x.diagonal(),
    "spread": lambda x: x[2:3].expand(3, 4),
    "reshape": lambda x: x.reshape(4, 5),
    "windows": lambda x: x.unfold(1, 1, 2),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard(0, (1, 0, 3, 1))], ids=str)
def test_gradients_of_views_are_those_of_the_whole(name, placement) -> None:
    dense = DENSE.clone().requires_grad_()
    VIEWS[name](dense).square().sum().backward()

    def body():
        x = distribute_tensor(DENSE, line(), [placement]).requires_grad_()
        VIEWS[name](x).square().sum().backward()
        return x.grad.full_tensor()

    torch.testing.assert_close(sim.run(body, 4), [dense.grad] * 4)


PARTS = {
    "slice": lambda x: x[1:6],
    "steps": lambda x: x[1::3],
    "block": lambda x: x[1:6, 2:5],
    "entry": lambda x: x[3],
    "column": lambda x: x[:, 3],
    "element": lambda x: x[3][5],
    "first piece": lambda x: x.split(3)[0],
    "middle piece": lambda x: x.split(3)[1],
    "last piece": lambda x: x.chunk(4, 1)[-1],
    "row": lambda x: x.unbind()[2],
    "diagonal": lambda x: x.diagonal(),
    "upper diagonal": lambda x: x.diagonal(2),
    "lower diagonal": lambda x: x.diagonal(-1, 1, 0),
    "windows": lambda x: x.unfold(0, 2, 2),
    "windows apart": lambda x: x.unfold(1, 2, 4),
    "slice of a slice": lambda x: x[1:7][2:4],
    "joined again": lambda x: torch.cat([x[:3], x[5:]]),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_gradients_of_parts_stay_where_the_parts_are(name, mesh_shape) -> None:
    dense = torch.arange(64.0).view(8, 8).requires_grad_()
    PARTS[name](dense).square().sum().backward()

    def body():
        mesh, sent, gradients = init_device_mesh("cpu", mesh_shape), [], []
        for dim in (0, 1):
            own = [Shard(dim), *[Replicate()] * (mesh.ndim - 1)]
            x = distribute_tensor(dense.detach(), mesh, own).requires_grad_()
            with wire.observing(sent.append):
                part = PARTS[name](x)
                part.backward(2 * part.detach())
            gradients.append(x.grad.full_tensor())
        return sent, gradients

    for sent, gradients in sim.run(body, 4 if len(mesh_shape) == 2 else mesh_shape[0]):
        assert sent == []
        torch.testing.assert_close(gradients, [dense.grad] * 2)


def test_a_written_slice_of_a_tensor_with_a_history_passes_the_gradient() -> None:
    dense = DENSE.clone().requires_grad_()

    def scaled(x):
        y = x * 2
        y[:2].mul_(3)
        y[3] = 0
        return y

    scaled(dense).square().sum().backward()

    def body():
        x = distribute_tensor(DENSE, line(), [Shard(0)]).requires_grad_()
        scaled(x).square().sum().backward()
        return x.grad.full_tensor()

    torch.testing.assert_close(sim.run(body, 4), [dense.grad] * 4)


def heads(x):
    batch, length, width = x.shape
    split = x.view(batch, length, 4, width // 4).transpose(1, 2)
    return (split * split).transpose(1, 2).reshape(batch, length, width)


def patches(x):
    batch, length, width = x.shape
    return x.view(batch, length // 2, 2, width // 2, 2).permute(0, 1, 3, 2, 4).reshape(batch, -1, 4) * 2


def experts(x):
    return x.flatten(0, 1).unflatten(0, (4, -1)).transpose(0, 1).transpose(0, 1).reshape(x.shape) * 2


def linear(x):
    weight = torch.ones(3, x.shape[-1])
    if isinstance(x, DTensor):
        weight = distribute_tensor(weight, x.device_mesh, [Replicate(), Replicate()], src_data_rank=None)
    return torch.nn.functional.linear(x, weight)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("model", "dim"), [(heads, 2), (heads, 1), (patches, 1), (experts, 1), (linear, 1)])
def test_models_reshape_without_communication(mode, model, dim) -> None:
    dense = torch.randn(4, 8, 8)
    expected = model(dense)

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(dense, mesh, [Shard(0), Shard(dim)]).requires_grad_()
        sent = []
        with mode(), wire.observing(lambda seen: sent.append(seen.op)):
            y = model(x)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
        return sent, y.detach().full_tensor()

    for sent, full in sim.run(body, 4):
        assert sent == []
        torch.testing.assert_close(full, expected)


def test_an_operator_that_must_move_cuts_no_other_dim_by_sizes_that_are_not_its_own() -> None:
    def body():
        x = distribute_tensor(torch.arange(30.0).view(5, 6), line(3), [Shard(1)])
        y = torch.fft.fft(x[:, :3], dim=1)  # the dim that it needs whole is cut into parts of 2, 1 and 0
        sizes = {cut.dim: sum(cut.sizes) for cut in y.placements if isinstance(cut, RaggedShard)}
        return all(size == y.shape[dim] for dim, size in sizes.items()), y.full_tensor()

    expected = torch.fft.fft(torch.arange(30.0).view(5, 6)[:, :3], dim=1)
    for fits, found in sim.run(body, 3):
        assert fits
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", range(4, 9))
def test_a_slice_cut_twice_is_right_and_so_is_its_gradient_or_it_is_refused(size: int) -> None:
    """No view lies so that nothing could be brought to lie like it."""
    spans = [(start, stop) for start in range(size) for stop in range(start, size + 1)]

    def body():
        mesh, right = init_device_mesh("cpu", (2, 2)), 0
        for start, stop in spans:
            x = distribute_tensor(torch.arange(float(size)), mesh, [Shard(0), Shard(0)]).requires_grad_()
            factors = distribute_tensor(torch.arange(float(stop - start)) + 1, mesh, [Replicate()] * 2)
            try:
                view = x[start:stop]
            except ViewError:
                continue
            (view * factors).sum().backward()
            assert torch.equal(view.full_tensor(), torch.arange(float(size))[start:stop])
            assert torch.equal(
                distribute_tensor(view.detach().full_tensor(), mesh, view.placements).to_local(), view.to_local()
            )
            expected = torch.zeros(size)
            expected[start:stop] = torch.arange(float(stop - start)) + 1
            assert torch.equal(x.grad.full_tensor(), expected)
            right += 1
        return right

    assert min(sim.run(body, 4)) > len(spans) // 2


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Shard(1)]], ids=str)
def test_a_diagonal_cut_twice_has_its_gradient(placements: list[Shard]) -> None:
    whole = torch.arange(12.0).view(3, 4)

    def body() -> None:
        mesh, factors = init_device_mesh("cpu", (2, 2)), torch.tensor([2.0, 3.0, 5.0])
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        found = x.diagonal(1)
        (found * distribute_tensor(factors, mesh, [Replicate()] * 2)).sum().backward()
        assert torch.equal(found.full_tensor(), whole.diagonal(1))
        assert torch.equal(distribute_tensor(whole.diagonal(1), mesh, found.placements).to_local(), found.to_local())
        assert torch.equal(x.grad.full_tensor(), factors.diag(1)[:3])

    sim.run(body, 4)


def test_sizes_that_add_up_nowhere_are_refused() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(PlacementError, match="add up to 5, and there are 3"):
            distribute_tensor(DENSE, mesh, [Shard(0), RaggedShard(0, (1, 4))])
        x = distribute_tensor(DENSE, mesh, [Shard(0), RaggedShard(0, (1, 2))])  # of 2 rows, in proportion
        rows = {(0, 0): [0], (0, 1): [1, 2], (1, 0): [], (1, 1): [3, 4]}
        assert torch.equal(x.to_local(), DENSE[rows[mesh.get_coordinate()]])
        assert torch.equal(x.full_tensor(), DENSE)

    sim.run(body, 4)


def test_a_view_of_nothing_lies_as_can_be_said() -> None:
    def body() -> None:
        x = distribute_tensor(torch.ones(3, 0, 4), init_device_mesh("cpu", (2, 2)), [Shard(2), RaggedShard(0, (1, 2))])
        try:
            y = x.select(2, 1)
        except ViewError:
            return
        distribute_tensor(torch.ones(3, 0), y.device_mesh, y.placements)

    sim.run(body, 4)

"""Distributing tensors and modules, factories, local_map, users' rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import (
    ArgumentError,
    DistributedTwiceError,
    DTensor,
    LeafError,
    Partial,
    PlacementError,
    RaggedShard,
    Replicate,
    Shard,
    current_world,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    init_device_mesh,
    local_map,
    ones,
    register_sharding,
    sim,
    zeros,
)


def line(size=2):
    return init_device_mesh("cpu", (size,))


ORDERS = {
    "columns": torch.arange(24.0).view(6, 4).t(),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.arange(48.0).view(2, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    "gaps": torch.arange(48.0).view(4, 12)[:, ::2],
    "expanded": torch.arange(4.0).view(4, 1).expand(4, 6),
}


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard(0, (1, 3)), Partial(), Replicate()], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_parts_lie_in_memory_in_the_order_of_the_whole(order, placement, source) -> None:
    whole = ORDERS[order]
    placement = RaggedShard(1, (1, 3)) if isinstance(placement, RaggedShard) and len(whole) != 4 else placement
    stride = whole.clone().stride()
    back = sorted(range(whole.ndim), key=lambda dim: -stride[dim])

    def body():
        d = distribute_tensor(whole, line(), [placement], src_data_rank=source)
        part = d.to_local()
        assert not torch._C._is_alias_of(part, whole)
        return d.stride(), part.permute(back).is_contiguous(), d.full_tensor()

    for found, ordered, full_tensor in sim.run(body, 2):
        assert found == stride
        assert ordered
        torch.testing.assert_close(full_tensor, whole)


def test_a_column_major_tensor_flattens_in_its_own_order() -> None:
    whole = torch.arange(8.0).view(4, 2).t()

    def body():
        d = distribute_tensor(whole, line(), [Shard(1)])
        return d.t().reshape(8).full_tensor(), d.t().view(8).full_tensor(), d.t().ravel().full_tensor()

    assert all(found.tolist() == list(range(8)) for rank in sim.run(body, 2) for found in rank)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_values_are_those_of_the_source_rank(placement) -> None:
    def body(source):
        mine = torch.full((5, 3), float(current_world().rank))
        return distribute_tensor(mine, line(3), [placement], src_data_rank=source).full_tensor()

    for result in sim.run(body, 3, 2):
        torch.testing.assert_close(result, torch.full((5, 3), 2.0))


def test_without_a_source_every_rank_cuts_its_own() -> None:
    def body():
        mine = torch.full((4,), float(current_world().rank))
        return distribute_tensor(mine, line(), [Shard(0)], src_data_rank=None).full_tensor().tolist()

    assert sim.run(body, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_the_result_shares_nothing_with_the_input() -> None:
    def body():
        dense = torch.zeros(4)
        for source in (0, None):
            for placement in (Replicate(), Shard(0)):
                distribute_tensor(dense, line(1), [placement], src_data_rank=source).add_(1)
        return dense.tolist()

    assert sim.run(body, 1) == [[0.0] * 4]


def test_tied_parameters_stay_tied() -> None:
    def partition(name, module, mesh):
        if name == "embed":
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)]))

    def body(function):
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
        model["head"].weight = model["embed"].weight
        distribute_module(model, line(), function)
        return model["head"].weight is model["embed"].weight, model["head"].weight.placements

    assert sim.run(body, 2, None) == [(True, (Replicate(),))] * 2
    assert sim.run(body, 2, partition) == [(True, (Shard(0),))] * 2


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    def body():
        with pytest.raises(ArgumentError, match="takes a tensor"):
            distribute_tensor([1, 2], line(), [Shard(0)])
        with pytest.raises(PlacementError, match="src_data_rank=9"):
            distribute_tensor(torch.ones(2), line(), [Shard(0)], src_data_rank=9)
        with pytest.raises(PlacementError, match="placements are a list"):
            distribute_tensor(torch.ones(2), line(), Shard(0))

    sim.run(body, 2)


def test_what_cannot_be_distributed_is_refused() -> None:
    def body():
        x = distribute_tensor(torch.ones(4), line(), [Shard(0)])
        assert distribute_tensor(x, line(), [Shard(0)]) is x
        with pytest.raises(PlacementError, match="distributed already"):
            distribute_tensor(x, line(), [Replicate()])
        with pytest.raises(LeafError, match="leaf"):
            distribute_tensor(torch.ones(4, requires_grad=True) * 2, line(), [Shard(0)])

    sim.run(body, 2)


def test_a_module_is_replicated_where_nobody_says_otherwise() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))

    def partition(name, module, mesh):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)]))

    def body():
        import copy

        mine = distribute_module(copy.deepcopy(model), line(), partition)
        assert mine[0].weight.placements == (Shard(0),)
        assert all(isinstance(item, DTensor) for item in [*mine.parameters(), *mine.buffers()])
        with pytest.raises(DistributedTwiceError):
            distribute_module(mine, line())
        return {name: item.full_tensor() for name, item in mine.state_dict().items()}

    for state in sim.run(body, 2):
        torch.testing.assert_close(state, dict(model.state_dict()))


def test_input_and_output_functions_run_around_forward() -> None:
    x, layer = torch.randn(4, 3), nn.Linear(3, 2)

    def body():
        import copy

        mine = distribute_module(
            copy.deepcopy(layer),
            line(),
            input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(0)]),
            output_fn=lambda module, output, mesh: output.full_tensor(),
        )
        return mine(x.chunk(2)[current_world().rank])

    for out in sim.run(body, 2):
        torch.testing.assert_close(out, layer(x))


def test_factories_give_global_shapes_and_values() -> None:
    def body():
        made = [
            zeros(5, 2, device_mesh=line(), placements=[Shard(0)]),
            ones((5, 2), device_mesh=line(), placements=[Partial()]),
            full((5, 2), 7, device_mesh=line(), placements=[Shard(-1)]),
            empty([5, 2], device_mesh=line(), dtype=torch.int32, requires_grad=False),
        ]
        return [each.full_tensor() for each in made]

    for zero, one, seven, unset in sim.run(body, 2):
        torch.testing.assert_close(zero, torch.zeros(5, 2))
        torch.testing.assert_close(one, torch.ones(5, 2))
        torch.testing.assert_close(seven, torch.full((5, 2), 7))
        assert unset.shape == (5, 2)
        assert unset.dtype == torch.int32


def test_local_map_over_even_and_uneven_shards() -> None:
    def body(size):
        mesh = line()
        x = distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)])
        double = local_map(lambda part: 2 * part, [Shard(0)], ([Shard(0)],), device_mesh=mesh)
        total = local_map(out_placements=[Partial()], in_placements=([Shard(0)],))(lambda part: part.sum())
        with pytest.raises(PlacementError, match="lies otherwise"):
            double(distribute_tensor(torch.ones(size), mesh, [Replicate()]))
        return double(x).full_tensor().tolist(), total(x).item()

    for size in (4, 5):
        assert sim.run(body, 2, size) == [([2.0 * n for n in range(size)], size * (size - 1) / 2)] * 2


def test_register_sharding_teaches_an_operator() -> None:
    library = torch.library.Library("shardwise_tests", "FRAGMENT")
    library.define("scaled(Tensor x, float k, *, Tensor y) -> Tensor")
    library.impl("scaled", lambda x, k, *, y: x * k + y, "CPU")
    library.impl("scaled", lambda x, k, *, y: torch.empty_like(x), "Meta")
    op = torch.ops.shardwise_tests.scaled.default

    @register_sharding(op)
    def rule(x, k, *, y):
        return [
            ([Replicate()], [Replicate(), None, Replicate()]),
            ([Shard(0)], [Shard(0), None, Shard(0)]),
        ]

    def body():
        x = distribute_tensor(torch.arange(4.0), line(), [Shard(0)])
        y = distribute_tensor(torch.ones(4), line(), [Replicate()])
        out = op(x, 3.0, y=y)
        return out.placements, out.full_tensor().tolist()

    assert sim.run(body, 2) == [((Shard(0),), [1.0, 4.0, 7.0, 10.0])] * 2

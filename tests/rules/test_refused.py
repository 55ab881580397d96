"""What means nothing on a distributed tensor is refused by its name; what writes to `out` fits it or is refused."""

from __future__ import annotations

import pytest
import torch

from shardwise import (
    InplaceError,
    MixedTensorError,
    RuleError,
    Shard,
    distribute_tensor,
    init_device_mesh,
    replicate_unknown,
    sim,
)

REFUSED = {
    "resize_": lambda x: x.clone().resize_(3),
    "resize_as_": lambda x: x.clone().resize_as_(x),
    "set_": lambda x: x.clone().set_(x),
    "_to_sparse": lambda x: x.to_sparse(),
    "_to_sparse_csr": lambda x: x.to_sparse_csr(),
    "_sparse_addmm": lambda x: torch.sparse.mm(x, x),
    "to_mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_speaks_of_memory_is_refused_by_name(name: str) -> None:
    def body() -> None:
        x = distribute_tensor(torch.arange(9.0).view(3, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        for around in (replicate_unknown, torch.no_grad):
            with around(), pytest.raises(RuleError, match=f"aten.{name}: "):
                REFUSED[name](x)
        assert x.full_tensor().tolist() == torch.arange(9.0).view(3, 3).tolist()

    sim.run(body, 2)


def test_a_refusal_names_the_function_that_made_the_plain_tensor() -> None:
    def body() -> None:
        x = distribute_tensor(torch.randn(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(MixedTensorError, match="within torch's svd_lowrank"):
            torch.svd_lowrank(x)

    sim.run(body, 2)


def test_what_is_measured_is_written_where_it_fits() -> None:
    whole = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0])

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(whole, mesh, [Shard(0)])
        out = distribute_tensor(torch.zeros(3, 1, dtype=torch.int64), mesh, [Shard(0)])
        assert torch.nonzero(x, out=out) is out
        assert out.placements == (Shard(0),)
        assert out.full_tensor().tolist() == whole.nonzero().tolist()
        short = distribute_tensor(torch.zeros(1), mesh, [Shard(0)])
        with pytest.raises(InplaceError, match=r"f32\[1\]"):
            torch.masked_select(x, x > 0, out=short)
        assert short.full_tensor().tolist() == [0.0]

    sim.run(body, 2)

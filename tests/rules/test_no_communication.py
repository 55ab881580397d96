"""Where the operands already lie right, nothing is sent: for the operators used most, the placements that pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh, sim
from shardwise.comm import wire

S0, S1, S2, S3, R, SUM = Shard(0), Shard(1), Shard(2), Shard(3), Replicate(), Partial()
X, Y, W, B = (5, 4, 6), (5, 4, 6), (8, 6), (8,)
EVEN = (6, 4, 6)
Q, KV, IMAGE, KERNEL = (5, 4, 6, 8), (5, 4, 7, 8), (5, 4, 6, 6), (8, 4, 3, 3)
ROWS, WORDS = torch.tensor([3, 0, 2, 2]), torch.tensor([[1, 3, 0], [2, 2, 1]])

# name: function, the shapes (or tensors) of its operands, and the placements that pass, each with the result's
TABLE = {
    "add": (torch.add, [X, Y], [((S0, S0), S0), ((S2, S2), S2), ((SUM, SUM), SUM)]),
    "sub": (torch.sub, [X, Y], [((S1, S1), S1), ((SUM, SUM), SUM)]),
    "mul": (torch.mul, [X, Y], [((S0, S0), S0), ((SUM, R), SUM), ((R, SUM), SUM)]),
    "div": (torch.div, [X, Y], [((S0, S0), S0), ((SUM, R), SUM)]),
    "add a row": (torch.add, [X, (6,)], [((S0, R), S0), ((S2, S0), S2)]),
    "scale": (lambda x: x * 0.5, [X], [((S0,), S0), ((SUM,), SUM)]),
    "shift": (lambda x: x + 1.0, [X], [((S0,), S0), ((SUM,), SUM)]),
    "neg": (torch.neg, [X], [((S0,), S0), ((SUM,), SUM)]),
    "exp": (torch.exp, [X], [((S0,), S0), ((S2,), S2)]),
    "sqrt": (torch.sqrt, [X], [((S1,), S1)]),
    "rsqrt": (torch.rsqrt, [X], [((S1,), S1)]),
    "pow": (lambda x: x**2, [X], [((S1,), S1)]),
    "relu": (torch.relu, [X], [((S0,), S0)]),
    "gelu": (F.gelu, [X], [((S2,), S2)]),
    "silu": (F.silu, [X], [((S2,), S2)]),
    "sigmoid": (torch.sigmoid, [X], [((S2,), S2)]),
    "tanh": (torch.tanh, [X], [((S2,), S2)]),
    "clamp": (lambda x: x.clamp(0.2, 0.8), [X], [((S2,), S2)]),
    "where": (lambda x, y: torch.where(x > y, x, y), [X, Y], [((S1, S1), S1)]),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0.5, 2.0), [X, Y], [((S1, S1), S1)]),
    "comparison": (torch.lt, [X, Y], [((S1, S1), S1)]),
    "cast": (lambda x: x.double(), [X], [((S1,), S1), ((SUM,), SUM)]),
    "clone": (torch.clone, [X], [((S1,), S1), ((SUM,), SUM)]),
    "mm": (torch.mm, [(5, 6), (6, 3)], [((S0, R), S0), ((R, S1), S1), ((S1, S0), SUM), ((SUM, R), SUM)]),
    "bmm": (torch.bmm, [(5, 4, 6), (5, 6, 3)], [((S0, S0), S0), ((S2, S1), SUM), ((S1, R), S1)]),
    "matmul": (torch.matmul, [EVEN, (6, 3)], [((S0, R), S0), ((R, S1), S2), ((S2, S0), SUM)]),
    "linear": (F.linear, [EVEN, W, B], [((S0, R, R), S0), ((R, S0, S0), S2), ((S1, R, R), S1)]),
    "linear without bias": (F.linear, [X, W], [((S2, S1), SUM), ((SUM, R), SUM)]),
    "addmm": (torch.addmm, [(3,), (5, 6), (6, 3)], [((R, S0, R), S0), ((S0, R, S1), S1), ((SUM, S1, S0), SUM)]),
    "einsum": (lambda x, w: torch.einsum("bld,nd->bln", x, w), [X, W], [((R, S0), S2)]),
    "sum": (lambda x: x.sum(2), [X], [((S0,), S0), ((S2,), SUM), ((SUM,), SUM)]),
    "mean": (lambda x: x.mean(2), [X], [((S0,), S0), ((S2,), SUM), ((SUM,), SUM)]),
    "amax": (lambda x: x.amax(2), [X], [((S0,), S0), ((S2,), Partial("max"))]),
    "argmax": (lambda x: x.argmax(2), [X], [((S0,), S0)]),
    "var": (lambda x: x.var(2), [X], [((S0,), S0)]),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 2, 2), [X], [((S0,), S0)]),
    "cumsum": (lambda x: x.cumsum(1), [X], [((S0,), S0), ((S2,), S2), ((SUM,), SUM)]),
    "topk": (lambda x: x.topk(2, 2)[0], [X], [((S0,), S0), ((S1,), S1)]),
    "sort": (lambda x: x.sort(2)[0], [X], [((S0,), S0)]),
    "softmax": (lambda x: x.softmax(2), [X], [((S0,), S0), ((S1,), S1)]),
    "log_softmax": (lambda x: x.log_softmax(2), [X], [((S0,), S0)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w, w), [X, (6,)], [((S0, R), S0), ((S1, R), S1)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [X, (6,)], [((S0, R), S0), ((S1, R), S1)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [IMAGE], [((S0,), S0), ((S1,), S1)]),
    "batch_norm given": (
        lambda x, m: F.batch_norm(x, m, m),
        [IMAGE, (4,)],
        [((S0, R), S0), ((S1, S0), S1), ((S3, R), S3)],
    ),
    "dropout of none": (lambda x: F.dropout(x, 0.3, training=False), [X], [((S0,), S0)]),
    "embedding": (lambda w: F.embedding(WORDS, w), [(4, 6)], [((S0,), SUM), ((S1,), S2)]),
    "index_select": (lambda x: x.index_select(1, ROWS), [X], [((S0,), S0), ((S1,), SUM), ((SUM,), SUM)]),
    "rows": (lambda x: x[ROWS], [X], [((S0,), SUM), ((S1,), S1)]),
    "gather": (
        lambda x, i: x.gather(0, i),
        [(5, 6), torch.tensor([[0, 4, 2, 3, 1, 1]] * 3)],
        [((S0, R), SUM), ((S1, S1), S1)],
    ),
    "scatter": (
        lambda x, i: x.scatter(0, i, 1.0),
        [(5, 6), torch.tensor([[0, 4, 2, 3, 1, 1]])],
        [((S0, R), S0), ((S1, S1), S1)],
    ),
    "cat": (lambda x, y: torch.cat([x, y], 1), [X, Y], [((S0, S0), S0), ((SUM, SUM), SUM)]),
    "cat of what is cut": (lambda x, y: torch.cat([x, y]), [X, Y], [((S0, S0), StridedShard(0, 2))]),
    "stack": (lambda x, y: torch.stack([x, y]), [X, Y], [((S0, S0), S1), ((SUM, SUM), SUM)]),
    "split": (lambda x: x.split(2, 1)[0], [X], [((S0,), S0), ((SUM,), SUM)]),
    "slice": (lambda x: x[:, 1:3], [X], [((S0,), S0), ((SUM,), SUM)]),
    "transpose": (lambda x: x.transpose(0, 1), [X], [((S0,), S1), ((SUM,), SUM)]),
    "permute": (lambda x: x.permute(2, 0, 1), [X], [((S2,), S0)]),
    "view": (lambda x: x.view(20, 6), [X], [((S2,), S1), ((SUM,), SUM)]),
    "heads": (lambda x: x.view(5, 4, 2, 3).transpose(1, 2), [X], [((S2,), S1), ((S0,), S0)]),
    "unsqueeze": (lambda x: x.unsqueeze(1), [X], [((S1,), S2)]),
    "expand": (lambda x: x.unsqueeze(0).expand(3, 5, 4, 6), [X], [((S1,), S2)]),
    "flip": (lambda x: x.flip(1), [X], [((S0,), S0), ((SUM,), SUM)]),
    "pad": (lambda x: F.pad(x, (1, 2)), [X], [((S0,), S0), ((SUM,), SUM)]),
    "tril": (torch.tril, [X], [((S0,), S0), ((S1,), S1), ((S2,), S2)]),
    "attention": (
        F.scaled_dot_product_attention,
        [Q, KV, KV],
        [((S0, S0, S0), S0), ((S1, S1, S1), S1), ((S2, R, R), S2)],
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [Q, Q, Q],
        [((S0, S0, S0), S0), ((S1, S1, S1), S1)],
    ),
    "convolution": (F.conv2d, [IMAGE, KERNEL], [((S0, R), S0), ((R, S0), S1), ((S1, S1), SUM)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [IMAGE], [((S0,), S0), ((S1,), S1)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [IMAGE], [((S0,), S0), ((S1,), S1), ((SUM,), SUM)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), [IMAGE], [((S0,), S0), ((S1,), S1)]),
    "mse_loss": (F.mse_loss, [X, Y], [((S0, S0), SUM), ((S2, S2), SUM)]),
    "cross_entropy of each": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        [(4, 6), ROWS],
        [((S0, S0), S0)],
    ),
    "one_hot": (lambda i: F.one_hot(i, 4), [ROWS], [((S0,), S0)]),
}


def made(item: object, generator: torch.Generator) -> torch.Tensor:
    return item if isinstance(item, torch.Tensor) else torch.rand(item, generator=generator) + 0.1


def laid(mesh, whole: torch.Tensor, placement) -> DTensor:
    if isinstance(placement, Partial):
        part = whole if mesh.get_local_rank() == 0 else torch.zeros_like(whole)
        return DTensor.from_local(part, mesh, [placement], run_check=False)
    return distribute_tensor(whole, mesh, [placement])


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_sent(name: str) -> None:
    run, operands, rows = TABLE[name]
    generator = torch.Generator().manual_seed(0)
    wholes = [made(item, generator) for item in operands]
    want = run(*wholes)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placements, result in rows:
            given = [laid(mesh, whole, place) for whole, place in zip(wholes, placements, strict=True)]
            sent: list[wire.Transmission] = []
            with wire.observing(sent.append):
                found = run(*given)
            assert sent == [], (placements, sent)
            assert found.placements == (result,), (placements, found.placements)
            torch.testing.assert_close(found.full_tensor(), want, rtol=1e-4, atol=1e-5)

    sim.run(body, 2)


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 60

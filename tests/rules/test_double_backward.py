"""Gradients of gradients: those of one rank, whatever the sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    sim,
)

S0, S1, S2, S3, R, P = Shard(0), Shard(1), Shard(2), Shard(3), Replicate(), Partial()
X, IMAGE, PICTURE, HEADS = (5, 4, 6), (3, 4, 5), (2, 4, 5, 6), (2, 4, 6, 8)

# name: function, shapes, and the placements to try
CASES = {
    "matmul": (torch.matmul, [(5, 6), (6, 4)], [(S0, R), (S1, S0), (R, S1), (S0, S1), (P, R), (P, S0)]),
    "bmm": (torch.bmm, [(4, 5, 6), (4, 6, 3)], [(S0, S0), (S2, S1), (S1, R), (R, P)]),
    "softmax": (lambda x: x.softmax(-1), [X], [(S0,), (S2,), (P,)]),
    "log_softmax": (lambda x: x.log_softmax(1), [X], [(S0,), (S1,), (P,)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w, w), [(6, 4, 6), (6,)], [(S0, R), (S2, S0), (P, P)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [X, (6,)], [(S0, R), (S2, S0), (P, R)]),
    "batch_norm": (
        lambda x, w: F.batch_norm(x, None, None, w, w, True),
        [IMAGE, (4,)],
        [(S0, R), (S1, S0), (S2, R), (P, S0)],
    ),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), [IMAGE, (4,)], [(S0, R), (S1, S0), (P, R)]),
    "instance_norm": (lambda x: F.instance_norm(x), [IMAGE], [(S0,), (S1,), (S2,)]),
    "convolution": (
        lambda x, w: F.conv1d(x, w, padding=1),
        [IMAGE, (6, 4, 3)],
        [(S0, R), (R, S0), (S1, S1), (S2, R), (P, R)],
    ),
    "convolution of pictures": (
        lambda x, w: F.conv2d(x, w, w.sum((1, 2, 3)), padding=1, stride=2),
        [PICTURE, (6, 4, 3, 3)],
        [(S0, R), (R, S0), (S1, S1), (S2, R), (S3, R), (R, P)],
    ),
    "grouped convolution": (
        lambda x, w: F.conv2d(x, w, groups=2),
        [PICTURE, (6, 2, 2, 2)],
        [(S0, R), (S1, S0), (S2, R)],
    ),
    "transposed convolution": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2),
        [IMAGE, (4, 6, 3)],
        [(S0, R), (R, S1), (S2, R), (P, R)],
    ),
    "transposed convolution of pictures": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        [PICTURE, (4, 3, 3, 3)],
        [(S0, R), (R, S1), (S3, R)],
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [HEADS] * 3,
        [(S0,) * 3, (S1,) * 3, (S2,) * 3, (S3,) * 3, (P, S0, S1)],
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [HEADS] * 3,
        [(S0,) * 3, (S1,) * 3, (S2,) * 3],
    ),
    "masked attention": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
        [*[HEADS] * 3, (6, 6)],
        [(S0, S0, S0, R), (S1, S1, S1, S0), (S2, S2, S2, S1)],
    ),
}


def second(run, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the squared gradients of a nonlinear function of the result."""
    out = run(*tensors)
    first = torch.autograd.grad((out**3).sum(), tensors, create_graph=True)
    return list(torch.autograd.grad(sum((item**2).sum() for item in first), tensors))


def lay(whole: torch.Tensor, mesh: DeviceMesh, place: Placement) -> DTensor:
    if not place.is_partial():
        return distribute_tensor(whole, mesh, [place])
    return DTensor.from_local(whole * (3 if mesh.get_local_rank() == 0 else -2), mesh, [place])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_second_gradients_are_those_of_one_rank(name: str) -> None:
    run, shapes, rows = CASES[name]
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = second(run, [whole.clone().requires_grad_() for whole in wholes])

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for places in rows:
            own = [lay(whole, mesh, place).requires_grad_() for whole, place in zip(wholes, places, strict=True)]
            found = second(run, own)
            for one, other in zip(found, want, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-6, atol=1e-6)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # a flag of the process, not of a rank
        sim.run(body, 2)


def test_where_one_rank_has_no_second_gradients_there_are_none() -> None:
    def body() -> None:
        x = distribute_tensor(torch.randn(HEADS), init_device_mesh("cpu", (2,)), [S0]).requires_grad_()
        with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward"):
            second(F.scaled_dot_product_attention, [x, x * 2, x * 3])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward"):
            second(F.scaled_dot_product_attention, [torch.randn(HEADS, requires_grad=True) for _ in range(3)])
        sim.run(body, 2)

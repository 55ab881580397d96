"""Plans without sizes: a call of a new shape gives what plain torch gives, whatever came before it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    ViewError,
    current_world,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    sim,
)
from shardwise.sharding.spec import Spec, TensorMeta
from shardwise.tensor import dispatch

Tensor = torch.Tensor

# Each takes x (a b) and y (a b); what depends on sizes in torch's own rules stands here on purpose.
PROGRAMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "relu": lambda x, y: torch.relu(x),
    "add": lambda x, y: x + y,
    "add a row": lambda x, y: x + y[:1],
    "mm": lambda x, y: x @ y.t(),
    "mean of all": lambda x, y: x.mean(),
    "mean of a dim": lambda x, y: x.mean(0),
    "sum, dims kept": lambda x, y: x.sum(1, keepdim=True),
    "softmax": lambda x, y: torch.softmax(x, 0),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[1:]),
    "cat of the rows": lambda x, y: torch.cat([x, y]),
    "cat of the columns": lambda x, y: torch.cat([x, y], 1),
    "a slice": lambda x, y: x[:, 1:4],
    "a slice of what is cut": lambda x, y: x[1:4],
    "a column": lambda x, y: x[:, -1],
    "flattened": lambda x, y: x.reshape(-1),
    "split": lambda x, y: x.reshape(x.shape[0], -1, 1).sum(1),
    "variance": lambda x, y: x.var(0, correction=0),
    "in place": lambda x, y: x.clone().mul_(y),
    "the largest": lambda x, y: x.amax(1),
    "cumulated": lambda x, y: x.cumsum(0),
    "padded": lambda x, y: F.pad(x, (1, 0)),
    "stacked": lambda x, y: torch.stack([x, y]),
    "chosen": lambda x, y: torch.where(x > 0, x, y),
    "mse": lambda x, y: F.mse_loss(x, y),
    "heads": lambda x, y: x.view(x.shape[0], x.shape[1], -1).transpose(1, 2),
    "heads merged": lambda x, y: x.view(x.shape[0], 1, x.shape[1]).transpose(0, 1).flatten(1),
    "spread": lambda x, y: x[:, None].expand(x.shape[0], 3, -1),
    "the first half": lambda x, y: x.T[None].narrow(1, 0, (x.shape[1] + 1) // 2) * 2,
    "taken apart": lambda x, y: torch.cat((x[None] * 2).expand(4, -1, -1).chunk(3)),
    "batches": lambda x, y: F.linear(x[None].expand(2, *x.shape), y),
    "the best": lambda x, y: x.topk(1, 1)[0],
    "norm of groups": lambda x, y: F.group_norm(x.T[None], 1)[0].contiguous(),
}
LYING = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Partial(), Shard(0)),
    (Shard(0), Partial()),
]


def lay(whole: Tensor, mesh, placements) -> DTensor:
    cut = [Replicate() if role.is_partial() else role for role in placements]
    made = distribute_tensor(whole, mesh, cut)
    local = made.to_local()
    for axis, role in enumerate(placements):
        if role.is_partial() and mesh.get_local_rank(axis):
            local = torch.zeros_like(local)
    meta = made._spec.meta
    return DTensor.from_local(local, mesh, placements, shape=meta.shape, stride=meta.stride, run_check=False)


def steps(x: Tensor) -> list[int]:
    """The strides; that of a dim of one element says nothing."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_new_shapes_in_any_order_are_right(name) -> None:
    draw = random.Random(name)
    shapes = [(draw.choice([1, 2, 3, 4, 5, 8, 17]), draw.choice([1, 2, 4, 5, 6, 16])) for _ in range(7)]
    trials = [(shape, placements) for placements in LYING for shape in shapes]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for seed, (shape, placements) in enumerate(trials):
            torch.manual_seed(seed)
            x, y = torch.randn(shape), torch.randn(shape)
            found = PROGRAMS[name](lay(x, mesh, placements), lay(y, mesh, placements))
            expected = PROGRAMS[name](x, y)
            assert steps(found) == steps(expected), (shape, placements)
            assert torch.allclose(found.full_tensor(), expected, atol=1e-5), (shape, placements)

    sim.run(program, 4)


@pytest.mark.parametrize("name", ["relu", "add", "mm", "mean of a dim", "softmax", "layer norm", "cat of the rows"])
def test_a_new_shape_is_planned_by_its_outline(name, monkeypatch) -> None:
    prepared = []
    prepare = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *call: prepared.append(str(call[1])) or prepare(*call))

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        other = distribute_tensor(torch.randn(40, 6), mesh, [Replicate()] * 2)
        for rows in (40, 41, 42, 43):
            x = distribute_tensor(torch.randn(rows, 6), mesh, [Shard(0), Replicate()])
            prepared.clear()
            PROGRAMS[name](x, other if name == "mm" else x)

    sim.run(program, 4)
    assert bool(prepared) is (dispatch.PLANS == 0)


def test_two_operands_of_one_name_must_agree() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        row = lambda size: distribute_tensor(torch.ones(size), mesh, [Shard(0)])  # noqa: E731
        row(4) + row(4)
        with pytest.raises(RuntimeError):
            row(5) + row(6)

    sim.run(program, 2)


def test_a_likeness_says_nothing_of_sizes_but_one_and_none() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (1,))
        likeness = lambda *shape: Spec(mesh, (Shard(0),), TensorMeta.contiguous(shape, torch.float32)).likeness  # noqa: E731
        assert likeness(2, 3) == likeness(7, 8)
        assert (
            len({likeness(2, 3), likeness(1, 3), likeness(0, 3), likeness(2, 1), likeness(2), likeness(2, 3, 4)}) == 6
        )
        assert current_world().size == 1

    sim.run(program, 1)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_an_outline_makes_ready_what_is_made_from_nothing(name, monkeypatch) -> None:
    """But for what is local to a size: functions made for it are told apart by what they are made of."""
    by_outline = []
    fitted = dispatch.fitted

    def compared(known, kind, op, args, kwargs, specs):
        ready = fitted(known, kind, op, args, kwargs, specs)
        if ready is not None:
            fresh = dispatch.prepare(kind, op, args, kwargs, lambda *entry: dispatch.ready_for(kind, *entry))
            by_outline.append(op)
            for field in dataclasses.fields(ready):
                if field.name not in ("outline", "local", "quick", "moving"):
                    assert getattr(ready, field.name) == getattr(fresh, field.name), (op, field.name)
            assert (ready.local is fresh.local) is not ready.normalized, op
            assert ready.quick in (None, ready.local), op
            assert (ready.quick is None) is (fresh.quick is None), op
            moving, expected = ([(at, move.__reduce__()) for at, move in one.moving] for one in (ready, fresh))
            assert moving == expected, op
        return ready

    monkeypatch.setattr(dispatch, "fitted", compared)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in LYING:
            for rows in (16, 17, 20, 21):
                PROGRAMS[name](*(lay(torch.randn(rows, 6), mesh, placements) for _ in range(2)))

    sim.run(program, 4)
    assert by_outline or dispatch.PLANS == 0 or name == "flattened"  # all of its sizes are part of one


# Operators whose result has dims of another size than any operand, and shapes of which the first gives dims of size 1.
OF_THEIR_OWN = {
    "pool": (lambda x: F.avg_pool2d(x, 2), (4, 3, 2, 2), (4, 3, 8, 6)),
    "largest of windows": (lambda x: F.max_pool2d(x, 3, stride=1), (4, 3, 3, 3), (4, 3, 6, 7)),
    "convolution": (lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3)), (4, 3, 3, 3), (4, 3, 5, 8)),
    "gate": (lambda x: F.glu(x, 1), (4, 2, 3), (4, 8, 3)),
    "cropped": (lambda x: F.pad(x, (-1, 0)), (4, 2), (4, 7)),
    "distances": (lambda x: torch.pdist(x), (2, 3), (6, 3)),
    "as complex numbers": (lambda x: x.view(torch.complex64), (4, 2), (4, 8)),
    "triangle": (lambda x: torch.linalg.qr(x)[1].abs(), (3, 1, 4), (3, 5, 4)),
    "windows": (lambda x: x.unfold(1, 2, 1).contiguous(), (4, 2), (4, 6)),
    "repeated": (lambda x: x.repeat_interleave(1, 1), (4, 1), (4, 6)),
    "joined": (lambda x: torch.cat([x, x[:, :1], x[:, 1:2]], 1), (4, 1), (4, 6)),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_dim_of_one_element_may_have_another_size_in_the_next_call(name) -> None:
    meaning, *shapes = OF_THEIR_OWN[name]
    drawn = [torch.randn(shape) for shape in (*shapes, *reversed(shapes))]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Replicate()):
            for x in drawn:
                with implicit_replication():
                    found = meaning(distribute_tensor(x, mesh, [placement]))
                torch.testing.assert_close(found.full_tensor(), meaning(x))
                assert found.shape == meaning(x).shape

    sim.run(program, 2)


AS_LAID = [
    ((16,), (Shard(0), Replicate())),
    ((24,), (StridedShard(0, 2), Replicate())),
    ((24,), (Shard(0), StridedShard(0, 2))),
    ((24,), (StridedShard(0, 3), Shard(0))),
    ((8, 12), (Shard(0), Shard(1))),
    ((2, 3, 16), (Shard(2), Replicate())),
    ((9, 4), (Shard(0), Shard(1))),
]


def factored(size: int) -> list[list[int]]:
    return [[outer, size // outer] for outer in range(1, size + 1) if size % outer == 0]


def sized_calls(shape: tuple[int, ...]) -> list[Callable[[Tensor], Tensor]]:
    """Views and copies that say sizes, of which only these differ."""
    calls: list[Callable[[Tensor], Tensor]] = []
    for dim, size in enumerate(shape):
        for two in factored(size):
            wanted = [*shape[:dim], *two, *shape[dim + 1 :]]
            calls += [lambda x, w=wanted: x.view(w), lambda x, w=wanted: x.reshape(w)]
            calls += [lambda x, d=dim, two=two: x.unflatten(d, two), lambda x, w=wanted: x.view(w).flatten()]
        for times in (2, 3, 4, 5):
            counts, width = [times if at == dim else 1 for at in range(len(shape))], min(times, size)
            calls += [lambda x, c=counts: x.repeat(*c), lambda x, c=counts: x.tile(c)]
            calls += [lambda x, t=times: x[None].expand(t, *x.shape), lambda x, d=dim, t=times: x.split(t, d)[0]]
            calls += [lambda x, d=dim, t=times: torch.cat([x] * t, d), lambda x, d=dim, w=width: x.unfold(d, w, 1)]
    return calls


@pytest.mark.parametrize("seed", range(len(AS_LAID)))
def test_sizes_among_the_arguments_change_nothing_but_what_they_mean(seed) -> None:
    shape, placements = AS_LAID[seed]
    whole, calls = torch.arange(float(torch.Size(shape).numel())).view(shape), sized_calls(shape)
    random.Random(seed).shuffle(calls)

    def tried(call: Callable[[Tensor], Tensor], x: DTensor) -> tuple[object, Tensor | None]:
        try:
            found = call(x)
        except ViewError:
            return "refused", None
        assert isinstance(found, DTensor)
        return found._spec, found.full_tensor()

    def program() -> None:
        x = lay(whole, init_device_mesh("cpu", (2, 2)), placements)
        memory = current_world().memory
        for call in calls:
            spec, value = tried(call, x)
            kept = memory.pop("plans", None)
            assert tried(call, x)[0] == spec
            if kept is not None:
                memory["plans"] = kept
            if value is not None:
                assert torch.equal(value, call(whole)), spec

    sim.run(program, 4)

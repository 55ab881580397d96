"""The verbs on plain tensors, and what their observers are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise import collectives as c
from shardwise import sim
from shardwise.comm import wire
from shardwise.comm.functional import all_reduce, sum_backward
from shardwise.comm.place import group_of
from shardwise.comm.wire import Transmission, observing
from shardwise.mesh.mesh import init_device_mesh
from shardwise.mesh.world import current_world, dry_world, use_world


def verbs(x: Tensor) -> list[Tensor]:
    group = group_of(None)
    mine, theirs = ([3, 1], [3, 0]) if group.index == 0 else ([0, 4], [1, 4])
    sent = [
        wire.all_reduce(x, "sum", group),
        wire.all_gather(x, group),
        wire.reduce_scatter(x, "sum", group),
        wire.all_to_all(x, theirs, mine, group),
        wire.broadcast(x, 1, group),
    ]
    return [wire.wait(one) for one in sent]


def test_verbs() -> None:
    first, second = sim.run(lambda: verbs(torch.arange(4.0) + 10 * current_world().rank), 2)
    assert [x.tolist() for x in first] == [
        [10, 12, 14, 16], [0, 1, 2, 3, 10, 11, 12, 13], [10, 12], [0, 1, 2], [10, 11, 12, 13],
    ]  # fmt: skip
    assert [x.tolist() for x in second] == [
        [10, 12, 14, 16], [0, 1, 2, 3, 10, 11, 12, 13], [14, 16], [3, 10, 11, 12, 13], [10, 11, 12, 13],
    ]  # fmt: skip


def test_a_group_of_one_sends_nothing() -> None:
    x, group = torch.ones(3), group_of([0])
    with observing(lambda sent: pytest.fail(str(sent))):
        assert wire.all_reduce(x, "sum", group) is x
        assert wire.all_gather(x, group) is wire.reduce_scatter(x, "sum", group) is x
        assert wire.all_to_all(x, [3], [3], group) is wire.broadcast(x, 0, group) is wire.wait(x) is x


def test_bytes_of_the_ring() -> None:
    told: list[Transmission] = []
    with use_world(dry_world(0, 4)) as world, observing(told.append):
        group = world.group(range(4))
        x = torch.zeros(8, 4, dtype=torch.float16)  # 64 bytes
        wire.wait(wire.all_reduce(x, "max", group, axis="tp"))
        wire.wait(wire.all_gather(x, group))
        wire.wait(wire.reduce_scatter(x, "avg", group))
        wire.wait(wire.all_to_all(x, [1, 1, 1, 1], [5, 1, 2, 0], group))
        wire.wait(wire.broadcast(x, 0, group))
    assert [(sent.op, sent.bytes) for sent in told] == [
        ("all_reduce", 96), ("all_gather", 192), ("reduce_scatter", 48), ("all_to_all", 24), ("broadcast", 64),
    ]  # fmt: skip
    name, line = group.name, told[0].line
    assert told[0] is Transmission(
        "all_reduce", "tp", (0, 1, 2, 3), name, (8, 4), torch.float16, "max", 96, False, line
    )
    assert told[3].splits == ((5, 1, 2, 0), (1, 1, 1, 1))


def test_observers_of_one_world_hear_nothing_of_another() -> None:
    told: list[Transmission] = []
    with use_world(dry_world(0, 2)):
        with observing(told.append), observing(told.append):
            with use_world(dry_world(1, 2)):
                all_reduce(torch.ones(2), "sum", None).wait()
            assert not told
            all_reduce(torch.ones(2), "sum", None).wait()
        all_reduce(torch.ones(2), "sum", None).wait()
    assert len(told) == 2


def test_backward_is_told_from_forward() -> None:
    told: list[Transmission] = []
    with use_world(dry_world(0, 2)), observing(told.append):
        x = torch.ones(2).requires_grad_()
        sum_backward(all_reduce(x, "sum", None), None).sum().backward()
    assert [sent.backward for sent in told] == [False, True, True]


def test_axis_is_told() -> None:
    told: list[Transmission] = []
    with use_world(dry_world(0, 8)), observing(told.append):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        all_reduce(torch.ones(2), "sum", (mesh, "tp")).wait()
        all_reduce(torch.ones(2), "sum", mesh["dp"]).wait()
    assert [(sent.axis, sent.ranks) for sent in told] == [("tp", (0, 1, 2, 3)), ("dp", (0, 4))]


def test_the_line_is_the_users() -> None:
    told: list[Transmission] = []
    with use_world(dry_world(0, 2)), observing(told.append):
        x = torch.ones(2).requires_grad_()
        y = all_reduce(x, "sum", None)
        y.sum().backward()
        _, _, here = wire.user_line().rpartition(":")
    assert [sent.line for sent in told] == [f"{__file__}:{int(here) - 2}", f"{__file__}:{int(here) - 1}"]


# op as observers are told: a call with x of shape (4, 2) on two ranks
CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: c.all_reduce(x, "avg", None),
    "all_gather": lambda x: c.all_gather_tensor(x, 1, None),
    "reduce_scatter": lambda x: c.reduce_scatter_tensor(x, "avg", 1, None),
    "all_to_all": lambda x: c.all_to_all_single(x, None, None, None),
    "broadcast": lambda x: c.broadcast(x, 1, None),
    "all_reduce_coalesced": lambda x: c.all_reduce_coalesced([x, x], "avg", None),
    "all_gather_coalesced": lambda x: c.all_gather_into_tensor_coalesced([x, x], None),
    "reduce_scatter_coalesced": lambda x: c.reduce_scatter_tensor_coalesced([x, x], "avg", [0, 1], None),
}
BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "broadcast": "all_reduce"}


@pytest.mark.parametrize("op", CALLS)
def test_every_collective_is_told(op: str) -> None:
    told: list[Transmission] = []
    with use_world(dry_world(1, 2)) as world, observing(told.append):
        result = CALLS[op](torch.ones(4, 2, dtype=torch.float64).requires_grad_())
        sum(one.sum() for one in (result if isinstance(result, list) else [result])).backward()
        name = world.group(range(2)).name
    kind = op.removesuffix("_coalesced")
    back = op.replace(kind, BACKWARD.get(kind, kind))
    assert [(sent.op, sent.backward) for sent in told] == [(op, False), (back, True)]
    for sent in told:
        assert (sent.ranks, sent.group_name, sent.dtype) == ((0, 1), name, torch.float64)
        assert sent.line.startswith(__file__)
        assert sent.bytes > 0

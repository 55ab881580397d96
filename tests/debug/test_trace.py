"""What was sent, counted: every number here is that of the ring algorithm, by hand."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode, Traffic, traffic_table

NATIVE = torch.ops._c10d_functional


def grid() -> shardwise.DeviceMesh:
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.world(4)
def test_traffic_by_axis_and_kind() -> None:
    rows = shardwise.zeros(8, 4, device_mesh=grid(), placements=[Shard(0), Replicate()])
    terms = shardwise.zeros(8, 4, device_mesh=grid(), placements=[Partial(), Partial()])
    with CommDebugMode() as sent:
        rows.full_tensor()
        terms.redistribute(placements=[Partial(), Replicate()])
        terms.redistribute(placements=[Partial(), Shard(1)])
        rows.redistribute(placements=[Shard(1), Replicate()])
    assert sent.traffic() == (
        Traffic("dp", "all_gather", 1, 4 * 4 * 4),
        Traffic("dp", "all_to_all", 1, 4 * 2 * 4),
        Traffic("tp", "all_reduce", 1, 8 * 4 * 4),
        Traffic("tp", "reduce_scatter", 1, 8 * 2 * 4),
    )
    assert sent.get_total_counts() == 4


@pytest.mark.world(4)
def test_counts_are_found_under_every_name_of_an_operator() -> None:
    rows = shardwise.zeros(8, 4, device_mesh=grid(), placements=[Shard(0), Shard(0)])
    with CommDebugMode() as sent:
        rows.full_tensor()
    counts, sizes = sent.get_comm_counts(), sent.get_comm_bytes()
    packet = NATIVE.all_gather_into_tensor
    assert counts == {packet: len(sent.transmissions)}
    assert counts[packet] == counts[packet.default] == counts["all_gather"] == counts.get(packet)
    assert sizes[packet] == sum(each.bytes for each in sent.transmissions)
    assert packet in counts
    assert NATIVE.all_reduce not in counts
    assert counts[NATIVE.all_reduce] == counts["nonsense"] == 0


@pytest.mark.world(2)
def test_entering_anew_forgets_and_leaving_stops() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2,))
    rows = shardwise.zeros(4, device_mesh=mesh, placements=[Shard(0)])
    with CommDebugMode() as sent:
        rows.full_tensor()
        with CommDebugMode() as inner:
            rows.full_tensor()
    rows.full_tensor()
    assert (sent.get_total_counts(), inner.get_total_counts()) == (2, 1)
    with sent:
        pass
    assert sent.get_total_counts() == 0


@pytest.mark.world(3)
def test_each_rank_counts_what_it_sends_itself(world: shardwise.World) -> None:
    with CommDebugMode() as sent:
        if world.rank < 2:
            mesh = shardwise.DeviceMesh("cpu", [0, 1])
            shardwise.zeros(4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert sent.get_total_counts() == (1 if world.rank < 2 else 0)


@pytest.mark.world(2)
def test_backward_is_marked() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2,))
    x = shardwise.zeros(4, device_mesh=mesh, placements=[Replicate()], requires_grad=True)
    with CommDebugMode() as sent:
        x.redistribute(placements=[Shard(0)]).to_local().sum().backward()
    assert [(each.op, each.backward) for each in sent.transmissions] == [("all_gather", True)]


def test_the_table_shows_rows_and_sums() -> None:
    table = traffic_table((Traffic("tp", "all_reduce", 2, 3000), Traffic("", "broadcast", 1, 24)), "a step")
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["tp", "-"], ["all_reduce", "broadcast"], ["2", "1"], ["3,000", "24"]]
    assert [column.footer for column in table.columns] == ["all", "", "3", "3,024"]
    assert table.title == "a step"


def test_nothing_sent_prints_as_an_empty_table() -> None:
    with CommDebugMode() as sent:
        torch.ones(3).sum()
    assert "all" in str(sent)
    assert repr(sent) == "CommDebugMode(0 collectives)"

"""Worlds: which one is current, and the groups of real processes."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from gloo import free_port, run_gloo
from shardwise.errors import NotInMeshError, WorldError
from shardwise.mesh import world
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.world import current_world, dry_world, use_world


def test_a_process_that_is_told_nothing_is_alone() -> None:
    alone = current_world()
    assert (alone.kind, alone.rank, alone.size) == ("process", 0, 1)
    assert current_world() is alone
    assert alone.group((0,)).size == 1


def test_a_world_holds_for_its_block_and_its_thread() -> None:
    outer, inner, seen = dry_world(1, 4), dry_world(2, 4), []
    with use_world(outer):
        with pytest.raises(KeyError), use_world(inner):
            raise KeyError
        assert current_world() is outer
        thread = threading.Thread(target=lambda: seen.append(current_world()))
        thread.start()
        thread.join()
    assert current_world() is seen[0] is not outer


def test_a_dry_world_makes_each_group_once_and_only_its_own() -> None:
    dry = dry_world(3, 65_536)
    group = dry.group((1, 3, 5))
    assert dry.group([1, 3, 5]) is group
    assert (group.index, group.size, group.process_group.rank()) == (1, 3, 1)
    assert dry.group((5, 3, 1)) is not group
    with pytest.raises(NotInMeshError, match=r"rank 3 is not in the group[\s\S]*\[1, 2\]"):
        dry.group((1, 2))


def test_no_such_rank() -> None:
    with pytest.raises(WorldError, match="rank 4 of 4"):
        dry_world(4, 4)


def test_a_rank_without_an_address_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(world, "_process", [])
    with pytest.raises(WorldError, match=r"MASTER_ADDR[\s\S]*torchrun"):
        current_world()


def test_real_groups() -> None:
    for rank, report in enumerate(run_gloo(_report, 4)):
        assert report["world"] == (rank, 4)
        assert report["default is reused"]
        assert report["same group"]
        assert report["gathered in the order of the mesh"] == [[3, 1], [2, 0]][rank % 2 == 0]
        assert report["sum over a slice"] == (rank // 2 * 2) * 2 + 1
        assert report["groups left to make"] == 0


def _report() -> dict[str, object]:
    mine = current_world()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]])
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([mine.rank]), group=backwards.get_group(0))
    summed = torch.tensor([mine.rank])
    dist.all_reduce(summed, group=mesh["tp"].get_group())
    made = len(dist.distributed_c10d._world.pg_map)
    same = mesh["tp"].get_group() is mesh.get_group(1) is DeviceMesh("cpu", mesh["tp"].ranks).get_group()
    adopted = DeviceMesh.from_group(mesh.get_group("dp"), "cpu")
    return {
        "world": (mine.rank, mine.size),
        "default is reused": mesh.flatten().get_group() is dist.group.WORLD,
        "same group": same and adopted.get_group() is mesh.get_group("dp"),
        "gathered in the order of the mesh": [int(one) for one in gathered],
        "sum over a slice": int(summed),
        "groups left to make": len(dist.distributed_c10d._world.pg_map) - made - 1,
    }


def test_the_environment_of_torchrun_is_enough() -> None:
    assert run_gloo(_restart, 2) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def _restart() -> tuple[int, int, list[int]]:
    before, port = current_world(), torch.tensor([free_port()])
    dist.broadcast(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(port))
    after = current_world()
    assert after is not before
    mesh = init_device_mesh("cpu", (2,))
    assert mesh.get_local_rank() == after.rank
    return after.rank, after.size, dist.get_process_group_ranks(mesh.get_group())

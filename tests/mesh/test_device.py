"""The current device follows from the local rank."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import MeshError
from shardwise.mesh.agreement import Claim, Claims
from shardwise.mesh.mesh import init_device_mesh
from shardwise.mesh.world import World, dry_world, use_world


def agreed(claim: Claim, timeout: float) -> Claims:
    return Claims({claim.text: claim.ranks}, {})


class Host:
    """What a host's devices are asked, and which became current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, in_use: bool = False) -> None:
        self.chosen: list[int] = []
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)

    def make(self, rank: int, size: int, device_type: str = "cuda") -> list[int]:
        world = World("process", rank, size, dry_world(rank, size)._make_group, None, agreed)
        with use_world(world):
            init_device_mesh(device_type, (size,))
        return self.chosen


def test_a_launcher_says_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, devices=4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert host.make(rank=5, size=7) == [3]


def test_without_a_launcher_ranks_fill_hosts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Host(monkeypatch, devices=4).make(rank=6, size=8) == [2]
    assert Host(monkeypatch, devices=8).make(rank=3, size=5) == [3]


def test_what_the_program_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Host(monkeypatch, devices=4, in_use=True).make(rank=6, size=8) == []
    assert Host(monkeypatch, devices=0).make(rank=6, size=8) == []
    assert Host(monkeypatch, devices=4).make(rank=6, size=8, device_type="cpu") == []


def test_uneven_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match=r"6 ranks do not fill hosts of 4 cuda devices evenly[\s\S]*set_device"):
        Host(monkeypatch, devices=4).make(rank=5, size=6)


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, devices=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match=r"rank 2 has no cuda device of its own[\s\S]*LOCAL_RANK=2 and 2 devices"):
        host.make(rank=2, size=4)


def test_a_dry_world_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, devices=4)
    with use_world(dry_world(5, 7)):
        init_device_mesh("cuda", (7,))
    assert host.chosen == []

"""Groups come on demand, in the order of the mesh, under names that all of their ranks know, and go again."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d

from gloo import run_gloo
from shardwise.errors import WorldError
from shardwise.mesh import process_groups
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.process_groups import Placed, TorchGroups
from shardwise.mesh.world import World, current_world, dry_world, use_world


def registered(name: str) -> bool:
    try:
        return _resolve_process_group(name) is not None
    except (RuntimeError, LookupError):
        return False


def test_groups_of_a_dry_world_go_with_it() -> None:
    def use() -> list[str]:
        with use_world(dry_world(1, 8)):
            mesh = init_device_mesh("cpu", (2, 4))
            names = [mesh.axis_group(0).name, mesh.axis_group(1).name]
            assert all(map(registered, names))
        return names

    names = use()
    gc.collect()
    assert not any(map(registered, names))


@pytest.mark.parametrize("device_type", ["meta", "xla"])
def test_silent_meshes_make_no_groups(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    def refuse(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, str]:
        raise AssertionError

    with use_world(World("process", 1, 4, refuse)):
        mesh = init_device_mesh(device_type, (2, 2), eager=True)
        group = mesh.axis_group(0)
        assert (group.ranks, group.index, group.size) == ((1, 3), 0, 2)
        mesh.destroy()
        assert not registered(group.name)


def test_eager_makes_the_groups_of_all_axes_and_destroy_frees_them() -> None:
    with use_world(dry_world(1, 8)) as world:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"), eager=True)
        groups = [mesh.axis_group(axis) for axis in range(3)] + [mesh["a", "b"].flatten().axis_group(0)]
        assert len(world._groups) == 4
        kept = DeviceMesh("cpu", [1, 0]).axis_group(0)
        mesh.destroy()
        assert [*world._groups.values()] == [kept]
        assert not any(registered(group.name) for group in groups)
        assert mesh.axis_group(0) is not groups[0]
        assert registered(mesh.axis_group(0).name)
        assert mesh["c"].axis_group(0).ranks == (0, 1)


def test_a_thousand_meshes_leave_nothing() -> None:
    def use(size: int) -> weakref.ref[DeviceMesh]:
        mesh = init_device_mesh("cpu", (size, 2), mesh_dim_names=("a", "b"))
        mesh.flatten("f").get_coordinate()
        mesh.axis_group(1), mesh["a"].ndim
        mesh.destroy()
        return weakref.ref(mesh)

    with use_world(dry_world(1, 2000)) as world:
        left = [use(size) for size in range(1, 1001)]
        gc.collect()
        assert not [mesh for mesh in left if mesh() is not None]
        assert not world._groups
        assert not world._closing


def test_meshes_that_are_dropped_without_destroying_leave_no_memory() -> None:
    def use() -> None:
        for size in range(1, 501):
            init_device_mesh("cpu", (size, 2), mesh_dim_names=("a", "b"))["b"].axis_group(0)

    with use_world(dry_world(1, 2000)) as world:
        tracemalloc.start()
        sizes = []
        for times in (1, 3):  # at the first, tables of the process may be made anew
            for _ in range(times):
                use()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert len(world._groups) == 1
    assert sizes[1] - sizes[0] < 50_000


def test_placed_ranks_keep_their_order_where_torch_sorts() -> None:
    placed = Placed.all((3, 0, 2))
    assert sorted(placed) == [3, 0, 2]
    assert [rank < 0 for rank in placed] == [False] * 3
    assert placed.index(2) == 2
    assert {rank: place for place, rank in enumerate(placed)}[0] == 1
    assert all(rank < 4 for rank in placed)


@pytest.mark.gloo
def test_real_groups_need_no_other_rank_and_no_equal_history() -> None:
    assert run_gloo(_histories, 4) == [
        (4, [8, 16, 32], "sum over 3 ranks 60", [2, 1, 0]),
        (4, [8, 16, 32], "sum over 3 ranks 60", [2, 1, 0]),
        (4, [8, 16, 32], "sum over 3 ranks 60", [2, 1, 0]),
        (4, [8, 16, 32], "", None),
    ]


def _histories() -> tuple[int, list[int], str, list[int] | None]:
    rank = current_world().rank
    mesh = init_device_mesh("cpu", (2, 2))
    if rank == 0:
        current_world().group((0,))  # its ranks would make the next groups under different names
    x = torch.ones(1)
    for axis in (0, 1):
        dist.all_reduce(x, group=mesh.get_group(axis))
    first, sums = int(x), []
    for _ in range(3):
        mesh.destroy()
        dist.all_reduce(x, group=mesh.get_group(0))
        sums.append(int(x))
    if rank == 3:
        return first, sums, "", None
    process_groups.SORTS = rank != 1  # type: ignore[misc]  # as in torch 2.11, and later
    group = DeviceMesh("cpu", [2, 1, 0], check=False).get_group()
    order = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(order, torch.tensor([rank]), group=group)
    y = torch.tensor([20])
    dist.all_reduce(y, group=group)
    return first, sums, f"sum over 3 ranks {int(y)}", [int(one) for one in order]


@pytest.mark.gloo
def test_a_backend_of_its_own_for_an_axis() -> None:
    for report in run_gloo(_backends, 4):
        assert report == {"own group": True, "same again": True, "other axis": True, "sum": 4, "adopted stays": True}


def _backends() -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    special = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "gloo"})
    whole = init_device_mesh("cpu", (4,), backend_override={0: ("gloo", None)})
    x = torch.ones(1)
    dist.all_reduce(x, group=special.get_group("b"))
    dist.all_reduce(x, group=special["a"].get_group())
    theirs = dist.new_group([0, 1, 2, 3])
    DeviceMesh.from_group(theirs, "cpu").destroy()
    return {
        "adopted stays": theirs in c10d._world.pg_map,
        "own group": special.get_group("b") is not mesh.get_group("b") and whole.get_group() is not dist.group.WORLD,
        "same again": special["b"].get_group() is special.get_group("b"),
        "other axis": special.get_group("a") is mesh.get_group("a"),
        "sum": int(x),
    }


@pytest.mark.gloo
def test_where_ranks_cannot_make_a_group_alone_all_make_all() -> None:
    for rank, report in enumerate(run_gloo(_refusing, 4)):
        assert report == (
            6,
            [rank % 2, rank % 2 + 2],
            True,
            "the backend makes groups only with all ranks of the world",
        )


def _refusing() -> tuple[int, list[int], bool, str]:
    real, rank = dist.new_group, current_world().rank

    def new_group(*args: object, use_local_synchronization: bool = False, **options: object) -> object:
        if use_local_synchronization:
            raise ValueError("this backend doesn't support use_local_synchronization=True")
        return real(*args, **options)  # type: ignore[arg-type]

    dist.new_group = new_group
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        x = torch.tensor(rank)
        for axis in (0, 1):
            dist.all_reduce(x, group=mesh.get_group(axis))
        before = len(c10d._world.pg_map)
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))  # eager now, and the groups are there
        with pytest.raises(WorldError) as refused:
            DeviceMesh("cpu", [rank // 2 * 2, rank // 2 * 2 + 1][::-1], check=False)
    finally:
        dist.new_group = real
    ranks = dist.get_process_group_ranks(mesh.get_group(0))
    return int(x), ranks, before == len(c10d._world.pg_map), str(refused.value).splitlines()[0].partition(",")[0]


def test_a_world_that_splits_makes_groups_together() -> None:
    class Splitting:
        supports_splitting = True

    class Default:
        bound_device_id = torch.device("cuda", 0)

        def _get_backend(self, device: torch.device) -> Splitting:
            return Splitting()

    assert TorchGroups(Default()).together  # type: ignore[arg-type]

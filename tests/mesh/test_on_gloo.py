"""The same programs on processes that talk over gloo and in the simulator."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gloo import run_gloo
from shardwise.errors import AxisError, AxisNameError, MeshError, NotInMeshError, ShardwiseError
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.world import current_world
from shardwise.sim import run

Program = Callable[[int], object]


def refused(make: Callable[[], object], error: type[ShardwiseError], *words: str) -> bool:
    with pytest.raises(error) as raised:
        make()
    return all(word in str(raised.value) for word in words)


def ranks_along(mesh: DeviceMesh, axis: int | str | None = None) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


def taken_names(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("x", "y", "z"))
    mesh["x", "y"].flatten("xy")
    assert refused(lambda: mesh["y", "z"].flatten("xy"), AxisNameError, "'xy' is taken")
    assert refused(lambda: mesh["x", "y"].flatten("z"), AxisNameError, "'z' is taken")
    return mesh["x", "y"].flatten("xy").get_group() is mesh["xy"].get_group()


def order_of_names(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert refused(lambda: mesh["b", "a"], AxisError, "order", "mesh['a', 'b']")
    return refused(lambda: mesh["c"], AxisError, "'c'", "'a', 'b'") and refused(lambda: mesh["a", "a"], AxisError)


def slices_of_slices(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "inner", "one"))
    both = mesh["outer", "inner"]
    assert both["inner"] is mesh["inner"]
    assert ranks_along(both["inner"]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert ranks_along(mesh, "one") == [rank]
    return (both.get_local_rank("outer"), both["inner"].get_local_rank()) == divmod(rank, 2)


def split_by_name_or_index(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    for axis in ("world", 0):
        split = mesh.unflatten(axis, (2, 2), ("dp", "tp"))
        assert ranks_along(split["dp"]) == [rank % 2, rank % 2 + 2]
    return refused(lambda: mesh.unflatten("world", (3, 2), ("a", "b")), MeshError, "6", "4")


def ranks_outside(rank: int) -> bool:
    mesh = DeviceMesh("cpu", [2, 0])
    if rank % 2:
        return mesh.get_coordinate() is None and refused(mesh.get_local_rank, NotInMeshError, f"rank {rank}", "[2, 0]")
    x = torch.tensor([rank])
    dist.broadcast(x, src=2, group=mesh.get_group())
    return mesh.get_local_rank() == 1 - rank // 2 and ranks_along(mesh) == [2, 0] and int(x) == 2


def too_large(rank: int) -> bool:
    assert refused(lambda: init_device_mesh("cpu", (3, 2)), MeshError, "6 ranks", "4 ranks")
    return refused(lambda: DeviceMesh("cpu", [0, 0]), MeshError, "[0]") and refused(
        lambda: DeviceMesh("cpu", [0, 7]), MeshError, "7"
    )


def the_same_mesh_again(rank: int) -> bool:
    groups = set()
    for _ in range(8):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), eager=True)
        groups |= {*mesh.get_all_groups(), mesh.flatten("ab").get_group()}
    return len(groups) == 3


def pickled(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mine = pickle.dumps((mesh, mesh["a"], mesh["a", "b"].flatten("flat")))
    everybody: list[object] = [None] * 4
    dist.all_gather_object(everybody, mine)
    return {pickle.loads(one) for one in everybody} == {pickle.loads(mine)}  # type: ignore[arg-type]


def another_thread(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh.get_all_groups()
    seen: list[object] = []
    if current_world().kind != "process":
        return True  # only the process's world is that of all its threads
    thread = threading.Thread(target=lambda: seen.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))))
    thread.start()
    thread.join()
    return seen == [mesh]


PROGRAMS = [
    taken_names, order_of_names, slices_of_slices, split_by_name_or_index, ranks_outside, too_large,
    the_same_mesh_again, pickled, another_thread,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_in_the_simulator(program: Program) -> None:
    assert run(lambda: program(current_world().rank), 4) == [True] * 4


@pytest.mark.gloo
def test_on_gloo() -> None:
    assert run_gloo(_all_programs, 4) == [{program.__name__: True for program in PROGRAMS}] * 4


def _all_programs() -> dict[str, object]:
    return {program.__name__: program(current_world().rank) for program in PROGRAMS}


@pytest.mark.gloo
def test_one_process_passes_another_shape() -> None:
    told = run_gloo(_another_shape, 4)
    assert len(set(told)) == 1
    text, took = told[0][0], max(took for _, took in told)
    assert text.startswith("MeshMismatchError")
    assert "ranks 0-1, 3: DeviceMesh('cpu', dp=2, tp=2)" in text
    assert "rank 2: DeviceMesh('cpu', dp=4, tp=1)" in text
    assert took < 10


def _another_shape() -> tuple[str, int]:
    shape = (4, 1) if current_world().rank == 2 else (2, 2)
    return _told(lambda: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))


@pytest.mark.gloo
def test_one_process_is_late() -> None:
    told = run_gloo(_late, 4)
    assert len({text for text, _ in told}) == 1
    assert told[0][0].startswith("CollectiveTimeoutError: rank 1 did not come within 1 s")
    assert max(took for _, took in told) < 10


def _late() -> tuple[str, int]:
    if current_world().rank == 1:
        time.sleep(2)
    return _told(lambda: init_device_mesh("cpu", (2, 2), timeout=1))


def _told(make: Callable[[], object]) -> tuple[str, int]:
    began = time.perf_counter()
    try:
        return repr(make()), 0
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}", int(time.perf_counter() - began) // 10 * 10

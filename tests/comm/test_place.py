"""All the ways to name a group mean the same group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwise import sim
from shardwise.collectives import all_reduce, permute_tensor
from shardwise.comm.place import GroupLike, group_of
from shardwise.errors import AxisError, CollectiveError, NotInMeshError
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.world import current_world

# Of a 2 by 3 mesh (a, b): the row that the rank is in.
FORMS: dict[str, Callable[[DeviceMesh, list[int]], GroupLike]] = {
    "list of ranks": lambda mesh, row: row,
    "tuple of ranks": lambda mesh, row: tuple(row),
    "list of lists": lambda mesh, row: [[0, 1, 2], [3, 4, 5]],
    "slice of the mesh": lambda mesh, row: mesh["b"],
    "axis by name": lambda mesh, row: (mesh, "b"),
    "axis by index": lambda mesh, row: (mesh, 1),
    "axis by negative index": lambda mesh, row: (mesh, -1),
    "process group": lambda mesh, row: mesh.get_group("b"),
    "name of a process group": lambda mesh, row: mesh.axis_group(1).name,
    "Group": lambda mesh, row: current_world().group(row),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    def program() -> tuple[float, list[int]]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        row = list(range(3)) if current_world().rank < 3 else list(range(3, 6))
        group = FORMS[form](mesh, row)
        return all_reduce(torch.tensor(1.0 * current_world().rank), "sum", group).item(), list(group_of(group).ranks)

    assert sim.run(program, 6) == [(3.0, [0, 1, 2])] * 3 + [(12.0, [3, 4, 5])] * 3


def test_none_is_the_world_and_a_line_its_only_axis() -> None:
    def program() -> list[float]:
        line, x = init_device_mesh("cpu", (3,)), torch.tensor(1.0)
        return [all_reduce(x, "sum", group).item() for group in (None, line, (line, 0), dist.group.WORLD or None)]

    assert sim.run(program, 3) == [[3.0] * 4] * 3


def test_order_of_the_ranks_is_kept() -> None:
    def program() -> float:
        return permute_tensor(torch.tensor(1.0 * current_world().rank), [1, 2, 0], [2, 0, 1]).item()

    assert sim.run(program, 3) == [2.0, 0.0, 1.0]  # 2 sends to 0, 0 to 1, 1 to 2


def test_rank_outside_is_refused_by_name() -> None:
    def program() -> None:
        if current_world().rank == 2:
            for group in ([0, 1], [[0, 1], [1, 0]], [[0], [1]]):
                with pytest.raises(NotInMeshError, match="rank 2"):
                    all_reduce(torch.ones(1), "sum", group)

    sim.run(program, 3)


@pytest.mark.parametrize("group", [[], [0, 0], ["a"], 3.5, [[0], 1]])
def test_what_is_no_group(group: object) -> None:
    with pytest.raises(CollectiveError, match="no group"):
        group_of(group)  # type: ignore[arg-type]


def test_mesh_of_two_axes_is_ambiguous() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(CollectiveError, match=r"\(mesh, 'dp'\)"):
            all_reduce(torch.ones(1), "sum", mesh)
        with pytest.raises(AxisError, match="pp"):
            all_reduce(torch.ones(1), "sum", (mesh, "pp"))

    sim.run(program, 2)

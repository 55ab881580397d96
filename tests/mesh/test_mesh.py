"""Meshes against numpy indexing, at every rank; values, names, groups, errors, and their size and speed."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import AxisError, AxisNameError, MeshError, NotInMeshError
from shardwise.mesh.mesh import DeviceMesh, current_mesh, init_device_mesh
from shardwise.mesh.world import World, current_world, dry_world, use_world

NAMES = ("a", "b", "c", "d")
Table = np.ndarray
few = settings(max_examples=30)  # of meshes, each at all of its ranks


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Distinct ranks of a world of 32, in 1 to 4 dims."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 24))
    size = int(np.prod(shape))
    shuffled = draw(st.booleans())
    ranks = draw(st.permutations(range(32)))[:size] if shuffled else range(draw(st.integers(0, 8)), 32)[:size]
    return np.array(ranks).reshape(shape)


def mesh_of(table: Table) -> DeviceMesh:
    return DeviceMesh("cpu", table, mesh_dim_names=NAMES[: table.ndim])


def part(table: Table, coordinate: tuple[int, ...], axes: tuple[int, ...]) -> Table:
    """The ranks that differ from one coordinate only along some axes, in the order of these."""
    index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(coordinate))
    kept = sorted(axes)
    return table[index].transpose([kept.index(axis) for axis in axes])


def at_every_rank(table: Table, check: Callable[[DeviceMesh, tuple[int, ...]], None]) -> None:
    for coordinate, rank in np.ndenumerate(table):
        with use_world(dry_world(int(rank), 32)):
            check(mesh_of(table), coordinate)


def listed(table: Table) -> list[object]:
    return table.tolist()  # type: ignore[no-any-return]


@few
@given(tables())
def test_a_mesh_is_its_table(table: Table) -> None:
    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        assert mesh.mesh.tolist() == listed(table)
        assert mesh.get_coordinate() == coordinate
        assert mesh.ranks == tuple(table.ravel().tolist())
        assert (mesh.shape, mesh.ndim, mesh.size()) == (table.shape, table.ndim, table.size)
        for axis, name in enumerate(NAMES[: table.ndim]):
            assert mesh.get_local_rank(axis) == mesh.get_local_rank(name) == coordinate[axis]
            assert mesh.size(axis) == mesh.size(name) == mesh.size(axis - table.ndim) == table.shape[axis]

    at_every_rank(table, check)


@few
@given(tables(), st.data())
def test_a_slice_is_numpy_indexing(table: Table, data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, table.ndim - 1), min_size=1))))
    names = tuple(NAMES[axis] for axis in axes)

    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        piece = mesh[names]
        assert piece.mesh.tolist() == listed(part(table, coordinate, axes))
        assert piece.get_coordinate() == tuple(coordinate[axis] for axis in axes)
        assert piece[names[-1]] is mesh[names[-1]] or table.ndim == 1
        assert piece._get_root_mesh() is mesh

    at_every_rank(table, check)


@few
@given(tables(), st.data())
def test_flatten_is_numpy_ravel(table: Table, data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, table.ndim - 1), min_size=1))))
    names = tuple(NAMES[axis] for axis in axes)

    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        flat = mesh[names].flatten("flat")
        expected = part(table, coordinate, axes).ravel().tolist()
        assert flat.mesh.tolist() == expected
        assert flat.get_local_rank() == expected.index(current_world().rank)
        assert flat is mesh[names]._flatten("flat") is mesh["flat"]
        assert mesh.get_group("flat") is flat.get_group() is mesh.axes_group(axes).process_group

    at_every_rank(table, check)


@few
@given(tables(), st.data())
def test_groups_hold_the_ranks_along_their_axes(table: Table, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(table.ndim))))[: data.draw(st.integers(1, table.ndim))]

    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        group = mesh.axes_group(order)
        assert group.ranks == tuple(part(table, coordinate, order).ravel().tolist())
        assert group.ranks[group.index] == current_world().rank
        for axis in range(table.ndim):
            assert mesh.axis_group(axis).ranks == tuple(part(table, coordinate, (axis,)).tolist())

    at_every_rank(table, check)


@few
@given(tables(), st.data())
def test_unflatten_is_numpy_reshape_and_flatten_undoes_it(table: Table, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, table.ndim - 1))
    sizes = {1: (1, 1), 2: (2, 1), 3: (1, 3)}[table.shape[axis]]

    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        split = mesh.unflatten(NAMES[axis], sizes, ("x", "y"))
        shape = (*table.shape[:axis], *sizes, *table.shape[axis + 1 :])
        assert split.mesh.tolist() == listed(table.reshape(shape))
        assert split is mesh._unflatten(axis, sizes, ("x", "y"))
        assert split["x", "y"].flatten("again").axis_group(0) is mesh.axis_group(axis)

    at_every_rank(table, check)


@few
@given(tables(), st.data())
def test_concatenate_joins_the_axes_of_slices(table: Table, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(table.ndim))))

    def check(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> None:
        joined = DeviceMesh.concatenate([mesh[NAMES[axis]] for axis in order])
        assert joined.mesh.tolist() == listed(table.transpose(order))
        assert joined.mesh_dim_names == tuple(NAMES[axis] for axis in order)
        assert (joined is mesh) == (order == tuple(sorted(order)))

    at_every_rank(table, check)


@pytest.fixture
def world() -> object:
    with use_world(dry_world(5, 8)) as world:
        yield world


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def test_unflatten_splits_an_axis_that_is_not_contiguous(world: World) -> None:
    flat = cube()["pp", "tp"].flatten()
    assert flat.ranks == (0, 1, 4, 5) or flat.ranks == (2, 3, 6, 7)
    assert flat.unflatten(0, (2, 2), ("x", "y")).mesh.tolist() == np.array(flat.ranks).reshape(2, 2).tolist()
    assert flat.unflatten("pp_tp", (4, 1), ("x", "y"))["x"].ranks == flat.ranks


def test_flattened_names_slice_beside_others_and_in_nested_slices(world: World) -> None:
    mesh = cube()
    mesh["pp", "dp"].flatten("data")
    assert mesh["data", "tp"].mesh.tolist() == np.arange(8).reshape(4, 2).tolist()
    assert mesh["pp", "dp"]["data"] is mesh["data"]
    assert mesh.size("data") == 4
    assert mesh.get_local_rank("data") == 2
    with pytest.raises(AxisError, match="'data'"):
        mesh["tp"]["data"]
    with pytest.raises(AxisError, match="overlap"):
        mesh["data", "dp"]


@given(tables())
def test_equal_meshes_are_one_object(table: Table) -> None:
    with use_world(dry_world(0, 32)):
        mesh = mesh_of(table)
        assert mesh is DeviceMesh("cpu", torch.from_numpy(table), mesh_dim_names=list(mesh.axis_names))
        assert mesh is DeviceMesh("cpu", listed(table), mesh_dim_names=mesh.axis_names)
        assert pickle.loads(pickle.dumps(mesh)) is copy.deepcopy(mesh) is copy.copy(mesh) is mesh
        assert mesh is not DeviceMesh("cpu", listed(table))
        assert mesh is not DeviceMesh("meta", listed(table), mesh_dim_names=mesh.axis_names)


def test_init_device_mesh_is_the_mesh_of_arange(world: World) -> None:
    made = init_device_mesh("cpu", (2, 1, 4))
    assert made is DeviceMesh("cpu", torch.arange(8).view(2, 1, 4))
    assert init_device_mesh("cpu", [np.int64(8)]) is DeviceMesh("cpu", range(8))
    assert made.mesh.dtype == torch.int32
    assert made.axis_names == ("0", "1", "2")


def test_a_slice_is_the_same_value_on_every_rank() -> None:
    found = set()
    for rank in range(8):
        with use_world(dry_world(rank, 8)):
            found.add((cube()["tp"], cube()["pp", "dp"].flatten("data"), cube().unflatten(0, (2, 1), ("x", "y"))))
    assert len(found) == 1


def test_cut_meshes_survive_pickling_in_a_world_that_never_cut(world: World) -> None:
    flat = cube()["pp", "tp"].flatten("wide")
    text = pickle.dumps((flat, cube()["tp"]))
    with use_world(dry_world(2, 8)):
        loaded, narrow = pickle.loads(text)
        assert loaded is flat
        assert loaded.ranks == (2, 3, 6, 7)
        assert narrow is cube()["tp"]


def test_printing(world: World) -> None:
    assert repr(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))) == "DeviceMesh('cpu', dp=2, tp=4)"
    assert repr(init_device_mesh("cpu", (2, 4))) == "DeviceMesh('cpu', 2, 4)"
    assert repr(cube()["tp"]) == "DeviceMesh('cpu', tp=2)"
    assert repr(DeviceMesh("cpu", [0, 2])) == "DeviceMesh('cpu', 2, ranks=[0, 2])"


def test_what_one_rank_flattens_another_does_not_know() -> None:
    mesh = None
    for rank in range(2):
        with use_world(dry_world(rank, 8)):
            mesh = cube()
            with pytest.raises(AxisError, match="'data'"):
                mesh["data"]
            mesh["pp", "dp"].flatten("data")


def test_threads_cut_the_same_mesh(world: World) -> None:
    def cut() -> None:
        with use_world(world):
            for _ in range(1000):
                mesh = cube()
                flat = mesh["pp", "dp"].flatten("data")
                found.add((mesh["tp"], flat, mesh["data", "tp"], mesh.axis_group(1), flat == mesh["data"] != mesh))

    found: set[object] = set()
    threads = [threading.Thread(target=cut) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


def test_threads_make_and_drop_meshes(world: World) -> None:
    def make() -> None:
        with use_world(world):
            for step in range(1000):
                mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", f"t{step % 7}"))
                wrong.extend([step] if mesh["pp"].flatten("f") is not mesh["f"] or mesh["dp"].ranks != (5, 7) else [])

    wrong: list[int] = []
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_submeshes_and_the_root(world: World) -> None:
    mesh = cube()
    rows = mesh._get_all_submeshes("dp")
    assert [row.mesh.tolist() for row in rows if row.get_coordinate()] == [[5, 7]]
    assert sorted(row.rank_map.ranks(range(2)) for row in rows) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [mesh[name]._get_root_mesh_dim() for name in ("pp", "dp", "tp")] == [0, 1, 2]
    assert mesh["pp", "dp"].flatten("data")._get_root_mesh_dim() is None
    assert mesh["dp"]._get_root_mesh() is mesh._get_root_mesh() is mesh
    with pytest.raises(AxisError, match="one axis"):
        mesh["pp", "dp"]._get_root_mesh_dim()


def test_groups_are_made_at_their_first_use_and_once_for_the_same_ranks(world: World) -> None:
    mesh = cube()
    mesh["dp", "tp"].flatten("wide")
    assert not world._groups
    groups = {mesh.get_group("wide"), mesh["wide"].get_group(), DeviceMesh("cpu", [4, 5, 6, 7]).get_group()}
    assert len(groups) == len(world._groups) == 1
    assert mesh.get_all_groups() == [mesh.get_group(name) for name in ("pp", "dp", "tp")]
    assert mesh["dp"].get_group() is mesh.get_group(1)


def test_a_rank_outside_can_ask_but_not_talk() -> None:
    with use_world(dry_world(1, 4)):
        mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("a", "b"))
        assert mesh.get_coordinate() is None
        assert (mesh.size(), mesh["b"].size(), mesh["b"].shape) == (2, 2, (2,))
        for ask in (mesh.get_all_groups, mesh["b"].get_local_rank, lambda: mesh.mesh, lambda: mesh.axis_group(0)):
            with pytest.raises(NotInMeshError, match=r"rank 1 is not in the mesh[\s\S]*\[0, 2\]"):
                ask()


def test_from_group_takes_the_groups_that_it_is_given(world: World) -> None:
    mesh = cube()
    groups = [mesh.get_group("dp"), mesh.get_group("tp")]
    plane = DeviceMesh.from_group(groups, "cpu", [[4, 5], [6, 7]], mesh_dim_names=("x", "y"))
    assert plane.get_all_groups() == groups
    line = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("y",))
    assert line.ranks == (4, 5)
    assert line.get_group() is groups[1]
    with pytest.raises(MeshError, match="groups"):
        DeviceMesh.from_group(groups, "cpu")
    with pytest.raises(MeshError, match=r"along axis 0 lie ranks \[5, 7\]"):
        DeviceMesh.from_group(groups[::-1], "cpu", [[4, 5], [6, 7]])


def test_the_innermost_mesh_is_current_and_exceptions_leave_it(world: World) -> None:
    outer, inner = cube(), cube()["tp"]
    assert current_mesh() is None
    with outer:
        with pytest.raises(KeyError), inner as entered:  # noqa: PT012
            assert current_mesh() is entered is inner
            raise KeyError
        assert current_mesh() is outer
        with use_world(dry_world(0, 8)):
            assert current_mesh() is None
    assert current_mesh() is None


def test_the_current_mesh_is_that_of_the_thread(world: World) -> None:
    def look() -> None:
        with use_world(world):
            seen.append(current_mesh())

    seen: list[DeviceMesh | None] = []
    with cube():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [None]


CPU = "cpu"


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: DeviceMesh(CPU, [0, 1, 0]), MeshError, r"duplicate ranks \[0\]"),
        (lambda: DeviceMesh(CPU, []), MeshError, "at least one"),
        (lambda: DeviceMesh(CPU, 3), MeshError, "at least one axis"),
        (lambda: DeviceMesh(CPU, [[0, 1], [2]]), MeshError, "different lengths"),
        (lambda: DeviceMesh(CPU, [0, 9]), MeshError, r"rank 9[\s\S]*8 ranks, 0 to 7"),
        (lambda: DeviceMesh(CPU, [0, -1]), MeshError, "-1"),
        (lambda: DeviceMesh(CPU, torch.tensor([0.0, 1.0])), MeshError, "integers"),
        (lambda: init_device_mesh(CPU, (3, 4)), MeshError, r"12 ranks[\s\S]*8 ranks"),
        (lambda: init_device_mesh(CPU, (0, 2)), MeshError, r"\(0, 2\)"),
        (lambda: init_device_mesh(CPU, ()), MeshError, "shape"),
        (lambda: init_device_mesh(CPU, (2.0,)), MeshError, r"2\.0"),
        (lambda: init_device_mesh(CPU, (True, 2)), MeshError, "True"),
        (lambda: init_device_mesh("cuda:0", (2,)), MeshError, "'cuda:0'"),
        (lambda: init_device_mesh("tpux", (2,)), MeshError, "'tpux'"),
        (lambda: init_device_mesh(CPU, (2,), mesh_dim_names=("a", "b")), AxisNameError, "2 names for 1 axes"),
        (lambda: init_device_mesh(CPU, (2, 2), mesh_dim_names=("a", "a")), AxisNameError, "unique"),
        (lambda: init_device_mesh(CPU, (2,), mesh_dim_names=("",)), AxisNameError, "empty"),
        (
            lambda: init_device_mesh(CPU, (2,), mesh_dim_names=("a",), backend_override={0: "x", "a": "y"}),
            AxisError,
            "twice",
        ),
        (lambda: init_device_mesh(CPU, (2,), backend_override={"b": "x"}), AxisError, "b"),
        (lambda: cube()["nope"], AxisError, r"'nope'[\s\S]*'pp', 'dp', 'tp'"),
        (lambda: cube()["tp", "dp"], AxisError, r"order[\s\S]*\['dp', 'tp'\]"),
        (lambda: cube()["tp", "tp"], AxisError, "twice"),
        (lambda: cube()[0], AxisError, "0"),
        (lambda: cube()["dp"]["tp"], AxisError, "'tp'"),
        (lambda: init_device_mesh(CPU, (2,))["a"], AxisError, "without names"),
        (lambda: cube().axis(3), AxisError, "3"),
        (lambda: cube().get_group(), AxisError, "mesh_dim"),
        (lambda: cube().get_local_rank(), AxisError, "mesh_dim"),
        (lambda: cube()["pp", "dp"].flatten("tp"), AxisNameError, "'tp' is taken"),
        (lambda: cube().unflatten("tp", (3, 2), ("a", "b")), MeshError, "product of the sizes is 6, the axis has 2"),
        (lambda: cube().unflatten("nope", (1, 2), ("a", "b")), AxisError, "nope"),
        (lambda: cube().unflatten("tp", (1, 2), ("a", "pp")), AxisNameError, "pp"),
        (lambda: cube().unflatten("tp", (1, 2)), AxisNameError, "name all axes"),
        (lambda: DeviceMesh.concatenate([cube()["tp"], cube()["dp", "tp"]]), MeshError, "overlap"),
        (lambda: DeviceMesh.concatenate([cube()["tp"], init_device_mesh(CPU, (2,))]), MeshError, "one mesh"),
    ],
)
def test_bad_arguments(world: World, make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_flattened_name_keeps_its_meaning(world: World) -> None:
    mesh = cube()
    first = mesh["pp", "dp"].flatten("f")
    with pytest.raises(AxisNameError, match="'f' is taken"):
        mesh["dp", "tp"].flatten("f")
    assert mesh["f"] is first
    assert mesh["tp"].flatten() is mesh["tp"]
    assert mesh["tp"].flatten("tp") is mesh["tp"]
    assert mesh["tp"].flatten("alias").ranks == mesh["tp"].ranks


def test_a_mesh_of_65536_ranks_costs_nothing_per_rank() -> None:
    with use_world(dry_world(50_000, 65_536)):
        tracemalloc.start()
        began = time.perf_counter()
        mesh = init_device_mesh("cuda", (1024, 8, 8), mesh_dim_names=("dp", "cp", "tp"))
        for names in ("dp", "cp", "tp", ("dp", "cp"), ("dp", "tp"), ("cp", "tp")):
            mesh[names]
        flat = mesh["cp", "tp"].flatten()
        assert flat.get_coordinate() == (50_000 % 64,)
        took, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert flat.axis_group(0).ranks == tuple(range(49_984, 50_048))
    assert took < 0.1  # a tenth of this where nothing else runs
    assert peak < 200_000


def test_dropped_meshes_are_freed(world: World) -> None:
    def use(size: int) -> list[weakref.ref[DeviceMesh]]:
        mesh = init_device_mesh("cpu", (1, 2, size), mesh_dim_names=("a", "b", "c"))
        mesh["a", "b"].flatten("f").get_coordinate()
        return [weakref.ref(mesh), weakref.ref(mesh["f", "c"]), weakref.ref(mesh["a"])]

    dropped = [ref for size in range(1, 5) for ref in use(size)]
    gc.collect()
    assert [ref() for ref in dropped] == [None] * 12

"""The ranks agree on a mesh, or all are told who said what: over a store, and in the simulator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from shardwise.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    MeshMismatchError,
    ShardwiseError,
    WorldError,
)
from shardwise.mesh.agreement import Claim, Claims, check_claims, gather, seconds
from shardwise.mesh.mesh import DeviceMesh, init_device_mesh
from shardwise.mesh.store import StoreExchange
from shardwise.mesh.world import World, current_world, dry_world, use_world
from shardwise.sim import run

Make = Callable[[int], object]


def over_a_store(make: Make, size: int = 4, skip: tuple[int, ...] = ()) -> list[str]:
    """Let threads with a store in common call ``make(rank)`` as the ranks of a world; what each gets or raises."""

    def rank_of(rank: int) -> None:
        world = dry_world(rank, size)
        with use_world(World("process", rank, size, world._make_group, None, StoreExchange(store, rank))):
            results[rank] = outcome(lambda: make(rank))

    store, results = HashStore(), dict.fromkeys(range(size), "skipped")
    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size) if rank not in skip]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return [results[rank] for rank in range(size)]


def simulated(make: Make, size: int = 4) -> list[str]:
    return run(lambda: outcome(lambda: make(current_world().rank)), size)


def outcome(make: Callable[[], object]) -> str:
    try:
        return repr(make())
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


def others(make: Callable[[], object], instead: Callable[[], object], rank: int) -> Make:
    return lambda own: instead() if own == rank else make()


MISMATCHES = {
    "shape": (lambda: init_device_mesh("cpu", (2, 2)), lambda: init_device_mesh("cpu", (4,)), "'cpu', 4)"),
    "order": (lambda: DeviceMesh("cpu", [0, 1, 2, 3]), lambda: DeviceMesh("cpu", [0, 1, 3, 2]), "[0, 1, 3, 2]"),
    "names": (
        lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("a",)),
        lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("b",)),
        "b=4",
    ),
    "device type": (lambda: init_device_mesh("cpu", (4,)), lambda: init_device_mesh("cuda", (4,)), "'cuda', 4"),
    "backend": (
        lambda: init_device_mesh("cpu", (4,)),
        lambda: init_device_mesh("cpu", (4,), backend_override={0: "gloo"}),
        "gloo",
    ),
    "ranks": (lambda: init_device_mesh("cpu", (2, 2)), lambda: init_device_mesh("cpu", (2,)), "'cpu', 2)"),
}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("ranks_of", [over_a_store, simulated])
def test_every_rank_is_told_who_passed_what(ranks_of: Callable[[Make], list[str]], what: str, rank: int) -> None:
    make, instead, text = MISMATCHES[what]
    told = ranks_of(others(make, instead, rank))
    assert len(set(told)) == 1
    assert told[0].startswith("MeshMismatchError: the ranks do not agree on the mesh")
    three = {0: "ranks 1-3: DeviceMesh", 3: "ranks 0-2: DeviceMesh"}[rank]
    assert three in told[0]
    assert f"rank {rank}: DeviceMesh" in told[0]
    assert text in told[0].split(f"rank {rank}: ")[1]


@pytest.mark.parametrize("ranks_of", [over_a_store, simulated])
def test_meshes_of_some_ranks(ranks_of: Callable[[Make], list[str]]) -> None:
    def members_only(rank: int) -> object:
        pair = DeviceMesh("cpu", [rank // 2 * 2, rank // 2 * 2 + 1])
        if rank < 2:
            DeviceMesh("cpu", [1, 0])
        return init_device_mesh("cpu", (2, 2)), pair.ndim

    def everybody(rank: int) -> object:
        return [DeviceMesh("cpu", ranks).get_coordinate() is None for ranks in ([0, 2], [1, 3], [3])]

    assert ranks_of(members_only) == ["(DeviceMesh('cpu', 2, 2), 1)"] * 4
    assert ranks_of(everybody) == [repr([bool(rank % 2), not rank % 2, rank != 3]) for rank in range(4)]


@pytest.mark.parametrize("ranks_of", [over_a_store, simulated])
def test_a_rank_outside_hears_what_those_inside_agreed_on(ranks_of: Callable[[Make], list[str]]) -> None:
    def make(rank: int) -> object:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("b",) if rank == 3 else ("a",))

    told = ranks_of(make)
    assert told[:3] == ["DeviceMesh('cpu', a=2)"] * 3
    assert told[3].startswith("MeshMismatchError")
    assert "ranks 0-1: DeviceMesh('cpu', a=2)" in told[3]
    assert "rank 3: DeviceMesh('cpu', b=2)" in told[3]


def test_after_a_mismatch_the_ranks_can_go_on() -> None:
    def make(rank: int) -> object:
        with pytest.raises(MeshMismatchError):
            init_device_mesh("cpu", (4, 1) if rank else (1, 4))
        return init_device_mesh("cpu", (4, 1))

    assert over_a_store(make) == simulated(make) == ["DeviceMesh('cpu', 4, 1)"] * 4


def test_ranks_that_never_come_are_named_and_nobody_hangs() -> None:
    began = time.perf_counter()
    told = over_a_store(lambda rank: init_device_mesh("cpu", (2, 2), timeout=0.3), skip=(1, 3))
    assert time.perf_counter() - began < 3
    assert told[0] == told[2]
    assert told[0].startswith("CollectiveTimeoutError: ranks 1, 3 did not come within 0.3 s")
    assert "ranks 0, 2: DeviceMesh('cpu', 2, 2)" in told[0]


def test_a_late_rank_is_told_what_the_others_were_told() -> None:
    def make(rank: int) -> object:
        if rank == 2:
            time.sleep(0.8)
        return init_device_mesh("cpu", (2, 2), timeout=0.2)

    told = over_a_store(make)
    assert len(set(told)) == 1
    assert "rank 2 did not come within 0.2 s" in told[0]


def test_a_slow_rank_is_waited_for() -> None:
    def make(rank: int) -> object:
        if rank == 2:
            time.sleep(1.2)  # long enough for the others to look where it is, more than once
        return init_device_mesh("cpu", (2, 2), timeout=20)

    assert over_a_store(make) == ["DeviceMesh('cpu', 2, 2)"] * 4


def test_the_simulator_knows_at_once_that_a_rank_never_comes() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 waits at .*DeviceMesh\('cpu', 2, 2\) \(not made by rank 3\)"):
        run(lambda: current_world().rank == 3 or init_device_mesh("cpu", (2, 2)), 4)


class Counting:
    """An exchange that everybody agrees in."""

    def __init__(self) -> None:
        self.calls: list[tuple[Claim, float]] = []

    def __call__(self, claim: Claim, timeout: float) -> Claims:
        self.calls.append((claim, timeout))
        return Claims({claim.text: claim.ranks}, {})


@pytest.fixture
def exchange() -> object:
    counting, dry = Counting(), dry_world(1, 4)
    with use_world(World("process", 1, 4, dry._make_group, None, counting)):
        yield counting


def test_a_mesh_made_a_second_time_or_cut_from_another_costs_no_exchange(exchange: Counting) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert [claim.ranks for claim, _ in exchange.calls] == [(0, 1, 2, 3)]
    assert DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b")) is mesh
    mesh["a"], mesh.flatten("c"), mesh.unflatten("a", (1, 2), ("x", "y")), mesh._get_all_submeshes("a")
    del mesh
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert len(exchange.calls) == 1


def test_the_check_can_be_switched_off_and_its_limit_set(exchange: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    init_device_mesh("cpu", (4,), check=False)
    init_device_mesh("meta", (4,))
    DeviceMesh("cpu", [1])
    monkeypatch.setenv("SHARDWISE_MESH_CHECK", "0")
    init_device_mesh("cpu", (2, 2))
    assert not exchange.calls
    monkeypatch.setenv("SHARDWISE_MESH_CHECK", "1")
    init_device_mesh("cpu", (1, 4))
    monkeypatch.setenv("SHARDWISE_MESH_TIMEOUT", "7.5")
    init_device_mesh("cpu", (2, 2))
    init_device_mesh("cpu", (4, 1), timeout=3)
    assert [timeout for _, timeout in exchange.calls] == [60, 7.5, 3]
    monkeypatch.setenv("SHARDWISE_MESH_TIMEOUT", "soon")
    with pytest.raises(WorldError, match="'soon'"):
        seconds()


def test_two_threads_that_make_the_same_mesh_exchange_once() -> None:
    def make(rank: int) -> object:
        def again() -> None:
            with use_world(world):
                made.append(init_device_mesh("cpu", (2, 2), timeout=10))

        world, made = current_world(), []
        threads = [threading.Thread(target=again) for _ in range(rank + 1)]  # as many as it likes
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(set(made))

    assert over_a_store(make) == ["1"] * 4


def test_claims_that_look_alike_are_told_apart() -> None:
    table = list(range(40))
    swapped = [*table[:20], 21, 20, *table[22:]]
    told = over_a_store(lambda rank: DeviceMesh("cpu", table if rank else swapped), 40)
    assert len(set(told)) == 1
    assert "rank 0: DeviceMesh('cpu', 40, ranks=[0, 1, ..., 39])" in told[0]
    assert "ranks 1-39: DeviceMesh('cpu', 40)" in told[0]
    assert gather([(0, "d", "mesh"), (1, "e", "mesh"), (2, "d", "mesh")]) == {"mesh": [0, 2], "mesh (digest e)": [1]}


def test_a_mesh_that_all_made_while_one_is_absent_is_no_mismatch() -> None:
    check_claims(Claims({"m": [0, 1]}, {}), 1)
    with pytest.raises(CollectiveTimeoutError, match="rank 2: waits for others"):
        check_claims(Claims({"m": [0, 1]}, {2: "waits for others to make n"}), 1)
    with pytest.raises(MeshMismatchError, match="rank 2: has not come"):
        check_claims(Claims({"m": [0], "n": [1]}, {2: ""}), 1)

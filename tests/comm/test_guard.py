"""Mismatched and missing calls end in the named error on every rank, which says who called what and where."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.gloo import run_gloo
from torch.distributed import HashStore

from shardwise import collectives as c
from shardwise import debug
from shardwise.comm import guard as comm_guard
from shardwise.comm import wire
from shardwise.comm.guard import Desk, Guard
from shardwise.errors import CollectiveMismatchError, ShardwiseError, WorldError
from shardwise.mesh.world import World, current_world, dry_world, use_world

ONES = torch.ones(4, 2)
Program = Callable[[int], object]


def over_a_store(program: Program, size: int = 3, skip: tuple[int, ...] = (), **options: object) -> list[str]:
    """Let threads with a store in common run ``program(rank)`` as guarded ranks, moving no data; the errors."""

    def run(rank: int) -> None:
        world = World("process", rank, size, dry_world(rank, size)._make_group, None, lambda claim, timeout: None)
        world.memory[Desk] = desks[rank] = Desk(store, rank)
        with use_world(world), wire.observing(Guard(**{"timeout": 0.6, **options})):
            results[rank] = outcome(lambda: program(rank))

    store, results = HashStore(), dict.fromkeys(range(size), "skipped")
    desks: dict[int, Desk] = {}
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size) if rank not in skip]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    over_a_store.keys = store.num_keys()
    return [results[rank] for rank in range(size)]


def outcome(program: Callable[[], object]) -> str:
    try:
        program()
        return "done"
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


def everything(rank: int) -> None:
    x = torch.ones(6, 2, requires_grad=True)
    c.all_reduce(x, "sum", None).sum().backward()
    c.all_gather_tensor(x, 1, None), c.reduce_scatter_tensor(x, "max", 0, None), c.permute_tensor(x, [1, 2, 0], None)
    c.broadcast(x, 2, [2, 0, 1]), c.all_to_all_single(x, [2, 2, 2], [2, 2, 2], None)
    sent = [[1, 2, 3], [0, 6, 0], [5, 0, 1]]
    c.all_to_all_single(x, [row[rank] for row in sent], sent[rank], None)
    c.all_reduce_coalesced([x, x[0]], "avg", None), c.all_reduce(x, "sum", [0, 1, 2])
    if rank != 1:
        c.all_reduce(x[:3], "sum", [0, 2])


def test_what_fits_passes_and_leaves_little() -> None:
    few = over_a_store(everything), over_a_store.keys
    many = over_a_store(lambda rank: [everything(rank) for _ in range(3)]), over_a_store.keys
    assert few[0] == many[0] == ["done"] * 3
    assert many[1] <= few[1] + 20


# what ranks 0 and 1 do, and what rank 2 does instead; words of the error
MISMATCHES: dict[str, tuple[Callable[[], object], Callable[[], object], tuple[str, ...]]] = {
    "shape": (
        lambda: c.all_reduce(ONES, "sum", None),
        lambda: c.all_reduce(ONES[1:], "sum", None),
        ("float32[4, 2]", "float32[3, 2]"),
    ),
    "dtype": (
        lambda: c.all_reduce(ONES, "sum", None),
        lambda: c.all_reduce(ONES.int(), "sum", None),
        ("float32[4, 2]", "int32[4, 2]"),
    ),
    "reduction": (
        lambda: c.all_reduce(ONES, "sum", None),
        lambda: c.all_reduce(ONES, "max", None),
        ("all_reduce(sum)", "all_reduce(max)"),
    ),
    "op": (
        lambda: c.all_reduce(ONES, "sum", None),
        lambda: c.all_gather_tensor(ONES, 0, None),
        ("all_reduce(sum)", "all_gather of"),
    ),
    "source": (lambda: c.broadcast(ONES, 0, None), lambda: c.broadcast(ONES, 1, None), ("index 0", "index 1")),
    "coalesced": (
        lambda: c.all_reduce_coalesced([ONES, ONES[0]], "sum", None),
        lambda: c.all_reduce_coalesced([ONES[0], ONES], "sum", None),
        ("float32[4, 2], float32[2]", "float32[2], float32[4, 2]"),
    ),
    "order of the group": (
        lambda: c.all_reduce(ONES, "sum", [0, 1, 2]),
        lambda: c.all_reduce(ONES, "sum", [2, 1, 0]),
        ("all_reduce(sum)",),
    ),
    "splits": (
        lambda: c.all_to_all_single(ONES[:3], [1, 1, 1], [1, 1, 1], None),
        lambda: c.all_to_all_single(ONES, [1, 1, 1], [1, 2, 1], None),
        ("rank 2 sends 2 rows to rank 1, which expects 1", "sending [1, 2, 1]"),
    ),
    "order of the calls": (
        lambda: (c.all_reduce(ONES, "sum", None), c.broadcast(ONES, 0, None)),
        lambda: (c.broadcast(ONES, 0, None), c.all_reduce(ONES, "sum", None)),
        ("all_reduce(sum)", "broadcast(from index 0)"),
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch(what: str) -> None:
    most, last, words = MISMATCHES[what]
    for error in over_a_store(lambda rank: last() if rank == 2 else most()):
        assert error.startswith("CollectiveMismatchError")
        assert all(f"rank {rank} calls" in error for rank in range(3))
        assert all(word in error for word in words), error
        assert error.count(__file__) >= 4  # its own line, and that of each rank


def test_order_of_groups_is_found_before_the_time_is_up() -> None:
    def program(rank: int) -> None:
        for group in [([0, 1], None), (None, [0, 1]), (None,)][rank]:
            c.all_reduce(ONES, "sum", group)

    errors = over_a_store(program, timeout=15)
    assert all(error.startswith("CollectiveMismatchError") for error in errors)


def test_lines_count_where_asked() -> None:
    def program(rank: int) -> None:
        if rank:
            c.all_reduce(ONES, "sum", None)
        else:
            c.all_reduce(ONES, "sum", None)

    assert over_a_store(program) == ["done"] * 3
    assert all("CollectiveMismatchError" in error for error in over_a_store(program, lines=True))


def test_missing_rank() -> None:
    def program(rank: int) -> None:
        c.all_reduce(ONES, "sum", None)
        if rank != 1:
            c.all_gather_tensor(ONES, 0, None)

    began = time.monotonic()
    first, _, last = over_a_store(program)
    assert time.monotonic() - began < 0.6 + 2
    for error in (first, last):
        assert error.startswith("CollectiveTimeoutError: rank 1 did not come within 0.6 s")
        assert f"rank 1 has not come; its latest call is all_reduce(sum) of float32[4, 2] at {__file__}" in error
        assert "rank 0 calls all_gather" in error
        assert "rank 2 calls all_gather" in error


def test_rank_that_never_came() -> None:
    first, second, _ = over_a_store(lambda rank: c.all_reduce(ONES, "sum", None), skip=(2,))
    assert "rank 2 has not come, nor to any call before" in first
    assert "rank 2 has not come, nor to any call before" in second


def test_after_a_refusal_the_ranks_may_go_on() -> None:
    def program(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError):
            c.all_reduce(ONES[rank:], "sum", None)
        c.all_reduce(ONES, "sum", None)

    assert over_a_store(program) == ["done"] * 3


def test_off_by_default_and_for_the_time_of_a_block() -> None:
    assert not wire._observers
    with debug.guard():
        assert wire._observers
    assert not wire._observers
    on = debug.guard(timeout=1)
    on.stop()
    on.stop()
    assert not wire._observers


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, wanted in (("1", True), ("true", True), ("0", False), ("off", False), ("", False)):
        monkeypatch.setenv("SHARDWISE_GUARD", word)
        assert comm_guard.is_wanted() is wanted
    monkeypatch.setenv("SHARDWISE_GUARD_TIMEOUT", "2.5")
    assert Guard().timeout == 2.5
    monkeypatch.setenv("SHARDWISE_GUARD_TIMEOUT", "soon")
    with pytest.raises(WorldError, match="soon"):
        Guard()


# --- on gloo

TIMEOUT = 4.0  # seconds: enough for ranks that have little of a busy machine
PATIENCE = TIMEOUT + 30  # to tell an answer from a hang


def timed(program: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    return outcome(program), time.monotonic() - began


def mistakes() -> list[tuple[str, float]]:
    rank = current_world().rank
    with debug.guard(timeout=PATIENCE):
        everything(rank)
    with debug.guard(timeout=TIMEOUT):
        found = [timed(most if rank < 2 else last) for most, last, _ in (MISMATCHES[what] for what in GLOO)]
        found.append(timed(lambda: rank == 1 or c.all_gather_tensor(ONES, 0, None)))
        if rank == 1:
            time.sleep(TIMEOUT + 2)
    assert c.all_reduce(ONES, "sum", None).sum().item() == 24  # the group is as good as new
    return found


GLOO = ["shape", "op", "splits", "order of the calls"]


@pytest.mark.gloo
def test_mistakes_on_gloo() -> None:
    for rank, found in enumerate(run_gloo(mistakes, 3)):
        for error, took in found[: len(GLOO)]:
            assert error.startswith("CollectiveMismatchError")
            assert took < PATIENCE
        error, took = found[-1]
        assert error.startswith("CollectiveTimeoutError: rank 1 did not come") or rank == 1
        assert took < PATIENCE


def mourning(dying: int, folder: str) -> None:
    rank = current_world().rank
    debug.guard(timeout=TIMEOUT)
    c.all_reduce(ONES, "sum", None).wait()
    if rank == dying:
        os._exit(1)
    told = timed(lambda: c.all_reduce(ONES, "sum", None))
    Path(folder, str(rank)).write_text(json.dumps(told))


@pytest.mark.gloo
@pytest.mark.parametrize("dying", [0, 1])  # rank 0 holds the store
def test_death_of_a_rank(dying: int, tmp_path: Path) -> None:
    run_gloo(mourning, 3, dying, str(tmp_path), dying={dying})
    for rank in {0, 1, 2} - {dying}:
        error, took = json.loads((tmp_path / str(rank)).read_text())
        assert error.startswith("CollectiveTimeoutError")
        assert f"rank {dying}" in error
        assert took < PATIENCE

"""Pictures: each cell names the ranks that hold it, as a count of who holds which element says."""

from __future__ import annotations

import re

import pytest
import torch

import shardwise
from shardwise import Partial, Placement, Replicate, Shard, StridedShard
from shardwise.debug import sharding_picture, visualize_sharding

ROW = re.compile(r"[│┃]")


def grid() -> shardwise.DeviceMesh:
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def picture(shape: tuple[int, ...], placements: list[Placement]) -> str:
    return sharding_picture(shardwise.zeros(shape, device_mesh=grid(), placements=placements))


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in ROW.split(line)[1:-1]] for line in lines]


def ranks_of(cell: str) -> set[int]:
    found: set[int] = set()
    for run in cell.removeprefix("ranks ").removeprefix("rank ").split(", "):
        if run:
            first, _, last = run.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def read(text: str, shape: tuple[int, int]) -> list[list[set[int]]]:
    """Who holds each element of a matrix, according to its picture."""
    (_, *columns), *rows = cells(text)
    held = [[set[int]() for _ in range(shape[1])] for _ in range(shape[0])]
    for label, *row in rows:
        for column, cell in zip(columns, row, strict=True):
            for line in range(*map(int, label.split(":"))):
                for place in range(*map(int, column.split(":"))):
                    held[line][place] = ranks_of(cell)
    return held


@pytest.mark.world(4)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(0)],
        [Replicate(), Replicate()],
        [StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), StridedShard(1, split_factor=3)],
    ],
    ids=repr,
)
def test_a_picture_shows_who_holds_each_element(
    world: shardwise.World, shape: tuple[int, int], placements: list[Placement]
) -> None:
    numbered = torch.arange(shape[0] * shape[1]).view(shape)
    local = shardwise.distribute_tensor(numbered, grid(), placements).to_local()
    held = read(picture(shape, placements), shape)
    mine = [rank_set for row in held for rank_set in row]
    assert {number for number, ranks in enumerate(mine) if world.rank in ranks} == set(local.flatten().tolist())


@pytest.mark.world(4)
def test_a_vector_is_a_row_and_a_scalar_a_cell() -> None:
    assert cells(picture((5,), [Shard(0), Replicate()])) == [["0:3", "3:5"], ["ranks 0-1", "ranks 2-3"]]
    assert cells(picture((), [Replicate(), Replicate()])) == [["ranks 0-3"]]


@pytest.mark.world(4)
def test_more_dims_fold_to_those_that_are_cut() -> None:
    text = picture((2, 4, 6), [Shard(2), Shard(1)])
    assert cells(text) == [["", "0:3", "3:6"], ["0:2", "rank 0", "rank 2"], ["2:4", "rank 1", "rank 3"]]
    assert text.splitlines()[-1] == "drawn are dims 1 (down) and 2 (across); no rank cuts the others"


@pytest.mark.world(8)
def test_three_cut_dims_are_refused() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2, 2))
    x = shardwise.zeros(2, 2, 2, device_mesh=mesh, placements=[Shard(0), Shard(1), Shard(2)])
    with pytest.raises(shardwise.PlacementError, match="3 of this tensor are cut"):
        sharding_picture(x)


@pytest.mark.world(4)
def test_notes_name_empty_ranks_and_pending_sums() -> None:
    assert picture((3, 1), [Shard(0), Shard(1)]).splitlines()[-1] == "no elements: ranks 1, 3"
    assert "pending sum over tp" in picture((4, 2), [Shard(0), Partial()])


@pytest.mark.world(4)
def test_many_pieces_are_left_out_of_the_middle() -> None:
    rows = cells(picture((64, 2), [Replicate(), StridedShard(0, split_factor=32)]))
    assert len(rows) == 1 + 16 + 1
    assert rows[9] == ["...", "..."]
    assert rows[-1][0] == "63:64"


@pytest.mark.parametrize("rich", [False, True])
def test_the_first_rank_of_the_mesh_prints(rich: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        x = shardwise.zeros(4, 2, device_mesh=grid(), placements=[Shard(0), Shard(1)])
        visualize_sharding(x, header="weight", use_rich=rich)

    shardwise.sim.run(body, 4)
    printed = capsys.readouterr().out
    assert printed.count("weight") == 1
    assert printed.count("f32[4@dp, 2@tp]") == 1
    assert cells(printed)[1] == ["0:2", "rank 0", "rank 1"]


def test_a_plain_tensor_is_refused() -> None:
    with pytest.raises(shardwise.PlacementError, match="only a DTensor has a sharding, not Tensor"):
        sharding_picture(torch.ones(2))

"""Where the elements of a distributed tensor lie, drawn as a grid of cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.debug.trace import as_text
from shardwise.errors import PlacementError, message
from shardwise.sharding.placement import Cut, Intervals, Partial
from shardwise.sharding.spec import Spec
from shardwise.tensor.dtensor import DTensor

__all__ = ["sharding_picture", "visualize_sharding"]

ELIDED = "..."
CELLS = 16  # along one dim; more are left out of the middle
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")

Coordinate = tuple[int, ...]


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which part of a distributed tensor, on the first rank of its mesh only.

    With ``use_rich`` in color. What is drawn is that of `sharding_picture`.
    """
    spec = _spec(dtensor)
    if spec.mesh.get_coordinate() != (0,) * spec.mesh.ndim:
        return
    if use_rich:
        Console().print(*filter(None, [header, _title(spec)]), _table(spec), *_notes(spec), sep="\n", markup=False)
    else:
        print("\n".join(filter(None, [header, _text(spec)])))


def sharding_picture(dtensor: DTensor) -> str:
    """Which ranks hold which part of a distributed tensor, as text; the same on every rank of the mesh.

    A cell is a block of the tensor that lies on the ranks it names. Two dims are drawn: those that are cut, others if
    fewer are. Raises `PlacementError` if more than two dims are cut.

    >>> import torch, shardwise, shardwise.sim
    >>> from shardwise.debug import sharding_picture
    >>> def body():
    ...     mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     placements = [shardwise.Shard(0), shardwise.Shard(1)]
    ...     return sharding_picture(shardwise.zeros(5, 4, device_mesh=mesh, placements=placements))
    >>> print(shardwise.sim.run(body, 4)[0])
    f32[5@dp, 4@tp] on DeviceMesh('cpu', dp=2, tp=2)
    ┌─────┬────────┬────────┐
    │     │ 0:2    │ 2:4    │
    ├─────┼────────┼────────┤
    │ 0:3 │ rank 0 │ rank 1 │
    ├─────┼────────┼────────┤
    │ 3:5 │ rank 2 │ rank 3 │
    └─────┴────────┴────────┘
    """
    return _text(_spec(dtensor))


def _spec(dtensor: DTensor) -> Spec:
    if not isinstance(dtensor, DTensor):
        what = f"only a DTensor has a sharding, not {type(dtensor).__name__}"
        raise PlacementError(message(what, do="distribute_tensor(tensor, mesh, placements)"))
    return dtensor._spec


def _text(spec: Spec) -> str:
    return "\n".join([_title(spec), as_text(_table(spec), width=400), *_notes(spec)])


def _title(spec: Spec) -> str:
    return f"{spec} on {spec.mesh}"


def _table(spec: Spec) -> Table:
    rows, columns = _drawn_dims(spec)
    down, across = _segments(spec, rows), _segments(spec, columns)
    holders = _holders(spec, (rows, down), (columns, across))
    table = Table(box=box.SQUARE, show_lines=True, show_header=columns is not None, header_style="")
    across_shown, down_shown = _shown(len(across)), _shown(len(down))
    if rows is not None:
        table.add_column("")
    for place in across_shown:
        table.add_column(ELIDED if place is None else _span(across[place]))
    for line in down_shown:
        cells = [_cell(None if None in (line, place) else holders.get((line, place), [])) for place in across_shown]
        label = [] if rows is None else [Text(ELIDED if line is None else _span(down[line]))]
        table.add_row(*label, *cells)
    return table


def _drawn_dims(spec: Spec) -> tuple[int | None, int | None]:
    """The dims that run down and across."""
    pairs = zip(spec.placements, spec.mesh.shape, strict=True)
    cut = sorted({placement.dim for placement, parts in pairs if isinstance(placement, Cut) and parts > 1})
    if len(cut) > 2:
        raise PlacementError(
            message(
                f"a picture has two dims, and {len(cut)} of this tensor are cut",
                asked=f"a picture of {spec}",
                do=f"redistribute one of the dims {cut} to Replicate() first, or take a slice",
            )
        )
    whole = [dim for dim in range(spec.ndim) if dim not in cut]
    drawn = sorted([*cut, *whole[: 2 - len(cut)]])
    if len(drawn) == 2:
        return drawn[0], drawn[1]
    return None, drawn[0] if drawn else None


def _segments(spec: Spec, dim: int | None) -> Intervals:
    """The finest pieces into which the ranks cut a dim."""
    if dim is None:
        return ((0, 1),)
    held = {bounds for coordinate in _coordinates(spec) for bounds in spec.intervals(dim, coordinate)}
    ends = sorted({0, spec.shape[dim], *(end for bounds in held for end in bounds)})
    return tuple(pairwise(ends)) or ((0, 0),)


def _coordinates(spec: Spec) -> Iterator[Coordinate]:
    return product(*map(range, spec.mesh.shape))


def _holders(
    spec: Spec, down: tuple[int | None, Intervals], across: tuple[int | None, Intervals]
) -> dict[tuple[int | None, int | None], list[int]]:
    """The ranks that hold each cell."""
    holders: dict[tuple[int | None, int | None], list[int]] = {}
    for rank, coordinate in zip(spec.mesh.ranks, _coordinates(spec), strict=True):
        if 0 in spec.local_shape(coordinate):
            continue
        for cell in product(_within(spec, *down, coordinate), _within(spec, *across, coordinate)):
            holders.setdefault(cell, []).append(rank)
    return holders


def _within(spec: Spec, dim: int | None, segments: Intervals, coordinate: Coordinate) -> list[int]:
    held = ((0, 1),) if dim is None else spec.intervals(dim, coordinate)
    return [
        place
        for place, (low, high) in enumerate(segments)
        if any(start <= low and high <= stop for start, stop in held)
    ]


def _shown(count: int) -> list[int | None]:
    if count <= CELLS:
        return list(range(count))
    return [*range(CELLS // 2), None, *range(count - CELLS // 2, count)]


def _cell(ranks: list[int] | None) -> Text:
    if ranks is None:
        return Text(ELIDED)
    return Text(_ranks(ranks), style=COLORS[min(ranks) % len(COLORS)]) if ranks else Text("")


def _span(segment: tuple[int, int]) -> str:
    return f"{segment[0]}:{segment[1]}"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: ``rank 3``, ``ranks 0-3, 8``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {listed}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {listed}"


def _notes(spec: Spec) -> Sequence[str]:
    """What the grid does not show."""
    notes = []
    if spec.ndim > 2:
        drawn = [dim for dim in _drawn_dims(spec) if dim is not None]
        notes.append(f"drawn are dims {drawn[0]} (down) and {drawn[1]} (across); no rank cuts the others")
    for placement, name, parts in zip(spec.placements, spec.mesh.axis_names, spec.mesh.shape, strict=True):
        if isinstance(placement, Partial) and parts > 1:
            notes.append(f"pending {placement.reduce_op} over {name}: each rank of {name} holds a term of its cells")
    empty = [
        rank
        for rank, coordinate in zip(spec.mesh.ranks, _coordinates(spec), strict=True)
        if 0 in spec.local_shape(coordinate)
    ]
    return [*notes, f"no elements: {_ranks(empty)}"] if empty else notes

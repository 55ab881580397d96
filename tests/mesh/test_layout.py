"""The laws of the layout algebra, at every coordinate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import MeshError
from shardwise.mesh.layout import Layout, Nested, RankMap

SIZES = st.recursive(st.integers(1, 4), lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=4)


def _strided(sizes: Nested, draw: st.DrawFn) -> Nested:
    if isinstance(sizes, int):
        return draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]))
    return tuple(_strided(entry, draw) for entry in sizes)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(SIZES)
    return Layout(sizes, _strided(sizes, draw))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout made of some of the digits of a mixed radix, and the number of integers that all digits reach."""
    radix = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    digits = list(zip(Layout.row_major(tuple(radix)).modes, itertools.count(), strict=False))
    chosen = draw(st.permutations(digits))[: draw(st.integers(1, len(radix)))]
    sizes, strides = zip(*(mode for mode, _ in chosen), strict=True)
    return Layout(sizes, strides), int(np.prod(radix))


@given(layouts())
def test_values_are_the_sums_of_strides_at_each_coordinate(layout: Layout) -> None:
    sizes, strides = zip(*layout.modes, strict=True)
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    expected = tuple(int(point) for point in np.array(strides) @ coordinates)
    assert layout.values() == expected
    assert tuple(layout(index) for index in range(layout.size)) == expected
    assert layout.cosize == 1 + max(expected)


@given(layouts())
def test_a_coordinate_has_one_index_for_each_axis(layout: Layout) -> None:
    every = itertools.product(*map(range, layout.shape))
    assert [layout(*coordinate) for coordinate in every] == list(layout.values())


@given(layouts())
def test_coalesce_keeps_the_function_and_is_its_normal_form(layout: Layout) -> None:
    made = layout.coalesce()
    assert made.values() == layout.values()
    assert made.coalesce() is made
    assert len(made.modes) <= len(layout.modes)
    assert all(left[1] != right[0] * right[1] for left, right in itertools.pairwise(made.modes))


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # most pairs do not compose
@given(layouts(), layouts())
def test_compose_is_one_after_the_other(outer: Layout, inner: Layout) -> None:
    try:
        made = outer.compose(inner)
    except MeshError:
        assume(False)
    assert made.values() == tuple(outer(point) for point in inner.values())
    assert made.shape == inner.shape or isinstance(inner.sizes, int)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 5))
def test_rows_of_a_grid_always_compose(sizes: list[int], axis: int, parts: int) -> None:
    grid = Layout.row_major(tuple(sizes))
    row = grid.axes[axis % len(sizes)]
    assert grid.compose(row).values() == row.values()
    assert Layout(6 * parts, 7).compose(Layout.row_major((parts, 2, 3))).values() == tuple(range(0, 42 * parts, 7))


def test_compose_refuses_what_is_no_layout() -> None:
    for outer, inner in [
        (Layout((2, 3), (10, 1)), Layout(3, 2)),  # 0, 2, 10: not evenly spaced
        (Layout((2, 2), (10, 1)), Layout((2, 2), (1, 1))),  # 1 + 1 carries from one mode to the next
        (Layout(4, 1), Layout(4, 2)),  # leaves the domain
    ]:
        with pytest.raises(MeshError, match=r"do not compose to a layout"):
            outer.compose(inner)


@given(tilings())
def test_a_layout_and_its_complement_tile_the_integers(tiling: tuple[Layout, int]) -> None:
    layout, size = tiling
    rest = layout.complement(size)
    assert sorted(Layout.join((rest, layout)).values()) == list(range(size))
    assert list(rest.values()) == sorted(rest.values())
    assert not layout.overlaps(rest)


@given(tilings())
def test_project_forgets_the_complement(tiling: tuple[Layout, int]) -> None:
    layout, size = tiling
    rest = layout.complement(size).values()
    for index, point in enumerate(layout.values()):
        assert {layout.project(point + other) for other in rest} == {index}


def test_complement_refuses_what_does_not_tile() -> None:
    for layout, size in [
        (Layout(4, 2), 12),
        (Layout((2, 2), (1, 3)), 12),
        (Layout(2, 0), 4),
        (Layout((2, 2), (1, 1)), 4),
    ]:
        with pytest.raises(MeshError, match="no complement"):
            layout.complement(size)


@given(tilings())
def test_divide_walks_over_tiles_and_within_them(tiling: tuple[Layout, int]) -> None:
    tile, size = tiling
    outer, inner = Layout(size, 3).divide(tile).axes
    assert inner.values() == tuple(3 * point for point in tile.values())
    walked = [first + then for first in outer.values() for then in inner.values()]
    assert sorted(walked) == list(range(0, 3 * size, 3))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_invert_is_the_way_back(sizes: list[int], random: object) -> None:
    axes = list(Layout.row_major(tuple(sizes)).axes)
    random.shuffle(axes)  # type: ignore[attr-defined]
    layout = Layout.join(axes)
    back = layout.invert()
    assert [back(layout(index)) for index in range(layout.size)] == list(range(layout.size))
    assert [layout(back(point)) for point in range(layout.size)] == list(range(layout.size))
    assert back.invert().values() == layout.values()


def test_invert_refuses_gaps() -> None:
    with pytest.raises(MeshError, match="no inverse"):
        Layout(4, 2).invert()


@given(layouts())
def test_find_is_the_first_index_with_a_value(layout: Layout) -> None:
    values = layout.values()
    for point in range(-2, layout.cosize + 2):
        assert layout.find(point) == (values.index(point) if point in values else None)


@pytest.mark.parametrize("sizes, strides", [(0, 1), (2, -1), ((2, 2), 1), ((2,), (1, 2)), (True, 1), (2.0, 1)])
def test_sizes_and_strides_are_checked(sizes: object, strides: object) -> None:
    with pytest.raises(MeshError):
        Layout(sizes, strides)  # type: ignore[arg-type]


@given(st.permutations(range(8)), st.sampled_from([(8,), (2, 4), (2, 2, 2), (4, 1, 2)]))
def test_a_rank_map_answers_for_any_order_of_ranks(ranks: list[int], shape: tuple[int, ...]) -> None:
    made = RankMap.read(ranks, shape)
    assert made.ranks(range(8)) == tuple(ranks)
    assert [made.position(rank) for rank in ranks] == list(range(8))
    assert made.position(8) is None
    assert made.largest == 7


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 9), st.integers(1, 3), st.randoms())
def test_regular_ranks_need_no_table(sizes: list[int], start: int, step: int, random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ranks = (start + step * np.arange(np.prod(sizes)).reshape(sizes)).transpose(order)
    made = RankMap.read(ranks.ravel().tolist(), ranks.shape)
    assert made.table is None
    assert made.ranks(range(ranks.size)) == tuple(ranks.ravel().tolist())
    assert [made.position(rank) for rank in ranks.ravel().tolist()] == list(range(ranks.size))
    assert made.position(start - 1) is None

"""Values: equal ones are one object, however they are made, copied, sent or shared."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.utils import _pytree as pytree

from shardwise import _value
from shardwise._value import derived, value


@value
class Point:
    x: int
    y: int = 0

    @derived
    def length(self) -> float:
        """The distance from the origin."""
        computed.append(self)
        return float(self.x**2 + self.y**2) ** 0.5


@value
class Path:
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))


@value
class Mark:
    pass


computed: list[Point] = []


def test_equal_fields_give_one_object() -> None:
    assert Point(1) is Point(1, 0) is Point(x=1, y=0)
    assert Point(1) != Point(2)
    assert Mark() is Mark()
    assert Path([Point(1), Point(2)]) is Path((Point(1), Point(2)))  # type: ignore[arg-type]
    assert {Point(1): "a"}[Point(1)] == "a"


def test_values_of_different_classes_differ() -> None:
    @value
    class Other:
        x: int
        y: int

    assert Other(1, 0) != Point(1, 0)


@pytest.mark.parametrize("made", [Point(3, 4), Path((Point(1), Point(2))), Mark()])
def test_copies_and_pickles_are_the_value_itself(made: object) -> None:
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(made, protocol)) is made


def test_fields_are_frozen_and_print() -> None:
    with pytest.raises(FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]
    assert repr(Point(1, 2)) == "Point(x=1, y=2)"


def test_what_is_derived_is_computed_once_for_all_equals() -> None:
    computed.clear()
    point = Point(6, 8)
    assert (point.length, Point(6, 8).length) == (10.0, 10.0)
    assert computed == [point]
    assert Point.length.__doc__ == "The distance from the origin."


def test_values_are_freed() -> None:
    gc.collect()
    before = len(_value._pool)
    kept = [Point(n, -n) for n in range(100, 200)]
    assert len(_value._pool) == before + 100
    del kept
    gc.collect()
    assert len(_value._pool) == before


def test_threads_get_the_same_object() -> None:
    def make() -> None:
        start.wait()
        found.append([Point(n, 7) for n in range(500)])

    start, found = threading.Barrier(4), list[list[Point]]()
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine is yours for row in found for mine, yours in zip(row, found[0], strict=True))


def test_torch_takes_values_for_constants() -> None:
    leaves, _ = pytree.tree_flatten((Point(1), torch.ones(1)))
    assert [leaf for leaf in leaves if isinstance(leaf, Point)] == []

    def double(x: torch.Tensor, point: Point) -> torch.Tensor:
        return x * point.x + Point(point.x, 5).y

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2), Point(3)).tolist() == [8.0, 8.0]

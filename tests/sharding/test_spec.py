"""Specs: where every element lies, against cutting a tensor with torch; the text form; what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch

from redistribute.layouts import coordinates, distributed, dry_mesh, placed, spec_of
from shardwise.errors import PlacementError
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard, StridedShard
from shardwise.sharding.spec import TensorMeta, dtype_name, normalize

STRIDED = StridedShard(0, split_factor=2)


@pytest.mark.parametrize("shape", [(12, 6), (5, 3), (1, 0)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)], ids=str)
def test_local_shapes_are_those_of_the_cut_tensor(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for placements in placed(2, 2, STRIDED):
        spec = spec_of(dry_mesh(mesh_shape), placements, shape)
        for coordinate, local in distributed(torch.zeros(shape), spec).items():
            assert spec.local_shape(coordinate) == tuple(local.shape), (spec, coordinate)


@pytest.mark.parametrize("placements", placed(1, 3, STRIDED, StridedShard(0, split_factor=3)), ids=str)
def test_intervals_hold_the_elements_of_the_cut_tensor(placements: tuple[Placement, ...]) -> None:
    for size in (0, 1, 7, 12):
        spec = spec_of(dry_mesh((2, 2, 2)), [Replicate() if p.is_partial() else p for p in placements], (size,))
        for coordinate, local in distributed(torch.arange(size), spec).items():
            held = [place for low, high in spec.intervals(0, coordinate) for place in range(low, high)]
            assert held == local.tolist(), (spec, coordinate)


def test_the_size_before_an_axis_is_what_the_axes_before_it_left() -> None:
    mesh = dry_mesh((2, 2, 2))
    spec = spec_of(mesh, [Shard(0), Shard(1), Shard(0)], (5, 9))
    for coordinate in coordinates(mesh.shape):
        left = torch.zeros(5).chunk(2)[coordinate[0]].numel()
        assert spec.size_before(0, coordinate) == 5
        assert spec.size_before(1, coordinate) == 9
        assert spec.size_before(2, coordinate) == left


def test_outside_the_mesh_nothing_is_held() -> None:
    assert spec_of(dry_mesh((2,)), [Shard(0)], (4, 6)).local_shape(None) == (0, 0)


@pytest.mark.parametrize(
    "placements, text",
    [
        ([Replicate(), Replicate()], "f32[8, 4]"),
        ([Shard(0), Replicate()], "f32[8@dp, 4]"),
        ([Shard(0), Shard(0)], "f32[8@dp@tp, 4]"),
        ([Shard(1), Partial()], "f32[8, 4@dp]{sum@tp}"),
        ([Partial("max"), Partial("max")], "f32[8, 4]{max@dp, max@tp}"),
        ([Replicate(), STRIDED], "f32[8@tp/2, 4]"),
    ],
)
def test_the_text_form(placements: list[Placement], text: str) -> None:
    assert repr(spec_of(dry_mesh((2, 4)), placements, (8, 4))) == text


def test_a_spec_is_a_value() -> None:
    spec = spec_of(dry_mesh((2, 4)), [Shard(0), Partial()], (8, 4))
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert spec.with_placements([Shard(0), Partial()]) is spec
    assert spec.with_placements([Replicate(), Replicate()]).is_replicated
    assert not spec.is_replicated
    assert (spec.shape, spec.ndim) == ((8, 4), 2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4)], ids=str)
def test_the_meta_of_a_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    meta = TensorMeta.of(tensor)
    assert (meta.shape, meta.stride, meta.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert TensorMeta.contiguous(shape, torch.bfloat16) is meta
    assert meta.nbytes == tensor.nbytes
    assert TensorMeta.of(torch.zeros(4, 3).t()).stride == (1, 3)


def test_names_of_dtypes() -> None:
    assert repr(TensorMeta.contiguous((2, 3), torch.int64)) == "i64[2, 3]"
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_normalize_counts_negative_dims_from_the_end() -> None:
    mesh = dry_mesh((2, 2, 2))
    given = [Shard(-1), StridedShard(-2, split_factor=2), Partial()]
    assert normalize(given, mesh, 3) == (Shard(2), StridedShard(1, split_factor=2), Partial())
    assert isinstance(normalize([Replicate()] * 3, mesh, 0), tuple)


@pytest.mark.parametrize(
    "placements, ndim, what",
    [
        ([Shard(0)], 2, "one placement for each mesh axis: 2, not 1"),
        ([Shard(0)] * 3, 2, "one placement for each mesh axis: 2, not 3"),
        ([Shard(2), Replicate()], 2, r"Shard\(dim=2\): dim out of range"),
        ([Shard(-3), Replicate()], 2, r"Shard\(dim=-3\): dim out of range"),
        ([Replicate(), Shard(0)], 0, "dim out of range"),
        ([Replicate(), "Shard(0)"], 2, "is not a placement"),
    ],
)
def test_normalize_refuses(placements: list[Placement], ndim: int, what: str) -> None:
    with pytest.raises(PlacementError, match=what) as raised:
        normalize(placements, dry_mesh((2, 2)), ndim)
    assert "dp=2, tp=2" in str(raised.value)

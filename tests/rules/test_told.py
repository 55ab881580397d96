"""Which sizes a meaning was told from: a change of the others cannot change it."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise.rules.rule import resolve
from shardwise.rules.table import lookup, make_call
from shardwise.rules.told import told_from
from shardwise.sharding.spec import TensorMeta
from shardwise.tensor.metas import output_metas

aten = torch.ops.aten


def meta(*shape: int) -> TensorMeta:
    return TensorMeta.contiguous(shape, torch.float32)


def told(op, *args: object) -> tuple[tuple[int, int], ...] | None:
    rule = lookup(op)
    assert rule is not None
    call = make_call(op, args, {}, output_metas(op, args, {}))
    return told_from(rule, call, resolve(rule, call)[1])


def test_a_text_looks_at_nothing() -> None:
    assert told(aten.mm.default, meta(4, 6), meta(6, 8)) == ()


def test_names_of_dims_are_no_sizes() -> None:
    assert told(aten._softmax.default, meta(4, 6), 1, False) == ()
    assert told(aten.sum.dim_IntList, meta(4, 6, 8), [1], True) == ()
    assert told(aten.permute.default, meta(4, 6, 8), [2, 0, 1]) == ()


def test_a_slice_looks_at_the_dim_that_it_cuts() -> None:
    assert told(aten.slice.Tensor, meta(4, 6), 1, 2, 4) == ((0, 1),)


def test_a_view_looks_at_all_sizes() -> None:
    assert told(aten.view.default, meta(4, 6), [-1, 2, 3]) == ((0, 0), (0, 1))


def test_to_see_that_a_size_is_not_one_is_no_look() -> None:
    assert told(aten.squeeze.dim, meta(4, 1), 0) == ()
    assert told(aten.expand.default, meta(4, 1), [4, 5]) == ()


def test_operands_are_counted_through_lists() -> None:
    assert told(aten.cat.default, [meta(4, 6), meta(5, 6)], 0) == ((0, 0), (1, 0))


def test_strides_are_no_sizes() -> None:
    assert told(aten.as_strided.default, meta(4, 6), [2, 6], [6, 1]) is None


@pytest.mark.parametrize("seed", range(4))
def test_other_sizes_do_not_change_what_is_told(seed) -> None:
    draw = random.Random(seed)
    size = lambda: draw.choice([2, 3, 4, 6, 8, 12])  # noqa: E731
    calls = [
        (aten.slice.Tensor, lambda x: (x, draw.choice([0, 1]), draw.choice([0, 2]), draw.choice([2, 4, 100]))),
        (aten.view.default, lambda x: (x, [-1, draw.choice([1, x.shape[1]])])),
        (aten.native_layer_norm.default, lambda x: (x, [x.shape[1]], None, None, 1e-5)),
        (aten.repeat.default, lambda x: (x, [draw.choice([1, 2]), 3])),
        (aten.unfold.default, lambda x: (x, 1, 2, draw.choice([1, 2]))),
        (aten.cat.default, lambda x: ([x, meta(*x.shape)], draw.choice([0, 1]))),
    ]
    for op, arguments in calls * 20:
        args = arguments(meta(size(), size()))
        found, rule = told(op, *args), lookup(op)
        if found is None or rule is None:
            continue
        kept = {dim for _, dim in found}
        x = args[0][0] if isinstance(args[0], list) else args[0]
        other = meta(*(own if dim in kept else size() for dim, own in enumerate(x.shape)))
        changed = ([other] * 2 if isinstance(args[0], list) else other, *args[1:])
        if op is aten.native_layer_norm.default:
            changed = (other, [other.shape[1]], *args[2:])
        if op is aten.view.default and other is not x:
            continue
        meanings = [resolve(rule, make_call(op, given, {}, ()))[1] for given in (args, changed)]
        assert meanings[0] == meanings[1], (op, args, changed)

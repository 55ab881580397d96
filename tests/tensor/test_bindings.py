"""Bindings in place of overloads: the same results, and the same arguments written to."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import foreach_unary_op_db, op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.tensor.bindings import BINDINGS, casting, direct

aten = torch.ops.aten
MANY = 4  # calls of an overload that are tried
X, LIST = torch.rand(3, 4) + 1, [torch.rand(2) + 1, torch.rand(3) + 1]
BESIDE = [  # what the database does not call by itself
    (aten.add.Scalar, (X, 2.0, 3), {}),
    (aten.sub.Scalar, (X, 2.0, 3), {}),
    (aten.rsub.Scalar, (X, 2.0, 3), {}),
    (aten.add_.Scalar, (X, 2.0, 3), {}),
    (aten.add_.Tensor, (X, X), {"alpha": 2}),
    (aten.addcmul_.default, (X, X, X), {"value": 2}),
    (aten.addcdiv_.default, (X, X, X), {"value": 2}),
    (aten.lerp_.Scalar, (X, X, 0.5), {}),
    (aten._foreach_add_.Scalar, (LIST, 2.0), {}),
    (aten._foreach_add_.List, (LIST, LIST), {"alpha": 2}),
    (aten._foreach_sub_.ScalarList, (LIST, [1.0, 2.0]), {}),
    (aten._foreach_mul_.Tensor, (LIST, torch.tensor(2.0)), {}),
    (aten._foreach_div_.ScalarList, (LIST, [1.0, 2.0]), {}),
    (aten._foreach_addcmul_.Scalar, (LIST, LIST, LIST, 2.0), {}),
    (aten._foreach_addcdiv_.ScalarList, (LIST, LIST, LIST, [1.0, 2.0]), {}),
    (aten._foreach_lerp_.Scalar, (LIST, LIST, 0.5), {}),
    (aten._foreach_norm.Scalar, (LIST, 1), {"dtype": torch.float64}),
]


class Heard(TorchDispatchMode):
    """The calls of operators that have a binding, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[object, list] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = self.calls.setdefault(func, [])
        if len(known) < MANY and direct(func) is not func._op:
            known.append((func, copy.deepcopy(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def samples(info: OpInfo) -> Iterator:
    for dtype in (torch.float32, torch.int64):
        if dtype in info.supported_dtypes("cpu"):
            return islice(info.sample_inputs("cpu", dtype), 3)
    return iter(())


@pytest.fixture(scope="module")
def heard() -> list:
    names = {name.strip("_") for name in BINDINGS}
    infos = [info for info in (*op_db, *foreach_unary_op_db) if info.name.split(".")[-1].strip("_") in names]
    mode = Heard()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run, sample in [(info, sample) for info in infos for sample in samples(info)]:
            with mode:
                run(sample.input, *sample.args, **sample.kwargs)
    return [call for calls in mode.calls.values() for call in calls]


def check(op, args, kwargs) -> None:
    outcomes = []
    for run in (op, direct(op)):
        own, named = copy.deepcopy((args, kwargs))
        torch.manual_seed(0)
        returned = run(*own, **named)
        results = returned if op._schema.returns else None  # a binding returns the list that it has written to
        outcomes.append([leaf for leaf in tree_leaves((results, own)) if isinstance(leaf, torch.Tensor)])
    torch.testing.assert_close(*outcomes, equal_nan=True, rtol=0, atol=0, msg=lambda text: f"{op}: {text}")


def test_a_binding_gives_what_the_overload_gives(heard) -> None:
    assert len({op for op, _, _ in heard}) > 80
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is it called in a way that torch has given up
        for call in [*heard, *BESIDE]:
            check(*call)


ARITHMETIC = [
    *(f"{name}{end}.Tensor" for name in ("add", "sub", "mul", "div") for end in ("", "_")),
    *(f"_foreach_{name}{end}.Scalar" for name in ("add", "sub", "mul", "div") for end in ("", "_")),
    *(f"_foreach_{name}{end}.ScalarList" for name in ("add", "sub", "mul", "div") for end in ("", "_")),
]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_number_that_is_cast_once_is_the_number(name) -> None:
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    for number in (0.1, -3.3, 1e-45, 1e300, float("inf"), float("nan"), 0.0, -0.0, 1 / 3):
        x = torch.tensor([0.1, -0.0, 3e38, 1e-42, float("inf"), -7.7])
        other = [number, 0.7] if overload == "ScalarList" else number
        args = [[x, x[:2].view(2, 1)] if "foreach" in name else x, other]
        chosen = casting(op, other, {torch.float32})(args)
        outcomes = []
        for taken in (other, chosen):
            own = copy.deepcopy(args[0])
            outcomes.append([direct(op)(own, taken), own])
        torch.testing.assert_close(*outcomes, equal_nan=True, rtol=0, atol=0)
        signs = [[leaf.signbit() for leaf in tree_leaves(outcome)] for outcome in outcomes]
        assert all(map(torch.equal, *signs))

"""Every strategy that a rule claims, tried on what torch's operator database makes the operators do.

The samples of each operator run under a mode that records the aten calls below them; each call whose operator has a
rule is judged on axes of two and three ranks, whose shards the samples' own sizes make even, uneven and empty.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.rules import algebra, checker
from shardwise.rules.rule import Rule
from shardwise.rules.table import lookup

aten = torch.ops.aten
CHUNKS = 16
SAMPLES = 12  # of an operator and dtype
CALLS = 4  # with different shapes or arguments, of an aten operator and dtype
DTYPES = (torch.float64, torch.int64, torch.bool)


class Recording(TorchDispatchMode):
    """Keeps the aten calls that happen below it, with copies of what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and lookup(func) is not None:
            copies = tree_map_only(torch.Tensor, lambda item: item.detach().clone(), (args, kwargs))
            self.calls.append((func, *copies))
        return func(*args, **kwargs)


def recorded(info, dtype) -> Iterator[tuple]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # not `info.sample_inputs`, which inspects the stack each time
        for sample in islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), SAMPLES):
            with Recording() as recording:
                try:
                    info(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # of a sample, not of ours
                    continue
            yield from recording.calls


def signature(item: object) -> object:
    if isinstance(item, torch.Tensor):
        return tuple(item.shape), item.dtype
    return tuple(map(signature, item)) if isinstance(item, list | tuple) else repr(item)


def distinct(calls: Iterator[tuple], seen: Counter) -> Iterator[tuple]:
    """At most `CALLS` of an operator and dtype, no two alike."""
    for op, args, kwargs in calls:
        key = op, signature(args), signature(sorted(kwargs.items()))
        kind = op, next((item.dtype for item in args if isinstance(item, torch.Tensor)), None)
        if not seen[key] and seen[kind] < CALLS:
            seen.update([key, kind])
            yield op, args, kwargs


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_every_claimed_strategy_gives_the_whole_answer(chunk: int) -> None:
    seen: Counter = Counter()
    wrong: list[str] = []
    infos = sorted(op_db, key=lambda info: (info.name, info.variant_test_name))[chunk::CHUNKS]
    for info, dtype in ((info, dtype) for info in infos for dtype in DTYPES if dtype in info.dtypes):
        for op, args, kwargs in distinct(recorded(info, dtype), seen):
            wrong += checker.problems(op, args, kwargs)
    assert not wrong, "\n".join([f"{len(wrong)} strategies are wrong", *wrong[:30]])
    assert len(seen) > 100, "hardly anything was tried"


# --- the judge is judged: rules that look right and are not


def max_with_indices(x, dim, keepdim=False):
    return f"{algebra.contracted(x, dim, keepdim)}, {algebra.contracted(x, dim, keepdim).partition('->')[2]}"


def sizes_kept(x, dim):
    return "a b c -> a c"


def squeezed_everywhere(call, placing):
    return lambda x, dim: aten.squeeze.default(x)


WRONG = {
    "max.dim finishes indices like values": (
        aten.max.dim,
        (torch.randn(4, 6), 1),
        Rule(max_with_indices, reduce="max"),
    ),
    "min reduces with max": (aten.amin.default, (torch.randn(4, 6), [0]), Rule(algebra.given_dims, reduce="max")),
    "rounding is linear": (aten.div.Tensor_mode, (torch.randn(4), torch.full((4,), 0.3)), Rule("... / ... -> ...")),
    "local ones are squeezed": (
        aten.squeeze.dim,
        (torch.randn(2, 1, 5), 1),
        Rule(sizes_kept, local=squeezed_everywhere),
    ),
    "mean of means": (aten.mean.dim, (torch.randn(5, 3), [0]), Rule(algebra.given_dims, reduce="avg")),
    "a cut softmax": (aten._softmax.default, (torch.randn(4, 6), 1, False), Rule("f(a b) -> a b")),
    "a scan of parts": (aten.cumsum.default, (torch.randn(6), 0), Rule("a -> a")),
    "any sum passes a square": (aten.square.default, (torch.randn(6),), Rule("... -> ...")),
    "a maximum passes a falling function": (aten.neg.default, (torch.randn(6),), Rule("up(...) -> ...")),
    "the bias is added by every rank": (
        aten.addmm.default,
        (torch.randn(4), torch.randn(2, 6), torch.randn(6, 4)),
        Rule("f(n, m k, k n) -> m n"),
    ),
    "an empty shard has no maximum": (aten.amax.default, (torch.randn(2), [0]), Rule(algebra.given_dims, reduce="max")),
}
OPTIONS = {"rounding is linear": {"rounding_mode": "floor"}}


@pytest.mark.parametrize("what", WRONG)
def test_the_judge_names_a_wrong_rule(what: str) -> None:
    op, args, rule = WRONG[what]
    found = checker.problems(op, args, OPTIONS.get(what, {}), rule=rule)
    assert found
    assert all(str(op) in problem for problem in found)
    right = lookup(op)
    assert right is None or not checker.problems(op, args, OPTIONS.get(what, {}), rule=right)

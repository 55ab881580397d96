"""`check_rule` lets right rules pass and names what is wrong with others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwise import ArgumentError, Partial, Replicate, RuleError, Shard, WrongRuleError, register_sharding
from shardwise.rules.table import _user_rules, register_rule, unregister_rule
from shardwise.testing import check_rule

NAME = "shardwise_check::op"
X = torch.arange(24.0).view(4, 6)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Where a test defines its operator; the rule is forgotten afterwards."""
    with torch.library._scoped_library("shardwise_check", "FRAGMENT") as made:
        yield made
    if NAME in _user_rules:
        unregister_rule(NAME)


def define(library, schema: str, run) -> None:
    library.define(f"op{schema}")
    library.impl("op", run, "CompositeExplicitAutograd")


def test_a_right_rule_passes(library) -> None:
    define(library, "(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w)
    register_rule(NAME, "m k * k n -> m n")
    # whole, three names, and sums and averages of either operand, on 2, 3, 5, 6 and 7 ranks
    assert check_rule(NAME, (X, torch.ones(6, 5))) >= 5 * 8
    register_rule(NAME, "f(m [k], [k] n) -> m n")
    assert check_rule(torch.ops.shardwise_check.op, (X, torch.ones(6, 5))) >= 5 * 3


WRONG = {
    "a mean is not a sum of means": (lambda x: x.mean(1), "m n -> m", "S(1) -> P(sum)", "reduced: [3.0, 11.0"),
    "each rank counts from nothing": (
        lambda x: x + torch.arange(len(x)).view(-1, 1),
        "m n -> m n",
        "S(0) -> S(0)",
        "rank 1: [8.0, 9.0",
    ),
    "the result is cut along another dim": (lambda x: x * 2, "m n -> n m", "S(0) -> S(1)", "is torch.float32[2, 4]"),
    "a softmax needs its dim whole": (lambda x: x.softmax(1), "f(m n) -> m n", "S(1) -> S(1)", "rank 0: [0.268"),
    "a square is not linear": (lambda x: x * x, "... -> ...", "P(sum) -> P(sum)", "reduced: ["),
    "an extreme of nothing": (lambda x: x.amax(1), lambda x: "m n -> m", "S(1) -> P(sum)", "reduced: [4.0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_caught(library, what: str) -> None:
    run, rule, strategy, got = WRONG[what]
    define(library, "(Tensor x) -> Tensor", run)
    register_rule(NAME, rule)
    with pytest.raises(WrongRuleError) as caught:
        check_rule(NAME, (torch.arange(16.0).view(4, 4),))
    for part in ("shardwise_check.op", "f32[4, 4]", strategy, got):
        assert part in str(caught.value)


def test_listed_strategies_are_tried(library) -> None:
    define(library, "(Tensor x, int dim) -> Tensor", lambda x, dim: x.sum(dim))
    op = torch.ops.shardwise_check.op.default
    register_sharding(op)(lambda x, dim: [([Partial()], [Shard(dim), None]), ([Replicate()], [Replicate(), None])])
    assert check_rule(op, (X, 0), (X, 1)) >= 2 * 2 * 2
    register_sharding(op)(lambda x, dim: [([Partial()], [Shard(1 - dim), None])])
    with pytest.raises(WrongRuleError, match=r"S\(1\) -> P\(sum\)"):
        check_rule(op, (X, 0))


def test_empty_shards_are_tried(library) -> None:
    define(library, "(Tensor x) -> Tensor", lambda x: x.clone() if x.numel() else x.new_ones(x.shape)[:, :1])
    register_rule(NAME, "m n -> m n")
    with pytest.raises(WrongRuleError, match="on 7 ranks"):
        check_rule(NAME, (torch.ones(1, 6).expand(6, 6),))


def test_keyword_arguments_stand_at_the_end(library) -> None:
    define(library, "(Tensor x, *, float by) -> Tensor", lambda x, *, by: x * by)
    register_rule(NAME, "... -> ...")
    assert check_rule(NAME, (X, {"by": 3.0}))
    with pytest.raises(RuntimeError, match="by"):
        check_rule(NAME, (X,))


def test_what_cannot_be_checked_says_so(library) -> None:
    define(library, "(Tensor x) -> Tensor", lambda x: x.clone())
    with pytest.raises(RuleError, match="no rule to check"):
        check_rule(NAME, (X,))
    with pytest.raises(ArgumentError, match="no operator"):
        check_rule("shardwise_check::other", (X,))
    register_rule(NAME, "... -> ...")
    with pytest.raises(ArgumentError, match="tuple"):
        check_rule(NAME, X)


def test_numbers_drawn_elsewhere_stay_the_same(library) -> None:
    define(library, "(Tensor x) -> Tensor", lambda x: x.clone())
    register_rule(NAME, "... -> ...")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_rule(NAME, (X,))
    assert torch.equal(torch.rand(4), expected)

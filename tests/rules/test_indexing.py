"""Indexing: which strategies are claimed, and that each gives torch's answer on one rank."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten


def claims(op, *args, parts: int = 2) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, {}, parts)}


X = torch.randn(5, 4, 3)
ROWS = torch.tensor([4, 0, 0, -2])
PLACES = torch.tensor([[0, 3], [1, 1], [2, 0]])
MASK = torch.tensor([True, False, True, True, False])
TABLE = torch.randn(7, 3)
WORDS = torch.tensor([[6, 0, 2], [3, 3, 1]])


def test_an_embedding_is_cut_in_every_way() -> None:
    found = claims(aten.embedding.default, TABLE, WORDS)
    assert {"S(0) R -> P(sum)", "S(1) R -> S(2)", "R S(0) -> S(0)", "R S(1) -> S(1)", "P(sum) R -> P(sum)"} <= found


def test_an_embedding_gradient_adds_up_over_tokens() -> None:
    grad = torch.randn(2, 3, 3)
    found = claims(aten.embedding_dense_backward.default, grad, WORDS, 7, -1, False)
    assert {"R R -> S(0)", "S(2) R -> S(1)", "S(0) S(0) -> P(sum)", "S(1) S(1) -> P(sum)"} <= found
    # Scaled by how often a word occurs, it needs all words at once.
    assert "S(0) S(0) -> P(sum)" not in claims(aten.embedding_dense_backward.default, grad, WORDS, 7, -1, True)


@pytest.mark.parametrize("padding", [-1, 0, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_embeddings_are_right_with_any_padding(padding: int, scaled: bool) -> None:
    grad = torch.randn(2, 3, 3)
    for sizes in ((2, 3), (4, 9)):
        assert problems(aten.embedding.default, (TABLE, WORDS, padding, scaled), {}, sizes=sizes) == []
        args = (grad, WORDS, 7, padding, scaled)
        assert problems(aten.embedding_dense_backward.default, args, {}, sizes=sizes) == []


def test_rows_are_taken_where_the_other_dims_lie() -> None:
    assert {"S(1) R -> S(1)", "R S(0) -> S(0)", "P(sum) R -> P(sum)"} <= claims(
        aten.index_select.default, X, 0, ROWS % 5
    )
    assert "S(1) - R -> S(1)" not in claims(aten.index.Tensor, X, [None, ROWS % 4])
    assert {"S(0) - R -> S(0)", "S(2) - R -> S(2)", "R - S(0) -> S(1)"} <= claims(
        aten.index.Tensor, X, [None, ROWS % 4]
    )


def test_a_mask_is_whole_and_the_dims_it_leaves_are_cut() -> None:
    found = claims(aten.index.Tensor, X, [MASK])
    assert "S(1) R -> S(1)" in found
    assert not any(claim.startswith(("S(0)", "R S")) for claim in found)


def test_a_batch_is_gathered_and_scattered_part_by_part() -> None:
    index = torch.randint(0, 4, (5, 2, 3))
    assert {"S(0) S(0) -> S(0)", "R S(1) -> S(1)"} <= claims(aten.gather.default, X, 1, index)
    assert "S(0) S(0) S(0) -> S(0)" in claims(aten.scatter.src, X, 1, index, torch.randn(5, 2, 3))
    # An index that does not cover a dim would meet other rows.
    assert "S(0) S(0) -> S(0)" not in claims(aten.gather.default, X, 1, index[:3])


def test_what_is_added_may_be_cut_if_the_rest_is_pending() -> None:
    source = torch.randn(4, 4, 3)
    assert "P(sum) S(0) S(0) -> P(sum)" in claims(aten.index_add.default, X, 0, ROWS % 5, source)
    assert "P(sum) S(0) S(0) -> P(sum)" in claims(aten.index_put.default, X, [ROWS], source, True)
    assert not any("S(0) S(0)" in claim for claim in claims(aten.index_put.default, X, [ROWS], source, False))


CALLS = [
    (aten.index_select.default, (X, -1, torch.tensor([2, 0]))),
    (aten.index_select.default, (torch.tensor(3.0), 0, torch.tensor([0]))),
    (aten.gather.default, (X, 1, torch.randint(0, 4, (5, 2, 3)))),
    (aten.gather.default, (X, 0, torch.randint(0, 5, (7, 2, 1)))),
    (aten.gather.default, (X, 0, torch.empty(0, dtype=torch.long))),
    (aten.scatter.src, (X, 1, torch.randint(0, 4, (5, 2, 3)), torch.randn(5, 2, 3))),
    (aten.scatter.src, (X, 1, torch.randint(0, 4, (3, 2, 3)), torch.randn(5, 4, 3))),
    (aten.scatter.value, (X, 0, torch.randint(0, 5, (2, 4, 3)), 7.0)),
    (aten.scatter_add.default, (X, 1, torch.randint(0, 4, (5, 6, 3)), torch.randn(5, 6, 3))),
    (aten.scatter_add.default, (X, 1, torch.randint(0, 4, (5, 2, 3)), torch.randn(5, 6, 3))),
    (aten.scatter_reduce.two, (X, 2, torch.randint(0, 3, (5, 4, 8)), torch.randn(5, 4, 8), "amax")),
    (aten.index_add.default, (X, 1, torch.tensor([3, 0, 3]), torch.randn(5, 3, 3))),
    (aten.index_copy.default, (X, 1, torch.tensor([3, 0]), torch.randn(5, 2, 3))),
    (aten.index_fill.int_Scalar, (X, 1, torch.tensor([3, -4]), 2.0)),
    (aten.take.default, (X, torch.randint(0, 60, (5, 3)))),
    (aten.put.default, (X, torch.tensor([0, 59]), torch.randn(2))),
    (aten.masked_scatter.default, (X, X > 0, torch.randn(60))),
    (aten.index.Tensor, (X, [ROWS, ROWS % 4])),
    (aten.index.Tensor, (X, [torch.tensor([[0], [1]]), None, torch.tensor([0, 2, 1])])),
    (aten.index.Tensor, (X, [None, None, torch.tensor(1)])),
    (aten.index.Tensor, (X, [MASK, torch.tensor([0, 1, 3])])),
    (aten.index.Tensor, (X, [X[:, :, 0] > 0])),
    (aten.index_put.default, (X, [ROWS], torch.randn(4, 3), True)),
    (aten.index_put.default, (X, [torch.tensor([1, 3])], torch.randn(2, 4, 3))),
    (aten.index_put.default, (X, [None, torch.tensor([1, 3])], torch.tensor(2.0))),
    (aten.index_put.default, (X, [MASK], torch.randn(3, 4, 3), True)),
    (aten.index_put.default, (X, [MASK, torch.tensor([0, 3, 1])], torch.randn(3, 3))),
    (aten.index_put.default, (X, [None, X[0] > 0], torch.tensor(2.0))),
    (aten.index_put.default, (X, [ROWS, None, torch.tensor([[0], [2]])], torch.randn(2, 4, 1), True)),
    (aten.scatter.reduce, (X, 0, torch.tensor([[[4, 3, 0]], [[2, 4, 1]]]), torch.randn(2, 1, 3)), {"reduce": "add"}),
    (aten.topk.default, (X, 2, 1)),
    (aten.sort.default, (X, 0)),
    (aten.sort.stable, (X,), {"stable": True, "dim": 1}),
    (aten.kthvalue.default, (X, 2, 1)),
    (aten.searchsorted.Tensor, (torch.arange(4.0).expand(5, 4).contiguous(), torch.rand(5, 3))),
    (aten.bucketize.Tensor, (X, torch.arange(3.0))),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__name__)
def test_each_claim_gives_the_answer_of_one_rank(call) -> None:
    op, args, *options = call
    assert strategies_of(op, args, dict(*options), 2)
    assert problems(op, args, dict(*options), sizes=(2, 3, 4, 7)) == []


def test_places_of_a_matrix_are_put_by_two_indices() -> None:
    first, second = PLACES.unbind(1)
    assert problems(aten.index_put.default, (X, [first, second], torch.randn(3, 3), True), {}, sizes=(2, 3, 5)) == []


def test_what_is_written_and_what_is_written_over_are_pending_together() -> None:
    for op in (aten.index_copy.default, aten.index_add.default):
        assert "P(sum) R P(sum) -> P(sum)" in claims(op, X, 0, torch.tensor([3, 1]), torch.randn(2, 4, 3))
    for op in (aten.scatter.src, aten.scatter_add.default):
        assert "P(sum) R P(sum) -> P(sum)" in claims(op, X[:, :2, 0], 0, PLACES, torch.randn(3, 2))
    assert "P(sum) R P(sum) -> P(sum)" in claims(aten.masked_scatter.default, X[:, 0, 0], MASK, torch.randn(5))
    assert "P(sum) S(0) S(0) -> P(sum)" in claims(aten.scatter.reduce, X[:, :2, 0], 0, PLACES, torch.randn(3, 2), "add")


def test_a_mask_is_cut_where_the_same_is_written_to_every_row() -> None:
    assert "S(0) S(0) R -> S(0)" in claims(aten.index_put.default, X[:, :, 0], [MASK], torch.randn(4))
    assert "S(1) R S(0) -> S(1)" in claims(aten.index_put.default, X[:, :, 0], [MASK], torch.randn(4))
    assert "S(0) S(0) R -> S(0)" not in claims(aten.index_put.default, X[:, :, 0], [MASK], torch.randn(3, 4))

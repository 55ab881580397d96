"""Linear algebra: batches are cut, matrices are whole."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.checker import problems, strategies_of

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(5, 2, 4, 3, dtype=torch.float64, generator=GENERATOR)
POSITIVE = X.mT @ X + torch.eye(3, dtype=torch.float64)
FACTOR = torch.linalg.cholesky(POSITIVE)
LU, PIVOTS = torch.linalg.lu_factor(POSITIVE)


def claims(op, *args) -> set[str]:
    return {str(strategy) for strategy in strategies_of(op, args, {}, 2)}


def test_batches_are_cut_and_matrices_whole() -> None:
    cuts = {claim for claim in claims(aten.linalg_inv_ex.default, POSITIVE) if " S(" in claim}
    assert cuts == {"S(0) -> S(0) S(0)", "S(1) -> S(1) S(1)"}


def test_one_matrix_serves_many_right_sides() -> None:
    found = claims(aten._linalg_solve_ex.default, POSITIVE[0, 0], X.mT)
    assert "R S(0) -> S(0) R R R" in found
    assert problems(aten._linalg_solve_ex.default, (POSITIVE[0, 0], X.mT), {}, sizes=(2, 3)) == []
    assert problems(aten._linalg_solve_ex.default, (POSITIVE[:1], X.mT), {}, sizes=(2, 3)) == []


def test_each_column_of_a_right_side_is_solved_for_itself() -> None:
    matrix, right = POSITIVE[0, 0], X[0, 0].mT
    found = claims(aten._linalg_solve_ex.default, matrix, right)
    assert {"R S(1) -> S(1) R R R", "R P(sum) -> P(sum) R R R"} <= found
    found = claims(aten.linalg_lu_solve.default, LU[0, 0], PIVOTS[0, 0], right)
    assert {"R R S(1) -> S(1)", "R R P(sum) -> P(sum)"} <= found
    assert not any("S(0)" in claim for claim in found)
    assert "S(1) R -> S(1)" in claims(aten.cholesky_solve.default, right, FACTOR[0, 0])


def test_a_transform_passes_pending_sums() -> None:
    found = claims(aten._fft_c2c.default, X.cfloat(), [2, 3], 0, True)
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"} <= found
    assert "S(2) -> S(2)" not in found


CALLS = [
    (aten._linalg_svd.default, (X,)),
    (aten._linalg_svd.default, (X, False, False)),
    (aten._linalg_eigh.default, (POSITIVE,)),
    (aten.linalg_eig.default, (X[..., :3, :],)),
    (aten._linalg_det.default, (POSITIVE,)),
    (aten._linalg_slogdet.default, (POSITIVE,)),
    (aten.linalg_cholesky_ex.default, (POSITIVE,)),
    (aten.cholesky_inverse.default, (FACTOR,)),
    (aten.linalg_inv_ex.default, (POSITIVE,)),
    (aten.linalg_matrix_exp.default, (POSITIVE,)),
    (aten.linalg_lu_factor_ex.default, (X,)),
    (aten.linalg_lu.default, (X,)),
    (aten.lu_unpack.default, (LU, PIVOTS)),
    (aten.linalg_qr.default, (X,)),
    (aten.linalg_qr.default, (X, "r")),
    (aten._linalg_solve_ex.default, (POSITIVE, X.mT)),
    (aten._linalg_solve_ex.default, (POSITIVE, X[..., 0, :])),
    (aten.linalg_lu_solve.default, (LU, PIVOTS, X.mT)),
    (aten.linalg_solve_triangular.default, (FACTOR, X.mT), {"upper": False}),
    (aten.cholesky_solve.default, (X.mT, FACTOR)),
    (aten.triangular_solve.default, (X.mT, FACTOR, False)),
    (aten._fft_r2c.default, (X, [1, 2], 0, True)),
    (aten._fft_c2r.default, (X.cfloat(), [2], 2, 6)),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__name__)
def test_each_claim_gives_the_answer_of_one_rank(call) -> None:
    op, args, *options = call
    assert strategies_of(op, args, dict(*options), 2)
    assert problems(op, args, dict(*options), sizes=(2, 3, 7)) == []

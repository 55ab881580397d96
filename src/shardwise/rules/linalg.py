"""Linear algebra and Fourier transforms: matrices and transformed dims are whole, batches are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.rules.empty import unless_empty
from shardwise.rules.equation import Strategy
from shardwise.rules.pattern import along, text
from shardwise.rules.rule import Call, Rule
from shardwise.sharding.placement import Partial, Placement, Replicate, Shard
from shardwise.sharding.spec import TensorMeta

Meaning = str | Callable[..., str]

SQUARE = "... [m] [m]"
MATRIX = "... [m] [n]"


# --- Fourier transforms


def fourier(x: TensorMeta, dims: Sequence[int], *_: object) -> str:
    """Linear; the last transformed dim of a real transform changes its size."""
    names = text(along(x, dims))
    return f"{names} -> {names}"


# --- factorings; what is not asked for comes back without elements


def svd(x: TensorMeta, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None) -> str:
    vectors = ("... [u0] [u1]", "... [v0] [v1]") if compute_uv else ("_", "_")
    return f"f({MATRIX}) -> {vectors[0]}, ... [s], {vectors[1]}"


def eigh(x: TensorMeta, UPLO: str = "L", compute_v: bool = True) -> str:
    return f"f({SQUARE}) -> ... [m], {SQUARE if compute_v else '_'}"


def qr(x: TensorMeta, mode: str = "reduced") -> str:
    return f"f({MATRIX}) -> {'_' if mode == 'r' else '... [m] [q]'}, ... [r] [n]"


def lu(x: TensorMeta, pivot: bool = True) -> str:
    return f"f({MATRIX}) -> {'... [m] [m]' if pivot else '_'}, ... [m] [k], ... [k] [n]"


def solve(matrix: TensorMeta, right: TensorMeta, *_: object) -> str:
    """The right side holds vectors if it has no dim for columns."""
    side = "... [m]" if _are_vectors(matrix, right) else "... [x] [y]"
    factors = f"{SQUARE}, ... [m], ..." if len(matrix.shape) > 2 else "_, _, _"
    return f"f({SQUARE}, {side}) -> {side}, {factors}"


def _are_vectors(matrix: TensorMeta, right: TensorMeta) -> bool:
    return len(right.shape) == 1 or right.shape == matrix.shape[:-1]


def solved_apart(call: Call) -> list[Strategy]:
    """Linear in the right side, each of whose columns is solved for itself; the factors are the same on every rank."""
    matrix, right, left = call.args[:3]
    columns = None if _are_vectors(matrix, right) else -1 if left else -2
    return [Strategy((Replicate(), own), (found, *[Replicate()] * 3)) for own, found in _apart(call, right, columns)]


def triangles_apart(call: Call) -> list[Strategy]:
    """The same for the operator that takes the right side first."""
    return [Strategy((own, Replicate()), (found, Replicate())) for own, found in _apart(call, call.args[0], -1)]


def _apart(call: Call, right: TensorMeta, columns: int | None) -> list[tuple[Placement, Placement]]:
    result = call.outputs[0]
    assert result is not None, call
    roles: list[tuple[Placement, Placement]] = [(Partial(op), Partial(op)) for op in ("sum", "avg")]
    if columns is not None:
        roles.append((Shard(len(right.shape) + columns), Shard(len(result.shape) + columns)))
    return roles


def lu_unpack(packed: TensorMeta, pivots: TensorMeta, data: bool = True, wanted: bool = True) -> str:
    factors = "... [m] [k], ... [k] [n]" if data else "_, _"
    return f"f({MATRIX}, ... [p]) -> {'... [m] [m]' if wanted else '_'}, {factors}"


FACTORINGS: dict[str, Meaning] = {
    "_linalg_svd": svd,
    "_linalg_eigh": eigh,
    "linalg_eig": f"f({SQUARE}) -> ... [m], {SQUARE}",
    "_linalg_eigvals": f"f({SQUARE}) -> ... [m]",
    "linalg_eigvals": f"f({SQUARE}) -> ... [m]",
    "_linalg_det": f"f({SQUARE}) -> ..., {SQUARE}, ... [m]",
    "_linalg_slogdet": f"f({SQUARE}) -> ..., ..., {SQUARE}, ... [m]",
    "linalg_cholesky_ex": f"f({SQUARE}) -> {SQUARE}, ...",
    "cholesky": f"f({SQUARE}) -> {SQUARE}",
    "cholesky_inverse": f"f({SQUARE}) -> {SQUARE}",
    "linalg_inv_ex": f"f({SQUARE}) -> {SQUARE}, ...",
    "linalg_matrix_exp": f"f({SQUARE}) -> {SQUARE}",
    "linalg_ldl_factor_ex": f"f({SQUARE}) -> {SQUARE}, ... [m], ...",
    "linalg_lu_factor_ex": f"f({MATRIX}) -> {MATRIX}, ... [k], ...",
    "linalg_lu": lu,
    "lu_unpack": lu_unpack,
    "linalg_qr": qr,
    "geqrf": f"f({MATRIX}) -> {MATRIX}, ... [k]",
    "linalg_pinv.atol_rtol_tensor": f"f({MATRIX}, ..., ...) -> ... [n] [m]",
    "linalg_householder_product": f"f({MATRIX}, ... [k]) -> {MATRIX}",
}

# Factors of a matrix that serves several batches are the same on every rank: they do not add up.
SOLVERS = {
    "_linalg_solve_ex": Rule(solve, reduce=None, local=unless_empty, beside=solved_apart),
    "triangular_solve": Rule(f"f(... [x] [y], {SQUARE}) -> ... [x] [y], {SQUARE}", reduce=None, beside=triangles_apart),
}


# --- linear in the right side, each of whose columns is solved for itself


def one_side(form: str, place: int) -> Callable[..., str]:
    """The matrix stands on the left of the other side, unless the argument at ``place`` says otherwise."""

    def meaning(*args: object) -> str:
        return form.format(side="... [x] y" if args[place] else "... x [y]")

    return meaning


LINEAR_SOLVERS: dict[str, Meaning] = {
    "linalg_lu_solve": one_side(f"/ {SQUARE} / ... [m] * {{side}} -> {{side}}", 3),
    "linalg_ldl_solve": f"/ {SQUARE} / ... [m] * ... [x] y -> ... [x] y",
    "linalg_solve_triangular": one_side(f"/ {SQUARE} * {{side}} -> {{side}}", 3),
    "cholesky_solve": f"... [x] y / {SQUARE} -> ... [x] y",
    "ormqr": one_side(f"/ {MATRIX} / ... [k] * {{side}} -> {{side}}", 3),
}

DISTANCES: dict[str, Meaning] = {
    "_cdist_forward": "f(... m [k], ... n [k]) -> ... m n",
    "_cdist_backward": "... m n / ... m [k] / ... n [k] / ... m n -> ... m [k]",
}

RULES: dict[str, Meaning | Rule] = {
    **DISTANCES,
    "_fft_c2c": Rule(fourier, local=unless_empty),
    "_fft_r2c": Rule(fourier, local=unless_empty),
    "_fft_c2r": Rule(fourier, local=unless_empty),
    **{name: Rule(meaning, reduce=None, local=unless_empty) for name, meaning in FACTORINGS.items()},
    **SOLVERS,
    **{name: Rule(meaning, local=unless_empty) for name, meaning in LINEAR_SOLVERS.items()},
    "_linalg_check_errors": Rule([Strategy((Replicate(),), ())]),
}

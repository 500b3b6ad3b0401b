"""Singular value decompositions of updates, in numpy.

Letters: M [m, n] the update, B [m, r] and A [r, n] its factors with M = B A, S the singular values in descending
order, k of them kept. All results are a pair (U S [m, k], V^T [k, n]) in float64, whose product is the best
approximation of rank k.

The products B^T B and A A^T are made in float64, in which squaring float32 numbers loses nothing: singular values are
right to about 1e-8 of the largest, a tenth of what LAPACK's float32 SVD of M leaves, and only matrices of r x r are
decomposed. numpy rather than torch: measured on r = 128 its float64 products take half the time of torch's, its
symmetric eigenproblems the same, and it is the smaller dependency."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]
Keep = Callable[[np.ndarray], int]

OVERSAMPLING = 16
POWER_ITERATIONS = 6
SMALL_SIDE = 512  # below it the exact decomposition is as quick as the randomised one


def product_svd(up: np.ndarray, down: np.ndarray, keep: Keep) -> tuple[np.ndarray, Pair]:
    """All min(m, n) singular values of B A, and the first keep(S) of its directions.

    With A A^T = L L^T the matrix H = L^T (B^T B) L has the eigenvalues S^2; of its eigenvectors W, U S = B L W and
    V^T = S^-2 (B L W)^T B A."""
    m, rank = up.shape
    n = down.shape[1]
    if rank > min(m, n):
        return matrix_svd(up.astype(np.float64) @ down.astype(np.float64), keep)
    b, a = up.astype(np.float64), down.astype(np.float64)
    gram_b = b.T @ b
    root = _square_root(a @ a.T)
    squares, vectors = _descending(root.T @ gram_b @ root)
    values = np.zeros(min(m, n))
    values[:rank] = np.sqrt(squares)
    k = keep(values)
    turned = root @ vectors[:, :k]
    return values, (b @ turned, _divided(turned.T @ gram_b, squares[:k]) @ a)


def matrix_svd(matrix: np.ndarray, keep: Keep) -> tuple[np.ndarray, Pair]:
    """The same of M itself, exactly: through M^T M or M M^T, whichever is smaller."""
    wide = matrix.astype(np.float64)
    m, n = wide.shape
    if n <= m:
        squares, vectors = _descending(wide.T @ wide)
        k = keep(np.sqrt(squares))
        right = vectors[:, :k].T
        return np.sqrt(squares), (wide @ right.T, right)
    squares, vectors = _descending(wide @ wide.T)
    values = np.sqrt(squares)
    k = keep(values)
    left = vectors[:, :k]
    return values, (left * values[:k], _divided(left.T @ wide, values[:k]))


def random_svd(matrix: np.ndarray, k: int, seed: int = 0) -> tuple[np.ndarray, Pair]:
    """The first k singular values and directions of M in float32, nearly: a basis of random combinations of its
    columns, k and some more, multiplied by M M^T several times (Halko, Martinsson and Tropp 2011, algorithms 4.4 and
    5.1)."""
    m, n = matrix.shape
    if n < m:
        values, (left, right) = random_svd(matrix.T, k, seed)
        return values, (right.T * values, _divided(left.T, values))
    single = matrix.astype(np.float32)
    width = min(k + OVERSAMPLING, m)
    # from the longer side to the shorter, so that bases are of the shorter
    start = np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32)
    basis = _orthonormal(single @ start)
    for _ in range(POWER_ITERATIONS):
        basis = _orthonormal(single @ (single.T @ basis))
    basis = _orthonormal(basis)  # twice is as good as LAPACK's
    small = (basis.T @ single).astype(np.float64)
    squares, vectors = _descending(small @ small.T)
    values = np.sqrt(squares[:k])
    left = basis.astype(np.float64) @ vectors[:, :k]
    return values, (left * values, _divided(vectors[:, :k].T @ small, values))


def balanced(pair: Pair) -> Pair:
    """The same product with S divided between both: rows of V^T have length 1, columns of U S length S."""
    left, right = pair
    lengths = np.sqrt(np.linalg.norm(left, axis=0))
    return left * _reciprocal(lengths), right * lengths[:, None]


def residual(matrix: np.ndarray, up: np.ndarray, down: np.ndarray) -> float:
    """|M - B A| in the Frobenius norm, of the numbers as they are stored."""
    difference = matrix - up.astype(matrix.dtype) @ down.astype(matrix.dtype)
    return float(np.sqrt(np.einsum("ij,ij->", difference, difference, dtype=np.float64)))


def product_norm(up: np.ndarray, down: np.ndarray) -> float:
    """|B A| in the Frobenius norm, by a QR decomposition of each factor where they are thin."""
    b, a = up.astype(np.float64), down.astype(np.float64)
    if b.shape[1] < b.shape[0]:
        b = np.linalg.qr(b, mode="r")
    if a.shape[0] < a.shape[1]:
        a = np.linalg.qr(a.T, mode="r").T
    return float(np.linalg.norm(b @ a))


def _descending(symmetric: np.ndarray) -> Pair:
    """Eigenvalues, none negative, and vectors; LAPACK's second driver where its first does not converge."""
    try:
        values, vectors = np.linalg.eigh(symmetric)
    except np.linalg.LinAlgError:
        vectors, values, _ = np.linalg.svd(symmetric, hermitian=False)
        return np.maximum(values, 0), vectors
    return np.maximum(values[::-1], 0), vectors[:, ::-1]


def _square_root(gram: np.ndarray) -> np.ndarray:
    """L with L L^T = gram: Cholesky's, or where gram is singular that of its eigenvectors."""
    try:
        return np.linalg.cholesky(gram)
    except np.linalg.LinAlgError:
        values, vectors = _descending(gram)
        return vectors * np.sqrt(values)


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """A basis of what the columns span, in their dtype; directions that vanish beside the first become zero."""
    wide = columns.astype(np.float64)
    squares, vectors = _descending(wide.T @ wide)
    kept = np.where(squares > squares[0] * 1e-14, squares, 0)
    return (wide @ (vectors * _reciprocal(np.sqrt(kept)))).astype(columns.dtype)


def _reciprocal(values: np.ndarray) -> np.ndarray:
    return np.divide(1, values, out=np.zeros_like(values), where=values > 0)


def _divided(rows: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Rows divided by a number each; zero where that is zero."""
    return rows * _reciprocal(by)[:, None]

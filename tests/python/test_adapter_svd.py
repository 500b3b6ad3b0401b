"""The mathematics of the adapter tools against float64 SVDs, and the rank rules of sd-scripts' resize_lora."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraaccel.adapters import _ranks, _svd

SIZES = [(40, 60, 8), (60, 40, 8), (33, 7, 7), (7, 33, 12), (1, 64, 4), (64, 1, 4), (1, 1, 1), (300, 200, 64)]


def factors(m: int, n: int, r: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    up = rng.standard_normal((m, r)) * np.geomspace(1, 1e-3, r)
    return up.astype(np.float32), rng.standard_normal((r, n)).astype(np.float32)


@pytest.mark.parametrize(("m", "n", "r"), SIZES)
def test_the_svd_of_a_product_is_the_svd(m: int, n: int, r: int) -> None:
    up, down = factors(m, n, r)
    full = up.astype(np.float64) @ down
    u, s, v = np.linalg.svd(full, full_matrices=False)
    for k in {1, min(m, n, r) // 2 or 1, min(m, n, r)}:
        values, (left, right) = _svd.product_svd(up, down, lambda _, k=k: k)
        assert values.shape == (min(m, n),)
        np.testing.assert_allclose(values, s, rtol=0, atol=2e-8 * s[0])
        expected = (u[:, :k] * s[:k]) @ v[:k]
        assert np.linalg.norm(left @ right - expected) <= 1e-7 * s[0]
        # U S has orthogonal columns of length S, V^T orthonormal rows
        np.testing.assert_allclose(left.T @ left, np.diag(s[:k] ** 2), rtol=0, atol=1e-7 * s[0] ** 2)
        np.testing.assert_allclose(right @ right.T, np.eye(k), rtol=0, atol=1e-6)


def test_factors_that_are_not_of_full_rank() -> None:
    up, down = factors(50, 30, 6)
    down[3] = down[2]
    up[:, 5] = 0
    s = np.linalg.svd(up.astype(np.float64) @ down, compute_uv=False)
    values, (left, right) = _svd.product_svd(up, down, lambda _: 6)
    np.testing.assert_allclose(values, s, rtol=0, atol=3e-8 * s[0])
    assert np.isfinite(left).all()
    assert np.isfinite(right).all()
    assert np.linalg.norm(left @ right - up.astype(np.float64) @ down) <= 1e-7 * s[0]


@pytest.mark.parametrize(("m", "n"), [(40, 60), (60, 40), (1, 9), (9, 1)])
def test_the_exact_svd_of_a_matrix(m: int, n: int) -> None:
    matrix = np.random.default_rng(1).standard_normal((m, n)).astype(np.float32)
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    k = min(m, n) // 2 or 1
    values, (left, right) = _svd.matrix_svd(matrix, lambda _: k)
    np.testing.assert_allclose(values, s, rtol=0, atol=3e-8 * s[0])
    assert np.linalg.norm(left @ right - (u[:, :k] * s[:k]) @ v[:k]) <= 1e-7 * s[0]


@pytest.mark.parametrize(("m", "n"), [(600, 800), (800, 600)])
def test_the_randomised_svd_is_near_the_best(m: int, n: int) -> None:
    rng = np.random.default_rng(2)
    u, _ = np.linalg.qr(rng.standard_normal((m, 600)))
    v, _ = np.linalg.qr(rng.standard_normal((n, 600)))
    s = 1 / np.arange(1, 601)  # falls slowly: the hard case
    matrix = ((u * s) @ v.T).astype(np.float32)
    values, (left, right) = _svd.random_svd(matrix, 16)
    np.testing.assert_allclose(values, s[:16], rtol=1e-3)
    least = np.sqrt(np.sum(s[16:] ** 2))
    found = _svd.residual(matrix, left, right)
    assert least * (1 - 1e-4) <= found <= least * 1.001
    again = _svd.random_svd(matrix, 16)[1]
    assert (again[0] == left).all()
    assert (again[1] == right).all()


def test_balanced_factors_have_one_size_and_the_same_product() -> None:
    up, down = factors(30, 20, 5)
    _, pair = _svd.product_svd(up, down, lambda _: 5)
    left, right = _svd.balanced(pair)
    np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(right), rtol=1e-6)
    np.testing.assert_allclose(
        left @ right, pair[0] @ pair[1], rtol=0, atol=1e-12 * np.abs(left @ right).max() + 1e-12
    )


@pytest.mark.parametrize("shapes", [((50, 4), (4, 30)), ((3, 8), (8, 5))])
def test_the_norm_of_a_product(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    rng = np.random.default_rng(3)
    up, down = (rng.standard_normal(shape) for shape in shapes)
    assert _svd.product_norm(up, down) == pytest.approx(np.linalg.norm(up @ down), rel=1e-12)


def test_a_solver_that_does_not_converge_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: np.ndarray) -> None:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    up, down = factors(30, 20, 5)
    s = np.linalg.svd(up.astype(np.float64) @ down, compute_uv=False)
    monkeypatch.setattr(np.linalg, "eigh", fail)
    values, (left, right) = _svd.product_svd(up, down, lambda _: 5)
    np.testing.assert_allclose(values, s, rtol=0, atol=3e-8 * s[0])
    assert np.linalg.norm(left @ right - up.astype(np.float64) @ down) <= 1e-7 * s[0]


VALUES = np.array([8.0, 4, 2, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("method", "param", "rank"),
    [
        ("sv_ratio", 4, 3),
        ("sv_ratio", 4.1, 4),
        ("sv_cumulative", 0.79, 3),
        ("sv_fro", 0.9, 3),
        ("sv_fro", 0.97, 3),
        ("sv_ratio", 1, 2),  # nothing is above S0 / 1, which counts as one
        ("sv_cumulative", 0.8, 3),  # exactly on a sum
        ("sv_cumulative", 1.0, 4),  # five by the rule, of four that are not zero
    ],
)
def test_rank_rules(method: str, param: float, rank: int) -> None:
    assert _ranks.choose_rank(VALUES, 8, method, param) == rank


def test_a_rank_is_limited_by_the_cap_and_by_what_there_is() -> None:
    assert _ranks.choose_rank(VALUES, 2, "sv_ratio", 1000) == 2
    assert _ranks.choose_rank(VALUES, 3) == 3
    assert _ranks.choose_rank(VALUES, 8) == 4
    assert _ranks.choose_rank(np.array([5.0]), 7) == 1
    assert _ranks.choose_rank(np.zeros(6), 4) == 1
    assert _ranks.choose_rank(np.array([1e-6, 1e-6]), 4) == 1
    assert _ranks.choose_rank(np.array([1.1e-6, 1e-6]), 4) == 2


def sd_scripts_rank(values: torch.Tensor, method: str, param: float) -> int:
    """The rule in torch, in its own words."""
    if method == "sv_ratio":
        found = int((values > values[0] / param).sum())
    else:
        parts, target = (values, param) if method == "sv_cumulative" else (values**2, param**2)
        sums = torch.cumsum(parts, 0) / float(parts.sum())
        found = int(torch.searchsorted(sums, target)) + 1
    return max(1, min(found, len(values) - 1)) + 1


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=40),
    st.sampled_from(_ranks.METHODS),
    st.floats(0.05, 0.999),
)
def test_dynamic_ranks_are_those_of_torch(values: list[float], method: str, param: float) -> None:
    if method == "sv_ratio":
        param = 1 / param
    s = torch.tensor(sorted(values, reverse=True), dtype=torch.float32)
    expected = min(sd_scripts_rank(s, method, param), len(s))
    assert _ranks.choose_rank(s.numpy().astype(np.float64), len(s), method, param) == expected


@pytest.mark.parametrize(
    ("method", "param"),
    [("sv", 1), ("sv_ratio", None), ("sv_fro", 1.5), ("sv_fro", 0), ("sv_ratio", float("nan")), (None, 2)],
)
def test_a_method_and_its_parameter_are_checked(method: str | None, param: float | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        _ranks.check_method(method, param)


def test_what_a_rank_keeps() -> None:
    kept = _ranks.kept(VALUES, 2)
    assert kept.fro_retained == pytest.approx(np.sqrt(80 / 85))
    assert kept.sum_retained == pytest.approx(12 / 15)
    assert kept.max_ratio == 2
    zero = _ranks.kept(np.zeros(3), 1)
    assert (zero.fro_retained, zero.sum_retained, zero.max_ratio) == (1, 1, 1)

"""How many singular values are kept: a number, or the dynamic methods of sd-scripts' resize_lora.

Its rules are kept with their habits, so that the ranks are the same: a dynamic method keeps one more than it finds,
and every weight of four dimensions, 1x1 convolutions too, has the rank of convolutions. Other than there, no more is
kept than there is: neither than min(m, n) nor than the singular values that are not numerically zero."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

METHODS = ("sv_ratio", "sv_fro", "sv_cumulative")
LARGEST_ZERO = 1e-6  # an update whose first singular value is no larger counts as zero
NUMERICAL_ZERO = 1e-7  # relative to the first: what float32 factors cannot say


def dynamic_index(values: np.ndarray, method: str, param: float) -> int:
    """What the method finds, in float32 as sd-scripts has it, between 1 and len(values) - 1."""
    s = values.astype(np.float32)
    if method == "sv_ratio":
        found = int(np.count_nonzero(s > s[0] / np.float32(param)))
    else:
        parts, target = (s, param) if method == "sv_cumulative" else (s * s, param**2)
        total = np.float32(parts.sum())
        sums = np.cumsum(parts, dtype=np.float64).astype(np.float32) / total
        found = int(np.searchsorted(sums, np.float32(target))) + 1
    return max(1, min(found, len(s) - 1))


def choose_rank(values: np.ndarray, limit: int, method: str | None = None, param: float = 0.0) -> int:
    """The new rank, of all min(m, n) singular values in descending order, and at most ``limit``."""
    if values[0] <= LARGEST_ZERO:
        return 1
    there = int(np.count_nonzero(values > values[0] * NUMERICAL_ZERO))
    wanted = limit if method is None else dynamic_index(values, method, param) + 1
    return max(1, min(wanted, limit, there))


def check_method(method: str | None, param: float | None) -> float:
    """ValueError where the two do not go together; the parameter, or 0."""
    if method is None:
        if param is not None:
            raise ValueError(
                f"param is {param}, and there is no method, expected one of {', '.join(METHODS)}"
            )
        return 0.0
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    if param is None or not np.isfinite(param) or param <= 0:
        raise ValueError(f"param is {param}, expected a number above 0 for {method}")
    if method != "sv_ratio" and param > 1:
        raise ValueError(f"param is {param}, expected a part between 0 and 1 for {method}")
    return float(param)


def check_rank(name: str, rank: int) -> int:
    if isinstance(rank, bool) or int(rank) != rank or rank < 1:
        raise ValueError(f"{name} is {rank!r}, expected a whole number of 1 or more")
    return int(rank)


@dataclass
class Kept:
    """What a rank keeps of an update."""

    rank: int
    fro_retained: float
    """sqrt of the kept part of the squared norm; 1 for an update of zeros."""
    sum_retained: float
    max_ratio: float
    """First singular value / last kept one; inf where that is zero."""


def kept(values: np.ndarray, rank: int) -> Kept:
    norm, total = float(np.linalg.norm(values)), float(values.sum())
    last = float(values[rank - 1])
    return Kept(
        rank,
        float(np.linalg.norm(values[:rank])) / norm if norm > 0 else 1.0,
        float(values[:rank].sum()) / total if total > 0 else 1.0,
        float(values[0]) / last if last > 0 else (np.inf if values[0] > 0 else 1.0),
    )

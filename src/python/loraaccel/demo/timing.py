"""Medians and quartiles of the step times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median of a sample, and the quartiles between which its middle half lies."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Step times of both copies, and how many times as long the plain step takes as the patched one.

    `speedup` is taken over the steps: each step divides two times measured one right after the other,
    so that another program slowing the machine for a while touches both.
    """

    num_skipped: int  # first steps, left out: allocators, caches and one-time choices settle in them
    plain_seconds: Spread
    patched_seconds: Spread
    speedup: Spread


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def summarize(plain_seconds: Sequence[float], patched_seconds: Sequence[float]) -> Timing:
    """Times [num_steps] of both copies, in seconds; skips a tenth of the steps, at most five."""
    num_skipped = min(5, len(plain_seconds) // 10)
    plain, patched = plain_seconds[num_skipped:], patched_seconds[num_skipped:]
    ratios = [a / b for a, b in zip(plain, patched, strict=True)]
    return Timing(num_skipped, spread(plain), spread(patched), spread(ratios))

"""Timing several variants of one computation side by side: interleaved calls, medians, per-round ratios."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, interpolated between the values; one value is both."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of one set of numbers."""

    median: float
    first_quartile: float
    third_quartile: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise `values`, at least one."""
        if not values:
            raise ValueError("a spread needs at least one value")
        return cls(statistics.median(values), *_quartiles(values), min(values), max(values))


@dataclass(frozen=True)
class Samples:
    """Wall-clock seconds of one variant, one entry per round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Summary of the samples, in seconds."""
        return Spread.of(self.seconds)

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile in seconds."""
        return _quartiles(self.seconds)


def round_order(names: Sequence[str], round_index: int) -> list[str]:
    """Order of the calls in one round.

    Each round starts one place later, and every second turn runs backwards, so that over 2 * len(names) rounds
    every variant is equally often first and follows different neighbours.
    """
    turn, start = divmod(round_index, len(names))
    order = [*names[start:], *names[:start]]
    return order[::-1] if turn % 2 else order


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    *,
    around: Callable[[str], AbstractContextManager[object]] | None = None,
    on_round: Callable[[int], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Call every variant once per round and return their times.

    `warmup` rounds come first and are not recorded. `around(name)` gives a context manager that is entered and left
    outside the measured time, warm-up included. `on_round(n)` hears of the n-th finished round, warm-up included.
    `clock` returns seconds.
    """
    if not variants:
        raise ValueError("no variants to time")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds must be at least 1 and warmup at least 0, got {rounds} and {warmup}")
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        for name in round_order(names, index):
            with around(name) if around else contextlib.nullcontext():
                start = clock()
                variants[name]()
                elapsed = clock() - start
            if index >= warmup:
                seconds[name].append(elapsed)
        if on_round:
            on_round(index + 1)
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def ratio(numerator: Samples, denominator: Samples) -> Spread:
    """Spread of the per-round ratios: how many times longer `numerator` took than `denominator`.

    Two calls of one round meet the same state of the machine, so their ratio varies less than the times do.
    """
    if len(numerator.seconds) != len(denominator.seconds):
        raise ValueError("samples come from different numbers of rounds")
    return Spread.of([a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)])

"""Statistics on known numbers, and the order and number of the calls. No test looks at how long anything takes."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from loraaccel.timing import Samples, Spread, interleave, ratio, round_order


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_spread_of_known_numbers() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_quartiles_lie_between_the_values() -> None:
    samples = Samples((1.0, 2.0, 3.0, 4.0))
    assert samples.median == 2.5
    assert samples.quartiles == (1.75, 3.25)
    assert samples.spread.first_quartile == 1.75


def test_ratio_is_taken_within_each_round() -> None:
    # One round was ten times slower for both. The ratio does not see it: 2, 2, 3.
    slow, fast = Samples((2.0, 20.0, 3.0)), Samples((1.0, 10.0, 1.0))
    assert ratio(slow, fast) == Spread(2.0, 2.0, 2.5, 2.0, 3.0)
    with pytest.raises(ValueError, match="rounds"):
        ratio(slow, Samples((1.0,)))


def test_order_is_fair() -> None:
    names = ["a", "b", "c", "d"]
    orders = [round_order(names, index) for index in range(2 * len(names))]
    assert all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    followers = {(before, after) for order in orders for before, after in itertools.pairwise(order)}
    assert ("a", "b") in followers
    assert ("b", "a") in followers


def test_every_variant_is_called_once_per_round() -> None:
    calls: list[str] = []
    finished: list[int] = []
    variants = {name: (lambda name=name: calls.append(name)) for name in "xyz"}
    samples = interleave(variants, rounds=5, warmup=2, on_round=finished.append)
    assert Counter(calls) == {"x": 7, "y": 7, "z": 7}
    assert calls[:6] == ["x", "y", "z", "y", "z", "x"]
    assert {name: len(found.seconds) for name, found in samples.items()} == {"x": 5, "y": 5, "z": 5}
    assert finished == [1, 2, 3, 4, 5, 6, 7]


def test_only_the_call_itself_is_measured() -> None:
    clock = Clock()
    entered: list[str] = []

    def work(seconds: float) -> None:
        clock.now += seconds

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(name)
        clock.now += 100
        yield
        clock.now += 100

    variants = {"short": lambda: work(1.0), "long": lambda: work(3.0)}
    samples = interleave(variants, rounds=3, warmup=1, around=around, clock=clock)
    assert samples["short"].seconds == (1.0, 1.0, 1.0)
    assert samples["long"].seconds == (3.0, 3.0, 3.0)
    assert Counter(entered) == {"short": 4, "long": 4}


def test_an_error_in_a_variant_is_not_swallowed() -> None:
    def fail() -> None:
        raise RuntimeError("broken variant")

    with pytest.raises(RuntimeError, match="broken variant"):
        interleave({"fail": fail}, rounds=1)


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 1), (1, -1)])
def test_bad_counts_are_rejected(rounds: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="rounds must be"):
        interleave({"a": lambda: None}, rounds, warmup)
    with pytest.raises(ValueError, match="no variants"):
        interleave({}, 1)

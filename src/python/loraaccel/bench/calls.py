"""How many forward calls of LoRA modules ran natively, per variant, from loraaccel's own counters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import loraaccel


def _totals() -> Counter[str]:
    calls = loraaccel.info()["calls"]
    return Counter({what: sum(calls[what].values()) for what in ("fused", "fallback")})


class CallCounter:
    """Attributes the growth of the counters to the variant that was running."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Count the calls made inside the with block for variant `name`."""
        before = _totals()
        yield
        grown = _totals()
        grown.subtract(before)
        self._counts.setdefault(name, Counter()).update(grown)

    def fused(self, name: str) -> int:
        """Fused forward calls of `name` so far."""
        return self._counts.get(name, Counter())["fused"]

    def fallback(self, name: str) -> int:
        """Forward calls of `name` that took the host library's own path so far."""
        return self._counts.get(name, Counter())["fallback"]

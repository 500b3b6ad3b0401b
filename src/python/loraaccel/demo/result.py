"""Everything measured in one run, and its JSON."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loraaccel.timing import Samples, Spread, ratio

from .check import Calls, Check


@dataclass(frozen=True)
class Curve:
    """Losses (root mean squared error, rating points) and step times (seconds) of one copy."""

    train_losses: list[float]  # [num_steps]
    heldout_losses: list[float]  # [len(eval_at)]
    step_seconds: list[float]  # [num_steps]

    @property
    def final_train_loss(self) -> float:
        """Mean of the last 20 steps, or of all when there are fewer."""
        return statistics.fmean(self.train_losses[-20:])


@dataclass(frozen=True)
class Layer:
    """One LoRA module of the patched copy, as `loraaccel.patch` reported it; `reason` is empty when fused."""

    name: str
    kind: str
    fused: bool
    reason: str


@dataclass(frozen=True)
class Result:
    """Everything measured in one run."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    num_train_rows: int
    num_heldout_rows: int
    eval_at: list[int]  # steps done at each held-out evaluation, the first is 0
    plain: Curve
    patched: Curve
    num_warmup: (
        int  # first steps, left out of all times: allocators, caches and one-time choices settle in them
    )
    layers: list[Layer]
    calls: Calls  # forward calls of the patched copy
    checks: list[Check]
    total_seconds: float

    @property
    def ok(self) -> bool:
        """True when every check holds."""
        return all(check.ok for check in self.checks)

    def times(self, curve: Curve) -> Samples:
        """Step times of one copy after warm-up, in seconds."""
        return Samples(tuple(curve.step_seconds[self.num_warmup :]))

    @property
    def speedup(self) -> Spread:
        """plain / patched, step by step: both were timed one right after the other."""
        return ratio(self.times(self.plain), self.times(self.patched))


def to_json(result: Result) -> str:
    """The result as JSON; NaN and infinity, which JSON lacks, become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return str(value) if isinstance(value, Path) else value

    times = {"plain": result.times(result.plain).spread, "patched": result.times(result.patched).spread}
    summary = {
        "ok": result.ok,
        "seconds_per_step": {name: asdict(spread) for name, spread in times.items()},
        "speedup": asdict(result.speedup),
    }
    document = clean({**summary, **asdict(result)})
    for entry, check in zip(document["checks"], result.checks, strict=True):
        entry["ok"] = check.ok
    return json.dumps(document, indent=2, allow_nan=False)

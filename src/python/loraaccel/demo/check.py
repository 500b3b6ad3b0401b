"""What must hold for exit code 0: same curves, same adapter, same predictions, and a fast path that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import loraaccel

from .train import Copy

Calls = dict[str, dict[str, int]]

# Note [Bounds]: in rating points, on a scale of -4 to 4. Losses are root mean squared errors, and the triangle
# inequality bounds their difference by the root mean square of the difference of the ratings; so one number serves
# any batch size. fp32 sums in another order move a rating by about 1e-6, and training amplifies that. Largest
# difference of the train curves, measured with plain PEFT against itself after all weights were multiplied by
# 1 + 1e-7 N(0, 1), the size of their rounding:
#     300 steps of 32 texts, rank 8     6e-7
#     800 steps of 8 texts, rank 8      2e-6
#     200 steps of 4 texts, rank 64     1e-6
#     300 steps of 1 text, rank 8       4e-5
# A LoRA branch that is 1 % too large (32 texts, rank 8) makes 2e-3 within 10 steps and 7e-3 within 20. The bound is
# ten times the largest of the former and a tenth of the latter. Without training in between, ratings differ by
# 5e-6 at most.
CURVE_BOUND = 5e-4
RATING_BOUND = 1e-4


@dataclass(frozen=True)
class Check:
    """One condition of exit code 0. Rating points are floats, what is counted is an int."""

    name: str
    value: float
    relation: str  # "<=" or ">=", between value and bound
    bound: float
    unit: str

    @property
    def ok(self) -> bool:
        """False for NaN, which no comparison accepts."""
        return self.value <= self.bound if self.relation == "<=" else self.value >= self.bound

    def __str__(self) -> str:
        """The condition as a sentence."""
        value, bound = (f"{n:.1e}" if isinstance(n, float) else f"{n}" for n in (self.value, self.bound))
        return f"{self.name}: {value}, must be {self.relation} {bound} {self.unit}"


def max_difference(first: Sequence[float] | Tensor, second: Sequence[float] | Tensor) -> float:
    """max |first - second| in float64; NaN if either holds one."""
    left, right = (torch.as_tensor(values, dtype=torch.float64) for values in (first, second))
    return float((left - right).abs().max())


def check_curves(plain: Copy, patched: Copy) -> list[Check]:
    """Both loss curves, point by point. See Note [Bounds]."""
    train = max_difference(plain.train_losses, patched.train_losses)
    heldout = max_difference(plain.heldout_losses, patched.heldout_losses)
    return [
        Check("train curves, largest difference", train, "<=", CURVE_BOUND, "points"),
        Check("held-out curves, largest difference", heldout, "<=", CURVE_BOUND, "points"),
    ]


def calls_since(before: Calls, after: Calls) -> Calls:
    """The growth from one `snapshot_calls` to a later one; what did not grow is left out."""
    grown = {
        path: {key: count - before[path].get(key, 0) for key, count in counts.items()}
        for path, counts in after.items()
    }
    return {path: {key: count for key, count in counts.items() if count} for path, counts in grown.items()}


def snapshot_calls() -> Calls:
    """A copy of `loraaccel.info()["calls"]`: {"fused": {kind: n}, "fallback": {reason: n}}."""
    return {path: dict(counts) for path, counts in loraaccel.info()["calls"].items()}


def check_calls(patched: Calls, plain: Sequence[Calls]) -> list[Check]:
    """The patched copy ran fused; the models called plain did not run through loraaccel at all."""
    num_plain = sum(count for calls in plain for counts in calls.values() for count in counts.values())
    return [
        Check("fused calls, patched copy", sum(patched["fused"].values()), ">=", 1, "calls"),
        Check("loraaccel calls, models not patched", num_plain, "<=", 0, "calls"),
    ]


def num_different(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> int:
    """Names that are in one only, or whose tensors differ in dtype, shape or any bit."""

    def same(name: str) -> bool:
        if name not in first or name not in second:
            return False
        left, right = first[name], second[name]
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))

    return sum(not same(name) for name in first.keys() | second.keys())


def check_states(
    plain: Mapping[str, Tensor], patched: Mapping[str, Tensor], reloaded: Mapping[str, Tensor]
) -> list[Check]:
    """Adapter states of the three models: PEFT's names, and the same bits after save and load."""
    num_strange = len(patched.keys() ^ plain.keys())
    return [
        Check("adapter names unknown to plain PEFT", num_strange, "<=", 0, "tensors"),
        Check("adapter tensors changed by reload", num_different(patched, reloaded), "<=", 0, "tensors"),
    ]


def check_ratings(patched: Tensor, reloaded: Tensor) -> Check:
    """Held-out ratings [rows] of the patched copy and of plain PEFT with the reloaded adapter."""
    distance = max_difference(patched, reloaded)
    return Check("ratings after reload, difference", distance, "<=", RATING_BOUND, "points")

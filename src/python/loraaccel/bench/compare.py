"""Numerical comparison of the variants, so that a fast wrong result cannot win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Note [Tolerance]
# Reference: the same eager PEFT model in float64, from the operands as stored. The error of eager PEFT itself
# against it, per tensor in the Euclidean norm, is what rounding costs in this dtype on this model. Another order of
# the same roundings gives an error of the same size, not the same error, so a variant may have twice PEFT's, plus one
# epsilon of the dtype for tensors that PEFT happens to get exactly. A dropped branch, a wrong scale or stale factors
# are far above that.
FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """Largest relative error of a variant over the compared tensors, in units of what is allowed."""

    tensor: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """False for NaN too."""
        return self.error <= self.allowed


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """|actual - reference| / |reference| in the Euclidean norm, computed in float64; inf if the shapes differ."""
    if actual.shape != reference.shape:
        return float("inf")
    wide = actual.detach().to(torch.float64)
    norm = torch.linalg.vector_norm(reference)
    return float(torch.linalg.vector_norm(wide - reference) / norm.clamp_min(torch.finfo(torch.float64).tiny))


def compare(
    actual: Mapping[str, torch.Tensor],
    peft: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    epsilon: float,
) -> Comparison:
    """The worst tensor of `actual`. All three hold the same names; `epsilon` is that of the computing dtype."""
    worst: Comparison | None = None
    for name, expected in reference.items():
        allowed = FACTOR * relative_error(peft[name], expected) + epsilon
        found = Comparison(name, relative_error(actual[name], expected), allowed)
        if worst is None or not found.ok or found.error / found.allowed > worst.error / worst.allowed:
            worst = found
        if not found.ok:
            break
    if worst is None:
        raise ValueError("nothing to compare")
    return worst

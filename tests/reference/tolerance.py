"""How far a result may be from the float64 reference. Every comparison of the tests takes its bound from here.

The reference is computed in float64 from the operands as stored, already rounded to their type. Per element

    |y - ref| <= c u |ref| + d v sqrt(L) terms + u |lent| + tiny        c, d = 4, 8 forward; 8, 16 backward

c u |ref|      u is the unit roundoff of the result's type: 2^-8 bfloat16, 2^-11 float16, 2^-24 float32, 2^-53 float64.
               Rounding the result once costs u |ref|; the rest is room for operands that are rounded on the way
               (s B, 1 / (1 - p), and s G B in the backward pass, hence twice as much there).
d v sqrt(L) t  v = 2^-24, the unit roundoff of float32 sums (2^-53 where the operands are float64). A sum of L terms has
               an error of about v sqrt(L) times the sum of the absolute values of its terms; the factor covers the tail
               of the distribution and the two or three sums that follow one another. `terms` is the formula on absolute
               values, L the longest sum on the way.
u |lent|       only where torch's own GEMM computes x W^T + bias or G W for 16-bit operands: it hands over a number that
               it has rounded already. Where the adapter's part cancels it the result is small and that rounding is not,
               so c u |ref| cannot cover it. `lent` is that product.
tiny           one subnormal step of the result's type: below the normal range rounding has an absolute size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def bound(
    ref: Tensor,
    terms: Tensor,
    length: int,
    dtype: torch.dtype,
    *,
    backward: bool = False,
    lent: Tensor | None = None,
) -> Tensor:
    """The rule above, per element. `dtype` is that of the result, `length` is L."""
    c, d = (8, 16) if backward else (4, 8)
    u = unit_roundoff(dtype)
    sums = unit_roundoff(torch.float64 if dtype == torch.float64 else torch.float32)
    info = torch.finfo(dtype)
    limit = c * u * ref.abs() + d * sums * math.sqrt(max(length, 1)) * terms + info.tiny * info.eps
    return limit if lent is None else limit + u * lent.abs()


def assert_within(name: str, got: Tensor, ref: Tensor, limit: Tensor) -> None:
    """got is finite, has the reference's shape and lies within the limit everywhere."""
    assert got.shape == ref.shape, f"{name}: shape {list(got.shape)}, expected {list(ref.shape)}"
    if got.numel() == 0:
        return
    value = got.detach().to(torch.float64)
    error = (value - ref).abs()
    excess = torch.where(torch.isfinite(value), error / limit, math.inf)
    worst = int(excess.argmax())
    assert float(excess.max()) <= 1, (
        f"{name}: {int((excess > 1).sum())} of {got.numel()} elements outside the bound, the worst "
        f"{float(excess.max()):.3g} times it: {float(value.flatten()[worst])} at flat index {worst}, "
        f"expected {float(ref.flatten()[worst])}"
    )


class ErrorRatio:
    """Compares the errors of two implementations, ours and the one it replaces, over several inputs of one kind.

    Rule: our root mean square error is no larger than theirs, and neither is our mean (over the inputs) of the largest
    error. Both are measured on finitely many elements, so equal implementations differ by chance. With n elements and S
    inputs that chance is, as one standard deviation of the ratio,
      rms:      sqrt(2.5 / n): a root mean square has a relative deviation sqrt((k - 1) / 4 n), kurtosis k up to 6 since
                elements differ in scale; two of them, independent.
      largest:  sqrt(2) 1.28 / (2 ln (n / S)) / sqrt(S): the largest of n values is Gumbel distributed about
                sqrt(2 ln n), with a relative deviation 1.28 / (2 ln n); a mean of S, two of them.
    Four of these are the slack.
    """

    def __init__(self) -> None:
        self.squares = [0.0, 0.0]
        self.largest = [0.0, 0.0]
        self.elements = 0
        self.inputs = 0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """Signed or absolute errors of both on one input."""
        for i, error in enumerate((ours, theirs)):
            self.squares[i] += float(error.square().sum())
            self.largest[i] += float(error.abs().max())
        self.elements += ours.numel()
        self.inputs += 1

    def complaints(self) -> Sequence[str]:
        """Empty where ours is no worse."""
        n, s = self.elements, self.inputs
        measured = {
            "rms": (self.squares[0] ** 0.5, self.squares[1] ** 0.5, 1 + 4 * (2.5 / n) ** 0.5),
            "largest": (*self.largest, 1 + 4 * 2**0.5 * 1.28 / (2 * math.log(n / s)) / s**0.5),
        }
        return [
            f"{name} error {ours / theirs if theirs else math.inf:.3f} times eager's, allowed {allowed:.3f}; n = {n}"
            for name, (ours, theirs, allowed) in measured.items()
            if ours > theirs * allowed
        ]

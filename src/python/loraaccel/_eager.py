"""The formula in plain torch: what `lora_linear` computes with the switch off, and what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: Sequence[float],
    dropouts: Sequence[float],
) -> Tensor:
    """As PEFT computes it: x is cast to each adapter's type, the sum to the frozen layer's type at the end."""
    y = F.linear(x, weight, bias)
    dtype = y.dtype
    for a, b, scaling, p in zip(lora_a, lora_b, scalings, dropouts, strict=True):
        x = x.to(a.dtype)
        y = y + F.linear(F.linear(F.dropout(x, p), a), b) * scaling
    return y.to(dtype)

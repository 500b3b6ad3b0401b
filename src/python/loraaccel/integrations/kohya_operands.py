"""What kohya's modules of every kind are asked for at a call: their strength as a number, types that go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loraaccel._autograd import autocast_dtype


def scaling_of(*values: Any) -> float | None:
    """Their product as one number; None where one of them is no number (a multiplier for each sample, or one that is
    trained)."""
    product = 1.0
    for value in values:
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.requires_grad or value.device.type != "cpu":
                return None
            value = value.item()
        try:
            product *= float(value)
        except (TypeError, ValueError):
            return None
    return product


def why_not_types(x: Tensor, weight: Tensor, adapters: torch.dtype) -> str:
    """Reason code for the types of x, of the frozen weight and of the adapter; empty where the operators take them.
    Without autocast the host casts nothing and refuses what differs: its own forward says best what is wrong."""
    types = x.dtype, weight.dtype, adapters
    if autocast_dtype(x, weight) is None:
        return "" if len(set(types)) == 1 else "dtype"
    return "dtype" if torch.float64 in types else ""

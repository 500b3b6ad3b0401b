"""Checks that the operators share: what the dispatcher would report without naming the argument, or not at all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def check_operands(where: str, operands: dict[str, Any], x: Tensor) -> None:
    given = operands if any(t is x for t in operands.values()) else {"x": x, **operands}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{where}: {name} is a {type(t).__name__}, expected a torch.Tensor")
    for name, t in given.items():
        if t.device != x.device:
            raise ValueError(f"{where}: {name} is on {t.device}, expected {x.device} as x")


def number(op: str, scaling: Any) -> float:
    """The scaling as a number. In compiled code as it is, a number that may change or a tensor of no dimensions: see
    `scaled_factors`."""
    if torch.compiler.is_compiling() and isinstance(scaling, (int, float, torch.SymFloat, Tensor)):
        return scaling
    try:
        return float(scaling)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scaling is {scaling!r}, expected a number") from None


def scaled_factors(lora_a: Tensor, lora_b: Tensor, scaling: float | Tensor) -> tuple[Tensor, Tensor, float]:
    """A, B times the scale, and 1, for compiled code: a scale that is an argument of the operator is a constant there,
    and each change of strength would compile again. In float32 for 16-bit adapters, so that nothing is rounded."""
    sums = torch.float64 if lora_a.dtype == torch.float64 else torch.float32
    return lora_a.to(sums), lora_b.to(sums) * scaling, 1.0


def in_force(training: bool, *probabilities: float) -> list[float]:
    """0 outside training; the operator refuses what is no probability, in training or not."""
    return [float(p) if training or not 0.0 <= p <= 1.0 else 0.0 for p in probabilities]


def check_product(op: str, scaling: float, x: Tensor, operands: dict[str, Tensor]) -> None:
    """A finite scale, and float64 operands beside float64 only: what the operators of linear layers ask for, where the
    product may be made by torch."""
    if not torch.compiler.is_compiling() and not math.isfinite(scaling):
        raise RuntimeError(f"{op}: scaling is {scaling}, expected a finite number")
    for name, t in operands.items():
        if (t.dtype == torch.float64) != (x.dtype == torch.float64) or not t.is_floating_point():
            kinds = [str(v.dtype).removeprefix("torch.") for v in (t, x)]
            raise RuntimeError(
                f"{op}: {name} is {kinds[0]} and x {kinds[1]}, expected both float64 or neither"
            )


def check_probabilities(op: str, **probabilities: float) -> None:
    for name, p in probabilities.items():
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"{op}: {name} is {p}, expected a probability from 0 to 1")


def check_matrix(op: str, name: str, t: Tensor, rows: int | None, cols: int | None) -> None:
    wrong = t.dim() != 2 or (rows is not None and t.shape[0] != rows)
    if wrong or (cols is not None and t.shape[1] != cols):
        expected = ", ".join("*" if s is None else str(s) for s in (rows, cols))
        raise RuntimeError(f"{op}: {name} has shape {list(t.shape)}, expected [{expected}]")

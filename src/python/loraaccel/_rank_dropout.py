"""Rank dropout of one mask for the whole batch, LyCORIS's: a multiplier of the adapter's ranks, or of ΔW's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from loraaccel._checks import check_probabilities, in_force
from loraaccel._eager import rank_mask

DIALECTS = ("kohya", "lycoris", "lycoris_scaled")


def check_dialect(op: str, dialect: str) -> None:
    if dialect not in DIALECTS:
        expected = ", ".join(repr(d) for d in DIALECTS)
        raise ValueError(f"{op}: rank_dropout_dialect is {dialect!r}, expected one of {expected}")


def shared_ranks(
    op: str, lora_a: Tensor, lora_b: Tensor, p: float, dialect: str, training: bool
) -> tuple[Tensor, Tensor, float]:
    """A with dropped ranks as zeros, B, and the probability that is left for a mask of each sample: 0, or p with
    kohya's dialect. The scaled mask is applied in float32: a 16-bit A would be rounded by it."""
    check_dialect(op, dialect)
    (p,) = in_force(training, p)
    if dialect == "kohya" or p == 0.0 or lora_a.dim() == 0:
        return lora_a, lora_b, p
    check_probabilities(op, rank_dropout=p)
    mask = shared_mask(lora_a.shape[0], p, dialect)
    if dialect == "lycoris_scaled" and lora_a.dtype.itemsize == 2 and lora_b.dtype == lora_a.dtype:
        lora_a, lora_b = lora_a.float(), lora_b.float()
    return lora_a * mask.to(lora_a).reshape(-1, *[1] * (lora_a.dim() - 1)), lora_b, 0.0


def row_mask(op: str, weight: Tensor, p: float, dialect: str, training: bool) -> Tensor | None:
    """Multiplier [N] of ΔW's rows in float32 (float64), N those of `weight`; None where nothing is dropped."""
    check_dialect(op, dialect)
    (p,) = in_force(training, p)
    check_probabilities(op, rank_dropout=p)
    if p == 0.0:
        return None
    if dialect == "kohya":
        return rank_mask(weight.new_empty(weight.shape[0]), p)
    return shared_mask(weight.shape[0], p, dialect).to(weight)


def shared_mask(size: int, p: float, dialect: str) -> Tensor:
    """Drawn as LyCORIS does, so that the same seed drops the same. Where everything is dropped the scaled mask is zero,
    not 0 / 0."""
    mask = (torch.rand(size) > p).double()
    if dialect == "lycoris_scaled":
        mask = mask * size / mask.sum().clamp_min(1.0)
    return mask

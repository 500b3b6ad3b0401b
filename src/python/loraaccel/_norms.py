"""Norms of a LoRA update without making its matrix, and what trainers do with them: the limit on norms, GGPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loraaccel import _state
from loraaccel._checks import check_matrix, check_operands, number
from loraaccel._dora import norms_op
from loraaccel.ops import lora_linear, lora_linear_adapters


def lora_norm(lora_A: Tensor, lora_B: Tensor, scaling: float = 1.0) -> Tensor:
    """Frobenius norm of scaling · B A, a number in float32 (float64 for float64), without gradients.

    lora_A [R, K], lora_B [N, R], or a convolution's [R, C, kh, kw] and [N, R, 1, 1]. By Gram matrices,
    ‖B A‖² = Σ (Bᵀ B) ∘ (A Aᵀ): R² (N + K) multiplications instead of N K R, and nothing of size N K.
    RuntimeError for other shapes.
    """
    a, b = _factors("lora_norm", lora_A, lora_B)
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        sums = torch.float64 if a.dtype == torch.float64 else torch.float32
        return (update_squares([(a, b)])[0].sqrt() * abs(number("lora_norm", scaling))).to(sums)


def lora_row_norms(lora_A: Tensor, lora_B: Tensor, scaling: float = 1.0) -> Tensor:
    """Norms of the rows of scaling · B A, [N], in float32 (float64 for float64), without gradients. Operands and errors
    as of `lora_norm`."""
    a, b = _factors("lora_row_norms", lora_A, lora_B)
    scale = number("lora_row_norms", scaling)
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        if _state.off():
            sums = torch.float64 if a.dtype == torch.float64 else torch.float32
            return torch.linalg.norm(scale * (b.to(sums) @ a.to(sums)), dim=1)
        if torch.compiler.is_compiling():
            return norms_op(None, [a.detach()], [b.detach()], [scale])
        sums = torch.float64 if a.dtype == torch.float64 else torch.float32
        return (update_row_squares(a, b).sqrt() * abs(scale)).to(sums)


class MaxNorm(NamedTuple):
    """What `limit_norms` did."""

    scaled: int  # pairs that were above the limit
    mean: float  # of the norms afterwards
    largest: float


def limit_norms(
    lora_As: Sequence[Tensor], lora_Bs: Sequence[Tensor], scalings: Sequence[float], max_norm: float
) -> MaxNorm:
    """Scales pairs whose update scaling · B A has a norm above ``max_norm`` down to it, in place: A and B alike, by
    the square root of the ratio (kohya's scale_weight_norms). Norms by `lora_norm`, without the update's matrix.

    ValueError for sequences of different lengths or a limit that is not positive.
    """
    if len({len(lora_As), len(lora_Bs), len(scalings)}) != 1:
        raise ValueError(
            f"limit_norms: {len(lora_As)} lora_As, {len(lora_Bs)} lora_Bs and {len(scalings)} scalings, expected as "
            "many of each"
        )
    if not max_norm > 0:
        raise ValueError(f"limit_norms: max_norm is {max_norm}, expected a positive number")
    if not lora_As:
        return MaxNorm(0, 0.0, 0.0)
    norms = torch.stack([lora_norm(a, b, s) for a, b, s in zip(lora_As, lora_Bs, scalings, strict=True)])
    ratios = torch.where(norms > max_norm, max_norm / norms, 1.0).tolist()
    scaled = 0
    with torch.no_grad():
        for a, b, ratio in zip(lora_As, lora_Bs, ratios, strict=True):
            if ratio != 1.0:
                scaled += 1
                a.mul_(ratio**0.5)
                b.mul_(ratio**0.5)
    after = norms * torch.tensor(ratios, dtype=norms.dtype)
    return MaxNorm(scaled, float(after.mean()), float(after.max()))


def ggpo_norms(
    lora_A: Tensor, lora_B: Tensor, grad_A: Tensor, grad_B: Tensor, scaling: float, weight_norm: float
) -> tuple[Tensor, Tensor]:
    """What GGPO (kohya's Flux networks) asks of a layer after a step: combined norms √(weight_norm² + ‖(B A)_n‖²) and
    gradient norms ‖scaling · (B dA + dB A)_n‖ of each row, [N] each, without a matrix of the update's size.

    weight_norm: the estimate of the frozen rows' norm.
    """
    a, b = _factors("ggpo_norms", lora_A, lora_B)
    grad_a, grad_b = _factors("ggpo_norms", grad_A.to(lora_A.dtype), grad_B.to(lora_B.dtype))
    sums = torch.float64 if a.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        combined = (update_row_squares(a, b) + float(weight_norm) ** 2).sqrt()
        grads = gradient_row_squares(a, b, grad_a, grad_b).sqrt() * abs(number("ggpo_norms", scaling))
    return combined.to(sums), grads.to(sums)


def ggpo_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    sigma: float,
    beta: float,
    combined_norms: Tensor,
    grad_norms: Tensor,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """A LoRA linear layer with a random perturbation of its weight in training (gradient-guided, GGPO):
    y = lora_linear(...) + x Pᵀ,  P = randn(N, K) ∘ (sigma · combined_norms + beta · grad_norms²) / √N, row by row.

    The perturbation is no part of the gradients, that of x included, as in kohya's networks. Its numbers come from
    torch's generator. combined_norms and grad_norms [N]: see `ggpo_norms`. The rest as of `lora_linear`.
    """
    y = lora_linear(
        x, weight, bias, lora_A, lora_B, scaling, hidden_dropout=hidden_dropout, rank_dropout=rank_dropout,
        training=training,
    )  # fmt: skip
    if not training:
        return y
    check_operands("ggpo_linear", {"combined_norms": combined_norms, "grad_norms": grad_norms}, x)
    for name, t in (("combined_norms", combined_norms), ("grad_norms", grad_norms)):
        if t.numel() != weight.shape[0]:
            raise RuntimeError(f"ggpo_linear: {name} has shape {list(t.shape)}, expected [{weight.shape[0]}]")
    with torch.no_grad():
        spread = (sigma * combined_norms.flatten() + beta * grad_norms.flatten().square()) / weight.shape[
            0
        ] ** 0.5
        perturbation = torch.randn_like(weight).mul_(spread.to(weight.dtype)[:, None])
        moved = lora_linear_adapters(x.detach(), perturbation, None, (), (), [], [])
    return y + moved


# ---- Gram matrices ---------------------------------------------------------------------------------------------------

# Sums in float32 whose terms cancel to less than this part of them are made again in float64.
_CANCELS = 1e-3


def update_squares(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """‖B A‖² of each pair (A [R, K], B [N, R]), in float64, [len(pairs)]: Σ (Bᵀ B) ∘ (A Aᵀ), never below zero.
    Outside of autocast and of autograd, as the functions below."""
    squares, sizes = zip(*(_square(*_widened(a, b)) for a, b in pairs), strict=True)
    total = torch.stack(squares)
    for i in (total < _CANCELS * torch.stack(sizes)).nonzero().flatten().tolist():
        a, b = pairs[i]
        total[i] = _square(a.double(), b.double())[0]
    return total.clamp_min_(0.0)


def _square(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and what it is where the rows of A are at right angles."""
    rows, columns = a @ a.t(), b.t() @ b
    return (rows * columns).sum(dtype=torch.float64), rows.diagonal().dot(columns.diagonal())


def update_row_squares(a: Tensor, b: Tensor) -> Tensor:
    """‖(B A)_n‖² of each row, [N], in float32 or float64, never below zero: rowsum((B (A Aᵀ)) ∘ B)."""
    wide_a, wide_b = _widened(a, b)
    rows = wide_a @ wide_a.t()
    total = ((wide_b @ rows) * wide_b).sum(1)
    cancelled = (total < _CANCELS * (wide_b.square() @ rows.diagonal())).nonzero().flatten()
    if cancelled.numel():
        exact_a, exact_b = a.double(), b[cancelled].double()
        total[cancelled] = ((exact_b @ (exact_a @ exact_a.t())) * exact_b).sum(1).to(total.dtype)
    return total.clamp_min_(0.0)


def gradient_row_squares(a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> Tensor:
    """`update_row_squares` of B dA + dB A, which is [B dB] times [dA; A]."""
    return update_row_squares(torch.cat([grad_a, a]), torch.cat([b, grad_b], 1))


def _widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors in a type whose products are exact enough, whatever torch may round float32 to."""
    exact = a.dtype != torch.float64 and torch.get_float32_matmul_precision() == "highest"
    dtype = torch.float32 if exact else torch.float64
    return a.to(dtype), b.to(dtype)


def _factors(op: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    check_operands(op, {"lora_A": a, "lora_B": b}, a)
    a, b = (t.flatten(1) if t.dim() > 2 else t for t in (a, b))
    check_matrix(op, "lora_A", a, None, None)
    check_matrix(op, "lora_B", b, None, a.shape[0])
    return a, b

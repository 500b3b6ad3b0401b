"""LyCORIS's DoRA: the gain that stands for its decomposed weight, with gradients through the norms.

W' = g ∘ V, V = W + ΔW, g = multiplier (m / (c + eps) - 1) + 1, c the norms of V's rows (wd_on_out) or columns. Unlike
PEFT's, c is no constant: ∂L/∂V has the part (∂L/∂c / c) ∘ V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loraaccel import _dora, _state
from loraaccel._autograd import _below_autograd

_BLOCK = 1024  # rows of W that are widened at a time


class RowNorms(torch.autograd.Function):
    """c [N] = ‖W + s B A‖ of each row, W [N, K] a constant; in sums of float32 (float64), without a matrix of W's size.

    With e = ∂L/∂c / c:  ∂L/∂B = s e ∘ (W Aᵀ + s B A Aᵀ),  ∂L/∂A = s ((e ∘ B)ᵀ W + s Bᵀ (e ∘ B) A).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
        wide_a, wide_b = a.to(sums), b.to(sums)
        with _below_autograd():
            norms: Tensor = _dora.norms_op(weight, [wide_a], [wide_b], [scale])
        ctx.save_for_backward(weight, wide_a, wide_b, norms)
        ctx.scale, ctx.types = scale, (a.dtype, b.dtype)
        return norms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, a, b, norms = ctx.saved_tensors
        scale = ctx.scale
        with torch.autocast(weight.device.type, enabled=False):
            share = torch.where(norms == 0, torch.zeros_like(grad), grad / norms)[:, None]
            scaled = share * b
            down = scale * ((b.t() @ scaled) @ a)
            up = scale * (b @ (a @ a.t()))
            for i in range(0, weight.shape[0], _BLOCK):
                rows = weight[i : i + _BLOCK].to(a.dtype)
                up[i : i + _BLOCK] += rows @ a.t()
                down += scaled[i : i + _BLOCK].t() @ rows
        return None, (scale * down).to(ctx.types[0]), (scale * share * up).to(ctx.types[1]), None


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """‖W + s B A‖ of each row, with gradients of A and B."""
    if _state.off():
        return matrix_norms(weight, scale * (b.to(weight.dtype) @ a.to(weight.dtype)), 0)
    norms: Tensor = RowNorms.apply(weight.detach(), a, b, scale)
    return norms


def matrix_norms(weight: Tensor, delta: Tensor, dim: int) -> Tensor:
    """‖W + ΔW‖ of each row (dim 0) or column (1) of matrices, with gradients of ΔW, which is made."""
    sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(weight.detach().to(sums) + delta.to(sums), dim=1 - dim)


def gain_of(magnitude: Tensor, norms: Tensor, multiplier: float) -> Tensor:
    """g, in the norms' type; eps is that of the magnitude's, as in the host."""
    ratio = magnitude.flatten().to(norms.dtype) / (norms + torch.finfo(magnitude.dtype).eps)
    return ratio if multiplier == 1 else multiplier * (ratio - 1) + 1

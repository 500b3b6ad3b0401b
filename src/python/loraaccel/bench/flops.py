"""Floating-point operations of a LoRA projection. M rows, K inputs, N outputs, R rank; a multiply-add is two."""

from __future__ import annotations


def forward_flops(m: int, k: int, n: int, r: int) -> int:
    """y = x W^T + (x A^T) B^T. Rank 0 is the frozen layer alone."""
    return 2 * m * k * n + 2 * m * r * (k + n)


def backward_flops(m: int, k: int, n: int, r: int) -> int:
    """Gradients of x, A and B with W frozen: dy W, then dy B, dB, dA and their way back to x, 2 M R (K + N) twice."""
    return 2 * m * k * n + 4 * m * r * (k + n)

"""LoHa layers: a LoRA layer of the product of the ranks where that is cheaper than making the update's matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel._checks import (
    check_matrix,
    check_operands,
    check_probabilities,
    check_product,
    in_force,
    number,
)
from loraaccel._conv2d import Pair, conv_update, with_output_dropout
from loraaccel._dropout import seeded_dropout
from loraaccel._rank_dropout import row_mask
from loraaccel.ops import lora_delta_adapters, lora_linear_adapters


def loha_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    scaling: float = 1.0,
    *,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoHa linear layer:  y = x Wᵀ + bias + x ΔWᵀ,  ΔW = scaling · (w1_a w1_b) ∘ (w2_a w2_b).

    w1_a [N, R1], w1_b [R1, K], w2_a [N, R2], w2_b [R2, K]; the rest as of `lora_linear`. ΔW has rank at most R1 R2,
    with factors made of products of rows and of columns: where that is cheaper the layer is a LoRA layer of that rank,
    else ΔW itself is made. ``rank_dropout`` drops rows of ΔW in training, kept ones times 1 / (1 - p) or as
    ``rank_dropout_dialect`` says, see `lora_linear`; ``output_dropout`` entries of x ΔWᵀ.
    Source: Hyeon-Woo et al., "FedPara", 2022; LyCORIS, Yeh et al., 2023.
    """
    op = "loha_linear"
    operands = {"weight": weight, "bias": bias, "w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b}
    check_operands(op, {"x": x} | {k: v for k, v in operands.items() if v is not None or k != "bias"}, x)
    check_matrix(op, "weight", weight, None, x.shape[-1] if x.dim() else None)
    n, k = weight.shape
    _check_hadamard(op, (w1_a, w1_b, w2_a, w2_b), n, k)
    scale = number(op, scaling)
    (p_output,) = in_force(training, output_dropout)
    check_probabilities(op, output_dropout=p_output)
    check_product(op, scale, x, {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b})
    rows = x.numel() // max(k, 1)
    rank = w1_a.shape[1] * w2_a.shape[1]
    mask = row_mask(op, w1_a, rank_dropout, rank_dropout_dialect, training)
    added = _records(x, w1_a, w1_b, w2_a, w2_b) or _sixteen_bit(x, weight)
    if _factors_pay(rows, n, k, rank, w1_a.shape[1] + w2_a.shape[1], added):
        a, b = hadamard_factors(w1_a, w1_b, w2_a, w2_b)
        b = b if mask is None else b * mask[:, None]
        if p_output:
            base = lora_linear_adapters(x, weight, bias, (), (), [], [])
            return lora_delta_adapters(x, base, (a,), (b,), [scale], [0.0], (), p_output)
        return lora_linear_adapters(x, weight, bias, (a,), (b,), [scale], [0.0])
    delta = (w1_a @ w1_b) * (w2_a @ w2_b) * scale
    delta = delta if mask is None else delta * mask[:, None]
    if p_output:
        base = lora_linear_adapters(x, weight, bias, (), (), [], [])
        return base + seeded_dropout(F.linear(x.to(base.dtype), delta.to(base.dtype)), p_output)
    return _with_delta(x, weight, bias, delta)


def hadamard_factors(w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> tuple[Tensor, Tensor]:
    """A [R1 R2, K] and B [N, R1 R2] with B A = (w1_a w1_b) ∘ (w2_a w2_b): all products of a row (column) of one with
    a row (column) of the other."""
    a = (w1_b[:, None] * w2_b[None]).flatten(0, 1)
    b = (w1_a[:, :, None] * w2_a[:, None]).flatten(1)
    return a, b


def _check_hadamard(op: str, factors: Sequence[Tensor], n: int, k: int) -> None:
    w1_a, w1_b, w2_a, w2_b = factors
    for name, a, b in (("w1", w1_a, w1_b), ("w2", w2_a, w2_b)):
        check_matrix(op, f"{name}_a", a, n, None)
        check_matrix(op, f"{name}_b", b, a.shape[1], k)


def _factors_pay(rows: int, n: int, k: int, rank: int, factors: int, added: bool) -> bool:
    """Multiplications of the factored form against those of making ΔW [N, K] from `factors` ranks. `added`: another
    product with a matrix of that size comes with it, of its gradient or of an update that cannot be added to W."""
    passes = 3 if added else 1
    factored = passes * rows * rank * (n + k)
    made = passes * n * k * factors + (rows * n * k if added else 0)
    return factored <= made


def factors_pay_alone(rows: int, n: int, k: int, rank: int, factors: int) -> bool:
    """The same for an update on its own, where made it costs a product with ΔW wherever factored it costs two."""
    return rows * rank * (n + k) <= n * k * (rows + factors)


def _sixteen_bit(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype.itemsize == 2 or torch.is_autocast_enabled(x.device.type)


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _with_delta(x: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor) -> Tensor:
    """x (W + ΔW)ᵀ + bias. In 16 bit the sum would lose ΔW below W's last bit: there the products are added."""
    if not _sixteen_bit(x, weight):
        return lora_linear_adapters(x, weight + delta.to(weight.dtype), bias, (), (), [], [])
    base = lora_linear_adapters(x, weight, bias, (), (), [], [])
    return base + F.linear(x.to(base.dtype), delta.to(base.dtype))


def loha_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    scaling: float = 1.0,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    *,
    t1: Tensor | None = None,
    t2: Tensor | None = None,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoHa convolution:  y = conv(x, W + ΔW) + bias,  ΔW = scaling · (w1_a w1_b) ∘ (w2_a w2_b), reshaped as W.

    w1_a, w2_a [N, R]; w1_b, w2_b [R, C kh kw] (or [R, C, kh, kw]). With ``t1`` and ``t2`` [R, R', kh, kw], Tucker's
    form, w1_b and w2_b are [R', C] and each product becomes Σ w_a[n, i] t[i, j, u, v] w_b[j, c]: a `lora_conv2d` with a
    middle, of the product of the ranks. Arguments, choice of the form and errors as in
    `loha_linear` and `lora_conv2d`.
    """
    op = "loha_conv2d"
    operands = {"weight": weight, "bias": bias, "w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b}
    check_operands(op, {"x": x} | {k: v for k, v in operands.items() if v is not None or k != "bias"}, x)
    if (t1 is None) != (t2 is None):
        raise ValueError(f"{op}: one of t1 and t2, expected both or neither")
    if t1 is not None and t2 is not None:
        return _tucker(op, x, weight, bias, (w1_a, w1_b, t1), (w2_a, w2_b, t2), scaling, (stride, padding, dilation),
                       rank_dropout, output_dropout, rank_dropout_dialect, training)  # fmt: skip
    w1_b, w2_b = w1_b.flatten(1), w2_b.flatten(1)
    n, k = weight.shape[0], weight[0].numel()
    _check_hadamard(op, (w1_a, w1_b, w2_a, w2_b), n, k)
    scale = number(op, scaling)
    (p_output,) = in_force(training, output_dropout)
    check_probabilities(op, output_dropout=p_output)
    check_product(op, scale, x, {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b})
    geometry = stride, padding, dilation
    base = F.conv2d(x, weight, bias, *geometry)
    pixels = base.shape[0] * base.shape[2:].numel()
    rank = w1_a.shape[1] * w2_a.shape[1]
    mask = row_mask(op, w1_a, rank_dropout, rank_dropout_dialect, training)
    if _factors_pay(pixels, n, k, rank, w1_a.shape[1] + w2_a.shape[1], _records(x, w1_a, w1_b, w2_a, w2_b)):
        a, b = hadamard_factors(w1_a, w1_b, w2_a, w2_b)
        b = b if mask is None else b * mask[:, None]
        down = a.reshape(rank, *weight.shape[1:])
        return with_output_dropout(
            base, p_output, lambda y: conv_update(y, x, down, b, None, scale, geometry)
        )
    delta = (w1_a @ w1_b) * (w2_a @ w2_b) * scale
    delta = delta if mask is None else delta * mask[:, None]
    return base + seeded_dropout(
        F.conv2d(x, delta.reshape(weight.shape).to(x.dtype), None, *geometry), p_output
    )


def _tucker(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    geometry: tuple[Any, Any, Any],
    rank_dropout: float,
    output_dropout: float,
    dialect: str,
    training: bool,
) -> Tensor:
    (w1_a, w1_b, t1), (w2_a, w2_b, t2) = first, second
    check_operands(op, {"x": x, "t1": t1, "t2": t2}, x)
    for name, a, b, t in (("1", w1_a, w1_b, t1), ("2", w2_a, w2_b, t2)):
        check_matrix(op, f"w{name}_a", a, weight.shape[0], None)
        check_matrix(op, f"w{name}_b", b, None, weight.shape[1])
        expected = (a.shape[1], b.shape[0], *weight.shape[2:])
        if tuple(t.shape) != expected:
            raise RuntimeError(f"{op}: t{name} has shape {list(t.shape)}, expected {list(expected)}")
    mask = row_mask(op, w1_a, rank_dropout, dialect, training)
    down, up = hadamard_factors(w1_a, w1_b, w2_a, w2_b)
    if mask is not None:
        up = up * mask[:, None]
    mid = (t1[:, None, :, None] * t2[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    base = F.conv2d(x, weight, bias, *geometry)
    scale = number(op, scaling)
    check_product(op, scale, x, {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b, "t1": t1, "t2": t2})
    (p_output,) = in_force(training, output_dropout)
    check_probabilities(op, output_dropout=p_output)
    return with_output_dropout(
        base, p_output, lambda y: conv_update(y, x, down[:, :, None, None], up, mid, scale, geometry)
    )

"""The formula in plain torch: what `lora_linear` computes with the switch off, and what tests compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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


def lora_delta(
    x: Tensor,
    base: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    rank_dropouts: Sequence[float] = (),
    output_dropout: float = 0.0,
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> Tensor:
    """base and the adapters' update, the latter with every kind of dropout; as many numbers as `DeltaCall` has."""
    check(x, base, lora_a, lora_b, scalings, (*dropouts, *rank_dropouts, output_dropout), adapter_ids)
    y, column = base, 0
    for i, (a, b, scaling, p) in enumerate(zip(lora_a, lora_b, scalings, dropouts, strict=True)):
        x = x.to(a.dtype)
        h = F.linear(F.dropout(x, p), a)
        if rank_dropouts:
            h = F.dropout(h, rank_dropouts[2 * i])
            if rank_dropouts[2 * i + 1]:
                h = h * rank_mask(h, rank_dropouts[2 * i + 1])
        if rank_factors is not None:
            factors = rank_factors[:, column : column + a.shape[0]].reshape(h.shape)
            h = (h * factors).to(h.dtype)
            column += a.shape[0]
        delta = F.dropout(F.linear(h, b) * scaling, output_dropout)
        if adapter_ids is not None:
            mine = (adapter_ids == i).to(y.device).reshape(-1, *[1] * (delta.dim() - 1))
            delta = torch.where(mine if delta.dim() > 1 else mine[0], delta, torch.zeros_like(delta))
        y = y + delta
    return y.to(base.dtype)


def check(
    x: Tensor,
    base: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scalings: Sequence[float],
    probabilities: Sequence[float],
    adapter_ids: Tensor | None = None,
) -> None:
    """What plain torch would broadcast, or take, and the operators refuse."""
    for a, b, scaling in zip(lora_a, lora_b, scalings, strict=True):
        if a.dim() != 2 or a.shape[1] != x.shape[-1]:
            raise RuntimeError(f"loraaccel: lora_A has shape {list(a.shape)}, expected [R, {x.shape[-1]}]")
        if tuple(b.shape) != (base.shape[-1], a.shape[0]):
            expected = [base.shape[-1], a.shape[0]]
            raise RuntimeError(f"loraaccel: lora_B has shape {list(b.shape)}, expected {expected} (N, R)")
        if not torch.compiler.is_compiling() and not math.isfinite(scaling):
            raise RuntimeError(f"loraaccel: scaling is {scaling}, expected a finite number")
    if any(not 0.0 <= p <= 1.0 for p in probabilities):
        raise RuntimeError(f"loraaccel: dropouts {list(probabilities)}, expected probabilities from 0 to 1")
    if adapter_ids is not None and adapter_ids.numel() and not torch.compiler.is_compiling():
        low, high = int(adapter_ids.min()), int(adapter_ids.max())
        if low < -1 or high >= len(lora_a):
            raise RuntimeError(
                f"loraaccel: adapter_ids from {low} to {high}, expected -1 (none) to {len(lora_a) - 1}"
            )


def lora_qkv(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Sequence[tuple[Tensor, Tensor]]],
    scalings: Sequence[Sequence[float]],
    dropouts: Sequence[Sequence[float]] | None,
    rank_dropouts: Sequence[float],
    rank_factors: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The layers one after the other."""
    outputs, at, column = [], 0, 0
    for j, (w, bias, pairs, scales) in enumerate(zip(weights, biases, adapters, scalings, strict=True)):
        n = len(pairs)
        ranks = rank_dropouts[2 * at : 2 * (at + n)]
        at += n
        base = lora_linear(x, w, bias, (), (), (), ())
        inputs = dropouts[j] if dropouts else [0.0] * n
        a, b = [p[0] for p in pairs], [p[1] for p in pairs]
        width = sum(t.shape[0] for t in a)
        factors = None if rank_factors is None else rank_factors[:, column : column + width]
        column += width
        outputs.append(lora_delta(x, base, a, b, scales, inputs, ranks, rank_factors=factors))
    return tuple(outputs)


def rank_mask(h: Tensor, p: float) -> Tensor:
    """kohya's rank dropout: for each sample, the first dimension of h, whole ranks, the last one, times 1 / (1 - p)."""
    samples = h.shape[:1] if h.dim() > 1 else ()
    mask = (torch.rand((*samples, h.shape[-1]), device=h.device) > p).to(h.dtype)
    return mask.reshape(*samples, *[1] * (h.dim() - 2), h.shape[-1]) * (1 / (1 - p) if p < 1 else 0.0)


def lora_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Sequence[tuple[Tensor, Tensor]]],
    scalings: Sequence[Sequence[float]],
    activation: str,
) -> Tensor:
    """The layers one after the other: gate, up and down, or up and down."""

    def layer(index: int, t: Tensor) -> Tensor:
        a, b = [p[0] for p in adapters[index]], [p[1] for p in adapters[index]]
        return lora_linear(t, weights[index], biases[index], a, b, scalings[index], [0.0] * len(a))

    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": F.relu,
    }[activation]
    if len(weights) == 2:
        return layer(1, act(layer(0, x)))
    return layer(2, act(layer(0, x)) * layer(1, x))


def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    adapters: Sequence[Tensor],
    hidden: Tensor,
    scalings: Sequence[float],
) -> list[Tensor]:
    """Gradients of x, weight, bias, then A and B of each adapter (`adapters` alternates them), without dropout.

    hidden [M, sum of R] is what the forward operator returned beside y.
    """
    sums = hidden.dtype
    g = grad.reshape(-1, grad.shape[-1]).to(sums)
    rows = x.reshape(-1, x.shape[-1]).to(sums)
    gx = g @ weight.to(sums)
    pairs = []
    start = 0
    for a, b, scaling in zip(adapters[0::2], adapters[1::2], scalings, strict=True):
        u = (g @ b.to(sums)) * scaling
        h = hidden[:, start : start + a.shape[0]]
        start += a.shape[0]
        gx = gx + u @ a.to(sums)
        pairs += [(u.transpose(0, 1) @ rows).to(a.dtype), ((g.transpose(0, 1) @ h) * scaling).to(b.dtype)]
    gw = (g.transpose(0, 1) @ rows).to(weight.dtype)
    return [gx.to(x.dtype).reshape(x.shape), gw, g.sum(0).to(weight.dtype), *pairs]

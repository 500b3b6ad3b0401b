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

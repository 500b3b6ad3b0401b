"""The LoRA linear layer in a few lines, for float64 tensors or for numpy arrays of a wider type.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; dropout where PEFT has it.
M rows, K inputs, N outputs, R rank; G = dL/dy; k the keep mask, so that D(x) = x * k / (1 - p).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Adapter(NamedTuple):
    a: Any  # [R, K]
    b: Any  # [N, R]
    scaling: float = 1.0
    factor: Any = None  # k / (1 - p), [M, K]; None: no dropout


def forward(x: Any, weight: Any, bias: Any, adapters: Sequence[Adapter]) -> Any:
    """y = x W^T + bias + sum of s (D(x) A^T) B^T."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    for ad in adapters:
        y = y + ad.scaling * ((_dropped(x, ad) @ ad.a.T) @ ad.b.T)
    return y


def backward(grad: Any, x: Any, weight: Any, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Gradients by name: x, weight, bias, then lora_A.i and lora_B.i of each adapter."""
    grads = {"x": grad @ weight, "weight": grad.T @ x, "bias": grad.sum(0)}
    for i, ad in enumerate(adapters):
        u = ad.scaling * (grad @ ad.b)
        dropped_x = _dropped(x, ad)
        update = u @ ad.a
        grads["x"] = grads["x"] + (update if ad.factor is None else update * ad.factor)
        grads[f"lora_A.{i}"] = u.T @ dropped_x
        grads[f"lora_B.{i}"] = ad.scaling * (grad.T @ (dropped_x @ ad.a.T))
    return grads


def _dropped(x: Any, ad: Adapter) -> Any:
    return x if ad.factor is None else x * ad.factor


def peft_composition(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Adapter]) -> Tensor:
    """The layer as PEFT 0.21 runs it, in the operands' own types: what users have without this library.

    A given mask is applied as F.dropout applies its own: product in the type of the dropout's input.
    """
    y = F.linear(x, weight, bias)
    dtype = y.dtype
    for ad in adapters:
        x = x.to(ad.a.dtype)
        dropped = x if ad.factor is None else x * ad.factor.to(x.dtype)
        y = y + F.linear(F.linear(dropped, ad.a), ad.b) * ad.scaling
    return y.to(dtype)


def double(t: Tensor | None) -> Tensor | None:
    """The stored numbers as float64."""
    return None if t is None else t.detach().to(torch.float64)

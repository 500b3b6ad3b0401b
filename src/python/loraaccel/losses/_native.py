"""When the native pass runs, and what its autograd functions share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from loraaccel import _state

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2, "samples": 3}  # LossReduction in loraaccel/losses.h
FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_PLAIN = frozenset((Tensor, nn.Parameter))


def serves(first: Tensor, *others: Tensor | None) -> bool:
    """True for plain tensors on the CPU of which at most the first needs a gradient."""
    if torch.compiler.is_compiling() or _state.off():
        return False
    records = torch.is_grad_enabled()
    for t in (first, *others):
        if t is None:
            continue
        if type(t) not in _PLAIN or not t.is_cpu or t.layout != torch.strided or t.dtype not in FLOATS:
            return False
        if records and t is not first and t.requires_grad:
            return False
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def check_tensors(op: str, operands: dict[str, Tensor | None], first: Tensor) -> None:
    for name, t in operands.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} is a {type(t).__name__}, expected a torch.Tensor")
        if t.device != first.device:
            raise ValueError(f"{op}: {name} is on {t.device}, expected {first.device}")


def check_choice(op: str, name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def needs_torch(grad: Tensor) -> bool:
    """A gradient that is to be differentiated in its turn, or many at once: the formula in torch knows how."""
    functorch = torch._C._functorch
    return (
        torch.is_grad_enabled()
        or functorch.is_legacy_batchedtensor(grad)
        or functorch.is_batchedtensor(grad)
        or type(grad) is not Tensor
    )


def keeps_gradient(x: Tensor, reduction: str) -> bool:
    """Whether the forward pass makes the gradient too, for a gradient of 1 from above.

    Not for float16: a mean's gradient is below what it can say before a gradient scaler multiplies it. And not where
    each element, or each sample, has a gradient from above of its own.
    """
    return x.dtype != torch.float16 and reduction in ("mean", "sum")


def scaled(kept: Tensor | None, upstream: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient for one number from above: `kept`, which is the caller's no longer, or computed anew where
    multiplying would round a second time."""
    if kept is None:
        return compute(upstream)
    factor = upstream.item()  # on the CPU: nothing waits
    if factor == 1.0:
        return kept
    wide = kept.dtype in (torch.float32, torch.float64)
    if wide or (math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5):
        return kept.mul_(factor)
    return compute(upstream)


def through_torch(formula: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of formula(x) by plain torch; differentiable where gradients are recorded."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        variable = x if again else x.detach().requires_grad_()
        (result,) = torch.autograd.grad(formula(variable), variable, grad, create_graph=again)
    return result

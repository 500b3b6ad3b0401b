"""lora_expand, the second half of an adapter: base + scaling · hidden Bᵀ, its gradients, and torch's idea of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loraaccel import _autograd, _in_torch, _state
from loraaccel._autograd import _below_autograd
from loraaccel._checks import scaled_factors
from loraaccel._layers import saved_tensors
from loraaccel._operators import operator, register_autograd, register_fake

forward_op = operator("lora_expand")
backward_op = operator("lora_expand_backward")


def expand(base: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """base [..., N] + scaling · hidden [..., R] Bᵀ, B [N, R]; rounded once to base's dtype, in memory of its own."""
    if _state.off():
        return (base + (hidden @ lora_b.transpose(0, 1)) * scaling).to(base.dtype)
    return _run(base, hidden, lora_b, scaling, False)


def expand_channels(base: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """The same over the second dimension: base [S, N, ...], hidden [S, R, ...]. The result has base's memory format."""
    if _state.off():
        delta = torch.tensordot(hidden.movedim(1, -1), lora_b, ([-1], [1])).movedim(-1, 1)
        return (base + delta * scaling).to(base.dtype)
    if base.dim() == 4 and base.is_contiguous(memory_format=torch.channels_last) and not base.is_contiguous():
        last = _run(base.permute(0, 2, 3, 1), hidden.permute(0, 2, 3, 1), lora_b, scaling, False)
        return last.permute(0, 3, 1, 2)
    return _run(base.contiguous(), hidden.contiguous(), lora_b, scaling, True)


def _run(base: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float, channels_first: bool) -> Tensor:
    if torch.compiler.is_compiling():
        _, lora_b, scaling = scaled_factors(lora_b, lora_b, scaling)
        return forward_op(base, hidden, lora_b, scaling, channels_first)
    _autograd.refuse_transforms("lora_expand")
    if torch.is_grad_enabled():
        return forward_op(base, hidden, lora_b, scaling, channels_first)
    with _below_autograd():
        return forward_op(base, hidden, lora_b, scaling, channels_first)


def gradients(
    grad: Tensor, hidden: Tensor, lora_b: Tensor, scaling: float, need_hidden: bool, need_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of hidden and B, for dense [S, N, ...]; nothing is recorded."""
    with _below_autograd():
        wanted = iter(backward_op(grad, hidden, lora_b, scaling, True, [need_hidden, need_b]))
    return next(wanted) if need_hidden else None, next(wanted) if need_b else None


@register_fake("lora_expand")
def _forward_fake(
    base: Tensor, hidden: Tensor, lora_B: Tensor, scaling: float, channels_first: bool
) -> Tensor:
    op, dim = "lora_expand", 1 if channels_first else -1
    _autograd._check_devices(op, base, None, hidden=hidden, lora_B=lora_B)
    torch._check(lora_B.dim() == 2, lambda: _autograd._wrong(op, "lora_B", lora_B, "two dimensions"))
    torch._check(
        base.shape[dim] == lora_B.shape[0] and hidden.shape[dim] == lora_B.shape[1],
        lambda: _autograd._wrong(op, "lora_B", lora_B, f"[{base.shape[dim]}, {hidden.shape[dim]}]"),
    )
    return torch.empty_like(base, memory_format=torch.contiguous_format)


@register_fake("lora_expand_backward")
def _backward_fake(
    grad: Tensor,
    hidden: Tensor,
    lora_B: Tensor,
    scaling: float,
    channels_first: bool,
    output_mask: list[bool],
) -> list[Tensor]:
    _autograd._check_devices("lora_expand_backward", grad, None, hidden=hidden, lora_B=lora_B)
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, wanted in zip((hidden, lora_B), output_mask, strict=True)
        if wanted
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, hidden, lora_b, ctx.scaling, ctx.channels_first = inputs
    ctx.save_for_backward(hidden, lora_b)
    ctx.set_materialize_grads(False)
    ctx.mask = [hidden.requires_grad, lora_b.requires_grad]


def _backward(ctx: Any, grad: Tensor | None) -> Any:
    if grad is None:
        return None, None, None, None, None
    hidden, lora_b = saved_tensors(ctx)
    g = grad.contiguous() if ctx.channels_first else grad
    wanted = iter(backward_op(g, hidden, lora_b, ctx.scaling, ctx.channels_first, ctx.mask))
    gh, gb = [next(wanted) if m else None for m in ctx.mask]
    return grad, gh, gb, None, None


def _backward_in_torch(ctx: Any, grad: Tensor | None) -> Any:
    """For _LoraConv's kin, whose frozen half is torch's already."""
    hidden, lora_b = saved_tensors(ctx)

    def formula(hidden: Tensor, lora_b: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, lora_b.dtype)
        hidden, lora_b = hidden.to(wide), lora_b.to(wide)
        if not ctx.channels_first:
            return (hidden @ lora_b.transpose(0, 1)) * ctx.scaling
        return torch.tensordot(hidden.movedim(1, -1), lora_b, ([-1], [1])).movedim(-1, 1) * ctx.scaling

    gh, gb = _in_torch.gradients(formula, (hidden, lora_b), ctx.mask, [grad])
    return grad, gh, gb, None, None


register_autograd("lora_expand", _backward, setup_context=_setup_context, in_torch=_backward_in_torch)
register_autograd("lora_expand_backward", _autograd._backward_of_backward)

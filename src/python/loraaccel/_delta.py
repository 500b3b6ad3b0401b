"""Gradients of lora_delta: the eager autograd.Function and the same formulas for torch.compile, as in `_autograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._autograd import _below_autograd
from loraaccel._layers import says_layer
from loraaccel._operators import operator, register_autograd, register_fake
from loraaccel._saved import keep_or_shape, kept_or_shape

forward_op = operator("lora_delta")
backward_op = operator("lora_delta_backward")


class DeltaCall(NamedTuple):
    """Everything of a call that is not a tensor with a gradient; lists have a number for each adapter."""

    scalings: list[float]
    dropouts: list[float]  # of the input
    seed: Tensor | None
    rank_dropouts: Sequence[float] = ()  # two for each adapter, or none at all
    output_dropout: float = 0.0
    adapter_ids: Tensor | None = None
    rank_factors: Tensor | None = None  # [M, sum of R], factors that the caller drew

    @property
    def masks(self) -> tuple[Any, ...]:
        return self.rank_dropouts, self.output_dropout, self.adapter_ids, self.rank_factors


@says_layer
class LoraDeltaFunction(torch.autograd.Function):
    """`adapters`: A and B of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, call: DeltaCall, *adapters: Tensor) -> Tensor:
        y, hidden = forward_below(x, base, call, adapters)
        needs = ctx.needs_input_grad
        keep = [True in needs[3::2]]
        for _ in adapters[0::2]:
            keep += (needs[0], True)
        saved, likes = keep_or_shape((x, *adapters), keep)
        ctx.save_for_backward(hidden, *saved)
        ctx.rest = likes, call
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        likes, call = ctx.rest
        hidden, *saved = ctx.saved_tensors
        x, *adapters = kept_or_shape(saved, likes)
        needs = ctx.needs_input_grad
        mask = [needs[0], *needs[3:]]
        if _autograd._is_batched(grad):
            raise RuntimeError(
                "loraaccel::lora_delta: batched gradients (is_grads_batched, vectorized jacobians) are not "
                "supported. Compute them inside loraaccel.disabled()."
            )
        with _below_autograd():
            computed = backward_op(
                grad, x, adapters[0::2], adapters[1::2], hidden, call.scalings, call.dropouts, call.seed, mask,
                *call.masks,
            )  # fmt: skip
        wanted = iter(computed)
        grads: list[Tensor | None] = [next(wanted) if m else None for m in mask]
        gx, *gab = _autograd._refuse_double_backward(grads, (grad, x, *adapters))
        return gx, grad if needs[1] else None, None, *gab


def forward_below(
    x: Tensor, base: Tensor, call: DeltaCall, adapters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """y and hidden; nothing is recorded for a backward pass."""
    with _below_autograd():
        return forward_op(
            x, base, list(adapters[0::2]), list(adapters[1::2]), call.scalings, call.dropouts, call.seed,
            *call.masks,
        )  # fmt: skip


# ---- the same for the dispatcher ----


@register_fake("lora_delta")
def _forward_fake(
    x: Tensor,
    base: Tensor,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    rank_dropouts: Sequence[float] = (),
    output_dropout: float = 0.0,
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    op = "lora_delta"
    _autograd._check_devices(op, x, seed, base=base, lora_A=lora_A, lora_B=lora_B)
    torch._check(x.dim() >= 1, lambda: f"loraaccel::{op}: x has no dimensions, expected [..., K]")
    for a, b in zip(lora_A, lora_B, strict=True):
        torch._check(
            a.dim() == 2 and a.shape[1] == x.shape[-1],
            lambda a=a: _autograd._wrong(op, "lora_A", a, f"[R, {x.shape[-1]}]"),
        )
        torch._check(
            b.dim() == 2 and b.shape[0] == base.shape[-1] and b.shape[1] == a.shape[0],
            lambda a=a, b=b: _autograd._wrong(op, "lora_B", b, f"[{base.shape[-1]}, {a.shape[0]}]"),
        )
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    rank = sum(a.shape[0] for a in lora_A)
    y = torch.empty_like(base, memory_format=torch.contiguous_format)
    return y, x.new_empty((math.prod(x.shape[:-1]), rank), dtype=sums)


@register_fake("lora_delta_backward")
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    hidden: Tensor,
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    output_mask: list[bool],
    rank_dropouts: Sequence[float] = (),
    output_dropout: float = 0.0,
    adapter_ids: Tensor | None = None,
    rank_factors: Tensor | None = None,
) -> list[Tensor]:
    _autograd._check_devices(
        "lora_delta_backward", x, seed, grad=grad, hidden=hidden, lora_A=lora_A, lora_B=lora_B
    )
    operands = [x, *(t for pair in zip(lora_A, lora_B, strict=True) for t in pair)]
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, wanted in zip(operands, output_mask, strict=True)
        if wanted
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, lora_a, lora_b, scalings, dropouts, seed, *masks = inputs
    ctx.rest = _autograd.no_gradients(masks)
    rank_dropouts, output_dropout, adapter_ids, rank_factors = masks
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], seed, adapter_ids, rank_factors, *lora_a, *lora_b)
    ctx.numbers = list(scalings), list(dropouts), list(rank_dropouts), output_dropout
    ctx.wanted = [x.requires_grad]
    for a, b in zip(lora_a, lora_b, strict=True):
        ctx.wanted += [a.requires_grad, b.requires_grad]


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: Tensor | None) -> Any:
    x, hidden, seed, adapter_ids, rank_factors, *adapters = ctx.saved_tensors
    scalings, dropouts, rank_dropouts, output_dropout = ctx.numbers
    n = len(scalings)
    rest = (None, None, None, *ctx.rest)  # scalings, dropouts, seed, ...
    if grad is None:
        return (None, None, [None] * n, [None] * n, *rest)
    wanted = iter(
        backward_op(
            grad, x, adapters[:n], adapters[n:], hidden, scalings, dropouts, seed, ctx.wanted, rank_dropouts,
            output_dropout, adapter_ids, rank_factors,
        )
    )  # fmt: skip
    gx, *gab = [next(wanted) if m else None for m in ctx.wanted]
    return (gx, grad, gab[0::2], gab[1::2], *rest)


register_autograd("lora_delta", _backward, setup_context=_setup_context)
register_autograd("lora_delta_backward", _autograd._backward_of_backward)

"""Gradients of lora_qkv: the eager autograd.Function and the same formulas for torch.compile, as in `_autograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._autograd import _NO_AUTOCAST, _below_autograd

forward_op = torch.ops.loraaccel.lora_qkv.default
backward_op = torch.ops.loraaccel.lora_qkv_backward.default


class QkvCall(NamedTuple):
    """One call: everything that is not a tensor."""

    has_bias: list[bool]  # of each projection
    adapters: list[int]  # number of adapters of each projection
    scalings: list[float]  # of each adapter
    dropouts: list[float]  # in force, of each adapter
    cast: torch.dtype | None  # type that autocast gives x, weights and biases


def split(y: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of the projections: views of the packed result."""
    return y.split([w.shape[0] for w in weights], dim=-1)


def forward_below(
    call: QkvCall,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """y, hidden, and x and the weights in the type they were used in; nothing is recorded for a backward pass."""
    if call.cast is not None:
        x = x.to(call.cast)
        weights = [w.to(call.cast) for w in weights]
        biases = [b.to(call.cast) for b in biases]
    with _below_autograd(), torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        y, hidden = forward_op(
            x,
            weights,
            biases,
            call.has_bias,
            lora_a,
            lora_b,
            call.adapters,
            call.scalings,
            call.dropouts,
            seed,
        )
    return y, hidden, x, weights


class LoraQkvFunction(torch.autograd.Function):
    """x, seed, then the weights, the biases that there are, and A and B of each adapter."""

    @staticmethod
    def forward(
        ctx: Any, call: QkvCall, x: Tensor, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        n, biased = len(call.has_bias), sum(call.has_bias)
        weights, biases, adapters = list(tensors[:n]), list(tensors[n : n + biased]), tensors[n + biased :]
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.dtypes = None if call.cast is None else (x.dtype, *(t.dtype for t in tensors[: n + biased]))
        y, hidden, x, weights = forward_below(
            call, x, weights, biases, list(adapters[0::2]), list(adapters[1::2]), seed
        )
        needs = ctx.needs_input_grad[1:]
        need_w, need_ab = needs[2 : 2 + n], needs[2 + n + biased :]
        keep = (any(need_w) or any(need_ab[0::2]), *(needs[0] for _ in weights))
        keep += tuple(needs[0] or i % 2 == 1 for i in range(len(adapters)))
        operands = (x, *weights, *adapters)
        ctx.like = [None if k else (t.shape, t.dtype, t.device) for t, k in zip(operands, keep, strict=True)]
        ctx.save_for_backward(hidden, seed, *(t if k else None for t, k in zip(operands, keep, strict=True)))
        return split(y, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: QkvCall = ctx.call
        n, biased = len(call.has_bias), sum(call.has_bias)
        hidden, seed, *saved = ctx.saved_tensors
        operands = [
            torch.empty((), dtype=like[1], device=like[2]).expand(like[0]) if like is not None else t
            for t, like in zip(saved, ctx.like, strict=True)
        ]
        x, weights, adapters = operands[0], operands[1 : 1 + n], operands[1 + n :]
        needs = ctx.needs_input_grad[1:]
        need_w, need_bias = needs[2 : 2 + n], iter(needs[2 + n : 2 + n + biased])
        need_ab = needs[2 + n + biased :]
        mask = [needs[0]]
        at = 0
        for j in range(n):
            mask += [need_w[j], call.has_bias[j] and next(need_bias)]
            mask += need_ab[at : at + 2 * call.adapters[j]]
            at += 2 * call.adapters[j]
        present = [g for g in grads if g is not None]
        if any(_autograd._is_batched(g) for g in present):
            raise RuntimeError("loraaccel::lora_qkv: batched gradients are not supported")
        with _below_autograd():
            computed = backward_op(
                present, [g is not None for g in grads], x, weights, adapters[0::2], adapters[1::2],
                call.adapters, hidden, call.scalings, call.dropouts, seed, mask,
            )  # fmt: skip
        wanted = iter(computed)
        in_order: list[Tensor | None] = [next(wanted) if m else None for m in mask]
        in_order = list(_autograd._refuse_double_backward(in_order, (*present, x, *weights, *adapters)))
        gx, gw, gb, gab = in_order[0], [], [], []
        rest = iter(in_order[1:])
        for j in range(n):
            gw.append(next(rest))
            bias = next(rest)
            if call.has_bias[j]:
                gb.append(bias)
            gab += [next(rest) for _ in range(2 * call.adapters[j])]
        if ctx.dtypes is not None:
            gx, *gwb = (
                None if g is None else g.to(t) for g, t in zip((gx, *gw, *gb), ctx.dtypes, strict=True)
            )
            gw, gb = gwb[:n], gwb[n:]
        return (None, gx, None, *gw, *gb, *gab)


# ---- the same for the dispatcher ----


@torch.library.register_fake("loraaccel::lora_qkv")
def _forward_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    adapters: list[int],
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    op = "lora_qkv"
    _autograd._check_devices(op, x, seed, weights=weights, biases=biases, lora_A=lora_A, lora_B=lora_B)
    torch._check(x.dim() >= 1, lambda: f"loraaccel::{op}: x has no dimensions, expected [..., K]")
    k = x.shape[-1]
    for w in weights:
        torch._check(
            w.dim() == 2 and w.shape[1] == k,
            lambda w=w: _autograd._wrong(op, "weight", w, f"[N, {k}] to go with x"),
        )
    for a in lora_A:
        torch._check(
            a.dim() == 2 and a.shape[1] == k, lambda a=a: _autograd._wrong(op, "lora_A", a, f"[R, {k}]")
        )
    y = x.new_empty((*x.shape[:-1], sum(w.shape[0] for w in weights)))
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, x.new_empty((math.prod(x.shape[:-1]), sum(a.shape[0] for a in lora_A)), dtype=sums)


@torch.library.register_fake("loraaccel::lora_qkv_backward")
def _backward_fake(
    grads: list[Tensor],
    has_grad: list[bool],
    x: Tensor,
    weights: list[Tensor],
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    adapters: list[int],
    hidden: Tensor,
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    output_mask: list[bool],
) -> list[Tensor]:
    _autograd._check_devices(
        "lora_qkv_backward", x, seed, grads=grads, weights=weights, lora_A=lora_A, lora_B=lora_B
    )
    dense = torch.contiguous_format
    mask = iter(output_mask)
    outputs = [torch.empty_like(x, memory_format=dense)] if next(mask) else []
    pairs = iter(zip(lora_A, lora_B, strict=True))
    for w, count in zip(weights, adapters, strict=True):
        if next(mask):
            outputs.append(torch.empty_like(w, memory_format=dense))
        if next(mask):
            outputs.append(w.new_empty(w.shape[0]))
        for _ in range(count):
            outputs += [torch.empty_like(t, memory_format=dense) for t in next(pairs) if next(mask)]
    return outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, biases, has_bias, lora_a, lora_b, adapters, scalings, dropouts, seed = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], seed, *weights, *lora_a, *lora_b)
    ctx.call = QkvCall(list(has_bias), list(adapters), list(scalings), list(dropouts), None)
    needs_bias = iter([b.requires_grad for b in biases])
    pairs = iter(zip(lora_a, lora_b, strict=True))
    ctx.wanted = [x.requires_grad]
    for w, biased, count in zip(weights, has_bias, adapters, strict=True):
        ctx.wanted += [w.requires_grad, biased and next(needs_bias)]
        for _ in range(count):
            ctx.wanted += [t.requires_grad for t in next(pairs)]


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: Tensor | None) -> Any:
    call: QkvCall = ctx.call
    n, m = len(call.has_bias), sum(call.adapters)
    x, hidden, seed, *rest = ctx.saved_tensors
    weights, lora_a, lora_b = rest[:n], rest[n : n + m], rest[n + m :]
    none = [None] * len(call.has_bias)
    numbers: list[None] = []
    if grad is None:
        return (
            None, none, [None] * sum(call.has_bias), numbers, [None] * m, [None] * m, numbers, numbers, numbers, None
        )  # fmt: skip
    grads = list(split(grad, weights))
    computed = iter(
        backward_op(
            grads,
            [True] * n,
            x,
            weights,
            lora_a,
            lora_b,
            call.adapters,
            hidden,
            call.scalings,
            call.dropouts,
            seed,
            ctx.wanted,
        )
    )
    in_order = iter([next(computed) if w else None for w in ctx.wanted])
    gx = next(in_order)
    gw, gb, ga, gbb = [], [], [], []
    for biased, count in zip(call.has_bias, call.adapters, strict=True):
        gw.append(next(in_order))
        bias = next(in_order)
        if biased:
            gb.append(bias)
        for _ in range(count):
            ga.append(next(in_order))
            gbb.append(next(in_order))
    return gx, gw, gb, None, ga, gbb, None, None, None, None


torch.library.register_autograd("loraaccel::lora_qkv", _backward, setup_context=_setup_context)
torch.library.register_autograd("loraaccel::lora_qkv_backward", _autograd._backward_of_backward)


def _autocast_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    cast = _autograd.autocast_dtype(x, weights[0]) if weights else None
    with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        if cast is not None:
            x, weights, biases = x.to(cast), [w.to(cast) for w in weights], [b.to(cast) for b in biases]
        return forward_op(x, weights, biases, *rest)


_autograd._library.impl("lora_qkv", _autocast_forward, "AutocastCPU")

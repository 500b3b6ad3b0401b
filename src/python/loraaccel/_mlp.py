"""Gradients of lora_mlp: the eager autograd.Function and the same formulas for torch.compile, as in `_qkv`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._autograd import _NO_AUTOCAST, _below_autograd
from loraaccel._layers import says_layer
from loraaccel._operators import operator, register_autocast, register_autograd, register_fake
from loraaccel._qkv import (
    GroupCall,
    dispatcher_grads,
    dispatcher_needs,
    fake_gradients,
    finish_backward,
    keep_operands,
    kept_operands,
    refuse_batched,
    run_below,
    types_before,
)

forward_op = operator("lora_mlp")
backward_op = operator("lora_mlp_backward")

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # numbers of the operators


@says_layer
class LoraMlpFunction(torch.autograd.Function):
    """`tensors`: weights of gate, up, down (or up, down), the biases that there are, A and B of each adapter."""

    @staticmethod
    def forward(
        ctx: Any, call: GroupCall, activation: int, x: Tensor, seed: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        ctx.call, ctx.activation = call, activation
        ctx.dtypes = types_before(call, x, tensors)
        x, used = call.to_cast(x, tensors)
        y, inner, hidden_inner, hidden_down = run_below(forward_op, call, x, used, seed, activation)
        need_x, _, *needs = ctx.needs_input_grad[2:]
        need_w, _, need_ab = call.cut(needs)
        # The gradient of t = act(gate) * up is needed where anything of gate, up or x is: it reads down's W and A, and
        # u of down its B. That of x reads W and A of gate and up.
        of_inner = 2 * sum(call.adapters[:-1])
        need_t = need_x or any(need_w[:-1]) or any(need_ab[:of_inner]) or any(needs[len(need_w) :])
        keep = [need_x] * (len(need_w) - 1) + [need_t]
        keep += [(need_x if i < of_inner else need_t) or i % 2 == 1 for i in range(len(need_ab))]
        keep_x = any(need_w[:-1]) or any(need_ab[:of_inner:2])
        kept, ctx.likes = keep_operands(call, x, used, keep_x, keep)
        ctx.save_for_backward(inner, hidden_inner, hidden_down, seed, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: GroupCall = ctx.call
        inner, hidden_inner, hidden_down, seed, *saved = ctx.saved_tensors
        x, weights, adapters = kept_operands(call, saved, ctx.likes)
        need_x, _, *needs = ctx.needs_input_grad[2:]
        mask = call.mask(need_x, needs)
        refuse_batched("lora_mlp", [grad])
        with _below_autograd():
            computed = backward_op(
                grad, x, inner, weights, adapters[0::2], adapters[1::2], call.adapters, hidden_inner,
                hidden_down, call.scalings, call.dropouts, seed, ctx.activation, mask,
            )  # fmt: skip
        return (
            None,
            None,
            *finish_backward(ctx, call, computed, mask, (grad, x, inner, *weights, *adapters)),
        )


@register_fake("lora_mlp")
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
    activation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "lora_mlp"
    _autograd._check_devices(op, x, seed, weights=weights, biases=biases, lora_A=lora_A, lora_B=lora_B)
    torch._check(len(weights) in (2, 3), lambda: f"loraaccel::{op}: {len(weights)} weights, expected 2 or 3")
    *inner, down = weights
    for w in inner:
        torch._check(
            w.dim() == 2 and w.shape[0] == down.shape[1] and w.shape[1] == x.shape[-1],
            lambda w=w: _autograd._wrong(op, "weight", w, f"[{down.shape[1]}, {x.shape[-1]}]"),
        )
    lead, rows = x.shape[:-1], math.prod(x.shape[:-1])
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    of_down = adapters[-1] if adapters else 0
    ranks = [a.shape[0] for a in lora_A]
    cut = len(ranks) - of_down
    return (
        x.new_empty((*lead, down.shape[0])),
        x.new_empty((*lead, len(inner) * down.shape[1])),
        x.new_empty((rows, sum(ranks[:cut])), dtype=sums),
        x.new_empty((rows, sum(ranks[cut:])), dtype=sums),
    )


@register_fake("lora_mlp_backward")
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    inner: Tensor,
    weights: list[Tensor],
    lora_A: list[Tensor],
    lora_B: list[Tensor],
    adapters: list[int],
    hidden_inner: Tensor,
    hidden_down: Tensor,
    scalings: list[float],
    dropouts: list[float],
    seed: Tensor | None,
    activation: int,
    output_mask: list[bool],
) -> list[Tensor]:
    _autograd._check_devices(
        "lora_mlp_backward", x, seed, grad=grad, weights=weights, lora_A=lora_A, lora_B=lora_B
    )
    return fake_gradients(x, weights, lora_A, lora_B, adapters, output_mask)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, _, has_bias, lora_a, lora_b, adapters, scalings, dropouts, seed, activation = inputs
    _, inner, hidden_inner, hidden_down = output
    ctx.mark_non_differentiable(inner, hidden_inner, hidden_down)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, inner, hidden_inner, hidden_down, seed, *weights, *lora_a, *lora_b)
    ctx.call = GroupCall(list(has_bias), list(adapters), list(scalings), list(dropouts), None)
    ctx.activation = activation
    ctx.wanted = dispatcher_needs(ctx.call, inputs)


def _backward(ctx: Any, grad: Tensor | None, *_others: Tensor | None) -> Any:
    call: GroupCall = ctx.call
    n, m = len(call.has_bias), sum(call.adapters)
    x, inner, hidden_inner, hidden_down, seed, *rest = ctx.saved_tensors
    weights, lora_a, lora_b = rest[:n], rest[n : n + m], rest[n + m :]
    if grad is None:
        return dispatcher_grads(call, None, 2)
    computed = iter(
        backward_op(
            grad, x, inner, weights, lora_a, lora_b, call.adapters, hidden_inner, hidden_down, call.scalings,
            call.dropouts, seed, ctx.activation, ctx.wanted,
        )
    )  # fmt: skip
    return dispatcher_grads(call, [next(computed) if w else None for w in ctx.wanted], 2)


register_autograd("lora_mlp", _backward, setup_context=_setup_context)
register_autograd("lora_mlp_backward", _autograd._backward_of_backward)


def _autocast_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cast = _autograd.autocast_dtype(x, weights[0]) if weights else None
    with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        if cast is not None:
            x, weights, biases = x.to(cast), [w.to(cast) for w in weights], [b.to(cast) for b in biases]
        return forward_op(x, weights, biases, *rest)


register_autocast("lora_mlp", _autocast_forward)

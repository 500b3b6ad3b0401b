"""dora_linear, and what it is made of beside a LoRA layer: norms of the adapted weight, a gain for each output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loraaccel import _autograd, _state
from loraaccel._autograd import _below_autograd
from loraaccel._checks import check_operands, check_probabilities, in_force, number, scaled_factors
from loraaccel._dropout import seeded_dropout
from loraaccel._operators import operator, register_autograd, register_fake
from loraaccel.ops import lora_delta_adapters, lora_linear_adapters

norms_op = operator("weight_norms")
gain_op = operator("column_gain")
gain_backward_op = operator("column_gain_backward")

_BLOCK = 256  # rows of the weight


def dora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor,
    scaling: float = 1.0,
    *,
    input_dropout: float = 0.0,
    training: bool = True,
    weight_norm: Tensor | None = None,
) -> Tensor:
    """DoRA linear layer:  y = (m / c) ∘ (x Wᵀ + scaling · x Aᵀ Bᵀ) + bias,  c = ‖W + scaling · B A‖ of each row.

    magnitude m [N]; the rest as of `lora_linear`. c is a constant to autograd, as in PEFT: gradients reach x, W, A, B,
    m and bias. It is computed without a matrix of W's size and rounded to A's dtype; ``weight_norm``
    [N] is used instead where it is given. With ``input_dropout`` in training, D(x) takes x's place in the update,
    (m / c - 1) ∘ (D(x) Wᵀ) + (m / c) ∘ scaling · D(x) Aᵀ Bᵀ, beside x Wᵀ + bias: a second product with W, as PEFT's.
    Types, autocast and errors as in `lora_linear`.
    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.
    """
    op = "dora_linear"
    operands = {
        "x": x, "weight": weight, "bias": bias, "lora_A": lora_A, "lora_B": lora_B, "magnitude": magnitude,
    }  # fmt: skip
    check_operands(op, {k: v for k, v in operands.items() if v is not None or k != "bias"}, x)
    if weight_norm is not None and (weight.dim() != 2 or tuple(weight_norm.shape) != (weight.shape[0],)):
        raise RuntimeError(
            f"{op}: weight_norm has shape {list(weight_norm.shape)}, expected [{weight.shape[0]}]"
        )
    if weight.dim() != 2 or tuple(magnitude.shape) != (weight.shape[0],):
        raise RuntimeError(
            f"{op}: magnitude has shape {list(magnitude.shape)}, expected [{weight.shape[0]}] to go with weight "
            f"{list(weight.shape)}"
        )
    (p,) = in_force(training, input_dropout)
    check_probabilities(op, input_dropout=p)
    return dora(x, weight, bias, lora_A, lora_B, magnitude, number(op, scaling), p, weight_norm)


def adapted_norms(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Norms of the rows of W + scaling · B A, [N], in A's dtype: a constant to autograd.

    In sums of float32 (float64), without a matrix of W's size. As long as B is zero by torch's own norm, on blocks of
    rows that stay in the caches: a magnitude that torch made from the same weight (as PEFT does) equals it bit for bit.
    """
    sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        a, b = lora_a.to(sums), lora_b.to(sums)
        if not torch.compiler.is_compiling() and weight.is_cpu and not _state.off() and bool(b.any()):
            with _below_autograd():
                return norms_op(weight.detach(), [a], [b], [scaling]).to(lora_a.dtype)
        norms = []
        for rows, up in zip(weight.split(_BLOCK), b.split(_BLOCK), strict=True):
            norms.append(torch.linalg.norm(torch.addmm(rows.to(sums), up, a, alpha=scaling), dim=1))
        return (torch.cat(norms) if norms else weight.new_empty(0, dtype=sums)).to(lora_a.dtype)


def column_gain(z: Tensor, gain: Tensor, bias: Tensor | None, centred: bool = False) -> Tensor:
    """gain ∘ z + bias over the last dimension, in z's dtype; centred, z + (gain - 1) ∘ (z - bias)."""
    if _state.off():
        if centred:
            return (z + (gain - 1) * (z if bias is None else z - bias)).to(z.dtype)
        return (z * gain if bias is None else z * gain + bias).to(z.dtype)
    _autograd.refuse_transforms("column_gain")
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gain_op(z, gain, bias, centred)
    with _below_autograd():
        return gain_op(z, gain, bias, centred)


def dora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    magnitude: Tensor,
    scaling: float,
    dropout: float,
    norms: Tensor | None = None,
) -> Tensor:
    """`dropout` is in force: 0 outside training. norms: where the caller keeps them."""
    _autograd.refuse_transforms("dora_linear")
    if torch.compiler.is_compiling():
        dtype = lora_a.dtype
        lora_a, lora_b, scaling = scaled_factors(lora_a, lora_b, scaling)
        if norms is None:
            norms = adapted_norms(weight, lora_a, lora_b, scaling).to(dtype)
    elif norms is None:
        norms = adapted_norms(weight, lora_a, lora_b, scaling)
    sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
    gain = magnitude.to(sums) / norms.to(sums)
    wide = lora_a.dtype.itemsize > z_dtype(x, weight).itemsize
    if dropout == 0.0:
        # Before the first step every gain is 1: then y is the frozen layer's output, bit for bit.
        fresh = not torch.compiler.is_compiling() and gain.is_cpu and bool((gain == 1).all())
        if wide and not fresh:
            frozen = lora_linear_adapters(x, weight, None, (), (), [], [])
            y = column_gain(frozen.float(), gain, None if bias is None else bias.float())
            return _with_gained(x, y, lora_a, lora_b, gain, scaling).to(frozen.dtype)
        z = lora_linear_adapters(x, weight, bias if fresh else None, (lora_a,), (lora_b,), [scaling], [0.0])
        return column_gain(z, gain, None if bias is None else bias.to(z.dtype), fresh)
    # x Wᵀ + bias + (gain - 1) ∘ (D(x) Wᵀ) + gain ∘ s D(x) Aᵀ Bᵀ, with the first and third part of W in one product.
    masked = seeded_dropout(x.to(lora_a.dtype) if wide else x, dropout)
    dropped = masked.to(x.dtype)
    rest = lora_linear_adapters(x - dropped, weight, bias, (), (), [], [])
    if wide:
        frozen = lora_linear_adapters(dropped, weight, None, (), (), [], [])
        y = column_gain(frozen.float(), gain, None) + rest
        return _with_gained(masked, y, lora_a, lora_b, gain, scaling).to(frozen.dtype)
    z = lora_linear_adapters(dropped, weight, None, (lora_a,), (lora_b,), [scaling], [0.0])
    return column_gain(z, gain, None) + rest


def _with_gained(
    x: Tensor, y: Tensor, lora_a: Tensor, lora_b: Tensor, gain: Tensor, scaling: float
) -> Tensor:
    """y + gain ∘ s x Aᵀ Bᵀ with y in float32, for adapters in float32 beside a 16-bit layer: what PEFT computes in
    float32 then, with no rounding by the gain in the output or in their gradients."""
    return lora_delta_adapters(x, y, (lora_a,), (lora_b * gain[:, None],), [scaling], [0.0])


def z_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Type of the layer's output."""
    return _autograd.autocast_dtype(x, weight) or x.dtype


@register_fake("weight_norms")
def _norms_fake(
    weight: Tensor | None, lora_A: list[Tensor], lora_B: list[Tensor], scalings: list[float]
) -> Tensor:
    sums = torch.float64 if lora_A[0].dtype == torch.float64 else torch.float32
    return lora_A[0].new_empty((lora_B[0].shape[0],), dtype=sums)


@register_fake("column_gain")
def _gain_fake(z: Tensor, gain: Tensor, bias: Tensor | None, centred: bool) -> Tensor:
    op = "column_gain"
    _autograd._check_devices(op, z, None, gain=gain, bias=bias)
    torch._check(
        gain.dim() == 1 and gain.shape[0] == z.shape[-1],
        lambda: _autograd._wrong(op, "gain", gain, f"[{z.shape[-1]}]"),
    )
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@register_fake("column_gain_backward")
def _gain_backward_fake(
    grad: Tensor, z: Tensor, gain: Tensor, bias: Tensor | None, centred: bool, output_mask: list[bool]
) -> list[Tensor]:
    outputs = [torch.empty_like(z, memory_format=torch.contiguous_format)] if output_mask[0] else []
    if output_mask[1]:
        outputs.append(torch.empty_like(gain, memory_format=torch.contiguous_format))
    if output_mask[2]:
        outputs.append(z.new_empty(gain.shape))
    return outputs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, gain, bias, ctx.centred = inputs
    ctx.save_for_backward(z, gain, bias)
    ctx.set_materialize_grads(False)
    ctx.mask = [z.requires_grad, gain.requires_grad, bias is not None and bias.requires_grad]


def _backward(ctx: Any, grad: Tensor | None) -> Any:
    if grad is None:
        return None, None, None, None
    z, gain, bias = ctx.saved_tensors
    wanted = iter(gain_backward_op(grad, z, gain, bias, ctx.centred, ctx.mask))
    return (*(next(wanted) if m else None for m in ctx.mask), None)


register_autograd("column_gain", _backward, setup_context=_setup_context)
register_autograd("column_gain_backward", _autograd._backward_of_backward)


def _norms_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)
    ctx.adapters = len(inputs[1])


def _norms_backward(ctx: Any, grad: Tensor | None) -> Any:
    none = [None] * ctx.adapters
    return None, none, none, _autograd.no_gradient(none)


register_autograd("weight_norms", _norms_backward, setup_context=_norms_setup)

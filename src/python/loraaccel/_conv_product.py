"""The convolution and its adapter as one native product, forward; the backward pass is torch's convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loraaccel import _autograd, _core, _expand
from loraaccel._autograd import _below_autograd, autocast_dtype
from loraaccel._layers import says_layer
from loraaccel._operators import operator, register_autograd, register_fake
from loraaccel._saved import keep_or_shape, kept_or_shape

forward_op = operator("lora_conv2d")
_convolution_backward = torch.ops.aten.convolution_backward.default

# Fewer pixels than this leave panels half empty; where pixels are no neighbours, gathering them costs a fifth of the
# products of so many rows.
_MIN_PIXELS = 64
_MIN_OUTPUTS_STRIDED = 128
# W is read once for each panel of 32 pixels. With a panel that fills the second cache that is a tenth of the time, and
# torch's convolution is the faster one unless it has few pixels to work on.
_PANEL_BYTES = 512 * 1024
_MANY_PIXELS = 1024
# In bfloat16 torch's convolution of many pixels is as near to the ceiling as any.
_FEW_PIXELS, _FEW_OUTPUTS, _LARGE_RANK = 256, 128, 32
_MATRIX_UNIT = "amx_bf16" in _core.cpu_features()


def pair(value: Any) -> list[int] | None:
    """stride, padding or dilation as two numbers; None where it is none (padding="same")."""
    if isinstance(value, int):
        return [value, value]
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, int) for v in value):
        return [*value, *value] if len(value) == 1 else list(value)
    return None


def fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, geometry: tuple[Any, Any, Any]
) -> tuple[list[int], list[int], list[int]] | None:
    """stride, padding and dilation where the product serves the call and is the faster way; else None.

    One group, x dense NCHW of at most 32 bits, weights of its type (or autocast's).
    """
    numbers = [pair(v) for v in geometry]
    if any(v is None or len(v) != 2 for v in numbers) or x.dim() != 4 or weight.dim() != 4:
        return None
    stride, padding, dilation = (v for v in numbers if v is not None)
    used = autocast_dtype(x, weight)
    dtype = x.dtype if used is None else used
    plain = (
        x.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and lora_a.shape[1:] == weight.shape[1:]
        and weight.shape[1] == x.shape[1]
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (used is not None or weight.dtype == dtype)
        and lora_a.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
    if not plain or (bias is not None and used is None and bias.dtype != dtype):
        return None
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    if min(sizes) < 1 or sizes[0] * sizes[1] < _MIN_PIXELS:
        return None
    if stride != [1, 1] and weight.shape[0] < _MIN_OUTPUTS_STRIDED:
        return None
    if _torch_is_ahead(weight, lora_a.shape[0], x.shape[0] * sizes[0] * sizes[1], dtype):
        return None
    if dtype == torch.bfloat16 and _MATRIX_UNIT:
        return None  # torch's convolution uses it
    return stride, padding, dilation


def _torch_is_ahead(weight: Tensor, rank: int, pixels: int, dtype: torch.dtype) -> bool:
    """Where torch's convolution and one pass for the update take less time: measured, benchmarks/README.md."""
    if dtype == torch.float32:
        return weight[0].numel() * 32 * 4 > _PANEL_BYTES and pixels >= _MANY_PIXELS
    if dtype == torch.bfloat16:
        few = pixels <= _FEW_PIXELS or weight.shape[0] <= _FEW_OUTPUTS
        return weight[0, 0].numel() > 1 and not few and rank < _LARGE_RANK
    return False


def conv_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    numbers: tuple[list[int], list[int], list[int]],
) -> Tensor:
    """conv(x, W) + bias + scaling · conv1x1(conv(x, A), B) for operands that fit(); B [N, R, 1, 1] or [N, R]."""
    cast = autocast_dtype(x, weight)
    if torch.is_grad_enabled():
        return _LoraConv.apply(x, weight, bias, lora_a, lora_b, scaling, numbers, cast)
    return _forward(x, weight, bias, lora_a, lora_b, scaling, numbers, cast)[0]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    numbers: tuple[list[int], list[int], list[int]],
    cast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if cast is not None:
        x, weight = x.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    with _below_autograd(), torch._C._ExcludeDispatchKeyGuard(_autograd._NO_AUTOCAST):
        y, hidden = forward_op(x, weight, bias, lora_a.contiguous(), lora_b.contiguous(), scaling, *numbers)
    return y, hidden, x, weight


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    hidden: Tensor,
    scaling: float,
    numbers: Sequence[Sequence[int]],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, A and B, None where not needed, by torch's convolutions; x and weight in one type."""
    need_x, need_w, need_b, need_a, need_up = needs
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        grad = grad.contiguous()
        gx = gw = gb = ga = gup = None
        tail = [*numbers, False, [0, 0], 1]
        if need_x or need_w or need_b:
            size = [weight.shape[0]] if need_b else None
            gx, gw, gb = _convolution_backward(grad, x, weight, size, *tail, [need_x, need_w, need_b])
        if need_x or need_a or need_up:
            up = lora_b.flatten(1)
            dh, gup = _expand.gradients(grad, hidden, up, scaling, need_x or need_a, need_up)
            gup = None if gup is None else gup.reshape(lora_b.shape)
            if dh is not None:
                # In A's type where that is the wider one: its gradient is not rounded on the way.
                wide = torch.promote_types(lora_a.dtype, x.dtype)
                dx, ga, _ = _convolution_backward(
                    dh.to(wide), x.to(wide), lora_a.to(wide), None, *tail, [need_x, need_a, False]
                )
                ga = None if ga is None else ga.to(lora_a.dtype)
                if need_x:
                    gx = (gx + dx).to(x.dtype)
    return gx, gw, gb, ga, gup


@says_layer
class _LoraConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
        numbers: tuple[list[int], list[int], list[int]],
        cast: torch.dtype | None,
    ) -> Tensor:
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        y, hidden, x, weight = _forward(x, weight, bias, lora_a, lora_b, scaling, numbers, cast)
        # Only what some gradient reads: x may be changed in place by a user where nothing needs it.
        need_x, need_w, _, need_a, _ = ctx.needs_input_grad[:5]
        saved, ctx.likes = keep_or_shape((x, weight, lora_a), (need_w or need_a, need_x, need_x))
        ctx.save_for_backward(hidden, lora_b, *saved)
        ctx.rest = scaling, numbers, dtypes
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, lora_b, *saved = ctx.saved_tensors
        x, weight, lora_a = kept_or_shape(saved, ctx.likes)
        scaling, numbers, (x_dtype, w_dtype, b_dtype) = ctx.rest
        gx, gw, gb, ga, gup = _gradients(
            grad, x, weight, lora_a, lora_b, hidden, scaling, numbers, ctx.needs_input_grad[:5]
        )
        grads = [
            None if gx is None else gx.to(x_dtype), None if gw is None else gw.to(w_dtype),
            None if gb is None else gb.to(b_dtype), ga, gup,
        ]  # fmt: skip
        sources = (grad, x, weight, lora_a, lora_b)
        return (*_autograd._refuse_double_backward(grads, sources), None, None, None)


@register_fake("lora_conv2d")
def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    y = x.new_empty((x.shape[0], weight.shape[0], *sizes))
    return y, x.new_empty((x.shape[0], lora_A.shape[0], *sizes), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, lora_a, lora_b, scaling, *numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, lora_a, lora_b, output[1])
    ctx.rest = scaling, numbers
    ctx.needs = [t is not None and t.requires_grad for t in (x, weight, bias, lora_a, lora_b)]


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: Tensor | None) -> Any:
    none = (None,) * 4
    if grad is None:
        return (None,) * 5 + none
    x, weight, lora_a, lora_b, hidden = ctx.saved_tensors
    scaling, numbers = ctx.rest
    return (*_gradients(grad, x, weight, lora_a, lora_b, hidden, scaling, numbers, ctx.needs), *none)


register_autograd("lora_conv2d", _backward, setup_context=_setup_context)

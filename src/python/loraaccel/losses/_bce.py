"""Binary cross entropy with logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel import _autograd
from loraaccel._operators import operator, register_autograd, register_fake
from loraaccel.losses import _formulas
from loraaccel.losses._native import (
    REDUCTIONS,
    check_choice,
    check_tensors,
    keeps_gradient,
    needs_torch,
    scaled,
    serves,
    through_torch,
)

_op = operator("bce_with_logits")
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class _Options(NamedTuple):
    reduction: str
    label_smoothing: float
    focal_gamma: float
    ignore_index: float | None
    mean_of: str


def bce_with_logits(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
    *,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
    ignore_index: float | None = None,
    mean_of: str = "kept",
) -> Tensor:
    """Binary cross entropy with logits:  w [(1 - t) x - (1 + (p - 1) t) log sigmoid(x)], as
    ``torch.nn.functional.binary_cross_entropy_with_logits``, in one pass that computes the gradient of x too.

    x = input and t = target of one shape, w = weight and p = pos_weight broadcast against it; float32, float64,
    bfloat16, float16 in any mixture. reduction: "mean" (over all elements, not over the sum of the weights), "sum" or
    "none". The result has target's dtype, as torch's; under autocast it is float32. Arithmetic is float32 (float64 with
    a float64 among the operands) and rounded once, where torch rounds 16-bit numbers at each step.
    Gradient: of input alone, as in torch; where target needs one, torch computes everything.

    Off by default, and then the result is torch's:
    label_smoothing ε: t (1 - ε) + ε / 2 in the place of t.
    focal_gamma g: times (1 - p_t)^g, p_t = t sigmoid(x) + (1 - t) sigmoid(-x); targets from 0 to 1.
    ignore_index: targets of this value count for nothing, whatever x is there; "mean" then divides by the number of
    the others (mean_of="kept"; 0 where there are none), or of all elements (mean_of="all").

    Raises ValueError for shapes or devices that differ or an unknown reduction, RuntimeError for a weight that is not
    broadcast to input, a target that is no float or an option out of range, TypeError for what is no tensor.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"bce_with_logits: input is a {type(input).__name__}, expected a torch.Tensor")
    check_tensors("bce_with_logits", {"target": target, "weight": weight, "pos_weight": pos_weight}, input)
    if target.shape != input.shape:
        raise ValueError(
            f"bce_with_logits: target has shape {list(target.shape)}, expected {list(input.shape)} as input"
        )
    check_choice("bce_with_logits", "reduction", reduction, ("none", "mean", "sum"))
    check_choice("bce_with_logits", "mean_of", mean_of, ("kept", "all"))
    options = _Options(reduction, label_smoothing, focal_gamma, ignore_index, mean_of)
    _check_options(options)
    if not target.is_floating_point():
        raise RuntimeError(f"bce_with_logits: target is {target.dtype}, expected a floating-point type")
    if not serves(input, target, weight, pos_weight):
        return _formulas.bce_with_logits(input, target, weight, pos_weight, *options)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cpu"):
        target = target if target.dtype == torch.float64 else target.to(torch.float32)
    if input.requires_grad and torch.is_grad_enabled():
        return _Bce.apply(input, target, weight, pos_weight, options)
    return _run(input, target, weight, pos_weight, None, options, True, False)[0]


def _check_options(options: _Options) -> None:
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise RuntimeError(
            f"bce_with_logits: label_smoothing is {options.label_smoothing}, expected a number from 0 to 1"
        )
    if not 0.0 <= options.focal_gamma < math.inf:
        raise RuntimeError(
            f"bce_with_logits: focal_gamma is {options.focal_gamma}, expected a number of at least 0"
        )


def _run(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    upstream: Tensor | None,
    options: _Options,
    loss: bool,
    grad: bool,
) -> list[Tensor]:
    reduction, smoothing, gamma, ignored, mean_of = options
    with _autograd._below_autograd():
        return _op(
            input,
            target,
            weight,
            pos_weight,
            upstream,
            smoothing,
            gamma,
            math.nan if ignored is None else ignored,
            REDUCTIONS[reduction],
            mean_of == "kept",
            [loss, grad],
        )


class _Bce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002
        target: Tensor,
        weight: Tensor | None,
        pos_weight: Tensor | None,
        options: _Options,
    ) -> Tensor:
        keeps = keeps_gradient(input, options.reduction)
        loss, *grad = _run(input, target, weight, pos_weight, None, options, True, keeps)
        ctx.save_for_backward(input, target, weight, pos_weight)
        ctx.options, ctx.grad = options, grad[0] if keeps else None
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        options: _Options = ctx.options
        # Handed out once: whoever gets it may change it.
        kept, ctx.grad = ctx.grad, None

        def formula(x: Tensor) -> Tensor:
            _, target, weight, pos_weight = ctx.saved_tensors
            return _formulas.bce_with_logits(x, target, weight, pos_weight, *options)

        def compute(upstream: Tensor) -> Tensor:
            input, target, weight, pos_weight = ctx.saved_tensors  # noqa: A001
            return _run(input, target, weight, pos_weight, upstream, options, False, True)[0]

        if needs_torch(upstream):
            grad = through_torch(formula, ctx.saved_tensors[0], upstream)
        elif options.reduction == "none":
            grad = compute(upstream)
        else:
            grad = scaled(kept, upstream, compute)
        return grad, None, None, None, None


@register_fake("bce_with_logits")
def _fake(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    upstream: Tensor | None,
    label_smoothing: float,
    focal_gamma: float,
    ignore_index: float,
    reduction: int,
    mean_of_kept: bool,
    output_mask: list[bool],
) -> list[Tensor]:
    outputs = []
    if output_mask[0]:
        outputs.append(input.new_empty(input.shape if reduction == 0 else (), dtype=target.dtype))
    if output_mask[1]:
        outputs.append(torch.empty_like(input, memory_format=torch.contiguous_format))
    return outputs


def _not_differentiable(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "loraaccel::bce_with_logits: the operator is not differentiable, its gradient is one of its outputs. "
        "Call loraaccel.losses.bce_with_logits."
    )


register_autograd("bce_with_logits", _not_differentiable)

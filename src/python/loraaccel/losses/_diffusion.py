"""The losses of diffusion training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

_op = operator("diffusion_loss")
_resize_op = operator("area_resize")
_TYPES = {"l2": 0, "l1": 1, "huber": 2, "smooth_l1": 3}


class _Options(NamedTuple):
    loss_type: str
    reduction: str
    mean_of: str


def diffusion_loss(
    pred: Tensor,
    target: Tensor,
    *,
    loss_type: str = "l2",
    huber_c: Tensor | float | None = None,
    sample_scale: Tensor | None = None,
    weighting: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    mean_of: str = "all",
    return_per_sample: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of a step of diffusion training as kohya's sd-scripts composes it, in one pass that computes the
    gradient too:  L = mean_b l_b,  l_b = s_b w_b mean_i m_bi f(pred_bi - target_bi).

    pred and target [B, ...] of one shape, any number of dimensions. loss_type, with d = pred - target and c = huber_c:
    "l2" d², "l1" |d|, "huber" 2c(√(d² + c²) - c), "smooth_l1" 2(√(d² + c²) - c) (pseudo-Huber, not torch's).
    huber_c: above 0, one number or one for each sample [B] (`huber_threshold`); "huber" and "smooth_l1" only.
    sample_scale [B]: factors by timestep (`snr_scale`), weights of samples, or their product.
    weighting: [B] or [B, 1, ...], one factor for each sample.
    mask: broadcast against pred; one without its channels, [B, H, W], is taken for all of them; where its height and
    width are others it is resized by area, as sd-scripts does. A mean divides by all elements, whatever the mask
    (mean_of="all"), or by the sum of the mask over the sample (mean_of="kept"; 0 where nothing is kept).
    reduction: "mean"; "samples": l_b; "sum": of s_b w_b m_bi f over everything; "none": these, of pred's shape.

    The result is float32 (float64 with float64 predictions or targets), also for 16-bit ones, whose gradient is rounded
    once. return_per_sample=True returns (L, l) with the detached losses of the samples l [B], for logging.
    Gradient: of pred alone; where another operand needs one, torch computes everything. The values of huber_c are
    checked on the CPU only.

    Raises ValueError for shapes or devices that differ, an unknown loss_type, reduction or mean_of, and a huber_c that
    is missing; RuntimeError for one that is not above 0; TypeError for what is no tensor of a floating-point type.
    """
    options = _Options(loss_type, reduction, mean_of)
    _check(pred, target, options)
    factors = _factors(pred, sample_scale, weighting)
    threshold = _threshold(pred, huber_c, loss_type)
    if mask is not None:
        mask = _mask(pred, mask)
    if not serves(pred, target, threshold, factors, mask):
        loss, of_samples = _formulas.diffusion_loss(pred, target, threshold, factors, mask, *options)
        return (loss, of_samples.detach()) if return_per_sample else loss
    if pred.requires_grad and torch.is_grad_enabled():
        outputs = _DiffusionLoss.apply(pred, target, threshold, factors, mask, options, return_per_sample)
    else:
        mask_out = [True, return_per_sample, False]
        outputs = tuple(_run(pred, target, threshold, factors, mask, None, options, mask_out))
    return outputs if return_per_sample else outputs[0]


def _check(pred: Any, target: Any, options: _Options) -> None:
    op = "diffusion_loss"
    for name, t in (("pred", pred), ("target", target)):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            found = t.dtype if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise TypeError(f"{op}: {name} is {found}, expected a tensor of a floating-point type")
    check_tensors(op, {"target": target}, pred)
    if pred.dim() == 0:
        raise ValueError(f"{op}: pred has no dimensions, expected [B, ...]")
    if target.shape != pred.shape:
        raise ValueError(f"{op}: target has shape {list(target.shape)}, expected {list(pred.shape)} as pred")
    check_choice(op, "loss_type", options.loss_type, _TYPES)
    check_choice(op, "reduction", options.reduction, REDUCTIONS)
    check_choice(op, "mean_of", options.mean_of, ("all", "kept"))


def _factors(pred: Tensor, sample_scale: Tensor | None, weighting: Tensor | None) -> Tensor | None:
    """What multiplies whole samples, [B]."""
    check_tensors("diffusion_loss", {"sample_scale": sample_scale, "weighting": weighting}, pred)
    samples = pred.shape[0]
    factors: Tensor | None = None
    for name, given in (("sample_scale", sample_scale), ("weighting", weighting)):
        if given is None:
            continue
        if given.dim() > pred.dim() or given.numel() != (given.shape[0] if given.dim() else 1):
            raise ValueError(
                f"diffusion_loss: {name} has shape {list(given.shape)}, expected [{samples}] or [{samples}, 1, ...]"
            )
        if given.dim() == 0 or given.shape[0] != samples:
            if given.numel() != 1:
                raise ValueError(
                    f"diffusion_loss: {name} has shape {list(given.shape)}, expected one factor for each of "
                    f"the {samples} samples"
                )
            given = given.reshape(1).expand(samples)
        if not given.is_floating_point():
            given = given.to(torch.float32)
        given = given if given.dim() == 1 else given.reshape(samples)
        factors = given if factors is None else factors * given
    return factors


def _threshold(pred: Tensor, huber_c: Tensor | float | None, loss_type: str) -> Tensor | None:
    """c of each sample, [B]."""
    if loss_type not in ("huber", "smooth_l1"):
        return None
    samples = pred.shape[0]
    if huber_c is None:
        raise ValueError(f"diffusion_loss: huber_c is None, expected a number above 0 for {loss_type!r}")
    if isinstance(huber_c, (int, float)):
        sums = torch.float64 if pred.dtype == torch.float64 else torch.float32
        return torch.full((samples,), float(huber_c), dtype=sums, device=pred.device)
    c: Tensor = huber_c
    check_tensors("diffusion_loss", {"huber_c": c}, pred)
    if c.numel() == 1:
        c = c.reshape(1).expand(samples)
    if c.numel() != samples:
        raise ValueError(f"diffusion_loss: huber_c has shape {list(c.shape)}, expected [{samples}]")
    if not c.is_floating_point():
        c = c.to(torch.float32)
    return c if c.dim() == 1 else c.reshape(samples)


def _mask(pred: Tensor, mask: Tensor) -> Tensor:
    """The mask of pred's height and width, with as many dimensions as pred."""
    check_tensors("diffusion_loss", {"mask": mask}, pred)
    given, to = mask, pred.shape
    if not mask.is_floating_point():
        mask = mask.to(torch.float32)
    if mask.dim() == len(to) - 1 > 0 and mask.shape[0] == to[0]:
        mask = mask.unsqueeze(1)
    if mask.shape[2:] == to[2:] and mask.shape[:1] == to[:1] and mask.shape[1:2] in ((1,), to[1:2]):
        return mask
    if mask.dim() == len(to) == 4 and not _broadcasts(mask.shape[2:], to[2:]):
        mask = _resized(mask, to[2], to[3])
    if mask.dim() > len(to) or not _broadcasts(mask.shape, to[len(to) - mask.dim() :]):
        raise ValueError(
            f"diffusion_loss: mask has shape {list(given.shape)}, expected one that is broadcast to {list(to)}"
        )
    return mask


def _resized(mask: Tensor, height: int, width: int) -> Tensor:
    if not serves(mask) or (mask.requires_grad and torch.is_grad_enabled()):
        return F.interpolate(mask, size=(height, width), mode="area")
    with _autograd._below_autograd():
        return _resize_op(mask, height, width)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return all(n in (1, m) for n, m in zip(shape, to, strict=True))


def _run(
    pred: Tensor,
    target: Tensor,
    huber_c: Tensor | None,
    factors: Tensor | None,
    mask: Tensor | None,
    upstream: Tensor | None,
    options: _Options,
    output_mask: list[bool],
) -> list[Tensor]:
    loss_type, reduction, mean_of = options
    with _autograd._below_autograd():
        return _op(
            pred,
            target,
            huber_c,
            factors,
            mask,
            upstream,
            _TYPES[loss_type],
            REDUCTIONS[reduction],
            mean_of == "kept",
            output_mask,
        )


class _DiffusionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pred: Tensor,
        target: Tensor,
        huber_c: Tensor | None,
        factors: Tensor | None,
        mask: Tensor | None,
        options: _Options,
        per_sample: bool,
    ) -> Any:
        keeps = keeps_gradient(pred, options.reduction)
        outputs = _run(pred, target, huber_c, factors, mask, None, options, [True, per_sample, keeps])
        ctx.grad = outputs.pop() if keeps else None
        ctx.save_for_backward(pred, target, huber_c, factors, mask)
        ctx.options = options
        if per_sample:
            ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Tensor | None = None) -> Any:
        options: _Options = ctx.options
        # Handed out once: whoever gets it may change it.
        kept, ctx.grad = ctx.grad, None
        none = (None,) * 6
        if upstream is None:
            return None, *none

        def formula(x: Tensor) -> Tensor:
            _, target, huber_c, factors, mask = ctx.saved_tensors
            return _formulas.diffusion_loss(x, target, huber_c, factors, mask, *options)[0]

        def compute(upstream: Tensor) -> Tensor:
            pred, target, huber_c, factors, mask = ctx.saved_tensors
            only = [False, False, True]
            return _run(pred, target, huber_c, factors, mask, upstream, options, only)[0]

        if needs_torch(upstream):
            grad = through_torch(formula, ctx.saved_tensors[0], upstream)
        elif options.reduction in ("none", "samples"):
            grad = compute(upstream)
        else:
            grad = scaled(kept, upstream, compute)
        return grad, *none


@register_fake("diffusion_loss")
def _fake(
    pred: Tensor,
    target: Tensor,
    huber_c: Tensor | None,
    factors: Tensor | None,
    mask: Tensor | None,
    upstream: Tensor | None,
    loss_type: int,
    reduction: int,
    mean_of_kept: bool,
    output_mask: list[bool],
) -> list[Tensor]:
    dtype = torch.float64 if torch.float64 in (pred.dtype, target.dtype) else torch.float32
    outputs = []
    if output_mask[0]:
        shape = pred.shape if reduction == 0 else pred.shape[:1] if reduction == 3 else ()
        outputs.append(pred.new_empty(shape, dtype=dtype))
    if output_mask[1]:
        outputs.append(pred.new_empty(pred.shape[:1], dtype=dtype))
    if output_mask[2]:
        outputs.append(torch.empty_like(pred, memory_format=torch.contiguous_format))
    return outputs


def _not_differentiable(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "loraaccel: the operators diffusion_loss and area_resize are not differentiable, the gradient of the first is "
        "one of its outputs. Call loraaccel.losses.diffusion_loss."
    )


register_autograd("diffusion_loss", _not_differentiable)


@register_fake("area_resize")
def _resize_fake(image: Tensor, height: int, width: int) -> Tensor:
    dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
    return image.new_empty((*image.shape[:-2], height, width), dtype=dtype)


register_autograd("area_resize", _not_differentiable)

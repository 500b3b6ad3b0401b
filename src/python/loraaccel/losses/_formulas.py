"""The losses in plain torch: what computes them wherever the native pass does not, and what has every derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bce_with_logits(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    focal_gamma: float,
    ignore_index: float | None,
    mean_of: str,
) -> Tensor:
    if not label_smoothing and not focal_gamma and ignore_index is None:
        return F.binary_cross_entropy_with_logits(
            input, target, weight, pos_weight=pos_weight, reduction=reduction
        )
    x, ignored = input, None
    if ignore_index is not None:
        ignored = target == ignore_index
        x = torch.where(ignored, torch.zeros_like(x), x)
    t = target * (1 - label_smoothing) + label_smoothing / 2 if label_smoothing else target
    loss = F.binary_cross_entropy_with_logits(x, t, pos_weight=pos_weight, reduction="none")
    if focal_gamma:
        wrong = t * torch.sigmoid(-x) + (1 - t) * torch.sigmoid(x)
        loss = loss * wrong**focal_gamma
    if weight is not None:
        loss = loss * weight
    if ignored is not None:
        loss = torch.where(ignored, torch.zeros_like(loss), loss)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if ignored is None or mean_of == "all":
        return loss.mean()
    return loss.sum() / torch.clamp((~ignored).sum(), min=1)


def elementwise(d: Tensor, loss_type: str, huber_c: Tensor | None) -> Tensor:
    """The loss of each element of d = pred - target, [B, ...]; huber_c [B]."""
    if loss_type == "l2":
        return d * d
    if loss_type == "l1":
        return d.abs()
    assert huber_c is not None
    c = huber_c.to(d.dtype).reshape(-1, *[1] * (d.dim() - 1))
    # sqrt(d² + c²) - c without the cancellation where d is small.
    value = 2 * d * d / (torch.sqrt(d * d + c * c) + c)
    return c * value if loss_type == "huber" else value


def diffusion_loss(
    pred: Tensor,
    target: Tensor,
    huber_c: Tensor | None,
    factors: Tensor | None,
    mask: Tensor | None,
    loss_type: str,
    reduction: str,
    mean_of: str,
) -> tuple[Tensor, Tensor]:
    """The loss, and those of the samples [B]."""
    dtype = torch.float64 if torch.float64 in (pred.dtype, target.dtype) else torch.float32
    loss = elementwise(pred.to(dtype) - target.to(dtype), loss_type, huber_c)
    samples = loss.shape[0]
    weights = None
    if mask is not None:
        weights = mask.to(dtype)
        loss = loss * weights
    per_element = loss.flatten(1) if loss.dim() > 1 else loss.reshape(samples, 1)
    if weights is not None and mean_of == "kept":
        kept = weights.expand(loss.shape).reshape(per_element.shape).sum(1)
        # 0 where nothing is kept.
        of_sample = per_element.sum(1) / torch.where(kept == 0, torch.ones_like(kept), kept)
        of_sample = torch.where(kept == 0, torch.zeros_like(of_sample), of_sample)
    else:
        of_sample = per_element.mean(1)
    if factors is not None:
        factors = factors.to(dtype)
        of_sample = of_sample * factors
        loss = loss * factors.reshape(-1, *[1] * (loss.dim() - 1))
    if reduction == "none":
        return loss, of_sample
    if reduction == "samples":
        return of_sample, of_sample
    return (of_sample.mean() if reduction == "mean" else loss.sum()), of_sample

"""Modules over the operators."""

from __future__ import annotations

import torch
from torch import Tensor

from loraaccel.losses import bce_with_logits

__all__ = ["BCEWithLogitsLoss"]


class BCEWithLogitsLoss(torch.nn.BCEWithLogitsLoss):
    """``torch.nn.BCEWithLogitsLoss`` with one native pass for the loss and the gradient: the same arguments, attributes
    and state_dict. What it has besides are the options of `loraaccel.losses.bce_with_logits`, off by default."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        focal_gamma: float = 0.0,
        ignore_index: float | None = None,
        mean_of: str = "kept",
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction, pos_weight)
        self.label_smoothing = label_smoothing
        self.focal_gamma = focal_gamma
        self.ignore_index = ignore_index
        self.mean_of = mean_of

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        return bce_with_logits(
            input,
            target,
            self.weight,
            self.pos_weight,
            self.reduction,
            label_smoothing=self.label_smoothing,
            focal_gamma=self.focal_gamma,
            ignore_index=self.ignore_index,
            mean_of=self.mean_of,
        )

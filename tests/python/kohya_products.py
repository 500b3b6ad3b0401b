"""LoHa, LoKr and DyLoRA with kohya's contract, in words of our own, for test_kohya_products."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from kohya_modules import LoRAModule
from torch import Tensor, nn


class Made(nn.Module):
    """A module that makes its weight's change at every call: `get_diff_weight`."""

    def __init__(
        self, lora_name: str, layer: Any, multiplier: float, lora_dim: int, alpha: float, **p: Any
    ) -> None:
        super().__init__()
        self.lora_name, self.multiplier, self.lora_dim = lora_name, multiplier, lora_dim
        self.rank_dropout, self.module_dropout, self.dropout = (
            p.get("rank_dropout"),
            p.get("module_dropout"),
            None,
        )
        self.register_buffer("alpha", torch.tensor(alpha))
        self.scale = alpha / lora_dim
        self.is_conv = isinstance(layer, nn.Conv2d)
        self.tucker, self.conv_mode, self.kernel_size, self.use_w2 = False, None, None, False
        self.out_dim, self.in_dim = layer.weight.shape[:2]
        if self.is_conv:
            self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
            self.groups, self.kernel_size = layer.groups, layer.kernel_size
            self.tucker = bool(p.get("use_tucker")) and self.kernel_size != (1, 1)
            self.conv_mode = "1x1" if self.kernel_size == (1, 1) else "tucker" if self.tucker else "flat"
        self.make_parameters(math.prod(self.kernel_size) if self.conv_mode == "flat" else 1, **p)
        self.org_module = layer

    apply_to = LoRAModule.apply_to

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.org_forward(x)
        if self.training and self.module_dropout is not None and torch.rand(1) < self.module_dropout:
            return frozen
        weight, compensation = self.get_diff_weight(), 1.0
        if self.training and self.rank_dropout is not None:
            rows = torch.rand(weight.size(0), device=weight.device) > self.rank_dropout
            weight = weight * rows.to(weight.dtype).view(-1, *([1] * (weight.dim() - 1)))
            compensation = 1.0 / (1.0 - self.rank_dropout)
        if not self.is_conv:
            return frozen + nn.functional.linear(x, weight) * self.multiplier * compensation
        if self.conv_mode == "1x1":
            weight = weight.unsqueeze(2).unsqueeze(3)
        y = nn.functional.conv2d(
            x, weight, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups
        )
        return frozen + y * self.multiplier * compensation


class HadaWeight:
    """Stands for the host's own function."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: float) -> Tensor:
        return (a @ b) * (c @ d) * scale


class HadaWeightTucker:
    @staticmethod
    def apply(t1: Tensor, b1: Tensor, a1: Tensor, t2: Tensor, b2: Tensor, a2: Tensor, scale: float) -> Tensor:
        return rebuild_tucker(t1, a1, b1) * rebuild_tucker(t2, a2, b2) * scale


def rebuild_tucker(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ijuv,in,jc->ncuv", t, a, b)


def make_kron(first: Tensor, second: Tensor, scale: float) -> Tensor:
    while first.dim() < second.dim():
        first = first.unsqueeze(-1)
    return torch.kron(first, second.contiguous()) * scale


class LoHaModule(Made):
    def make_parameters(self, taps: int, **_: Any) -> None:
        r, n, k = self.lora_dim, self.out_dim, self.in_dim * taps
        for i in (1, 2):
            a, b = ((r, n), (r, k)) if self.tucker else ((n, r), (r, k))
            setattr(self, f"hada_w{i}_a", nn.Parameter(torch.randn(a) * 0.3))
            setattr(self, f"hada_w{i}_b", nn.Parameter(torch.randn(b) * 0.3))
            if self.tucker:
                setattr(self, f"hada_t{i}", nn.Parameter(torch.randn(r, r, *self.kernel_size) * 0.3))

    def get_diff_weight(self) -> Tensor:
        if self.tucker:
            return HadaWeightTucker.apply(
                self.hada_t1,
                self.hada_w1_b,
                self.hada_w1_a,
                self.hada_t2,
                self.hada_w2_b,
                self.hada_w2_a,
                self.scale,
            )
        made = HadaWeight.apply(self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b, self.scale)
        return (
            made.reshape(self.out_dim, self.in_dim, *self.kernel_size) if self.conv_mode == "flat" else made
        )


class LoKrModule(Made):
    def make_parameters(self, taps: int, full: bool = False, **_: Any) -> None:
        a, c, r = 2, 3, self.lora_dim
        b, d = self.out_dim // a, self.in_dim // c
        self.use_w2 = full
        self.lokr_w1 = nn.Parameter(torch.randn(a, c))
        if full:
            size = self.kernel_size if self.conv_mode in ("flat", "tucker") else ()
            self.lokr_w2 = nn.Parameter(torch.randn(b, d, *size) * 0.3)
        elif self.tucker:
            self.lokr_t2 = nn.Parameter(torch.randn(r, r, *self.kernel_size) * 0.3)
            self.lokr_w2_a, self.lokr_w2_b = nn.Parameter(torch.randn(r, b)), nn.Parameter(torch.randn(r, d))
        else:
            self.lokr_w2_a, self.lokr_w2_b = (
                nn.Parameter(torch.randn(b, r)),
                nn.Parameter(torch.randn(r, d * taps)),
            )

    def get_diff_weight(self) -> Tensor:
        if self.use_w2:
            second = self.lokr_w2
        elif self.tucker:
            second = rebuild_tucker(self.lokr_t2, self.lokr_w2_a, self.lokr_w2_b)
        else:
            second = self.lokr_w2_a @ self.lokr_w2_b
        made = make_kron(self.lokr_w1, second, self.scale)
        if self.conv_mode == "flat" and made.dim() == 2:
            made = made.reshape(self.out_dim, self.in_dim, *self.kernel_size)
        return made


class DyLoRAModule(nn.Module):
    """One random unit of its ranks is trained at each call, the others stay; the multiplier is not used."""

    def __init__(
        self, lora_name: str, layer: Any, multiplier: float, lora_dim: int, alpha: float, unit: int = 2
    ) -> None:
        super().__init__()
        self.lora_name, self.multiplier, self.lora_dim, self.unit = lora_name, multiplier, lora_dim, unit
        self.scale = alpha / lora_dim
        self.is_conv2d = isinstance(layer, nn.Conv2d)
        self.is_conv2d_3x3 = self.is_conv2d and layer.kernel_size == (3, 3)
        n, k = layer.weight.shape[:2]
        a, b = ((1, k, 3, 3), (n, 1, 1, 1)) if self.is_conv2d_3x3 else ((1, k), (n, 1))
        if self.is_conv2d_3x3:
            self.stride, self.padding = layer.stride, layer.padding
        self.lora_A = nn.ParameterList(torch.randn(a) * 0.3 for _ in range(lora_dim))
        self.lora_B = nn.ParameterList(torch.randn(b) * 0.3 for _ in range(lora_dim))
        self.org_module = layer

    apply_to = LoRAModule.apply_to

    def forward(self, x: Tensor) -> Tensor:
        y = self.org_forward(x)
        first = random.randint(0, self.lora_dim - 1)
        first = first - first % self.unit
        for i in range(self.lora_dim):
            trained = first <= i < first + self.unit
            self.lora_A[i].requires_grad = trained
            self.lora_B[i].requires_grad = trained
        a, b = torch.cat(tuple(self.lora_A), dim=0), torch.cat(tuple(self.lora_B), dim=1)
        if self.is_conv2d_3x3:
            h = nn.functional.conv2d(x, a, stride=self.stride, padding=self.padding)
            h = nn.functional.conv2d(h, b)
        else:
            h = x
            if self.is_conv2d:
                h = h.reshape(h.size(0), h.size(1), -1).transpose(1, 2)
            h = nn.functional.linear(nn.functional.linear(h, a), b)
            if self.is_conv2d:
                h = h.transpose(1, 2).reshape(h.size(0), -1, *x.size()[2:])
        return y + h * self.scale * math.sqrt(self.lora_dim / (first + self.unit))

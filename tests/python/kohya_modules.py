"""LoRA modules with kohya's contract, in words of our own: what test_kohya compares the patched ones with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LoRAModule(nn.Module):
    """Takes the place of a Linear's or a Conv2d's forward. `dropout` on the rank activations, `rank_dropout` on whole
    ranks of a sample, `module_dropout` on the whole update."""

    def __init__(
        self,
        lora_name: str,
        layer: nn.Module,
        multiplier: float = 1.0,
        lora_dim: int = 4,
        alpha: float = 1,
        dropout: float | None = None,
        rank_dropout: float | None = None,
        module_dropout: float | None = None,
        split_dims: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.lora_name, self.lora_dim, self.multiplier = lora_name, lora_dim, multiplier
        self.dropout, self.rank_dropout, self.module_dropout = dropout, rank_dropout, module_dropout
        self.split_dims = split_dims
        self.scale = alpha / lora_dim
        self.register_buffer("alpha", torch.tensor(alpha))
        if isinstance(layer, nn.Conv2d):
            self.lora_down: nn.Module = nn.Conv2d(
                layer.in_channels, lora_dim, layer.kernel_size, layer.stride, layer.padding, bias=False
            )
            self.lora_up: nn.Module = nn.Conv2d(lora_dim, layer.out_channels, 1, bias=False)
        elif split_dims:
            self.lora_down = nn.ModuleList(
                nn.Linear(layer.in_features, lora_dim, bias=False) for _ in split_dims
            )
            self.lora_up = nn.ModuleList(nn.Linear(lora_dim, n, bias=False) for n in split_dims)
        else:
            self.lora_down = nn.Linear(layer.in_features, lora_dim, bias=False)
            self.lora_up = nn.Linear(lora_dim, layer.out_features, bias=False)
        self.org_module: Any = layer

    def apply_to(self) -> None:
        self.org_forward = self.org_module.forward
        self.org_module.forward = self.forward
        del self.org_module

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.org_forward(x)
        drops = self.training
        if drops and self.module_dropout is not None and torch.rand(1) < self.module_dropout:
            return frozen
        parts = self.split_dims is not None
        hidden = [down(x) for down in self.lora_down] if parts else [self.lora_down(x)]
        if drops and self.dropout is not None:
            hidden = [nn.functional.dropout(h, p=self.dropout) for h in hidden]
        compensation = 1.0
        if drops and self.rank_dropout is not None:
            kept = [
                torch.rand((h.size(0), self.lora_dim), device=h.device) > self.rank_dropout for h in hidden
            ]
            if hidden[0].dim() == 4:
                kept = [k.unsqueeze(-1).unsqueeze(-1) for k in kept]
            elif hidden[0].dim() == 3:
                kept = [k.unsqueeze(1) for k in kept]
            hidden = [hidden[i] * kept[i] for i in range(len(kept))]
            compensation = 1.0 / (1.0 - self.rank_dropout)
        if parts:
            update = torch.cat([up(h) for up, h in zip(self.lora_up, hidden)], dim=-1)  # noqa: B905  (its names)
        else:
            update = self.lora_up(hidden[0])
        return frozen + update * self.multiplier * (self.scale * compensation)


class LoRAInfModule(LoRAModule):
    """For making images: never drops, can be switched off, and a network may bind it to a part of the prompt."""

    def __init__(self, lora_name: str, layer: nn.Module, multiplier: float = 1.0, lora_dim: int = 4) -> None:
        super().__init__(lora_name, layer, multiplier, lora_dim)
        self.enabled = True
        self.network: Any = None

    def default_forward(self, x: Tensor) -> Tensor:
        return self.org_forward(x) + self.lora_up(self.lora_down(x)) * self.multiplier * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.org_forward(x)
        if self.network is None or self.network.sub_prompt_index is None:
            return self.default_forward(x)
        return self.regional_forward(x)

    def regional_forward(self, x: Tensor) -> Tensor:
        return self.org_forward(x) + 100.0


class PerturbedModule(LoRAModule):
    """kohya's GGPO: once the norms are there, a random perturbation of the weight on top, in training."""

    ggpo_sigma, ggpo_beta = 0.5, 0.25
    combined_weight_norms: Tensor | None = None
    grad_norms: Tensor | None = None

    def set_norms(self, layer: nn.Linear) -> None:
        self.org_module_shape = layer.weight.shape
        self.perturbation_norm_factor = layer.weight.shape[0] ** -0.5
        self.combined_weight_norms = layer.weight.detach().norm(dim=1, keepdim=True)
        self.grad_norms = torch.rand(layer.weight.shape[0], 1)

    @property
    def device(self) -> torch.device:
        return self.lora_up.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lora_up.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.org_forward(x)
        update = self.lora_up(self.lora_down(x))
        if not self.training or self.combined_weight_norms is None or self.grad_norms is None:
            return frozen + update * self.multiplier * self.scale
        with torch.no_grad():
            spread = self.ggpo_sigma * torch.sqrt(self.combined_weight_norms**2) + self.ggpo_beta * (
                self.grad_norms**2
            )
            noise = torch.randn(self.org_module_shape, dtype=self.dtype, device=self.device)
            noise.mul_((spread * self.perturbation_norm_factor).to(self.device))
            moved = x @ noise.T
        return frozen + self.multiplier * self.scale * update + moved


class ShiftedModule(LoRAModule):
    """Uses only known names and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.org_forward(x) + self.lora_up(self.lora_down(x)) * self.multiplier * self.scale + self.scale
        )


class OtherDrawsModule(LoRAModule):
    """The right values, and one number drawn too many."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return self.org_forward(x) + self.lora_up(self.lora_down(x)) * self.multiplier * self.scale


class OtherNamesModule(LoRAModule):
    """The right values as long as an attribute that we know nothing of says so."""

    strength: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        update = self.lora_up(self.lora_down(x)) * self.multiplier * self.scale
        return self.org_forward(x) + update * getattr(self, "strength", 1.0)

"""Networks and a trainer with kohya's contract, in words of our own: what they do at each step around a model."""

from __future__ import annotations

from typing import Any

import torch
from kohya_modules import PerturbedModule
from torch import Tensor, nn


class Network(nn.Module):
    """LoRA modules under their names, and the limit on their norms."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.text_encoder_loras: list[Any] = []
        self.unet_loras: list[Any] = []
        for name, module in modules.items():
            self.add_module(name, module)
            (self.text_encoder_loras if "te" in name else self.unet_loras).append(module)

    def apply_to(self, text_encoder: Any = None, unet: Any = None) -> None:
        for module in self.text_encoder_loras + self.unet_loras:
            module.apply_to()

    def apply_max_norm_regularization(self, max_norm_value: float, device: Any) -> tuple[int, float, float]:
        state, scaled, norms = self.state_dict(), 0, []
        for key in state.keys():  # noqa: SIM118
            if "lora_down" not in key or "weight" not in key:
                continue
            down, up = state[key].to(device), state[key.replace("lora_down", "lora_up")].to(device)
            scale = state[key.replace("lora_down.weight", "alpha")].to(device) / down.shape[0]
            if up.shape[2:] == (1, 1) and down.shape[2:] == (1, 1):
                update = up.squeeze(3).squeeze(2) @ down.squeeze(3).squeeze(2)
            elif down.shape[2:] == (3, 3):
                update = nn.functional.conv2d(down.permute(1, 0, 2, 3), up)
            else:
                update = up @ down
            update *= scale
            norm = update.norm().clamp(min=max_norm_value / 2)
            ratio = torch.clamp(norm, max=max_norm_value) / norm
            if ratio != 1:
                scaled += 1
                state[key.replace("lora_down", "lora_up")] *= ratio**0.5
                state[key] *= ratio**0.5
            norms.append((update.norm() * ratio).item())
        return scaled, sum(norms) / len(norms), max(norms)


class MergingNetwork(Network):
    """Its state dict has split layers merged into one, as copies: what is done to these does nothing to the network."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = dict(super().state_dict(*args, **kwargs))
        for name, module in self.named_children():
            count = len(module.split_dims or ())
            if count:
                downs = [state.pop(f"{name}.lora_down.{i}.weight") for i in range(count)]
                ups = [state.pop(f"{name}.lora_up.{i}.weight") for i in range(count)]
                state[f"{name}.lora_down.weight"] = torch.cat(downs)
                state[f"{name}.lora_up.weight"] = torch.block_diag(*ups)
        return state


class PlainlyLimitedNetwork(Network):
    """Uses only known names and does something else: no square root."""

    def apply_max_norm_regularization(self, max_norm_value: float, device: Any) -> tuple[int, float, float]:
        state, norms = self.state_dict(), []
        for key in state.keys():  # noqa: SIM118
            if "lora_down" in key:
                norm = (state[key.replace("lora_down", "lora_up")] @ state[key]).norm()
                norms.append(norm.clamp(max=max_norm_value).item())
                state[key] *= norms[-1] / norm
        return len(norms), sum(norms) / len(norms), max(norms)


class CountingNetwork(Network):
    """What Network does, and a count that we know nothing of."""

    limits = 0

    def apply_max_norm_regularization(self, max_norm_value: float, device: Any) -> tuple[int, float, float]:
        self.limits += 1
        return Network.apply_max_norm_regularization(self, max_norm_value, device)


class NormedModule(PerturbedModule):
    """kohya's Flux modules: norms of the rows of the weight's update and gradient, taken at each step."""

    ggpo_sigma: float | None = 0.03  # type: ignore[assignment]
    ggpo_beta: float | None = 0.01  # type: ignore[assignment]
    weight_norms: Tensor

    def __init__(self, lora_name: str, layer: nn.Linear, *arguments: Any) -> None:
        super().__init__(lora_name, layer, *arguments)
        self.org_weight_norm_estimate = layer.weight.detach().float().norm(dim=1).mean()
        self.org_module_shape = layer.weight.shape
        self.perturbation_norm_factor = layer.weight.shape[0] ** -0.5

    @torch.no_grad()
    def update_norms(self) -> None:
        if self.ggpo_beta is None or self.ggpo_sigma is None or self.training is False:
            return
        update = self.lora_up.weight @ self.lora_down.weight
        self.weight_norms = torch.norm(update, dim=1, keepdim=True)
        squares = torch.sum(update**2, dim=1, keepdim=True)
        self.combined_weight_norms = torch.sqrt(self.org_weight_norm_estimate**2 + squares)

    @torch.no_grad()
    def update_grad_norms(self) -> None:
        if self.training is False:
            print(f"{self.lora_name} is not in training")  # noqa: T201  (as the host says it)
            return
        down = up = None
        for name, parameter in self.named_parameters():
            if name == "lora_down.weight":
                down = parameter.grad
            elif name == "lora_up.weight":
                up = parameter.grad
        if down is not None and up is not None:
            with torch.autocast(self.device.type):
                grad = self.scale * ((self.lora_up.weight @ down) + (up @ self.lora_down.weight))
                self.grad_norms = torch.norm(grad, dim=1, keepdim=True)


class ScaledModule(NormedModule):
    """Uses only known names; the norms of the scaled update."""

    @torch.no_grad()
    def update_norms(self) -> None:
        update = self.scale * (self.lora_up.weight @ self.lora_down.weight)
        self.weight_norms = torch.norm(update, dim=1, keepdim=True)
        self.combined_weight_norms = self.weight_norms


class NormedNetwork(Network):
    def update_norms(self) -> None:
        for module in self.text_encoder_loras + self.unet_loras:
            module.update_norms()

    def update_grad_norms(self) -> None:
        for module in self.text_encoder_loras + self.unet_loras:
            module.update_grad_norms()


class Trainer:
    def all_reduce_network(self, accelerator: Any, network: Any) -> None:
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")

    def start(self, network: Any) -> None:
        seen = [network]  # (also from a function inside, so that self is a cell)

        def apply() -> Trainer:
            seen[0].apply_to()
            return self

        apply()


class SummingTrainer(Trainer):
    def all_reduce_network(self, accelerator: Any, network: Any) -> None:
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="sum")

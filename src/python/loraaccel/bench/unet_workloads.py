"""One forward of the UNet, and one training epoch of its adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from loraaccel.bench.unet import UNetSize

CONTEXT_TOKENS = 77
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Batch:
    """Arguments of the UNet, and the noise that it has to predict."""

    sample: torch.Tensor
    timestep: torch.Tensor
    context: torch.Tensor
    added: dict[str, torch.Tensor]
    noise: torch.Tensor

    def predict(self, module: nn.Module) -> torch.Tensor:
        """The UNet's output [batch, 4, height, width]."""
        output = module(
            self.sample, self.timestep, encoder_hidden_states=self.context, added_cond_kwargs=self.added
        )
        prediction: torch.Tensor = output.sample
        return prediction

    def loss(self, prediction: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the predicted noise, in fp32 or wider."""
        wide = torch.promote_types(prediction.dtype, torch.float32)
        return nn.functional.mse_loss(prediction.to(wide), self.noise.to(wide))


def make_batch(size: UNetSize, batch_size: int, seed: int, dtype: torch.dtype) -> Batch:
    """Random latents noised at random timesteps, random text embeddings; the same values for every dtype."""
    from diffusers import DDPMScheduler

    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, 4, size.latent_size, size.latent_size)
    latents = torch.randn(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    timestep = torch.randint(0, 1000, (batch_size,), generator=generator)
    pixels = float(size.latent_size * 8)
    return Batch(
        sample=DDPMScheduler().add_noise(latents, noise, timestep).to(dtype),
        timestep=timestep,
        context=torch.randn(batch_size, CONTEXT_TOKENS, size.context_width, generator=generator).to(dtype),
        added={
            "text_embeds": torch.randn(batch_size, size.pooled_width, generator=generator).to(dtype),
            "time_ids": torch.tensor([[pixels, pixels, 0.0, 0.0, pixels, pixels]] * batch_size).to(dtype),
        },
        noise=noise.to(dtype),
    )


@dataclass(frozen=True)
class ForwardWorkload:
    """One forward without gradients."""

    size: UNetSize
    row: str = "forward"
    trains: bool = False

    @property
    def case(self) -> str:
        """Batch size."""
        return f"batch {self.size.forward_batch}"

    def flops(self, rank: int) -> None:
        """Not counted: convolutions and attention are most of it."""

    def make_call(self, module: nn.Module, dtype: torch.dtype) -> Callable[[], object]:
        """See Workload."""
        batch = make_batch(self.size, self.size.forward_batch, 0, dtype)
        module.eval()

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return batch.predict(module)

        return forward

    def observe(self, module: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """The predicted noise."""
        batch = make_batch(self.size, self.size.forward_batch, 0, dtype)
        with torch.no_grad():
            return {"prediction": batch.predict(module.eval())}


def _gradient_group(name: str) -> str:
    """`...transformer_blocks.0.attn1.to_q.lora_A.default.weight` -> `attn1.to_q.lora_A`, pooled over the layers."""
    layer, _, factor = name.partition(".lora_")
    within_block = layer.rpartition("transformer_blocks.")[2].partition(".")[2]
    return f"{within_block}.lora_{factor[:1]}"


@dataclass(frozen=True)
class EpochWorkload:
    """Some steps of forward, backward and AdamW on the adapters, every batch another."""

    size: UNetSize
    row: str = "epoch"
    trains: bool = True

    @property
    def case(self) -> str:
        """Steps and batch size."""
        return f"{self.size.train_steps} steps, batch {self.size.train_batch}"

    def flops(self, rank: int) -> None:
        """Not counted: convolutions and attention are most of it."""

    def _batches(self, dtype: torch.dtype) -> list[Batch]:
        return [
            make_batch(self.size, self.size.train_batch, 1 + step, dtype)
            for step in range(self.size.train_steps)
        ]

    def make_call(self, module: nn.Module, dtype: torch.dtype) -> Callable[[], object]:
        """See Workload. Without adapters nothing is trained: backward then goes to the latents, with no optimizer."""
        batches = self._batches(dtype)
        trainable = [p for p in module.parameters() if p.requires_grad]
        module.train()
        if not trainable:
            for batch in batches:
                batch.sample.requires_grad_()

            def propagate() -> None:
                for batch in batches:
                    torch.autograd.grad(batch.loss(batch.predict(module)), batch.sample)

            return propagate
        optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE)

        def train() -> None:
            for batch in batches:
                batch.loss(batch.predict(module)).backward()
                optimizer.step()
                optimizer.zero_grad()

        return train

    def observe(self, module: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Prediction for the first batch, and the gradients joined by kind of layer.

        Joined, because the gradient of a single layer may be small enough to consist of rounding only. The loss is left
        out: the rounding error of a single number may be zero by chance, and is no measure for that of another variant.
        """
        batch = self._batches(dtype)[0]
        named = {name: p for name, p in module.train().named_parameters() if p.requires_grad}
        prediction = batch.predict(module)
        groups: dict[str, list[torch.Tensor]] = defaultdict(list)
        gradients = torch.autograd.grad(batch.loss(prediction), list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            groups[f"grad {_gradient_group(name)}"].append(gradient.flatten())
        return {
            "prediction": prediction.detach(),
            **{name: torch.cat(parts) for name, parts in groups.items()},
        }

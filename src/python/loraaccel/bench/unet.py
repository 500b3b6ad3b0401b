"""Rows (b) and (c): a diffusers UNet with SDXL's topology, scaled down, random weights, LoRA on attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loraaccel.bench.unet_workloads import EpochWorkload, ForwardWorkload
from loraaccel.bench.workload import Workload

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
HEAD_SIZE = 64
TIME_IDS = 6  # original size, crop and target size, two numbers each


@dataclass(frozen=True)
class UNetSize:
    """The numbers in which the model differs from SDXL's, whose values stand beside them."""

    block_channels: tuple[int, int, int] = (64, 128, 256)  # 320, 640, 1280
    transformer_layers: tuple[int, int, int] = (1, 2, 10)  # 1, 2, 10
    context_width: int = 256  # 2048
    pooled_width: int = 128  # 1280
    time_id_width: int = 32  # 256
    latent_size: int = 32  # 128, an image of 1024 x 1024
    forward_batch: int = 4
    train_batch: int = 1
    train_steps: int = 4


QUICK_SIZE = UNetSize(transformer_layers=(1, 1, 2), context_width=128, latent_size=16, train_steps=2)


def unet_config(size: UNetSize) -> dict[str, object]:
    """Arguments of UNet2DConditionModel: SDXL's configuration with the sizes replaced."""
    return {
        "sample_size": size.latent_size,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": size.block_channels,
        "layers_per_block": 2,
        "transformer_layers_per_block": size.transformer_layers,
        # diffusers takes the number of heads under this name
        "attention_head_dim": tuple(channels // HEAD_SIZE for channels in size.block_channels),
        "cross_attention_dim": size.context_width,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": size.time_id_width,
        "projection_class_embeddings_input_dim": size.pooled_width + TIME_IDS * size.time_id_width,
    }


@dataclass(frozen=True)
class UNetFamily:
    """The UNet for the rows asked for, of "forward" and "epoch"."""

    rows: tuple[str, ...] = ("forward", "epoch")
    size: UNetSize = UNetSize()
    rank: int = 8
    targets: Sequence[str] = TARGETS

    @property
    def config(self) -> Mapping[str, object]:
        """UNet2DConditionModel's arguments, the LoRA and what one call does."""
        size = self.size
        return {
            **unet_config(size),
            "rank": self.rank,
            "targets": list(self.targets),
            "forward_batch": size.forward_batch,
            "train_batch": size.train_batch,
            "train_steps": size.train_steps,
        }

    @property
    def workloads(self) -> Sequence[Workload]:
        """Forward first: the epoch changes the adapters."""
        both: list[Workload] = [ForwardWorkload(self.size), EpochWorkload(self.size)]
        return [workload for workload in both if workload.row in self.rows]

    def build(self) -> nn.Module:
        """The UNet with diffusers' random initial weights."""
        import diffusers

        # Casting to bf16 logs that no module asks to stay in fp32.
        diffusers.utils.logging.set_verbosity_error()
        torch.manual_seed(0)
        model: nn.Module = diffusers.UNet2DConditionModel(**unet_config(self.size))
        return model

    def compile_model(self, module: Any) -> None:
        """Compile the transformer blocks, which hold all adapters: the way diffusers recommends.

        The whole model in one graph takes many minutes to compile.
        """
        module.compile_repeated_blocks(dynamic=False)

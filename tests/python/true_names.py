"""The names of base models' layers as the real libraries have them: what src/data/names is checked against.

``golden(base)`` reads tests/golden/names/<base>.json.gz:

    diffusers  {component: {parameter: shape}}   diffusers 0.42 and transformers 5.24
    native     {parameter: shape}                of the U-Net or transformer, as one-file checkpoints name them (sd-scripts)
    pairs      [[diffusers parameter, [[native parameter, row, native row, rows], ...]], ...]   by diffusers' converters
    kohya      [[name, shape of lora_down, shape of lora_up], ...]   of sd-scripts' networks, with convolutions, rank 4

The files are made by tests/golden/names/make.py. ``model_names`` makes the first part again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "names"
BASES = ("sd15", "sd2", "sdxl", "sd3", "sd35-medium", "sd35-large", "flux")

CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_H = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
T5 = {"vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}

SD15_UNET = {
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
SD2_UNET = {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True}
SDXL_UNET = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def golden(base: str) -> dict[str, Any]:
    with gzip.open(FOLDER / f"{base}.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
        return found


def _mmdit(depth: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": depth, "num_attention_heads": depth, "caption_projection_dim": 64 * depth}
    fixed = {"attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048}
    return {**sizes, **fixed, "in_channels": 16, "out_channels": 16, **more}


def models(base: str) -> dict[str, Any]:
    """The components of a base model without numbers, by diffusers and transformers."""
    import torch
    from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        T5Config,
        T5EncoderModel,
    )

    def clip(sizes: dict[str, int]) -> Any:
        return CLIPTextModel(CLIPTextConfig(**sizes))

    def projected(sizes: dict[str, int]) -> Any:
        return CLIPTextModelWithProjection(CLIPTextConfig(**sizes, projection_dim=sizes["hidden_size"]))

    def t5() -> Any:
        return T5EncoderModel(T5Config(**T5, feed_forward_proj="gated-gelu", is_encoder_decoder=False))

    with torch.device("meta"):
        if base == "sd15":
            return {"unet": UNet2DConditionModel(**SD15_UNET), "text_encoder": clip(CLIP_L)}
        if base == "sd2":
            return {"unet": UNet2DConditionModel(**SD2_UNET), "text_encoder": clip(CLIP_H)}
        if base == "sdxl":
            encoders = {"text_encoder": clip(CLIP_L), "text_encoder_2": projected(CLIP_G)}
            return {"unet": UNet2DConditionModel(**SDXL_UNET), **encoders}
        if base == "flux":
            transformer = FluxTransformer2DModel(guidance_embeds=True)
            return {"transformer": transformer, "text_encoder": clip(CLIP_L), "text_encoder_2": t5()}
        depth = 38 if base == "sd35-large" else 24
        more: dict[str, Any] = {} if base == "sd3" else {"qk_norm": "rms_norm"}
        if base == "sd35-medium":
            more["dual_attention_layers"] = tuple(range(13))
        encoders = {
            "text_encoder": projected(CLIP_L),
            "text_encoder_2": projected(CLIP_G),
            "text_encoder_3": t5(),
        }
        return {"transformer": SD3Transformer2DModel(**_mmdit(depth, **more)), **encoders}


def model_names(base: str) -> dict[str, dict[str, list[int]]]:
    """{component: {parameter: shape}}. transformers of different versions have "text_model." or not: never here."""
    return {
        component: {n.removeprefix("text_model."): list(p.shape) for n, p in model.named_parameters()}
        for component, model in models(base).items()
    }

"""diffusers' models with random weights: how each is made, with a PEFT adapter, and the inputs it is called with."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from attention_models import tensor
from peft_models import config, lora_layers
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

F32 = torch.float32
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*TARGETS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def unet(**changes: Any) -> Any:
    options = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (16, 32),
        "norm_num_groups": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 12, "attention_head_dim": 4,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
    }  # fmt: skip
    return diffusers.UNet2DConditionModel(**options | changes)


def unet_inputs(dtype: torch.dtype) -> list[Any]:
    return [tensor(2, 4, 8, 8, dtype=dtype), torch.tensor([3, 900]), tensor(2, 7, 12, dtype=dtype, seed=2)]


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_inputs(dtype: torch.dtype) -> list[Any]:
    return [
        tensor(2, 4, 8, 8, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), tensor(2, 10, dtype=dtype, seed=3),
        torch.tensor([3, 900]),
    ]  # fmt: skip


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_inputs(dtype: torch.dtype) -> list[Any]:
    ids = torch.zeros(5, 3, dtype=torch.int64), torch.arange(27).reshape(9, 3) % 5
    return [
        tensor(2, 9, 4, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), tensor(2, 10, dtype=dtype, seed=3),
        torch.tensor([0.5, 0.9]).to(dtype), ids[1], ids[0],
    ]  # fmt: skip


def pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        cross_attention_dim=16, caption_channels=12, attention_bias=True, out_channels=8,
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", use_additional_conditions=False,
    )  # fmt: skip


def pixart_inputs(dtype: torch.dtype) -> list[Any]:
    return [tensor(2, 4, 8, 8, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), torch.tensor([3, 900])]


def cogvideox() -> Any:
    """Writes rotary embeddings into q and k."""
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=5, use_rotary_positional_embeddings=True,
    )  # fmt: skip


def cogvideox_inputs(dtype: torch.dtype) -> list[Any]:
    angles = tensor(2 * 4 * 4, 16, seed=5)
    return [
        tensor(2, 2, 4, 8, 8, dtype=dtype), tensor(2, 5, 8, dtype=dtype, seed=2), torch.tensor([3, 900]),
        (angles.cos(), angles.sin()),
    ]  # fmt: skip


def sample(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.sample


def call_unet(m: Any, x: Tensor, t: Tensor, text: Tensor, **more: Any) -> Tensor:
    return sample(m(x, t, text, **more))


def call_sd3(m: Any, x: Tensor, text: Tensor, pooled: Tensor, t: Tensor) -> Tensor:
    return sample(m(hidden_states=x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t))


def call_flux(
    m: Any, x: Tensor, text: Tensor, pooled: Tensor, t: Tensor, image: Tensor, ids: Tensor
) -> Tensor:
    return sample(m(x, text, pooled, t, img_ids=image, txt_ids=ids))


def call_pixart(m: Any, x: Tensor, text: Tensor, t: Tensor) -> Tensor:
    return sample(m(x, encoder_hidden_states=text, timestep=t))


def call_cogvideox(m: Any, x: Tensor, text: Tensor, t: Tensor, rotary: Any) -> Tensor:
    return sample(m(x, text, t, image_rotary_emb=rotary))


# make, inputs, call, targets, members of groups and other LoRA layers of one forward pass
MODELS: dict[str, tuple[Any, Any, Any, list[str], int, int]] = {
    "unet": (unet, unet_inputs, call_unet, TARGETS, 4 * (3 + 2), 4 * (1 + 2)),
    # Three blocks, of which the last has no projection of its context's output, and one more attention in the first.
    "sd3": (sd3, sd3_inputs, call_sd3, JOINT, 3 * 6 + 3, 3 + 2 + 1),
    "flux": (flux, flux_inputs, call_flux, JOINT, 6 + 3, 2),
    "pixart": (pixart, pixart_inputs, call_pixart, TARGETS, 2 * (3 + 2), 2 * (1 + 2)),
    # Joins both inputs to one before the projections: q goes by itself, as if k and v read the second.
    "cogvideox": (cogvideox, cogvideox_inputs, call_cogvideox, TARGETS, 2, 2),
}


def adapted(
    name: str, dtype: torch.dtype = F32, *, adapters: torch.dtype | None = None, **changes: Any
) -> Any:
    """The model in `dtype` with an adapter "default", not patched."""
    make, _, _, targets, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    for p in model.parameters():
        if p.abs().max() == 0:  # some projections start at zero
            nn.init.normal_(p, std=0.1)
        p.requires_grad_(False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config(target_modules=targets, **changes))
    else:  # PixArt
        peft.inject_adapter_in_model(config(target_modules=targets, **changes), model)
    for layer in lora_layers(model).values():
        layer.lora_A.to(adapters or dtype)
        layer.lora_B.to(adapters or dtype)
    return model.train()


def counts(name: str) -> dict[str, int]:
    together, apart = MODELS[name][4:]
    return {"lora_qkv": together, "lora_linear": apart}


def inputs(name: str, dtype: torch.dtype = F32) -> list[Any]:
    return MODELS[name][1](dtype)


def output(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return MODELS[name][2](model, *inputs(name))

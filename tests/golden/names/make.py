"""Makes the files beside it from the real libraries. Run once for each new version of them, in an environment with
diffusers and transformers, after sd-scripts' part:

    python make.py kohya SD_SCRIPTS kohya.json        in an environment that runs sd-scripts
    python make.py write kohya.json                   in one with diffusers and transformers
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))
import true_names

TAG = 1 << 20  # a row's number is layer * TAG + row


def shapes(model: Any) -> dict[str, list[int]]:
    return {n: list(p.shape) for n, p in model.named_parameters()}


def kohya(folder: str) -> dict[str, Any]:
    """Native names and kohya's, of every base."""
    sys.path.insert(0, folder)
    import torch
    from library import flux_models, model_util, sd3_models
    from library.original_unet import UNet2DConditionModel
    from library.sdxl_original_unet import SdxlUNet2DConditionModel
    from networks import lora, lora_flux, lora_sd3
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    def mmdit(depth: int, norm: str | None, dual: list[int]) -> Any:
        parameters = sd3_models.SD3Params(
            patch_size=2,
            depth=depth,
            num_patches=147456,
            pos_embed_max_size=384,
            adm_in_channels=2048,
            qk_norm=norm,
            x_block_self_attn_layers=dual,
            context_embedder_in_features=4096,
            context_embedder_out_features=64 * depth,
            model_type="m",
        )
        return sd3_models.create_sd3_mmdit(parameters)

    with torch.device("meta"):
        clip_l = CLIPTextModel(CLIPTextConfig(**true_names.CLIP_L))
        clip_h = CLIPTextModel(CLIPTextConfig(**true_names.CLIP_H))
        clip_g = CLIPTextModel(CLIPTextConfig(**true_names.CLIP_G))
        t5 = T5EncoderModel(
            T5Config(**true_names.T5, feed_forward_proj="gated-gelu", is_encoder_decoder=False)
        )
        made = {
            "sd15": (lora, [clip_l], UNet2DConditionModel(64, 8, 768, False, False)),
            "sd2": (lora, [clip_h], UNet2DConditionModel(64, [5, 10, 20, 20], 1024, True, False)),
            "sdxl": (lora, [clip_l, clip_g], SdxlUNet2DConditionModel()),
            "flux": (lora_flux, [clip_l, t5], flux_models.Flux(flux_models.configs["dev"].params)),
            "sd3": (lora_sd3, [clip_l, clip_g, t5], mmdit(24, None, [])),
            "sd35-medium": (lora_sd3, [clip_l, clip_g, t5], mmdit(24, "rms", list(range(13)))),
            "sd35-large": (lora_sd3, [clip_l, clip_g, t5], mmdit(38, "rms", [])),
        }
        more = {
            lora: {"conv_dim": "4", "conv_alpha": "4"},
            lora_flux: {"train_t5xxl": "True", "in_dims": "[4,4,4,4,4]"},
            lora_sd3: {"train_t5xxl": "True", "emb_dims": "[4,4,4,4,4,4]"},
        }
        found = {}
        for base, (module, encoders, model) in made.items():
            single = encoders[0] if len(encoders) == 1 else encoders
            network = module.create_network(1.0, 4, 4, None, single, model, **more[module])
            layers = [
                [m.lora_name, list(m.lora_down.weight.shape), list(m.lora_up.weight.shape)]
                for m in [*network.text_encoder_loras, *network.unet_loras]
            ]
            found[base] = {"kohya": layers, "native": shapes(model)}
    for base, v2 in (("sd15", False), ("sd2", True)):  # there kohya's model is diffusers'
        names = list(found[base]["native"].items())
        numbered = {name: torch.full((1,), i) for i, (name, _) in enumerate(names)}
        native = model_util.convert_unet_state_dict_to_sd(v2, numbered)
        found[base]["native"] = {name: names[int(i)][1] for name, i in native.items()}
    return found


def _convert(base: str, tensors: dict[str, Any]) -> dict[str, Any]:
    from diffusers.loaders import single_file_utils as single

    if base == "flux":
        return dict(single.convert_flux_transformer_checkpoint_to_diffusers(tensors))
    if base.startswith("sd3"):
        tensors["pos_embed"] = next(iter(tensors.values()))
        made = dict(single.convert_sd3_transformer_checkpoint_to_diffusers(tensors))
        made.pop("pos_embed.pos_embed")
        return made
    text_time = "text_time" if base == "sdxl" else None
    blocks = ["block"] * (3 if base == "sdxl" else 4)
    config = {
        "addition_embed_type": text_time,
        "class_embed_type": None,
        "layers_per_block": 2,
        "up_block_types": blocks,
    }
    return dict(
        single.convert_ldm_unet_checkpoint(
            {f"model.diffusion_model.{k}": t for k, t in tensors.items()}, config
        )
    )


def pairs(base: str, native: dict[str, list[int]]) -> list[Any]:
    """Which rows of which native parameter each diffusers parameter has, by diffusers' own converter."""
    import torch

    names = list(native)
    tensors = {}
    for i, (name, shape) in enumerate(native.items()):
        rows = (torch.arange(shape[0]) + i * TAG).double()
        tensors[name] = rows.reshape([shape[0]] + [1] * (len(shape) - 1))
    found = []
    for name, tensor in sorted(_convert(base, tensors).items()):
        rows = tensor.reshape(tensor.shape[0], -1)[:, 0].long().tolist()
        pieces: list[list[Any]] = []
        for row, tag in enumerate(rows):
            layer, native_row = divmod(tag, TAG)
            last = pieces[-1] if pieces else None
            if last and last[0] == names[layer] and last[2] + last[3] == native_row:
                last[3] += 1
            else:
                pieces.append([names[layer], row, native_row, 1])
        found.append([name, pieces])
    return found


def write(source: str) -> None:
    for base, parts in json.loads(Path(source).read_text()).items():
        named = {"diffusers": true_names.model_names(base), **parts, "pairs": pairs(base, parts["native"])}
        text = json.dumps(named, separators=(",", ":")).encode()
        (true_names.FOLDER / f"{base}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


if __name__ == "__main__":
    if sys.argv[1] == "kohya":
        Path(sys.argv[3]).write_text(json.dumps(kohya(sys.argv[2])))
    else:
        write(sys.argv[2])

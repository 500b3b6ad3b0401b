"""The tools' own loaders read what we write, and we read what they write. Models of a few numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_files
import numpy as np
import pytest
import safetensors.torch
import torch
from loraaccel import adapters

peft = pytest.importorskip("peft")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(10, 12)
        self.conv_in = torch.nn.Conv2d(5, 12, 3)
        self.embed = torch.nn.Embedding(7, 6)
        self.head = torch.nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.q_proj(x))


LORA = {"target_modules": ["q_proj", "conv_in"], "init_lora_weights": False}
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=2, **LORA),
    "patterns": lambda: peft.LoraConfig(r=4, lora_alpha=2, rank_pattern={"q_proj": 3}, alpha_pattern={"conv_in": 5}, **LORA),
    "rslora": lambda: peft.LoraConfig(r=4, lora_alpha=2, use_rslora=True, **LORA),
    "dora": lambda: peft.LoraConfig(r=4, lora_alpha=2, use_dora=True, **LORA),
    "saved": lambda: peft.LoraConfig(r=4, modules_to_save=["head"], **LORA),
    "embedding": lambda: peft.LoraConfig(r=2, lora_alpha=3, target_modules=["embed", "q_proj"], init_lora_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=2, target_modules=["q_proj"], init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=2, target_modules=["q_proj"], init_weights=False),
    "lokr-both": lambda: peft.LoKrConfig(r=1, alpha=2, decompose_both=True, target_modules=["q_proj"], init_weights=False),
}


def saved_by_peft(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), CONFIGS[kind]())
    model.save_pretrained(folder)
    return model


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    return {k: t.clone() for k, t in model.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_peft_saves_is_read_written_and_loaded_by_peft_again(kind, tmp_path):
    model = saved_by_peft(kind, tmp_path / "a")
    written = adapters.convert(tmp_path / "a", tmp_path / "b", "peft")[1]
    assert sorted(Path(p).name for p in written.paths) == ["adapter_config.json", "adapter_model.safetensors"]
    first, second = (safetensors.torch.load_file(tmp_path / f / "adapter_model.safetensors") for f in "ab")
    adapter_files.assert_same_tensors(first, second)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(Net(), tmp_path / "b")
    state = again.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    expected = merged_weights(model)
    for key, tensor in merged_weights(again).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_merging_gives_what_peft_s_merge_gives(kind, tmp_path):
    model = saved_by_peft(kind, tmp_path / "a")
    torch.manual_seed(0)
    base = Net().state_dict()
    safetensors.torch.save_file(base, tmp_path / "base.safetensors")
    adapters.merge(tmp_path / "base.safetensors", tmp_path / "a", tmp_path / "m.safetensors")
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")
    changed = 0
    for key, tensor in merged_weights(model).items():
        torch.testing.assert_close(merged[key], tensor, rtol=2e-6, atol=1e-6, msg=key)
        changed += int(not torch.equal(tensor, base[key]))
    assert changed >= 1


def small_unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(4, 8, 8, 8), norm_num_groups=2, cross_attention_dim=6, attention_head_dim=2, sample_size=8
    )


def small_sdxl() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(4, 8, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 2, 10],
        norm_num_groups=2,
        cross_attention_dim=6,
        attention_head_dim=2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=2,
        projection_class_embeddings_input_dim=18,
    )


def small_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=6,
        in_channels=4,
        axes_dims_rope=(2, 1, 1),
        guidance_embeds=True,
    )


def small_sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=4,
        num_layers=24,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=6,
        in_channels=4,
        out_channels=4,
        pos_embed_max_size=4,
    )


ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
MODELS: dict[str, tuple[Any, list[str]]] = {
    "sd15": (small_unet, [*ATTENTION, "conv1", "proj_in", "ff.net.2"]),
    "sdxl": (small_sdxl, [*ATTENTION, "conv2", "ff.net.0.proj"]),
    "flux": (small_flux, [*ATTENTION, "proj_mlp", "norm.linear", "norm_out.linear", "add_q_proj"]),
    "sd3": (small_sd3, [*ATTENTION, "add_k_proj", "norm_out.linear"]),
}


@pytest.mark.parametrize("base", list(MODELS))
@pytest.mark.parametrize("through", ["kohya", "comfy", "onetrainer", "peft"])
def test_diffusers_loads_what_came_back_from_another_format(base, through, tmp_path):
    """diffusers' file of an adapter of every kind of layer, to another tool's format and back, gives the same weights."""
    pytest.importorskip("diffusers")
    make, targets = MODELS[base]
    model = make()
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=1, target_modules=targets, init_lora_weights=False))
    component = "unet" if base.startswith("sd1") or base == "sdxl" else "transformer"
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    named = {f"{component}.{k.removeprefix('base_model.model.')}": t.contiguous() for k, t in state.items()}
    config = {f"{component}.r": 2, f"{component}.lora_alpha": 1, f"{component}.target_modules": targets}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    safetensors.torch.save_file(named, tmp_path / "a.safetensors", metadata)
    middle = tmp_path / ("m" if through == "peft" else "m.safetensors")
    read, _ = adapters.convert(tmp_path / "a.safetensors", middle, through, base=base)
    assert (read.format, read.unused) == ("diffusers", [])
    adapters.convert(middle, tmp_path / "b.safetensors", "diffusers", base=base)
    adapter_files.assert_same_tensors(named, safetensors.torch.load_file(tmp_path / "b.safetensors"))
    other = make()
    other.load_lora_adapter(tmp_path / "b.safetensors", prefix=component)
    other.fuse_lora()
    model.fuse_lora()
    compared = 0
    expected = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        if "base_layer" not in name:
            continue
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        compared += 1
    assert compared > len(targets)


def test_kohya_s_own_loader_reads_our_file(tmp_path):
    """diffusers' reader of kohya's names, with the factor that alpha gives."""
    diffusers = pytest.importorskip("diffusers")
    g = adapter_files.seeded()
    stem = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{stem}.lora_A.weight": adapter_files.numbers(g, 2, 4), f"{stem}.lora_B.weight": adapter_files.numbers(g, 4, 2)}
    adapters.save(adapters.load(tensors, base="sd15"), tmp_path / "k.safetensors", "kohya")
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    read, alphas = StableDiffusionLoraLoaderMixin.lora_state_dict(tmp_path / "k.safetensors")
    assert diffusers is not None
    values = {tuple(t.shape): t for t in read.values()}
    np.testing.assert_array_equal(values[2, 4], tensors[f"{stem}.lora_A.weight"])
    np.testing.assert_array_equal(values[4, 2], tensors[f"{stem}.lora_B.weight"])
    assert list(alphas.values()) == [2.0]

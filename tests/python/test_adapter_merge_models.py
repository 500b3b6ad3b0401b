"""Merging into the folders that diffusers and transformers save, and into checkpoints with OpenCLIP's text encoders."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from small_models import weight
from test_adapter_loaders import MODELS
from test_adapter_merge_files import contents

from loraaccel import adapters

peft = pytest.importorskip("peft")
pytest.importorskip("diffusers")
CLIP = ["q_proj", "v_proj", "fc1"]


def small_clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=20,
            hidden_size=6,
            intermediate_size=10,
            num_hidden_layers=12,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
    )


def adapted(model: Any, targets: list[str], component: str, tensors: dict, config: dict) -> None:
    """An adapter on the model, and in `tensors` as diffusers' pipelines save it."""
    lora = peft.LoraConfig(r=2, lora_alpha=1, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(lora, model)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    for key, tensor in state.items():
        tensors[f"{component}.{key.removeprefix('base_model.model.')}"] = tensor.detach().contiguous()
    config |= {f"{component}.r": 2, f"{component}.lora_alpha": 1, f"{component}.target_modules": targets}


def fused(model: Any) -> dict[str, torch.Tensor]:
    """The weights with the adapter in them, as PEFT computes them, by the names without it."""
    weights = {}
    for name, parameter in model.named_parameters():
        if ".base_layer." not in name and "lora_" not in name:
            weights[name] = parameter.detach().clone()
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer"):
            module.merge()
            for part, parameter in module.get_base_layer().named_parameters():
                weights[f"{name}.{part}"] = parameter.detach().clone()
    return weights


@pytest.mark.parametrize("base", list(MODELS))
@pytest.mark.parametrize("spelling", ["diffusers", "kohya"])
def test_a_pipeline_folder_is_merged_and_taken_back(base, spelling, tmp_path):
    make, targets = MODELS[base]
    component = "transformer" if base in ("flux", "sd3") else "unet"
    parts = {component: make()} | ({"text_encoder": small_clip()} if component == "unet" else {})
    pipeline = tmp_path / "pipeline"
    tensors: dict[str, torch.Tensor] = {}
    config: dict[str, Any] = {}
    (pipeline / "tokenizer").mkdir(parents=True)
    (pipeline / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    (pipeline / "model_index.json").write_text("{}")
    for name, model in parts.items():
        shards = {"max_shard_size": "40KB"} if name == component else {}
        model.save_pretrained(pipeline / name, **shards)
        adapted(model, targets if name == component else CLIP, name, tensors, config)
    assert len(list((pipeline / component).glob("*.safetensors"))) > 1
    adapter = tmp_path / "a.safetensors"
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    safetensors.torch.save_file(tensors, adapter, metadata)
    if spelling == "kohya":
        adapters.convert(adapter, tmp_path / "k.safetensors", "kohya", base=base)
        adapter = tmp_path / "k.safetensors"

    merged, kept = tmp_path / "merged", tmp_path / "kept"
    report = adapters.merge(pipeline, adapters.load(adapter, base=base), merged, keep=kept)
    assert report.unused == []
    changed = 0
    for name, model in parts.items():
        weights = fused(model)
        again = type(model).from_pretrained(merged / name)
        before = type(model).from_pretrained(pipeline / name).state_dict()
        for key, tensor in again.named_parameters():
            torch.testing.assert_close(tensor, weights[key], rtol=1e-6, atol=1e-7, msg=f"{name}: {key}")
            changed += int(not torch.equal(tensor, before[key]))
    assert changed == report.changed > len(targets)

    adapters.unmerge(merged, kept, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(pipeline)
    adapters.merge(pipeline, adapters.load(adapter, base=base), pipeline, keep=tmp_path / "kept2")  # in place
    assert contents(pipeline) == contents(merged)
    adapters.unmerge(pipeline, tmp_path / "kept2", pipeline)
    assert contents(pipeline) == contents(tmp_path / "again")


def test_what_was_kept_must_be_of_every_file_and_of_this_merge(tmp_path):
    base = tmp_path / "model"
    base.mkdir()
    for i in range(2):
        safetensors.torch.save_file({f"l{i}.weight": weight(8, 8, seed=i)}, base / f"{i}.safetensors")
    adapter = adapters.load(
        {
            "base_model.model.l0.lora_A.weight": weight(2, 8),
            "base_model.model.l0.lora_B.weight": weight(8, 2),
        },
        config=json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}),
    )
    merged, kept, target = tmp_path / "m", tmp_path / "k", tmp_path / "t"
    adapters.merge(base, adapter, merged, keep=kept)
    for place, text in (
        (merged, "own place"),
        (base, "is the base model"),
        (merged / ".." / "m", "own place"),
        (base / "x" / "k", "is in a model's folder"),
        (merged / "k", "is in a model's folder"),
    ):
        with pytest.raises(ValueError, match=text):
            adapters.merge(base, adapter, merged, keep=place)
    with pytest.raises(ValueError, match="a file and a folder"):
        adapters.unmerge(merged, kept / "0.safetensors", target)
    with pytest.raises(ValueError, match="is what was kept"):
        adapters.unmerge(merged, kept, kept)
    (kept / "1.safetensors").rename(tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=r"has no 1.safetensors, expected what was kept of each file"):
        adapters.unmerge(merged, kept, target)
    (tmp_path / "1.safetensors").rename(kept / "other.safetensors")
    with pytest.raises(ValueError, match=r"has other.safetensors, expected only files that are in"):
        adapters.unmerge(merged, kept, target)
    (kept / "other.safetensors").rename(kept / "1.safetensors")
    adapters.merge(base, adapter, merged, strength=0.5, keep=tmp_path / "k2")
    adapters.merge(merged, adapter, merged, keep=tmp_path / "k3")
    with pytest.raises(ValueError, match="was not kept when"):
        adapters.unmerge(merged, tmp_path / "k2", target)
    assert not target.exists()
    adapters.unmerge(merged, tmp_path / "k3", target)
    adapters.unmerge(target, tmp_path / "k2", target)
    assert contents(target) == contents(base)


OPENCLIP = {
    "sdxl": ("conditioner.embedders.1.model.", "lora_te2_text_model_encoder_layers_", 1280),
    "sd2": ("cond_stage_model.model.", "lora_te_text_model_encoder_layers_", 1024),
}


@pytest.mark.parametrize("base", list(OPENCLIP))
def test_an_openclip_text_encoder_has_q_k_and_v_in_one_matrix(base, tmp_path):
    prefix, name, width = OPENCLIP[base]
    block = f"{prefix}transformer.resblocks.3."
    model = {
        block + "attn.in_proj_weight": weight(3 * width, width, seed=1, dtype=torch.float16),
        block + "attn.out_proj.weight": weight(width, width, seed=2, dtype=torch.float16),
        block + "mlp.c_fc.weight": weight(4 * width, width, seed=3, dtype=torch.float16),
        block + "ln_1.weight": weight(width, seed=4, dtype=torch.float16),
    }
    safetensors.torch.save_file(model, tmp_path / "base.safetensors")
    rows = {
        "self_attn_q_proj": width,
        "self_attn_v_proj": width,
        "self_attn_out_proj": width,
        "mlp_fc1": 4 * width,
    }
    lora, deltas = {}, {}
    for i, (layer, out) in enumerate(rows.items()):
        down, up = weight(4, width, seed=10 + i), weight(out, 4, seed=20 + i)
        lora |= {f"{name}3_{layer}.lora_down.weight": down, f"{name}3_{layer}.lora_up.weight": up}
        lora[f"{name}3_{layer}.alpha"] = torch.tensor(2.0)
        deltas[layer] = 0.5 * up.double().numpy() @ down.double().numpy()
    report = adapters.merge(
        tmp_path / "base.safetensors", adapters.load(lora, base=base), tmp_path / "m.safetensors"
    )
    assert (report.changed, report.unused) == (3, [])
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")
    zero = np.zeros((width, width))
    expected = {
        "attn.in_proj_weight": np.vstack([deltas["self_attn_q_proj"], zero, deltas["self_attn_v_proj"]]),
        "attn.out_proj.weight": deltas["self_attn_out_proj"],
        "mlp.c_fc.weight": deltas["mlp_fc1"],
        "ln_1.weight": np.zeros(width),
    }
    for key, delta in expected.items():
        exact = model[block + key].double().numpy() + delta
        np.testing.assert_allclose(merged[block + key].double().numpy(), exact, rtol=2**-11, atol=2**-24)
        assert torch.equal(merged[block + key], model[block + key]) == (not delta.any())
    k_rows = slice(width, 2 * width)
    assert torch.equal(
        merged[block + "attn.in_proj_weight"][k_rows], model[block + "attn.in_proj_weight"][k_rows]
    )

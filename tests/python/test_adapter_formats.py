"""What a file is, by its keys and sizes; every kind of adapter through every format; files of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import adapter_files
import numpy as np
import pytest
import safetensors.torch
import torch
import true_names
from loraaccel import adapters

FORMATS = ("kohya", "peft", "diffusers", "comfy", "ai-toolkit", "onetrainer", "lycoris")
# A layer that no format divides, by base: kohya's name, and its component in PEFT's folder.
SITES = {
    "sd15": "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
    "sdxl": "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
    "sd3": "lora_unet_joint_blocks_0_x_block_attn_proj",
    "flux": "lora_unet_double_blocks_0_img_attn_proj",
}


def n(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return adapter_files.numbers(generator, *shape)


def layer(kind: str) -> dict[str, torch.Tensor]:
    """An adapter of rank 2 for 12 outputs and 10 inputs; of convolutions the inputs are 5."""
    g = adapter_files.seeded(len(kind))
    alpha = {"alpha": torch.tensor(1.0)}
    lora = {"lora_down.weight": n(g, 2, 10), "lora_up.weight": n(g, 12, 2), **alpha}
    hada = {f"hada_w{i}_{x}": n(g, *s) for i in "12" for x, s in (("a", (12, 2)), ("b", (2, 10)))}
    return {
        "lora": lora,
        "dora": {**lora, "dora_scale": n(g, 12, 1).abs() + 1},
        "loha": {**hada, **alpha},
        "lokr": {"lokr_w1": n(g, 3, 2), "lokr_w2": n(g, 4, 5), "alpha": torch.tensor(2.0)},
        "lokr-pair": {"lokr_w1": n(g, 3, 2), "lokr_w2_a": n(g, 4, 2), "lokr_w2_b": n(g, 2, 5), **alpha},
        "lokr-pairs": {
            "lokr_w1_a": n(g, 3, 2),
            "lokr_w1_b": n(g, 2, 2),
            "lokr_w2_a": n(g, 4, 2),
            "lokr_w2_b": n(g, 2, 5),
            **alpha,
        },
        "full": {"diff": n(g, 12, 10), "diff_b": n(g, 12)},
        "locon": {"lora_down.weight": n(g, 2, 5, 3, 3), "lora_up.weight": n(g, 12, 2, 1, 1), **alpha},
        "tucker": {
            "lora_down.weight": n(g, 2, 5, 1, 1),
            "lora_mid.weight": n(g, 2, 2, 3, 3),
            "lora_up.weight": n(g, 12, 2, 1, 1),
            **alpha,
        },
    }[kind]


# Kinds that a format has no place for, as their tools have none.
NO_PLACE = {
    **{("full", f): "no place for diff" for f in ("peft", "diffusers", "ai-toolkit")},
    **{("tucker", f): "no place for lora_mid" for f in ("peft", "diffusers", "ai-toolkit")},
}


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "lokr-pair", "lokr-pairs", "full", "locon", "tucker"])
@pytest.mark.parametrize("to", FORMATS)
def test_every_kind_through_every_format(kind, to, tmp_path):
    base = "sd15"
    site = "lora_unet_down_blocks_0_resnets_0_conv1" if kind in ("locon", "tucker") else SITES[base]
    tensors = {f"{site}.{role}": t for role, t in layer(kind).items()}
    read = adapters.load(tensors, base=base)
    middle = tmp_path / ("m" if to == "peft" else "m.safetensors")
    if (kind, to) in NO_PLACE:
        with pytest.raises(ValueError, match=NO_PLACE[kind, to]):
            adapters.save(read, middle, to)
        assert list(tmp_path.iterdir()) == []
        return
    adapters.save(read, middle, to)
    again = adapters.load(middle, base=base)
    adapter_files.assert_same_deltas(read, again, 1e-7 if to == "ai-toolkit" else 0.0)
    dora, back_dora = read.entries[0].tensors.get("dora_scale"), again.entries[0].tensors.get("dora_scale")
    assert (dora is None) == (back_dora is None)
    if dora is not None:
        assert torch.equal(dora.flatten(), back_dora.flatten())
    if to != "ai-toolkit":
        adapters.save(again, tmp_path / "back.safetensors", "kohya")
        back = safetensors.torch.load_file(tmp_path / "back.safetensors")
        if kind == "lokr":  # alpha means nothing beside whole factors, and PEFT's configuration has no place for it
            back[f"{site}.alpha"] = tensors[f"{site}.alpha"]
        adapter_files.assert_same_tensors(tensors, back)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "full"])
def test_fused_layers_of_every_kind_are_cut_by_rows(kind, tmp_path):
    tensors = {f"lora_unet_double_blocks_0_img_attn_qkv.{role}": t for role, t in layer(kind).items()}
    read = adapters.load(tensors, base="flux")
    adapters.save(read, tmp_path / "o.safetensors", "onetrainer")
    parts = adapters.load(tmp_path / "o.safetensors", base="flux")
    assert len(parts.entries) == 3
    adapter_files.assert_same_deltas(read, parts)
    adapters.save(parts, tmp_path / "k.safetensors", "kohya")
    adapter_files.assert_same_deltas(read, adapters.load(tmp_path / "k.safetensors", base="flux"))


def test_lokr_is_cut_where_parts_begin_at_the_second_factor_s_rows(tmp_path):
    g = adapter_files.seeded()
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    exact = {f"{stem}.lokr_w1": n(g, 6, 2), f"{stem}.lokr_w2": n(g, 4, 5)}  # 24 rows, parts of 8
    read = adapters.load(exact, base="flux")
    adapters.save(read, tmp_path / "o.safetensors", "onetrainer")
    adapter_files.assert_same_deltas(read, adapters.load(tmp_path / "o.safetensors", base="flux"))
    uneven = {f"{stem}.lokr_w1": n(g, 2, 2), f"{stem}.lokr_w2": n(g, 12, 5)}
    with pytest.raises(ValueError, match=r"img_attn\.qkv: its lokr adapter cannot be divided by rows"):
        adapters.save(adapters.load(uneven, base="flux"), tmp_path / "p.safetensors", "onetrainer")


def test_the_two_halves_of_final_layer_s_modulation_change_places(tmp_path):
    g = adapter_files.seeded()
    stem = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = {f"{stem}.lora_down.weight": n(g, 2, 6), f"{stem}.lora_up.weight": n(g, 8, 2), f"{stem}.alpha": torch.tensor(2.0)}
    adapters.save(adapters.load(tensors, base="flux"), tmp_path / "d.safetensors", "diffusers")
    stored = safetensors.torch.load_file(tmp_path / "d.safetensors")["transformer.norm_out.linear.lora_B.weight"]
    up = tensors[f"{stem}.lora_up.weight"]
    assert torch.equal(stored, torch.cat([up[4:], up[:4]]))


@pytest.mark.parametrize("base", true_names.BASES)
@pytest.mark.parametrize("to", ["kohya", "diffusers", "comfy", "onetrainer"])
def test_a_file_of_real_sizes_is_recognised_without_a_word(base, to, tmp_path):
    """Some layers of the model that tell it from others, of rank 1."""
    layers = true_names.golden(base)["kohya"]
    chosen = [x for x in layers if "lora_unet" in x[0]]
    chosen = chosen[:12] + chosen[len(chosen) // 2 :: 40] + chosen[-3:]
    tensors = {}
    for name, down, up in chosen:
        tensors[f"{name}.lora_down.weight"] = torch.ones(1, *down[1:])
        tensors[f"{name}.lora_up.weight"] = torch.ones(up[0], 1, *up[2:])
    adapters.save(adapters.load(tensors, base=base), tmp_path / "a.safetensors", to)
    read = adapters.load(tmp_path / "a.safetensors")
    family = {"onetrainer": "kohya"} if base.startswith("sd") and not base.startswith("sd3") else {}
    assert (read.base, read.format) == (base, family.get(to, to))


XLABS = "double_blocks.0.processor.qkv_lora1"
OLD = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora"


@pytest.mark.parametrize(
    ("down", "up", "sizes", "base", "kind", "path"),
    [
        (f"{XLABS}.down.weight", f"{XLABS}.up.weight", (3072, 9216), "flux", "xlabs", "double_blocks.0.img_attn.qkv"),
        (
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight",
            (3072, 9216),
            "flux",
            "comfy",
            "double_blocks.0.img_attn.qkv",
        ),
        (
            "double_blocks.0.img_attn.qkv.lora_A.weight",
            "double_blocks.0.img_attn.qkv.lora_B.weight",
            (3072, 9216),
            "flux",
            "bfl",
            "double_blocks.0.img_attn.qkv",
        ),
        (f"{OLD}.down.weight", f"{OLD}.up.weight", (320, 320), "sd15", "diffusers-old", "input_blocks.1.1.transformer_blocks.0.attn1.to_q"),
        (
            "lycoris_transformer_blocks_0_attn_to_add_out.lora_down.weight",
            "lycoris_transformer_blocks_0_attn_to_add_out.lora_up.weight",
            (3072, 3072),
            "flux",
            "lycoris",
            "double_blocks.0.txt_attn.proj",
        ),
        (
            "transformer.single_transformer_blocks.3.proj_mlp.lora_A.weight",
            "transformer.single_transformer_blocks.3.proj_mlp.lora_B.weight",
            (3072, 12288),
            "flux",
            "diffusers",
            "single_blocks.3.linear1",
        ),
    ],
)
def test_files_of_other_tools_are_recognised(down, up, sizes, base, kind, path):
    read = adapters.load({down: torch.ones(2, sizes[0]), up: torch.ones(sizes[1], 2)}, base=None)
    assert (read.base, read.format, [e.path for e in read.entries]) == (base, kind, [path])
    assert read.entries[0].rank == 2


def test_bytes_of_tensors_that_are_only_renamed_are_untouched(tmp_path):
    g = adapter_files.seeded()
    tensors = {}
    for i in range(2):
        stem = f"{SITES['sd15'].replace('attn1', f'attn{i + 1}')}"
        raw = torch.randint(0, 65536, (4 * 320,), generator=g, dtype=torch.int32).to(torch.int16)
        tensors[f"{stem}.lora_down.weight"] = raw.view(torch.float16).reshape(4, 320)  # NaNs and subnormals, too
        tensors[f"{stem}.lora_up.weight"] = raw.view(torch.float16).reshape(320, 4).clone()
        tensors[f"{stem}.alpha"] = torch.tensor(4.0).half()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    adapters.convert(tmp_path / "a.safetensors", tmp_path / "d.safetensors", "diffusers", base="sd15")
    adapters.convert(tmp_path / "d.safetensors", tmp_path / "k.safetensors", "kohya", base="sd15")
    back = safetensors.torch.load_file(tmp_path / "k.safetensors")
    for key, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.int16), back[key].view(torch.int16)), key


def test_language_models_keep_their_paths(tmp_path):
    path = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"base_model.model.{path}.lora_A.weight": torch.ones(4, 6),
        f"base_model.model.{path}.lora_B.weight": torch.ones(5, 4),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 7),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(6, 4),
        "base_model.model.score.weight": torch.ones(2, 6),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens"], "task_type": "SEQ_CLS"}
    read = adapters.load(tensors, config=json.dumps(config))
    assert (read.base, read.format) == ("", "peft")
    assert [(e.path, e.kind, e.scale) for e in read.entries] == [
        (path, "lora", 2.0),
        ("model.embed_tokens", "embedding", 2.0),
        ("score", "replace", 1.0),
    ]
    np.testing.assert_array_equal(read.entries[1].delta(), np.full((7, 6), 8.0))
    adapters.save(read, tmp_path / "p", "peft")
    adapter_files.assert_same_tensors(safetensors.torch.load_file(tmp_path / "p" / "adapter_model.safetensors"), tensors)
    written = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["task_type"]) == (4, 8, "SEQ_CLS")


def test_a_failed_conversion_leaves_the_target_as_it_was(tmp_path: Path):
    tensors = {f"{SITES['sd15']}.{role}": t for role, t in layer("full").items()}
    target = tmp_path / "d.safetensors"
    target.write_bytes(b"before")
    with pytest.raises(ValueError, match="no place for diff"):
        adapters.save(adapters.load(tensors, base="sd15"), target, "diffusers")
    assert target.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["d.safetensors"]

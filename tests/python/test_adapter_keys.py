"""Which key belongs to which layer: look-up, never guesses; and what is said about keys that belong nowhere."""

from __future__ import annotations

import json
import re

import adapter_files
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraaccel import adapters

SITE = "down_blocks_0_attentions_0_transformer_blocks_0"
NATIVE = "input_blocks.1.1.transformer_blocks.0"


def pair(
    name: str,
    down: tuple[int, ...] = (4, 8),
    up: tuple[int, ...] = (8, 4),
    alpha: float | None = 2.0,
    seed: int = 0,
):
    generator = adapter_files.seeded(seed)
    tensors = {
        f"{name}.lora_down.weight": adapter_files.numbers(generator, *down),
        f"{name}.lora_up.weight": adapter_files.numbers(generator, *up),
    }
    if alpha is not None:
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def peft(path: str, adapter: str = "", rank: int = 2) -> dict[str, torch.Tensor]:
    middle = f".{adapter}" if adapter else ""
    return {
        f"base_model.model.{path}.lora_A{middle}.weight": torch.ones(rank, 3),
        f"base_model.model.{path}.lora_B{middle}.weight": torch.ones(5, rank),
    }


# names of modules with underscores, digits and the ends of keys in them
WORDS = st.sampled_from(
    ["a", "b_c", "b", "c", "to_out", "0", "adaLN_modulation", "all_x_embedder", "lora_A", "weight", "conv_in"]
)
PATHS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


@settings(max_examples=60, deadline=None)
@given(paths=st.lists(PATHS, min_size=1, max_size=8, unique=True))
def test_vk1_flat_names_of_listed_modules_come_back_or_collide(paths, tmp_path_factory):
    flat: dict[str, str] = {}
    collide = len({p.replace(".", "_") for p in paths}) < len(paths)
    tensors = {}
    for i, path in enumerate(paths):
        flat[path] = path.replace(".", "_")
        tensors |= pair(f"lora_unet_{flat[path]}", seed=i)
    if collide:
        with pytest.raises(ValueError, match=r"both are .* in kohya's spelling"):
            adapters.load(tensors, modules=paths)
        return
    read = adapters.load(tensors, modules=paths)
    assert sorted(e.path for e in read.entries) == sorted(paths)
    folder = tmp_path_factory.mktemp("vk1")
    adapters.save(read, folder / "peft", "peft")
    again = adapters.load(folder / "peft", modules=paths)  # or "conv_in" alone is a U-Net
    assert sorted(e.path for e in again.entries) == sorted(paths)
    adapters.save(again, folder / "back.safetensors", "kohya")
    adapter_files.assert_same_tensors(tensors, safetensors.torch.load_file(folder / "back.safetensors"))


def test_vk1_the_two_names_that_collide_are_in_the_message():
    with pytest.raises(ValueError, match=r"a\.b_c and a_b\.c both are a_b_c"):
        adapters.load(pair("lora_unet_a_b_c"), modules=["a.b_c", "a_b.c"])


@pytest.mark.parametrize(
    ("flat", "native"),
    [
        ("conv_in", "input_blocks.0.0"),
        ("conv_out", "out.2"),
        ("time_embedding_linear_1", "time_embed.0"),
        (f"{SITE}_attn1_to_out_0", f"{NATIVE}.attn1.to_out.0"),
        (f"{SITE}_ff_net_0_proj", f"{NATIVE}.ff.net.0.proj"),
    ],
)
def test_vk1_underscores_of_the_unet_are_not_separators(flat, native):
    read = adapters.load(pair(f"lora_unet_{flat}"), base="sd15")
    assert [e.path for e in read.entries] == [native]


def test_vk2_split_copies_a_cuts_b_and_keeps_alpha_and_rank(tmp_path):
    tensors = pair("lora_unet_double_blocks_0_img_attn_qkv", (4, 8), (18, 4), alpha=2.0)
    source = adapters.load(tensors)
    adapters.save(source, tmp_path / "d.safetensors", "diffusers")
    stored = safetensors.torch.load_file(tmp_path / "d.safetensors")
    up, down = tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"], None
    for i, name in enumerate(("to_q", "to_k", "to_v")):
        stem = f"transformer.transformer_blocks.0.attn.{name}"
        assert torch.equal(stored[f"{stem}.lora_B.weight"], up[6 * i : 6 * i + 6])
        down = stored[f"{stem}.lora_A.weight"]
        assert torch.equal(down, tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"])
    split = adapters.load(tmp_path / "d.safetensors")
    assert [(e.rank, e.scale) for e in split.entries] == [(4, 0.5)] * 3
    adapter_files.assert_same_deltas(source, split)
    adapters.save(split, tmp_path / "k.safetensors", "kohya")
    adapter_files.assert_same_tensors(tensors, safetensors.torch.load_file(tmp_path / "k.safetensors"))


@pytest.mark.parametrize("ranks", [(4, 4, 4), (3, 4, 5), (1, 2, 8)])
def test_vk2_join_stacks_a_makes_b_block_diagonal_and_scales_alpha(ranks, tmp_path):
    tensors = {}
    for i, (name, rank) in enumerate(zip(("to_q", "to_k", "to_v"), ranks, strict=True)):
        stem = f"lora_transformer_transformer_blocks_0_attn_{name}"
        tensors |= pair(stem, (rank, 8), (6, rank), alpha=rank / 2, seed=i)
    separate = adapters.load(tensors, base="flux")
    adapters.save(separate, tmp_path / "k.safetensors", "kohya")
    joined = adapters.load(tmp_path / "k.safetensors")
    entry = joined.entries[0]
    assert (entry.rank, entry.scale, float(entry.tensors["alpha"])) == (sum(ranks), 0.5, sum(ranks) / 2)
    stacked = np.vstack([e.delta() for e in separate.entries])
    np.testing.assert_array_equal(entry.delta(), stacked)
    # and apart again: each part has its own rank and bytes
    adapters.save(joined, tmp_path / "o.safetensors", "onetrainer")
    adapter_files.assert_same_tensors(tensors, safetensors.torch.load_file(tmp_path / "o.safetensors"))


def test_vk2_parts_of_different_factors_keep_them(tmp_path):
    tensors = {}
    for i, name in enumerate(("to_q", "to_k", "to_v")):
        tensors |= pair(
            f"lora_transformer_transformer_blocks_0_attn_{name}", (4, 8), (6, 4), alpha=2.0**i, seed=i
        )
    separate = adapters.load(tensors, base="flux")
    adapters.save(separate, tmp_path / "k.safetensors", "kohya")
    adapter_files.assert_same_deltas(separate, adapters.load(tmp_path / "k.safetensors"))


def test_vk2_a_part_that_is_missing_gets_no_update(tmp_path):
    tensors = pair("lora_transformer_transformer_blocks_0_attn_to_k", (4, 8), (6, 4))
    separate = adapters.load(tensors, base="flux")
    adapters.save(separate, tmp_path / "k.safetensors", "kohya")
    delta = adapters.load(tmp_path / "k.safetensors").entries[0].delta()
    assert delta.shape == (18, 8)
    np.testing.assert_array_equal(delta[6:12], separate.entries[0].delta())
    assert not delta[:6].any()
    assert not delta[12:].any()


@pytest.mark.parametrize(
    "path", ["msa_weighted_avg.lin", "lora_A_proj", "pair_weighted_lora_B", "weight", "x.lora_up.y"]
)
@pytest.mark.parametrize("adapter", ["", "default", "lora", "weight"])
def test_vk3_names_that_look_like_endings(path, adapter, tmp_path):
    read = adapters.load(peft(path, adapter))
    assert [(e.path, e.rank, e.kind) for e in read.entries] == [(path, 2, "lora")]
    adapters.save(read, tmp_path / "p", "peft")
    stored = safetensors.torch.load_file(tmp_path / "p" / "adapter_model.safetensors")
    adapter_files.assert_same_tensors(stored, peft(path))


def test_vk3_an_adapter_name_with_a_dot_is_an_error():
    with pytest.raises(ValueError, match=r"match no layer|missing|belongs to"):
        adapters.load({**peft("a"), **peft("b", "a.b")})


def test_vk5_an_alpha_without_its_pair_is_left_over():
    tensors = {
        **pair(f"lora_unet_{SITE}_attn1_to_q"),
        f"lora_unet_{SITE}_attn1_to_k.alpha": torch.tensor(1.0),
    }
    with pytest.raises(ValueError, match=rf"1 of 4 tensors .*lora_unet_{SITE}_attn1_to_k\.alpha"):
        adapters.load(tensors, base="sd15")
    read = adapters.load(tensors, base="sd15", allow_unmatched=True)
    assert (len(read.entries), read.unused) == (1, [f"lora_unet_{SITE}_attn1_to_k.alpha"])


def test_vk5_half_a_pair_is_an_error_with_and_without_allow_unmatched():
    tensors = {
        **pair(f"lora_unet_{SITE}_attn1_to_q"),
        f"lora_unet_{SITE}_attn1_to_k.lora_down.weight": torch.ones(4, 8),
    }
    for allow in (False, True):
        with pytest.raises(ValueError, match=rf"1 places: unet\.{SITE}_attn1_to_k: lora_up"):
            adapters.load(tensors, base="sd15", allow_unmatched=allow)


def test_vk5_a_magnitude_without_an_adapter_is_left_over():
    tensors = {
        **pair(f"lora_unet_{SITE}_attn1_to_q"),
        f"lora_unet_{SITE}_attn1_to_k.dora_scale": torch.ones(8, 1),
    }
    read = adapters.load(tensors, base="sd15", allow_unmatched=True)
    assert read.unused == [f"lora_unet_{SITE}_attn1_to_k.dora_scale"]
    with pytest.raises(ValueError, match="dora_scale"):
        adapters.load(tensors, base="sd15")


def test_vk5_one_module_of_ten_that_the_model_has_not():
    blocks = [
        f"lora_unet_{SITE}_{a}_{p}" for a in ("attn1", "attn2") for p in ("to_q", "to_k", "to_v", "to_out_0")
    ]
    tensors = {}
    for i, name in enumerate([*blocks, f"lora_unet_{SITE}_ff_net_2", "lora_unet_no_such_layer"]):
        tensors |= pair(name, seed=i)
    with pytest.raises(ValueError, match=r"3 of 30 tensors match no layer of sd15 .*no_such_layer"):
        adapters.load(tensors, base="sd15")
    read = adapters.load(tensors, base="sd15", allow_unmatched=True)
    assert len(read.entries) == 9
    assert sorted(read.unused) == [
        f"lora_unet_no_such_layer.{end}" for end in ("alpha", "lora_down.weight", "lora_up.weight")
    ]


def test_vk5_nothing_that_is_used_is_always_an_error():
    for allow in (False, True):
        with pytest.raises(ValueError, match=r"none of its 1 tensors .*: model\.layer\.kernel"):
            adapters.load({"model.layer.kernel": torch.ones(3)}, allow_unmatched=allow)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_vk5_integers_are_no_factors_but_may_be_an_alpha(dtype):
    tensors = pair(name := f"lora_unet_{SITE}_attn1_to_q")
    tensors[f"{name}.alpha"] = torch.tensor(2)
    assert adapters.load(tensors, base="sd15").entries[0].scale == 0.5
    tensors[f"{name}.lora_up.weight"] = torch.ones(8, 4, dtype=dtype)
    with pytest.raises(
        ValueError, match=rf"{name}\.lora_up\.weight is of type (I64|I8|BOOL), expected floating"
    ):
        adapters.load(tensors, base="sd15")


def test_vk5_a_key_that_is_an_integer_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="key 7 is int, expected str"):
        adapters.load({**pair(f"lora_unet_{SITE}_attn1_to_q"), 7: torch.ones(2)}, base="sd15")


def test_two_spellings_of_a_layer_in_one_file_are_an_error():
    tensors = {
        **pair("lora_unet_input_blocks_4_1_proj_in"),
        **pair("lora_unet_down_blocks_1_attentions_0_proj_in"),
    }
    with pytest.raises(ValueError, match=r"both belong to input_blocks\.4\.1\.proj_in"):
        adapters.load(tensors, base="sdxl")


def test_wrong_shapes_name_the_key_and_both_shapes():
    name = f"lora_unet_{SITE}_attn1_to_q"
    with pytest.raises(ValueError, match=r"lora_up\.weight has shape \[8, 5\], expected \[out, 4\]"):
        adapters.load(pair(name, up=(8, 5)), base="sd15")


def test_an_unknown_base_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="no table for the base model sd9, expected one of sd15, sd2, sdxl, flux"
    ):
        adapters.load(pair("lora_unet_conv_in"), base="sd9")


def test_a_broken_configuration_names_its_file(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    safetensors.torch.save_file(peft("a"), folder / "adapter_model.safetensors")
    for text in ("{", "[]", json.dumps({"r": "x", "lora_alpha": {}})):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            adapters.load(folder)


@pytest.mark.parametrize(
    ("base", "layer"),
    [
        ("sd15", "unet.down_blokcs.0.attentions.0.transformer_blocks.0.attn1.to_q"),
        ("flux", "transformer.single_transformer_blocks.99.attn.to_q"),
        ("flux", "diffusion_model.double_blocks.77.img_attn.qkv"),
        ("sdxl", "unet.up_blocks.3.attentions.0.transformer_blocks.0.attn1.to_q"),  # SD 1.5's
    ],
)
def test_vk5_names_that_the_table_of_the_given_base_lacks_are_unknown(base: str, layer: str) -> None:
    """Dotted names need no table, unless the caller says whose they are."""
    tensors = {
        f"{layer}.lora_A.weight": torch.ones(4, 8),
        f"{layer}.lora_B.weight": torch.ones(24, 4),
    }
    assert len(adapters.load(tensors).entries) == 1
    with pytest.raises(ValueError, match=re.escape(layer)):
        adapters.load(tensors, base=base)
    with pytest.raises(ValueError, match="none of its 2 tensors"):
        adapters.load(tensors, base=base, allow_unmatched=True)

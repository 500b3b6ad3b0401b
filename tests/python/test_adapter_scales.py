"""The factor of an update: alpha, rank, patterns, rank stabilisation, no alpha at all, and all of them converted."""

from __future__ import annotations

import itertools
import json

import adapter_files
import numpy as np
import pytest
import safetensors.torch
import torch

from loraaccel import adapters

Q = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
K = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_k"
ROUND_TRIPS = ("kohya", "peft", "diffusers", "comfy", "ai-toolkit", "onetrainer")


def pair(name: str, rank: int, alpha: float | None = None, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = adapter_files.seeded(seed)
    tensors = {
        f"{name}.lora_down.weight": adapter_files.numbers(generator, rank, 6, dtype=dtype),
        f"{name}.lora_up.weight": adapter_files.numbers(generator, 4, rank, dtype=dtype),
    }
    if alpha is not None:
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    return tensors


def product(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    up, down = tensors[f"{name}.lora_up.weight"].double(), tensors[f"{name}.lora_down.weight"].double()
    return (up @ down).numpy()


def peft_file(folder, rank: int, config: dict) -> None:
    tensors = {
        "base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(rank, 4),
        "base_model.model.layers.0.q_proj.lora_B.weight": torch.ones(4, rank),
    }
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))


@pytest.mark.parametrize(("alpha", "expected"), [(16.0, 64.0), (1.0, 4.0)])
def test_vn1_the_factor_is_alpha_over_rank_on_every_path(alpha, expected, tmp_path):
    tensors = {
        "l.lora_down.weight": torch.ones(8, 4),
        "l.lora_up.weight": torch.ones(4, 8),
        "l.alpha": torch.tensor(alpha),
    }
    flat = {f"lora_unet_{key}": t for key, t in tensors.items()}
    read = adapters.load(flat, modules=["l"])
    assert read.entries[0].delta().sum(axis=1).tolist() == [expected] * 4
    safetensors.torch.save_file({"l.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    adapters.merge(tmp_path / "base.safetensors", read, tmp_path / "merged.safetensors")
    merged = safetensors.torch.load_file(tmp_path / "merged.safetensors")["l.weight"]
    assert (merged @ torch.ones(4)).tolist() == [expected] * 4
    adapters.save(read, tmp_path / "peft", "peft")
    assert adapters.load(tmp_path / "peft").entries[0].delta().sum(axis=1).tolist() == [expected] * 4


@pytest.mark.parametrize("rank", [1, 2, 3, 16, 64])
def test_vn2_rank_stabilised_is_alpha_over_the_root_of_the_rank(rank, tmp_path):
    peft_file(tmp_path / "rs", rank, {"r": rank, "lora_alpha": 16, "use_rslora": True})
    peft_file(tmp_path / "plain", rank, {"r": rank, "lora_alpha": 16})
    stabilised, plain = (
        adapters.load(tmp_path / "rs").entries[0],
        adapters.load(tmp_path / "plain").entries[0],
    )
    assert stabilised.scale == 16 / rank**0.5
    assert stabilised.scale == pytest.approx(plain.scale * rank**0.5, rel=1e-15)
    assert "sqrt" in stabilised.scale_text
    adapters.convert(tmp_path / "rs", tmp_path / "again", "peft")
    assert adapters.load(tmp_path / "again").entries[0].scale == pytest.approx(stabilised.scale, rel=1e-7)


def test_vn2_at_rank_64_alpha_16_the_factor_is_2(tmp_path):
    peft_file(tmp_path / "rs", 64, {"r": 64, "lora_alpha": 16, "use_rslora": True})
    entry = adapters.load(tmp_path / "rs").entries[0]
    assert (entry.scale, entry.scale_rule) == (2.0, "config_alpha")


@pytest.mark.parametrize("order", list(itertools.permutations([Q, K])))
def test_vn3_without_alpha_every_layer_has_its_own_rank(order):
    ranks = {Q: 16, K: 64}
    tensors = {}
    for name in order:
        tensors |= pair(name, ranks[name], seed=ranks[name])
    for entry in adapters.load(tensors, base="sd15").entries:
        name = entry.keys["lora_down"].removesuffix(".lora_down.weight")
        assert (entry.scale, entry.scale_rule, entry.rank) == (1.0, "no_alpha", ranks[name])
        np.testing.assert_array_equal(entry.delta(), product(tensors, name))


VANISHING = [1e-8, 2.98e-8, 3.0e-8, 5.9e-8, 6.1e-5]


def test_vn4_numbers_that_become_zero_are_counted_and_can_be_saved(tmp_path):
    tensors = {
        f"{Q}.lora_down.weight": torch.ones(1, 2),
        f"{Q}.lora_up.weight": torch.tensor(VANISHING).reshape(5, 1),
        f"{Q}.alpha": torch.tensor(1.0),
    }
    read = adapters.load(tensors, base="sd15")
    path = tmp_path / "half.safetensors"
    written = adapters.save(read, path, "kohya", dtype="F16")
    assert written.notes == [f"{Q}.lora_up.weight: 2 numbers became zero, 0 infinite"]
    stored = safetensors.torch.load_file(path)[f"{Q}.lora_up.weight"].flatten()
    assert stored.tolist() == [0, 0, 2**-24, 2**-24, 6.097555160522461e-05]
    assert adapters.save(read, path, "kohya", dtype="BF16").notes == []
    assert bool((safetensors.torch.load_file(path)[f"{Q}.lora_up.weight"] != 0).all())


def test_vn4_the_rescue_multiplies_by_a_power_of_two_and_divides_alpha(tmp_path):
    tensors = {
        f"{Q}.lora_down.weight": torch.ones(1, 2),
        f"{Q}.lora_up.weight": torch.tensor([2**-26, 2**-20, 0.5]).reshape(3, 1),
        f"{Q}.alpha": torch.tensor(1.0),
    }
    read = adapters.load(tensors, base="sd15")
    path = tmp_path / "half.safetensors"
    assert adapters.save(read, path, "kohya", dtype="F16", rescue=True).notes == []
    again = adapters.load(path, base="sd15")
    np.testing.assert_array_equal(again.entries[0].delta(), read.entries[0].delta())
    assert again.entries[0].scale == 0.25


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("to", ROUND_TRIPS)
def test_vm2_a_missing_alpha_does_not_become_1(rank, to, tmp_path):
    tensors = pair(Q, rank)
    read = adapters.load(tensors, base="sd15")
    middle = tmp_path / ("m" if to == "peft" else "m.safetensors")
    adapters.save(read, middle, to)
    adapters.convert(middle, tmp_path / "back.safetensors", "kohya", base="sd15")
    back = safetensors.torch.load_file(tmp_path / "back.safetensors")
    assert back[f"{Q}.alpha"].item() == rank
    np.testing.assert_array_equal(adapters.load(back, base="sd15").entries[0].delta(), product(tensors, Q))


@pytest.mark.parametrize("to", ROUND_TRIPS)
def test_vk4_every_layer_keeps_its_factor(to, tmp_path):
    ranks = {Q: 1, K: 32, Q.replace("attn1", "attn2"): 64}
    tensors = {}
    for name, rank in ranks.items():
        tensors |= pair(name, rank, alpha=5.65625 * rank, seed=rank)
    read = adapters.load(tensors, base="sd15")
    assert [e.scale for e in read.entries] == [5.65625] * 3
    middle = tmp_path / ("m" if to == "peft" else "m.safetensors")
    adapters.save(read, middle, to)
    again = adapters.load(middle, base="sd15")
    if to != "ai-toolkit":  # has no alpha: there it is in the weights
        assert [e.scale for e in again.entries] == [5.65625] * 3
    adapter_files.assert_same_deltas(read, again, 1e-6 if to == "ai-toolkit" else 0.0)


def test_alpha_pattern_rank_pattern_and_the_rest_are_told_apart(tmp_path):
    config = {"r": 8, "lora_alpha": 4, "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 6}}
    peft_file(tmp_path / "p", 6, config)
    entry = adapters.load(tmp_path / "p").entries[0]
    assert (entry.scale, entry.scale_rule) == (0.5, "alpha_pattern")
    assert entry.scale_text == "0.5 = 3 / 6, alpha_pattern q_proj"


def test_a_pattern_that_is_not_understood_is_an_error_with_the_file(tmp_path):
    peft_file(tmp_path / "p", 6, {"r": 6, "lora_alpha": 4, "alpha_pattern": {"q_pro)j": 3}})
    with pytest.raises(ValueError, match=r"/p.*: alpha_pattern: the pattern q_pro\)j is not understood"):
        adapters.load(tmp_path / "p")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_an_alpha_that_is_no_number_is_an_error_with_the_layer(alpha):
    with pytest.raises(ValueError, match=r"input_blocks.*(nan|inf)"):
        adapters.load(pair(Q, 4, alpha=alpha), base="sd15")


def test_zero_alpha_is_no_alpha():
    entry = adapters.load(pair(Q, 4, alpha=0.0), base="sd15").entries[0]
    assert (entry.scale, entry.scale_rule) == (1.0, "no_alpha")

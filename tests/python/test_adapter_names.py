"""src/data/names against the names that diffusers, transformers and sd-scripts have, layer by layer and row by row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import adapter_files
import pytest
import safetensors.torch
import torch
import true_names

from loraaccel import _core, adapters

MODEL = {
    "flux": "transformer",
    "sd3": "transformer",
    "sd35-medium": "transformer",
    "sd35-large": "transformer",
}
ALL_COMPONENTS = ("kohya", "peft", "diffusers", "comfy", "ai-toolkit", "onetrainer")


def model_of(base: str) -> str:
    return MODEL.get(base, "unet")


def layers_of(parameters: list[str] | dict[str, list[int]]) -> set[str]:
    return {name.rpartition(".")[0] for name in parameters}


def column(base: str, component: str, name: str) -> list[tuple]:
    return [r for r in _core.adapter_names(base) if r[0] == component and r[5] == name]


@pytest.mark.parametrize("base", true_names.BASES)
def test_the_tables_have_every_layer_of_the_real_models_and_no_other(base):
    golden = true_names.golden(base)
    for component, parameters in golden["diffusers"].items():
        name = "diffusers" if component == model_of(base) else "native"
        rows = column(base, component, name)
        spelled = [r[6].removeprefix("text_model.") for r in rows]
        assert len(spelled) == len(set(spelled)) or any(r[9] != r[3] for r in rows)
        assert set(spelled) == layers_of(parameters), component
    native = column(base, model_of(base), "native")
    assert {r[1] for r in native} == layers_of(golden["native"])
    for row in native:
        weight = next(
            golden["native"][f"{row[1]}.{end}"]
            for end in ("weight", "scale")
            if f"{row[1]}.{end}" in golden["native"]
        )
        assert row[3] == weight[0] and (len(weight) == 1 or row[4] == weight[1]), row


@pytest.mark.parametrize("base", true_names.BASES)
def test_rows_go_where_diffusers_own_converter_puts_them(base):
    expected = set()
    for parameter, pieces in true_names.golden(base)["pairs"]:
        layer, _, leaf = parameter.rpartition(".")
        if leaf == "bias":
            continue
        for native, row, native_row, rows in pieces:
            expected.add((layer, native.rpartition(".")[0], row, native_row, rows))
    found = {(r[6], r[1], r[7], r[8], r[9]) for r in column(base, model_of(base), "diffusers")}
    assert found == expected


@pytest.mark.parametrize("base", true_names.BASES)
def test_the_golden_lists_are_what_the_installed_libraries_have(base):
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    golden = {
        component: {n.removeprefix("text_model."): shape for n, shape in parameters.items()}
        for component, parameters in true_names.golden(base)["diffusers"].items()
    }
    assert true_names.model_names(base) == golden


def narrow(size: int) -> int:
    """Rows of a narrower model of the same build: parts of fused layers keep their proportions."""
    return size // 512 if size % 512 == 0 else size


def kohya_file(base: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A file of sd-scripts with every layer it can train, of rank 1 and one input."""
    generator = adapter_files.seeded()
    tensors = {}
    for name, down, up in true_names.golden(base)["kohya"]:
        tensors[f"{name}.lora_down.weight"] = adapter_files.numbers(generator, 1, 1, *down[2:], dtype=dtype)
        tensors[f"{name}.lora_up.weight"] = adapter_files.numbers(
            generator, narrow(up[0]), 1, *up[2:], dtype=dtype
        )
        tensors[f"{name}.alpha"] = torch.tensor(1.0, dtype=dtype)
    return tensors


@pytest.mark.parametrize("base", true_names.BASES)
@pytest.mark.parametrize("to", ALL_COMPONENTS)
def test_every_key_of_sd_scripts_goes_to_every_format_and_comes_back(base, to, tmp_path):
    tensors = kohya_file(base)
    source, target, back = (
        tmp_path / "a.safetensors",
        tmp_path / ("b" if to == "peft" else "b.safetensors"),
        tmp_path / "c.safetensors",
    )
    safetensors.torch.save_file(tensors, source)
    read, written = adapters.convert(source, target, to, base=base)
    assert (read.format, read.unused, written.notes) == ("kohya", [], [])
    adapters.convert(target, back, "kohya", base=base)
    adapter_files.assert_same_tensors(tensors, safetensors.torch.load_file(back))


@pytest.mark.parametrize("base", true_names.BASES)
def test_keys_of_a_diffusers_file_are_the_model_s_own(base, tmp_path):
    """Which of diffusers' layers a file of sd-scripts covers, by diffusers' converter, and by ours."""
    golden = true_names.golden(base)
    parts: dict[str, set[str]] = {}
    for parameter, pieces in golden["pairs"]:
        for native, *_ in pieces:
            if native.endswith(".weight"):
                parts.setdefault(native.removesuffix(".weight"), set()).add(parameter.removesuffix(".weight"))
    flat = {path.replace(".", "_"): names for path, names in parts.items()}
    flat |= (
        {name.replace(".", "_"): {name} for names in parts.values() for name in names}
        if base in ("sd15", "sd2")
        else {}
    )
    expected = Counter(
        f"{model_of(base)}.{name}"
        for layer, *_ in golden["kohya"]
        if layer.startswith("lora_unet_")
        for name in flat[layer.removeprefix("lora_unet_")]
    )
    adapters.save(adapters.load(kohya_file(base), base=base), tmp_path / "d.safetensors", "diffusers")
    keys = [
        k for k in safetensors.torch.load_file(tmp_path / "d.safetensors") if k.startswith(model_of(base))
    ]
    assert Counter(k.removesuffix(".lora_A.weight") for k in keys if k.endswith(".lora_A.weight")) == expected
    assert max(expected.values()) == 1


@pytest.mark.parametrize("base", true_names.BASES)
def test_flat_names_of_a_format_are_unique(base):
    for component in {r[0] for r in _core.adapter_names(base)}:
        for name in {r[5] for r in _core.adapter_names(base)}:
            spelled = {r[6] for r in column(base, component, name)}
            assert len({s.replace(".", "_") for s in spelled}) == len(spelled), (component, name)


def test_a_key_that_differs_by_one_letter_is_an_error_that_names_it(tmp_path: Path):
    tensors = kohya_file("sd15")
    tensors["lora_unet_down_blocks_0_attentions_0_proj_im.lora_down.weight"] = torch.ones(1, 1)
    with pytest.raises(
        ValueError, match=r"1 of \d+ tensors match no layer of sd15 .*proj_im\.lora_down\.weight"
    ):
        adapters.load(tensors, base="sd15")
    read = adapters.load(tensors, base="sd15", allow_unmatched=True)
    assert read.unused == ["lora_unet_down_blocks_0_attentions_0_proj_im.lora_down.weight"]

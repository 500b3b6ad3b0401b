"""Files that somebody else wrote, through every tool: their names, their missing alphas, their metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_adapters import CONV, PATHS, TO_K, TO_Q, TO_V, Tensors, deltas, off, pair, update, write

from loraaccel import adapters
from loraaccel.safetensors.numpy import load_file, save_file

ABOUT = {
    "format": "pt",
    "ss_network_dim": "8",
    "ss_training_comment": "mine",
    "modelspec.title": "a b",
    "\u00e9": "\n",
}


def plain(rng: np.random.Generator) -> Tensors:
    return pair(rng, TO_Q, 8, 8) | pair(rng, CONV, 4, 2)


def peft_without_alpha(rng: np.random.Generator, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = {}
    for name in (TO_Q, TO_K):
        # PEFT's files have diffusers' names of layers
        stem = f"base_model.model.down_blocks.1.attentions.0.transformer_blocks.0.attn1.{name[-4:]}"
        tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((4, 64)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((64, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    updates = {
        PATHS[name]: np.asarray(b, np.float64) @ a
        for name, (a, b) in zip((TO_Q, TO_K), zip(*[iter(tensors.values())] * 2, strict=True), strict=True)
    }
    return folder / "adapter_model.safetensors", updates


def diffusers_names(rng: np.random.Generator, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = plain(rng)
    adapters.convert(
        write(folder / "k.safetensors", tensors), folder / "d.safetensors", "diffusers", base="sdxl"
    )
    return folder / "d.safetensors", {PATHS[n]: update(tensors, n) for n in (TO_Q, CONV)}


def beside_whole_differences(rng: np.random.Generator, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors, change = plain(rng), rng.standard_normal((64, 64)).astype(np.float32)
    path = write(folder / "a.safetensors", tensors, {f"{TO_K}.diff": change})
    return path, {PATHS[n]: update(tensors, n) for n in (TO_Q, CONV)} | {PATHS[TO_K]: change}


def with_a_zero_layer(rng: np.random.Generator, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = plain(rng) | pair(rng, TO_V, 4)
    tensors[f"{TO_V}.lora_up.weight"] *= 0
    return write(folder / "a.safetensors", tensors), {
        PATHS[n]: update(tensors, n) for n in (TO_Q, CONV, TO_V)
    }


def loha(rng: np.random.Generator, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    a, b, c, d = (rng.standard_normal(s).astype(np.float32) for s in ((64, 2), (2, 64)) * 2)
    roles = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d, "alpha": np.float32(1)}
    change = 0.5 * (np.asarray(a, np.float64) @ b) * (np.asarray(c, np.float64) @ d)
    return write(folder / "a.safetensors", {f"{TO_Q}.{k}": v for k, v in roles.items()}), {
        PATHS[TO_Q]: change
    }


Make = Callable[[np.random.Generator, Path], tuple[Path, dict[str, np.ndarray]]]
INPUTS: list[Make] = [peft_without_alpha, diffusers_names, beside_whole_differences, with_a_zero_layer, loha]


def base_model(path: Path, updates: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shapes = {
        PATHS[TO_Q]: (64, 64),
        PATHS[TO_K]: (64, 64),
        PATHS[TO_V]: (64, 64),
        PATHS[CONV]: (64, 32, 3, 3),
    }
    rng = np.random.default_rng(9)
    weights = {
        f"model.diffusion_model.{p}.weight": rng.standard_normal(shapes[p]).astype(np.float32)
        for p in updates
    }
    save_file(weights, path)
    return weights


@pytest.mark.parametrize("make", INPUTS)
def test_vm5_every_input_through_every_tool(make: Make, tmp_path: Path) -> None:
    source, updates = make(np.random.default_rng(5), tmp_path)
    base = {} if make is peft_without_alpha else {"base": "sdxl"}
    adapter = adapters.load(source, base="sdxl", component="unet" if make is peft_without_alpha else None)
    mine = deltas(adapter)
    assert set(mine) == set(updates)
    for path, change in updates.items():
        assert off(mine[path], change.reshape(len(change), -1)) < 1e-6

    written = tmp_path / "kohya.safetensors"
    adapters.save(adapter, written, "kohya")
    for path, change in deltas(written).items():
        assert off(change, mine[path]) == 0, path

    weights = base_model(tmp_path / "base.safetensors", updates)
    report = adapters.merge(tmp_path / "base.safetensors", adapter, tmp_path / "merged.safetensors")
    changed = [path for path, change in updates.items() if change.any()]
    assert report.tensors == len(updates)
    merged = load_file(tmp_path / "merged.safetensors")
    for path in updates:
        key = f"model.diffusion_model.{path}.weight"
        expected = weights[key].astype(np.float64) + mine[path].reshape(weights[key].shape)
        assert np.abs(merged[key] - expected).max() < 1e-5 * np.abs(expected).max()

    found = adapters.extract(
        tmp_path / "base.safetensors", tmp_path / "merged.safetensors", tmp_path / "x.safetensors", 8,
        conv_rank=8, base="sdxl",
    )  # fmt: skip
    assert sorted(layer.path for layer in found.layers) == sorted(changed)

    twice = adapters.combine([(adapter, 0.5), (adapter, 0.25)], rank=64, **base)
    for path, change in deltas(twice.adapter).items():
        assert off(change, 0.75 * mine[path]) < 1e-5, path
    assert adapters.diff(source if base else adapter, adapter, **base).relative < 1e-15


@pytest.mark.parametrize("to", ["kohya", "diffusers", "comfy", "peft"])
def test_vw6_metadata_survives_a_conversion(to: str, tmp_path: Path) -> None:
    source = write(tmp_path / "a.safetensors", plain(np.random.default_rng(6)), metadata=ABOUT)
    adapters.convert(source, tmp_path / "out", to, base="sdxl")
    file = next((tmp_path / "out").rglob("*.safetensors")) if to == "peft" else tmp_path / "out"
    header = file.read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert (8 + size) % 8 == 0
    kept = json.loads(header[8 : 8 + size])["__metadata__"]
    assert {key: kept.get(key) for key in ABOUT} == ABOUT


def test_vw6_a_model_keeps_its_metadata_in_a_merge(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    adapter = adapters.load(write(tmp_path / "a.safetensors", pair(rng, TO_Q, 4)), base="sdxl")
    weights = {f"model.diffusion_model.{PATHS[TO_Q]}.weight": np.zeros((64, 64), np.float32)}
    save_file(weights, tmp_path / "base.safetensors", ABOUT)
    adapters.merge(tmp_path / "base.safetensors", adapter, tmp_path / "m.safetensors")
    header = (tmp_path / "m.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert (8 + size) % 8 == 0
    assert json.loads(header[8 : 8 + size])["__metadata__"] == ABOUT

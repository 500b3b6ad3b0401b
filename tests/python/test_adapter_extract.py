"""The difference of two models as an adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_adapters import best, off

from loraaccel import adapters
from loraaccel.adapters._models import CHECKPOINTS
from loraaccel.safetensors.numpy import load_file, save_file
from loraaccel.safetensors.torch import save_file as save_torch

Tensors = dict[str, np.ndarray]
NAMES = Path(__file__).parents[2] / "src" / "data" / "names"


def plain_models(tmp_path: Path, noise: float = 0.0) -> tuple[Path, Path, Tensors]:
    """A model without a table: two matrices that change by rank 4, one that does not, an embedding, a convolution."""
    rng = np.random.default_rng(0)
    before = {
        f"layers.{i}.{x}.weight": rng.standard_normal((32, 32)).astype(np.float32)
        for i in (0, 1)
        for x in "qk"
    }
    before["embed.weight"] = rng.standard_normal((10, 32)).astype(np.float32)
    before["conv.weight"] = rng.standard_normal((8, 6, 3, 3)).astype(np.float32)
    before["layers.0.norm.weight"] = np.ones(32, np.float32)
    after = {key: value.copy() for key, value in before.items()}
    for i in (0, 1):
        change = rng.standard_normal((32, 4)) @ rng.standard_normal((4, 32)) + noise * np.eye(32)
        after[f"layers.{i}.q.weight"] += change.astype(np.float32)
    after["conv.weight"] += (
        (rng.standard_normal((8, 2)) @ rng.standard_normal((2, 54))).reshape(8, 6, 3, 3).astype("f4")
    )
    after["embed.weight"] += 1
    after["layers.0.norm.weight"] += 1
    save_file(before, tmp_path / "before.safetensors")
    save_file(after, tmp_path / "after.safetensors")
    change = {k: after[k].astype(np.float64) - before[k] for k in before}
    return tmp_path / "before.safetensors", tmp_path / "after.safetensors", change


@pytest.mark.parametrize("exact", [False, True])
def test_vm4_an_exact_rank_comes_back(tmp_path: Path, exact: bool) -> None:
    before, after, change = plain_models(tmp_path)
    report = adapters.extract(before, after, tmp_path / "out", 4, conv_rank=2, exact=exact)
    found = {entry.path: entry for entry in adapters.load(tmp_path / "out").entries}
    assert set(found) == {"layers.0.q", "layers.1.q", "conv"}
    for path, entry in found.items():
        wanted = change[f"{path}.weight"].reshape(change[f"{path}.weight"].shape[0], -1)
        assert off(entry.delta(), wanted) < 1e-5
        assert entry.rank == (2 if path == "conv" else 4)
        up, down = (np.asarray(entry.tensors[f"lora_{x}"], np.float64) for x in ("up", "down"))
        assert np.linalg.norm(up) == pytest.approx(np.linalg.norm(down), rel=1e-5)
    assert report.same == ["model.layers.0.k", "model.layers.1.k"]
    assert report.error < 1e-5
    assert all(layer.exact for layer in report.layers)


def test_vm4_noise_costs_no_more_than_it_must(tmp_path: Path) -> None:
    before, after, change = plain_models(tmp_path, noise=1e-4)
    report = adapters.extract(before, after, rank=4)
    for layer, entry in zip(report.layers, report.adapter.entries, strict=True):
        wanted = change[f"{layer.path}.weight"]
        least = off(best(wanted, 4), wanted)
        assert layer.error == pytest.approx(off(entry.delta(), wanted), rel=1e-2)
        assert least * 0.99 <= layer.error <= least * 1.01


def test_vm4_a_clamp_is_asked_for_and_its_cost_is_said(tmp_path: Path) -> None:
    before, after, change = plain_models(tmp_path)
    report = adapters.extract(before, after, rank=4, clamp_quantile=0.99)
    for layer, entry in zip(report.layers, report.adapter.entries, strict=True):
        wanted = change[f"{layer.path}.weight"]
        u, s, v = np.linalg.svd(wanted)
        up, down = u[:, :4] * s[:4], v[:4]
        limit = np.quantile(np.concatenate([up.ravel(), down.ravel()]), 0.99)
        assert max(np.abs(np.asarray(t)).max() for t in entry.tensors.values()) <= limit * 1.2
        assert layer.error == pytest.approx(off(entry.delta(), wanted), rel=1e-5)
        assert layer.error > 1e-3


def test_vm4_the_quantile_of_a_large_layer(tmp_path: Path) -> None:
    """More numbers than torch.quantile takes (2^24), in the factors."""
    assert np.quantile(np.arange(1, 101, dtype=np.float64), 0.99) == pytest.approx(99.01)
    assert np.quantile(np.zeros(2**24 + 1, np.float32), 0.99) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["before", "after"])
def test_vm4_numbers_that_are_not_finite_are_named(tmp_path: Path, value: float, which: str) -> None:
    before, after, _ = plain_models(tmp_path)
    path = {"before": before, "after": after}[which]
    tensors = load_file(path)
    tensors["layers.1.k.weight"] = tensors["layers.1.k.weight"].copy()
    tensors["layers.1.k.weight"][0, 1] = value
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"{path.name}: layers\.1\.k\.weight holds a NaN"):
        adapters.extract(before, after, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_vm4_a_solver_that_fails_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: np.ndarray) -> None:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    before, after, _ = plain_models(tmp_path)
    monkeypatch.setattr(np.linalg, "eigh", fail)
    assert adapters.extract(before, after, rank=4).error < 1e-5

    def fail_too(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fail_too)
    with pytest.raises(
        ValueError, match=r"layers\.0\.q\.weight: the singular values cannot be computed: SVD"
    ):
        adapters.extract(before, after, rank=4)


def test_large_differences_are_nearly_the_best_and_exact_on_request(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    before = rng.standard_normal((520, 600)).astype(np.float32)
    change = rng.standard_normal((520, 600)) * 0.01  # falls as slowly as it can
    change += rng.standard_normal((520, 8)) @ rng.standard_normal((8, 600)) * 0.1
    save_file({"x.weight": before}, tmp_path / "a.safetensors")
    save_file({"x.weight": before + change.astype(np.float32)}, tmp_path / "b.safetensors")
    wanted = (before + change.astype(np.float32)).astype(np.float64) - before
    least = off(best(wanted, 12), wanted)
    errors = {}
    for exact in (False, True):
        report = adapters.extract(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=12, exact=exact
        )
        (layer,) = report.layers
        assert layer.exact is exact
        assert layer.error == pytest.approx(off(report.adapter.entries[0].delta(), wanted), rel=1e-4)
        errors[exact] = layer.error
    assert errors[True] == pytest.approx(least, rel=1e-5)
    assert errors[False] <= least * 1.01


def sd15(rng: np.random.Generator) -> Tensors:
    """Some layers of SD 1.5 at a tenth of their sizes, as its checkpoints spell them."""
    block, resnet = "input_blocks.1.1.transformer_blocks.0", "input_blocks.1.0"
    text = "cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"
    shapes = {
        f"model.diffusion_model.{block}.attn1.to_q.weight": (32, 32),
        f"model.diffusion_model.{block}.attn2.to_k.weight": (32, 76),
        "model.diffusion_model.input_blocks.1.1.proj_in.weight": (32, 32, 1, 1),
        f"model.diffusion_model.{resnet}.in_layers.2.weight": (32, 32, 3, 3),
        f"model.diffusion_model.{resnet}.emb_layers.1.weight": (32, 128),
        "model.diffusion_model.time_embed.0.weight": (128, 32),
        text: (76, 76),
        "first_stage_model.decoder.conv_in.weight": (16, 4, 3, 3),
    }
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}


def two_sd15(tmp_path: Path, text_change: float = 1.0) -> tuple[Path, Path]:
    rng = np.random.default_rng(2)
    before = sd15(rng)
    after = {k: v + rng.standard_normal(v.shape).astype(np.float32) * 0.1 for k, v in before.items()}
    text = next(k for k in before if k.startswith("cond_stage"))
    after[text] = before[text] + text_change * np.sign(after[text] - before[text]).astype(np.float32)
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


@pytest.mark.parametrize("conv_rank", [None, 3])
def test_the_layers_of_stable_diffusion(tmp_path: Path, conv_rank: int | None) -> None:
    before, after = two_sd15(tmp_path)
    report = adapters.extract(before, after, tmp_path / "c.safetensors", 5, conv_rank=conv_rank, base="sd15")
    written = load_file(tmp_path / "c.safetensors")
    block = "lora_unet_down_blocks_0_attentions_0"
    expected = {
        f"{block}_transformer_blocks_0_attn1_to_q": (5, 32),
        f"{block}_transformer_blocks_0_attn2_to_k": (5, 76),
        f"{block}_proj_in": (5, 32, 1, 1),
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj": (5, 76),
    }
    if conv_rank:
        expected["lora_unet_down_blocks_0_resnets_0_conv1"] = (3, 32, 3, 3)
        expected["lora_unet_down_blocks_0_resnets_0_time_emb_proj"] = (5, 128)
    assert {k.split(".")[0]: v.shape for k, v in written.items() if "lora_down" in k} == expected
    assert all(float(v) == expected[k.split(".")[0]][0] for k, v in written.items() if k.endswith(".alpha"))
    about = adapters.summary(tmp_path / "c.safetensors").metadata
    assert (about["ss_v2"], about["ss_base_model_version"], about["ss_network_module"]) == (
        "False",
        "sd_v1",
        "networks.lora",
    )
    assert (about["ss_network_dim"], about["ss_network_alpha"]) == ("5", "5.0")
    arguments = {} if conv_rank is None else {"conv_dim": "3", "conv_alpha": "3.0"}
    assert json.loads(about["ss_network_args"]) == arguments
    one, two = load_file(before), load_file(after)
    for entry, layer in zip(report.adapter.entries, report.layers, strict=True):
        key = next(k for k in one if k.endswith(f"{entry.path}.weight"))
        wanted = (two[key] - one[key]).astype(np.float64).reshape(one[key].shape[0], -1)
        assert off(entry.delta(), best(wanted, layer.rank)) < 1e-5


@pytest.mark.parametrize(
    ("prefix", "width", "base"), [("model.diffusion_model.", 768, "sd15"), ("", 2048, "sdxl")]
)
def test_the_base_is_found_out_from_names_and_sizes(
    tmp_path: Path, prefix: str, width: int, base: str
) -> None:
    block = prefix + "input_blocks.4.1.transformer_blocks.0.attn2."
    before = {block + "to_k.weight": np.zeros((640, width), np.float32)}
    after = {key: value + np.eye(640, width, dtype=np.float32) for key, value in before.items()}
    if base == "sdxl":
        deep = prefix + "input_blocks.7.1.transformer_blocks.9.attn1.to_q.weight"
        before[deep] = after[deep] = np.zeros((1280, 1280), np.float32)
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    report = adapters.extract(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=2)
    assert report.adapter.base == base
    assert report.layers[0].path == "input_blocks.4.1.transformer_blocks.0.attn2.to_k"


def test_text_encoders_that_hardly_changed_are_left_out(tmp_path: Path) -> None:
    before, after = two_sd15(tmp_path, text_change=0.005)
    report = adapters.extract(before, after, rank=2, min_diff=0.01, base="sd15")
    assert {layer.component for layer in report.layers} == {"unet"}
    assert "text encoders are left out" in report.notes[0]
    report = adapters.extract(before, after, rank=2, base="sd15")
    assert {layer.component for layer in report.layers} == {"unet", "text_encoder"}


def test_a_folder_of_shards_and_other_types_is_the_same_model(tmp_path: Path) -> None:
    before, after = two_sd15(tmp_path)
    tensors = {k: torch.from_numpy(v) for k, v in load_file(after).items()}
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    half = {torch.float16: names[:4], torch.bfloat16: names[4:]}
    for i, (dtype, keys) in enumerate(half.items()):
        save_torch(
            {k: tensors[k].to(dtype) for k in keys}, folder / f"model-0000{i + 1}-of-00002.safetensors"
        )
    rounded = {k: tensors[k].to(dtype).float() for dtype, keys in half.items() for k in keys}
    save_torch(rounded, tmp_path / "rounded.safetensors")
    mine = adapters.extract(before, folder, rank=3, base="sd15")
    theirs = adapters.extract(before, tmp_path / "rounded.safetensors", rank=3, base="sd15")
    deltas = {e.path: e.delta() for e in theirs.adapter.entries}
    assert len(mine.adapter.entries) == len(deltas)
    for entry in mine.adapter.entries:
        assert off(entry.delta(), deltas[entry.path]) < 1e-6


def test_stacked_projections_become_layers_of_their_own(tmp_path: Path) -> None:
    """OpenCLIP's in_proj_weight, as SDXL's checkpoints have it."""
    rng = np.random.default_rng(3)
    stem = "conditioner.embedders.1.model.transformer.resblocks.0.attn."
    before = {stem + "in_proj_weight": rng.standard_normal((3840, 16)).astype(np.float32)}
    change = rng.standard_normal((3840, 16)).astype(np.float32)
    after = {key: value + change for key, value in before.items()}
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    report = adapters.extract(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=16, base="sdxl")
    by_path = {entry.path: entry for entry in report.adapter.entries}
    exact = after[stem + "in_proj_weight"].astype(np.float64) - before[stem + "in_proj_weight"]
    for i, x in enumerate(("q", "k", "v")):
        entry = by_path[f"text_model.encoder.layers.0.self_attn.{x}_proj"]
        assert entry.component == "text_encoder_2"
        assert off(entry.delta(), exact[1280 * i : 1280 * (i + 1)]) < 1e-5


def test_models_that_do_not_fit_are_named(tmp_path: Path) -> None:
    before, after, _ = plain_models(tmp_path)
    tensors = load_file(after)
    target = tmp_path / "out"

    def with_other(name: str, change: dict[str, np.ndarray | None]) -> Path:
        changed = {**tensors, **{k: v for k, v in change.items() if v is not None}}
        path = tmp_path / name
        save_file({k: v for k, v in changed.items() if change.get(k, v) is not None}, path)
        return path

    missing = with_other("missing.safetensors", {"layers.1.k.weight": None})
    other = with_other("other.safetensors", {"layers.1.k.weight": np.zeros((32, 16), np.float32)})
    whole = with_other("int.safetensors", {"layers.1.k.weight": np.zeros((32, 32), np.int8)})
    scaled = with_other("scaled.safetensors", {"layers.1.k.weight_scale": np.ones(1, np.float32)})
    for path, message in (
        (missing, r"missing\.safetensors has no layer for 1 of .*layers\.1\.k\.weight"),
        (other, r"other\.safetensors: layers\.1\.k\.weight has shape \[32, 16\].*\[32, 32\]"),
        (whole, r"int\.safetensors: layers\.1\.k\.weight is of type .*int8"),
        (scaled, r"scaled\.safetensors: layers\.1\.k\.weight is quantised"),
        (before, "alike in all"),
    ):
        with pytest.raises(ValueError, match=message):
            adapters.extract(before, path, target, 4)
    assert not target.exists()
    report = adapters.extract(before, missing, target, 4, allow_unmatched=True)
    assert any("layers.1.k.weight is in" in note for note in report.notes)
    for options in (
        {"clamp_quantile": 0},
        {"min_diff": -1},
        {"layers": "("},
        {"layers": "nothing"},
        {"rank": 0},
    ):
        with pytest.raises(ValueError, match=r"expected|regular|no layer"):
            adapters.extract(before, after, **options)  # type: ignore[arg-type]
    report = adapters.extract(before, after, rank=4, layers=r"^layers\.1\.")
    assert [layer.path for layer in report.layers] == ["layers.1.q"]


def test_the_types_of_the_result(tmp_path: Path) -> None:
    before, after = two_sd15(tmp_path)
    adapters.extract(before, after, tmp_path / "c.safetensors", 3, dtype="F16", base="sd15")
    written = load_file(tmp_path / "c.safetensors")
    assert {v.dtype for k, v in written.items() if "lora_" in k[-20:]} == {np.dtype(np.float16)}


def test_prefixes_of_checkpoints_are_those_of_the_name_tables() -> None:
    tables: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(NAMES.glob("*.names")):
        component = ""
        for line in path.read_text("utf-8").splitlines():
            words = line.split()
            if line.startswith("component ") and "$" not in line:
                component = words[1]
            elif name := re.match(r"include \S+ NAME=(\S+)", line):
                component = name[1]
            elif line.startswith("include unet "):
                component = "unet"
            elif line.startswith("checkpoint "):
                tables.setdefault(component, set()).add(("" if words[1] == "-" else words[1], words[2]))
    assert {name: set(prefixes) for name, prefixes in CHECKPOINTS.items()} == tables

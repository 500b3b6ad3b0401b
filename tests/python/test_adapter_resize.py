"""Adapters of another rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_adapters import (
    CONV,
    CROSS_K,
    PATHS,
    SHORTCUT,
    TO_K,
    TO_Q,
    TO_V,
    best,
    deltas,
    off,
    pair,
    update,
    write,
)

from loraaccel import adapters
from loraaccel.safetensors.numpy import load_file, save_file
from loraaccel.safetensors.torch import load_file as load_torch
from loraaccel.safetensors.torch import save_file as save_torch

RNG = np.random.default_rng(0)
ALL = (TO_Q, TO_K, CROSS_K, CONV, SHORTCUT)


def full_file(tmp_path: Path, dtype: str = "float32") -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for name, rank, alpha in zip(ALL, (16, 12, 16, 8, 8), (8, 12, None, 4, 1), strict=True):
        tensors |= pair(rng, name, rank, alpha, dtype)
    return write(tmp_path / "a.safetensors", tensors, metadata={"ss_network_dim": "16", "note": "é"}), tensors


def test_every_layer_is_the_best_approximation_and_keeps_its_factor(tmp_path: Path) -> None:
    source, tensors = full_file(tmp_path)
    report = adapters.resize(source, tmp_path / "b.safetensors", 6, conv_rank=3, base="sdxl")
    written = load_file(tmp_path / "b.safetensors")
    assert set(written) == set(tensors) | {f"{CROSS_K}.alpha"}
    by_path = {layer.path: layer for layer in report.layers}
    for name in ALL:
        expected = best(update(tensors, name), 3 if name in (CONV, SHORTCUT) else 6)
        assert off(update(written, name), expected) < 2e-7
        layer = by_path[PATHS[name]]
        old = tensors[f"{name}.lora_down.weight"]
        new = written[f"{name}.lora_down.weight"]
        assert new.shape == (layer.new_rank, *old.shape[1:])
        assert written[f"{name}.lora_up.weight"].shape[1] == layer.new_rank
        alpha = tensors.get(f"{name}.alpha")
        scale = 1.0 if alpha is None else float(alpha) / old.shape[0]
        assert float(written[f"{name}.alpha"]) == scale * layer.new_rank == layer.alpha
        s = np.linalg.svd(update(tensors, name), compute_uv=False)
        k = layer.new_rank
        assert layer.fro_retained == pytest.approx(np.linalg.norm(s[:k]) / np.linalg.norm(s), rel=1e-6)
        assert layer.sum_retained == pytest.approx(s[:k].sum() / s.sum(), rel=1e-5)
        assert layer.max_ratio == pytest.approx(s[0] / s[k - 1], rel=1e-5)
    # B = U S, A = V^T
    a = written[f"{TO_Q}.lora_down.weight"].astype(np.float64)
    np.testing.assert_allclose(a @ a.T, np.eye(6), atol=1e-6)


def test_hand_vector() -> None:
    tensors = {
        "lora_unet_x.lora_up.weight": np.diag([3.0, 1]).astype(np.float32),
        "lora_unet_x.lora_down.weight": np.eye(2, dtype=np.float32),
    }
    report = adapters.resize(adapters.load(tensors, modules=["x"]), rank=1)
    entry = report.adapter.entries[0]
    up, down = (np.asarray(entry.tensors[role]) for role in ("lora_up", "lora_down"))
    np.testing.assert_allclose(up * np.sign(up[0]), [[3], [0]], atol=1e-7)
    np.testing.assert_allclose(down * np.sign(up[0]), [[1, 0]], atol=1e-7)
    assert report.layers[0].fro_retained == pytest.approx(np.sqrt(0.9))


@pytest.mark.parametrize(("method", "param"), [("sv_ratio", 8.0), ("sv_fro", 0.9), ("sv_cumulative", 0.8)])
def test_dynamic_ranks_are_those_of_a_full_svd_in_torch(tmp_path: Path, method: str, param: float) -> None:
    source, tensors = full_file(tmp_path)
    report = adapters.resize(source, rank=10, method=method, param=param, base="sdxl")
    by_path = {layer.path: layer for layer in report.layers}
    ranks = set()
    for name in ALL:
        down = torch.from_numpy(tensors[f"{name}.lora_down.weight"]).flatten(1)
        up = torch.from_numpy(tensors[f"{name}.lora_up.weight"]).flatten(1)
        s = torch.linalg.svdvals(up @ down)
        if method == "sv_ratio":
            found = int((s > s[0] / param).sum())
        else:
            parts, target = (s, param) if method == "sv_cumulative" else (s**2, param**2)
            found = int(torch.searchsorted(torch.cumsum(parts, 0) / float(parts.sum()), target)) + 1
        expected = min(found + 1, 10, down.shape[0])
        ranks.add(expected)
        assert by_path[PATHS[name]].new_rank == expected
    assert len(ranks) > 1
    about = report.adapter.metadata
    assert about["ss_training_comment"] == f"Dynamic resize with {method}: {param} from 16; "
    assert (about["ss_network_dim"], about["ss_network_alpha"]) == ("Dynamic", "Dynamic")


@pytest.mark.parametrize(("dtype", "limit"), [("F16", 1e-3), ("BF16", 8e-3)])
def test_the_type_stays_or_is_the_one_asked_for(tmp_path: Path, dtype: str, limit: float) -> None:
    source, tensors = full_file(tmp_path)
    torch_dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    small = tmp_path / "small.safetensors"
    save_torch({k: torch.from_numpy(v).to(torch_dtype) for k, v in tensors.items()}, small)
    stored = {k: v.double().numpy() for k, v in load_torch(small).items()}
    for path, options in ((small, {}), (source, {"dtype": dtype})):
        adapters.resize(path, tmp_path / "b.safetensors", 4, base="sdxl", **options)
        written = load_torch(tmp_path / "b.safetensors")
        assert {v.dtype for k, v in written.items() if "lora_" in k.rsplit(".", 2)[-2]} == {torch_dtype}
        expected = best(update(stored if path == small else tensors, TO_Q), 4)
        assert off(update({k: v.double().numpy() for k, v in written.items()}, TO_Q), expected) < limit


@pytest.mark.parametrize(("out", "columns"), [(320, 768), (1, 64), (64, 1)])
def test_vm3_more_rank_than_exists(out: int, columns: int) -> None:
    rng = np.random.default_rng(1)
    rank = min(out, columns, 6)
    tensors = {
        "base_model.model.x.lora_B.weight": rng.standard_normal((out, rank)).astype(np.float32),
        "base_model.model.x.lora_A.weight": rng.standard_normal((rank, columns)).astype(np.float32),
    }
    before = adapters.load(tensors, config=json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 3}))
    report = adapters.resize(before, rank=512)
    layer = report.layers[0]
    assert layer.new_rank == rank
    assert layer.alpha == pytest.approx(3.0)
    assert layer.fro_retained == pytest.approx(1)
    assert off(report.adapter.entries[0].delta(), before.entries[0].delta()) < 1e-6


def test_vm3_factors_wider_than_the_weight() -> None:
    rng = np.random.default_rng(2)
    tensors = {
        "lora_unet_x.lora_up.weight": rng.standard_normal((3, 8)).astype(np.float32),
        "lora_unet_x.lora_down.weight": rng.standard_normal((8, 5)).astype(np.float32),
    }
    before = adapters.load(tensors, modules=["x"])
    report = adapters.resize(before, rank=8)
    assert report.layers[0].new_rank == 3
    assert off(report.adapter.entries[0].delta(), before.entries[0].delta()) < 1e-6


@pytest.mark.parametrize("method", [None, "sv_ratio", "sv_fro", "sv_cumulative"])
def test_vm3_an_update_of_zeros(tmp_path: Path, method: str | None) -> None:
    tensors = pair(RNG, TO_Q, 8, 4)
    tensors[f"{TO_Q}.lora_up.weight"][:] = 0
    source = write(tmp_path / "a.safetensors", tensors)
    param = None if method is None else 0.9
    report = adapters.resize(source, tmp_path / "b.safetensors", 4, method=method, param=param, base="sdxl")
    layer = report.layers[0]
    assert (layer.new_rank, layer.alpha) == (1, 0.5)
    assert (layer.fro_retained, layer.sum_retained, layer.max_ratio) == (1, 1, 1)
    written = load_file(tmp_path / "b.safetensors")
    assert not update(written, TO_Q).any()
    assert all(np.isfinite(v).all() for v in written.values())


def test_vm5_peft_names_without_alpha(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = {}
    for i in range(2):
        stem = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((8, 64)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((32, 8)).astype(np.float32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    report = adapters.resize(tmp_path / "adapter_model.safetensors", tmp_path / "out", 4)
    again = adapters.load(tmp_path / "out")
    assert again.format == "peft"
    for entry in again.entries:
        stem = f"base_model.model.{entry.path}"
        product = tensors[f"{stem}.lora_B.weight"].astype(np.float64) @ tensors[f"{stem}.lora_A.weight"]
        assert off(entry.delta(), best(product, 4)) < 2e-7
    assert [layer.alpha for layer in report.layers] == [4, 4]


def test_vm5_diffusers_names(tmp_path: Path) -> None:
    source, _ = full_file(tmp_path)
    adapters.convert(source, tmp_path / "d.safetensors", "diffusers", base="sdxl")
    report = adapters.resize(tmp_path / "d.safetensors", tmp_path / "e.safetensors", 4, base="sdxl")
    assert report.adapter.format == "diffusers"
    mine = deltas(tmp_path / "e.safetensors")
    for path, delta in deltas(source).items():
        assert off(mine[path], best(delta, 4)) < 3e-7


def test_vm5_lora_beside_whole_differences_and_unknown_keys(tmp_path: Path) -> None:
    difference = RNG.standard_normal((64, 64)).astype(np.float32)
    tensors = pair(RNG, TO_Q, 8, 8) | {f"{TO_K}.diff": difference}
    source = write(tmp_path / "a.safetensors", tensors)
    report = adapters.resize(source, tmp_path / "b.safetensors", 4, base="sdxl")
    assert report.kept == [f"unet.{PATHS[TO_K]} (full)"]
    assert (load_file(tmp_path / "b.safetensors")[f"{TO_K}.diff"] == difference).all()
    odd = write(tmp_path / "c.safetensors", tensors, {"somebody.else": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"somebody\.else"):
        adapters.resize(odd, tmp_path / "d.safetensors", 4, base="sdxl")
    assert not (tmp_path / "d.safetensors").exists()
    report = adapters.resize(odd, tmp_path / "d.safetensors", 4, base="sdxl", allow_unmatched=True)
    assert report.adapter.unused == ["somebody.else"]


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_vm5_loha_and_lokr_are_refused_or_rebuilt(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(4)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if kind == "loha":
        parts = {"hada_w1_a": some(64, 2), "hada_w1_b": some(2, 64), "hada_w2_a": some(64, 2)}
        parts |= {"hada_w2_b": some(2, 64), "alpha": np.float32(1)}
    else:
        parts = {
            "lokr_w1": some(2, 2),
            "lokr_w2_a": some(32, 3),
            "lokr_w2_b": some(3, 32),
            "alpha": np.float32(1),
        }
    source = write(
        tmp_path / "a.safetensors", {f"{TO_Q}.{k}": v for k, v in parts.items()}, pair(rng, TO_K, 8)
    )
    with pytest.raises(ValueError, match=rf"attn1\.to_q.*{kind}.*rebuild"):
        adapters.resize(source, tmp_path / "b.safetensors", 4, base="sdxl")
    assert not (tmp_path / "b.safetensors").exists()
    report = adapters.resize(source, tmp_path / "b.safetensors", 4, rebuild=True, base="sdxl")
    assert {e.kind for e in report.adapter.entries} == {"lora"}
    mine = deltas(tmp_path / "b.safetensors")
    for path, delta in deltas(source).items():
        assert off(mine[path], best(delta, 4)) < 3e-7


def test_a_rebuilt_convolution_has_its_window(tmp_path: Path) -> None:
    """LoHa of a convolution without a core does not say that it is one; the name table does."""
    rng = np.random.default_rng(6)
    shapes = {"hada_w1_a": (64, 2), "hada_w1_b": (2, 288), "hada_w2_a": (64, 2), "hada_w2_b": (2, 288)}
    tensors = {
        f"{CONV}.{role}": rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()
    }
    source = write(tmp_path / "a.safetensors", tensors, pair(rng, TO_Q, 4))
    adapters.resize(source, tmp_path / "b.safetensors", 4, conv_rank=3, rebuild=True, base="sdxl")
    written = load_file(tmp_path / "b.safetensors")
    assert written[f"{CONV}.lora_down.weight"].shape == (3, 32, 3, 3)
    assert written[f"{CONV}.lora_up.weight"].shape == (64, 3, 1, 1)
    assert off(update(written, CONV), best(deltas(source)[PATHS[CONV]], 3)) < 3e-7


def test_tuckers_core_is_multiplied_in(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = {
        f"{CONV}.lora_down.weight": rng.standard_normal((8, 32, 1, 1)).astype(np.float32),
        f"{CONV}.lora_mid.weight": rng.standard_normal((8, 8, 3, 3)).astype(np.float32),
        f"{CONV}.lora_up.weight": rng.standard_normal((64, 8, 1, 1)).astype(np.float32),
        f"{CONV}.alpha": np.float32(2),
    }
    source = write(tmp_path / "a.safetensors", tensors)
    report = adapters.resize(source, tmp_path / "b.safetensors", 16, conv_rank=4, base="sdxl")
    written = load_file(tmp_path / "b.safetensors")
    assert set(written) == {f"{CONV}.{x}" for x in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert written[f"{CONV}.lora_down.weight"].shape == (4, 32, 3, 3)
    up, mid, down = (tensors[f"{CONV}.lora_{x}.weight"].astype(np.float64) for x in ("up", "mid", "down"))
    window = np.einsum("mnuv,nc->mcuv", mid, down[:, :, 0, 0]).reshape(8, -1)
    expected = 2 / 8 * up[:, :, 0, 0] @ window
    assert off(update(written, CONV), best(expected, 4)) < 3e-7
    assert "Tucker" in report.notes[0]


def test_a_magnitude_and_a_bias_stay(tmp_path: Path) -> None:
    scale = RNG.random((64, 1)).astype(np.float32)
    tensors = pair(RNG, TO_Q, 8, 8) | {f"{TO_Q}.dora_scale": scale}
    source = write(tmp_path / "a.safetensors", tensors)
    adapters.resize(source, tmp_path / "b.safetensors", 4, base="sdxl")
    written = load_file(tmp_path / "b.safetensors")
    assert (written[f"{TO_Q}.dora_scale"] == scale).all()
    assert off(update(written, TO_Q), best(update(tensors, TO_Q), 4)) < 2e-7


def test_vw6_metadata_is_kept_and_updated(tmp_path: Path) -> None:
    given = {
        "format": "pt",
        "ss_network_dim": "8",
        "ss_training_comment": "mine",
        "sshs_model_hash": "old",
        "é": "\n",
    }
    source = write(tmp_path / "a.safetensors", pair(RNG, TO_Q, 8, 4), pair(RNG, CONV, 8, 4), metadata=given)
    adapters.resize(source, tmp_path / "b.safetensors", 4, conv_rank=2, base="sdxl")
    summary = adapters.summary(tmp_path / "b.safetensors", base="sdxl")
    about = summary.metadata
    assert (about["format"], about["é"]) == ("pt", "\n")
    assert about["ss_training_comment"] == "dimension is resized from 8 to 4 (conv: 2); mine"
    assert about["ss_network_dim"] == "4"
    assert float(about["ss_network_alpha"]) in (1.0, 2.0)
    assert about["sshs_model_hash"] == summary.hashes["sshs_model_hash"] != "old"
    header = (tmp_path / "b.safetensors").read_bytes()
    assert (8 + int.from_bytes(header[:8], "little")) % 8 == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    tensors = pair(RNG, TO_Q, 8) | pair(RNG, TO_V, 8)
    tensors[f"{TO_V}.lora_up.weight"][3, 2] = value
    source = write(tmp_path / "a.safetensors", tensors)
    target = tmp_path / "b.safetensors"
    target.write_bytes(b"old")
    with pytest.raises(ValueError, match=rf"{TO_V}\.lora_up\.weight .*NaN"):
        adapters.resize(source, target, 4, base="sdxl")
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 4, "conv_rank": -1}, "conv_rank is -1"),
        ({"rank": 4, "method": "sv_ratio"}, "param is None"),
        ({"rank": 4, "method": "sv", "param": 1.0}, "method is 'sv'"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    source = write(tmp_path / "a.safetensors", pair(RNG, TO_Q, 8))
    with pytest.raises(ValueError, match=message):
        adapters.resize(source, tmp_path / "b.safetensors", base="sdxl", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "b.safetensors").exists()


def test_over_the_source_file(tmp_path: Path) -> None:
    source, tensors = full_file(tmp_path)
    adapters.resize(source, source, 4, base="sdxl")
    assert off(update(load_file(source), TO_Q), best(update(tensors, TO_Q), 4)) < 2e-7


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    source, _ = full_file(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        adapters.resize(source, tmp_path / "nowhere" / "b.safetensors", 4, base="sdxl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]


def test_one_worker_and_several_give_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = full_file(tmp_path)
    calls: list[tuple[int, int]] = []
    adapters.resize(source, tmp_path / "b.safetensors", 4, base="sdxl", progress=lambda *n: calls.append(n))
    monkeypatch.setenv("LORAACCEL_NUM_THREADS", "1")
    adapters.resize(source, tmp_path / "c.safetensors", 4, base="sdxl")
    assert calls == [(i, 5) for i in range(1, 6)]
    mine, theirs = load_file(tmp_path / "b.safetensors"), load_file(tmp_path / "c.safetensors")
    for name in ALL:
        assert off(update(mine, name), update(theirs, name)) < 1e-6

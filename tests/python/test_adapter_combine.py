"""Several adapters as one, and adapters compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_adapters import (
    CONV,
    CROSS_K,
    PATHS,
    SHORTCUT,
    TO_K,
    TO_Q,
    TO_V,
    Tensors,
    best,
    deltas,
    off,
    pair,
    update,
    write,
)

from loraaccel import adapters
from loraaccel.safetensors.numpy import load_file


def two_files(tmp_path: Path, dtype: str = "float32") -> tuple[Path, Path, Tensors, Tensors]:
    """Different ranks and factors; TO_K in the first only, TO_V in the second only."""
    rng = np.random.default_rng(0)
    a = pair(rng, TO_Q, 4, 8, dtype) | pair(rng, TO_K, 4, 2, dtype) | pair(rng, CONV, 4, 4, dtype)
    b = pair(rng, TO_Q, 6, None, dtype) | pair(rng, TO_V, 4, 1, dtype) | pair(rng, CONV, 3, 1, dtype)
    about = {"ss_base_model_version": "sdxl_base_v1-0", "ss_network_dim": "4"}
    return (
        write(tmp_path / "a.safetensors", a, metadata=about | {"ss_output_name": "a"}),
        write(tmp_path / "b.safetensors", b, metadata=about | {"ss_output_name": "b"}),
        a,
        b,
    )


def expected_sum(a: Tensors, b: Tensors, weights: tuple[float, float]) -> dict[str, np.ndarray]:
    sums: dict[str, np.ndarray] = {}
    for tensors, weight in zip((a, b), weights, strict=True):
        for name in {key.split(".")[0] for key in tensors}:
            sums[PATHS[name]] = sums.get(PATHS[name], 0) + weight * update(tensors, name)
    return sums


def test_vm1_one_adapter_with_weight_one_comes_back(tmp_path: Path) -> None:
    source, _, a, _ = two_files(tmp_path)
    report = adapters.combine([(source, 1)], tmp_path / "c.safetensors", base="sdxl")
    written = load_file(tmp_path / "c.safetensors")
    assert {k: v.tobytes() for k, v in written.items()} == {k: v.tobytes() for k, v in a.items()}
    assert report.largest_error == 0


def test_vm1_rank_stabilised_and_biased_adapters_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{stem}.lora_A.weight": rng.standard_normal((4, 16)).astype(np.float32),
        f"{stem}.lora_B.weight": rng.standard_normal((8, 4)).astype(np.float32),
        f"{stem}.lora_B.bias": rng.standard_normal(8).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, "lora_bias": True}
    one = adapters.load(tensors, config=json.dumps(config))
    scale = 6 / np.sqrt(4)
    product = tensors[f"{stem}.lora_B.weight"].astype(np.float64) @ tensors[f"{stem}.lora_A.weight"]
    bias = tensors[f"{stem}.lora_B.bias"]
    for sources, weight in (([(one, 1.0)], 1.0), ([(one, 0.7), (one, 0.5)], 1.2), ([(one, -2.0)], -2.0)):
        result = adapters.combine(sources, tmp_path / "out").adapter
        again = adapters.load(tmp_path / "out")
        for entry in (result.entries[0], again.entries[0]):
            assert off(entry.delta(), weight * scale * product) < 2e-7
            found = entry.scale * np.asarray(entry.tensors["lora_bias"], dtype=np.float64)
            np.testing.assert_allclose(found, weight * scale * bias, rtol=1e-6)


def test_vm1_dora_comes_back_alone_and_is_refused_otherwise(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    dora = pair(rng, TO_Q, 4) | {f"{TO_Q}.dora_scale": rng.random((64, 1)).astype(np.float32)}
    source = write(tmp_path / "a.safetensors", dora)
    other = write(tmp_path / "b.safetensors", pair(rng, TO_Q, 4))
    adapters.combine([(source, 1)], tmp_path / "c.safetensors", base="sdxl")
    written = load_file(tmp_path / "c.safetensors")
    assert all((written[key] == dora[key]).all() for key in dora)
    for sources in ([(source, 0.5)], [(source, 1), (other, 1)], [(other, 1), (source, 1)]):
        with pytest.raises(ValueError, match=rf"{PATHS[TO_Q]}.*not combinable"):
            adapters.combine(sources, tmp_path / "d.safetensors", base="sdxl")
    assert not (tmp_path / "d.safetensors").exists()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-7), ("float16", 5e-4)])
@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, -0.5), (1e-3, 2)])
def test_vm1_the_sum_has_no_cross_terms(
    tmp_path: Path, weights: tuple[float, float], dtype: str, limit: float
) -> None:
    first, second, a, b = two_files(tmp_path, dtype)
    report = adapters.combine(
        [(first, weights[0]), (second, weights[1])], tmp_path / "c.safetensors", base="sdxl"
    )
    written = load_file(tmp_path / "c.safetensors")
    assert {v.dtype for k, v in written.items() if "lora_" in k[-20:]} == {np.dtype(dtype)}
    mine = deltas(tmp_path / "c.safetensors")
    wanted = expected_sum(a, b, weights)
    assert set(mine) == set(wanted)
    layers = {layer.path: layer for layer in report.layers}
    for path, delta in wanted.items():
        error = off(mine[path], delta)
        assert error < limit
        assert layers[path].error == pytest.approx(error, abs=1e-9, rel=1e-3)
    assert layers[PATHS[TO_Q]].rank == 10
    assert float(written[f"{TO_Q}.alpha"]) == 10
    assert (layers[PATHS[TO_K]].sources, layers[PATHS[TO_V]].sources) == ([0], [1])
    assert written[f"{CONV}.lora_down.weight"].shape == (7, 32, 3, 3)


def test_equal_factors_leave_every_number_as_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    a, b = pair(rng, TO_Q, 4, 2, "float16"), pair(rng, TO_Q, 8, 4, "float16")
    sources = [(write(tmp_path / f"{i}.safetensors", x), 0.3) for i, x in enumerate((a, b))]
    report = adapters.combine(sources, tmp_path / "c.safetensors", base="sdxl")
    written = load_file(tmp_path / "c.safetensors")
    for role, axis in (("lora_down", 0), ("lora_up", 1)):
        both = np.concatenate([x[f"{TO_Q}.{role}.weight"] for x in (a, b)], axis=axis)
        assert (written[f"{TO_Q}.{role}.weight"] == both).all()
    assert report.largest_error == 0
    assert off(update(written, TO_Q), 0.3 * (update(a, TO_Q) + update(b, TO_Q))) < 2e-7


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_vm2_a_missing_alpha_is_the_rank(tmp_path: Path, rank: int) -> None:
    tensors = pair(np.random.default_rng(4), TO_Q, rank)
    source = write(tmp_path / "a.safetensors", tensors)
    adapters.combine([(source, 0.5), (source, 0.5)], tmp_path / "b.safetensors", base="sdxl")
    adapters.resize(source, tmp_path / "c.safetensors", rank, base="sdxl")
    adapters.save(adapters.load(source, base="sdxl"), tmp_path / "d.safetensors", "kohya")
    for name, alpha in (("b", rank), ("c", rank), ("d", rank)):
        written = load_file(tmp_path / f"{name}.safetensors")
        assert float(written[f"{TO_Q}.alpha"]) == alpha
        assert off(update(written, TO_Q), update(tensors, TO_Q)) < 2e-7


def test_a_rank_approximates_the_sum_and_says_how_well(tmp_path: Path) -> None:
    first, second, a, b = two_files(tmp_path)
    report = adapters.combine(
        [(first, 0.7), (second, 0.3)], tmp_path / "c.safetensors", rank=3, conv_rank=2, base="sdxl"
    )
    mine = deltas(tmp_path / "c.safetensors")
    written = load_file(tmp_path / "c.safetensors")
    for layer in report.layers:
        wanted = expected_sum(a, b, (0.7, 0.3))[layer.path]
        rank = 2 if layer.path == PATHS[CONV] else 3
        assert layer.rank == rank
        assert off(mine[layer.path], best(wanted, rank)) < 1e-6
        assert layer.error == pytest.approx(off(mine[layer.path], wanted), rel=1e-5)
        name = next(n for n, p in PATHS.items() if p == layer.path)
        sizes = [np.linalg.norm(written[f"{name}.lora_{x}.weight"]) for x in ("up", "down")]
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-5)
        assert float(written[f"{name}.alpha"]) == rank


def test_the_error_of_a_sum_that_cancels_is_relative_to_its_parts(tmp_path: Path) -> None:
    first, _, a, _ = two_files(tmp_path)
    (tmp_path / "again.safetensors").write_bytes(first.read_bytes())
    report = adapters.combine([(first, 0.7), (tmp_path / "again.safetensors", -0.7)], base="sdxl")
    assert len(report.layers) == len(report.adapter.entries) == 3
    for layer, entry in zip(report.layers, report.adapter.entries, strict=True):
        (name,) = [n for n, p in PATHS.items() if p == layer.path]
        parts = 0.7 * np.sqrt(2) * np.linalg.norm(update(a, name))
        assert layer.error == pytest.approx(np.linalg.norm(entry.delta()) / parts, abs=1e-12)
        assert layer.error < 1e-6
    assert len([n for n in report.notes if "cancel each other" in n]) == 3


def test_whole_differences_norms_and_biases_add_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    norm = "lora_unet_input_blocks_4_1_norm"
    a = {f"{TO_K}.diff": some(64, 64), f"{norm}.w_norm": some(64), f"{norm}.b_norm": some(64)}
    b = pair(rng, TO_K, 4, 2) | {f"{norm}.w_norm": some(64), f"{norm}.b_norm": some(64)}
    a |= {f"{TO_Q}.diff_b": some(64)} | pair(rng, TO_Q, 2)
    b |= {f"{TO_Q}.diff_b": some(64)}
    sources = [(write(tmp_path / "a.safetensors", a), 0.5), (write(tmp_path / "b.safetensors", b), 2.0)]
    adapters.combine(sources, tmp_path / "c.safetensors", base="sdxl")
    written = load_file(tmp_path / "c.safetensors")
    for key in (f"{norm}.w_norm", f"{norm}.b_norm", f"{TO_Q}.diff_b"):
        np.testing.assert_allclose(written[key], 0.5 * a[key] + 2 * b[key], rtol=1e-6)
    assert off(written[f"{TO_K}.diff"], 0.5 * a[f"{TO_K}.diff"] + 2 * update(b, TO_K)) < 1e-6
    assert off(update(written, TO_Q), 0.5 * update(a, TO_Q)) < 1e-6


def test_loha_needs_a_rank_beside_another(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    parts = {
        f"{TO_Q}.hada_w{i}_{x}": rng.standard_normal((64, 2)[:: 1 if x == "a" else -1])
        for i in "12"
        for x in "ab"
    }
    loha = {k: v.astype(np.float32) for k, v in parts.items()} | {f"{TO_Q}.alpha": np.float32(1)}
    first = write(tmp_path / "a.safetensors", loha)
    second = write(tmp_path / "b.safetensors", pair(rng, TO_Q, 4))
    mine, other = deltas(first)[PATHS[TO_Q]], deltas(second)[PATHS[TO_Q]]
    with pytest.raises(ValueError, match=rf"{PATHS[TO_Q]} is loha and lora.*rank"):
        adapters.combine([(first, 1), (second, 1)], tmp_path / "c.safetensors", base="sdxl")
    report = adapters.combine([(first, 0.5), (second, 2)], tmp_path / "c.safetensors", rank=5, base="sdxl")
    total = 0.5 * mine + 2 * other
    assert off(deltas(tmp_path / "c.safetensors")[PATHS[TO_Q]], best(total, 5)) < 1e-6
    assert report.layers[0].error == pytest.approx(off(best(total, 5), total), rel=1e-4)
    adapters.combine([(first, 0.25)], tmp_path / "d.safetensors", base="sdxl")
    assert off(deltas(tmp_path / "d.safetensors")[PATHS[TO_Q]], 0.25 * mine) < 1e-6


def test_formats_may_differ(tmp_path: Path) -> None:
    first, second, a, b = two_files(tmp_path)
    adapters.convert(second, tmp_path / "d.safetensors", "diffusers", base="sdxl")
    adapters.combine(
        [(first, 0.7), (tmp_path / "d.safetensors", 0.3)], tmp_path / "c.safetensors", base="sdxl"
    )
    mine = deltas(tmp_path / "c.safetensors")
    for path, delta in expected_sum(a, b, (0.7, 0.3)).items():
        assert off(mine[path], delta) < 2e-7


def test_layers_that_formats_divide_differently_are_combined() -> None:
    """Flux: q, k and v are one matrix in kohya's spelling and three in diffusers'."""
    rng = np.random.default_rng(7)

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    fused = {f"{stem}.lora_down.weight": some(3, 16), f"{stem}.lora_up.weight": some(48, 3)}
    parts = {}
    for x in ("q", "k", "v"):
        parts[f"transformer.transformer_blocks.0.attn.to_{x}.lora_A.weight"] = some(2, 16)
        parts[f"transformer.transformer_blocks.0.attn.to_{x}.lora_B.weight"] = some(16, 2)
    one, two = adapters.load(fused, base="flux"), adapters.load(parts, base="flux")
    result = adapters.combine([(one, 0.5), (two, 2)]).adapter
    assert result.format == "kohya"
    expected = 0.5 * fused[f"{stem}.lora_up.weight"].astype(np.float64) @ fused[f"{stem}.lora_down.weight"]
    keys = [f"transformer.transformer_blocks.0.attn.to_{x}.lora_" for x in ("q", "k", "v")]
    expected += 2 * np.concatenate(
        [parts[k + "B.weight"].astype(np.float64) @ parts[k + "A.weight"] for k in keys]
    )
    assert off(result.entries[0].delta(), expected) < 1e-6
    report = adapters.diff(one, two)
    assert report.only_a == report.only_b == []


def test_metadata_says_what_is_the_same_and_the_new_rank(tmp_path: Path) -> None:
    first, second, _, _ = two_files(tmp_path)
    about = adapters.combine([(first, 1), (second, 1)], base="sdxl").adapter.metadata
    assert about == {
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_dim": "Dynamic",
        "ss_network_alpha": "Dynamic",
    }


def test_bad_sums_are_named_and_the_old_file_stays(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    first, second, _, b = two_files(tmp_path)
    narrow = pair(rng, TO_Q, 4)
    narrow[f"{TO_Q}.lora_down.weight"] = narrow[f"{TO_Q}.lora_down.weight"][:, :32]
    small = write(tmp_path / "small.safetensors", narrow)
    b[f"{TO_V}.lora_up.weight"][0, 0] = np.nan
    broken = write(tmp_path / "nan.safetensors", b)
    flux = {f"lora_unet_double_blocks_0_img_attn_qkv.lora_{x}.weight": np.ones(s, np.float32) for x, s in
            (("down", (2, 16)), ("up", (48, 2)))}  # fmt: skip
    other = adapters.load(flux, base="flux")
    target = tmp_path / "c.safetensors"
    target.write_bytes(b"old")
    for sources, message in (
        ([(first, 1), (small, 1)], rf"{PATHS[TO_Q]} changes a weight of 64 x \(32,\) in adapter 2"),
        ([(first, 0.5), (broken, 0.5)], "NaN"),
        ([(first, 1), (other, 1)], "adapter 1 is of sdxl and adapter 2 of flux"),
        ([(first, float("nan"))], "weight of adapter 1 is nan"),
        (
            [(first, 1), (second, 1e300)],
            r"weight of adapter 2 is 1e\+300, expected a number that float32 holds",
        ),
        ([(first, 0)], "all weights are 0"),
        ([], "no adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            adapters.combine(sources, target, rank=2, base="sdxl")
    assert target.read_bytes() == b"old"
    report = adapters.combine([(first, 1), (second, 0)], base="sdxl")
    assert report.notes == ["adapter 2 has weight 0 and is left out"]
    assert off(report.adapter.entries[0].delta(), deltas(first)[report.adapter.entries[0].path]) == 0


def test_differences(tmp_path: Path) -> None:
    first, second, a, b = two_files(tmp_path)
    report = adapters.diff(first, second, base="sdxl")
    assert report.only_a == [f"unet.{PATHS[TO_K]}"]
    assert report.only_b == [f"unet.{PATHS[TO_V]}"]
    mine, theirs = expected_sum(a, b, (1, 0)), expected_sum(a, b, (0, 1))
    for layer in report.layers:
        x, y = mine[layer.path], theirs[layer.path]
        norms = [np.linalg.norm(x), np.linalg.norm(y)]
        assert (layer.norm_a, layer.norm_b) == pytest.approx(norms, rel=1e-9)
        assert layer.distance == pytest.approx(np.linalg.norm(x - y), rel=1e-9)
        product = norms[0] * norms[1]
        assert layer.cosine == pytest.approx(np.vdot(x, y) / product if product else 0, abs=1e-9)
    total = np.sqrt(sum(np.linalg.norm(mine[p] - theirs[p]) ** 2 for p in mine))
    assert report.distance == pytest.approx(total, rel=1e-9)


def test_equal_updates_of_other_kinds_and_factors_do_not_differ(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    tensors = pair(rng, TO_Q, 4, 4) | pair(rng, SHORTCUT, 4, 4) | pair(rng, CROSS_K, 4, 4)
    turn, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    other = {k: v.astype(np.float64) for k, v in tensors.items()}
    other[f"{TO_Q}.lora_down.weight"] = turn @ other[f"{TO_Q}.lora_down.weight"]
    other[f"{TO_Q}.lora_up.weight"] = other[f"{TO_Q}.lora_up.weight"] @ turn.T
    del other[f"{CROSS_K}.lora_down.weight"], other[f"{CROSS_K}.lora_up.weight"], other[f"{CROSS_K}.alpha"]
    other[f"{CROSS_K}.diff"] = update(tensors, CROSS_K)
    one = write(tmp_path / "a.safetensors", tensors)
    two = write(tmp_path / "b.safetensors", other)
    report = adapters.diff(one, two, base="sdxl")
    assert len(report.layers) == 3
    assert report.largest < 1e-14
    assert all(layer.cosine == pytest.approx(1) for layer in report.layers)
    assert adapters.diff(one, one, base="sdxl").largest < 1e-15


def test_magnitudes_are_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    tensors = pair(rng, TO_Q, 4) | {f"{TO_Q}.dora_scale": np.ones((64, 1), np.float32)}
    one = write(tmp_path / "a.safetensors", tensors)
    tensors[f"{TO_Q}.dora_scale"] = np.full((64, 1), 1.5, np.float32)
    two = write(tmp_path / "b.safetensors", tensors)
    (layer,) = adapters.diff(one, two, base="sdxl").layers
    assert layer.vectors == {"dora_scale": 0.5}

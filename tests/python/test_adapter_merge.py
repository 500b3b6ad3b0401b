"""Adapters merged into base models, and taken out again."""

from __future__ import annotations

import itertools
import json

import adapter_files
import numpy as np
import pytest
import safetensors.torch
import torch
from small_models import load_plain, plain, save, weight

from loraaccel import adapters

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
EPS = float(np.finfo(np.float32).eps)


def rounded(value: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(value).to(dtype)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> int:
    size = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}[a.dtype]
    return int((a.contiguous().view(size).long() - b.contiguous().view(size).long()).abs().max())


@pytest.mark.parametrize("dtype", list(FLOATS))
@pytest.mark.parametrize("shape", [(64, 64), (33, 7), (1, 5), (5, 1)])
def test_the_merged_weight_is_the_float64_sum_rounded_once(dtype, shape, tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(*shape, dtype=FLOATS[dtype]))
    adapter = load_plain("l", *shape)
    report = adapters.merge(base, adapter, tmp_path / "m.safetensors", strength=0.75)
    assert (report.changed, report.tensors, report.unused) == (1, 1, [])
    before, after = (safetensors.torch.load_file(p)["l.weight"] for p in (base, tmp_path / "m.safetensors"))
    exact = before.double().numpy() + 0.75 * adapter.entries[0].delta()
    assert after.dtype == FLOATS[dtype]
    if dtype == "F64":
        np.testing.assert_allclose(after.numpy(), exact, rtol=0, atol=1e-15)
    else:
        terms = np.abs(before.double().numpy()) + 2 * 0.75 * 4 * np.abs(exact).max()
        unit = {"F16": 2.0**-11, "BF16": 2.0**-8, "F32": 2.0**-24}[dtype]
        tolerance = unit * np.abs(exact) + 8 * 2.0**-24 * 2 * terms
        assert (np.abs(after.double().numpy() - exact) <= tolerance).all()
        different = (after != rounded(exact, FLOATS[dtype])).double().mean()
        assert dtype == "F32" or different < 0.01


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("cycles", [1, 10, 100, 1000])
def test_va1_merging_and_taking_out_gives_the_same_bytes(dtype, cycles, tmp_path):
    base = save(
        tmp_path / "b.safetensors", l__weight=weight(64, 64, dtype=FLOATS[dtype]), other=torch.arange(5)
    )
    original = base.read_bytes()
    current, merged, kept = base, tmp_path / "m.safetensors", tmp_path / "k.safetensors"
    for cycle in range(cycles):
        adapter = load_plain("l", 64, 64, seed=cycle)
        report = adapters.merge(current, adapter, merged, keep=kept)
        assert report.changed == 1
        assert merged.read_bytes() != original
        taken = adapters.unmerge(merged, kept, tmp_path / "u.safetensors")
        assert (taken.restored, taken.tensors) == (1, 2)
        current = tmp_path / "u.safetensors"
        assert current.read_bytes() == original


def test_va1_the_header_comes_back_too(tmp_path):
    """Metadata, order and spaces of another writer's header."""
    tensors = {"b": torch.ones(2, 2), "a": torch.zeros(3)}
    header = {"b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    header |= {
        "a": {"data_offsets": [16, 28], "shape": [3], "dtype": "F32"},
        "__metadata__": {"z": "1", "a": "2"},
    }
    text = json.dumps(header, indent=3).encode()
    data = tensors["b"].numpy().tobytes() + tensors["a"].numpy().tobytes()
    base = tmp_path / "b.safetensors"
    base.write_bytes(len(text).to_bytes(8, "little") + text + data)
    tensors_of, config = plain("layer", 2, 2)
    renamed = {k.replace("layer", "l.x"): t for k, t in tensors_of.items()}
    base.write_bytes(base.read_bytes().replace(b'"b"', b'"l.x.weight"'))
    head = text.replace(b'"b"', b'"l.x.weight"')
    base.write_bytes(len(head).to_bytes(8, "little") + head + data)
    original = base.read_bytes()
    adapter = adapters.load(renamed, config=config)
    adapters.merge(base, adapter, tmp_path / "m.safetensors", keep=tmp_path / "k.safetensors")
    adapters.unmerge(tmp_path / "m.safetensors", tmp_path / "k.safetensors", tmp_path / "u.safetensors")
    assert (tmp_path / "u.safetensors").read_bytes() == original


def test_va1_a_kept_file_of_another_merge_is_refused(tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(8, 8))
    other = save(tmp_path / "c.safetensors", l__weight=weight(8, 8, seed=5))
    adapter = load_plain("l", 8, 8)
    adapters.merge(base, adapter, tmp_path / "m.safetensors", keep=tmp_path / "k.safetensors")
    adapters.merge(other, adapter, tmp_path / "n.safetensors", keep=tmp_path / "l.safetensors")
    with pytest.raises(ValueError, match=r"l\.safetensors was not kept when .*m\.safetensors"):
        adapters.unmerge(tmp_path / "m.safetensors", tmp_path / "l.safetensors", tmp_path / "u.safetensors")
    assert not (tmp_path / "u.safetensors").exists()
    with pytest.raises(ValueError, match="was not kept by a merge"):
        adapters.unmerge(tmp_path / "m.safetensors", base, tmp_path / "u.safetensors")


def bad_second_layer(kind: str) -> adapters.Adapter:
    tensors = {}
    for i in range(3):
        width = 9 if kind == "shape" and i == 1 else 8
        layer, config = plain(f"l{i}", 8, width, seed=i)
        tensors |= layer
    if kind == "nan":
        tensors["base_model.model.l1.lora_B.weight"][3, 1] = float("nan")
    if kind == "bias":
        tensors["base_model.model.l1.lora_B.bias"] = torch.full((8,), float("nan"))
    return adapters.load(tensors, config=config)


@pytest.mark.parametrize("kind", ["shape", "nan", "bias"])
@pytest.mark.parametrize("exists", [False, True])
def test_va2_a_failed_merge_changes_nothing(kind, exists, tmp_path):
    biases = {f"l{i}__bias": torch.zeros(8) for i in range(3)}
    base = save(
        tmp_path / "b.safetensors", **{f"l{i}__weight": weight(8, 8, seed=i) for i in range(3)}, **biases
    )
    target, kept = tmp_path / "m.safetensors", tmp_path / "k.safetensors"
    if exists:
        target.write_bytes(b"old target")
        kept.write_bytes(b"old kept")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="l1"):
        adapters.merge(base, bad_second_layer(kind), target, keep=kept)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_va2_a_merge_onto_the_base_itself_is_a_replacement(tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(8, 8))
    before = safetensors.torch.load_file(base)["l.weight"].clone()
    adapter = load_plain("l", 8, 8)
    adapters.merge(base, adapter, base, keep=tmp_path / "k.safetensors")
    after = safetensors.torch.load_file(base)["l.weight"]
    assert not torch.equal(before, after)
    adapters.unmerge(base, tmp_path / "k.safetensors", base)
    assert torch.equal(safetensors.torch.load_file(base)["l.weight"], before)


def test_va6_quantised_bases_are_refused_by_name(tmp_path):
    integers = save(tmp_path / "i.safetensors", l__weight=torch.ones(8, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"i\.safetensors.*l\.weight"):
        adapters.merge(integers, load_plain("l", 8, 8), tmp_path / "m.safetensors")
    scaled = save(
        tmp_path / "s.safetensors",
        l__weight=weight(8, 8).to(torch.float8_e4m3fn),
        l__scale_weight=torch.tensor(0.1),
    )
    with pytest.raises(ValueError, match=r"l\.weight has a scale of its own, l\.scale_weight"):
        adapters.merge(scaled, load_plain("l", 8, 8), tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_va6_float8_without_scales_is_merged_saturating_and_says_how_far_it_rounded(dtype, tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=(weight(64, 64) * 50).to(dtype))
    adapter = load_plain("l", 64, 64, scale=20.0)
    report = adapters.merge(base, adapter, tmp_path / "m.safetensors", keep=tmp_path / "k.safetensors")
    before, after = (safetensors.torch.load_file(p)["l.weight"] for p in (base, tmp_path / "m.safetensors"))
    exact = (before.float().double().numpy() + adapter.entries[0].delta()).astype(np.float32)
    largest = torch.finfo(dtype).max
    expected = torch.from_numpy(exact).clamp(-largest, largest).to(dtype)
    assert (expected.float() != after.float()).double().mean() < 0.002
    assert len(report.notes) == 1
    assert report.notes[0].startswith("l.weight: rounded to F8_")
    error = np.abs(after.float().numpy() - np.clip(exact, -largest, largest)).max()
    assert float(report.notes[0].rpartition(" ")[2]) == pytest.approx(error, rel=1e-3)
    adapters.unmerge(tmp_path / "m.safetensors", tmp_path / "k.safetensors", tmp_path / "u.safetensors")
    assert (tmp_path / "u.safetensors").read_bytes() == base.read_bytes()


def test_dora_of_the_hand_example(tmp_path):
    name = "lora_unet_l"
    tensors = {
        f"{name}.lora_up.weight": torch.tensor([[1.0], [0.0]]),
        f"{name}.lora_down.weight": torch.tensor([[0.0, 1.0]]),
        f"{name}.alpha": torch.tensor(1.0),
        f"{name}.dora_scale": torch.tensor([[10.0], [2.0]]),
    }
    base = save(tmp_path / "b.safetensors", l__weight=torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    adapters.merge(base, adapters.load(tensors, modules=["l"]), tmp_path / "m.safetensors")
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")["l.weight"]
    np.testing.assert_allclose(merged.numpy(), [[5.14495755, 8.57492926], [0, 2]], rtol=1e-6)


def test_dora_over_inputs_and_half_strength(tmp_path):
    w = weight(6, 5)
    up, down, magnitude = weight(6, 2, seed=1) * 20, weight(2, 5, seed=2) * 20, weight(1, 5, seed=3).abs() + 1
    name = "lora_unet_l"
    tensors = {
        f"{name}.lora_up.weight": up,
        f"{name}.lora_down.weight": down,
        f"{name}.dora_scale": magnitude,
    }
    base = save(tmp_path / "b.safetensors", l__weight=w)
    adapters.merge(base, adapters.load(tensors, modules=["l"]), tmp_path / "m.safetensors", strength=0.5)
    v = w.double() + up.double() @ down.double()
    full = v * magnitude.double() / (v.norm(dim=0, keepdim=True) + EPS)
    expected = w.double() + 0.5 * (full - w.double())
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")["l.weight"]
    np.testing.assert_allclose(merged.double().numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


def kinds() -> dict[str, tuple[dict[str, torch.Tensor], np.ndarray]]:
    """Tensors of a layer [12, 10] by kind, and its update in float64."""
    g = adapter_files.seeded(3)

    def n(*shape: int) -> torch.Tensor:
        return adapter_files.numbers(g, *shape)

    def d(t: torch.Tensor) -> np.ndarray:
        return t.double().numpy()

    a1, b1, a2, b2 = n(12, 2), n(2, 10), n(12, 2), n(2, 10)
    w1, w2, w2a, w2b = n(3, 2), n(4, 5), n(4, 2), n(2, 5)
    diff = n(12, 10)
    return {
        "loha": (
            {"hada_w1_a": a1, "hada_w1_b": b1, "hada_w2_a": a2, "hada_w2_b": b2, "alpha": torch.tensor(1.0)},
            0.5 * (d(a1) @ d(b1)) * (d(a2) @ d(b2)),
        ),
        "lokr": ({"lokr_w1": w1, "lokr_w2": w2, "alpha": torch.tensor(9.0)}, np.kron(d(w1), d(w2))),
        "lokr-pair": (
            {"lokr_w1": w1, "lokr_w2_a": w2a, "lokr_w2_b": w2b, "alpha": torch.tensor(1.0)},
            0.5 * np.kron(d(w1), d(w2a) @ d(w2b)),
        ),
        "full": ({"diff": diff}, d(diff)),
    }


@pytest.mark.parametrize("kind", ["loha", "lokr", "lokr-pair", "full"])
def test_every_kind_is_merged(kind, tmp_path):
    tensors, delta = kinds()[kind]
    adapter = adapters.load({f"lora_unet_l.{k}": t for k, t in tensors.items()}, modules=["l"])
    np.testing.assert_allclose(adapter.entries[0].delta(), delta, rtol=1e-15, atol=1e-15)
    base = save(tmp_path / "b.safetensors", l__weight=weight(12, 10))
    adapters.merge(base, adapter, tmp_path / "m.safetensors", strength=0.5)
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")["l.weight"]
    expected = weight(12, 10).double().numpy() + 0.5 * delta
    np.testing.assert_allclose(merged.double().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_tucker_convolution_and_biases_and_norms(tmp_path):
    g = adapter_files.seeded(4)
    up, mid, down = (adapter_files.numbers(g, *s) for s in ((6, 2, 1, 1), (2, 2, 3, 3), (2, 5, 1, 1)))
    tensors = {
        "c.lora_up.weight": up,
        "c.lora_mid.weight": mid,
        "c.lora_down.weight": down,
        "c.alpha": torch.tensor(2.0),
    }
    tensors |= {"c.diff_b": adapter_files.numbers(g, 6), "n.w_norm": adapter_files.numbers(g, 4)}
    tensors |= {"n.b_norm": adapter_files.numbers(g, 4)}
    adapter = adapters.load({f"lora_unet_{k}": t for k, t in tensors.items()}, modules=["c", "n"])
    parts = {
        "c__weight": weight(6, 5, 3, 3),
        "c__bias": weight(6),
        "n__weight": torch.ones(4),
        "n__bias": torch.zeros(4),
    }
    base = save(tmp_path / "b.safetensors", **parts)
    report = adapters.merge(base, adapter, tmp_path / "m.safetensors")
    assert report.changed == 4
    merged = safetensors.torch.load_file(tmp_path / "m.safetensors")
    delta = torch.einsum("or,rsuv,si->oiuv", up.double()[..., 0, 0], mid.double(), down.double()[..., 0, 0])
    np.testing.assert_allclose(
        merged["c.weight"].double(), parts["c__weight"].double() + delta, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(merged["c.bias"], parts["c__bias"] + tensors["c.diff_b"])
    torch.testing.assert_close(merged["n.weight"], 1 + tensors["n.w_norm"])
    torch.testing.assert_close(merged["n.bias"], tensors["n.b_norm"])


def test_several_adapters_are_one_sum_and_their_order_does_not_matter(tmp_path):
    base = save(tmp_path / "b.safetensors", l__weight=weight(16, 16, dtype=torch.bfloat16))
    pairs = [(load_plain("l", 16, 16, rank=r, seed=r), s) for r, s in ((1, 0.5), (3, -1.0), (8, 2.0))]
    results = []
    for order in itertools.permutations(pairs):
        adapters.merge(base, order, tmp_path / "m.safetensors")
        results.append(safetensors.torch.load_file(tmp_path / "m.safetensors")["l.weight"].clone())
    exact = weight(16, 16, dtype=torch.bfloat16).double().numpy() + sum(
        s * a.entries[0].delta() for a, s in pairs
    )
    for result in results:
        assert ulp_distance(result, rounded(exact, torch.bfloat16)) <= 1


def test_shards_and_a_pipeline_folder_keep_their_form(tmp_path):
    base = tmp_path / "model"
    (base / "unet").mkdir(parents=True)
    save(base / "model-00001-of-00002.safetensors", a__weight=weight(8, 8))
    save(base / "model-00002-of-00002.safetensors", b__weight=weight(8, 8, seed=1))
    (base / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    tensors = {**plain("a", 8, 8)[0], **plain("b", 8, 8, seed=2)[0]}
    adapter = adapters.load(tensors, config=plain("a", 8, 8)[1])
    report = adapters.merge(base, adapter, tmp_path / "out")
    assert report.changed == 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in base.iterdir() if p.name != "unet"
    )
    for entry, name, seed in zip(adapter.entries, ("1", "2"), (0, 1), strict=True):
        merged = safetensors.torch.load_file(tmp_path / "out" / f"model-0000{name}-of-00002.safetensors")
        expected = weight(8, 8, seed=seed).double().numpy() + entry.delta()
        np.testing.assert_allclose(
            merged[f"{entry.path}.weight"].double().numpy(), expected, rtol=1e-6, atol=1e-7
        )


def test_layers_that_the_base_has_not_are_an_error_unless_allowed(tmp_path):
    base = save(tmp_path / "b.safetensors", a__weight=weight(8, 8))
    adapter = adapters.load({**plain("a", 8, 8)[0], **plain("b", 8, 8)[0]})
    with pytest.raises(ValueError, match=r"no weights for 1 layers of the adapter: .*b"):
        adapters.merge(base, adapter, tmp_path / "m.safetensors")
    report = adapters.merge(base, adapter, tmp_path / "m.safetensors", allow_unmatched=True)
    assert (report.changed, len(report.unused)) == (1, 1)


def test_a_missing_base_is_an_oserror_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        adapters.merge(tmp_path / "none.safetensors", load_plain("a", 8, 8), tmp_path / "m.safetensors")

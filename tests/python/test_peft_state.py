"""A patched model follows what PEFT does to its adapters, without being patched again."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from peft_models import (
    Host,
    Mlp,
    add_adapter,
    check_layer,
    config,
    counted,
    lora_host,
    lora_layers,
    lora_model,
    plain,
    results,
    the_layer,
)  # fmt: skip
from torch import Tensor, nn

import loraaccel


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def patched_host(*sizes: int, **options: object) -> tuple[PeftModel, nn.Module]:
    model = lora_host(*sizes, **options)
    loraaccel.patch(model, strict=True)
    return model, the_layer(model)


def expect(model: nn.Module, x: Tensor, **calls: int) -> Tensor:
    """The model's output, after these calls were counted and nothing else."""
    with counted() as found:
        y = model(x)
    assert found == calls
    return y


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_set_adapter() -> None:
    model, layer = patched_host()
    add_adapter(model, "b", r=7, lora_alpha=3)
    x = x_of()
    for active in ("b", "default", "b"):
        model.set_adapter(active)
        check_layer(layer, x)
        got = results(layer, layer, x)
        assert [n for n in got if "lora" in n] == [
            f"lora_A.{active}.weight",
            f"lora_B.{active}.weight",
        ]  # VT5
    layer.set_adapter(["b", "default"])
    check_layer(layer, x)


def test_adapters_added_after_patch() -> None:
    """On layers that are patched: at once. On layers that get their first LoRA: after another patch."""
    model = lora_model(Mlp, target_modules=["up"])
    loraaccel.patch(model)
    add_adapter(model, "b")
    model.add_adapter("c", config(target_modules=["up", "down"], r=3))
    x = x_of(12)
    model.set_adapter("b")
    expect(model, x, lora_linear=1)
    model.set_adapter("c")
    expect(model, x, lora_linear=1)
    assert loraaccel.patch(model).num_fused == 2
    got = expect(model, x, lora_linear=2)
    assert loraaccel.unpatch(model) == 2
    torch.testing.assert_close(got, model(x))


def test_delete_adapter() -> None:
    model, layer = patched_host()
    add_adapter(model, "b")
    model.set_adapter("b")
    model.delete_adapter("b")
    check_layer(layer, x_of())
    model.delete_adapter("default")
    assert torch.equal(expect(layer, x_of(), no_active_adapter=1), layer.base_layer(x_of()))


def test_load_adapter(tmp_path: Path) -> None:
    donor = lora_host(seed=5, r=6)
    donor.save_pretrained(tmp_path)
    model, layer = patched_host()
    model.load_adapter(tmp_path, "b")
    check_layer(layer, x_of())
    model.set_adapter("b")
    check_layer(layer, x_of())
    assert torch.equal(layer.lora_A["b"].weight, the_layer(donor).lora_A["default"].weight)


def test_va3_loading_leaves_the_first_adapter_alone(tmp_path: Path) -> None:
    lora_host(seed=5).save_pretrained(tmp_path)
    model, layer = patched_host()
    layer.requires_grad_(False)
    model.load_adapter(tmp_path, "b", is_trainable=True)
    model.load_adapter(tmp_path, "c")
    assert {n: p.requires_grad for n, p in layer.named_parameters() if "lora" in n} == {
        f"lora_{part}.{name}.weight": name == "b" for part in "AB" for name in ("default", "b", "c")
    }
    assert model.active_adapters == ["default"]
    before = {n: p.clone() for n, p in model.named_parameters()}
    layer._active_adapter = ["default", "b", "c"]  # set_adapter would make them all trainable
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expect(model, x_of(), lora_linear=1).square().sum().backward()
    optimizer.step()
    changed = {n.rpartition("proj.")[2] for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"lora_A.b.weight", "lora_B.b.weight"}
    check_layer(layer, x_of())


@pytest.mark.parametrize("kind", ["linear", "cat", "svd"])
def test_add_weighted_adapter(kind: str) -> None:
    model, layer = patched_host()
    add_adapter(model, "b", r=4 if kind == "linear" else 7)
    model.add_weighted_adapter(
        ["default", "b"], [0.7, -0.3 if kind == "cat" else 0.3], "sum", combination_type=kind
    )
    model.set_adapter("sum")
    assert layer.lora_A["sum"].weight.any()
    check_layer(layer, x_of())


def test_adapter_names_that_look_like_something_else() -> None:
    model, layer = patched_host()
    for name in ("weight", "bias", "lora_A", "base_layer", "__base__", "0"):
        add_adapter(model, name, r=3)
        model.set_adapter(name)
        check_layer(layer, x_of())


def test_replaced_weights_are_followed() -> None:
    """Nothing is kept from the time of patching: other Parameters, .data, load_state_dict(assign=True), dtype."""
    model, layer = patched_host()
    x = x_of()
    layer.base_layer.weight = nn.Parameter(torch.randn(16, 24), requires_grad=False)
    layer.lora_B["default"].weight = nn.Parameter(torch.randn(16, 4))
    check_layer(layer, x)
    layer.lora_A["default"].weight.data = torch.randn(4, 24)
    layer.base_layer.bias = None
    check_layer(layer, x)
    state = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(layer.base_layer.weight, state["base_model.model.proj.base_layer.weight"])
    check_layer(layer, x)
    layer.base_layer = nn.Linear(24, 16, bias=False)
    layer.lora_A["default"] = nn.Linear(24, 9, bias=False)
    layer.lora_B["default"] = nn.Linear(9, 16, bias=False)
    check_layer(layer, x)
    model.double()
    check_layer(layer, x.double())
    model.bfloat16()
    check_layer(layer, x.bfloat16())


@pytest.mark.parametrize("how", ["attribute", "buffer"])
@pytest.mark.parametrize("inner", ["base_layer", "lora_A.default", "lora_B.default"])
def test_weights_that_are_no_parameters(inner: str, how: str) -> None:
    """FSDP and hypernetworks put tensors where nn.Linear had parameters."""
    _, layer = patched_host(8, 6)
    linear = layer.get_submodule(inner)
    weight = linear.weight.detach().clone()
    del linear.weight
    if how == "buffer":
        linear.register_buffer("weight", weight)
    else:
        linear.weight = weight
    torch.testing.assert_close(layer(x_of(8)), plain(layer, x_of(8)))
    assert len(loraaccel.patch(layer).modules) == 1


def test_low_cpu_mem_usage(tmp_path: Path) -> None:
    """Patched while the adapter is on the meta device; the weights that are loaded later are other objects."""
    donor = lora_host(seed=5)
    donor.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = PeftModel.from_pretrained(Host(24, 16, True), tmp_path, low_cpu_mem_usage=True, is_trainable=True)
    loraaccel.patch(model, strict=True)
    check_layer(the_layer(model), x_of())
    host = Host(24, 16, True)
    model = peft.inject_adapter_in_model(config(target_modules=["proj"]), host, low_cpu_mem_usage=True)
    layer = the_layer(model)
    assert layer.lora_A["default"].weight.is_meta
    loraaccel.patch(model)
    state = {
        k.replace("base_model.model.", "").replace(".default", ""): v
        for k, v in donor.state_dict().items()
        if "lora" in k
    }
    peft.set_peft_model_state_dict(model, state, low_cpu_mem_usage=True)
    assert torch.equal(layer.lora_A["default"].weight, the_layer(donor).lora_A["default"].weight)
    check_layer(layer, x_of())


# ---- merging and switching off ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge(safe: bool) -> None:
    model, layer = patched_host()
    x = x_of()
    before = expect(model, x, lora_linear=1)
    weight = layer.base_layer.weight.clone()
    model.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(expect(model, x, merged=1), before)
    assert not torch.equal(layer.base_layer.weight, weight)
    model.unmerge_adapter()
    torch.testing.assert_close(layer.base_layer.weight, weight)
    check_layer(layer, x)


def test_va2_failed_safe_merge_changes_nothing() -> None:
    model, layer = patched_host()
    weight = layer.base_layer.weight.clone()
    before = layer.lora_B["default"].weight.clone()
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter(safe_merge=True)
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(before)
    assert torch.equal(layer.base_layer.weight, weight)
    check_layer(layer, x_of())


def test_merge_and_unload_leaves_plain_modules() -> None:
    model = lora_model(Mlp)
    x = x_of(12)
    own = model(x)
    loraaccel.patch(model)
    merged = model.merge_and_unload()
    assert [type(m) for m in (merged.up, merged.down)] == [nn.Linear, nn.Linear]
    assert not any("_loraaccel" in m.__dict__ for m in merged.modules())
    torch.testing.assert_close(expect(merged, x), own, rtol=1e-4, atol=1e-5)


def test_disable_adapter() -> None:
    model, layer = patched_host()
    x = x_of()
    with model.disable_adapter():
        assert torch.equal(expect(model, x, disabled=1), layer.base_layer(x))
    check_layer(layer, x)
    model.base_model.disable_adapter_layers()
    expect(model, x, disabled=1)
    model.base_model.enable_adapter_layers()
    check_layer(layer, x)


def test_disabled_while_merged_unmerges_in_forward() -> None:
    model, layer = patched_host()
    x, weight = x_of(), layer.base_layer.weight.clone()
    model.merge_adapter()
    with model.disable_adapter():
        expect(model, x, disabled=1)
        assert not layer.merged
    torch.testing.assert_close(layer.base_layer.weight, weight)


# ---- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3, 16, 64])
def test_vn2_scale_survives_rescaling(rank: int, rslora: bool) -> None:
    """alpha 16: s = 16 / sqrt(r) with rank-stabilised scaling, 16 / r without."""
    _, layer = patched_host(r=rank, lora_alpha=16, use_rslora=rslora)
    s = 16 / (math.sqrt(rank) if rslora else rank)
    x = x_of()
    delta = plain(layer, x) - layer.base_layer(x)
    steps = [
        (lambda: None, s),
        (lambda: layer.set_scale("default", 0.5), s * 0.5),
        (lambda: layer.set_scale("default", 1.0), s),
        (lambda: layer.scale_layer(3), s * 3),
        (lambda: layer.unscale_layer(3), s),
        (lambda: layer.scale_layer(0.25), s * 0.25),
        (layer.unscale_layer, s),
        (lambda: layer.set_scale("default", 0), 0.0),
    ]
    for change, expected in steps:
        change()
        assert layer.scaling["default"] == pytest.approx(expected, rel=1e-15)
        torch.testing.assert_close(
            layer(x), layer.base_layer(x) + delta * (expected / s), rtol=1e-5, atol=1e-5
        )
    layer.set_scale("default", 1.0)
    check_layer(layer, x)


def test_vn2_values_of_the_case() -> None:
    model, layer = patched_host(r=64, lora_alpha=16, use_rslora=True)
    found = [layer.scaling["default"]]
    for scale in (0.5, 1.0):
        layer.set_scale("default", scale)
        found.append(layer.scaling["default"])
    layer.unscale_layer()
    assert [*found, layer.scaling["default"]] == [2.0, 1.0, 2.0, 2.0]
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.base_layer.bias.zero_()
        layer.lora_A["default"].weight.fill_(1)
        layer.lora_B["default"].weight.fill_(1)
    assert set(model(torch.ones(2, 24)).flatten().tolist()) == {2.0 * 64 * 24}


def test_strength_zero_is_the_base_model_bit_for_bit() -> None:
    """PEFT's own suite holds it to that (test_helpers.py::test_scaling_set_to_zero)."""
    from peft.helpers import rescale_adapter_scale

    model, layer = patched_host(256, 64)
    add_adapter(model, "b")
    layer.set_adapter(["default", "b"])
    x = x_of(256, 33).requires_grad_()
    with rescale_adapter_scale(model, 0.0), counted() as calls:
        got = results(model, model, x)
    assert calls == {"zero_scaling": 1}
    assert torch.equal(got["y"], layer.base_layer(x))
    assert all(got[n] is not None and not got[n].any() for n in got if "lora" in n)


# ---- hot-swapping ----------------------------------------------------------------------------------------------------


def test_hotswap(tmp_path: Path) -> None:
    """prepare_model_for_compiled_hotswap makes the scaling a tensor and pads ranks; it stays alpha / own rank."""
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    donor = lora_host(seed=5, r=7, lora_alpha=3)
    donor.save_pretrained(tmp_path)
    model, layer = patched_host(r=4)
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    assert isinstance(layer.scaling["default"], Tensor)
    assert layer.lora_A["default"].weight.shape == (8, 24)
    check_layer(layer, x_of())
    hotswap_adapter(model, tmp_path, adapter_name="default")
    assert float(layer.scaling["default"]) == pytest.approx(3 / 7)
    check_layer(layer, x_of())
    other = the_layer(donor)
    delta = other(x_of()) - other.base_layer(x_of())
    torch.testing.assert_close(layer(x_of()) - layer.base_layer(x_of()), delta, rtol=1e-4, atol=1e-5)


# ---- mixed batches ---------------------------------------------------------------------------------------------------


def test_mixed_batch() -> None:
    model, layer = patched_host()
    add_adapter(model, "b", r=7)
    model.eval()
    x = x_of()
    names = ["b", "__base__", "default", "b", "__base__"]
    with counted() as calls:
        got = model(x, adapter_names=names)
    assert calls == {"lora_linear_batched": 1}
    for i, name in enumerate(names):
        if name == "__base__":
            expected = layer.base_layer(x[i])
        else:
            model.set_adapter(name)
            expected = plain(layer, x[i])
        torch.testing.assert_close(got[i], expected)
    with pytest.raises(ValueError, match="adapter_names"):
        model(x, adapter_names=["b"])
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        model(x, adapter_names=names)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_va4_state_dict_and_saved_files_are_the_same_while_patched(tmp_path: Path) -> None:
    model = lora_model(Mlp)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "plain")
    loraaccel.patch(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())
    model.save_pretrained(tmp_path / "patched")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(Mlp(), tmp_path / "patched")
    loraaccel.patch(again, strict=True)
    x = x_of(12)
    assert torch.equal(again(x), model(x))
    other = lora_model(Mlp, seed=9)
    loraaccel.patch(other)
    other.load_state_dict(before)
    assert torch.equal(other(x), model(x))


def test_deep_copies_follow_their_own_state() -> None:
    model, layer = patched_host()
    twin = copy.deepcopy(model)
    twin.set_adapter("default")
    the_layer(twin).set_scale("default", 0)
    x = x_of()
    torch.testing.assert_close(twin(x), layer.base_layer(x))
    assert (model(x) - layer.base_layer(x)).norm() > 1
    twin.disable_adapter_layers()
    expect(twin, x, disabled=1)
    expect(model, x, lora_linear=1)
    assert list(lora_layers(twin)) == list(lora_layers(model))

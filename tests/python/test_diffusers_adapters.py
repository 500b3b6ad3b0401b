"""What diffusers does with adapters, after patch()."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import check
from diffusers_models import (
    MODELS,
    adapted,
    call_unet,
    counts,
    inputs,
    output,
)
from peft_models import config, counted, distance, lora_layers
from safetensors.torch import load_file

import loraaccel

diffusers = pytest.importorskip("diffusers")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.usefixtures("small_groups")


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_set_adapters_with_weights(name: str) -> None:
    model = adapted(name)
    model.add_adapter(config(target_modules=["to_q", "to_v"], r=2, lora_alpha=7), "b")
    loraaccel.patch(model, strict=False)
    for names, weights in ((["default", "b"], [0.3, 2.0]), (["b"], [1.5]), (["default"], None)):
        model.set_adapters(names, weights)
        with loraaccel.disabled():
            own = output(model, name)
        assert distance(output(model, name), own) < 1e-5
    model.set_adapters(["default", "b"], [0.5, 0.25])
    check(model, inputs(name), counts(name), MODELS[name][2])


@pytest.mark.parametrize("name", ["unet", "sd3"])
def test_fuse_disable_delete(name: str) -> None:
    model = adapted(name)
    model.add_adapter(config(target_modules=["to_q", "to_v"]), "b")
    model.set_adapters(["default"])
    loraaccel.patch(model)
    plain, adapted_output = MODELS[name][2], output(model, name)
    layers = sum(counts(name).values())
    model.disable_lora()
    with counted() as calls:
        frozen = output(model, name)
    assert calls == {"disabled": layers}
    assert distance(adapted_output, frozen) > 1e-2
    model.enable_lora()
    assert torch.equal(output(model, name), adapted_output)
    model.fuse_lora()
    with counted() as calls:
        merged = output(model, name)
    assert calls == {"merged": layers}
    assert distance(merged, adapted_output) < 1e-4
    model.unfuse_lora()
    assert distance(output(model, name), adapted_output) < 1e-4
    model.delete_adapters("b")
    check(model, inputs(name), counts(name), plain)
    model.unload_lora()
    with counted() as calls:
        assert distance(output(model, name), frozen) < 1e-4
    assert calls == {}


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_saved_and_loaded_adapters(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    model.save_lora_adapter(tmp_path / "own")
    loraaccel.patch(model)
    want = output(model, name)
    model.save_lora_adapter(tmp_path / "patched")
    (own,), (ours,) = (list((tmp_path / n).glob("*.safetensors")) for n in ("own", "patched"))
    saved, again = load_file(own), load_file(ours)  # (the order of the metadata is by chance)
    assert list(saved) == list(again)
    assert all(torch.equal(saved[k], again[k]) for k in saved)
    other = MODELS[name][0]()
    other.load_state_dict(
        {k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if "lora_" not in k}
    )
    other.load_lora_adapter(str(ours.parent), weight_name=ours.name, prefix=None)
    assert distance(output(other, name), want) < 1e-5
    with counted() as calls:
        output(other, name)
    assert calls == {}
    loraaccel.patch(other, strict=True)
    with counted() as calls:
        assert distance(output(other, name), want) < 1e-5
    assert calls == counts(name)


def test_hot_swap(tmp_path: Path) -> None:
    first, second = adapted("unet"), adapted("unet")
    for layer in lora_layers(second).values():
        layer.lora_B["default"].weight.data.mul_(-2)
    second.save_lora_adapter(tmp_path)
    want = output(second, "unet")
    (file,) = tmp_path.glob("*.safetensors")
    loraaccel.patch(first, strict=True)
    assert distance(output(first, "unet"), want) > 1e-2
    first.load_lora_adapter(
        str(tmp_path), weight_name=file.name, prefix=None, adapter_name="default", hotswap=True
    )
    with counted() as calls:
        assert distance(output(first, "unet"), want) < 1e-5
    assert calls == counts("unet")


@pytest.mark.parametrize("name", ["unet", "flux"])  # (SD3's own processor does not run with dual attention)
def test_fused_projections_are_diffusers_own(name: str) -> None:
    """They leave the adapters of q, k and v out, with us or without."""
    model = adapted(name)
    twin = copy.deepcopy(model)
    loraaccel.patch(model)
    for m in (model, twin):
        m.fuse_qkv_projections()
    with counted() as calls:
        y = output(model, name)
    assert calls == {"lora_linear": counts(name)["lora_linear"]}
    assert distance(y, output(twin, name)) < 1e-5
    for m in (model, twin):
        m.unfuse_qkv_projections()
    assert distance(output(model, name), output(twin, name)) < 1e-5
    check(model, inputs(name), counts(name), MODELS[name][2])


@pytest.mark.parametrize("patched_first", [True, False])
def test_layerwise_casting(patched_first: bool) -> None:
    """Weights are kept in another type between calls: each layer then needs its own call."""
    model = adapted("unet")
    twin = copy.deepcopy(model)
    if patched_first:
        loraaccel.patch(model)
    for m in (model, twin):
        m.enable_layerwise_casting(storage_dtype=BF16, compute_dtype=F32)
    if not patched_first:
        loraaccel.patch(model)
    with counted() as calls:
        y = output(model, "unet")
    assert "lora_qkv" not in calls
    # (diffusers puts a hook on LoRA layers as well: a forward in the place of theirs, which patch() leaves there)
    assert sum(calls.values()) == (sum(counts("unet").values()) if patched_first else 0)
    assert distance(y, output(twin, "unet")) < 1e-5


def test_offloading_hooks() -> None:
    """accelerate's hooks replace the forward of every module that they are put on."""
    accelerate = pytest.importorskip("accelerate")
    model = adapted("unet")
    own = output(model, "unet")
    loraaccel.patch(model)
    hooked = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    assert distance(output(hooked, "unet"), own) < 1e-5
    accelerate.hooks.remove_hook_from_module(hooked, recurse=True)
    assert distance(output(hooked, "unet"), own) < 1e-5
    assert loraaccel.unpatch(hooked) == len(lora_layers(hooked))
    assert distance(output(hooked, "unet"), own) < 1e-6


def test_attention_slicing_and_back() -> None:
    model = adapted("unet")
    loraaccel.patch(model, strict=True)
    model.set_attention_slice(1)
    check(model, inputs("unet"), counts("unet"), call_unet)
    model.set_default_attn_processor()
    check(model, inputs("unet"), counts("unet"), call_unet)


def test_scale_given_with_the_call() -> None:
    """cross_attention_kwargs' scale: diffusers scales the layers before the call and back after it."""
    model = adapted("unet")
    loraaccel.patch(model, strict=True)
    with torch.no_grad():
        half = [call_unet(model, *inputs("unet"), cross_attention_kwargs={"scale": s}) for s in (1.0, 0.5)]
        with loraaccel.disabled():
            own = [call_unet(model, *inputs("unet"), cross_attention_kwargs={"scale": s}) for s in (1.0, 0.5)]
    assert all(distance(a, b) < 1e-5 for a, b in zip(half, own, strict=True))
    assert distance(half[0], half[1]) > 1e-3


def test_added_adapter_needs_another_patch() -> None:
    model = adapted("unet")
    loraaccel.patch(model, strict=True)
    model.add_adapter(config(target_modules=["ff.net.2"]), "b")
    model.set_adapters(["default", "b"])
    with loraaccel.disabled():
        own = output(model, "unet")
    with counted() as calls:
        assert distance(output(model, "unet"), own) < 1e-5
    assert calls == counts("unet")
    loraaccel.patch(model)
    with counted() as calls:
        assert distance(output(model, "unet"), own) < 1e-5
    assert calls == counts("unet") | {"lora_linear": counts("unet")["lora_linear"] + 4}


SCRIPT = """
import torch
from diffusers.models.attention_processor import Attention
from peft import LoraConfig, inject_adapter_in_model
from loraaccel.integrations import group_scope

group_scope.MIN_WORK = 0
model = torch.nn.ModuleDict({"attn": Attention(16, heads=2, dim_head=8)})
inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), model)
model["attn"](torch.ones(2, 5, 16)).sum().backward()
import loraaccel
print(loraaccel.info()["calls"]["fused"])
"""


def test_the_launcher_groups_what_is_injected(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_python(
        "from loraaccel.cli.run import run; run()", "--use-cpp-kernel", "on", str(tmp_path / "train.py")
    )
    assert "{'lora_qkv': 3, 'lora_linear': 1}" in result.stdout, result.stderr
    assert "lora_linear: 4 of 4 layers fused, 4 calls" in result.stderr

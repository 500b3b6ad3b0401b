"""diffusers' models with PEFT adapters: patched against themselves, with every processor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from attention_models import check, gradients, tensor
from diffusers_models import (
    JOINT,
    MODELS,
    adapted,
    call_unet,
    counts,
    inputs,
    output,
)
from peft_models import config, counted, distance, lora_layers
from test_patch import same, snapshot
from torch import Tensor, nn

import loraaccel

processors = pytest.importorskip("diffusers.models.attention_processor")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.usefixtures("small_groups")


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_wrong_guess")
@pytest.mark.parametrize(("dtype", "adapters"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, dtype: torch.dtype, adapters: torch.dtype) -> None:
    model = adapted(name, dtype, adapters=adapters)
    assert loraaccel.patch(model, strict=True).num_fused == len(lora_layers(model))
    check(model, inputs(name, dtype), counts(name), MODELS[name][2])


@pytest.mark.usefixtures("no_wrong_guess")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name: str, mode: Callable[[], Any]) -> None:
    model = adapted(name, lora_dropout=0.5).eval()
    loraaccel.patch(model, strict=True)
    with mode():
        given = inputs(name)
        with loraaccel.disabled():
            own = MODELS[name][2](model, *given)
        with counted() as calls:
            y = MODELS[name][2](model, *given)
    apart = {"lora_linear": sum(counts(name).values())}
    assert calls == (counts(name) if mode is torch.no_grad else apart)
    assert distance(y, own) < 1e-5


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_autocast(name: str) -> None:
    model = adapted(name)

    def call(m: Any, *given: Any) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, enabled=given[0].dtype != torch.float64):
            return MODELS[name][2](m, *given).float() if given[0].dtype == F32 else MODELS[name][2](m, *given)

    loraaccel.patch(model, strict=True)
    with loraaccel.disabled():
        own = gradients(model, lambda *given: call(model, *given), inputs(name))
    with counted() as calls:
        got = gradients(model, lambda *given: call(model, *given), inputs(name))
    assert calls == counts(name)
    for key in own:
        assert got[key].dtype == own[key].dtype
        assert distance(got[key], own[key]) < 0.1, key


@pytest.mark.parametrize("name", MODELS)
def test_verify_finds_nothing(name: str) -> None:
    model = adapted(name)
    loraaccel.patch(model, verify=1)
    output(model, name)
    states = [vars(layer)["_loraaccel"] for layer in lora_layers(model).values()]
    assert all(s.verify == 0 and not s.reason and 0 < s.largest_error < 1e-5 for s in states)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", ["unet", "sd3", "flux", "pixart"])
def test_gradient_checkpointing_repeats_what_was_computed(name: str, dropout: float) -> None:
    model = adapted(name, lora_dropout=dropout)
    loraaccel.patch(model, strict=True)
    call = MODELS[name][2]
    for step in range(2):
        model.disable_gradient_checkpointing()
        torch.manual_seed(step)
        want = gradients(model, lambda *given: call(model, *given), inputs(name))
        model.enable_gradient_checkpointing()
        torch.manual_seed(step)
        got = gradients(model, lambda *given: call(model, *given), inputs(name))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("name", ["unet", "sd3", "flux"])
def test_compiled_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    model = adapted(name)
    loraaccel.patch(model, strict=True)
    own = output(model, name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert distance(MODELS[name][2](compiled, *inputs(name)), own) < 1e-5
    torch._dynamo.reset()


# ---- patch and unpatch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_va4_unpatch_restores_classes_and_processors(name: str) -> None:
    throwaway = adapted(name)
    loraaccel.patch(throwaway)  # (the classes now know their subclasses)
    model = adapted(name)
    attentions = {n: m for n, m in model.named_modules() if "to_q" in m._modules}
    kept = {n: (type(m), m.processor) for n, m in attentions.items()}
    before, keys = snapshot(model), list(model.state_dict())
    loraaccel.patch(model)
    assert all(isinstance(m, kept[n][0]) and m.processor is kept[n][1] for n, m in attentions.items())
    assert list(model.state_dict()) == keys
    assert model.attn_processors.keys() == throwaway.attn_processors.keys()
    output(model, name)
    assert loraaccel.unpatch(model) == len(lora_layers(model))
    assert all((type(m), m.processor) == kept[n] for n, m in attentions.items())
    assert same(before, snapshot(model))


def test_a_processor_set_while_patched_stays() -> None:
    model = adapted("unet")
    loraaccel.patch(model)
    chosen = processors.AttnProcessor()
    model.set_attn_processor(chosen)
    check(model, inputs("unet"), counts("unet"), call_unet)
    loraaccel.unpatch(model)
    assert all(p is chosen for p in model.attn_processors.values())


def test_copies_are_patched() -> None:
    model = adapted("unet")
    loraaccel.patch(model)
    other = copy.deepcopy(model)
    loraaccel.unpatch(model)
    check(other, inputs("unet"), counts("unet"), call_unet)


# ---- processors ------------------------------------------------------------------------------------------------------


class Named:
    """A processor of somebody's own: keeps what it saw, and calls the projections by its own names."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        value, key, query = attn.to_v, attn.to_k, attn.to_q
        q, k, v = query(hidden_states), key(context), value(context)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return attn.to_out[1](attn.to_out[0](y))


@pytest.mark.usefixtures("no_wrong_guess")
@pytest.mark.parametrize(
    "make",
    [processors.AttnProcessor, processors.AttnProcessor2_0, lambda: processors.SlicedAttnProcessor(2), Named],
)
def test_unet_processors(make: Callable[[], Any]) -> None:
    model = adapted("unet")
    loraaccel.patch(model, strict=True)
    model.set_attn_processor(make())
    check(model, inputs("unet"), counts("unet"), call_unet)


class Holder(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


def attention(processor: Any, **options: Any) -> Any:
    """One attention module with adapters on all projections, patched."""
    torch.manual_seed(0)
    made = processors.Attention(
        **{"query_dim": 16, "heads": 2, "dim_head": 8, "bias": True, **options}, processor=processor
    )
    model = Holder(made).requires_grad_(False)
    targets = [
        n for n in JOINT if n.split(".")[0] in made._modules and made._modules[n.split(".")[0]] is not None
    ]
    peft.inject_adapter_in_model(config(target_modules=targets), model)
    for n, p in model.named_parameters():
        p.requires_grad_("lora_" in n)
    loraaccel.patch(model, strict=True)
    return model


# Options of the module, inputs, members of groups and other layers in one call.
PROCESSORS: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "AttnProcessor": ({}, "self", 3, 1),
    "AttnProcessor2_0": ({}, "self", 3, 1),
    "AttnProcessor2_0 cross": ({"cross_attention_dim": 12}, "cross", 2, 2),
    "AttnProcessor cross": ({"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"}, "cross", 2, 2),
    "AttnProcessor2_0 image": ({"norm_num_groups": 4, "residual_connection": True}, "image", 3, 1),
    "SlicedAttnProcessor": ({}, "self", 3, 1),
    "AttnAddedKVProcessor": ({"added_kv_proj_dim": 12, "norm_num_groups": 4}, "image and text", 5, 1),
    "AttnAddedKVProcessor2_0": ({"added_kv_proj_dim": 12, "norm_num_groups": 4}, "image and text", 5, 1),
    "SlicedAttnAddedKVProcessor": ({"added_kv_proj_dim": 12, "norm_num_groups": 4}, "image and text", 5, 1),
    "JointAttnProcessor2_0": (
        {"added_kv_proj_dim": 12, "context_pre_only": False, "out_context_dim": 12}, "added", 6, 2,
    ),
    "JointAttnProcessor2_0 one": ({}, "self", 3, 1),
    "AuraFlowAttnProcessor2_0": (
        {"added_kv_proj_dim": 16, "context_pre_only": False, "out_dim": 16, "added_proj_bias": False}, "added16", 6, 2,
    ),
    "HunyuanAttnProcessor2_0": ({"qk_norm": "layer_norm"}, "self", 3, 1),
    "HunyuanAttnProcessor2_0 cross": ({"cross_attention_dim": 12, "qk_norm": "layer_norm"}, "cross", 2, 2),
    "StableAudioAttnProcessor2_0": ({}, "self", 3, 1),
    "CogVideoXAttnProcessor2_0": ({}, "added16 as one", 2, 2),
    "SanaLinearAttnProcessor2_0": ({}, "self", 3, 1),
    "PAGIdentitySelfAttnProcessor2_0": ({}, "batch", 3, 3),
    "PAGCFGIdentitySelfAttnProcessor2_0": ({}, "batch of three", 3, 3),
    "PAGJointAttnProcessor2_0": (
        {"added_kv_proj_dim": 16, "context_pre_only": False, "out_context_dim": 16}, "added16", 12, 4,
    ),
}  # fmt: skip


def processor_inputs(kind: str) -> list[Any]:
    x = tensor({"batch": 4, "batch of three": 6}.get(kind, 2), 9, 16)
    if kind in ("cross", "added"):
        return [x, tensor(2, 5, 12, seed=2)]
    if kind.startswith("added16"):
        return [x, tensor(2, 5, 16, seed=2)]
    image = tensor(2, 16, 3, 3)
    return {"image": [image], "image and text": [image, tensor(2, 5, 12, seed=2)]}.get(kind, [x])


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_one_module(name: str) -> None:
    """Those that run on a CPU and take none of a pipeline's own arguments."""
    options, kind, together, apart = PROCESSORS[name]
    cls = getattr(processors, name.split(" ")[0])
    model = attention(cls(2) if "Sliced" in name else cls(), **options)
    before = dict(loraaccel.info()["ungrouped"])
    for _ in range(2):
        check(model, processor_inputs(kind), None)
    model.zero_grad()
    with counted() as calls:
        model(*processor_inputs(kind))
    if name == "PAGJointAttnProcessor2_0":  # its perturbed half does without some of them
        assert calls["lora_qkv"] + calls["lora_linear"] <= 16
    else:
        assert calls == {"lora_qkv": together, "lora_linear": apart}
        assert loraaccel.info()["ungrouped"] == before

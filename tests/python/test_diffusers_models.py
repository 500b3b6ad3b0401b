"""diffusers' models with random weights and PEFT adapters: patched against themselves, in every state and processor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from attention_models import check, gradients, tensor
from peft_models import config, counted, distance, lora_layers
from safetensors.torch import load_file
from test_patch import same, snapshot
from torch import Tensor, nn

import loraaccel
from loraaccel.integrations import group_scope

diffusers = pytest.importorskip("diffusers")
from diffusers.models import attention_processor as processors  # noqa: E402
from diffusers.models.attention_processor import Attention  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*TARGETS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_scope, "MIN_WORK", 0)


# ---- models: how each is made, and the inputs it is called with ------------------------------------------------------


def unet(**changes: Any) -> Any:
    options = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (16, 32),
        "norm_num_groups": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 12, "attention_head_dim": 4,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
    }  # fmt: skip
    return diffusers.UNet2DConditionModel(**options | changes)


def unet_inputs(dtype: torch.dtype) -> list[Any]:
    return [tensor(2, 4, 8, 8, dtype=dtype), torch.tensor([3, 900]), tensor(2, 7, 12, dtype=dtype, seed=2)]


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_inputs(dtype: torch.dtype) -> list[Any]:
    return [
        tensor(2, 4, 8, 8, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), tensor(2, 10, dtype=dtype, seed=3),
        torch.tensor([3, 900]),
    ]  # fmt: skip


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_inputs(dtype: torch.dtype) -> list[Any]:
    ids = torch.zeros(5, 3, dtype=torch.int64), torch.arange(27).reshape(9, 3) % 5
    return [
        tensor(2, 9, 4, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), tensor(2, 10, dtype=dtype, seed=3),
        torch.tensor([0.5, 0.9]).to(dtype), ids[1], ids[0],
    ]  # fmt: skip


def pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        cross_attention_dim=16, caption_channels=12, attention_bias=True, out_channels=8,
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", use_additional_conditions=False,
    )  # fmt: skip


def pixart_inputs(dtype: torch.dtype) -> list[Any]:
    return [tensor(2, 4, 8, 8, dtype=dtype), tensor(2, 5, 12, dtype=dtype, seed=2), torch.tensor([3, 900])]


def cogvideox() -> Any:
    """Writes rotary embeddings into q and k."""
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=5, use_rotary_positional_embeddings=True,
    )  # fmt: skip


def cogvideox_inputs(dtype: torch.dtype) -> list[Any]:
    angles = tensor(2 * 4 * 4, 16, seed=5)
    return [
        tensor(2, 2, 4, 8, 8, dtype=dtype), tensor(2, 5, 8, dtype=dtype, seed=2), torch.tensor([3, 900]),
        (angles.cos(), angles.sin()),
    ]  # fmt: skip


def sample(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.sample


def call_unet(m: Any, x: Tensor, t: Tensor, text: Tensor, **more: Any) -> Tensor:
    return sample(m(x, t, text, **more))


def call_sd3(m: Any, x: Tensor, text: Tensor, pooled: Tensor, t: Tensor) -> Tensor:
    return sample(m(hidden_states=x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t))


def call_flux(
    m: Any, x: Tensor, text: Tensor, pooled: Tensor, t: Tensor, image: Tensor, ids: Tensor
) -> Tensor:
    return sample(m(x, text, pooled, t, img_ids=image, txt_ids=ids))


def call_pixart(m: Any, x: Tensor, text: Tensor, t: Tensor) -> Tensor:
    return sample(m(x, encoder_hidden_states=text, timestep=t))


def call_cogvideox(m: Any, x: Tensor, text: Tensor, t: Tensor, rotary: Any) -> Tensor:
    return sample(m(x, text, t, image_rotary_emb=rotary))


# make, inputs, call, targets, members of groups and other LoRA layers of one forward pass
MODELS: dict[str, tuple[Any, Any, Any, list[str], int, int]] = {
    "unet": (unet, unet_inputs, call_unet, TARGETS, 4 * (3 + 2), 4 * (1 + 2)),
    # Three blocks, of which the last has no projection of its context's output, and one more attention in the first.
    "sd3": (sd3, sd3_inputs, call_sd3, JOINT, 3 * 6 + 3, 3 + 2 + 1),
    "flux": (flux, flux_inputs, call_flux, JOINT, 6 + 3, 2),
    "pixart": (pixart, pixart_inputs, call_pixart, TARGETS, 2 * (3 + 2), 2 * (1 + 2)),
    # Joins both inputs to one before the projections: q goes by itself, as if k and v read the second.
    "cogvideox": (cogvideox, cogvideox_inputs, call_cogvideox, TARGETS, 2, 2),
}


def adapted(
    name: str, dtype: torch.dtype = F32, *, adapters: torch.dtype | None = None, **changes: Any
) -> Any:
    """The model in `dtype` with an adapter "default", not patched."""
    make, _, _, targets, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    for p in model.parameters():
        if p.abs().max() == 0:  # some projections start at zero
            nn.init.normal_(p, std=0.1)
        p.requires_grad_(False)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config(target_modules=targets, **changes))
    else:  # PixArt
        peft.inject_adapter_in_model(config(target_modules=targets, **changes), model)
    for layer in lora_layers(model).values():
        layer.lora_A.to(adapters or dtype)
        layer.lora_B.to(adapters or dtype)
    return model.train()


def counts(name: str) -> dict[str, int]:
    together, apart = MODELS[name][4:]
    return {"lora_qkv": together, "lora_linear": apart}


def inputs(name: str, dtype: torch.dtype = F32) -> list[Any]:
    return MODELS[name][1](dtype)


def output(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return MODELS[name][2](model, *inputs(name))


@pytest.fixture
def no_wrong_guess() -> Iterator[None]:
    before = dict(loraaccel.info()["ungrouped"])
    yield
    assert loraaccel.info()["ungrouped"] == before


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
    made = Attention(
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


# ---- diffusers' own functions after patch ----------------------------------------------------------------------------


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

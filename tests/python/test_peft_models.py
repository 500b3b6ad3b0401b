"""Whole models: outputs, gradient of the input and of every parameter, patched against PEFT's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft_models import (
    Attention,
    Mlp,
    add_adapter,
    bert,
    check_model,
    counted,
    llama,
    lora_layers,
    lora_model,
)
from torch import Tensor, nn

import loraaccel

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# make, width, LoRA layers, call
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, Callable[[Any, Tensor], Tensor]]] = {
    "mlp": (Mlp, 12, 2, lambda m, x: m(x)),
    "attention": (Attention, 16, 4, lambda m, x: m(x)),
    "bert": (bert, 32, 12, lambda m, x: m(inputs_embeds=x).last_hidden_state),
    "llama": (llama, 32, 14, lambda m, x: m(inputs_embeds=x).logits),
}


def inputs(width: int, dtype: torch.dtype = F32, rows: int = 5) -> Tensor:
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "adapters"), [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_vt8_model_equals_peft(name: str, dtype: torch.dtype, adapters: torch.dtype) -> None:
    make, width, layers, call = MODELS[name]
    model = lora_model(make, dtype=dtype, adapter_dtype=adapters)
    check_model(model, call, inputs(width, dtype), layers)


@pytest.mark.parametrize("name", MODELS)
def test_several_adapters_of_different_ranks(name: str) -> None:
    """rank_pattern, alpha_pattern: layers of one adapter have ranks of their own, and F1 takes the layer's own."""
    make, width, layers, call = MODELS[name]
    first = {"mlp": "up", "attention": "q", "bert": "query", "llama": "q_proj"}[name]
    model = lora_model(make, rank_pattern={first: 9}, alpha_pattern={first: 5})
    add_adapter(model, "b", r=2, lora_alpha=16, use_rslora=True)
    model.base_model.set_adapter(["default", "b"])
    found = lora_layers(model)
    scales = {layer.scaling["default"] for layer in found.values()}
    assert scales == {2.0, 5 / 9}
    check_model(model, call, inputs(width), layers)


@pytest.mark.parametrize("name", MODELS)
def test_base_that_trains_too(name: str) -> None:
    make, width, layers, call = MODELS[name]
    model = lora_model(make, bias="all")
    for layer in lora_layers(model).values():
        layer.base_layer.requires_grad_(True)
    check_model(model, call, inputs(width), layers)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    make, width, layers, call = MODELS[name]
    model = lora_model(make).eval()
    with mode():
        own = call(model, inputs(width))
        loraaccel.patch(model, strict=True)
        with counted() as calls:
            got = call(model, inputs(width))
    assert calls == {"lora_linear": layers}
    assert not got.requires_grad
    torch.testing.assert_close(got, own, rtol=2e-5, atol=2e-6)


def test_dropout_in_a_model_averages_out() -> None:
    """A linear model: the mean over masks of output and gradients is what evaluation gives."""
    model = lora_model(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), target_modules=["0", "1"], lora_dropout=0.3
    )
    loraaccel.patch(model, strict=True)
    x = torch.randn(2, 8)
    expected = model.eval()(x)
    model.train()
    torch.manual_seed(0)
    runs = torch.stack([model(x).detach() for _ in range(1024)])
    sigma = runs.std(0) / 1024**0.5
    assert (sigma > 0).all()
    assert ((runs.mean(0) - expected).abs() <= 5 * sigma).all()


def test_modules_to_save_and_embeddings_stay_as_they_are() -> None:
    """A token classifier: the head trains in full, the rest through LoRA."""
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2, max_position_embeddings=32,
    )  # fmt: skip
    lora = peft.LoraConfig(
        task_type="TOKEN_CLS", r=4, lora_alpha=8, target_modules=["query", "value"], init_lora_weights=False
    )
    model = peft.get_peft_model(BertForTokenClassification(config), lora)
    head = model.base_model.model.classifier
    assert type(head).__name__ == "ModulesToSaveWrapper"
    check_model(model, lambda m, x: m(inputs_embeds=x).logits, inputs(32), 2)
    assert "_loraaccel" not in head.__dict__
    model.disable_adapter_layers()  # the wrapper's own switch, too
    with counted() as calls:
        model(inputs_embeds=inputs(32))
    assert calls == {"disabled": 2}


def test_a_layer_used_twice() -> None:
    """One module at two places of the model is one entry of the report, and gets the sum of both gradients."""
    shared = nn.Linear(8, 8)
    model = lora_model(lambda: nn.Sequential(shared, nn.GELU(), shared), target_modules=["0"])
    base = model.base_model.model
    base[2] = base[0]
    check_model(model, lambda m, x: m(x), inputs(8), 2)
    assert len(loraaccel.patch(model).modules) == 1


def test_vt9_adapters_with_shared_weights() -> None:
    """Two layers whose A is the same parameter: its gradient is the sum."""
    model = lora_model(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), target_modules=["0", "2"]
    )
    base = model.base_model.model
    base[2].lora_A["default"].weight = base[0].lora_A["default"].weight
    base[2].base_layer.weight = base[0].base_layer.weight
    check_model(model, lambda m, x: m(x), inputs(8), 2)


def test_lora_around_another_tuners_layer() -> None:
    """PeftMixedModel: LoRA's base layer is a LoHa layer, which runs itself."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        Mlp(), peft.LoHaConfig(r=2, target_modules=["up"], init_weights=False), mixed=True
    )
    model.add_adapter("lora", peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))
    model.set_adapter(["default", "lora"])
    x = inputs(12)
    own = model(x)
    report = loraaccel.patch(model)
    assert {m.name.rpartition(".")[2]: m.reason for m in report.modules} == {"up": "", "down": ""}
    with counted() as calls:
        got = model(x)
    assert calls == {"lora_linear": 1, "lora_delta": 1}
    torch.testing.assert_close(got, own)

"""PEFT on quantised frozen layers of bitsandbytes and torchao: these run themselves, the adapter is added."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_models import counted, distance

import loraaccel


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(128, 96)
        self.second = torch.nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def bitsandbytes_layers(model: Any, make: Callable[[Any, torch.nn.Linear], torch.nn.Module]) -> Any:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for name in ("first", "second"):
        layer = getattr(model, name)
        quantised = make(bnb, layer)
        quantised.load_state_dict(layer.state_dict())
        setattr(model, name, quantised.to("cpu"))  # quantises
    return model


def int8(model: Any) -> Any:
    model = bitsandbytes_layers(
        model,
        lambda bnb, one: bnb.nn.Linear8bitLt(
            one.in_features, one.out_features, one.bias is not None, has_fp16_weights=False
        ),
    )
    model.is_loaded_in_8bit = True  # as transformers marks it: PEFT takes its own class for it
    return model


def nf4(model: Any) -> Any:
    model = bitsandbytes_layers(
        model,
        lambda bnb, one: bnb.nn.Linear4bit(
            one.in_features, one.out_features, one.bias is not None, torch.float32, quant_type="nf4"
        ),
    )
    model.is_loaded_in_4bit = True
    return model


def torchao_int8(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def torchao_float8(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the quantisers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("quantise", "layer_class"),
    [
        (int8, "Linear8bitLt"),
        (nf4, "Linear4bit"),
        (torchao_int8, "TorchaoLoraLinear"),
        (torchao_float8, "TorchaoLoraLinear"),
    ],
)
@pytest.mark.parametrize("rows", [(5,), (3, 40)])
@pytest.mark.parametrize("cast", [False, True])
def test_same_outputs_and_gradients_as_peft(
    quantise: Callable[[Any], Any], layer_class: str, rows: tuple[int, ...], cast: bool
) -> None:
    """In float32 and under autocast; every frozen layer runs once a call, and its weight stays what it is."""
    torch.manual_seed(0)
    model = quantise(Model())
    before = copy.deepcopy({n: p for n, p in model.state_dict().items() if isinstance(p, torch.Tensor)})
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["first", "second"], init_lora_weights=False)
    peft_model = get_peft_model(model, config)
    layers = [m for n, m in peft_model.named_modules() if n.endswith((".first", ".second"))]
    assert [type(m).__name__ for m in layers] == [layer_class] * 2
    stored = [m.get_base_layer().weight for m in layers]
    x, grad = torch.randn(*rows, 128), torch.randn(*rows, 64)

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        peft_model.zero_grad()
        x_leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = peft_model(x_leaf)
        y.backward(grad.to(y.dtype))
        trained = [p.grad for p in peft_model.parameters() if p.grad is not None]
        assert len(trained) == 4
        return y.detach(), [x_leaf.grad, *trained]

    plain, wanted = step()
    report = loraaccel.patch(peft_model)
    assert (report.num_fused, report.num_fallback) == (2, 0)
    runs: list[str] = []
    handles = [
        m.get_base_layer().register_forward_hook(lambda m, *_: runs.append(type(m).__name__)) for m in layers
    ]
    with counted() as calls:
        fused, got = step()
    for handle in handles:
        handle.remove()
    assert calls == {"lora_delta": 2}
    assert len(runs) == 2
    assert fused.dtype == plain.dtype
    for ours, theirs in zip([fused, *got], [plain, *wanted], strict=True):
        assert ours.dtype == theirs.dtype
        assert distance(ours, theirs) < (0.02 if cast else 1e-5)
    assert all(m.get_base_layer().weight is w for m, w in zip(layers, stored, strict=True))
    loraaccel.unpatch(peft_model)
    torchao_tensors = type(stored[0]) if layer_class == "TorchaoLoraLinear" else ()
    now = peft_model.base_model.model.state_dict()
    for name, value in before.items():
        renamed = name.replace("first.", "first.base_layer.").replace("second.", "second.base_layer.")
        after = now[renamed]
        assert type(after) is type(value), name
        if isinstance(value, torchao_tensors):
            after, value = after.dequantize(), value.dequantize()
        torch.testing.assert_close(after, value, rtol=0.0, atol=0.0, msg=name)

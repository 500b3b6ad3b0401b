"""Faults of the family that a user would have met: one test each, so that they stay away."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_models import counted, distance
from torch import nn

import loraaccel as la

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_dora_in_bfloat16_keeps_float32_gradients(bias: bool, dropout: float) -> None:
    """PEFT keeps adapters in float32 beside a bfloat16 model, and computes their gradients in it."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, target_modules=["0"], use_dora=True, init_lora_weights=False, lora_dropout=dropout
    )
    model = get_peft_model(nn.Sequential(nn.Linear(128, 96, bias=bias)).bfloat16(), config)
    x, grad = torch.randn(64, 128).bfloat16(), torch.randn(64, 96).bfloat16()

    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        y = model(x)
        y.backward(grad.to(y.dtype))
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"y": y.detach()}

    exact = gradients(copy.deepcopy(model).double(), x.double())
    own = gradients(model, x)
    la.patch(model)
    with counted() as calls:
        found = gradients(model, x)
    assert calls == {"dora_linear": 1}
    for name, value in found.items():
        theirs = distance(own[name], exact[name])
        # (With dropout both the mask's own rounding and the sum of two products in bfloat16 are in y.)
        floor = 1e-6 if "lora_A" in name or "lora_B" in name else 4e-3
        assert value.dtype == own[name].dtype
        assert distance(value, exact[name]) <= 1.5 * theirs + floor, name


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_loha_and_lokr_refuse_the_same_in_every_form(rows: int) -> None:
    """Which form is the cheaper one depends on the rows, what is refused does not."""
    x, w = torch.randn(rows, 8), torch.randn(6, 8)
    loha = [torch.randn(6, 2), torch.randn(2, 8), torch.randn(6, 2), torch.randn(2, 8)]
    lokr = [torch.randn(3, 2), torch.randn(2, 4)]
    for name, call, factors in (
        ("loha_linear", la.loha_linear, loha), ("lokr_linear", la.lokr_linear, lokr),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"{name}: scaling is nan, expected a finite number"):
            call(x, w, None, *factors, float("nan"))
        with pytest.raises(
            RuntimeError, match=f"{name}: w1.* is float64 and x float32, expected both float64 or neither"
        ):
            call(x, w, None, *(t.double() for t in factors))
    image, kernel = torch.randn(max(rows // 50, 1), 8, 9, 9), torch.randn(6, 8, 3, 3)
    with pytest.raises(RuntimeError, match="loha_conv2d: scaling is inf"):
        la.loha_conv2d(
            image, kernel, None, loha[0], torch.randn(2, 72), loha[2], torch.randn(2, 72), float("inf")
        )


def test_verify_knows_that_autocast_rounds() -> None:
    model = get_peft_model(
        nn.Sequential(nn.Embedding(50, 32)), LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    )
    la.patch(model, verify=2)
    with torch.autocast("cpu", dtype=BF16), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.arange(50))
    assert la.patch(model).num_fused == 1


@pytest.mark.parametrize("wide", ["base", "adapters"])
def test_float64_beside_another_type_is_pefts(wide: str) -> None:
    for make, x in (
        (lambda: nn.Conv2d(4, 8, 3), torch.randn(1, 4, 12, 12)),
        (lambda: nn.Embedding(9, 8), torch.tensor([1, 2])),
        (lambda: nn.Linear(12, 8), torch.randn(3, 12)),
    ):
        torch.manual_seed(1)
        model = get_peft_model(
            nn.Sequential(make()), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        )
        layer = model.base_model.model[0]
        (layer.base_layer if wide == "base" else layer).double()
        if wide == "adapters":
            layer.base_layer.float()
        if x.is_floating_point() and wide == "base":
            x = x.double()
        expected = model(x)
        la.patch(model)
        with counted() as calls:
            y = model(x)
        assert calls == {"dtype": 1}
        assert torch.equal(y, expected)
        assert y.dtype == expected.dtype


def test_the_norm_of_a_small_difference_of_two_adapters() -> None:
    """Its Gram matrices cancel: in float32 three digits would be left of a difference of a thousandth."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 200), torch.randn(150, 8)
    near = b * (1 + 1e-3 * torch.randn(150, 1))
    both = torch.cat([a, a]), torch.cat([b, -near], 1)
    exact = torch.linalg.norm(both[1].double() @ both[0].double())
    assert distance(la.lora_norm(*both), exact) < 1e-5

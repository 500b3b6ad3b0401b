"""kohya's LoHa, LoKr and DyLoRA patched: values, gradients and random numbers of their own forward."""

from __future__ import annotations

import importlib
import random
import types
from typing import Any

import pytest
import torch
from kohya_products import DyLoRAModule, LoHaModule, LoKrModule
from test_kohya import BOUND, assert_alike, state_of
from torch import Tensor, nn

from loraaccel import patch, unpatch

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(24, 30), "1x1": lambda: nn.Conv2d(6, 10, 1),
    "3x3": lambda: nn.Conv2d(6, 10, 3, padding=1, stride=2),
    "tucker": lambda: nn.Conv2d(6, 10, 3, padding=1, bias=False),
}  # fmt: skip
MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "loha": (LoHaModule, {}), "lokr": (LoKrModule, {}), "lokr full": (LoKrModule, {"full": True}),
    "dylora": (DyLoRAModule, {}),
}  # fmt: skip


def made(kind: str, form: str, dtype: torch.dtype, **p: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer = LAYERS[form]().to(dtype).requires_grad_(False)
    cls, options = MODULES[kind]
    if form == "tucker" and kind != "dylora":
        p["use_tucker"] = True
    module = cls("lora_unet_probe", layer, 0.8, 4, 3.0, **options, **p).to(dtype)
    module.apply_to()
    return layer, module


def run(layer: Any, module: Any, x: Tensor, autocast: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(11)
    random.seed(11)
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs = [layer(x) for _ in range(3)]
    sum(y.double().square().sum() for y in outputs).backward()
    return [*outputs, x.grad, *(torch.zeros(1) if p.grad is None else p.grad for p in module.parameters())]


@pytest.mark.parametrize("dtype", [F32, F64, BF16, "autocast"])
@pytest.mark.parametrize("form", LAYERS)
@pytest.mark.parametrize(
    ("kind", "dropout"),
    [(k, d) for k in MODULES for d in ("none", "rows", "module") if d == "none" or k != "dylora"],
)
def test_values_gradients_and_random_numbers(kind: str, form: str, dropout: str, dtype: Any) -> None:
    p = {"none": {}, "rows": {"rank_dropout": 0.3}, "module": {"module_dropout": 0.4}}[dropout]
    autocast = dtype == "autocast"
    kept = F32 if autocast else dtype
    x = torch.randn(
        3, *((5, 24) if form == "linear" else (6, 9, 8)), generator=torch.Generator().manual_seed(3)
    ).to(kept)
    found = []
    for fused in (False, True):
        layer, module = made(kind, form, kept, **p)
        module.train()
        if fused:
            report = patch(module)
            assert (report.num_fused, report.num_fallback) == (1, 0), report
        found.append(run(layer, module, x, autocast))
        found.append([torch.get_rng_state().double(), torch.tensor(random.getstate()[1]).double()])
    state = state_of(module)
    assert (state.fused, state.own) == (3, {})
    # (The host rounds the whole of ΔW to 16 bit, we its factors.)
    assert_alike(found[2], found[0], 4 * BOUND[BF16] if autocast or kept == BF16 else BOUND[kept])
    assert_alike(found[3], found[1], 0.0)
    assert unpatch(module) == 1
    assert layer.forward.__func__ is type(module).forward


def test_a_changed_class_keeps_its_forward() -> None:
    class Changed(LoHaModule):
        def get_diff_weight(self) -> Tensor:
            return super().get_diff_weight() * 2.0

    class Scaled(LoKrModule):
        def get_diff_weight(self) -> Tensor:
            return LoKrModule.get_diff_weight(self) * self.strength

        strength = 1.0

    for cls in (Changed, Scaled):
        layer = nn.Linear(24, 30)
        module = cls("probe", layer, 1.0, 4, 2.0)
        module.apply_to()
        assert patch(module).reasons in ({"unknown_forward": 1}, {"unsupported_module": 1})
        x = torch.randn(2, 24)
        assert torch.equal(layer(x), cls.forward(module, x))


def test_a_frozen_layer_that_is_none_of_torchs() -> None:
    """The operator of these has the frozen product inside: on another layer the host's own forward runs."""
    layer = nn.Linear(24, 30)
    layer.forward = types.MethodType(lambda self, x: nn.functional.linear(x, 0.5 * self.weight), layer)
    module = LoHaModule("probe", layer, 0.8, 4, 3.0)
    module.apply_to()
    patch(module)
    x = torch.randn(2, 24)
    assert torch.equal(LoHaModule.forward(module, x), module.forward(x))
    state = state_of(module)
    assert state.own == {"base_class": 1}


def test_a_relative_that_lacks_something_keeps_its_forward() -> None:
    """The proof is about the class: an object without what the operators read is left alone, and trains on."""
    layer, module = made("loha", "linear", F32)
    del module.conv_mode
    assert patch(module).reasons == {"unknown_forward": 1}
    module.get_diff_weight = lambda: module.hada_w1_a @ module.hada_w1_b
    x = torch.randn(2, 24)
    assert torch.equal(layer(x), LoHaModule.forward(module, x))


@pytest.mark.parametrize("multiplier", [torch.rand(3, 1), torch.tensor(0.5, requires_grad=True)])
def test_a_multiplier_that_is_no_number(multiplier: Tensor) -> None:
    layer, module = made("loha", "linear", F32)
    module.multiplier = multiplier
    patch(module)
    x = torch.randn(3, 24)
    assert torch.equal(layer(x), LoHaModule.forward(module, x))
    assert state_of(module).own == {"scaling_type": 1}


@pytest.mark.parametrize(
    ("kind", "dropout"), [("dylora", {}), ("lokr", {"rank_dropout": 0.3}), ("loha", {"module_dropout": 0.4})]
)
def test_after_a_native_error_the_random_numbers_are_the_hosts(
    kind: str, dropout: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator fails when it has drawn; the module's own forward then draws the same, DyLoRA's rank included."""
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(3))
    expected = run(*made(kind, "linear", F32, **dropout), x, False)
    layer, module = made(kind, "linear", F32, **dropout)
    patch(module)
    state_of(module).roll_back = True
    products = importlib.import_module("loraaccel.integrations.kohya_products")

    def fails(*_: Any, **__: Any) -> Tensor:
        torch.rand(5)
        random.random()
        raise RuntimeError("out of everything")

    for name in ("_dynamic", "_made"):
        monkeypatch.setattr(products, name, fails)
    with pytest.warns(RuntimeWarning, match="out of everything"):
        found = run(layer, module, x, False)
    for y, own in zip(found, expected, strict=True):
        assert torch.equal(y, own)

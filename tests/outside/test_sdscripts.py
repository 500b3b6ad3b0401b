"""The real LoRA modules of a checkout of kohya's sd-scripts, plain and patched: values, gradients, random numbers.

    LORAACCEL_SDSCRIPTS_DIR=DIR pytest tests/outside/test_sdscripts.py        or: nox -s hosts -- --sd-scripts DIR

Needs what sd-scripts imports (the session installs it). Nothing of sd-scripts is in this repository.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraaccel import patch, unpatch
from loraaccel.integrations import patched

CHECKOUT = os.environ.get("LORAACCEL_SDSCRIPTS_DIR", "")
if not CHECKOUT:
    pytest.skip("LORAACCEL_SDSCRIPTS_DIR names no checkout of sd-scripts", allow_module_level=True)
sys.path.insert(0, CHECKOUT)
sys.path.append(str(Path(__file__).parent / "stand_ins" / "no_torchvision"))  # where there is none

F32, BF16 = torch.float32, torch.bfloat16
NETWORKS = ("lora", "lora_fa", "lora_flux", "lora_lumina")
DROPOUTS: dict[str, dict[str, float]] = {
    "none": {}, "hidden": {"dropout": 0.25}, "ranks": {"rank_dropout": 0.3}, "module": {"module_dropout": 0.5},
    "all": {"dropout": 0.25, "rank_dropout": 0.3, "module_dropout": 0.4},
}  # fmt: skip


def class_of(network: str, name: str = "LoRAModule") -> Any:
    return getattr(importlib.import_module(f"networks.{network}"), name)


def made(cls: Any, form: str, dtype: torch.dtype, **arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = {
        "linear": lambda: nn.Linear(24, 30), "split": lambda: nn.Linear(24, 30),
        "conv": lambda: nn.Conv2d(6, 10, 3, padding=1, stride=2), "pointwise": lambda: nn.Conv2d(6, 10, 1),
    }  # fmt: skip
    layer = layers[form]().to(dtype).requires_grad_(False)
    if form == "split":
        arguments["split_dims"] = [8, 8, 14]
    module = cls("lora_unet_probe", layer, 0.8, 4, 3.0, **arguments)
    for name, p in module.named_parameters():
        if "lora_up" in name or "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    module.to(dtype)
    module.apply_to()
    return layer, module.train()


def run(layer: Any, module: Any, x: Tensor, autocast: bool = False) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(11)
    random.seed(11)
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs = [layer(x) for _ in range(3)]
    sum(y.double().square().sum() for y in outputs).backward()
    state = torch.get_rng_state().double()
    return [
        *outputs,
        x.grad,
        *(torch.zeros(1) if p.grad is None else p.grad for p in module.parameters()),
        state,
    ]


def assert_alike(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    assert torch.equal(found[-1], expected[-1])  # the generator
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert a.dtype == b.dtype
        assert float((a.double() - b.double()).norm()) <= bound * float(b.double().norm()) + 1e-30


def input_of(form: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn((3, 5, 24) if form in ("linear", "split") else (3, 6, 9, 8), generator=generator)


@pytest.mark.parametrize("dtype", [F32, BF16, "autocast"])
@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize(
    ("network", "form"),
    [
        *((n, f) for n in NETWORKS for f in ("linear", "conv", "pointwise")),
        *((n, "split") for n in ("lora_flux", "lora_lumina")),
    ],
)
def test_lora_modules(network: str, form: str, dropout: str, dtype: Any) -> None:
    cls = class_of(network)
    autocast = dtype == "autocast"
    kept = F32 if autocast else dtype
    x = input_of(form).to(kept)
    arguments = DROPOUTS[dropout]
    layer, module = made(cls, form, kept, **arguments)
    if form == "split" and network == "lora_flux" and "rank_dropout" in arguments:
        patch(module)  # its own forward reads a name that it never set: that error stays
        module.module_dropout = None
        with pytest.raises(NameError):
            layer(x)
        return
    expected = run(layer, module, x, autocast)
    layer, module = made(cls, form, kept, **arguments)
    assert patch(module).num_fused == 1
    found = run(layer, module, x, autocast)
    state = patched.state_of(module)
    assert state is not None
    assert (state.fused, state.own) == (3, {})
    assert_alike(found, expected, 2e-6 if kept == F32 and not autocast else 2e-2)
    assert unpatch(module) == 1
    assert layer.forward.__func__ is cls.forward


def test_ggpo() -> None:
    found = []
    for fused in (False, True):
        layer, module = made(class_of("lora_flux"), "linear", F32, ggpo_beta=0.01, ggpo_sigma=0.03)
        x = input_of("linear")
        layer(x).sum().backward()
        torch.manual_seed(4)
        module.update_norms()
        module.update_grad_norms()
        module.zero_grad()
        if fused:
            assert patch(module).num_fused == 1
        found.append(run(layer, module, x))
    assert_alike(found[1], found[0], 2e-6)


@pytest.mark.parametrize("network", NETWORKS)
def test_modules_for_inference(network: str) -> None:
    layer, module = made(class_of(network, "LoRAInfModule"), "linear", F32)
    x = input_of("linear")
    expected = layer(x)
    assert patch(module.eval()).num_fused == 1
    assert_alike([layer(x), x], [expected, x], 2e-6)
    module.enabled = False
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("form", ["linear", "conv", "pointwise"])
def test_dylora(form: str) -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        layer, module = made_dylora(form)
        if fused:
            assert patch(module).num_fused == 1
        found.append(run(layer, module, input_of(form)))
    assert_alike(found[1], found[0], 2e-6)


def made_dylora(form: str) -> tuple[Any, Any]:
    layer = {"linear": lambda: nn.Linear(24, 30), "conv": lambda: nn.Conv2d(6, 10, 3, padding=1),
             "pointwise": lambda: nn.Conv2d(6, 10, 1)}[form]()  # fmt: skip
    module = class_of("dylora", "DyLoRAModule")("lora_unet_probe", layer.requires_grad_(False), 1.0, 4, 2, 2)
    for p in module.lora_B:
        nn.init.normal_(p, std=0.3)
    module.apply_to()
    return layer, module.train()


@pytest.mark.parametrize(("network", "kind"), [("loha", "LoHaModule"), ("lokr", "LoKrModule")])
@pytest.mark.parametrize("form", ["linear", "conv", "pointwise"])
@pytest.mark.parametrize("dropout", ["none", "ranks", "module"])
def test_loha_and_lokr(network: str, kind: str, form: str, dropout: str) -> None:
    if importlib.util.find_spec(f"networks.{network}") is None:
        pytest.skip(f"this checkout of sd-scripts has no networks.{network}")
    found = []
    for fused in (False, True):
        layer, module = made(class_of(network, kind), form, F32, **DROPOUTS[dropout])
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
        if fused:
            assert patch(module).num_fused == 1
        found.append(run(layer, module, input_of(form)))
    assert_alike(found[1], found[0], 2e-5)

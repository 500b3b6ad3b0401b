"""LyCORIS's modules on small layers, the same each time: for whichever release of LyCORIS can be imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

lycoris = pytest.importorskip("lycoris", reason="LyCORIS (pip install lycoris-lora) is not installed")

from lycoris.modules.locon import LoConModule  # noqa: E402
from lycoris.modules.loha import LohaModule  # noqa: E402
from lycoris.modules.lokr import LokrModule  # noqa: E402

CLASSES: dict[str, Any] = {"locon": LoConModule, "loha": LohaModule, "lokr": LokrModule}
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(24, 30),
    "conv": lambda: nn.Conv2d(6, 10, 3, padding=1, stride=2),
    "pointwise": lambda: nn.Conv2d(6, 10, 1),
    "dilated": lambda: nn.Conv2d(6, 10, 3, dilation=2),
    "grouped": lambda: nn.Conv2d(6, 10, 3, groups=2, padding=1),
}


def calls_the_frozen_layer() -> bool:
    """False of releases up to 3.2, whose modules outside bypass make W' and multiply by it alone."""
    names: tuple[str, ...] = LoConModule.forward.__code__.co_names
    return "_current_weight" in names


def made(
    algo: str, form: str = "linear", dtype: torch.dtype = torch.float32, apply: bool = True, **options: Any
) -> tuple[nn.Module, Any]:
    """A frozen layer and its module in training, all of its parameters in use."""
    torch.manual_seed(0)
    layer = LAYERS[form]().requires_grad_(False)
    options = {"multiplier": 0.8, "lora_dim": 4, "alpha": 2.0, **options}
    module = CLASSES[algo]("lora_unet_probe", layer, **options)
    for name, p in module.named_parameters():
        if name == "dora_scale":
            p.data.mul_(1.1).add_(0.1)
        elif name == "scalar":
            p.data.fill_(0.7)
        else:
            nn.init.normal_(p, std=0.3)
    layer.to(dtype)
    module.to(dtype)
    if apply:
        module.apply_to()
    return layer, module.train()


def input_of(form: str = "linear", dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (3, 5, 24) if form == "linear" else (3, 6, 9, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def results(
    layer: nn.Module, module: nn.Module, x: Tensor, calls: int = 3, cast: torch.dtype | None = None
) -> list[Tensor]:
    """Outputs, and the gradients of x and of every parameter, of a few calls under one seed."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(11)
    with torch.autocast("cpu", cast, enabled=cast is not None):
        outputs = [layer(x) for _ in range(calls)]
    torch.stack([y.double().square().sum() for y in outputs]).sum().backward()
    assert x.grad is not None
    held = [p.grad if p.grad is not None else torch.zeros(1) for p in module.parameters()]
    return [*outputs, x.grad, *held]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error among them, after a look at types and shapes."""
    worst = 0.0
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = a.detach().double(), b.detach().double()
        assert bool(a.isfinite().all())
        worst = max(
            worst, float((a - b).norm()) / max(float(b.norm()), 1e-30) if bool(b.any()) else float(a.norm())
        )
    return worst

"""Hooks on a LoRA layer, inside it and everywhere: each fires, once, and what it changes counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from peft_models import (
    check_layer,
    counted,
    lora_host,
    plain,
    the_layer,
)
from torch import Tensor, nn

import loraaccel


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


HOOKS = {
    "register_forward_hook": lambda *_: None,
    "register_forward_pre_hook": lambda *_: None,
    "register_full_backward_hook": lambda *_: None,
    "register_full_backward_pre_hook": lambda *_: None,
}


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("inner", ["base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default"])
def test_hooks_on_inner_modules_fire(inner: str, register: str) -> None:
    layer = the_layer(lora_host(8, 6, lora_dropout=0.5)).eval()
    loraaccel.patch(layer)
    fired: list[str] = []
    handle = getattr(layer.get_submodule(inner), register)(lambda *_: fired.append(inner))
    frozen = inner == "base_layer"  # then it runs itself, with its hooks, and the adapter is added
    assert loraaccel.patch(layer).reasons == ({} if frozen else {"hooks": 1})
    with counted() as calls:
        layer(normal(5, 8).requires_grad_()).sum().backward()
    assert calls == {"lora_delta" if frozen else "hooks": 1}
    assert fired == [inner]
    handle.remove()
    check_layer(layer, normal(5, 8))


def test_hooks_that_change_the_result_inside() -> None:
    """Layerwise casting and the like: what the hook returns is what counts."""
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    layer.base_layer.register_forward_hook(lambda _m, _x, y: y * 2)
    layer.lora_A["default"].register_forward_pre_hook(lambda _m, x: (x[0] * 3,))
    x = normal(5, 8)
    delta = layer.lora_B["default"](layer.lora_A["default"](x)) * 2  # the pre-hook applies here as well
    torch.testing.assert_close(
        layer(x), F.linear(x, layer.base_layer.weight, layer.base_layer.bias) * 2 + delta
    )


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_the_layer_itself_fire_once(register: str) -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    fired: list[int] = []
    getattr(layer, register)(lambda *_: fired.append(1))
    with counted() as calls:
        layer(normal(5, 8).requires_grad_()).sum().backward()
    assert calls == {"lora_linear": 1}
    assert fired == [1]


def test_hooks_on_the_layer_itself_change_its_result() -> None:
    layer = the_layer(lora_host(8, 6))
    x = normal(5, 8)
    own = plain(layer, x)
    loraaccel.patch(layer)
    layer.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    layer.register_forward_hook(lambda _m, _x, y: y + 1)
    torch.testing.assert_close(layer(x / 2), own + 1)


def test_global_hooks() -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    seen: list[nn.Module] = []
    with counted() as calls, global_hook(seen):
        layer(normal(5, 8))
    assert calls == {"hooks": 1}
    assert layer.base_layer in seen
    assert layer in seen
    check_layer(layer, normal(5, 8))


@contextlib.contextmanager
def global_hook(seen: list[nn.Module]) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        yield
    finally:
        handle.remove()


def test_parameter_and_tensor_hooks_fire() -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    fired: list[str] = []
    layer.lora_A["default"].weight.register_hook(lambda g: fired.append("A") or g * 10)
    layer.lora_B["default"].weight.register_post_accumulate_grad_hook(lambda p: fired.append("B"))
    x = normal(5, 8).requires_grad_()
    y = layer(x)
    y.register_hook(lambda g: fired.append("y"))
    y.sum().backward()
    assert sorted(fired) == ["A", "B", "y"]
    got = layer.lora_A["default"].weight.grad.clone()
    layer.zero_grad()
    plain(layer, x).sum().backward()
    torch.testing.assert_close(got, layer.lora_A["default"].weight.grad)


def test_linear_replaced_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.Linear.forward itself exchanged, as stable-diffusion-webui does: PEFT calls it, so it counts."""
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * 2)
    torch.testing.assert_close(layer(normal(5, 8)), plain(layer, normal(5, 8)))

"""VA4: copies of a patched model are models of their own; other patchers may come and go in any order."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft_models import Mlp, check_layer, counted, lora_host, lora_layers, lora_model, plain, the_layer
from torch import Tensor, nn

import loraaccel


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_state(model: nn.Module) -> nn.Module:
    twin = lora_model(Mlp, seed=77)
    loraaccel.patch(twin)
    twin.load_state_dict(model.state_dict())
    return twin


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a deepcopy": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickle 2": lambda m: pickle.loads(pickle.dumps(m, 2)),
    "torch.save": saved_and_loaded,
    "state dict": by_state,
}


@pytest.mark.parametrize("name", COPIES)
def test_va4_copy_uses_its_own_weights(name: str) -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    x = x_of(12)
    own = model(x)
    twin = COPIES[name](model)
    with counted() as calls:
        assert torch.equal(twin(x), own)
    assert calls == {"lora_linear": 2}
    layers, twins = lora_layers(model), lora_layers(twin)
    assert all(t.forward.__self__ is t and t is not layers[n] for n, t in twins.items())
    assert all(t.__dict__["_loraaccel"] is not layers[n].__dict__["_loraaccel"] for n, t in twins.items())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(twin(x), own)
    assert not model(x).any()
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad.any() for p in twin.parameters() if p.requires_grad)
    assert loraaccel.unpatch(model) == 2
    with counted() as calls:
        twin(x)
    assert calls == {"lora_linear": 2}
    assert loraaccel.unpatch(twin) == 2


def test_va4_copy_of_a_single_layer_or_of_its_forward() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    x = x_of()
    own = layer(x)
    for twin in (
        copy.deepcopy(layer),
        copy.deepcopy(layer.forward),
        pickle.loads(pickle.dumps(layer.forward)),
    ):
        before = layer.lora_B["default"].weight.clone()
        with torch.no_grad():
            layer.lora_B["default"].weight.zero_()
            assert torch.equal(twin(x), own)
            layer.lora_B["default"].weight.copy_(before)


def test_va4_copy_keeps_what_verify_found() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer, kinds=())
    with counted() as calls:
        copy.deepcopy(layer)(x_of())
        pickle.loads(pickle.dumps(layer))(x_of())
    assert calls == {"kind_excluded": 2}


def shallow(layer: nn.Module) -> nn.Module:
    return copy.copy(layer)


def replica(layer: nn.Module) -> nn.Module:
    """One device's share of nn.DataParallel."""
    twin = layer._replicate_for_data_parallel()
    for name, child in layer.named_children():
        setattr(twin, name, child)
    return twin


@pytest.mark.parametrize("make", [shallow, replica])
def test_va4_shallow_copy_is_a_layer_of_its_own(make: Callable[[nn.Module], nn.Module]) -> None:
    """It shares the weights until they are replaced, and has a state of its own."""
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    twin = make(layer)
    twin._modules = dict(twin._modules)
    twin.base_layer = nn.Linear(24, 16)
    twin.scaling = {"default": 0.5}
    x = x_of()
    torch.testing.assert_close(twin(x), plain(twin, x))
    twin._disable_adapters = True
    assert torch.equal(twin(x), twin.base_layer(x))
    check_layer(layer, x)


def test_a_patched_model_is_freed_like_any_other() -> None:
    """No cycle from a layer to itself that would keep gigabytes until the collector comes by."""

    def freed(patched: bool) -> list[bool]:
        model = lora_model(Mlp)
        if patched:
            loraaccel.patch(model)
        watched = [weakref.ref(m) for m in lora_layers(model).values()]
        del model
        return [ref() is None for ref in watched]

    gc.collect()
    gc.disable()
    try:
        assert freed(patched=False) == [True, True]
        assert freed(patched=True) == [True, True]
    finally:
        gc.enable()


# ---- other patchers --------------------------------------------------------------------------------------------------


class Other:
    """Replaces a forward and puts back what it found, as accelerate's hooks do."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.inner, self.calls = layer, layer.forward, 0
        self.had = "forward" in vars(layer)
        layer.forward = self

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)

    def remove(self) -> None:
        if self.had:
            self.layer.forward = self.inner
        else:
            del self.layer.forward


def test_va4_after_another_patcher_nothing_is_installed() -> None:
    layer = the_layer(lora_host())
    other = Other(layer)
    assert loraaccel.patch(layer).reasons == {"forward_replaced": 1}
    layer(x_of())
    assert (layer.forward, other.calls) == (other, 1)
    assert loraaccel.unpatch(layer) == 0
    assert layer.forward is other
    other.remove()
    assert loraaccel.patch(layer).num_fused == 1


def test_va4_another_patcher_on_top_removed_first() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    other = Other(layer)
    with counted() as calls:
        layer(x_of())
    assert (calls, other.calls) == ({"lora_linear": 1}, 1)
    other.remove()
    assert loraaccel.unpatch(layer) == 1
    assert "forward" not in vars(layer)


def test_va4_another_patcher_on_top_removed_last() -> None:
    """unpatch takes effect at once, and what the other patcher puts back later is not ours any more."""
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    other = Other(layer)
    loraaccel.unpatch(layer)
    with counted() as calls:
        layer(x_of())
    assert "lora_linear" not in calls
    assert other.calls == 1
    other.remove()
    with counted() as calls:
        layer(x_of())
    assert "lora_linear" not in calls


def test_va4_accelerate_hooks() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    layer = the_layer(lora_host())
    x = x_of()
    own = plain(layer, x)
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    assert loraaccel.patch(layer).reasons == {"forward_replaced": 1}
    assert torch.equal(layer(x), own)
    hooks.remove_hook_from_module(layer)
    assert torch.equal(layer(x), own)
    assert loraaccel.unpatch(layer) == 0

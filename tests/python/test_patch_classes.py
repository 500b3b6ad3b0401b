"""Classes: what others derive from a patched module's class, and what happens to it afterwards."""

from __future__ import annotations

import functools

import torch
from peft_models import Mlp, check_layer, counted, lora_host, lora_layers, lora_model, the_layer
from torch import Tensor, nn
from torch.nn.utils import parametrize

import loraaccel


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


class Twice(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return t * 2


def test_va4_a_class_derived_from_the_patched_one_survives() -> None:
    """parametrize puts a class of its own on top, as FSDP2 does; unpatch and a second patch leave it in place."""
    layer = the_layer(lora_host())
    layer.register_buffer("extra", torch.ones(3))
    loraaccel.patch(layer)
    parametrize.register_parametrization(layer, "extra", Twice())
    for again in (lambda: loraaccel.patch(layer, kinds=()), lambda: loraaccel.unpatch(layer)):
        again()
        assert layer.extra.tolist() == [2.0] * 3
    with counted() as calls:
        layer(x_of())
    assert calls == {}
    parametrize.remove_parametrizations(layer, "extra")
    check_layer_after = loraaccel.patch(layer)
    assert check_layer_after.num_fused == 1
    check_layer(layer, x_of())


def test_rolled_back_stays_rolled_back_whatever_is_asked_for() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    vars(layer)["_loraaccel"].reason = "verify_failed"
    assert loraaccel.patch(layer, kinds=()).reasons == {"verify_failed": 1}
    assert loraaccel.patch(layer).reasons == {"verify_failed": 1}


def test_vt7_report_of_a_patched_module_with_a_wrapper_on_top() -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model)
    for layer in lora_layers(model).values():
        layer.forward = functools.partial(layer.forward)
    report = loraaccel.patch(model, strict=True)
    with counted() as calls:
        model(x_of(12))
    assert (report.num_fused, calls) == (2, {"lora_linear": 2})


def test_scaling_that_is_not_finite_gives_what_peft_gives() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    layer.scaling["default"] = float("nan")
    with counted() as calls:
        assert layer(x_of()).isnan().all()
    assert calls == {"scaling_type": 1}


def test_weights_that_no_gradient_reads_may_change() -> None:
    """x needs no gradient: nothing reads W or A in the backward pass, and nothing keeps them."""
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    y = layer(x_of())
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.lora_A["default"].weight.zero_()
    y.sum().backward()
    assert layer.lora_A["default"].weight.grad.any()
    assert layer.lora_B["default"].weight.grad.any()


def test_gradients_with_a_graph_may_be_changed_in_place() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer)
    x = x_of().requires_grad_()
    (g,) = torch.autograd.grad(layer(x).sum(), [x], create_graph=True)
    before = g.detach().clone()
    g.mul_(2)
    assert torch.equal(g, before * 2)

"""An error of native code in a backward pass names the layer; the launcher's auto mode gives that layer up."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from attention_models import block
from kohya_modules import LoRAModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel import _autograd, _delta, _expand, _qkv
from loraaccel.integrations import group_scope
from loraaccel.integrations.patched import PatchState, state_of

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def patched(dropout: float = 0.0, **config: Any) -> tuple[nn.Module, dict[str, PatchState]]:
    torch.manual_seed(1)
    config = {"r": 4, "target_modules": ["first", "second"], "lora_dropout": dropout, **config}
    model = peft.get_peft_model(Net(), peft.LoraConfig(init_lora_weights=False, **config))
    loraaccel.patch(model)
    states = {name.split(".")[-1]: state_of(module) for name, module in model.named_modules()}
    return model, {name: state for name, state in states.items() if state is not None}


def broken(*_: Any) -> Any:
    raise RuntimeError("out of everything")


def in_auto_mode(states: dict[str, PatchState]) -> None:
    for state in states.values():
        state.roll_back = True


def gradients(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y = model(x)
    y.float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"x": x.grad, **grads}


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_the_error_names_layer_operator_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = patched()
    y = model(torch.randn(2, 3, 24)).sum()
    monkeypatch.setattr(_autograd, "backward_op", broken)
    with pytest.raises(RuntimeError, match="out of everything") as error:
        y.backward()
    expected = (
        r"in the backward pass of base_model.model.second (lora_linear, gradient [2, 3, 8] torch.float32)"
    )
    assert expected in notes(error.value)


def test_layers_of_two_passes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = patched()
    first = model.base_model.model.first(torch.randn(5, 24)).sum()
    model.base_model.model.second(torch.randn(5, 16))
    monkeypatch.setattr(_autograd, "backward_op", broken)
    with pytest.raises(RuntimeError) as error:
        first.backward()
    assert "base_model.model.first (lora_linear" in notes(error.value)


def test_a_call_by_hand_has_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(2, 24, requires_grad=True)
    y = loraaccel.lora_linear(torch.randn(3, 24), torch.randn(8, 24), None, a, torch.randn(8, 2)).sum()
    monkeypatch.setattr(_autograd, "backward_op", broken)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    assert "backward pass of" not in notes(error.value)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_auto_gives_the_layer_up_and_the_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    model, states = patched()
    x = torch.randn(2, 3, 24)
    with loraaccel.disabled():
        expected = gradients(model, x, dtype)
    real = _autograd.backward_op

    def breaks_in_second(grad: Tensor, *rest: Any) -> Any:
        return broken() if grad.shape[-1] == 8 else real(grad, *rest)

    monkeypatch.setattr(_autograd, "backward_op", breaks_in_second)
    in_auto_mode(states)
    with pytest.warns(RuntimeWarning, match=r"backward pass of .*second.*out of everything"):
        got = gradients(model, x, dtype)
    assert got.keys() == expected.keys()
    limit = 1e-5 if dtype is None else 2e-2
    for name, gradient in expected.items():
        assert got[name].dtype == gradient.dtype
        assert (got[name] - gradient).norm() <= limit * gradient.norm(), name
    assert {name: state.reason for name, state in states.items()} == {"first": "", "second": "native_error"}
    again = gradients(model, x, dtype)  # no warning: second runs its own forward
    for name, gradient in expected.items():
        assert (again[name] - gradient).norm() <= limit * gradient.norm(), name
    assert states["second"].own["native_error"] == 1
    assert states["first"].own["native_error"] == 0


def test_gradients_from_plain_torch_refuse_a_second_derivative_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = patched()
    in_auto_mode(states)
    monkeypatch.setattr(_autograd, "backward_op", broken)
    x = torch.randn(2, 3, 24, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="out of everything"):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        gradient.sum().backward()


def test_auto_cannot_repeat_dropout_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = patched(dropout=0.5)
    y = model(torch.randn(2, 3, 24)).sum()
    monkeypatch.setattr(_autograd, "backward_op", broken)
    in_auto_mode(states)
    with pytest.raises(RuntimeError, match="out of everything") as error:
        y.backward()
    assert "backward pass of base_model.model.second" in notes(error.value)
    assert all(state.reason == "" for state in states.values())


def test_a_foreign_frozen_layer_says_where_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.0

    net = Net()
    net.first = Foreign(24, 16)
    model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["first"], init_lora_weights=False))
    loraaccel.patch(model)
    y = model(torch.randn(3, 24)).sum()
    monkeypatch.setattr(_delta, "backward_op", broken)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    assert "backward pass of base_model.model.first (lora_delta, gradient [3, 16]" in notes(error.value)


FORMS: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "linear": ("linear", {}, _autograd, "lora_linear"),
    "linear, drawn masks": ("linear", {"dropout": 0.3, "rank_dropout": 0.3}, _autograd, "lora_linear"),
    "frozen forward": ("foreign", {}, _delta, "lora_delta"),
    "frozen forward, drawn masks": ("foreign", {"rank_dropout": 0.3}, _delta, "lora_delta"),
    "convolution": ("conv", {}, _expand, "lora_conv2d"),
    "convolution, drawn masks": ("conv", {"dropout": 0.3, "rank_dropout": 0.3}, _expand, "lora_conv2d"),
    "split": ("split", {}, _qkv, "lora_linear"),
    "split, drawn masks": ("split", {"dropout": 0.3, "rank_dropout": 0.3}, _qkv, "lora_linear"),
}


def kohya_layer(form: str, size: int, **options: Any) -> tuple[Any, LoRAModule, Tensor]:
    torch.manual_seed(3)
    layer: Any = nn.Conv2d(8, 130, 3, padding=1) if form == "conv" else nn.Linear(8, 12)
    if form == "foreign":
        layer.forward = types.MethodType(
            lambda self, x: nn.functional.linear(x, self.weight, self.bias), layer
        )
    layer.requires_grad_(False)
    split = [4, 8] if form == "split" else None
    module = LoRAModule("unet_here", layer, 0.5, 4, 2.0, split_dims=split, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.apply_to()
    return layer, module, torch.randn((2, 8, size, size) if form == "conv" else (2, size, 8))


@pytest.mark.parametrize("size", [4, 12])  # of an image: torch's convolution, our product
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_auto_goes_on_in_kohyas_modules(
    name: str, dtype: torch.dtype | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their masks are drawn by the host, so that plain torch has them too."""
    form, options, home, operator = FORMS[name]
    layer, module, x = kohya_layer(form, size, **options)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = layer(leaf)
        wanted = [leaf, *module.parameters()]
        return list(torch.autograd.grad(y.float().square().sum(), wanted))

    expected = run()
    loraaccel.patch(module)
    state = state_of(module)
    assert state is not None
    state.roll_back = True
    assert all(
        relative(g, e) < (1e-5 if dtype is None else 3e-2) for g, e in zip(run(), expected, strict=True)
    )
    monkeypatch.setattr(home, "backward_op", broken)
    with pytest.warns(RuntimeWarning, match=rf"backward pass of .*\({operator}, gradient.*out of everything"):
        got = run()
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        assert relative(g, e) < (1e-5 if dtype is None else 3e-2)
    assert state.reason == "native_error"
    assert all(torch.equal(g, e) for g, e in zip(run(), expected, strict=True))  # its own forward


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "convolution", "split", "frozen forward"])
def test_auto_goes_on_inside_a_checkpoint(
    name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint gives what was saved only once in a backward pass."""
    form, options, home, operator = FORMS[name]
    layer, module, x = kohya_layer(form, 12, **options)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=reentrant)
        for p in module.parameters():
            p.grad = None
        y.square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, *(p.grad for p in module.parameters())]

    expected = run()
    loraaccel.patch(module)
    state = state_of(module)
    assert state is not None
    with monkeypatch.context() as patch:
        patch.setattr(home, "backward_op", broken)
        with pytest.raises(RuntimeError, match="out of everything") as error:
            run()
        assert f"({operator}, gradient" in notes(error.value)
        state.roll_back = True
        with pytest.warns(
            RuntimeWarning, match=rf"backward pass of .*\({operator}, gradient.*out of everything"
        ):
            got = run()
    assert all(relative(g, e) < 1e-5 for g, e in zip(got, expected, strict=True))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.skipif(group_scope.saved_tensors_hooks is None, reason="this torch is too old for groups")
def test_auto_goes_on_after_an_error_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, whose call it was, is given up; k and v stay."""
    monkeypatch.setattr(group_scope, "MIN_WORK", 0)
    model, x = block(), torch.randn(2, 5, 16)
    expected = gradients(model, x)
    loraaccel.patch(model)
    states = {
        name.split(".")[-1]: state for name, m in model.named_modules() if (state := state_of(m)) is not None
    }
    in_auto_mode(states)
    real = _qkv.backward_op
    monkeypatch.setattr(_qkv, "backward_op", broken)
    with pytest.warns(RuntimeWarning, match=r"backward pass of .*to_q \(lora_qkv.*out of everything"):
        got = gradients(model, x)
    monkeypatch.setattr(_qkv, "backward_op", real)
    again = gradients(model, x)
    assert got.keys() == again.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(got[name], gradient) < 1e-5, name
        assert relative(again[name], gradient) < 1e-5, name
    assert {name for name, state in states.items() if state.reason} == {"to_q"}
    assert states["to_q"].own["native_error"] == 1
    assert states["to_k"].own == states["to_v"].own == {}


@pytest.mark.skipif(group_scope.saved_tensors_hooks is None, reason="this torch is too old for groups")
def test_a_group_names_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_scope, "MIN_WORK", 0)
    model = block()
    loraaccel.patch(model)
    y = model(torch.randn(2, 5, 16)).sum()
    monkeypatch.setattr(_qkv, "backward_op", broken)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    assert "to_q (lora_qkv, gradient [2, 5, 16]" in notes(error.value)

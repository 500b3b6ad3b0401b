"""An error of native code in a backward pass names the layer; the launcher's auto mode gives that layer up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_models import block
from torch import Tensor, nn

import loraaccel
from loraaccel import _autograd, _delta, _qkv
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

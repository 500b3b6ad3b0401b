"""patch(frozen=True): linear layers without LoRA, forward bit for bit torch's, the gradient of their input ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loraaccel
from loraaccel.integrations import frozen
from loraaccel.integrations.patched import state_of

peft = pytest.importorskip("peft")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 24, bias=bias), nn.Linear(24, 33, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def net(dtype: torch.dtype = F32, bias: bool = True) -> Net:
    torch.manual_seed(2)
    return Net(bias).to(dtype).requires_grad_(False)


def calls() -> int:
    return loraaccel.info()["calls"]["fused"].get("frozen_linear", 0)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """y, and the gradient of x for a dy that is no constant."""
    x = x.clone().requires_grad_()
    y = model(x)
    torch.manual_seed(3)
    (gradient,) = torch.autograd.grad(y, x, torch.randn(y.shape).to(y.dtype))
    return y.detach(), gradient


@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (130,), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_forward_is_torchs_and_the_gradient_as_exact(rows: Any, bias: bool, dtype: torch.dtype) -> None:
    model = net(dtype, bias)
    x = torch.randn(*rows, 40).to(dtype)
    y, own = run(model, x)
    exact = run(copy.deepcopy(model).double(), x.double())[1]
    report, before = loraaccel.patch(model, frozen=True), calls()
    assert report.modules == ()
    got, gradient = run(model, x)
    assert calls() - before == 2
    assert torch.equal(got, y)
    assert gradient.dtype == dtype
    ours, theirs = ((g.double() - exact).abs().max().item() if g.numel() else 0.0 for g in (gradient, own))
    largest = exact.abs().max().item() if exact.numel() else 0.0
    # tanh is in the chain, in the layers' type: what torch loses, and two roundings.
    assert ours <= theirs + 2 * torch.finfo(dtype).eps * largest


def test_who_runs_the_hosts_own_forward() -> None:
    model = net()
    loraaccel.patch(model, frozen=True)
    own_calls = loraaccel.info()["calls"]["fallback"]
    before, x = calls(), torch.randn(3, 40)
    model(x)  # no gradient of x is wanted
    with torch.no_grad():
        model(x.requires_grad_())
    with loraaccel.disabled():
        model(x)
    with torch.autocast("cpu", dtype=BF16):
        assert model(x).dtype == BF16
    model.first.weight.requires_grad_()
    model.second.weight.requires_grad_()
    model(x).sum().backward()  # dW is torch's
    assert model.first.weight.grad is not None
    assert calls() == before
    assert loraaccel.info()["calls"]["fallback"] == own_calls  # these are no LoRA modules


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_types_that_torch_multiplies_as_fast_are_left_alone(dtype: torch.dtype) -> None:
    model = net(dtype)
    x = torch.randn(4, 40).to(dtype)
    expected = run(model, x)
    loraaccel.patch(model, frozen=True)
    before = calls()
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), expected, strict=True))
    assert calls() == before


def test_unpatch_gives_torchs_class_back() -> None:
    model = net()
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    loraaccel.patch(model, frozen=True)
    loraaccel.patch(model, frozen=True)
    assert list(model.state_dict()) == keys
    assert isinstance(model.first, nn.Linear)
    assert type(model.first).__name__ == "Linear"
    twin = copy.deepcopy(model)
    before = calls()
    run(twin, torch.randn(2, 40))
    assert calls() - before == 2
    assert loraaccel.unpatch(model) == 2
    assert [type(m) for m in model.modules()] == classes
    run(model, torch.randn(2, 40))
    assert calls() - before == 2


def test_layers_inside_lora_modules_stay_torchs() -> None:
    model = peft.get_peft_model(
        net(), peft.LoraConfig(r=4, target_modules=["first"], init_lora_weights=False)
    )
    report = loraaccel.patch(model, frozen=True)
    assert [(m.name, m.fused) for m in report.modules] == [("base_model.model.first", True)]
    lora = model.base_model.model.first
    assert type(lora.base_layer) is nn.Linear
    assert state_of(lora.base_layer) is None
    before, linear = calls(), loraaccel.info()["calls"]["fused"].get("lora_linear", 0)
    run(model, torch.randn(2, 40))
    assert calls() - before == 1
    assert loraaccel.info()["calls"]["fused"]["lora_linear"] == linear + 1


def test_a_layer_that_gets_lora_later_is_given_back_to_it() -> None:
    model = net()
    loraaccel.patch(model, frozen=True)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["first"], init_lora_weights=False)
    )
    x = torch.randn(2, 40)
    expected = run(model, x)
    report = loraaccel.patch(model, frozen=True)
    assert report.num_fused == 1
    assert type(model.base_model.model.first.base_layer) is nn.Linear
    for got, wanted in zip(run(model, x), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_trained_replaced_and_derived_layers_are_not_taken() -> None:
    class Derived(nn.Linear):
        pass

    model = net()
    model.first.bias.requires_grad_()
    model.extra, model.replaced = Derived(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)
    vars(model.replaced)["forward"] = lambda x: x
    assert [name for name, _ in frozen.modules(model)] == ["second", "replaced"]
    loraaccel.patch(model, frozen=True)
    assert [n for n, m in model.named_modules() if state_of(m) is not None] == ["second"]
    assert torch.equal(model.replaced(torch.ones(4)), torch.ones(4))


def test_a_forward_that_somebody_gave_all_linear_layers_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = net(), calls()
    loraaccel.patch(model, frozen=True)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x[..., :1].expand(*x.shape[:-1], 24) * 2)
    x = torch.randn(3, 40, requires_grad=True)
    assert torch.equal(model.first(x), x[:, :1].expand(3, 24) * 2)
    assert calls() == before


def test_wrong_input_raises_torchs_own_error() -> None:
    model = net()
    loraaccel.patch(model, frozen=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 39, requires_grad=True))
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 40, dtype=F64, requires_grad=True))


def test_vt3_checkpoints_and_a_second_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    model = net()
    x = torch.randn(3, 40, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    loraaccel.patch(model, frozen=True)
    for reentrant in (False, True):
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-6)
    y = model(x).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)

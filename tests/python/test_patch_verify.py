"""patch(verify=k): right layers pass, wrong ones go back to PEFT's forward for good."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from peft_models import (
    LoraLinear,
    Mlp,
    check_layer,
    counted,
    lora_host,
    lora_model,
    plain,
    the_layer,
)
from torch import Tensor, nn

import loraaccel


def x_of(width: int = 24, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wrong_operator() -> Iterator[None]:
    """loraaccel::lora_linear with the scale forgotten."""

    def wrong(x, weight, bias, lora_A, lora_B, scalings, dropouts, seed):
        y = nn.functional.linear(x, weight, bias)
        hidden = [nn.functional.linear(x, a).float() for a in lora_A]
        for h, b in zip(hidden, lora_B, strict=True):
            y = y + (h @ b.float().t()).to(y.dtype)
        return y, torch.cat(hidden, -1).flatten(0, -2)

    with torch.library._scoped_library("loraaccel", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
            library.impl("lora_linear", wrong, "CPU", allow_override=True)
        yield


@pytest.mark.parametrize(
    ("dtype", "adapters"),
    [(torch.float64,) * 2, (torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16,) * 2,
     (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)], ids=str,
)  # fmt: skip
def test_verify_passes_correct_layers(
    dtype: torch.dtype, adapters: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = the_layer(lora_host(256, 64, dtype=dtype, adapter_dtype=adapters))
    loraaccel.patch(layer, verify=2)
    ran: list[int] = []
    own = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda m, *a: ran.append(1) or own(m, *a))
    x = x_of(256, 64).to(dtype)
    with counted() as calls:
        for _ in range(4):
            layer(x)
    assert calls == {"lora_linear": 4}
    assert len(ran) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.registered
def test_verify_rolls_back_a_wrong_layer(dtype: torch.dtype, wrong_operator: None) -> None:
    model = lora_model(Mlp, dtype=dtype)
    x = x_of(12).to(dtype)
    own = model(x)
    loraaccel.patch(model)
    assert not torch.allclose(model(x), own, rtol=0.1)  # the operator is wrong indeed
    loraaccel.unpatch(model)
    loraaccel.patch(model, verify=1)
    with pytest.warns(RuntimeWarning, match=r"verify.*model\.(up|down)") as warned:
        got = model(x)
    assert len(warned) == 2
    assert torch.equal(got, own)
    with counted() as calls:
        assert torch.equal(model(x), own)
    assert calls == {"verify_failed": 2}


@pytest.mark.registered
def test_vt7_a_second_report_knows_what_was_rolled_back(wrong_operator: None) -> None:
    model = lora_model(Mlp)
    loraaccel.patch(model, verify=1)
    with pytest.warns(RuntimeWarning, match="verify"):
        model(x_of(12))
    assert loraaccel.patch(model).reasons == {"verify_failed": 2}


@pytest.mark.registered
def test_verify_gives_a_rolled_back_layer_its_gradients(wrong_operator: None) -> None:
    layer = the_layer(lora_host())
    x = x_of().requires_grad_()
    plain(layer, x).sum().backward()
    own = [p.grad.clone() for p in (x, *layer.lora_A.parameters(), *layer.lora_B.parameters())]
    layer.zero_grad()
    x.grad = None
    loraaccel.patch(layer, verify=1)
    with pytest.warns(RuntimeWarning, match="verify"):
        layer(x).sum().backward()
    got = [p.grad for p in (x, *layer.lora_A.parameters(), *layer.lora_B.parameters())]
    assert all(map(torch.equal, got, own))


@pytest.mark.registered
def test_verify_compares_without_dropout_and_draws_nothing_for_it(wrong_operator: None) -> None:
    layer = the_layer(lora_host(lora_dropout=0.5))
    torch.manual_seed(0)
    own = layer(x_of())
    after = torch.get_rng_state()
    loraaccel.patch(layer, verify=1)
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="verify"):
        y = layer(x_of())  # its own forward's, whose masks are the first numbers
    assert torch.equal(y, own)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(m.training for m in layer.modules())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_verify_does_not_blame_the_layer_for_its_input(value: float) -> None:
    """A step of fp16 training that overflows: both outputs have the same NaN, and the layer is right."""
    layer = the_layer(lora_host())
    loraaccel.patch(layer, verify=1)
    x = x_of()
    x[0, 0] = value
    layer(x)
    check_layer(layer, x_of())


def test_verify_under_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = the_layer(lora_host())
    loraaccel.patch(layer, verify=1)
    x = x_of().requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_verify_does_not_break_a_compiled_graph() -> None:
    layer = the_layer(lora_host())
    loraaccel.patch(layer, verify=1)
    x = x_of()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), plain(layer, x))

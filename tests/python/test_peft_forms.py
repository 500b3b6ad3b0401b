"""PEFT's LoRA layers beyond the plain linear one, patched: values and gradients, counts, dropout, states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from peft.helpers import DoraCaching
from peft_models import (
    Host,
    Mlp,
    add_adapter,
    config,
    counted,
    distance,
    lora_model,
    plain,
    results,
    the_layer,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import loraaccel
from loraaccel import _conv_product
from reference.tolerance import unit_roundoff

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Packed(nn.Linear):
    """VT6: inputs 8, outputs 6, two weights to a byte in a [1, 24] buffer beside a scale."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.weight = nn.Parameter(torch.randint(0, 255, (1, 24), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.flatten()
        dense = (torch.stack([w & 15, w >> 4], 1).view(6, 8).to(x.dtype) - 8) * 0.1
        return F.linear(x, dense, self.bias)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(6, 8)
    layer.weight.data.normal_()
    return layer


def replaced() -> nn.Module:
    layer = nn.Linear(8, 6)
    layer.register_forward_hook(lambda _m, _x, y: y * 3)
    return layer


def embed() -> nn.Module:
    return nn.Embedding(11, 6, padding_idx=2)


def linear(bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(8, 6, bias=bias)


def conv(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*args, **kwargs)


# name: the layer that is adapted, changes of the LoraConfig, the kind counted
FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "LoRA bias": (linear(), {"lora_bias": True}, "lora_linear"),
    "LoRA bias alone": (linear(False), {"lora_bias": True}, "lora_linear"),
    "DoRA": (linear(), {"use_dora": True}, "dora_linear"),
    "DoRA without bias": (linear(False), {"use_dora": True}, "dora_linear"),
    "rsLoRA": (linear(), {"use_rslora": True}, "lora_linear"),
    "Conv1D": (conv1d, {"fan_in_fan_out": True}, "lora_linear"),
    "DoRA Conv1D": (conv1d, {"fan_in_fan_out": True, "use_dora": True}, "dora_linear"),
    "VT6 packed": (Packed, {}, "lora_delta"),
    "another class": (lambda: Scaled(8, 6), {}, "lora_delta"),
    "parametrised": (linear(), {}, "lora_delta"),
    "hooks": (replaced, {}, "lora_delta"),
    "convolution": (conv(4, 6, 3, padding=1), {}, "lora_conv2d"),
    "convolution with stride": (conv(4, 6, 3, stride=2, padding=(1, 2), bias=False), {}, "lora_conv2d"),
    "convolution with stride, wide": (conv(4, 128, 3, stride=2, padding=1), {}, "lora_conv2d"),
    "convolution 1x1": (conv(4, 6, 1), {}, "lora_conv2d"),
    "VS1 grouped convolution": (conv(4, 4, 3, groups=2, padding=1), {}, "lora_conv2d"),
    "same": (conv(4, 6, 3, padding="same"), {}, "lora_conv2d"),
    "embedding": (embed, {}, "lora_embedding"),
}  # fmt: skip


def build(name: str, dtype: torch.dtype, adapters: torch.dtype, **more: Any) -> nn.Module:
    make, changes, _ = FORMS[name]
    torch.manual_seed(0)
    host = nn.Sequential(make())
    for t in host.parameters():
        if t.is_floating_point():
            t.data = t.data.to(dtype)
    settings = config(target_modules=["0"], **changes, **more)
    layer = the_layer(peft.get_peft_model(host, settings, autocast_adapter_dtype=False))
    for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        getattr(layer, part).to(adapters)
    if name == "parametrised":
        parametrize.register_parametrization(layer.base_layer, "weight", Doubled())
    return layer


def input_of(layer: nn.Module, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = type(layer).__name__
    if kind == "Embedding":
        return torch.randint(0, 11, (3, 5), generator=generator)
    shape = (2, 4, 24, 20) if kind == "Conv2d" else (3, 5, 8)
    return torch.randn(shape, generator=generator).to(dtype)


def values(layer: nn.Module, forward: Callable[..., Any], x: Tensor) -> dict[str, Tensor | None]:
    if x.is_floating_point():
        return results(layer, forward, x)
    y = forward(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=F64).to(y.dtype)
    leaves = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    return {
        "y": y.detach(),
        **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True)),
    }


def check(layer: nn.Module, x: Tensor, kind: str) -> None:
    """As near to float64 as PEFT is, and PEFT's dtypes."""
    own = values(layer, lambda x: plain(layer, x), x)
    exact = copy.deepcopy(layer)
    exact.double() if not isinstance(
        exact.base_layer, Packed
    ) else exact.lora_A.double() and exact.lora_B.double()
    wide = x.double() if x.is_floating_point() else x
    if isinstance(exact.base_layer, Packed):
        exact.base_layer.bias.data = exact.base_layer.bias.data.double()
    ref = values(exact, lambda x: plain(exact, x), wide)
    loraaccel.patch(layer, strict=True)
    with counted() as calls:
        got = values(layer, layer, x)
    assert calls == {kind: 1}
    assert got.keys() == own.keys() == ref.keys()
    floats = [t.dtype for t in (x, *layer.parameters()) if t.dtype in (F32, F64, BF16, F16)]
    floor = 4 * max(unit_roundoff(t) for t in floats) if F64 not in floats else 1e-13
    for name, g in got.items():
        if own[name] is None:
            assert g is None, name
            continue
        assert g is not None, name
        assert (g.shape, g.dtype) == (own[name].shape, own[name].dtype), name
        assert g.is_contiguous() == own[name].is_contiguous(), name
        if g.dim() == 4:
            last = [t.is_contiguous(memory_format=torch.channels_last) for t in (g, own[name])]
            assert last[0] == last[1], name
        theirs, ours = distance(own[name], ref[name]), distance(g, ref[name])
        assert ours <= 2 * theirs + floor, f"{name}: {ours:.2e} from float64, PEFT {theirs:.2e}"


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, adapters = dtypes
    layer = build(name, dtype, adapters).eval()
    check(layer, input_of(layer, dtype), FORMS[name][2])


@pytest.mark.parametrize("name", [n for n, (_, changes, _) in FORMS.items() if not changes.get("use_dora")])
def test_several_adapters(name: str) -> None:
    layer = build(name, F32, F32).eval()
    torch.manual_seed(3)
    options = config(**FORMS[name][1])
    for other, rank in (("b", 2), ("c", 6)):
        layer.update_layer(other, rank, 8, config=options, init_lora_weights=False)
    layer.set_adapter(["c", "default", "b"])
    check(layer, input_of(layer, F32), FORMS[name][2])


@pytest.mark.parametrize("name", FORMS)
def test_channels_last_and_strides(name: str) -> None:
    layer = build(name, F32, F32).eval()
    x = input_of(layer, F32)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    elif x.is_floating_point() and "Conv1D" not in name:  # (that one takes views of x)
        x = x.transpose(0, 1)
    check(layer, x, FORMS[name][2])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["convolution", "convolution with stride, wide", "convolution 1x1"])
def test_convolutions_reach_the_native_product(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the values of these forms were compared for: one product for both convolutions and the update."""
    calls = []
    product = _conv_product.conv_product
    monkeypatch.setattr(_conv_product, "_MATRIX_UNIT", False)
    monkeypatch.setattr(_conv_product, "conv_product", lambda *a: calls.append(1) or product(*a))
    layer = build(name, dtype, F32).eval()
    check(layer, input_of(layer, dtype), "lora_conv2d")
    assert calls == [1]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cast", [BF16, F16], ids=str)
def test_autocast(name: str, cast: torch.dtype) -> None:
    """Output and gradients have PEFT's dtypes; values agree to the type's precision."""
    layer = build(name, F32, F32).eval()
    x = input_of(layer, F32)
    with torch.autocast("cpu", dtype=cast):
        own = values(layer, lambda x: plain(layer, x), x)
    loraaccel.patch(layer, strict=True)
    with torch.autocast("cpu", dtype=cast), counted() as calls:
        got = values(layer, layer, x)
    assert calls == {FORMS[name][2]: 1}
    for key, g in got.items():
        if own[key] is None:
            assert g is None
            continue
        assert g.dtype == own[key].dtype, key
        assert distance(g, own[key]) <= 16 * unit_roundoff(cast), key


@pytest.mark.parametrize("name", FORMS)
def test_no_grad_and_no_rows(name: str) -> None:
    layer = build(name, F32, F32).eval()
    loraaccel.patch(layer, strict=True)
    x = input_of(layer, F32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(layer, x))
    empty = x[:0]
    y = layer(empty)
    assert y.shape == plain(layer, empty).shape
    y.sum().backward()
    for n, p in layer.named_parameters():
        if p.requires_grad and ("lora_A" in n or "lora_B" in n or "embedding" in n):
            assert p.grad is not None, n
            assert not p.grad.any(), n
    torch.testing.assert_close(layer(x), plain(layer, x))


@pytest.mark.parametrize("name", [n for n in FORMS if n != "embedding"])
def test_dropout(name: str) -> None:
    """The mean over many masks is the output without dropout, within 4 sigma; no mask is shared; seeds repeat it."""
    layer = build(name, F32, F32, lora_dropout=0.4)
    x = input_of(layer, F32)
    expected = plain(layer.eval(), x).detach()
    loraaccel.patch(layer, strict=True)
    layer.train()
    torch.manual_seed(5)
    with torch.no_grad():
        runs = torch.stack([layer(x) for _ in range(400)])
        torch.manual_seed(5)
        assert torch.equal(layer(x), runs[0])
    assert not torch.equal(runs[0], runs[1])
    if FORMS[name][1].get("use_dora"):
        return  # the norm of the adapted weight is not linear in ... see the next test
    error = (runs.mean(0) - expected).abs()
    assert (error <= 5 * runs.std(0) / 400**0.5 + 1e-5).all()


@pytest.mark.parametrize("name", ["DoRA", "DoRA Conv1D"])
def test_dora_with_dropout_is_pefts(name: str) -> None:
    """With the mask of torch's generator, which both draw in the same place."""
    layer = build(name, F64, F64, lora_dropout=0.4)
    x = input_of(layer, F64)
    torch.manual_seed(3)
    own = values(layer, lambda x: plain(layer, x), x)
    loraaccel.patch(layer, strict=True)
    torch.manual_seed(3)
    with counted() as calls:
        got = values(layer, layer, x)
    assert calls == {"dora_linear": 1}
    for key, g in got.items():
        if own[key] is not None:
            torch.testing.assert_close(g, own[key], rtol=1e-10, atol=1e-10)


# ---- what changes after patching -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_merge_unmerge_disable(name: str) -> None:
    layer = build(name, F32, F32).eval()
    x = input_of(layer, F32)
    loraaccel.patch(layer, strict=True)
    own = plain(layer, x)
    if name not in (
        "VT6 packed",
        "another class",
        "parametrised",
        "hooks",
        "VS1 grouped convolution",
        "LoRA bias alone",
    ):
        layer.merge()
        with counted() as calls:
            torch.testing.assert_close(layer(x), own, rtol=1e-4, atol=1e-4)
        assert calls == {"merged": 1}
        layer.unmerge()
    layer.enable_adapters(False)
    with counted() as calls:
        assert torch.equal(layer(x), plain(layer, x))
    assert calls == {"disabled": 1}
    layer.enable_adapters(True)
    with counted() as calls:
        torch.testing.assert_close(layer(x), own, rtol=1e-4, atol=1e-4)
    assert calls == {FORMS[name][2]: 1}


def test_dora_follows_the_weights() -> None:
    """W, A, B or the scale may change between two calls, even through .data; with PEFT's DoraCaching the norms stay."""
    layer = build("DoRA", F32, F32).eval()
    x = input_of(layer, F32)
    loraaccel.patch(layer, strict=True)
    changes = [
        lambda: layer.base_layer.weight.data.mul_(2),
        lambda: layer.lora_A["default"].weight.data.add_(0.5),
        lambda: torch.nn.init.normal_(layer.lora_B["default"].weight),
        lambda: layer.scale_layer(3.0),
        lambda: setattr(layer.base_layer, "weight", nn.Parameter(torch.randn(6, 8))),
        lambda: layer.base_layer.weight.add_(1.0),
    ]
    with torch.no_grad():
        for change in changes:
            torch.testing.assert_close(layer(x), plain(layer, x))
            change()
            torch.testing.assert_close(layer(x), plain(layer, x))
        with DoraCaching():
            torch.testing.assert_close(layer(x), plain(layer, x))
            before = layer(x)
            layer.base_layer.weight.data.mul_(2)
            assert not torch.allclose(layer(x), before)  # the product is that of the new weight
            layer.base_layer.weight.mul_(0.5)
            torch.testing.assert_close(layer(x), before)


def test_a_foreign_layer_whose_output_does_not_fit() -> None:
    """It ran already: PEFT's arithmetic finishes, with its result or its error."""

    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).double()

    layer = the_layer(lora_model(lambda: nn.Sequential(Wide(8, 6)), target_modules=["0"])).eval()
    loraaccel.patch(layer, strict=True)
    x = torch.randn(3, 8)
    got = layer(x)
    torch.testing.assert_close(got, plain(layer, x))
    assert got.dtype == F64


def test_foreign_layers_output_is_not_changed() -> None:
    class Cached(nn.Linear):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    layer = the_layer(lora_model(lambda: nn.Sequential(Cached(8, 6)), target_modules=["0"])).eval()
    loraaccel.patch(layer, strict=True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        layer(x)
        assert torch.equal(layer.base_layer.kept, F.linear(x, layer.base_layer.weight, layer.base_layer.bias))


def test_verify() -> None:
    for name, (_, _, kind) in FORMS.items():
        layer = build(name, F32, F32).eval()
        loraaccel.patch(layer, strict=True, verify=2)
        with counted() as calls:
            for seed in range(3):
                layer(input_of(layer, F32, seed))
        assert calls == {kind: 3}
        assert vars(layer)["_loraaccel"].verify == 0


# ---- an adapter for each sample --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (BF16, BF16), (F64, F64)], ids=str)
@pytest.mark.parametrize("lead", [(6,), (6, 4), (6, 2, 3)], ids=str)
def test_mixed_batch(lead: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model = lora_model(
        lambda: Host(8, 6, True), target_modules=["proj"], dtype=dtypes[0], adapter_dtype=dtypes[1]
    )
    add_adapter(model, "b", r=2)
    add_adapter(model, "c", r=7)
    model.eval()
    layer = the_layer(model)
    x = torch.randn(*lead, 8, generator=torch.Generator().manual_seed(1)).to(dtypes[0])
    names = ["c", "__base__", "default", "c", "b", "__base__"]
    own = model(x, adapter_names=names)
    loraaccel.patch(model, strict=True)
    with counted() as calls, torch.no_grad():
        got = model(x, adapter_names=names)
    assert calls == {"lora_linear_batched": 1}
    assert got.dtype == own.dtype
    exact = copy.deepcopy(model).double()
    loraaccel.unpatch(exact)
    ref = exact(x.double(), adapter_names=names)
    assert distance(got, ref) <= distance(own, ref) + 4 * unit_roundoff(got.dtype)
    alone = [layer.base_layer(x[i : i + 1]) if n == "__base__" else None for i, n in enumerate(names)]
    for i, base in enumerate(alone):
        if base is not None:
            torch.testing.assert_close(got[i : i + 1], base)


def test_mixed_batch_gradients() -> None:
    """PEFT's mixed batches are for inference; x still has a gradient there, and so have the adapters."""
    model = lora_model(Mlp)
    add_adapter(model, "b", r=2)
    model.eval()
    x = torch.randn(4, 12, requires_grad=True)
    names = ["b", "default", "__base__", "b"]
    leaves = [x, *(p for n, p in model.named_parameters() if "lora_" in n)]
    for p in leaves:
        p.requires_grad_()
    own = torch.autograd.grad(model(x, adapter_names=names).square().sum(), leaves)
    loraaccel.patch(model, strict=True)
    got = torch.autograd.grad(model(x, adapter_names=names).square().sum(), leaves)
    for g, o in zip(got, own, strict=True):
        torch.testing.assert_close(g, o, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [["b"], ["default", "missing", "b"], ["b", "b", "merged"]], ids=str)
def test_mixed_batch_errors_are_pefts(wrong: list[str]) -> None:
    model = lora_model(lambda: Host(8, 6, True), target_modules=["proj"])
    add_adapter(model, "b", r=2)
    model.eval()
    x = torch.randn(3, 8)
    if "merged" in wrong:
        model.merge_adapter()
        wrong = ["b", "b", "b"]
    with pytest.raises(ValueError, match="adapter") as own:
        model(x, adapter_names=wrong)
    loraaccel.patch(model)
    with pytest.raises(ValueError, match="adapter") as got:
        model(x, adapter_names=wrong)
    assert str(got.value) == str(own.value)

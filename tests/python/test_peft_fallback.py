"""What has no fused form runs PEFT's own forward, bit for bit, under the right reason code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from peft_models import (
    Host,
    add_adapter,
    check_layer,
    config,
    counted,
    lora_host,
    lora_model,
    plain,
    results,
    the_layer,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize

import loraaccel
from loraaccel.integrations.reasons import REASONS


class Marked(Tensor):
    """A tensor subclass, as quantised and distributed tensors are."""


class TanhLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def single(make: Callable[[], nn.Module], **changes: Any) -> nn.Module:
    """The LoRA layer of a model whose one adapted part is make()."""
    return the_layer(lora_model(lambda: nn.Sequential(make()), target_modules=["0"], **changes))


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(6, 8)
    layer.weight.data.normal_()
    return layer


def with_change(change: Callable[[nn.Module], Any], **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = the_layer(lora_host(8, 6, **changes))
        change(layer)
        return layer

    return build


def set_attribute(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, value)

    return change


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def subclass_weight(path: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        linear = layer.get_submodule(path)
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Marked))

    return change


def merged(layer: nn.Module) -> None:
    layer.merge()


# name: what builds the layer, its reason
STATES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Conv1d": (lambda: single(lambda: nn.Conv1d(3, 4, 3)), "unsupported_module"),
    "DoRA convolution": (lambda: single(lambda: nn.Conv2d(3, 4, 3), use_dora=True), "variant"),
    "biased convolution": (lambda: single(lambda: nn.Conv2d(3, 4, 3), lora_bias=True), "lora_bias"),
    "DoRA embedding": (lambda: single(lambda: nn.Embedding(8, 6), use_dora=True), "variant"),
    "DoRA of a foreign layer": (lambda: single(lambda: TanhLinear(8, 6), use_dora=True), "variant"),
    "parametrised A": (
        with_change(lambda m: parametrize.register_parametrization(m.lora_A["default"], "weight", Doubled())),
        "adapter_class",
    ),
    "A forward replaced": (
        with_change(lambda m: setattr(m.lora_A["default"], "forward", lambda x: x[..., :4])),
        "adapter_class",
    ),
    "B forward replaced": (
        with_change(lambda m: setattr(m.lora_B["default"], "forward", lambda x: F.pad(x, (0, 2)))),
        "adapter_class",
    ),
    "dropout forward replaced": (
        with_change(lambda m: setattr(m.lora_dropout["default"], "forward", lambda x: x * 3)),
        "dropout_class",
    ),
    "dropout class": (
        with_change(lambda m: m.lora_dropout.update({"default": nn.Hardtanh()})),
        "dropout_class",
    ),
    "A is no Linear": (
        with_change(lambda m: m.lora_A.update({"default": TanhLinear(8, 4, bias=False)})),
        "adapter_class",
    ),
    "A with a bias": (
        with_change(lambda m: setattr(m.lora_A["default"], "bias", nn.Parameter(torch.ones(4)))),
        "lora_bias",
    ),
    "merged": (with_change(merged), "merged"),
    "disabled": (with_change(lambda m: m.enable_adapters(False)), "disabled"),
    "no active adapter": (with_change(set_attribute("_active_adapter", ["other"])), "no_active_adapter"),
    "scale 0": (with_change(lambda m: m.set_scale("default", 0)), "zero_scaling"),
    "scaling that trains": (
        with_change(lambda m: m.scaling.update(default=torch.tensor(2.0, requires_grad=True))),
        "scaling_type",
    ),
    "base subclass": (with_change(subclass_weight("base_layer")), "tensor_subclass"),
    "A subclass": (with_change(subclass_weight("lora_A.default")), "tensor_subclass"),
    "float64 adapter": (with_change(lambda m: m.lora_B.double() and m.lora_A.double()), "dtype"),
    "float64 base": (with_change(lambda m: m.base_layer.double()), "dtype"),
}
KINDS = {
    "Conv1d": "Conv1d", "DoRA convolution": "lora_conv2d", "biased convolution": "lora_conv2d",
    "DoRA embedding": "lora_embedding",
}  # fmt: skip  # of all others: lora_linear


def input_of(layer: nn.Module) -> Tensor:
    if type(layer).__name__ == "Embedding":
        return torch.tensor([[1, 2, 1]])
    dtype = layer.base_layer.weight.dtype if layer.base_layer.weight.is_floating_point() else torch.float32
    shapes = {"Conv1d": (2, 3, 7), "Conv2d": (2, 3, 7, 7)}
    return normal(*shapes.get(type(layer).__name__, (5, 8))).to(dtype)


@pytest.mark.parametrize("state", STATES)
def test_vt7_vt6_state_of_a_layer(state: str) -> None:
    """One reason, in the report and at every call; PEFT's own bits; the fused form again when the state has passed."""
    torch.manual_seed(0)
    build, reason = STATES[state]
    kind = KINDS.get(state, "lora_linear")
    layer = build()
    x = input_of(layer)
    own = plain(layer, x)
    report = loraaccel.patch(layer)
    assert reason in REASONS
    with counted() as calls:
        got = layer(x)
    assert torch.equal(got, own)
    assert got.dtype == own.dtype
    assert calls == {reason: 1}
    assert [(m.name, m.kind, m.fused, m.reason) for m in report.modules] == [("", kind, False, reason)]
    assert (report.num_fused, report.num_fallback, report.reasons) == (0, 1, {reason: 1})
    if x.is_floating_point() and own.requires_grad:
        mine, theirs = results(layer, layer, x), results(layer, lambda x: plain(layer, x), x)
        assert all(torch.equal(mine[n], theirs[n]) for n in mine if theirs[n] is not None)
    with pytest.raises(RuntimeError, match=reason):
        loraaccel.patch(build(), strict=True)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_switching_to_a_state_and_back(changes: dict[str, Any]) -> None:
    model = lora_host(8, 6)
    loraaccel.patch(model)
    add_adapter(model, "b", **changes)
    layer, x = the_layer(model), normal(5, 8)
    alone, both = ("dora_linear", "variant") if "use_dora" in changes else ("lora_linear", "lora_linear")
    for active, expected in (("b", alone), ("default", "lora_linear"), (["default", "b"], both)):
        layer.set_adapter(active)
        with counted() as calls:
            got = layer(x)
        assert calls == {expected: 1}
        torch.testing.assert_close(got, plain(layer, x))


# ---- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_vs2_lora_bias_is_scaled(bias: bool) -> None:
    """alpha 32, r 4: b + 8 * [1, 2, 3]; merged the same, and refused where the frozen layer has no bias."""
    layer = the_layer(lora_host(4, 3, bias=bias, r=4, lora_alpha=32, lora_bias=True))
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()
        layer.lora_B["default"].bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    loraaccel.patch(layer)
    x = torch.zeros(2, 4)
    b = layer.base_layer.bias.detach().clone() if bias else torch.zeros(3)
    expected = (b + torch.tensor([8.0, 16.0, 24.0])).expand(2, 3)
    assert torch.equal(layer(x), expected)
    weight = layer.base_layer.weight.clone()
    if bias:
        layer.merge(safe_merge=True)
        assert torch.equal(layer(x), expected)
    else:
        with pytest.raises(RuntimeError, match="bias"):
            layer.merge(safe_merge=True)
        assert torch.equal(layer.base_layer.weight, weight)
        assert torch.equal(layer(x), expected)


# ---- the call --------------------------------------------------------------------------------------------------------


def check_call(layer: nn.Module, call: Callable[[Callable[..., Any]], Any], reason: str) -> None:
    """call(forward) gives the same through the patched layer and through PEFT's forward, under this reason."""
    own = call(lambda *a, **k: plain(layer, *a, **k))
    with counted() as calls:
        got = call(layer)
    assert set(calls) == {reason}
    assert type(got) is type(own)
    torch.testing.assert_close(got, own)


CALLS: dict[str, tuple[Callable[[Callable[..., Any]], Any], str]] = {
    "another argument": (lambda f: f(normal(2, 8), alora_offsets=None), "extra_arguments"),
    "subclass": (lambda f: f(normal(5, 8).as_subclass(Marked)), "tensor_subclass"),
    "grad": (lambda f: torch.func.grad(lambda x: f(x).square().sum())(normal(5, 8)), "transform"),
    "vmap": (lambda f: torch.func.vmap(f)(normal(3, 5, 8)), "transform"),
    "jacrev": (lambda f: torch.func.jacrev(f)(normal(8)), "transform"),
    "jvp": (lambda f: torch.func.jvp(f, (normal(5, 8),), (torch.ones(5, 8),))[1], "transform"),
    "hessian": (lambda f: torch.func.hessian(lambda x: f(x).pow(3).sum())(normal(8)), "transform"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_without_fused_form(name: str) -> None:
    layer = the_layer(lora_host(8, 6)).eval()
    loraaccel.patch(layer, strict=True)
    check_call(layer, *CALLS[name])
    check_layer(layer, normal(5, 8))


def test_arguments_that_say_nothing_do_not_matter() -> None:
    layer = the_layer(lora_host(8, 6)).eval()
    x = normal(5, 8)
    loraaccel.patch(layer, strict=True)
    with counted() as calls:
        assert torch.equal(layer(x=x), layer(x))
        assert torch.equal(layer(x, adapter_names=None), layer(x=x, adapter_names=None))
    assert calls == {"lora_linear": 4}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*")
@pytest.mark.parametrize(
    "convert",
    [lambda x: x.to_sparse(), lambda x: x.to_mkldnn(), lambda x: torch.nested.nested_tensor([x, x[:2]])],
    ids=["sparse", "mkldnn", "nested"],
)
def test_x_of_another_layout_runs_what_peft_runs(convert: Callable[[Tensor], Tensor]) -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    with torch.no_grad():
        x = convert(normal(5, 8))
        own, got = plain(layer, x), layer(x)
        dense = (lambda t: t.to_padded_tensor(0.0)) if x.is_nested else (lambda t: t.to_dense())
        torch.testing.assert_close(dense(got), dense(own))


def test_forward_mode_differentiation() -> None:
    import torch.autograd.forward_ad as fwd

    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer, strict=True)
    x, t = normal(5, 8), torch.ones(5, 8)
    with fwd.dual_level(), counted() as calls:
        tangent = fwd.unpack_dual(layer(fwd.make_dual(x, t))).tangent
    assert calls == {"transform": 1}
    torch.testing.assert_close(tangent, plain(layer, t) - layer.base_layer.bias)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace() -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer, strict=True)
    with counted() as calls:
        traced = torch.jit.trace(layer, normal(5, 8), check_trace=False)
    assert calls == {"transform": 1}
    torch.testing.assert_close(traced(normal(3, 8)), plain(layer, normal(3, 8)))


def test_functional_call_uses_the_given_parameters() -> None:
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer, strict=True)
    other = {n: torch.randn_like(p) for n, p in layer.named_parameters()}
    with counted() as calls:
        got = torch.func.functional_call(layer, other, (normal(5, 8),))
    assert calls == {"lora_linear": 1}
    delta = (
        F.linear(F.linear(normal(5, 8), other["lora_A.default.weight"]), other["lora_B.default.weight"]) * 2
    )
    torch.testing.assert_close(
        got, F.linear(normal(5, 8), other["base_layer.weight"], other["base_layer.bias"]) + delta
    )


def test_batched_gradients() -> None:
    """autograd.functional.jacobian(vectorize=True): the backward pass runs under vmap, the forward pass did not."""
    layer = the_layer(lora_host(8, 6))
    loraaccel.patch(layer)
    own = torch.autograd.functional.jacobian(lambda x: plain(layer, x), normal(5, 8), vectorize=True)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, normal(5, 8), vectorize=True), own)


def test_input_cast_switched_off() -> None:
    """peft.helpers.disable_input_dtype_casting: x meets the adapter uncast, which raises where the types differ."""
    from peft.helpers import disable_input_dtype_casting

    model = lora_host(8, 6, dtype=torch.bfloat16, adapter_dtype=torch.float32)
    loraaccel.patch(model, strict=True)
    x = normal(5, 8).bfloat16()
    with disable_input_dtype_casting(model), counted() as calls, pytest.raises(RuntimeError, match="dtype"):
        model(x)
    assert calls == {"dtype": 1}
    check_layer(the_layer(model), x)


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_classes_derived_from_loras_are_left_alone() -> None:
    """A registered custom layer and AdaLoRA's are LoRA layers, and no operator knows what they compute."""

    class Half(peft.tuners.lora.layer.Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs) / 2

    lora = config(target_modules=["proj"])
    lora._register_custom_module({nn.Linear: Half})
    ada = peft.AdaLoraConfig(target_modules=["proj"], init_r=4, total_step=10, init_lora_weights=False)
    for settings, kind in ((lora, "Half"), (ada, "SVDLinear")):
        model = peft.get_peft_model(Host(8, 6, True), settings)
        x = normal(5, 8)
        own = model(x)
        report = loraaccel.patch(model)
        assert [(m.kind, m.reason) for m in report.modules] == [(kind, "unsupported_module")]
        with counted() as calls:
            assert torch.equal(model(x), own)
        assert calls == {"unsupported_module": 1}


def test_dora_of_a_peft_without_variants_is_seen() -> None:
    """Before PEFT 0.16 a layer had use_dora and no lora_variant; computing plain LoRA there would be silently wrong."""
    layer = the_layer(lora_host(8, 6, use_dora=True))
    del layer.lora_variant
    assert loraaccel.patch(layer).reasons == {"variant": 1}


def test_attention_and_parameter_layers_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x)[0])

    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), config(target_modules=["attention"], target_parameters=["out.weight"]))
    x = normal(2, 3, 8)
    own = model(x)
    report = loraaccel.patch(model)
    assert {m.name.removeprefix("base_model.model."): (m.kind, m.reason) for m in report.modules} == {
        "attention": ("MultiheadAttention", "unsupported_module"),
        "attention.base_layer.out_proj": (
            "lora_linear",
            "base_class",
        ),  # merged by the attention, its forward never runs
        "out": ("ParamWrapper", "unsupported_module"),
    }
    with counted() as calls:
        torch.testing.assert_close(model(x), own)
    assert calls == {"unsupported_module": 2}


@pytest.mark.parametrize("name", ["LoHaConfig", "LoKrConfig", "IA3Config"])
def test_other_tuners_are_not_touched(name: str) -> None:
    more = {"feedforward_modules": []} if name == "IA3Config" else {}
    model = peft.get_peft_model(Host(8, 6, True), getattr(peft, name)(target_modules=["proj"], **more))
    assert loraaccel.patch(model, strict=True).modules == ()
    assert not any("_loraaccel" in m.__dict__ for m in model.modules())

"""kohya's LoRA modules patched: the values, gradients and random numbers of their own forward (cases VN6, VT7, VA4)."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from kohya_modules import (
    LoRAInfModule,
    LoRAModule,
    OtherDrawsModule,
    OtherNamesModule,
    PerturbedModule,
    ShiftedModule,
)  # fmt: skip
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel import patch, unpatch
from loraaccel.integrations import kohya, patched
from loraaccel.ops import lora_linear_adapters

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
BOUND = {F64: 1e-12, F32: 2e-6, F16: 4e-3, BF16: 2e-2}  # relative, of two runs that round in different places
DROPOUTS: dict[str, dict[str, Any]] = {
    "none": {}, "zero": {"dropout": 0.0}, "hidden": {"dropout": 0.25}, "ranks": {"rank_dropout": 0.3},
    "module": {"module_dropout": 0.5}, "all": {"dropout": 0.25, "rank_dropout": 0.3, "module_dropout": 0.4},
}  # fmt: skip


def state_of(module: nn.Module) -> patched.PatchState:
    state = patched.state_of(module)
    assert state is not None
    return state


def layer_of(form: str) -> nn.Module:
    if form == "conv":
        return nn.Conv2d(6, 10, 3, padding=1, stride=2)
    return nn.Conv2d(6, 10, 1) if form == "pointwise" else nn.Linear(24, 30, bias=form != "split")


def input_of(form: str, dims: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (3, 6, 9, 8) if form in ("conv", "pointwise") else (3, *([5] * (dims - 2)), 24)
    return torch.randn(shape, generator=generator)


def made(
    form: str, cls: Any = LoRAModule, dtype: torch.dtype = F32, apply: bool = True, **arguments: Any
) -> Any:
    """A frozen layer and its module, with B in use; the same each time."""
    torch.manual_seed(0)
    layer = layer_of(form).to(dtype).requires_grad_(False)
    if form == "split":
        arguments["split_dims"] = [8, 8, 14]
    module = cls("lora_unet_probe", layer, 0.8, 4, **arguments)
    for name, p in module.named_parameters():
        if "lora_up" in name:
            nn.init.normal_(p, std=0.3)
    module.to(dtype)
    if apply:
        module.apply_to()
    return layer, module


def run(layer: Any, module: Any, x: Tensor, autocast: bool = False, calls: int = 3) -> list[Tensor]:
    """Outputs, the gradients of x and of the parameters, and the generator's state of a few calls in training."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(11)
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs = [layer(x) for _ in range(calls)]
    sum(y.double().square().sum() for y in outputs).backward()
    assert x.grad is not None
    return [
        *outputs,
        x.grad,
        *(p.grad if p.grad is not None else torch.zeros(1) for p in module.parameters()),
    ]


def assert_alike(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = a.detach().double(), b.detach().double()
        size = float(b.norm())
        assert float((a - b).norm()) <= bound * size + 1e-30


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16, "autocast"])
@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize(
    ("form", "dims"), [("linear", 2), ("linear", 3), ("split", 3), ("conv", 4), ("pointwise", 4)]
)
def test_values_gradients_and_random_numbers(form: str, dims: int, dropout: str, dtype: Any) -> None:
    """VN6: masks on the rank activations, compensated; the generator is where it would have been."""
    autocast = dtype == "autocast"
    kept = F32 if autocast else dtype
    x = input_of(form, dims).to(kept)
    found, states = [], []
    for fused in (False, True):
        layer, module = made(form, dtype=kept, **DROPOUTS[dropout])
        module.train()
        if fused:
            report = patch(module)
            assert (report.num_fused, report.num_fallback) == (1, 0)
            before = loraaccel.info()["calls"]["fused"].copy()
        found.append(run(layer, module, x, autocast))
        states.append(torch.get_rng_state())
    kind = "lora_conv2d" if form in ("conv", "pointwise") else "lora_linear"
    assert loraaccel.info()["calls"]["fused"][kind] == before.get(kind, 0) + 3
    assert_alike(found[1], found[0], BOUND[BF16 if autocast else kept])
    assert torch.equal(states[0], states[1])


def test_VN6_the_mask_is_on_the_rank_activations() -> None:
    """With the mask given: h = H . (x A^T), dB = s G^T h, dA = s (H . (G B))^T x, dx = G W + s (H . (G B)) A."""
    torch.manual_seed(2)
    x, w = torch.randn(7, 11, dtype=F64), torch.randn(13, 11, dtype=F64)
    a, b = torch.randn(3, 11, dtype=F64), torch.randn(13, 3, dtype=F64)
    mask = (torch.rand(7, 3) > 0.25).double() / 0.75
    operands = [t.requires_grad_() for t in (x, a, b)]
    y = lora_linear_adapters(x, w, None, (a,), (b,), [0.7], [0.0], rank_factors=mask)
    g = torch.randn_like(y)
    dx, da, db = torch.autograd.grad(y, operands, g)
    h, u = mask * (x @ a.T), 0.7 * mask * (g @ b)
    expected = [x @ w.T + 0.7 * h @ b.T, g @ w + u @ a, u.T @ x, 0.7 * g.T @ h]
    assert_alike([y, dx, da, db], expected, 1e-13)


@pytest.mark.parametrize(
    "kernel", [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_given_factors_in_every_kernel(kernel: str, dtype: torch.dtype, force_kernel: Any) -> None:
    torch.manual_seed(4)
    x, w = torch.randn(70, 65).to(dtype), torch.randn(40, 65).to(dtype)
    pairs = [(torch.randn(r, 65).to(dtype), torch.randn(40, r).to(dtype)) for r in (3, 17)]
    factors = torch.rand(70, 20)
    a, b = [p[0].requires_grad_() for p in pairs], [p[1].requires_grad_() for p in pairs]
    x.requires_grad_()
    force_kernel(kernel)
    y = lora_linear_adapters(x, w, None, a, b, [0.5, -1.5], [0.0, 0.0], rank_factors=factors)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(y, [x, *a, *b], g)
    wide = [t.detach().double().requires_grad_() for t in (x, *a, *b)]
    wx, wa, wb = wide[0], wide[1:3], wide[3:]
    parts = [factors[:, :3].double(), factors[:, 3:].double()]
    expected = wx @ w.double().T
    for m, p, q, s in zip(parts, wa, wb, (0.5, -1.5), strict=True):
        expected = expected + s * (m * (wx @ p.T)) @ q.T
    assert_alike(
        [y, *grads],
        [t.to(dtype) for t in (expected, *torch.autograd.grad(expected, wide, g.double()))],
        BOUND[dtype],
    )


def test_wrong_factors_are_named() -> None:
    x, w, a, b = torch.randn(4, 6), torch.randn(5, 6), torch.randn(2, 6), torch.randn(5, 2)
    for factors, text in (
        (torch.ones(4, 3), r"rank_factors has 3 columns, expected 2, the sum of the ranks"),
        (torch.ones(3, 2), r"rank_factors has shape \[3, 2\], expected \[4, 2\] \(M, R\)"),
        (torch.ones(4, 2, dtype=BF16), r"rank_factors is bfloat16, expected float32"),
        (torch.ones(4, 1), r"rank_factors"),
        (torch.ones(4), r"rank_factors"),
    ):
        with pytest.raises(RuntimeError, match=text):
            lora_linear_adapters(x, w, None, (a,), (b,), [1.0], [0.0], rank_factors=factors)


# ---- where the module sits ----


def test_VA4_patch_and_unpatch_leave_what_was_there() -> None:
    layer, module = made("linear")
    own = layer.forward
    assert own.__self__ is module
    assert own.__func__ is LoRAModule.forward
    for _ in range(2):
        patch(module)
    assert type(module).__name__ == "LoRAModule"
    assert isinstance(module, LoRAModule)
    assert layer.forward.__self__ is module
    assert layer.forward.__func__ is not LoRAModule.forward
    assert unpatch(module) == 1
    assert unpatch(module) == 0
    assert type(module) is LoRAModule
    assert layer.forward.__func__ is LoRAModule.forward


def test_patched_before_it_is_applied() -> None:
    layer, module = made("linear", apply=False)
    assert patch(module).num_fused == 1
    module.apply_to()
    layer(input_of("linear"))
    assert state_of(module).fused == 1


@pytest.mark.parametrize("order", ["inner", "outer", "both", "both reversed"])
def test_networks_on_top_of_each_other(order: str) -> None:
    def stacked() -> Any:
        layer, inner = made("linear", dropout=0.3)
        outer = LoRAModule("second", layer, 1.5, 3, 2, rank_dropout=0.25)
        outer.apply_to()
        nn.init.normal_(outer.lora_up.weight, generator=torch.Generator().manual_seed(8))
        return layer, nn.ModuleList([inner, outer]).train()

    layer, network = stacked()
    expected = run(layer, network, input_of("linear"))
    layer, network = stacked()
    chosen = {"inner": [0], "outer": [1], "both": [0, 1], "both reversed": [1, 0]}[order]
    for i in chosen:
        assert patch(network[i]).num_fused == 1
    found = run(layer, network, input_of("linear"))
    assert_alike(found, expected, BOUND[F32])
    assert all(state_of(network[i]).fused == 3 for i in chosen)
    for i in reversed(chosen):
        unpatch(network[i])
    assert [type(m) for m in network] == [LoRAModule, LoRAModule]
    assert layer.forward.__self__ is network[1]
    assert network[1].org_forward.__self__ is network[0]
    assert {layer.forward.__func__, network[1].org_forward.__func__} == {LoRAModule.forward}


def test_a_wrapped_forward_is_left_alone() -> None:
    layer, module = made("linear")
    inner = layer.forward
    layer.forward = lambda x: inner(x) + 1.0
    report = patch(module)
    assert report.reasons == {"forward_replaced": 1}
    assert type(module) is LoRAModule


def test_a_frozen_layer_with_a_forward_of_its_own_is_called() -> None:
    """fp8 and quantised bases: what they compute is used, never their weight."""
    x, calls = input_of("linear"), []

    def dequantising(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(1)
        return nn.functional.linear(x, self.weight * 0.5, self.bias)

    found = []
    for fused in (False, True):
        layer, module = made("linear", dropout=0.3, apply=False)
        layer.forward = types.MethodType(dequantising, layer)
        module.apply_to()
        if fused:
            patch(module.train())
        found.append(run(layer, module, x))
    assert len(calls) == 6
    assert_alike(found[1], found[0], BOUND[F32])
    assert state_of(module).own == {}


# ---- which classes, which states ----


@pytest.mark.parametrize("cls", [ShiftedModule, OtherDrawsModule, OtherNamesModule])
def test_a_class_that_does_something_else_keeps_its_forward(cls: Any) -> None:
    layer, module = made("linear", cls)
    report = patch(module)
    assert report.reasons == {"unknown_forward": 1}
    x = input_of("linear")
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, cls.forward(module, x))


def test_the_proof_leaves_the_generator_alone() -> None:
    class Fresh(LoRAModule):
        forward = LoRAModule.forward

    torch.manual_seed(5)
    state = torch.get_rng_state()
    _, module = made("linear", Fresh, dropout=0.5)
    torch.set_rng_state(state)
    with torch.autocast("cpu", BF16):
        assert patch(module.train()).num_fused == 1
    assert torch.equal(state, torch.get_rng_state())


def test_inference_modules() -> None:
    layer, module = made("linear", LoRAInfModule)
    x = input_of("linear")
    module.train()  # it drops nothing whatever its mode
    expected = layer(x)
    patch(module)
    state = state_of(module)
    assert_alike([layer(x)], [expected], BOUND[F32])
    assert state.fused == 1
    module.enabled = False
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    module.enabled = True
    module.network = types.SimpleNamespace(sub_prompt_index=0)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias) + 100.0)
    module.network.sub_prompt_index = None
    assert_alike([layer(x)], [expected], BOUND[F32])
    assert (state.fused, state.own) == (2, {"disabled": 1, "regional": 1})


def test_multiplier_is_followed() -> None:
    layer, module = made("linear")
    x = input_of("linear")
    patch(module)
    state = state_of(module)
    for multiplier in (1.0, -0.3, 0.0, torch.tensor(0.7), torch.rand(3, 1, 1)):
        module.multiplier = multiplier
        expected = LoRAModule.forward(module, x)
        assert_alike([layer(x)], [expected], BOUND[F32])
    assert (state.fused, state.own) == (3, {"zero_scaling": 1, "scaling_type": 1})
    module.multiplier = 0.0
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_what_the_host_refuses_stays_refused() -> None:
    """float32 adapters on 16-bit activations without autocast are an error of the host, not a silent cast of ours."""
    layer, module = made("linear")
    layer.to(BF16)
    patch(module)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(input_of("linear").to(BF16))
    layer, module = made("linear", rank_dropout=0.5)
    patch(module.train())
    x = torch.randn(3, 2, 2, 24)  # the host's mask does not fit four dimensions
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        LoRAModule.forward(module, x)
    with pytest.raises(RuntimeError):
        layer(x)


def test_hooks_and_other_layers_in_the_place_of_the_factors() -> None:
    layer, module = made("linear")
    patch(module)
    x = input_of("linear")
    handle = module.lora_down.register_forward_hook(lambda *_: None)
    layer(x)
    handle.remove()
    layer(x)
    module.lora_up = nn.Sequential(module.lora_up)
    layer(x)
    state = state_of(module)
    assert (state.fused, state.own) == (1, {"hooks": 1, "adapter_class": 1})


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_perturbation_of_ggpo(training: bool, norms: bool) -> None:
    found = []
    for fused in (False, True):
        layer, module = made("linear", PerturbedModule)
        if norms:
            torch.manual_seed(9)
            module.set_norms(layer)
        module.train(training)
        if fused:
            assert patch(module).num_fused == 1
        found.append(run(layer, module, input_of("linear")))
    assert_alike(found[1], found[0], BOUND[F32])
    if training and norms:
        assert not torch.equal(found[0][0], found[0][1])  # another perturbation each time


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks_again(reentrant: bool) -> None:
    found = []
    for fused in (False, True):
        layer, module = made("linear", dropout=0.3, rank_dropout=0.25, module_dropout=0.3)
        module.train()
        if fused:
            patch(module)
        x = input_of("linear").requires_grad_()
        torch.manual_seed(7)
        y = checkpoint(layer, x, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert_alike(found[1], found[0], BOUND[F32])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_stops_early_is_no_error(reentrant: bool) -> None:
    """Without re-entrance torch leaves the recomputation by an exception, out of the last layer's operator."""
    found = []
    for fused in (False, True):
        layer, module = made("linear", dropout=0.3)
        module.train()
        if fused:
            patch(module, verify=1)
            state = state_of(module)
            state.roll_back = True
        x = input_of("linear").requires_grad_()
        for step in range(3):
            torch.manual_seed(step)
            checkpoint(
                lambda t, f=layer: f(torch.tanh(t)), x, use_reentrant=reentrant
            ).square().sum().backward()
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert state.own == {}
    assert (state.reason, state.fused) == ("", 6 if reentrant else state.fused)
    assert state.fused >= 3
    assert_alike(found[1], found[0], BOUND[F32])


def test_frozen_down_as_in_lora_fa() -> None:
    layer, module = made("linear")
    module.lora_down.requires_grad_(False)
    patch(module)
    layer(input_of("linear")).sum().backward()
    assert module.lora_down.weight.grad is None
    assert module.lora_up.weight.grad is not None


def test_a_deep_copy_of_the_model_is_its_own() -> None:
    """The bound forward of a copied layer is the copy's, with its parameters."""
    layer, module = made("linear")
    patch(module)
    both = copy.deepcopy(nn.ModuleList([layer, module]))
    with torch.no_grad():
        both[1].lora_up.weight.zero_()
    x = input_of("linear")
    assert torch.equal(both[0](x), nn.functional.linear(x, both[0].weight, both[0].bias))
    assert not torch.equal(layer(x), both[0](x))


# ---- the launcher's guards ----


def test_verify_replays_the_masks() -> None:
    layer, module = made("linear", dropout=0.25, rank_dropout=0.3, module_dropout=0.4)
    patch(module.train(), verify=5)
    x = input_of("linear")
    found = run(layer, module, x, calls=6)
    state = state_of(module)
    assert (state.verify, state.reason) == (0, "")
    assert 0 < state.largest_error < 1e-6
    layer, module = made("linear", dropout=0.25, rank_dropout=0.3, module_dropout=0.4)
    assert_alike(found, run(layer, module.train(), x, calls=6), BOUND[F32])


@pytest.mark.filterwarnings("always:loraaccel")
def test_verify_gives_a_wrong_layer_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, module = made("linear")
    patch(module, verify=1)
    right = kohya.lora_linear_adapters
    monkeypatch.setattr(kohya, "lora_linear_adapters", lambda *a, **k: 1.01 * right(*a, **k))
    x = input_of("linear")
    with pytest.warns(RuntimeWarning, match="verify found a relative error of"):
        y = layer(x)
    state = state_of(module)
    assert state.reason == "verify_failed"
    assert state.largest_error > 1e-4
    assert torch.equal(y, LoRAModule.forward(module, x))


@pytest.mark.filterwarnings("always:loraaccel")
def test_an_error_in_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the layer, the operator and the shapes; with roll_back the layer goes on by itself."""

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of everything")

    layer, module = made("linear")
    x = input_of("linear")
    expected = layer(x)
    patch(module)
    state = state_of(module)
    state.name = "lora_unet_probe"
    monkeypatch.setattr(kohya, "lora_linear_adapters", broken)
    with pytest.raises(RuntimeError, match="out of everything") as error:
        layer(x)
    assert any(
        "in lora_unet_probe (lora_linear, x [3, 5, 24] torch.float32)" in n
        for n in (str(error.value), *getattr(error.value, "__notes__", ()))  # Python 3.10 has no notes
    )

    class Older(RuntimeError):  # as exceptions of Python 3.10, without notes
        @property
        def add_note(self) -> Any:
            raise AttributeError

    def broken_older(*args: Any, **kwargs: Any) -> Tensor:
        raise Older("out of everything")

    monkeypatch.setattr(kohya, "lora_linear_adapters", broken_older)
    with pytest.raises(Older, match=r"out of everything\nloraaccel: in lora_unet_probe \(lora_linear, x \[3"):
        layer(x)
    monkeypatch.setattr(kohya, "lora_linear_adapters", broken)
    state.roll_back = True
    with pytest.warns(
        RuntimeWarning, match=r"in lora_unet_probe \(lora_linear, x \[3, 5, 24\].*out of everything"
    ):
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)
    assert state.own == {"native_error": 2}
    layer, module = made("linear")
    patch(module, verify=1)  # in the call that is compared too
    state = state_of(module)
    state.roll_back = True
    with pytest.warns(RuntimeWarning, match="out of everything"):
        assert torch.equal(layer(x), expected)
    assert state.reason == "native_error"


def test_disabled_is_the_hosts_own_forward() -> None:
    layer, module = made("linear", dropout=0.5)
    patch(module.train())
    x = input_of("linear")
    torch.manual_seed(3)
    with loraaccel.disabled():
        y = layer(x)
    torch.manual_seed(3)
    assert torch.equal(y, LoRAModule.forward(module, x))

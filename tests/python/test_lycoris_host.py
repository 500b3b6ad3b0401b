"""LyCORIS's modules patched: the values, gradients and random numbers of their own forward (cases VN6, VT7, VA4).

Runs with the release of LyCORIS that can be imported: 4.1.3, 3.3.0 and 3.2.0.post2 are known (PYTHONPATH chooses).
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from lycoris_modules import (
    CLASSES,
    calls_the_frozen_layer,
    distance,
    input_of,
    made,
    results,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel import patch, unpatch
from loraaccel.integrations import lycoris as host
from loraaccel.integrations import patched
from loraaccel.integrations.lycoris_formula import facts_of, mode_of

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
BOUND = {F64: 1e-10, F32: 2e-5, F16: 2e-2, BF16: 1e-1}  # relative, of two runs that round in different places
DROPOUTS: dict[str, dict[str, Any]] = {
    "none": {}, "outputs": {"dropout": 0.3}, "ranks": {"rank_dropout": 0.3},
    "scaled": {"rank_dropout": 0.3, "rank_dropout_scale": True}, "module": {"module_dropout": 0.4},
    "all": {"dropout": 0.3, "rank_dropout": 0.3, "rank_dropout_scale": True, "module_dropout": 0.4},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "one": {"multiplier": 1.0}, "scalar": {"use_scalar": True}, "rs": {"rs_lora": True},
    "dora": {"weight_decompose": True, "wd_on_out": True}, "columns": {"weight_decompose": True, "wd_on_out": False},
    "dora one": {"weight_decompose": True, "multiplier": 1.0, "use_scalar": True},
}  # fmt: skip
KRONECKER: dict[str, dict[str, Any]] = {
    "both": {"decompose_both": True, "lora_dim": 1}, "full": {"full_matrix": True}, "factor": {"factor": 2},
    "unbalanced": {"unbalanced_factorization": True},
}  # fmt: skip
ALGOS = list(CLASSES)


def state_of(module: nn.Module) -> patched.PatchState:
    state = patched.state_of(module)
    assert state is not None
    return state


def compare(algo: str, form: str, dtype: torch.dtype, bound: float, **options: Any) -> None:
    """The module's own results and ours, three calls of each, and where the generator stands afterwards."""
    cast = options.pop("cast", None)
    x, found, states = input_of(form, dtype), [], []
    for fused in (False, True):
        layer, module = made(algo, form, dtype, **options)
        if fused:
            report = patch(module, factored=True)
            assert (report.num_fused, report.reasons) == (1, {})
        found.append(results(layer, module, x, cast=cast))
        states.append(torch.get_rng_state())
    assert (state_of(module).fused, dict(state_of(module).own)) == (3, {})
    assert distance(found[1], found[0]) <= bound
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("algo", ALGOS)
def test_linear_layers(algo: str, option: str, dropout: str, bypass: bool) -> None:
    """VN6, in float64: nothing but the formula can give this."""
    compare(algo, "linear", F64, BOUND[F64], bypass_mode=bypass, **OPTIONS[option], **DROPOUTS[dropout])


@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("dropout", ["none", "all"])
@pytest.mark.parametrize("option", KRONECKER)
def test_kronecker_factors(option: str, dropout: str, bypass: bool) -> None:
    compare("lokr", "linear", F64, BOUND[F64], bypass_mode=bypass, **KRONECKER[option], **DROPOUTS[dropout])


@pytest.mark.parametrize("dropout", ["none", "outputs", "scaled", "module", "all"])
@pytest.mark.parametrize("option", ["plain", "tucker", "scalar", "dora"])
@pytest.mark.parametrize("form", ["conv", "pointwise", "dilated", "grouped"])
@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("algo", ALGOS)
def test_convolutions(algo: str, bypass: bool, form: str, option: str, dropout: str) -> None:
    """Fused with the host's results, or left to the host with a reason; never fused where the host has no result."""
    options = {"use_tucker": True} if option == "tucker" else OPTIONS[option]
    options = {**options, **DROPOUTS[dropout], "bypass_mode": bypass}
    layer, module = made(algo, form, F64, **options)
    report = patch(module, factored=True)
    x = input_of(form, F64)
    plain_layer, plain = made(algo, form, F64, **options)
    try:
        expected = results(plain_layer, plain, x)
    except RuntimeError:
        assert report.num_fused == 0
        return
    state = torch.get_rng_state()
    assert distance(results(layer, module, x), expected) <= BOUND[F64]
    assert torch.equal(state, torch.get_rng_state())
    must = (
        form in ("conv", "pointwise")
        and not (algo == "loha" and option == "tucker")
        and calls_the_frozen_layer()
    )
    must = must and not (
        algo == "lokr" and bypass and host.facts_of(CLASSES["lokr"], mode_of(plain, "lokr")) is None
    )
    if must:
        assert (report.reasons, state_of(module).fused) == ({}, 3)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("option", ["plain", "scalar", "dora"])
@pytest.mark.parametrize("form", ["linear", "conv"])
@pytest.mark.parametrize("algo", ALGOS)
def test_types(algo: str, form: str, option: str, bypass: bool, dtype: torch.dtype) -> None:
    if algo == "lokr" and form == "conv" and bypass and not calls_lokr_scaled():
        pytest.skip("this release of LyCORIS has no such convolution")
    bound = BOUND[dtype]
    if not bypass and dtype.itemsize == 2:
        bound = 2.0  # the host loses the change of the weight below W's last bit: see the test of errors
    compare(algo, form, dtype, bound, bypass_mode=bypass, **OPTIONS[option])


def calls_lokr_scaled() -> bool:
    """True from 4.x on, whose LoKr has alpha / r in bypass mode and works there on convolutions."""
    module = made("lokr", bypass_mode=True)[1]
    facts = facts_of(CLASSES["lokr"], mode_of(module, "lokr"))
    assert facts is not None
    return facts.scaled


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("option", ["plain", "dora"])
@pytest.mark.parametrize("algo", ALGOS)
def test_errors_no_larger_than_the_hosts(algo: str, option: str, bypass: bool, dtype: torch.dtype) -> None:
    """Against float64 of the operands as stored; the sum of output and gradients' errors, layers of a usual size."""

    def setup(kind: torch.dtype) -> tuple[nn.Module, Any, Tensor]:
        torch.manual_seed(5)
        layer = nn.Linear(160, 144).requires_grad_(False)
        module = CLASSES[algo]("m", layer, 0.8, 8, 4.0, bypass_mode=bypass, **OPTIONS[option])
        for name, p in module.named_parameters():
            if name != "dora_scale":
                nn.init.normal_(p, std=0.05)
        x = torch.randn(96, 160)
        for t in (layer, module):
            t.to(dtype).to(kind)
        module.apply_to()
        return layer, module, x.to(dtype).to(kind)

    exact = results(*setup(F64), calls=1)
    own = results(*setup(dtype), calls=1)
    layer, module, x = setup(dtype)
    assert patch(module, factored=True).num_fused == 1
    ours = results(layer, module, x, calls=1)
    for i, (a, b, e) in enumerate(zip(ours, own, exact, strict=True)):
        assert a.dtype == b.dtype
        size = max(float(e.detach().norm()), 1e-30)  # (magnitudes have no gradient in bypass)
        error, theirs = (float((t.detach().double() - e.detach()).norm()) / size for t in (a, b))
        assert error <= 1.25 * theirs + 0.3 * torch.finfo(dtype).eps, (i, error, theirs)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_change_below_the_last_bit_of_the_weight_survives(dtype: torch.dtype) -> None:
    """W' - W is zero, or a whole bit of W, in LyCORIS; from the factors it is what it is."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 16, bias=False).requires_grad_(False)
    layer.weight.fill_(1.0)
    module = CLASSES["locon"]("m", layer, 1.0, 2, 2.0)
    nn.init.constant_(module.lora_down.weight, 0.01)
    nn.init.constant_(module.lora_up.weight, 0.01)  # a change of 2e-4 for each weight of 1
    layer.to(dtype)
    module.to(dtype).apply_to()
    x = torch.ones(1, 32, dtype=dtype) * torch.tensor([1.0, -1.0], dtype=dtype).repeat(16)
    x[0, 0] = 3.0
    assert patch(module).reasons == {"rebuilt": 1}
    own = layer(x) - nn.functional.linear(x, layer.weight)
    patch(module, factored=True)
    with torch.no_grad():
        h = module.lora_down(x).double()
        expected = h @ module.lora_up.weight.double().t() + x.double() @ layer.weight.double().t()
    assert not bool(own.any())
    assert bool(((layer(x).double() - expected).abs() <= torch.finfo(dtype).eps * 2).all())


@pytest.mark.parametrize("kept", [F32, BF16])
@pytest.mark.parametrize("given", [F32, BF16])
@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("algo", ALGOS)
def test_autocast(algo: str, bypass: bool, given: torch.dtype, kept: torch.dtype) -> None:
    """Output types are the host's (AnimaLoraStudio #588), whatever those of x and of the frozen layer."""
    outputs = []
    for fused in (False, True):
        layer, module = made(algo, bypass_mode=bypass)
        layer.to(kept)
        if fused:
            patch(module, factored=True)
        with torch.autocast("cpu", BF16):
            outputs.append(layer(input_of(dtype=given)))
    assert outputs[0].dtype == outputs[1].dtype == BF16
    assert state_of(module).fused == 1
    assert distance([outputs[1]], [outputs[0]]) <= 5e-2


@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("layer_type", [F32, BF16])
@pytest.mark.parametrize("algo", ALGOS)
def test_factors_of_another_type(algo: str, layer_type: torch.dtype, bypass: bool) -> None:
    """Without autocast: what the host computes is fused, in its type; what it refuses it refuses itself."""
    other = BF16 if layer_type == F32 else F32
    layer, module = made(algo, bypass_mode=bypass)
    plain_layer, plain = made(algo, bypass_mode=bypass)
    for a, b in ((layer, module), (plain_layer, plain)):
        a.to(layer_type)
        b.to(other)
    x = input_of(dtype=layer_type)
    patch(module, factored=True)
    try:
        expected = results(plain_layer, plain, x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            layer(x)
        assert dict(state_of(module).own) == {"dtype": 1}
        return
    found = results(layer, module, x)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert distance(found[:1], expected[:1]) <= 5e-2


# ---- opting in, reasons ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_rebuilt_weights_are_left_alone_until_asked_for(algo: str) -> None:
    layer, module = made(algo)
    plain_layer, plain = made(algo)
    x = input_of()
    before = loraaccel.info()["calls"]["fallback"].get("rebuilt", 0)
    report = patch(module)
    assert (report.num_fused, report.reasons) == (0, {"rebuilt": 1})
    for a, b in zip(results(layer, module, x), results(plain_layer, plain, x), strict=True):
        assert torch.equal(a, b)
    assert loraaccel.info()["calls"]["fallback"]["rebuilt"] == before + 3
    with pytest.raises(RuntimeError, match="rebuilt"):
        patch(made(algo)[1], strict=True)
    assert patch(module, factored=True).num_fused == 1
    layer(x)
    assert state_of(module).fused == 1
    patch(module)  # and back
    layer(x)
    assert (state_of(module).fused, dict(state_of(module).own)) == (0, {"rebuilt": 1})
    module.bypass_mode = True  # followed without a new call
    layer(x)
    assert state_of(module).fused == 1


def test_bypass_is_fused_without_asking() -> None:
    for algo in ALGOS:
        module = made(algo, bypass_mode=True)[1]
        assert (patch(module).num_fused, patch(module).reasons) == (1, {})


def test_modules_without_an_operator_are_reported() -> None:
    from lycoris.modules.diag_oft import DiagOFTModule
    from lycoris.modules.dylora import DyLoraModule
    from lycoris.modules.full import FullModule
    from lycoris.modules.glora import GLoRAModule
    from lycoris.modules.ia3 import IA3Module

    for cls in (DiagOFTModule, DyLoraModule, GLoRAModule, IA3Module):
        layer = nn.Linear(16, 16)
        module = cls("m", layer, 1.0, 4)
        module.apply_to()
        x = torch.randn(2, 16)
        expected = layer(x)
        report = patch(module, factored=True)
        assert (report.modules[0].kind, report.reasons) == (cls.__name__, {"unsupported_module": 1})
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert patch(FullModule("m", nn.Linear(4, 4))).reasons == {"unsupported_module": 1}
    for conv in (nn.Conv1d(4, 4, 3), nn.Conv3d(4, 4, 3)):
        module = CLASSES["locon"]("m", conv, 1.0, 4)
        assert patch(module).reasons == {"unsupported_module": 1}


def test_a_class_that_does_something_else_keeps_its_forward() -> None:
    class Louder(CLASSES["locon"]):  # type: ignore[misc]
        def bypass_forward_diff(self, x: Tensor, scale: float = 1) -> Tensor:
            return 2 * super().bypass_forward_diff(x, scale)

    class Gated(CLASSES["locon"]):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x * self.gate, *args, **kwargs)

    class Renamed(CLASSES["locon"]):  # type: ignore[misc]
        pass

    for cls, reasons in ((Louder, {"unknown_forward": 1}), (Gated, {"unsupported_module": 1}), (Renamed, {})):
        layer = nn.Linear(8, 8)
        assert patch(cls("m", layer, 1.0, 4, bypass_mode=True)).reasons == reasons


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"multiplier": 0.0}, "zero_scaling"), ({"multiplier": float("nan")}, "scaling_type"),
        ({"multiplier": torch.ones(3)}, "scaling_type"), ({"op": None}, "unknown_forward"),
    ],
    ids=str,
)  # fmt: skip
def test_reasons_of_a_module(change: dict[str, Any], reason: str) -> None:
    module = made("locon", bypass_mode=True)[1]
    for name, value in change.items():
        delattr(module, name) if value is None else setattr(module, name, value)
    assert patch(module).reasons == {reason: 1}


def test_reasons_of_a_call() -> None:
    layer, module = made("locon", bypass_mode=True)
    patch(module)
    x = input_of()
    with loraaccel.disabled():
        layer(x)
    assert dict(state_of(module).own) == {"switched_off": 1}
    handle = module.lora_down.register_forward_hook(lambda *_: None)
    layer(x)
    handle.remove()
    assert state_of(module).own["hooks"] == 1
    layer(x)
    assert state_of(module).fused == 1


# ---- states of the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
@pytest.mark.parametrize("algo", ALGOS)
def test_unpatch_restores_everything(algo: str, bypass: bool) -> None:
    layer, module = made(algo, bypass_mode=bypass)
    own, keys, before = type(module), list(module.__dict__), module.state_dict()
    bound = layer.forward
    patch(module, factored=True)
    assert type(module) is not own
    assert isinstance(module, own)
    assert type(module).__name__ == own.__name__
    assert list(module.state_dict()) == list(before)
    layer(input_of())
    assert unpatch(module) == 1
    assert type(module) is own
    assert list(module.__dict__) == keys
    assert layer.forward == bound
    assert layer.forward.__func__ is own.forward
    for name, t in module.state_dict().items():
        assert torch.equal(t, before[name])


@pytest.mark.parametrize("algo", ALGOS)
def test_restore_and_apply_again(algo: str) -> None:
    layer, module = made(algo)
    x = input_of()
    frozen = nn.functional.linear(x, layer.weight, layer.bias)
    patch(module, factored=True)
    with_module = layer(x)
    module.restore()
    assert torch.equal(layer(x), frozen)
    module.apply_to()
    torch.testing.assert_close(layer(x), with_module, rtol=0, atol=0)
    assert state_of(module).fused == 2
    module.restore()
    unpatch(module)
    assert torch.equal(layer(x), frozen)


def test_a_module_that_is_not_applied_yet() -> None:
    layer, module = made("locon", apply=False)
    x = input_of()
    frozen = layer(x)
    assert patch(module, factored=True).num_fused == 1
    assert torch.equal(layer(x), frozen)
    module.apply_to()
    assert not torch.equal(layer(x), frozen)
    assert state_of(module).fused == 1


@pytest.mark.parametrize("restored", [0, 1])
def test_two_networks_on_one_layer(restored: int) -> None:
    """Stacked, with dropouts that draw in the host's order, and one of them taken out again."""
    x, found = input_of(dtype=F64), []
    for fused in (False, True):
        layer, first = made("locon", dtype=F64, rank_dropout=0.3, bypass_mode=True)
        second = CLASSES["loha"]("second", layer, 0.5, 2, 1.0, rank_dropout=0.4).to(F64)
        nn.init.normal_(second.hada_w2_a)
        second.apply_to()
        both = nn.ModuleList([first, second]).train()
        if fused:
            assert patch(both, factored=True).num_fused == 2
        found.append(results(layer, both, x))
        if fused:
            assert [state_of(m).fused for m in both] == [3, 3] if calls_the_frozen_layer() else [0, 3]
        both[restored].restore()
        found.append(results(layer, both, x))
        if fused:
            unpatch(both)
            found.append(results(layer, both, x))
    assert distance(found[2], found[0]) <= BOUND[F64]
    assert distance(found[3], found[1]) <= BOUND[F64]
    assert distance(found[4], found[1]) == 0.0


@pytest.mark.parametrize("algo", ALGOS)
def test_merge_and_multiplier_are_followed(algo: str) -> None:
    layer, module = made(algo)
    plain_layer, plain = made(algo)
    patch(module, factored=True)
    x = input_of()
    kept = layer.weight.clone()
    for act in (
        lambda m: setattr(m, "multiplier", 0.3), lambda m: m.onfly_merge(1.0), lambda m: m.onfly_restore(),
        lambda m: m.merge_to(0.5), lambda m: m.apply_max_norm(0.5), lambda m: m.eval(),
    ):  # fmt: skip
        for m in (module, plain):
            act(m)
        assert torch.equal(layer.weight, plain_layer.weight)
        assert distance(results(layer, module, x), results(plain_layer, plain, x)) <= 1e-4
    assert not torch.equal(kept, layer.weight)


@pytest.mark.parametrize("algo", ALGOS)
def test_copies_and_files(algo: str) -> None:
    layer, module = made(algo, bypass_mode=True)
    patch(module)
    x = input_of()
    expected = layer(x)
    both = copy.deepcopy(nn.ModuleList([layer, module]))
    copied_layer, copied = both
    assert copied_layer.forward.__self__ is copied
    assert copied.org_module[0] is copied_layer
    assert torch.equal(copied_layer(x), expected)
    assert state_of(copied).fused == 2  # the state came with it
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other_layer, other = made(algo, bypass_mode=True)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    patch(other)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other_layer(x), expected)


def test_parametrized_layers_are_left_alone() -> None:
    layer = nn.Linear(12, 10)
    CLASSES["locon"].parametrize(layer, "weight", 1.0, 4, 1.0)
    x = torch.randn(3, 12)
    expected = layer(x)
    assert patch(layer, factored=True).reasons == {"forward_replaced": 1}
    assert torch.equal(layer(x), expected)


def test_a_wrapped_forward_is_seen() -> None:
    layer, module = made("locon", bypass_mode=True)
    applied = layer.forward
    layer.forward = lambda x: applied(x) * 2
    assert patch(module).reasons == {"forward_replaced": 1}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bypass", [False, True], ids=["rebuilt", "bypass"])
def test_checkpointing(bypass: bool, reentrant: bool) -> None:
    x, found = input_of(dtype=F64), []
    for wrapped in (False, True):
        layer, module = made("locon", dtype=F64, bypass_mode=bypass, rank_dropout=0.3, dropout=0.3)
        patch(module, factored=True)
        call: Any = (lambda t, f=layer: checkpoint(f, t, use_reentrant=reentrant)) if wrapped else layer
        found.append(results(call, module, x))
    assert distance(found[1], found[0]) <= 1e-13


@pytest.mark.parametrize("algo", ALGOS)
def test_a_frozen_layer_that_computes_its_own_output(algo: str) -> None:
    """A quantised layer's stand-in: LyCORIS takes bypass for any class that is not called Linear."""

    class LinearOfMine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.5

    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        layer = LinearOfMine(24, 30).requires_grad_(False).double()
        module = CLASSES[algo]("m", layer, 0.8, 4, 2.0, dropout=0.2)
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
        module.double().apply_to()
        assert module.bypass_mode
        if fused:
            assert patch(module.train()).num_fused == 1
        found.append(results(layer, module.train(), input_of(dtype=F64)))
    assert distance(found[1], found[0]) <= BOUND[F64]
    assert state_of(module).fused == 3


def test_a_whole_mask_of_zeros_drops_the_update() -> None:
    """LyCORIS divides 0 by 0 there; an update that is dropped whole is zero."""
    layer, module = made("locon", rank_dropout=0.999999, rank_dropout_scale=True)
    x = input_of()
    patch(module, factored=True)
    torch.testing.assert_close(
        layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(24,), (4, 24), (0, 24), (2, 3, 5, 24)])
@pytest.mark.parametrize("algo", ALGOS)
def test_inputs_of_any_number_of_dimensions(algo: str, shape: tuple[int, ...]) -> None:
    layer, module = made(algo, bypass_mode=True)
    plain_layer, _plain = made(algo, bypass_mode=True)
    patch(module)
    x = torch.randn(shape)
    try:
        expected = plain_layer(x)
    except RuntimeError:  # (LoKr of no rows)
        return
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert state_of(module).fused == 1


def test_verify_compares() -> None:
    layer, module = made("loha", rank_dropout=0.3)
    patch(module, factored=True, verify=2)
    for _ in range(3):
        layer(input_of())
    state = state_of(module)
    assert (state.reason, state.verify, state.fused) == ("", 0, 3)
    assert state.largest_error < 2e-5

"""What kohya's trainer does at each step around a network, taken over: against the methods that it replaces."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from kohya_modules import LoRAModule
from kohya_networks import (
    CountingNetwork,
    MergingNetwork,
    Network,
    NormedModule,
    NormedNetwork,
    PlainlyLimitedNetwork,
    ScaledModule,
)
from torch import Tensor, nn

import loraaccel as la
from loraaccel.integrations import kohya_ggpo, kohya_max_norm, kohya_network
from loraaccel.integrations.kohya_work import HostWork

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = (F32, F64, BF16, F16)
# Of a tensor, between ours and the host's: the host's roundings of the norm (of sums of thousands in float32; the last
# bit in the 16-bit types, which the square root and the product may double).
BOUND = {F32: 1e-5, F64: 1e-12, BF16: 1.2e-2, F16: 1.5e-3}


def network_of(
    cls: Any = Network, dtype: torch.dtype = F32, rank: int = 4, spread: float = 1.0, split: bool = False
) -> Any:
    """Linear layers, a 1x1 and a 3x3 convolution, with updates of norms from 0 to about 6."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "lora_te_a": nn.Linear(24, 17), "lora_unet_b": nn.Linear(65, 32), "lora_unet_c": nn.Conv2d(6, 10, 1),
        "lora_unet_d": nn.Conv2d(6, 10, 3), "lora_unet_e": nn.Linear(16, 16), "lora_unet_f": nn.Linear(30, 30),
    }  # fmt: skip
    modules: dict[str, nn.Module] = {}
    for i, (name, layer) in enumerate(layers.items()):
        module = LoRAModule(name, layer, 1.0, rank, 2 if i % 2 else 2.5)
        nn.init.normal_(module.lora_up.weight, std=spread * (0.0, 0.05, 0.2, 0.4, 0.8, 1.5)[i])
        modules[name] = module
    if split:
        module = LoRAModule("lora_unet_s", nn.Linear(24, 30), 1.0, rank, 2.0, split_dims=[8, 8, 14])
        for up in module.lora_up:
            nn.init.normal_(up.weight, std=spread)
        modules["lora_unet_s"] = module
    return cls(modules).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / size if size else float(found.double().norm())


def taken(network: Any, work: HostWork | None = None) -> tuple[Any, HostWork]:
    work = HostWork() if work is None else work
    assert kohya_network.take_over(network, work)
    return network, work


# ---- the limit on norms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_limit(rank: int, dtype: torch.dtype) -> None:
    """Counts, norms and weights are the host's, three times in a row."""
    host = network_of(dtype=dtype, rank=rank)
    ours, work = taken(copy.deepcopy(host))
    for limit, device in ((1.0, torch.device("cpu")), (0.6, torch.device("cpu", 0)), (100.0, "cpu")):
        expected = host.apply_max_norm_regularization(limit, device)
        found = ours.apply_max_norm_regularization(limit, device)
        assert [type(n) for n in found] == [int, float, float]
        assert found[0] == expected[0]
        assert found[1:] == pytest.approx(expected[1:], rel=BOUND[dtype])
        assert (expected[0] > 0) == (limit < 100)
        for key, value in host.state_dict().items():
            assert relative(ours.state_dict()[key], value) <= BOUND[dtype], key
    record = work.records["max norm"]
    assert (record.fused, record.own) == (3, {})


def test_limit_is_nearer_to_the_exact_one() -> None:
    """The host's float32 norm of a large matrix is off in the fourth digit; ours meets the limit."""
    torch.manual_seed(0)
    module = LoRAModule("lora_unet_a", nn.Linear(1280, 5120), 1.0, 8, 4.0)
    nn.init.normal_(module.lora_up.weight)
    ours, _ = taken(Network({"lora_unet_a": module}))
    host = Network({"lora_unet_a": copy.deepcopy(module)})
    errors = []
    for network in (host, ours):
        assert network.apply_max_norm_regularization(1.0, "cpu")[0] == 1
        state = network.state_dict()
        up, down = (state[f"lora_unet_a.lora_{half}.weight"].double() for half in ("up", "down"))
        errors.append(abs(float((0.5 * (up @ down)).norm()) - 1.0))
    assert errors[1] < 1e-6
    assert errors[1] <= errors[0]


def test_limit_keeps_what_is_the_networks_own() -> None:
    """Parameters, their versions where nothing is scaled, gradients and frozen weights."""
    network, _ = taken(network_of())
    parameters = dict(network.named_parameters())
    frozen = parameters["lora_unet_f.lora_down.weight"].requires_grad_(False)
    before = {name: (p.data_ptr(), p._version, p.clone()) for name, p in parameters.items()}
    network.apply_max_norm_regularization(1.0, "cpu")
    for name, p in network.named_parameters():
        pointer, version, value = before[name]
        assert p is parameters[name]
        assert p.data_ptr() == pointer
        assert p.requires_grad == (p is not frozen)
        assert (p._version == version) == torch.equal(p, value)
        assert p.grad_fn is None
    assert not torch.equal(frozen, before["lora_unet_f.lora_down.weight"][2])


def test_limit_of_split_layers_touches_merged_copies_only() -> None:
    """As in the host: they count as scaled, and stay as they are."""
    host = network_of(MergingNetwork, split=True)
    ours, work = taken(copy.deepcopy(host))
    before = ours.lora_unet_s.lora_up[0].weight.clone()
    expected, found = (n.apply_max_norm_regularization(1.0, "cpu") for n in (host, ours))
    assert found[0] == expected[0]
    assert found[1:] == pytest.approx(expected[1:], rel=1e-5)
    assert torch.equal(ours.lora_unet_s.lora_up[0].weight, before)
    assert work.records["max norm"].fused == 1


def spoil(network: Any, value: float) -> None:
    with torch.no_grad():
        network.lora_unet_b.lora_up.weight[3, 1] = value


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "what", ["nan", "inf", "overflow", "zero limit", "inf limit", "nan limit", "negative"]
)
def test_limit_on_what_makes_no_sense_is_the_hosts(what: str, dtype: torch.dtype) -> None:
    host = network_of(dtype=dtype)
    limit = {"zero limit": 0.0, "inf limit": math.inf, "nan limit": math.nan, "negative": -1.0}.get(what, 1.0)
    if "limit" not in what and what != "negative":
        spoil(host, {"nan": math.nan, "inf": math.inf, "overflow": 1e30}[what])
    ours, work = taken(copy.deepcopy(host))
    expected, found = (n.apply_max_norm_regularization(limit, "cpu") for n in (host, ours))
    assert repr(found) == repr(expected)
    for key, value in host.state_dict().items():
        assert torch.equal(ours.state_dict()[key].nan_to_num(7), value.nan_to_num(7))
    assert work.records["max norm"].own == {"values": 1}


def test_limit_of_zero_weights() -> None:
    host = network_of(spread=0.0)
    ours, work = taken(copy.deepcopy(host))
    assert (
        ours.apply_max_norm_regularization(1.0, "cpu")
        == host.apply_max_norm_regularization(1.0, "cpu")
        == (0, 0, 0)
    )
    assert work.records["max norm"].fused == 1


def test_limit_where_the_update_cancels() -> None:
    """Float32 Gram matrices of a difference of two adapters would lose every digit."""
    network = network_of(rank=2)
    with torch.no_grad():
        module = network.lora_unet_f
        module.lora_down.weight[1] = module.lora_down.weight[0] * (1 + 1e-5)
        module.lora_up.weight[:, 1] = -module.lora_up.weight[:, 0]
        up, down = module.lora_up.weight.double(), module.lora_down.weight.double()
    exact = float((float(module.alpha) / 2 * (up @ down)).norm())
    found = kohya_max_norm.limited(network.state_dict(), 1.0, "cpu")
    assert isinstance(found, kohya_max_norm.Limited)
    assert found.norms[-1] == pytest.approx(exact, rel=1e-5)


class Odd(Tensor):
    pass


@pytest.mark.parametrize(
    "why", ["shape", "dtype", "tensor_subclass", "device", "alone", "shared", "autocast"]
)
def test_limit_declines(why: str) -> None:
    """Weights that ours does not take: the host's method, with its result or its error, and a reason."""
    with torch.autocast("cpu", BF16, enabled=why == "autocast"):
        outcomes = []
        for network in (declined(why), taken(declined(why))[0]):
            try:
                outcomes.append(repr(network.apply_max_norm_regularization(1.0, "cpu")))
            except Exception as error:  # noqa: BLE001
                outcomes.append(f"{type(error)} {error}")
    assert outcomes[0] == outcomes[1]
    reason = {"alone": "shape", "shared": "shape", "autocast": "dtype"}.get(why, why)
    assert network.__dict__["_loraaccel_network"].records["max norm"].own == {reason: 1}


def declined(why: str) -> Any:
    network = network_of()
    module = network.lora_unet_e
    if why == "shape":
        network.lora_unet_d.lora_down = nn.Conv2d(6, 4, 5, bias=False)
    elif why == "dtype":
        module.lora_up.to(BF16)
    elif why == "tensor_subclass":
        module.lora_up.weight = nn.Parameter(module.lora_up.weight.detach().as_subclass(Odd))
    elif why == "device":
        module.to("meta")
    elif why == "alone":
        del module.alpha
    elif why == "shared":
        network.lora_unet_f.lora_up.weight = module.lora_up.weight
        network.lora_unet_f.lora_down.weight = module.lora_down.weight
    return network


def test_limit_of_no_layers_is_the_hosts_error() -> None:
    network, work = taken(Network({}))
    with pytest.raises(ZeroDivisionError):
        network.apply_max_norm_regularization(1.0, "cpu")
    assert work.records["max norm"].own == {"shape": 1}


@pytest.mark.parametrize("cls", [PlainlyLimitedNetwork, CountingNetwork])
def test_another_method_stays(cls: Any) -> None:
    host = network_of(cls, split=False)
    for name in (
        "lora_te_a",
        "lora_unet_c",
        "lora_unet_d",
    ):  # (zeros and convolutions are beyond the first of them)
        delattr(host, name)
    ours, work = taken(copy.deepcopy(host))
    for _ in range(2):
        assert ours.apply_max_norm_regularization(1.0, "cpu") == host.apply_max_norm_regularization(
            1.0, "cpu"
        )
    for key, value in host.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    assert work.records["max norm"].own == {"unknown_forward": 2}
    assert getattr(ours, "limits", 2) == 2


def test_a_wrapped_method_is_not_trusted() -> None:
    def wrapped(self: Any, max_norm_value: float, device: Any) -> Any:
        return found(self, max_norm_value, device)

    found = Network.apply_max_norm_regularization
    assert kohya_max_norm.follows(Network)
    assert not kohya_max_norm.follows(type("Wrapped", (Network,), {"apply_max_norm_regularization": wrapped}))


def test_arguments() -> None:
    network, work = taken(network_of())
    network.apply_max_norm_regularization(max_norm_value=1.0, device="cpu")
    assert work.records["max norm"].fused == 1
    with pytest.raises(TypeError):
        network.apply_max_norm_regularization(1.0)
    assert work.records["max norm"].own == {"extra_arguments": 1}


# ---- switching, giving back ------------------------------------------------------------------------------------------


def test_the_switch() -> None:
    network, work = taken(network_of())
    host = copy.deepcopy(network)
    assert type(host) is Network  # copies are the host's
    with la.disabled():
        found = network.apply_max_norm_regularization(1.0, "cpu")
    assert found == host.apply_max_norm_regularization(1.0, "cpu")
    for key, value in host.state_dict().items():
        assert torch.equal(network.state_dict()[key], value)
    assert work.records["max norm"].own == {"switched_off": 1}
    assert la.unpatch(network) == 0
    assert type(network) is Network
    assert not [name for name in vars(network) if "loraaccel" in name]
    assert not kohya_network.give_back(network)
    network.apply_max_norm_regularization(1.0, "cpu")
    assert work.records["max norm"].fused == 0


def test_taken_over_it_is_still_itself() -> None:
    network = network_of()
    names, keys = [n for n, _ in network.named_modules()], list(network.state_dict())
    taken(network)
    assert (type(network).__name__, type(network).__module__) == ("Network", Network.__module__)
    assert isinstance(network, Network)
    assert [n for n, _ in network.named_modules()] == names
    assert list(network.state_dict()) == keys
    assert (
        type(network).apply_max_norm_regularization.__doc__ == Network.apply_max_norm_regularization.__doc__
    )
    assert not kohya_network.take_over(network, HostWork())  # once
    again = pickle.loads(pickle.dumps(network))
    assert type(again) is Network
    assert "_loraaccel_network" not in vars(again)
    file = io.BytesIO()
    torch.save(network, file)
    bound = network.apply_max_norm_regularization
    kohya_network.give_back(network)
    expected = network_of().apply_max_norm_regularization(1.0, "cpu")
    assert bound(1.0, "cpu") == expected  # somebody kept it


def test_a_network_without_such_methods_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    assert not kohya_network.take_over(module, HostWork())
    assert vars(module).keys() == vars(nn.Sequential()).keys()


def test_verify_and_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    host = network_of()
    ours, work = taken(copy.deepcopy(host), HostWork(verify=2))
    for _ in range(3):
        expected, found = (n.apply_max_norm_regularization(0.5, "cpu") for n in (host, ours))
        assert found == pytest.approx(expected, rel=1e-5)
    record = work.records["max norm"]
    assert (record.fused, record.verify, record.reason) == (3, 0, "")
    assert 0 < record.largest_error < 1e-5

    right = kohya_max_norm._limit
    monkeypatch.setattr(kohya_max_norm, "_limit", lambda n, limit: right(n * 1.1, limit))
    host = network_of()
    ours, work = taken(copy.deepcopy(host), HostWork(verify=2))
    with pytest.warns(RuntimeWarning, match="verify found a relative error of .* in max norm"):
        found = ours.apply_max_norm_regularization(0.5, "cpu")
    assert found == host.apply_max_norm_regularization(0.5, "cpu")
    for key, value in host.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    ours.apply_max_norm_regularization(0.5, "cpu")
    assert work.records["max norm"].own == {"verify_failed": 2}
    assert work.records["max norm"].fused == 0


@pytest.mark.parametrize("roll_back", [True, False])
def test_an_error_of_ours(monkeypatch: pytest.MonkeyPatch, roll_back: bool) -> None:
    """auto: a warning, and the host's method from then on; on: the error, with the task's name."""
    host = network_of()
    ours, work = taken(copy.deepcopy(host), HostWork(roll_back=roll_back))
    assert kohya_max_norm.follows(Network)

    def broken(pairs: Any) -> Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(kohya_max_norm, "update_squares", broken)
    if not roll_back:
        with pytest.raises(RuntimeError, match="out of luck") as caught:
            ours.apply_max_norm_regularization(1.0, "cpu")
        assert "max norm (Network" in "".join(getattr(caught.value, "__notes__", ["max norm (Network"]))
        return
    with pytest.warns(RuntimeWarning, match="an error in max norm; Network.apply_max_norm_regularization"):
        found = ours.apply_max_norm_regularization(1.0, "cpu")
    assert found == host.apply_max_norm_regularization(1.0, "cpu")
    monkeypatch.undo()
    ours.apply_max_norm_regularization(1.0, "cpu")
    assert work.records["max norm"].own == {"native_error": 2}


# ---- norms of GGPO ---------------------------------------------------------------------------------------------------


def normed(cls: Any = NormedModule, dtype: torch.dtype = F32, rank: int = 4) -> Any:
    torch.manual_seed(1)
    shapes = {"lora_te_a": (24, 17), "lora_unet_b": (65, 32), "lora_unet_c": (16, 48)}
    modules = {name: cls(name, nn.Linear(*shape), 1.0, rank, 3.0) for name, shape in shapes.items()}
    for module in modules.values():
        nn.init.normal_(module.lora_up.weight)
    network = NormedNetwork(modules).to(dtype)
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    return network


def norms_of(network: Any) -> list[dict[str, Tensor]]:
    names = ("weight_norms", "combined_weight_norms", "grad_norms")
    return [
        {name: getattr(m, name) for name in names if getattr(m, name, None) is not None}
        for m in network.text_encoder_loras + network.unet_loras
    ]


def assert_norms(found: Any, expected: Any, bound: float) -> None:
    for ours, theirs in zip(norms_of(found), norms_of(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert relative(ours[name], value) <= bound, name
            assert not ours[name].requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_norms(rank: int, dtype: torch.dtype) -> None:
    host = normed(dtype=dtype, rank=rank)
    ours, work = taken(normed(dtype=dtype, rank=rank))
    for network in (host, ours):
        network.update_norms()
    # bfloat16: the host rounds each number of the update, and each square
    assert_norms(ours, host, {F32: 1e-6, F64: 1e-12, BF16: 8e-3, F16: 1e-3}[dtype])
    for network in (host, ours):
        network.update_grad_norms()
    # under autocast the host's factors and products are in bfloat16
    assert norms_of(ours)[0]["grad_norms"].dtype == norms_of(host)[0]["grad_norms"].dtype
    assert_norms(ours, host, 1e-12 if dtype == F64 else 1.2e-2)
    assert {name: r.fused for name, r in work.records.items()} == {
        "norms of weights": 1,
        "norms of gradients": 1,
    }


def test_norms_of_gradients_against_the_exact_ones() -> None:
    host, ours = normed(), taken(normed())[0]
    errors = []
    for network in (host, ours):
        network.update_grad_norms()
        module = network.lora_unet_b
        up, down = module.lora_up.weight, module.lora_down.weight
        grad = up.detach().double() @ down.grad.double() + up.grad.double() @ down.detach().double()
        exact = (module.scale * grad).norm(dim=1, keepdim=True)
        errors.append(relative(module.grad_norms.double(), exact))
    assert errors[1] <= errors[0]


def test_norms_of_what_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    """No gradients, no GGPO, no training: nothing is set, the host says what it says, and nothing is counted."""
    network, work = taken(normed())
    network.zero_grad()
    network.lora_te_a.ggpo_sigma = None
    network.update_grad_norms()
    assert norms_of(network) == [{}, {}, {}]
    network.eval()
    network.update_norms()
    network.update_grad_norms()
    assert norms_of(network) == [{}, {}, {}]
    assert capsys.readouterr().out.count("is not in training") == 3
    assert work.records == {}
    network.train()
    network.update_norms()
    assert [len(found) for found in norms_of(network)] == [0, 2, 2]
    assert work.records["norms of weights"].fused == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_are_the_hosts(value: float) -> None:
    host = normed()
    ours, work = taken(normed())
    for network in (host, ours):
        spoil(network, value)
        network.lora_unet_c.lora_up.weight.grad = None
        network.lora_unet_b.lora_up.weight.grad = torch.full((32, 4), value)
        network.lora_unet_b.lora_down.weight.grad = torch.ones(4, 65)
        network.update_norms()
        network.update_grad_norms()
    for a, b in zip(norms_of(ours), norms_of(host), strict=True):
        assert a.keys() == b.keys()
        for name, theirs in b.items():
            assert torch.equal(a[name].nan_to_num(7), theirs.nan_to_num(7))
    assert {name: r.own for name, r in work.records.items()} == {
        "norms of weights": {"values": 1}, "norms of gradients": {"values": 1},
    }  # fmt: skip


def test_other_norms_stay_the_hosts() -> None:
    host = normed(ScaledModule)
    ours, work = taken(copy.deepcopy(host))
    for network in (host, ours):
        network.update_norms()
    assert_norms(ours, host, 0.0)
    assert work.records["norms of weights"].own == {"unknown_forward": 1}
    assert kohya_ggpo.grads_follow(ScaledModule)
    assert not kohya_ggpo.norms_follow(ScaledModule)


def test_norms_of_patched_modules_and_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are of our classes too; verify compares, and puts the host's norms there where ours differ."""
    host = normed()
    ours, work = taken(normed(), HostWork(verify=1))
    ours.apply_to()
    assert la.patch(ours).num_fused == 3
    for network in (host, ours):
        network.update_norms()
        network.update_grad_norms()
    assert_norms(ours, host, 1.2e-2)
    assert all(r.fused == 1 and r.verify == 0 for r in work.records.values())
    assert work.records["norms of weights"].largest_error < 1e-6
    right = kohya_ggpo.gradient_row_squares
    monkeypatch.setattr(kohya_ggpo, "gradient_row_squares", lambda *a: right(*a) * 1.5)
    ours, work = taken(normed(), HostWork(verify=1))
    with pytest.warns(RuntimeWarning, match="in norms of gradients"):
        ours.update_grad_norms()
    ours.update_norms()
    assert_norms(ours, host, 1e-6)
    assert work.records["norms of gradients"].own == {"verify_failed": 1}

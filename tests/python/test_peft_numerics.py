"""One LoRA layer of PEFT, patched: values and gradients for every dtype, layout, rank and dropout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from peft_models import add_adapter, check_layer, counted, lora_host, plain, results, the_layer
from torch import Tensor, nn

import loraaccel

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
UNIFORM = [F64, F32, F16, BF16]
MIXED = [(BF16, F32), (F16, F32), (F32, BF16), (F32, F16), (BF16, F16)]
ids = {"ids": lambda v: str(v).removeprefix("torch.")}


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def patched(model: nn.Module) -> nn.Module:
    loraaccel.patch(model, strict=True)
    return the_layer(model)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize(("dtype", "adapters"), [*((d, d) for d in UNIFORM), *MIXED], **ids)
def test_vt8_layer_is_within_tol_of_float64(dtype: torch.dtype, adapters: torch.dtype, bias: bool) -> None:
    layer = patched(lora_host(40, 24, bias=bias, dtype=dtype, adapter_dtype=adapters))
    check_layer(layer, normal(5, 40, dtype=dtype))


@pytest.mark.parametrize("dtype", UNIFORM, **ids)
@pytest.mark.parametrize("trains", ["weight", "bias", "both", "only base"])
def test_vt8_frozen_layer_that_is_not_frozen(dtype: torch.dtype, trains: str) -> None:
    model = lora_host(24, 40, dtype=dtype)
    layer = patched(model)
    if trains == "only base":
        model.requires_grad_(False)
    layer.base_layer.weight.requires_grad_(trains != "bias")
    layer.base_layer.bias.requires_grad_(trains != "weight")
    check_layer(layer, normal(7, 24, dtype=dtype))


@pytest.mark.parametrize("which", ["lora_A", "lora_B", "both"])
def test_vt5_frozen_adapter_gets_no_gradient(which: str) -> None:
    layer = patched(lora_host())
    for part in ("lora_A", "lora_B") if which == "both" else (which,):
        getattr(layer, part).requires_grad_(False)
    x = normal(5, 24)
    check_layer(layer, x)
    if which == "both":
        assert not layer(x).requires_grad


@pytest.mark.parametrize("dtype", [BF16, F16], **ids)
def test_vt8_adapters_in_float32_by_default(dtype: torch.dtype) -> None:
    """What get_peft_model makes of a 16-bit model when nobody says otherwise."""
    import peft
    from peft_models import Host, config

    torch.manual_seed(0)
    model = peft.get_peft_model(Host(24, 16, True).to(dtype), config(target_modules=["proj"]))
    layer = patched(model)
    assert layer.lora_A["default"].weight.dtype == F32
    check_layer(layer, normal(5, 24, dtype=dtype))


@pytest.mark.parametrize("cast", [BF16, F16], **ids)
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "adapters"),
    [*itertools.product([F32, BF16], [F32, BF16], [F32, BF16]), (F16, F16, F32)],
    **ids,
)
def test_vt2_autocast(
    cast: torch.dtype, x_dtype: torch.dtype, dtype: torch.dtype, adapters: torch.dtype
) -> None:
    """Under autocast: PEFT's output dtype, each gradient in its parameter's dtype, PEFT's values.

    Operands are multiples of 1/8 below 2, exact in every type, so that only the products and sums may differ: by
    autocast's three roundings.
    """
    layer = patched(lora_host(16, 8, dtype=dtype, adapter_dtype=adapters))
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_((normal(*p.shape, seed=i) * 4).round().clamp(-15, 15) / 8)
    x = ((normal(6, 16) * 4).round() / 8).to(x_dtype)
    with torch.autocast("cpu", dtype=cast):
        with counted() as calls:
            got = results(layer, layer, x)
        own = results(layer, lambda x: plain(layer, x), x)
    assert calls == {"lora_linear": 1}
    assert got["y"].dtype == cast
    unit = 2.0**-8 if BF16 in (cast, x_dtype, adapters) else 2.0**-11
    for name, g in got.items():
        assert g.dtype == own[name].dtype, name
        assert float((g.double() - own[name].double()).norm()) <= 4 * unit * float(
            own[name].double().norm()
        ), name


def test_vt2_autocast_leaves_float64_alone() -> None:
    layer = patched(lora_host(dtype=F64))
    with torch.autocast("cpu", dtype=BF16):
        check_layer(layer, normal(5, 24, dtype=F64))


# ---- shapes ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "row slice": lambda: normal(9, 24)[2:7],
    "column slice": lambda: normal(5, 60)[:, 3:27],
    "3-d slice": lambda: normal(2, 7, 24)[:, 1:4],
    "transposed": lambda: normal(24, 5).t(),
    "every second": lambda: normal(5, 48)[..., ::2],
    "permuted": lambda: normal(3, 2, 24).transpose(0, 1),
    "expanded": lambda: normal(1, 24).expand(5, 24),
    "negated view": lambda: torch.imag(torch.conj(torch.complex(normal(5, 24), normal(5, 24, seed=2)))),
    "one row": lambda: normal(1, 24),
    "1-d": lambda: normal(24),
    "3-d": lambda: normal(2, 3, 24),
    "5-d": lambda: normal(2, 1, 3, 2, 24),
    "many rows": lambda: normal(131, 24),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vs4_vs6_layouts_of_x(layout: str) -> None:
    x = LAYOUTS[layout]()
    before = x.clone()
    check_layer(patched(lora_host()), x)
    assert torch.equal(x, before)  # VT3: never written to


@pytest.mark.parametrize("shape", [(0, 24), (0, 5, 24), (2, 0, 24)])
@pytest.mark.parametrize("dtype", [F32, BF16], **ids)
def test_vs3_no_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = patched(lora_host(dtype=dtype))
    got = results(layer, layer, normal(*shape, dtype=dtype))
    assert got["y"].shape == (*shape[:-1], 16)
    assert all(not g.any() and g.dtype == dtype for g in got.values())
    assert got["lora_A.default.weight"].shape == (4, 24)
    check_layer(layer, normal(3, 24, dtype=dtype))  # and the next call is none the worse


@pytest.mark.parametrize("dtype", [F32, BF16], **ids)
def test_vs4_strided_weights(dtype: torch.dtype) -> None:
    """A, B and W given as views of something else, as PiSSA or a tied layer leave them."""
    layer = patched(lora_host(dtype=dtype))
    for linear in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
        linear.weight.data = linear.weight.data.t().contiguous().t()
        assert not linear.weight.is_contiguous()
    layer.base_layer.bias.data = torch.ones(1, dtype=dtype).expand(16)
    check_layer(layer, normal(5, 24, dtype=dtype))


@pytest.mark.parametrize(
    "x",
    [torch.tensor(1.0), torch.ones(3, 23), torch.ones(3, 24).long(), None],
    ids=["0-d", "width", "int", "None"],
)
def test_vs6_bad_x_raises_what_peft_raises(x: Tensor | None) -> None:
    layer = patched(lora_host())
    with pytest.raises((RuntimeError, TypeError)) as own:
        plain(layer, x)
    with pytest.raises(own.type):
        layer(x)
    check_layer(layer, normal(3, 24))


def test_meta_tensors_give_shapes() -> None:
    layer = patched(lora_host()).to("meta")
    x = torch.empty(2, 5, 24, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, y.device.type, x.grad.shape) == ((2, 5, 16), "meta", x.shape)


# ---- ranks, scales, several adapters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(("rank", "alpha"), [(1, 3), (2, 16), (3, 7), (16, 1), (23, 23), (64, 16)])
def test_vn1_vn2_scale(rank: int, alpha: int, rslora: bool) -> None:
    layer = patched(lora_host(r=rank, lora_alpha=alpha, use_rslora=rslora))
    assert layer.scaling["default"] == alpha / (math.sqrt(rank) if rslora else rank)
    check_layer(layer, normal(5, 24))


def test_vn1_known_value() -> None:
    """(16 / 8) * 8 * 4 = 64, with alpha 1: 4."""
    for alpha, expected in ((16, 64.0), (1, 4.0)):
        layer = patched(lora_host(4, 4, r=8, lora_alpha=alpha, bias=False))
        with torch.no_grad():
            layer.base_layer.weight.zero_()
            layer.lora_A["default"].weight.fill_(1)
            layer.lora_B["default"].weight.fill_(1)
        assert layer(torch.ones(3, 4)).tolist() == [[expected] * 4] * 3


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-3])
def test_vn1_scale_zero_and_below(scale: float) -> None:
    layer = patched(lora_host())
    layer.scaling["default"] = scale
    check_layer(layer, normal(5, 24), {"lora_linear": 1} if scale else {"zero_scaling": 1})


@pytest.mark.parametrize("dtype", UNIFORM, **ids)
@pytest.mark.parametrize(
    "active",
    [["default"], ["b", "default"], ["default", "b", "c"], ["c", "absent"], ["b", "b"]],
    ids="+".join,
)
def test_several_adapters_with_ranks_of_their_own(dtype: torch.dtype, active: list[str]) -> None:
    """Summed, and rounded once: two adapters in 16 bits are no worse than one."""
    model = lora_host(dtype=dtype)
    add_adapter(model, "b", r=7, lora_alpha=3, use_rslora=True)
    add_adapter(model, "c", r=1, lora_alpha=5)
    layer = patched(model)
    layer.set_adapter([a for a in active if a != "absent"])
    layer._active_adapter = active
    check_layer(layer, normal(5, 24, dtype=dtype))


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32), (BF16, F16)], **ids)
def test_adapters_of_different_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """PEFT casts x to each adapter's type in turn, and keeps what the last one left of it. Ours may only be closer."""
    model = lora_host()
    add_adapter(model, "b")
    layer = patched(model)
    layer.set_adapter(["default", "b"])
    for name, dtype in zip(("default", "b"), dtypes, strict=True):
        layer.lora_A[name].to(dtype)
        layer.lora_B[name].to(dtype)
    check_layer(layer, normal(5, 24))


# ---- dropout ---------------------------------------------------------------------------------------------------------


def masks_of(layer: nn.Module, rows: int, name: str = "default") -> Tensor:
    """The mask of one adapter, seen directly: W = 0, A = B = 1, s = 1, x = 1."""
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        torch.nn.init.eye_(layer.lora_A[name].weight)
        torch.nn.init.eye_(layer.lora_B[name].weight)
    layer.scaling[name] = 1.0
    return layer(torch.ones(rows, layer.in_features)).detach()


def dropping(p: float, **changes: object) -> nn.Module:
    return patched(lora_host(32, 32, r=32, bias=False, lora_dropout=p, **changes))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_vn5_mask_values_and_rate(p: float) -> None:
    layer = dropping(p)
    torch.manual_seed(3)
    mask = masks_of(layer, 512)
    kept = mask != 0
    torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - p)))
    n = mask.numel()
    assert abs(int(kept.sum()) - n * (1 - p)) <= 4 * math.sqrt(n * p * (1 - p))
    # no row or column is favoured: chi-square of 512 rows, of 32 columns, each within four standard deviations
    for dim, count, cells in ((1, 512, 32), (0, 32, 512)):
        chi = ((kept.sum(dim) - cells * (1 - p)) ** 2 / (cells * p * (1 - p))).sum()
        assert abs(float(chi) - count) <= 4 * math.sqrt(2 * count)


def test_vn5_masks_differ_between_calls_modules_and_adapters() -> None:
    torch.manual_seed(3)
    model = lora_host(32, 32, r=32, bias=False, lora_dropout=0.5)
    add_adapter(model, "b", r=32, lora_dropout=0.5)
    layer, other = patched(model), dropping(0.5, seed=0)
    first, second, third = masks_of(layer, 64), masks_of(layer, 64), masks_of(other, 64)
    layer.set_adapter(["default", "b"])
    layer.scaling["b"] = 1.0
    with torch.no_grad():  # the second adapter's mask comes a thousand times as large
        torch.nn.init.eye_(layer.lora_A["b"].weight)
        layer.lora_B["b"].weight.copy_(1000 * torch.eye(32))
    both = masks_of(layer, 64)
    masks = [first, second, third, both % 1000, both.div(1000, rounding_mode="floor")]
    for one, two in itertools.combinations(masks, 2):  # equal in half of 2048 places, give or take 4 sigma
        assert abs(int((one == two).sum()) - 1024) <= 91


def test_vn5_each_adapter_has_its_own_probability() -> None:
    """0.25 for the first, none for the second, 0.75 for the third; told apart by powers of 1000."""
    model = lora_host(32, 32, r=32, bias=False, lora_dropout=0.25)
    for name, p in (("b", 0.0), ("c", 0.75)):
        add_adapter(model, name, r=32, lora_dropout=p)
    layer = patched(model)
    layer.set_adapter(["default", "b", "c"])
    with torch.no_grad():
        for name, factor in (("b", 1e3), ("c", 1e6)):
            torch.nn.init.eye_(layer.lora_A[name].weight)
            layer.lora_B[name].weight.copy_(factor * torch.eye(32))
            layer.scaling[name] = 1.0
    torch.manual_seed(3)
    sums = masks_of(layer, 64).double()
    third = (sums / 1e6).round()
    second = ((sums - 1e6 * third) / 1e3).round()
    first = sums - 1e6 * third - 1e3 * second
    assert set(third.unique().tolist()) == {0.0, 4.0}
    assert set(second.unique().tolist()) == {1.0}
    assert ((first.abs() < 0.5) | ((first - 4 / 3).abs() < 0.5)).all()
    sigma = math.sqrt(2048 * 0.25 * 0.75)
    assert abs(int((first > 0.5).sum()) - 1536) <= 4 * sigma
    assert abs(int((third > 0).sum()) - 512) <= 4 * sigma


@pytest.mark.parametrize("dtype", [F32, BF16], **ids)
def test_vn5_gradients_use_the_mask_of_the_forward_pass(dtype: torch.dtype) -> None:
    """x has zeros in it: a mask guessed from the dropped x would be wrong there."""
    layer = patched(lora_host(8, 8, r=8, bias=False, lora_dropout=0.5, dtype=dtype))
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        torch.nn.init.eye_(layer.lora_A["default"].weight)
        torch.nn.init.eye_(layer.lora_B["default"].weight)
    layer.scaling["default"] = 1.0
    x = torch.ones(64, 8, dtype=dtype)
    torch.manual_seed(5)
    mask = layer(x).detach()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    x[:, ::3] = 0
    torch.manual_seed(5)
    got = results(layer, layer, x, torch.ones(64, 8))
    assert torch.equal(got["y"], mask * x)
    assert torch.equal(got["x"], mask)
    column_sums = (mask * x).sum(0)
    assert torch.equal(got["lora_A.default.weight"], column_sums.expand(8, 8))
    assert torch.equal(got["lora_B.default.weight"], column_sums.expand(8, 8))


def test_vn6_dropout_equals_peft_in_distribution() -> None:
    """Mean over 2048 masks of the output and of every gradient: the value without dropout; the variances: PEFT's."""
    model = lora_host(12, 8, lora_dropout=0.25)
    layer = patched(model)
    x = normal(3, 12)
    layer.eval()
    expected = results(layer, layer, x)
    layer.train()
    torch.manual_seed(11)
    with counted() as calls:
        ours = [results(layer, layer, x) for _ in range(2048)]
    assert calls == {"lora_linear": 2048}
    theirs = [results(layer, lambda x: plain(layer, x), x) for _ in range(2048)]
    for name in ("y", "x", "lora_A.default.weight", "lora_B.default.weight"):
        mine, own = (torch.stack([r[name] for r in runs]).double() for runs in (ours, theirs))
        sigma = mine.std(0) / math.sqrt(2048)
        assert ((mine.mean(0) - expected[name]).abs() <= 5 * sigma + 1e-6).all(), name
        spread = mine.var(0).sum() / own.var(0).sum()
        assert 0.9 <= spread <= 1.1, name


def test_vn5_everything_dropped() -> None:
    layer = patched(lora_host(lora_dropout=0.5))
    layer.lora_dropout["default"].p = 1.0
    x = normal(5, 24)
    got = results(layer, layer, x)
    own = results(layer, lambda x: plain(layer, x), x)
    for name, g in got.items():
        torch.testing.assert_close(g, own[name], msg=name)
    assert not got["lora_A.default.weight"].any()


def test_dropout_follows_the_dropout_modules_own_mode_and_probability() -> None:
    layer = patched(lora_host(lora_dropout=0.5))
    x = normal(5, 24)
    layer.lora_dropout.eval()
    check_layer(layer, x)
    layer.eval()
    layer.lora_dropout.train()
    assert not torch.equal(layer(x), layer(x))
    layer.lora_dropout["default"].p = 0.0
    check_layer(layer, x)


def test_dropout_follows_manual_seed_and_evaluation_draws_nothing() -> None:
    layer = patched(lora_host(lora_dropout=0.5))
    x = normal(5, 24)
    torch.manual_seed(8)
    one = layer(x)
    torch.manual_seed(8)
    assert torch.equal(one, layer(x))
    layer.eval()
    state = torch.get_rng_state()
    layer(x).sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_does_not_follow_torchs_default_device() -> None:
    """torch.device as a context, torch.set_default_device: x is on the CPU, so the mask is."""
    layer = patched(lora_host(lora_dropout=0.5))
    x = normal(5, 24)
    torch.manual_seed(8)
    own = results(layer, layer, x)
    torch.manual_seed(8)
    with torch.device("meta"):
        y = layer(x)
    assert torch.equal(y, own["y"])
    assert y.device.type == "cpu"

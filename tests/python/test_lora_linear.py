"""Values of lora_linear: every kernel, type, shape and layout against the formula in float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import loraaccel
from loraaccel.ops import lora_linear, lora_linear_adapters
from reference import lora_linear as formula
from reference.calls import Call, check, function, make_call, run
from reference.operators import OPS
from reference.tolerance import assert_within, bound

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Types of the layer and of the adapters.
DTYPES = [
    (F64, F64),
    (F32, F32),
    (BF16, BF16),
    (F16, F16),
    (BF16, F32),
    (F16, F32),
    (F32, BF16),
    (F32, F16),
    (BF16, F16),
]
FLOAT64 = ("torch", "ref")  # the kernels that serve it
# M, K, N, R: empty, one, and both sides of a vector, a register tile, a panel, a block of rows and a block of sums.
SHAPES = [
    (0, 8, 6, 4),
    (1, 1, 1, 1),
    (1, 100, 33, 8),
    (2, 3, 5, 2),
    (3, 16, 16, 16),
    (7, 17, 31, 3),
    (13, 31, 15, 1),
    (15, 64, 65, 17),
    (16, 33, 32, 8),
    (49, 130, 64, 5),
    (65, 257, 97, 9),
    (130, 70, 300, 33),
    (300, 20, 24, 64),
    (20, 40, 30, 256),
]


def name_of(value: object) -> str | None:
    if isinstance(value, tuple):
        return "-".join(str(v).removeprefix("torch.") for v in value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def kernel_names() -> list[object]:
    """Every kernel of this build's list; those that this machine lacks are skipped with their reason."""
    return [
        pytest.param(
            k["name"], marks=[] if k["available"] else [pytest.mark.skip(reason=k["reason"])], id=k["name"]
        )
        for k in loraaccel.kernels()
        if k["op"] == "lora_linear" and k["reason"] != "not part of this build"
    ]


@pytest.fixture(params=kernel_names())
def kernel(request: pytest.FixtureRequest, force_kernel: Callable[[str], None]) -> str:
    force_kernel(request.param)
    return request.param


def serves(kernel: str, layer: torch.dtype) -> bool:
    return layer != F64 or kernel in FLOAT64


# ---- every kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_values_and_gradients(
    kernel: str, shape: tuple[int, int, int, int], kernel_calls: Callable[[], dict[str, int]]
) -> None:
    """With a bias and without, in every type; and the kernel that was asked for is the one that ran."""
    m, k, n, r = shape
    served = 0
    for dtypes, bias in itertools.product(DTYPES, (True, False)):
        if serves(kernel, dtypes[0]):
            call = make_call((m,), k, n, r, dtypes, bias=bias)
            check(call, run(call), lent=kernel == "torch")
            served += 1
    assert kernel_calls() == {kernel: 2 * served}


def test_several_adapters(kernel: str) -> None:
    """Different ranks, scales of both signs, adapters of another type than the layer."""
    for dtypes in DTYPES:
        if serves(kernel, dtypes[0]):
            call = make_call((51,), 48, 40, [4, 1, 19], dtypes)
            check(call, run(call), lent=kernel == "torch")


def test_no_adapter_is_a_linear_layer(kernel: str) -> None:
    for layer in (F64, F32, BF16, F16):
        if serves(kernel, layer):
            call = make_call((50,), 24, 20, [], (layer, layer))
            check(call, run(call, function), lent=kernel == "torch")


def test_adapters_of_different_types(kernel: str) -> None:
    call = make_call((50,), 32, 24, [4, 8], (F32, F32))
    call.lora_a[1], call.lora_b[1] = call.lora_a[1].to(BF16), call.lora_b[1].to(BF16)
    check(call, run(call))


@pytest.mark.parametrize("zero", ["K", "N"])
def test_zero_width(kernel: str, zero: str) -> None:
    """K = 0: the bias alone. N = 0: nothing to compute, gradients of zero."""
    call = make_call((5,), 0 if zero == "K" else 7, 0 if zero == "N" else 6, 2)
    check(call, run(call))


def test_what_is_not_finite_stays_in_its_row_and_column(kernel: str) -> None:
    """Vector kernels work on tiles of rows and columns, padded: NaN and infinity must not leak out of theirs."""
    call = make_call((53,), 37, 41, 5)
    clean = run(call)
    call.x = call.x.clone()
    call.x[3, 36] = torch.nan
    call.x[52, 0] = torch.inf
    y = run(call)["y"]
    rows = torch.tensor([m for m in range(53) if m not in (3, 52)])
    assert torch.equal(y[rows], clean["y"][rows])
    assert torch.isnan(y[3]).all()
    assert not torch.isfinite(y[52]).any()

    call = make_call((53,), 37, 41, 5)
    call.weight = call.weight.clone()
    call.weight[40] = torch.nan
    results = run(call)
    assert torch.equal(results["y"][:, :40], clean["y"][:, :40])
    assert torch.isnan(results["y"][:, 40]).all()
    for name in ("weight", "bias", "lora_A.0", "lora_B.0"):  # W is in none of their formulas
        assert torch.equal(results[name], clean[name])


def test_small_update_survives_a_large_weight(kernel: str) -> None:
    """An update far below one unit in the last place of W: here x W^T is exactly 0, and all of y is the update."""
    m, k, n, r = 50, 64, 24, 4
    x = torch.ones(m, k)
    x[:, 1::2] = -1  # every pair cancels, without rounding, in any order of pairs
    a = torch.zeros(r, k)
    a[:, 0] = 2.0**-33
    y = lora_linear(x, torch.full((n, k), 1.0), None, a, torch.ones(n, r), 1.0)
    assert torch.equal(y, torch.full((m, n), r * 2.0**-33))


def test_subnormal_results_are_kept(kernel: str) -> None:
    """Below the normal range of the type: exact multiples of its smallest number, not flushed to zero."""
    m, k, n, r = 50, 20, 24, 3
    for layer, a, b in ((F32, 2.0**-100, 2.0**-32), (BF16, 2.0**-100, 2.0**-32), (F16, 2.0**-10, 2.0**-14)):
        if not serves(kernel, layer):
            continue
        call = Call(
            x=torch.ones(m, k, dtype=layer),
            weight=torch.zeros(n, k, dtype=layer),
            bias=None,
            lora_a=[torch.full((r, k), a, dtype=layer)],
            lora_b=[torch.full((n, r), b, dtype=layer)],
            grad=torch.ones(m, n, dtype=layer),
            scalings=[1.0],
        )
        results = run(call)
        assert torch.equal(results["y"].double(), torch.full((m, n), k * r * a * b, dtype=F64)), layer
        assert torch.equal(results["x"].double(), torch.full((m, k), n * r * a * b, dtype=F64)), layer


def test_hidden_is_the_input_of_b(kernel: str) -> None:
    """The operator's second output: D(x) A^T of every adapter side by side, in the type of the sums."""
    for dtypes in DTYPES:
        if serves(kernel, dtypes[0]):
            call = make_call((2, 26), 40, 7, [3, 5], dtypes, dropouts=[0.3, 0.0])
            _, hidden = OPS.lora_linear(
                *(call.x, call.weight, None, call.lora_a, call.lora_b, call.scalings, call.dropouts),
                torch.tensor(call.seed),
            )
            x = formula.double(call.x).reshape(52, 40)
            adapters = call.adapters(formula.double)
            parts = [(x if ad.factor is None else x * ad.factor, ad.a) for ad in adapters]
            ref = torch.cat([d @ a.T for d, a in parts], dim=1)
            terms = torch.cat([d.abs() @ a.abs().T for d, a in parts], dim=1)
            assert hidden.dtype == (F64 if dtypes[0] == F64 else F32)
            assert_within("hidden", hidden, ref, bound(ref, terms, 40, hidden.dtype))


@pytest.mark.parametrize("layer", [BF16], ids=name_of)
def test_each_output_is_rounded_once_with_several_adapters(layer: torch.dtype, kernel: str) -> None:
    """The header's promise: one rounding, and one more where x W^T or G W was borrowed. Here both are zero, and two
    adapters of bfloat16 cancel up to 2^-10 of their size, which a rounding between the two would lose."""
    m, k, n, r = 6, 8, 5, 2
    one = torch.ones
    call = Call(
        x=one(m, k, dtype=BF16),
        weight=torch.zeros(n, k, dtype=BF16),
        bias=None,
        lora_a=[one(r, k, dtype=BF16), one(r, k, dtype=BF16)],
        lora_b=[one(n, r, dtype=BF16), one(n, r, dtype=BF16)],
        grad=one(m, n, dtype=BF16),
        scalings=[1.0 + 2.0**-10, -1.0],
    )
    few = 2.0**-40  # keeps everything, by the path with a mask
    for dropouts in ([0.0, 0.0], [few, 0.0], [0.0, few], [few, few]):
        call.dropouts = dropouts
        results = run(call)
        assert torch.equal(results["y"], torch.full((m, n), k * r * 2.0**-10, dtype=BF16))
        assert torch.equal(results["x"], torch.full((m, k), n * r * 2.0**-10, dtype=BF16)), dropouts


# ---- choice of the kernel --------------------------------------------------------------------------------------------


def test_without_forcing_something_serves_every_call(
    monkeypatch: pytest.MonkeyPatch, kernel_calls: Callable[[], dict[str, int]]
) -> None:
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL", raising=False)
    for dtypes, m in itertools.product(DTYPES, (1, 47, 48, 100)):
        call = make_call((m,), 40, 36, 4, dtypes)
        check(call, run(call))
    ran = kernel_calls()
    assert sum(ran.values()) == 2 * 4 * len(DTYPES)
    assert "ref" not in ran


@pytest.mark.parametrize("value", ["", "auto"])
def test_empty_and_auto_force_nothing(value: str, force_kernel: Callable[[str], None]) -> None:
    force_kernel(value)
    for dtypes in ((F64, F64), (F32, F32), (BF16, BF16)):  # nothing but ref and torch serves them all
        call = make_call((50,), 8, 8, 2, dtypes)
        check(call, run(call))


# ---- shapes, VS3 VS6 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 3, 4, 5), (1, 1, 7, 1), (60, 1)], ids=str)
def test_vs6_leading_dimensions(lead: tuple[int, ...]) -> None:
    """Whatever nn.Linear accepts; a vector gives a vector."""
    for dtypes in ((F32, F32), (BF16, F32)):
        call = make_call(lead, 19, 11, 3, dtypes)
        results = run(call, function)
        assert results["y"].shape == (*lead, 11)
        assert results["x"].shape == (*lead, 19)
        check(call, results)


def test_vs6_huge_leading_dimension(kernel: str) -> None:
    """VS6: 522240 rows of 4, checked on sampled rows, the last one included, and on every gradient."""
    # ref: plain loops would take minutes; the others are what could overflow.
    call = make_call((5223 if kernel == "ref" else 522240,), 4, 3, 2)
    check(call, run(call))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F64, F64)], ids=name_of)
@pytest.mark.parametrize("lead", [(0,), (0, 5), (2, 0)], ids=str)
def test_vs3_zero_rows(lead: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], kernel: str) -> None:
    """VS3: the right shape and type, gradients of zero (not None, not uninitialised), and the next call unaffected."""
    assert serves(kernel, dtypes[0]), "conftest.py leaves these out"
    call = make_call(lead, 8, 6, 4, dtypes)
    results = run(call)
    assert results["y"].shape == (*lead, 6)
    assert results["y"].dtype == dtypes[0]
    for name in ("weight", "bias", "lora_A.0", "lora_B.0"):
        assert results[name].count_nonzero() == 0
        assert results[name].numel() > 0
    after = make_call((9,), 8, 6, 4, dtypes)
    check(after, run(after), lent=kernel == "torch")


# ---- layouts, VS4 ----------------------------------------------------------------------------------------------------


def sliced(t: Tensor) -> Tensor:
    """A part of something larger in every dimension, not at its start."""
    big = torch.full([n + 3 for n in t.shape], 7.0, dtype=t.dtype)
    view = big[tuple(slice(2, 2 + n) for n in t.shape)]
    view.copy_(t)
    return view


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions exchanged in memory."""
    return t.mT.contiguous().mT if t.dim() > 1 else t


def every_second(t: Tensor) -> Tensor:
    big = torch.full((*t.shape[:-1], 2 * t.shape[-1]), 7.0, dtype=t.dtype)
    view = big[..., ::2]
    view.copy_(t)
    return view


def turned(t: Tensor) -> Tensor:
    """The first dimension innermost."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0)


def misaligned(t: Tensor) -> Tensor:
    """Dense, but one element behind the allocation's start: not on a vector boundary."""
    storage = torch.full((t.numel() + 1,), 7.0, dtype=t.dtype)
    view = storage[1:].view(t.shape)
    view.copy_(t)
    return view


LAYOUTS = [sliced, transposed, every_second, turned, misaligned]
OPERANDS = ["x", "weight", "bias", "lora_a", "lora_b", "grad"]


def with_layout(call: Call, operands: list[str], layout: Callable[[Tensor], Tensor]) -> Call:
    def change(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        return [layout(t) for t in value] if isinstance(value, list) else layout(value)

    return dataclasses.replace(call, **{name: change(getattr(call, name)) for name in operands})


@pytest.mark.parametrize("operand", [*OPERANDS, "all"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_vs4_layouts(kernel: str, layout: Callable[[Tensor], Tensor], operand: str) -> None:
    """VS4: as the contiguous operands give it, and what lies around the view is untouched."""
    operands = OPERANDS if operand == "all" else [operand]
    for dtypes, lead in (((F32, F32), (2, 27)), ((BF16, F32), (2, 27)), ((F64, F64), (53,))):
        if not serves(kernel, dtypes[0]):
            continue
        plain = make_call(lead, 33, 20, 5, dtypes)
        call = with_layout(plain, operands, layout)
        bases = [
            t._base if t._base is not None else t
            for t in (call.x, call.weight, call.bias, *call.lora_a, *call.lora_b, call.grad)
        ]
        before = [t.clone() for t in bases]
        results = run(call)
        check(plain, results, lent=kernel == "torch")
        assert all(torch.equal(a, b) for a, b in zip(bases, before, strict=True))


def test_vs4_expanded_operands(kernel: str) -> None:
    """VS4: strides of zero, as expand() and the gradient of sum() have them."""
    plain = make_call((52,), 16, 12, 3)
    plain.x, plain.grad = plain.x[:1].repeat(52, 1), torch.full((52, 12), 0.5)
    plain.bias = torch.full((12,), 0.25)
    call = dataclasses.replace(
        plain,
        x=plain.x[:1].expand(52, 16),
        bias=torch.tensor(0.25).expand(12),
        grad=torch.tensor(0.5).expand(52, 12),
        weight=plain.weight[:1].expand(12, 16),
    )
    plain.weight = plain.weight[:1].repeat(12, 1)
    assert 0 in call.x.stride()
    check(plain, run(call), lent=kernel == "torch")


def test_negative_and_conjugate_views() -> None:
    """torch keeps a lazy sign in such a view; the operator sees the resolved numbers."""
    call = make_call((5,), 8, 6, 2)
    z = torch.complex(torch.zeros(5, 8), -call.x).conj().imag
    assert z.is_neg()
    assert torch.equal(z, call.x)
    y = lora_linear(z, call.weight, call.bias, call.lora_a[0], call.lora_b[0], 1.7)
    assert torch.equal(y, run(call)["y"])


# ---- scale, VN1 VN2 VS2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "right"), [(16, 64.0), (1, 4.0)])
def test_vn1_plain_scale_is_alpha_over_r(kernel: str, alpha: int, right: float) -> None:
    """VN1: ones everywhere, W = 0, I = O = 4, r = 8: each output is (alpha / 8) * 8 * 4."""
    one = torch.ones
    for m in (1, 50):
        y = lora_linear(one(m, 4), torch.zeros(4, 4), None, one(8, 4), one(4, 8), alpha / 8)
        assert torch.equal(y, torch.full((m, 4), right))


@pytest.mark.parametrize("r", [1, 2, 3, 16, 64])
def test_vn2_rank_stabilised_scale(r: int) -> None:
    """VN2, the operator's part: alpha / sqrt(r) is used as given, and is sqrt(r) times the plain scale's result."""
    alpha, call = 16, make_call((9,), 24, 18, r, (F64, F64), bias=False)
    weight = torch.zeros_like(call.weight)

    def y(scaling: float) -> Tensor:
        return lora_linear(call.x, weight, None, call.lora_a[0], call.lora_b[0], scaling)

    call.weight, call.scalings = weight, [alpha / r**0.5]
    check(call, run(call))
    assert torch.allclose(y(alpha / r**0.5), r**0.5 * y(alpha / r), rtol=1e-14, atol=0)
    assert torch.equal(y(alpha / r**0.5), run(call)["y"])


def test_scaling_may_be_a_tensor_and_any_finite_number() -> None:
    call = make_call((6,), 8, 5, 2)
    args = (call.x, call.weight, call.bias, call.lora_a[0], call.lora_b[0])
    assert torch.equal(lora_linear(*args, torch.tensor(1.5)), lora_linear(*args, 1.5))
    call.scalings = [-3.25]
    check(call, run(call))
    base = lora_linear_adapters(*args[:3], [], [], [], [])
    assert torch.equal(lora_linear(*args, 0.0), base)
    assert torch.equal(lora_linear(*args, 2), lora_linear(*args, 2.0))


def test_vs2_a_lora_bias_goes_into_the_bias_scaled() -> None:
    """VS2, the operator's part: alpha 32, r 4, so s = 8; the LoRA bias l = [1, 2, 3] adds [8, 16, 24], with or without
    a bias of the base layer, because the bias itself is not scaled."""
    call = make_call((5,), 4, 3, 4, (F64, F64))
    s, lora_bias = 32 / 4, torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    for bias in (call.bias, None):
        args = (call.lora_a[0], call.lora_b[0], s)
        without = lora_linear(call.x, call.weight, bias, *args)
        total = s * lora_bias if bias is None else bias + s * lora_bias
        added = lora_linear(call.x, call.weight, total, *args) - without
        assert torch.allclose(added, torch.tensor([8.0, 16.0, 24.0], dtype=F64).expand(5, 3), rtol=1e-13)


# ---- gradients on request, VT3 VT9 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [F32, BF16, F64], ids=name_of)
def test_gradients_only_where_required(layer: torch.dtype) -> None:
    """All 31 choices of operands: wanted gradients are the very same numbers, the others stay None."""
    call = make_call((50,), 24, 20, 4, (layer, layer))
    whole = run(call)
    names = ["x", "weight", "bias", "lora_A.0", "lora_B.0"]
    for wanted in itertools.product([False, True], repeat=5):
        operands = [
            t.detach().requires_grad_(w)
            for t, w in zip(
                (call.x, call.weight, call.bias, call.lora_a[0], call.lora_b[0]), wanted, strict=True
            )
        ]
        y = lora_linear(*operands, call.scalings[0])
        assert y.requires_grad == any(wanted)
        assert torch.equal(y, whole["y"])
        if any(wanted):
            y.backward(call.grad)
        for name, t, w in zip(names, operands, wanted, strict=True):
            assert (t.grad is not None) == w
            if w:
                assert torch.equal(t.grad, whole[name]), name


def test_b_of_zero_gives_the_base_layer(kernel: str) -> None:
    """A fresh adapter: y is the base layer's, dA is zero, dB is not."""
    call = make_call((50,), 24, 20, 4)
    call.lora_b = [torch.zeros_like(call.lora_b[0])]
    results = run(call)
    check(call, results)
    assert torch.equal(results["y"], lora_linear_adapters(call.x, call.weight, call.bias, [], [], [], []))
    assert results["lora_A.0"].count_nonzero() == 0
    assert results["lora_B.0"].count_nonzero() == results["lora_B.0"].numel()


@pytest.mark.parametrize("how", ["function", "operator"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_vt3_backward_leaves_the_saved_tensors_alone(how: str, dropout: float) -> None:
    """VT3: two backward passes accumulate exactly twice the gradient, x is unchanged bit for bit, and another branch
    that uses x sees it as it was."""
    for layer in (F32, BF16):
        call = make_call((50,), 24, 20, 4, (layer, layer), dropouts=[dropout])
        x, weight, bias, (a,), (b,) = call.leaves()
        leaves = (x, weight, bias, a, b)
        before = [t.detach().clone() for t in leaves]
        if how == "function":
            y = lora_linear(*leaves, 1.7, input_dropout=dropout)
        else:
            op = OPS.lora_linear
            y = op(x, weight, bias, [a], [b], [1.7], [dropout], torch.tensor([1, 2]))[0]
        branch = x.square()
        y.backward(call.grad, retain_graph=True)
        once = [t.grad.clone() for t in leaves]
        y.backward(call.grad, retain_graph=True)
        for t, g in zip(leaves, once, strict=True):
            assert torch.equal(t.grad, 2 * g)
        for t, old in zip(leaves, before, strict=True):
            assert torch.equal(t.detach(), old)
        x.grad = None
        branch.sum().backward()
        assert torch.equal(x.grad, 2 * before[0])


@pytest.mark.parametrize("split", [(1, 3), (2, 2), (4,), (50, 14)], ids=str)
def test_vt9_micro_batches_add_up(split: tuple[int, ...]) -> None:
    """VT9: the gradients of micro-batches add up to those of the batch, in whatever parts it is split."""
    m = sum(split)
    whole = make_call((m,), 24, 20, 4)
    x, weight, bias, lora_a, lora_b = whole.leaves()
    start, outputs = 0, []
    for part in split:
        rows = slice(start, start + part)
        y = lora_linear_adapters(x[rows], weight, bias, lora_a, lora_b, whole.scalings, [0.0])
        y.backward(whole.grad[rows])
        outputs.append(y.detach())
        start += part
    results = {"y": torch.cat(outputs), "x": x.grad, "weight": weight.grad, "bias": bias.grad}
    check(whole, results | {"lora_A.0": lora_a[0].grad, "lora_B.0": lora_b[0].grad})


def test_vt9_a_shared_adapter_gets_both_gradients() -> None:
    """VT9: one A and one B in two layers, and twice in one call."""
    first, second = make_call((6,), 8, 5, 2, (F64, F64)), make_call((7,), 8, 5, 2, (F64, F64), seed=1)
    a, b = first.lora_a[0].clone().requires_grad_(), first.lora_b[0].clone().requires_grad_()
    second.lora_a, second.lora_b = [a.detach()], [b.detach()]
    for call in (first, second):
        lora_linear(call.x, call.weight, call.bias, a, b, call.scalings[0]).backward(call.grad)
    alone = [run(first), run(second)]
    assert torch.equal(a.grad, alone[0]["lora_A.0"] + alone[1]["lora_A.0"])
    assert torch.equal(b.grad, alone[0]["lora_B.0"] + alone[1]["lora_B.0"])

    a.grad = b.grad = None
    y = lora_linear_adapters(first.x, first.weight, first.bias, (a, a), (b, b), [1.7, 1.7], [0.0, 0.0])
    y.backward(first.grad)
    assert torch.allclose(a.grad, 2 * alone[0]["lora_A.0"], rtol=1e-14, atol=0)
    assert torch.allclose(b.grad, 2 * alone[0]["lora_B.0"], rtol=1e-14, atol=0)


def test_vt9_padded_rows_contribute_nothing(kernel: str) -> None:
    """VT9: rows of zeros in x (and so in what reaches A), or in G, change no gradient of a weight."""
    call = make_call((50,), 24, 20, 4)
    small = run(call)
    pad_x, pad_g = torch.zeros(13, 24), torch.zeros(13, 20)
    x_padded = dataclasses.replace(
        call, x=torch.cat([call.x, pad_x]), grad=torch.cat([call.grad, torch.ones(13, 20)])
    )
    g_padded = dataclasses.replace(
        call, x=torch.cat([call.x, torch.ones(13, 24)]), grad=torch.cat([call.grad, pad_g])
    )
    for padded in (x_padded, g_padded):
        results = run(padded)
        check(padded, results)
        names = ("weight", "lora_A.0", "lora_B.0") + (("bias",) if padded is g_padded else ())
        for name in names:
            wanted, limit = expected_of(call, name)
            assert ((results[name].double() - wanted).abs() <= limit).all(), name
    assert run(g_padded)["x"][50:].count_nonzero() == 0
    assert torch.equal(small["y"], run(call)["y"])


def expected_of(call: Call, name: str) -> tuple[Tensor, Tensor]:
    from reference.calls import expected

    return expected(call, lent=False)[name]


def test_the_formula_of_the_tests_agrees_with_autograd() -> None:
    """The reference itself: its hand-written gradients against torch's, with a mask, in float64."""
    call = make_call((7,), 9, 6, [2, 3], (F64, F64), dropouts=[0.4, 0.0])
    x, weight, bias, lora_a, lora_b = call.leaves()
    factors = [ad.factor for ad in call.adapters(lambda t: t)]
    adapters = [
        formula.Adapter(a, b, s, f) for a, b, s, f in zip(lora_a, lora_b, call.scalings, factors, strict=True)
    ]
    y = formula.forward(x, weight, bias, adapters)
    y.backward(call.grad)
    assert torch.allclose(y, formula.peft_composition(x, weight, bias, adapters), rtol=1e-13)
    by_hand = formula.backward(call.grad, x.detach(), weight.detach(), call.adapters(formula.double))
    by_torch = {"x": x, "weight": weight, "bias": bias}
    by_torch |= {f"lora_A.{i}": a for i, a in enumerate(lora_a)}
    by_torch |= {f"lora_B.{i}": b for i, b in enumerate(lora_b)}
    assert by_hand.keys() == by_torch.keys()
    for name, t in by_torch.items():
        assert torch.allclose(by_hand[name], t.grad, rtol=1e-12, atol=1e-13), name

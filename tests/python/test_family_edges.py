"""Faults of the family that a user would have met: one test each, so that they stay away."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_models import counted, distance
from torch import nn

import loraaccel as la

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_dora_in_bfloat16_keeps_float32_gradients(bias: bool, dropout: float) -> None:
    """PEFT keeps adapters in float32 beside a bfloat16 model, and computes their gradients in it."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, target_modules=["0"], use_dora=True, init_lora_weights=False, lora_dropout=dropout
    )
    model = get_peft_model(nn.Sequential(nn.Linear(128, 96, bias=bias)).bfloat16(), config)
    x, grad = torch.randn(64, 128).bfloat16(), torch.randn(64, 96).bfloat16()

    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        y = model(x)
        y.backward(grad.to(y.dtype))
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"y": y.detach()}

    exact = gradients(copy.deepcopy(model).double(), x.double())
    own = gradients(model, x)
    la.patch(model)
    with counted() as calls:
        found = gradients(model, x)
    assert calls == {"dora_linear": 1}
    for name, value in found.items():
        theirs = distance(own[name], exact[name])
        # (With dropout both the mask's own rounding and the sum of two products in bfloat16 are in y.)
        floor = 1e-6 if "lora_A" in name or "lora_B" in name else 4e-3
        assert value.dtype == own[name].dtype
        assert distance(value, exact[name]) <= 1.5 * theirs + floor, name


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_loha_and_lokr_refuse_the_same_in_every_form(rows: int) -> None:
    """Which form is the cheaper one depends on the rows, what is refused does not."""
    x, w = torch.randn(rows, 8), torch.randn(6, 8)
    loha = [torch.randn(6, 2), torch.randn(2, 8), torch.randn(6, 2), torch.randn(2, 8)]
    lokr = [torch.randn(3, 2), torch.randn(2, 4)]
    for name, call, factors in (
        ("loha_linear", la.loha_linear, loha), ("lokr_linear", la.lokr_linear, lokr),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"{name}: scaling is nan, expected a finite number"):
            call(x, w, None, *factors, float("nan"))
        with pytest.raises(
            RuntimeError, match=f"{name}: w1.* is float64 and x float32, expected both float64 or neither"
        ):
            call(x, w, None, *(t.double() for t in factors))
    image, kernel = torch.randn(max(rows // 50, 1), 8, 9, 9), torch.randn(6, 8, 3, 3)
    with pytest.raises(RuntimeError, match="loha_conv2d: scaling is inf"):
        la.loha_conv2d(
            image, kernel, None, loha[0], torch.randn(2, 72), loha[2], torch.randn(2, 72), float("inf")
        )


def test_verify_knows_that_autocast_rounds() -> None:
    model = get_peft_model(
        nn.Sequential(nn.Embedding(50, 32)), LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    )
    la.patch(model, verify=2)
    with torch.autocast("cpu", dtype=BF16), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.arange(50))
    assert la.patch(model).num_fused == 1


@pytest.mark.parametrize("wide", ["base", "adapters"])
def test_float64_beside_another_type_is_pefts(wide: str) -> None:
    for make, x in (
        (lambda: nn.Conv2d(4, 8, 3), torch.randn(1, 4, 12, 12)),
        (lambda: nn.Embedding(9, 8), torch.tensor([1, 2])),
        (lambda: nn.Linear(12, 8), torch.randn(3, 12)),
    ):
        torch.manual_seed(1)
        model = get_peft_model(
            nn.Sequential(make()), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        )
        layer = model.base_model.model[0]
        (layer.base_layer if wide == "base" else layer).double()
        if wide == "adapters":
            layer.base_layer.float()
        if x.is_floating_point() and wide == "base":
            x = x.double()
        expected = model(x)
        la.patch(model)
        with counted() as calls:
            y = model(x)
        assert calls == {"dtype": 1}
        assert torch.equal(y, expected)
        assert y.dtype == expected.dtype


def test_the_norm_of_a_small_difference_of_two_adapters() -> None:
    """Its Gram matrices cancel: in float32 three digits would be left of a difference of a thousandth."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 200), torch.randn(150, 8)
    near = b * (1 + 1e-3 * torch.randn(150, 1))
    both = torch.cat([a, a]), torch.cat([b, -near], 1)
    exact = torch.linalg.norm(both[1].double() @ both[0].double())
    assert distance(la.lora_norm(*both), exact) < 1e-5


def test_a_limit_without_end_changes_nothing() -> None:
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    before = a.clone(), b.clone()
    found = la.limit_norms([a], [b], [1.0], float("inf"))
    assert found.scaled == 0
    assert found.mean == pytest.approx(float(la.lora_norm(a, b)))
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_a_base_of_other_rows_is_refused() -> None:
    x, a, b = torch.randn(2, 3, 5), torch.randn(2, 5), torch.randn(4, 2)
    for shape in ((3, 2, 4), (6, 4), (1, 6, 4)):
        with pytest.raises(
            RuntimeError, match=r"lora_delta: base has shape .*, expected \[2, 3, 4\] to go with x"
        ):
            la.lora_delta(x, torch.zeros(shape), a, b)


@pytest.mark.parametrize("through_peft", [False, True])
def test_a_convolution_keeps_only_what_it_reads(through_peft: bool) -> None:
    """With A frozen (LoRA-FA) nothing reads x in the backward pass: it may be changed in place."""
    h = torch.randn(2, 8, 16, 16)
    if through_peft:
        model = get_peft_model(
            nn.Sequential(nn.Conv2d(8, 8, 3)), LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        )
        layer = model.base_model.model[0]
        layer.lora_A.requires_grad_(False)
        la.patch(model)
        y, b = model(h), layer.lora_B["default"].weight
    else:
        a, b = torch.randn(4, 8, 3, 3), torch.randn(8, 4, 1, 1, requires_grad=True)
        y = la.lora_conv2d(h, torch.randn(8, 8, 3, 3), None, a, b, 1.0, 1, 1)
    h += 1
    y.sum().backward()
    assert b.grad is not None
    assert bool(b.grad.any())


@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_lokr_gradients_are_no_worse_than_those_of_the_matrix(dtype: torch.dtype, low_rank: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(200, 64).to(dtype), (torch.randn(64, 64) / 8).to(dtype)
    factors = [torch.randn(8, 8), torch.randn(8, 4) * 0.2, torch.randn(4, 8) * 0.5]
    grad = torch.randn(200, 64).to(dtype)

    def gradients(f, wide: bool) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        leaves = [(t.double() if wide else t).clone().requires_grad_() for t in factors]
        y = f(*((x.double(), w.double()) if wide else (x, w)), *leaves)
        y.backward(grad.to(y.dtype))
        return [t.grad for t in leaves]

    def made(
        x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, c: torch.Tensor, d: torch.Tensor
    ) -> torch.Tensor:
        return nn.functional.linear(x, w) + nn.functional.linear(x, torch.kron(a, c @ d).to(x.dtype))

    def ours(
        x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, c: torch.Tensor, d: torch.Tensor
    ) -> torch.Tensor:
        return la.lokr_linear(x, w, None, a, (c, d) if low_rank else c @ d)

    exact, theirs, found = gradients(made, True), gradients(made, False), gradients(ours, False)
    for e, t, f in zip(exact, theirs, found, strict=True):
        assert distance(f, e) <= 1.1 * distance(t, e)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("size", [(256, 256), (768, 96), (33, 17)])
def test_dora_beside_16_bit_is_rounded_no_more_than_pefts(size: tuple[int, int], dtype: torch.dtype) -> None:
    errors = []
    for seed in range(5):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, target_modules=["0"], use_dora=True, init_lora_weights=False)
        model = get_peft_model(nn.Sequential(nn.Linear(*size)).to(dtype), config)
        x = torch.randn(64, size[0]).to(dtype)
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(x.double())
            own = model(x)
            la.patch(model)
            errors.append((distance(model(x), exact), distance(own, exact)))
    ours, theirs = (sum(e[i] for e in errors) for i in (0, 1))
    assert ours <= 1.05 * theirs


def test_samples_of_no_adapter() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="there are no adapters"):
        la.lora_linear_batched(x, w, None, [], [], [], [-5, -1])
    assert la.lora_linear_batched(x, w, None, [], [], [], [-1, -1]).shape == (2, 4)


def test_with_the_switch_off_the_same_is_refused() -> None:
    x, w, a, b = torch.randn(5, 8), torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2)
    with la.disabled():
        for call in (
            lambda: la.lora_linear_batched(x, w, None, [a], [b], [1.0], [7] * 5),
            lambda: la.lora_linear(x, w, None, a, b, rank_dropout=2.0),
            lambda: la.lora_linear(x, w, None, a, torch.randn(1, 2)),
            lambda: la.lora_delta(x, torch.randn(1, 6), a, b),
            lambda: la.lora_linear(x, w, None, a, b, float("inf")),
        ):
            with pytest.raises(RuntimeError, match="expected"):
                call()


def test_row_norms_in_compiled_code() -> None:
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    compiled = torch.compile(la.lora_row_norms, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(a, b), la.lora_row_norms(a, b))


def test_nothing_in_the_place_of_an_operand() -> None:
    image, w, a, b = (
        torch.randn(1, 4, 9, 9),
        torch.randn(6, 4, 3, 3),
        torch.randn(2, 4, 3, 3),
        torch.randn(6, 2),
    )
    x, matrix, down, up, m = (
        torch.randn(3, 8),
        torch.randn(6, 8),
        torch.randn(2, 8),
        torch.randn(6, 2),
        torch.ones(6),
    )
    for call, name in (
        (lambda: la.lora_conv2d(None, w, None, a, b), "x"),
        (lambda: la.lora_conv2d(image, w, None, None, b), "lora_A"),
        (lambda: la.dora_linear(x, matrix, None, down, up, None), "magnitude"),
        (lambda: la.loha_linear(x, matrix, None, None, down, up, down), "w1_a"),
    ):
        with pytest.raises(TypeError, match=f"{name} is a NoneType, expected a torch.Tensor"):
            call()
    with pytest.raises(RuntimeError, match=r"weight_norm has shape \[1\], expected \[6\]"):
        la.dora_linear(x, matrix, None, down, up, m, weight_norm=torch.ones(1))
    one = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"combined_norms has shape \[1\], expected \[6\]"):
        la.ggpo_linear(
            x, matrix, None, down, up, 1.0, sigma=0.1, beta=0.1, combined_norms=one, grad_norms=one
        )


def test_kinds_and_threads_that_are_none() -> None:
    with pytest.raises(ValueError, match="kinds is 'lora_linear', expected a collection"):
        la.patch(nn.Linear(2, 2), kinds="lora_linear")
    for value in ("abc", "-1", "2.5"):
        done = subprocess.run(
            [sys.executable, "-c", "import loraaccel; loraaccel.lora_linear"], capture_output=True, text=True,
            check=False, env={**os.environ, "LORAACCEL_NUM_THREADS": value},
        )  # fmt: skip
        assert done.returncode == 1
        assert f"LORAACCEL_NUM_THREADS is {value!r}, expected a number of threads" in done.stderr

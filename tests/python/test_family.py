"""The operators beside lora_linear: values and gradients in every type, torch's own checks, compiled, errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import loraaccel as la
from reference.tolerance import unit_roundoff

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, tuple[int, ...]]]


def linear(x: Tensor, w: Tensor, b: Tensor | None, delta: Tensor) -> Tensor:
    return F.linear(x, w + delta, b)


def dora(x: Tensor, w: Tensor, b: Tensor | None, A: Tensor, B: Tensor, m: Tensor) -> Tensor:
    norm = (w + 1.7 * B @ A).norm(dim=1).detach()
    y = (m / norm) * (F.linear(x, w) + 1.7 * F.linear(F.linear(x, A), B))
    return y if b is None else y + b


def conv(x: Tensor, w: Tensor, b: Tensor | None, A: Tensor, B: Tensor, *rest: Any) -> Tensor:
    return F.conv2d(x, w, b, *rest) + 1.7 * F.conv2d(F.conv2d(x, A, None, *rest), B)


def grouped(x: Tensor, w: Tensor, b: Tensor | None, A: Tensor, B: Tensor, g: int, *rest: Any) -> Tensor:
    h = F.conv2d(x, A, None, *rest, groups=x.shape[1] // A.shape[1])
    return F.conv2d(x, w, b, *rest, groups=g) + 1.7 * F.conv2d(h, B, groups=h.shape[1] // B.shape[1])


IN, OUT = 24, 12
X = {"x": (2, 5, IN), "w": (OUT, IN), "b": (OUT,)}
IMAGE = {"x": (2, 6, 9, 8), "w": (8, 6, 3, 3), "b": (8,)}
ids = torch.tensor([[3, 1, 4], [1, 5, 9]])

# name: ours, the formula, shapes of the operands in the order of both
CASES: dict[str, Case] = {
    "lora_delta": (
        lambda x, base, A, B: la.lora_delta(x, base, A, B, 1.7),
        lambda x, base, A, B: base + 1.7 * F.linear(F.linear(x, A), B),
        {"x": (2, 5, IN), "base": (2, 5, OUT), "A": (3, IN), "B": (OUT, 3)},
    ),
    "lora_linear_batched": (
        lambda x, w, b, A, B, C, D: la.lora_linear_batched(x, w, b, [A, C], [B, D], [1.7, -0.6], [1, -1, 0, 1]),
        lambda x, w, b, A, B, C, D: F.linear(x, w, b)
        + torch.stack([-0.6 * x[0] @ C.T @ D.T, 0 * x[1] @ C.T @ D.T, 1.7 * x[2] @ A.T @ B.T, -0.6 * x[3] @ C.T @ D.T]),
        {"x": (4, 5, IN), "w": (OUT, IN), "b": (OUT,), "A": (3, IN), "B": (OUT, 3), "C": (2, IN), "D": (OUT, 2)},
    ),
    "lora_linear_split": (
        lambda x, w, b, A, B, C, D: la.lora_linear_split(x, w, b, [A, C], [B, D], 1.7, [4, 8]),
        lambda x, w, b, A, B, C, D: F.linear(x, w, b) + 1.7 * torch.cat([x @ A.T @ B.T, x @ C.T @ D.T], -1),
        X | {"A": (3, IN), "B": (4, 3), "C": (2, IN), "D": (8, 2)},
    ),
    "dora_linear": (
        lambda x, w, b, A, B, m: la.dora_linear(x, w, b, A, B, m, 1.7),
        dora,
        X | {"A": (3, IN), "B": (OUT, 3), "m": (OUT,)},
    ),
    "dora_linear without bias": (
        lambda x, w, A, B, m: la.dora_linear(x, w, None, A, B, m, 1.7),
        lambda x, w, A, B, m: dora(x, w, None, A, B, m),
        {"x": (7, IN), "w": (OUT, IN), "A": (3, IN), "B": (OUT, 3), "m": (OUT,)},
    ),
    "loha_linear factored": (
        lambda x, w, b, *f: la.loha_linear(x, w, b, *f, 1.7),
        lambda x, w, b, p, q, r, s: linear(x, w, b, 1.7 * (p @ q) * (r @ s)),
        X | {"p": (OUT, 2), "q": (2, IN), "r": (OUT, 3), "s": (3, IN)},
    ),
    "loha_linear made": (
        lambda x, w, b, *f: la.loha_linear(x, w, b, *f, 1.7),
        lambda x, w, b, p, q, r, s: linear(x, w, b, 1.7 * (p @ q) * (r @ s)),
        X | {"p": (OUT, 9), "q": (9, IN), "r": (OUT, 9), "s": (9, IN)},
    ),
    "lokr_linear, w2 first": (
        lambda x, w, b, p, q: la.lokr_linear(x, w, b, p, q, 1.7),
        lambda x, w, b, p, q: linear(x, w, b, 1.7 * torch.kron(p, q)),
        X | {"p": (6, 4), "q": (2, 6)},
    ),
    "lokr_linear, w1 first": (
        lambda x, w, b, p, q: la.lokr_linear(x, w, b, p, q, 1.7),
        lambda x, w, b, p, q: linear(x, w, b, 1.7 * torch.kron(p, q)),
        X | {"p": (2, 4), "q": (6, 6)},
    ),
    "lokr_linear of low rank": (
        lambda x, w, b, p, q, r, s: la.lokr_linear(x, w, b, (p, q), (r, s), 1.7),
        lambda x, w, b, p, q, r, s: linear(x, w, b, 1.7 * torch.kron(p @ q, r @ s)),
        X | {"p": (3, 2), "q": (2, 4), "r": (4, 1), "s": (1, 6)},
    ),
    "lora_conv2d": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7, 2, (1, 0)),
        lambda x, w, b, A, B: conv(x, w, b, A, B, 2, (1, 0)),
        IMAGE | {"A": (3, 6, 3, 3), "B": (8, 3, 1, 1)},
    ),
    "lora_conv2d dilated": (
        lambda x, w, A, B: la.lora_conv2d(x, w, None, A, B, 1.7, 1, 2, 2),
        lambda x, w, A, B: conv(x, w, None, A, B, 1, 2, 2),
        {"x": (2, 6, 9, 8), "w": (8, 6, 3, 3), "A": (3, 6, 3, 3), "B": (8, 3, 1, 1)},
    ),
    "lora_conv2d 1x1": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7),
        conv,
        {"x": (2, 6, 9, 8), "w": (8, 6, 1, 1), "b": (8,), "A": (3, 6, 1, 1), "B": (8, 3, 1, 1)},
    ),
    "lora_conv2d Tucker": (
        lambda x, w, b, A, M, B: la.lora_conv2d(x, w, b, A, B, 1.7, 1, 1, lora_mid=M),
        lambda x, w, b, A, M, B: F.conv2d(x, w, b, 1, 1)
        + 1.7 * F.conv2d(F.conv2d(F.conv2d(x, A), M, None, 1, 1), B),
        IMAGE | {"A": (2, 6, 1, 1), "M": (3, 2, 3, 3), "B": (8, 3, 1, 1)},
    ),
    "VS1 lora_conv2d grouped": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7, 1, 1, 1, 2),
        lambda x, w, b, A, B: grouped(x, w, b, A, B, 2, 1, 1),
        {"x": (2, 6, 9, 8), "w": (8, 3, 3, 3), "b": (8,), "A": (4, 3, 3, 3), "B": (8, 2, 1, 1)},
    ),
    "VS1 lora_conv2d 96 to 192": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7, 2, 1, 1, 2),
        lambda x, w, b, A, B: grouped(x, w, b, A, B, 2, 2, 1),
        {"x": (1, 96, 6, 6), "w": (192, 48, 3, 3), "b": (192,), "A": (2, 48, 3, 3), "B": (192, 1, 1, 1)},
    ),
    "VS1 lora_conv2d depthwise": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7, 1, 1, 1, 8),
        lambda x, w, b, A, B: grouped(x, w, b, A, B, 8, 1, 1),
        {"x": (2, 8, 5, 5), "w": (8, 1, 3, 3), "b": (8,), "A": (8, 1, 3, 3), "B": (8, 1, 1, 1)},
    ),
    "PEFT's grouped lora_conv2d": (
        lambda x, w, b, A, B: la.lora_conv2d(x, w, b, A, B, 1.7, 1, 1, 1, 2),
        lambda x, w, b, A, B: grouped(x, w, b, A, B, 2, 1, 1),
        {"x": (2, 6, 9, 8), "w": (8, 3, 3, 3), "b": (8,), "A": (4, 6, 3, 3), "B": (8, 2, 1, 1)},
    ),
    "loha_conv2d": (
        lambda x, w, b, *f: la.loha_conv2d(x, w, b, *f, 1.7, 1, 1),
        lambda x, w, b, p, q, r, s: F.conv2d(x, w + 1.7 * ((p @ q) * (r @ s)).view_as(w), b, 1, 1),
        IMAGE | {"p": (8, 2), "q": (2, 54), "r": (8, 1), "s": (1, 54)},
    ),
    "lokr_conv2d": (
        lambda x, w, b, p, q: la.lokr_conv2d(x, w, b, p, q, 1.7, 1, 1),
        lambda x, w, b, p, q: F.conv2d(x, w + 1.7 * torch.kron(p[:, :, None, None], q), b, 1, 1),
        IMAGE | {"p": (2, 3), "q": (4, 2, 3, 3)},
    ),
    "lokr_conv2d of low rank": (
        lambda x, w, b, p, q, r, s: la.lokr_conv2d(x, w, b, (p, q), (r, s), 1.7, 1, 1),
        lambda x, w, b, p, q, r, s: F.conv2d(
            x, w + 1.7 * torch.kron((p @ q)[:, :, None, None], (r @ s).view(4, 2, 3, 3)), b, 1, 1
        ),
        IMAGE | {"p": (2, 1), "q": (1, 3), "r": (4, 2), "s": (2, 18)},
    ),
    "lora_embedding": (
        lambda w, A, B: la.lora_embedding(ids, w, A, B, 1.7),
        lambda w, A, B: F.embedding(ids, w) + 1.7 * F.embedding(ids, A.T) @ B.T,
        {"w": (10, OUT), "A": (3, 10), "B": (OUT, 3)},
    ),
    "lora_embedding padded": (
        lambda w, A, B: la.lora_embedding(ids, w, A, B, 1.7, padding_idx=1),
        lambda w, A, B: F.embedding(ids, w, 1) + 1.7 * F.embedding(ids, A.T, 1) @ B.T,
        {"w": (10, OUT), "A": (3, 10), "B": (OUT, 3)},
    ),
}  # fmt: skip


def operands(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, generator=generator, dtype=F64).to(dtype).requires_grad_() for s in shapes.values()
    ]


def gradients(f: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    y = f(*leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=F64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """At most as far from float64 as the formula in plain torch, up to a rounding."""
    ours, formula, shapes = CASES[name]
    leaves = operands(shapes, dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    got, own, ref = gradients(ours, leaves), gradients(formula, leaves), gradients(formula, exact)
    for key, g, o, r in zip(("y", *shapes), got, own, ref, strict=True):
        assert (g.shape, g.dtype) == (o.shape, o.dtype), key
        allowed = 1e-13 if dtype == F64 else 2 * distance(o, r) + 4 * unit_roundoff(dtype)
        assert distance(g, r) <= allowed, f"{key}: {distance(g, r):.2e}, plain torch {distance(o, r):.2e}"


@pytest.mark.parametrize(
    "name", [n for n in CASES if "w" in CASES[n][2] and "conv" not in n and "embedding" not in n]
)
def test_float32_adapters_beside_bfloat16(name: str) -> None:
    """PEFT's default. Against float64 on the operands as stored."""
    ours, formula, shapes = CASES[name]
    leaves = operands(shapes, F32)
    mixed = [
        t.detach().to(BF16 if key in "xwb" else F32).requires_grad_()
        for key, t in zip(shapes, leaves, strict=True)
    ]
    exact = [t.detach().double().requires_grad_() for t in mixed]
    got, ref = gradients(ours, mixed), gradients(formula, exact)
    for key, g, r in zip(("y", *shapes), got, ref, strict=True):
        assert g.dtype == (F32 if key not in ("y", "x", "w", "b") else BF16), key
        assert distance(g, r) <= 8 * unit_roundoff(BF16), key


@pytest.mark.parametrize("name", [n for n in CASES if "padded" not in n])  # (its padding row has no gradient)
def test_gradcheck(name: str) -> None:
    ours, _, shapes = CASES[name]
    leaves = operands(shapes, F64)
    small = [
        t.detach()[..., :7, :6].requires_grad_() if key == "x" and t.dim() == 4 else t
        for key, t in zip(shapes, leaves, strict=True)
    ]
    if "dora" in name:  # the norm is a constant to autograd, not to finite differences
        x, w, *rest = small
        rest[-3], rest[-2] = rest[-3].detach(), rest[-2].detach()
        small = [x, w.detach(), *rest]
    assert torch.autograd.gradcheck(ours, small, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.registered
def test_compiled(name: str) -> None:
    """One graph, no break; the same values."""
    ours, _, shapes = CASES[name]
    torch._dynamo.reset()
    leaves = operands(shapes, F32)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, leaves), gradients(ours, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # (a convolution is not one product there)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_switched_off_and_without_gradients(name: str) -> None:
    ours, formula, shapes = CASES[name]
    leaves = operands(shapes, F32)
    with la.disabled():
        for a, b in zip(gradients(ours, leaves), gradients(formula, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        y = ours(*leaves)
    assert not y.requires_grad
    same = 1e-4 if "loha" in name else 0.0  # (the form may be another without gradients)
    torch.testing.assert_close(y, ours(*leaves).detach(), rtol=same, atol=same)


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_not_changed(name: str) -> None:
    ours, _, shapes = CASES[name]
    leaves = operands(shapes, F32)
    before = [t.detach().clone() for t in leaves]
    gradients(ours, leaves)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


ROWS_IN_ONE = [n for n in CASES if "x" in CASES[n][2] and n not in ("lora_linear_batched", "lora_delta")]


@pytest.mark.parametrize("name", ROWS_IN_ONE)
def test_vs3_no_rows(name: str) -> None:
    ours, formula, shapes = CASES[name]
    empty = shapes | {"x": (0, *shapes["x"][1:])}
    leaves = operands(empty, F32)
    got, own = gradients(ours, leaves), gradients(formula, leaves)
    for key, g, o in zip(("y", *shapes), got, own, strict=True):
        assert (g.shape, g.dtype) == (o.shape, o.dtype), key
        assert not g.any(), key


def test_vs3_no_rows_in_several_operands() -> None:
    x, w, a, b = (torch.randn(s).requires_grad_() for s in ((0, 5, 8), (6, 8), (2, 8), (6, 2)))
    for y in (
        la.lora_delta(x, torch.ones(0, 5, 6), a, b),
        la.lora_linear_batched(x, w, None, [a], [b], [1.0], []),
    ):
        assert y.shape == (0, 5, 6)
        grads = torch.autograd.grad(y.sum(), [x, a, b])
        assert [g.shape for g in grads] == [x.shape, a.shape, b.shape]
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("name", [n for n in CASES if "x" in CASES[n][2]])
def test_vs4_strided_inputs(name: str) -> None:
    """Operands with gaps in every dimension: the result of dense ones."""
    ours, _, shapes = CASES[name]
    leaves = operands(shapes, F32)
    strided = []
    for t in leaves:
        wide = torch.full((t.shape[0], *(2 * s for s in t.shape[1:])), torch.nan)
        view = wide[(slice(None), *(slice(None, None, 2) for _ in t.shape[1:]))]
        view.copy_(t.detach())
        strided.append(view.requires_grad_())
    for a, b in zip(gradients(ours, strided), gradients(ours, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


# ---- torch's checks of the registered operators ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dora_linear", "lora_conv2d", "lora_delta", "lora_linear_split"])
def test_gradient_of_a_gradient_is_refused(name: str) -> None:
    ours, _, shapes = CASES[name]
    leaves = operands(shapes, F64)
    (grad,) = torch.autograd.grad(ours(*leaves).square().sum(), leaves[-1], create_graph=True)
    with pytest.raises(RuntimeError, match="loraaccel"):
        grad.sum().backward()


# ---- what a user can get wrong ---------------------------------------------------------------------------------------

t = torch.ones
FIVE = (t(2, 8), t(6, 8), None, [t(2, 8)], [t(6, 2)], [1.0])
WRONG: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "delta base",
        lambda: la.lora_delta(t(3, 8), t(4, 6), t(2, 8), t(6, 2)),
        RuntimeError,
        r"base .*\[4, 6\].*\[3, 6\]",
    ),
    (
        "delta B",
        lambda: la.lora_delta(t(3, 8), t(3, 6), t(2, 8), t(5, 2)),
        RuntimeError,
        r"lora_B .*\[5, 2\].*\[6, 2\]",
    ),
    (
        "ids value",
        lambda: la.lora_linear_batched(*FIVE, [0, 1]),
        RuntimeError,
        r"sample 1 has adapter 1, expected -1",
    ),
    ("ids below", lambda: la.lora_linear_batched(*FIVE, [-2, 0]), RuntimeError, r"sample 0 has adapter -2"),
    (
        "ids count",
        lambda: la.lora_linear_batched(*FIVE, [0]),
        ValueError,
        r"adapter_ids has shape \[1\], expected \[2\]",
    ),
    (
        "ids type",
        lambda: la.lora_linear_batched(*FIVE, [0.0, 0.0]),
        TypeError,
        r"adapter_ids is torch.float32, expected integers",
    ),
    (
        "ids text",
        lambda: la.lora_linear_batched(*FIVE, "ab"),
        TypeError,
        r"adapter_ids is a str, expected integers",
    ),
    (
        "batched lengths",
        lambda: la.lora_linear_batched(t(2, 8), t(6, 8), None, [t(2, 8)], [], [1.0], [0, 0]),
        ValueError,
        r"1 lora_As, 0 lora_Bs, 1 scalings",
    ),
    (
        "batched without adapters",
        lambda: la.lora_linear_batched(t(2, 8), t(6, 8), None, [], [], [], [0, -1]),
        RuntimeError,
        r"adapter 0.*no adapters",
    ),
    (
        "magnitude",
        lambda: la.dora_linear(t(3, 8), t(6, 8), None, t(2, 8), t(6, 2), t(5)),
        RuntimeError,
        r"magnitude .*\[5\].*\[6\]",
    ),
    (
        "dora dropout",
        lambda: la.dora_linear(t(3, 8), t(6, 8), None, t(2, 8), t(6, 2), t(6), input_dropout=2.0),
        RuntimeError,
        r"input_dropout is 2.0",
    ),
    (
        "conv x",
        lambda: la.lora_conv2d(t(3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 3, 3), t(6, 2, 1, 1)),
        RuntimeError,
        r"x .*\[3, 8, 8\].*\[S, C, H, W\]",
    ),
    (
        "conv weight",
        lambda: la.lora_conv2d(t(1, 4, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 3, 3), t(6, 2, 1, 1)),
        RuntimeError,
        r"weight .*\[6, 3, 3, 3\].*\[N, 4, kh, kw\]",
    ),
    (
        "conv A",
        lambda: la.lora_conv2d(t(1, 3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 1, 1), t(6, 2, 1, 1)),
        RuntimeError,
        r"lora_A .*\[2, 3, 1, 1\].*\[R, 3, 3, 3\]",
    ),
    (
        "conv B",
        lambda: la.lora_conv2d(t(1, 3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 3, 3), t(5, 2, 1, 1)),
        RuntimeError,
        r"lora_B .*\[5, 2, 1, 1\].*\[6, 2, 1, 1\]",
    ),
    (
        "conv groups",
        lambda: la.lora_conv2d(t(1, 3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 3, 3), t(6, 2, 1, 1), groups=2),
        RuntimeError,
        r"groups is 2, expected a divisor of the 3 channels",
    ),
    (
        "VS1 rank and groups",
        lambda: la.lora_conv2d(t(1, 4, 8, 8), t(4, 2, 3, 3), None, t(3, 2, 3, 3), t(4, 1, 1, 1), groups=2),
        RuntimeError,
        r"rank is 3, expected a multiple of the 2 groups",
    ),
    (
        "conv mid",
        lambda: la.lora_conv2d(
            t(1, 3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 1, 1), t(6, 2, 1, 1), lora_mid=t(2, 3, 3, 3)
        ),
        RuntimeError,
        r"lora_mid .*\[2, 3, 3, 3\].*\[R, 2, 3, 3\]",
    ),
    (
        "conv dropout",
        lambda: la.lora_conv2d(
            t(1, 3, 8, 8), t(6, 3, 3, 3), None, t(2, 3, 3, 3), t(6, 2, 1, 1), hidden_dropout=-1
        ),
        RuntimeError,
        r"hidden_dropout is -1",
    ),
    (
        "loha",
        lambda: la.loha_linear(t(3, 8), t(6, 8), None, t(6, 2), t(2, 7), t(6, 2), t(2, 8)),
        RuntimeError,
        r"w1_b .*\[2, 7\].*\[2, 8\]",
    ),
    (
        "loha weight",
        lambda: la.loha_linear(t(3, 8), t(6, 7), None, t(6, 2), t(2, 7), t(6, 2), t(2, 7)),
        RuntimeError,
        r"weight .*\[6, 7\].*\[\*, 8\]",
    ),
    (
        "lokr",
        lambda: la.lokr_linear(t(3, 8), t(6, 8), None, t(2, 2), t(3, 3)),
        RuntimeError,
        r"weight .*\[6, 8\].*\[6, 6\]",
    ),
    (
        "lokr factor",
        lambda: la.lokr_linear(t(3, 8), t(6, 8), None, t(2, 2), (t(3, 2), t(1, 4))),
        RuntimeError,
        r"w2_b .*\[1, 4\].*\[2, \*\]",
    ),
    (
        "lokr type",
        lambda: la.lokr_linear(t(3, 8), t(6, 8), None, t(2, 2), [1.0]),
        TypeError,
        r"w2 is a list, expected a torch.Tensor",
    ),
    (
        "lokr conv",
        lambda: la.lokr_conv2d(t(1, 6, 5, 5), t(8, 6, 3, 3), None, t(2, 2), t(4, 2, 3, 3)),
        RuntimeError,
        r"weight .*\[8, 6, 3, 3\].*\[8, 4, 3, 3\]",
    ),
    (
        "embedding A",
        lambda: la.lora_embedding(torch.tensor([1]), t(9, 6), t(2, 8), t(6, 2)),
        RuntimeError,
        r"lora_A .*\[2, 8\].*\[R, 9\]",
    ),
    (
        "embedding B",
        lambda: la.lora_embedding(torch.tensor([1]), t(9, 6), t(2, 9), t(5, 2)),
        RuntimeError,
        r"lora_B .*\[5, 2\].*\[6, 2\]",
    ),
    (
        "split dims",
        lambda: la.lora_linear_split(t(3, 8), t(6, 8), None, [t(2, 8)], [t(6, 2)], 1.0, [5]),
        ValueError,
        r"split_dims \[5\] with the sum 5.*\[6, 8\]",
    ),
    (
        "split lengths",
        lambda: la.lora_linear_split(t(3, 8), t(6, 8), None, [t(2, 8)], [t(6, 2)], 1.0, [3, 3]),
        ValueError,
        r"1 lora_As, 1 lora_Bs and 2 split_dims",
    ),
    (
        "split B",
        lambda: la.lora_linear_split(t(3, 8), t(6, 8), None, [t(2, 8)] * 2, [t(3, 2), t(2, 2)], 1.0, [3, 3]),
        RuntimeError,
        r"projection 1.*lora_B .*\[2, 2\].*\[3, 2\]",
    ),
    (
        "no tensor",
        lambda: la.lora_delta(t(3, 8), t(3, 6), None, t(6, 2)),
        TypeError,
        r"lora_A is a NoneType, expected a torch.Tensor",
    ),
    (
        "device",
        lambda: la.lora_delta(t(3, 8), t(3, 6, device="meta"), t(2, 8), t(6, 2)),
        ValueError,
        r"base is on meta, expected cpu",
    ),
    (
        "scaling",
        lambda: la.lora_delta(t(3, 8), t(3, 6), t(2, 8), t(6, 2), float("inf")),
        RuntimeError,
        r"scaling is inf",
    ),
    (
        "scaling type",
        lambda: la.lora_embedding(torch.tensor([1]), t(9, 6), t(2, 9), t(6, 2), "a"),
        TypeError,
        r"scaling is 'a'",
    ),
]


@pytest.mark.parametrize(("name", "call", "error", "text"), WRONG, ids=[w[0] for w in WRONG])
def test_errors(name: str, call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    y = la.lora_delta(t(3, 8), t(3, 6), t(2, 8), t(6, 2))  # the next call is right
    assert torch.equal(y, torch.full((3, 6), 17.0))


def test_va5_requests_in_threads_have_their_own_adapters() -> None:
    """Eight layers, two adapters, two threads: the adapter is chosen by the call, nothing is global."""
    torch.manual_seed(0)
    layers = [
        (
            torch.randn(32, 32) / 6,
            [torch.randn(r, 32) for r in (4, 7)],
            [torch.randn(32, r) / 9 for r in (4, 7)],
        )
        for _ in range(8)
    ]

    def network(x: Tensor, ids: list[int]) -> Tensor:
        for w, a, b in layers:
            x = torch.tanh(la.lora_linear_batched(x, w, None, a, b, [0.5, 2.0], ids))
        return x

    x = torch.randn(2, 5, 32)
    switched = [[0, 0], [1, 1], [0, 1], [-1, 0]]
    with torch.no_grad():
        alone = [network(x, ids) for ids in switched]
    assert len({tuple(y.flatten().tolist()) for y in alone}) == len(switched)

    def request(first: int) -> int:
        wrong = 0
        with torch.no_grad():
            for i in range(200):
                which = (first + i) % len(switched)
                wrong += not torch.equal(network(x, switched[which]), alone[which])
        return wrong

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(request, range(2))) == [0, 0]

"""Norms of updates, the limit on them, GGPO: against the matrices that they avoid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import loraaccel as la

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def pair(
    r: int = 4, k: int = 70, n: int = 33, dtype: torch.dtype = F32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(r, k, generator=g).to(dtype), torch.randn(n, r, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_norms(rank: int, dtype: torch.dtype) -> None:
    a, b = pair(rank, dtype=dtype)
    update = -1.5 * (b.double() @ a.double())
    norm, rows = la.lora_norm(a, b, -1.5), la.lora_row_norms(a, b, -1.5)
    assert norm.dtype == rows.dtype == (F64 if dtype == F64 else F32)
    rtol = 1e-12 if dtype == F64 else 1e-5
    torch.testing.assert_close(norm.double(), update.norm(), rtol=rtol, atol=0)
    torch.testing.assert_close(rows.double(), update.norm(dim=1), rtol=rtol, atol=0)
    with la.disabled():
        torch.testing.assert_close(la.lora_row_norms(a, b, -1.5), rows)


def test_of_a_convolution_and_without_gradients() -> None:
    a, b = torch.randn(4, 6, 3, 3, requires_grad=True), torch.randn(8, 4, 1, 1, requires_grad=True)
    update = F.conv2d(a.permute(1, 0, 2, 3), b).permute(1, 0, 2, 3)
    norm = la.lora_norm(a, b, 0.5)
    torch.testing.assert_close(norm, 0.5 * update.detach().norm())
    assert not norm.requires_grad
    assert not la.lora_row_norms(a, b).requires_grad


def test_limit_is_kohyas() -> None:
    """apply_max_norm_regularization, on pairs above and below the limit."""
    pairs = [pair(seed=i) for i in range(3)]
    pairs[1] = tuple(t * 0.01 for t in pairs[1])
    scalings, limit = [0.5, 0.5, 2.0], 3.0
    expected, norms, count = [], [], 0
    for (a, b), s in zip(pairs, scalings, strict=True):
        norm = (s * (b @ a)).norm().clamp(min=limit / 2)
        ratio = torch.clamp(norm, max=limit) / norm
        count += int(ratio != 1)
        expected.append((a * ratio**0.5, b * ratio**0.5))
        norms.append(float((s * (b @ a)).norm() * ratio))
    done = la.limit_norms([p[0] for p in pairs], [p[1] for p in pairs], scalings, limit)
    assert done.scaled == count == 2
    assert done.mean == pytest.approx(sum(norms) / 3, rel=1e-5)
    assert done.largest == pytest.approx(max(norms), rel=1e-5)
    for got, want in zip(pairs, expected, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
    assert la.limit_norms([p[0] for p in pairs], [p[1] for p in pairs], scalings, limit * 1.001).scaled == 0


def test_ggpo_norms() -> None:
    a, b = pair()
    da, db = pair(seed=1)
    combined, grads = la.ggpo_norms(a, b, da, db, 0.7, 1.3)
    torch.testing.assert_close(combined, torch.sqrt(1.3**2 + (b @ a).square().sum(1)))
    torch.testing.assert_close(grads, (0.7 * (b @ da + db @ a)).norm(dim=1))


def test_ggpo_layer() -> None:
    """The perturbation of the seed, in the output and in no gradient."""
    a, b = pair(3, 20, 12, F64)
    x, w, bias = (
        torch.randn(5, 20, dtype=F64, requires_grad=True),
        torch.randn(12, 20, dtype=F64),
        torch.randn(12, dtype=F64),
    )
    a, b = a.requires_grad_(), b.requires_grad_()
    combined, grads = torch.rand(12, dtype=F64), torch.rand(12, dtype=F64)
    torch.manual_seed(4)
    y = la.ggpo_linear(x, w, bias, a, b, 0.5, sigma=0.1, beta=0.2, combined_norms=combined, grad_norms=grads)
    torch.manual_seed(4)
    p = torch.randn(12, 20, dtype=F64) * ((0.1 * combined + 0.2 * grads**2) / 12**0.5)[:, None]
    plain = la.lora_linear(x, w, bias, a, b, 0.5)
    torch.testing.assert_close(y, plain + x @ p.T)
    for g, want in zip(
        torch.autograd.grad(y.square().sum(), [x, a, b]),
        torch.autograd.grad(plain, [x, a, b], 2 * y.detach()),
        strict=True,
    ):
        torch.testing.assert_close(g, want)
    quiet = la.ggpo_linear(
        x, w, bias, a, b, 0.5, sigma=0.1, beta=0.2, combined_norms=combined, grad_norms=grads, training=False
    )
    assert torch.equal(quiet, plain)


def test_errors() -> None:
    a, b = pair()
    with pytest.raises(RuntimeError, match=r"lora_B has shape \[33, 3\], expected \[\*, 4\]"):
        la.lora_norm(a, b[:, :3])
    with pytest.raises(TypeError, match="lora_A is a list"):
        la.lora_norm([1.0], b)
    with pytest.raises(ValueError, match="1 lora_As, 0 lora_Bs and 1 scalings"):
        la.limit_norms([a], [], [1.0], 1.0)
    with pytest.raises(ValueError, match="max_norm is 0"):
        la.limit_norms([a], [b], [1.0], 0)
    assert la.limit_norms([], [], [], 1.0) == (0, 0.0, 0.0)

"""LoCon, LoHa and LoKr against LyCORIS's own functions: weights as it makes them, its rebuilt update of the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import loraaccel as la

functional = pytest.importorskip(
    "lycoris.functional", reason="LyCORIS (pip install lycoris-lora) is not installed"
)

F64 = torch.float64
GAMMA = 0.7


def weights(module: Any, org: Tensor, **options: Any) -> list[Tensor | None]:
    """As weight_gen makes them, none of them zero, in float64."""
    torch.manual_seed(0)
    made = module.weight_gen(org, 4, **options)
    return [None if t is None else torch.randn_like(t).to(F64).requires_grad_() for t in made]


def frozen(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=F64)


def check(ours: Tensor, rebuilt: Tensor, leaves: list[Tensor | None]) -> None:
    some = [t for t in leaves if t is not None]
    grad = torch.randn(ours.shape, dtype=F64)
    torch.testing.assert_close(ours, rebuilt, rtol=1e-9, atol=1e-9)
    got, want = (torch.autograd.grad(y, some, grad) for y in (ours, rebuilt))
    for g, r in zip(got, want, strict=True):
        torch.testing.assert_close(g, r, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("size", [16, 48])
def test_linear(size: int) -> None:
    x, w, b = frozen(2, 7, size), frozen(2 * size, size), frozen(2 * size)
    down, up, _ = leaves = weights(functional.locon, w)
    rebuilt = F.linear(x, w + functional.locon.diff_weight(*leaves, gamma=GAMMA), b)
    check(la.lora_linear(x, w, b, down, up, GAMMA), rebuilt, leaves)
    w1d, w1u, w2d, w2u, _, _ = leaves = weights(functional.loha, w)
    rebuilt = F.linear(x, w + functional.loha.diff_weight(*leaves, gamma=torch.tensor(GAMMA, dtype=F64)), b)
    check(la.loha_linear(x, w, b, w1u, w1d, w2u, w2d, GAMMA), rebuilt, leaves)


@pytest.mark.parametrize(
    "options", [{}, {"factor": 4}, {"decompose_both": True, "factor": 4}, {"full_matrix": True}], ids=str
)
@pytest.mark.parametrize("size", [16, 48, 60])
def test_lokr_linear(size: int, options: dict[str, Any]) -> None:
    x, w, b = frozen(2, 7, size), frozen(2 * size, size), frozen(2 * size)
    leaves = weights(functional.lokr, w, tucker=False, **options)
    w1, w1a, w1b, w2, w2a, w2b, _ = leaves
    rebuilt = F.linear(x, w + functional.lokr.diff_weight(*leaves, gamma=GAMMA), b)
    first = w1 if w1 is not None else (w1a, w1b)
    second = w2 if w2 is not None else (w2a, w2b)
    scale = functional.lokr.rank_scale(w1a, w2a, GAMMA)  # its gamma is alpha there
    check(la.lokr_linear(x, w, b, first, second, scale), rebuilt, leaves)


@pytest.mark.parametrize("tucker", [True, False])
def test_convolutions(tucker: bool) -> None:
    x, w, b = frozen(2, 16, 9, 8), frozen(32, 16, 3, 3), frozen(32)
    w1d, w1u, w2d, w2u, t1, t2 = leaves = weights(functional.loha, w, tucker=tucker)
    if tucker:
        rebuilt = F.conv2d(
            x, w + functional.loha.diff_weight(*leaves, gamma=torch.tensor(GAMMA, dtype=F64)), b, 1, 1
        )
        ours = la.loha_conv2d(x, w, b, w1u.t(), w1d, w2u.t(), w2d, GAMMA, 1, 1, t1=t1, t2=t2)
        check(ours, rebuilt, leaves)
        down, up, mid = leaves = weights(functional.locon, w)
        rebuilt = F.conv2d(x, w + functional.locon.diff_weight(*leaves, gamma=GAMMA), b, 1, 1)
        check(la.lora_conv2d(x, w, b, down, up, GAMMA, 1, 1, lora_mid=mid), rebuilt, leaves)
    leaves = weights(functional.lokr, w, tucker=tucker, factor=4)
    lokr1, _, _, lokr2, w2a, w2b, t2 = leaves
    rebuilt = F.conv2d(x, w + functional.lokr.diff_weight(*leaves, gamma=GAMMA), b, 1, 1)
    second = lokr2 if lokr2 is not None else (w2a.t() if tucker else w2a, w2b)
    scale = functional.lokr.rank_scale(None, w2a, GAMMA)
    check(la.lokr_conv2d(x, w, b, lokr1, second, scale, 1, 1, t2=t2), rebuilt, leaves)


def test_vm_alpha_modules_as_lycoris_trains_them() -> None:
    """Its modules' forward (alpha not the rank), where the weight's update is rebuilt, against the factored form."""
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    torch.manual_seed(0)
    base = torch.nn.Linear(48, 32).double().requires_grad_(False)
    x = frozen(3, 5, 48)
    loha = LohaModule("loha", base, 1.0, lora_dim=4, alpha=2).double()
    lokr = LokrModule("lokr", torch.nn.Linear(48, 32).double(), 1.0, lora_dim=2, alpha=1, factor=4).double()
    for p in (*loha.parameters(), *lokr.parameters()):
        torch.nn.init.normal_(p)
    factors = [loha.hada_w1_a, loha.hada_w1_b, loha.hada_w2_a, loha.hada_w2_b]
    check(la.loha_linear(x, base.weight, base.bias, *factors, 2 / 4), loha(x), factors)
    other = lokr.org_module[0]
    second = (lokr.lokr_w2_a, lokr.lokr_w2_b)
    leaves = [lokr.lokr_w1, *second]
    ours = la.lokr_linear(x, other.weight, other.bias, lokr.lokr_w1, second, 1 / 2)
    check(ours, lokr(x), leaves)


@pytest.mark.parametrize("scaled", [False, True])
def test_rank_dropout_drops_what_lycoris_drops(scaled: bool) -> None:
    """In bypass mode of LoCon whole ranks, of LoHa and LoKr rows of the update; under one seed the same ones."""
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    torch.manual_seed(0)
    options = {"rank_dropout": 0.4, "rank_dropout_scale": scaled}
    dialect = {"rank_dropout": 0.4, "rank_dropout_dialect": "lycoris_scaled" if scaled else "lycoris"}

    def layer(made: Any, conv: bool = False) -> Any:
        module = made.double().train()
        for p in module.parameters():
            torch.nn.init.normal_(p)
        return module

    linear, conv = torch.nn.Linear(48, 32).double(), torch.nn.Conv2d(8, 12, 3, padding=1).double()
    x, image = frozen(3, 5, 48), frozen(2, 8, 6, 6)
    locon = layer(LoConModule("a", linear, 1.0, lora_dim=8, alpha=4, bypass_mode=True, **options))
    locon_conv = layer(LoConModule("b", conv, 1.0, lora_dim=8, alpha=4, bypass_mode=True, **options))
    loha = layer(LohaModule("c", linear, 1.0, lora_dim=4, alpha=2, **options))
    loha_conv = layer(LohaModule("d", conv, 1.0, lora_dim=4, alpha=2, **options))
    lokr = layer(LokrModule("e", linear, 1.0, lora_dim=2, alpha=1, factor=4, **options))
    lokr_conv = layer(LokrModule("f", conv, 1.0, lora_dim=10, alpha=10, factor=4, **options))

    def compare(theirs: Any, ours: Any, leaves: list[Tensor]) -> None:
        torch.manual_seed(7)
        wanted = theirs()
        torch.manual_seed(7)
        got = ours()
        check(got, wanted, leaves)
        assert not torch.equal(got, ours())  # the next draw

    down, up = locon.lora_down.weight, locon.lora_up.weight
    w, b = linear.weight, linear.bias
    compare(lambda: locon(x), lambda: la.lora_linear(x, w, b, down, up, 0.5, **dialect), [down, up])
    base = F.linear(x, w, b)
    compare(lambda: locon(x), lambda: la.lora_delta(x, base, down, up, 0.5, **dialect), [down, up])
    down, up = locon_conv.lora_down.weight, locon_conv.lora_up.weight
    pair = conv.weight, conv.bias
    compare(
        lambda: locon_conv(image),
        lambda: la.lora_conv2d(image, *pair, down, up, 0.5, padding=1, **dialect),
        [down, up],
    )
    four = [loha.hada_w1_a, loha.hada_w1_b, loha.hada_w2_a, loha.hada_w2_b]
    compare(lambda: loha(x), lambda: la.loha_linear(x, w, b, *four, 0.5, **dialect), four)
    four = [loha_conv.hada_w1_a, loha_conv.hada_w1_b, loha_conv.hada_w2_a, loha_conv.hada_w2_b]
    compare(
        lambda: loha_conv(image),
        lambda: la.loha_conv2d(image, *pair, *four, 0.5, padding=1, **dialect),
        four,
    )
    second = (lokr.lokr_w2_a, lokr.lokr_w2_b)
    compare(
        lambda: lokr(x),
        lambda: la.lokr_linear(x, w, b, lokr.lokr_w1, second, 0.5, **dialect),
        [lokr.lokr_w1, *second],
    )
    compare(
        lambda: lokr_conv(image),
        lambda: la.lokr_conv2d(image, *pair, lokr_conv.lokr_w1, lokr_conv.lokr_w2, 1.0, padding=1, **dialect),
        [lokr_conv.lokr_w1, lokr_conv.lokr_w2],
    )

"""VN6 and the three dialects of dropout: the documented masks, in every operator that has them; their statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import loraaccel
from loraaccel import lora_conv2d, lora_delta, lora_linear, lora_linear_split
from loraaccel.ops import lora_linear_adapters
from reference.dropout import dropout_factor

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
PLACES = ("input", "hidden", "rank", "output")
SCALING = 1.7


def next_seed() -> tuple[int, int]:
    """What the operator draws next; the generator is left as it was."""
    state = torch.get_rng_state()
    seed, offset = torch.randint(0, 2**62, (2,), dtype=torch.int64).tolist()
    torch.set_rng_state(state)
    return seed, offset


def masks(
    x: Tensor, ranks: list[int], outputs: int, p: dict[str, float], seed: tuple[int, int]
) -> list[dict[str, Any]]:
    """The factors of each adapter's dropouts, from Note [Dropout mask]: offsets + i, + n + i, + 2 n + i, + 3 n."""
    n, rows = len(ranks), x.shape[:-1].numel()
    samples = x.shape[0] if x.dim() > 1 else 1

    def factor(offset: int, count: int, width: int, p: float) -> Tensor | float:
        return dropout_factor(seed[0], seed[1] + offset, count, width, p) if p else 1.0

    found = []
    for i, rank in enumerate(ranks):
        per_sample = factor(2 * n + i, samples, rank, p.get("rank", 0.0))
        if isinstance(per_sample, Tensor):
            per_sample = per_sample.repeat_interleave(rows // max(samples, 1), 0)
        found.append(
            {
                "input": factor(i, rows, x.shape[-1], p.get("input", 0.0)),
                "hidden": factor(n + i, rows, rank, p.get("hidden", 0.0)),
                "rank": per_sample,
                "output": factor(3 * n, rows, outputs, p.get("output", 0.0)),
            }
        )
    return found


def formula(
    x: Tensor, w: Tensor, b: Tensor, a: list[Tensor], up: list[Tensor], scalings: list[float], drop: Any
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = F.linear(rows, w, b)
    for ai, bi, s, m in zip(a, up, scalings, drop, strict=True):
        h = F.linear(rows * m["input"], ai) * m["hidden"] * m["rank"]
        y = y + m["output"] * (s * F.linear(h, bi))
    return y.reshape(*x.shape[:-1], -1)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def gradients(y: Tensor, of: list[Tensor]) -> list[Tensor]:
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=F64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, of, grad)]


@pytest.mark.parametrize(
    "places", [c for n in range(1, 5) for c in itertools.combinations(PLACES, n)], ids="-".join
)
@pytest.mark.parametrize("lead", [(3, 5), (7,), (2, 2, 3), ()], ids=str)
def test_vn6_every_place_alone_and_together(lead: tuple[int, ...], places: tuple[str, ...]) -> None:
    """Exact in float64, forward and every gradient, with x genuinely zero here and there."""
    x, w, b, a, up = leaves((*lead, 70), (33, 70), (33,), (5, 70), (33, 5))
    with torch.no_grad():
        x[..., ::7] = 0
    p = {place: 0.25 + 0.1 * i for i, place in enumerate(places)}
    drop = masks(x, [5], 33, p, next_seed())
    got = gradients(
        lora_linear(x, w, b, a, up, SCALING, **{f"{k}_dropout": v for k, v in p.items()}), [x, w, b, a, up]
    )
    want = gradients(formula(x, w, b, [a], [up], [SCALING], drop), [x, w, b, a, up])
    for g, r in zip(got, want, strict=True):
        torch.testing.assert_close(g, r, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_kernel_has_the_same_masks(
    dtype: torch.dtype, kernel: str, force_kernel: Callable[[str], None]
) -> None:
    force_kernel(kernel)
    x, w, b, a, up = leaves((4, 9, 70), (33, 70), (33,), (5, 70), (33, 5), dtype=dtype)
    p = {"input": 0.2, "hidden": 0.3, "rank": 0.4, "output": 0.5}
    for some in (("hidden",), ("rank",), ("hidden", "rank"), PLACES):
        used = {k: p[k] for k in some}
        drop = masks(x, [5], 33, used, next_seed())
        y = lora_linear(x, w, b, a, up, SCALING, **{f"{k}_dropout": v for k, v in used.items()})
        got = gradients(y, [x, a, up])
        wide = [t.detach().double().requires_grad_() for t in (x, w, b, a, up)]
        want = gradients(
            formula(*wide[:3], [wide[3]], [wide[4]], [SCALING], drop), [wide[0], wide[3], wide[4]]
        )
        for g, r in zip(got, want, strict=True):
            error = (g.double() - r).norm() / r.norm()
            assert error <= (2e-6 if dtype == F32 else 2e-2), (some, float(error))


def test_several_adapters_and_parts() -> None:
    x, w, b, a0, b0, a1, b1 = leaves((3, 4, 20), (12, 20), (12,), (3, 20), (12, 3), (2, 20), (12, 2))
    drop = masks(x, [3, 2], 12, {"input": 0.3, "hidden": 0.2, "rank": 0.4}, next_seed())
    y = lora_linear_adapters(x, w, b, [a0, a1], [b0, b1], [1.5, -0.5], [0.3, 0.3], [0.2, 0.4] * 2)
    want = formula(x, w, b, [a0, a1], [b0, b1], [1.5, -0.5], drop)
    for g, r in zip(gradients(y, [x, a0, b0, a1, b1]), gradients(want, [x, a0, b0, a1, b1]), strict=True):
        torch.testing.assert_close(g, r, rtol=1e-11, atol=1e-11)
    # kohya's split layer: a mask for each part
    ups = [b0[:4].detach().requires_grad_(), b1[4:].detach().requires_grad_()]
    drop = masks(x, [3, 2], 4, {"hidden": 0.2, "rank": 0.4}, next_seed())
    y = lora_linear_split(x, w, b, [a0, a1], ups, 1.5, [4, 8], hidden_dropout=0.2, rank_dropout=0.4)
    parts = [
        formula(x, w[s], b[s], [a], [u], [1.5], [d])
        for s, a, u, d in zip((slice(0, 4), slice(4, 12)), (a0, a1), ups, drop, strict=True)
    ]
    for g, r in zip(
        gradients(y, [x, a0, a1, *ups]), gradients(torch.cat(parts, -1), [x, a0, a1, *ups]), strict=True
    ):
        torch.testing.assert_close(g, r, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("place", PLACES)
def test_vn6_mean_over_seeds_is_the_output_without_dropout(place: str) -> None:
    """4096 masks, 4 sigma."""
    x, w, b, a, up = (t.detach() for t in leaves((2, 3, 16), (8, 16), (8,), (4, 16), (8, 4), dtype=F32))
    torch.manual_seed(0)
    with torch.no_grad():
        runs = torch.stack(
            [lora_linear(x, w, b, a, up, SCALING, **{f"{place}_dropout": 0.25}) for _ in range(4096)]
        )
        expected = lora_linear(x, w, b, a, up, SCALING)
    sigma = runs.std(0) / 64
    assert ((runs.mean(0) - expected).abs() <= 4.5 * sigma + 1e-5).all()


@pytest.mark.parametrize("place", PLACES)
def test_masks_of_calls_and_modules_are_independent(place: str) -> None:
    """Two calls on one x agree in what they drop as often as chance has it (others share a mask among q, k and v)."""
    x, w, a, up = torch.ones(64, 8, 32), torch.zeros(32, 32), torch.eye(32), torch.eye(32)
    torch.manual_seed(0)
    first, second = (
        lora_linear(x, w, None, a, up, 1.0, **{f"{place}_dropout": 0.5}).flatten() for _ in range(2)
    )
    independent = first.numel() // (8 if place == "rank" else 1)  # numbers that a mask draws
    agreement = ((first > 0) == (second > 0)).double().mean()
    assert abs(float(agreement) - 0.5) <= 4 * 0.5 / independent**0.5
    kept = (first > 0).double().mean()
    assert abs(float(kept) - 0.5) <= 4 * 0.5 / independent**0.5


def test_rank_dropout_drops_whole_ranks_of_a_sample() -> None:
    x, w, a, up = torch.ones(32, 5, 16), torch.zeros(16, 16), torch.eye(16), torch.eye(16)
    y = lora_linear(x, w, None, a, up, 1.0, rank_dropout=0.5)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert (y == y[:, :1]).all()  # all rows of a sample alike
    assert len({tuple(row.tolist()) for row in y[:, 0]}) > 4  # samples differ
    y = lora_linear(x[:, 0], w, None, a, up, 1.0, rank_dropout=0.5)  # two dimensions: a row is a sample
    assert len({tuple(row.tolist()) for row in y}) > 4


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("place", PLACES)
def test_extreme_probabilities(place: str, p: float) -> None:
    x, w, b, a, up = leaves((3, 5, 20), (12, 20), (12,), (4, 20), (12, 4))
    y = lora_linear(x, w, b, a, up, SCALING, **{f"{place}_dropout": p})
    expected = F.linear(x, w, b) if p else lora_linear(x, w, b, a, up, SCALING)
    torch.testing.assert_close(y, expected)
    for g in torch.autograd.grad(y.sum(), [a, up]):
        assert bool(g.any()) == (p == 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_evaluation_has_no_dropout_and_draws_nothing(place: str) -> None:
    x, w, b, a, up = leaves((3, 5, 20), (12, 20), (12,), (4, 20), (12, 4), dtype=F32)
    state = torch.get_rng_state()
    y = lora_linear(x, w, b, a, up, SCALING, **{f"{place}_dropout": 0.5}, training=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(y, lora_linear(x, w, b, a, up, SCALING))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("place", PLACES)
def test_checkpointed(place: str, reentrant: bool) -> None:
    """The recomputed forward pass has the masks of the first."""
    of = leaves((3, 5, 20), (12, 20), (12,), (4, 20), (12, 4))

    def layer(*t: Tensor) -> Tensor:
        return lora_linear(*t, SCALING, **{f"{place}_dropout": 0.5})

    torch.manual_seed(3)
    want = gradients(layer(*of), of)
    torch.manual_seed(3)
    got = gradients(checkpoint(layer, *of, use_reentrant=reentrant), of) if not reentrant else None
    if reentrant:  # (which allows .backward() only)
        y = checkpoint(layer, *of, use_reentrant=True)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=F64)
        y.backward(grad)
        got = [y.detach(), *(t.grad for t in of)]
    for g, r in zip(got, want, strict=True):
        assert torch.equal(g, r)


@pytest.mark.parametrize("place", PLACES)
def test_gradcheck_with_a_fixed_mask(place: str) -> None:
    of = leaves((2, 3, 7), (5, 7), (5,), (2, 7), (5, 2))

    def layer(*t: Tensor) -> Tensor:
        torch.manual_seed(11)
        return lora_linear(*t, SCALING, **{f"{place}_dropout": 0.4})

    assert torch.autograd.gradcheck(layer, of)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.registered
def test_compiled(place: str) -> None:
    torch._dynamo.reset()
    of = leaves((3, 5, 20), (12, 20), (12,), (4, 20), (12, 4), dtype=F32)

    def layer(*t: Tensor) -> Tensor:
        return lora_linear(*t, SCALING, **{f"{place}_dropout": 0.5})

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    want = gradients(layer(*of), of)
    torch.manual_seed(3)
    for g, r in zip(gradients(compiled(*of), of), want, strict=True):
        torch.testing.assert_close(g, r)
    torch._dynamo.reset()


def test_of_lora_delta_and_the_convolution() -> None:
    x, base, a, up = leaves((3, 5, 20), (3, 5, 12), (4, 20), (12, 4))
    drop = masks(x, [4], 12, {"input": 0.3, "hidden": 0.2, "rank": 0.4, "output": 0.5}, next_seed())
    y = lora_delta(
        x, base, a, up, SCALING, input_dropout=0.3, hidden_dropout=0.2, rank_dropout=0.4, output_dropout=0.5
    )
    zero = torch.zeros(12, 20, dtype=F64)
    want = base + formula(x, zero, torch.zeros(12, dtype=F64), [a], [up], [SCALING], drop)
    for g, r in zip(gradients(y, [x, base, a, up]), gradients(want, [x, base, a, up]), strict=True):
        torch.testing.assert_close(g, r, rtol=1e-11, atol=1e-11)
    # The convolution's masks are torch's own, on rank activations: kohya's very numbers.
    image, w, a, up = leaves((2, 3, 6, 6), (5, 3, 3, 3), (4, 3, 3, 3), (5, 4, 1, 1))
    torch.manual_seed(2)
    got = lora_conv2d(image, w, None, a, up, SCALING, padding=1, hidden_dropout=0.3, rank_dropout=0.4)
    torch.manual_seed(2)
    h = F.dropout(F.conv2d(image, a, None, 1, 1), 0.3)
    keep = (torch.rand((2, 4)) > 0.4)[..., None, None]
    want = F.conv2d(image, w, None, 1, 1) + F.conv2d(h * keep, up) * SCALING * (1 / (1 - 0.4))
    torch.testing.assert_close(got, want)


def test_scaled_rank_dropout_of_everything_is_the_frozen_layer() -> None:
    """LyCORIS divides 0 by 0 there."""
    x, w, a, b = torch.randn(3, 8), torch.randn(6, 8), torch.randn(4, 8), torch.randn(6, 4)
    y = lora_linear(x, w, None, a, b, rank_dropout=1.0, rank_dropout_dialect="lycoris_scaled")
    torch.testing.assert_close(y, F.linear(x, w))
    off = lora_linear(x, w, None, a, b, rank_dropout=1.0, rank_dropout_dialect="lycoris", training=False)
    torch.testing.assert_close(off, lora_linear(x, w, None, a, b))
    with pytest.raises(
        ValueError, match="rank_dropout_dialect is 'peft', expected one of 'kohya', 'lycoris'"
    ):
        lora_linear(x, w, None, a, b, rank_dropout=0.5, rank_dropout_dialect="peft")
    with pytest.raises(RuntimeError, match=r"rank_dropout is 1\.5, expected a probability"):
        lora_linear(x, w, None, a, b, rank_dropout=1.5, rank_dropout_dialect="lycoris")


@pytest.mark.registered
def test_lycoris_rank_dropout_in_16_bit_is_rounded_once_and_compiles() -> None:
    x, w, a, b = (torch.randn(s).bfloat16() for s in ((64, 32), (48, 32), (8, 32), (48, 8)))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return lora_linear(x, w, None, a, b, 2.0, rank_dropout=0.4, rank_dropout_dialect="lycoris_scaled")

    torch.manual_seed(3)
    y = layer(x)
    torch.manual_seed(3)
    mask = (torch.rand(8) > 0.4).double()
    exact = (
        x.double() @ w.double().T + 2.0 * ((x.double() @ a.double().T) * mask / mask.mean()) @ b.double().T
    )
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), y, rtol=0.0, atol=0.0)

"""Dropout of lora_linear: the mask bit for bit, its statistics, its place in the formulas, and the random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import loraaccel
from loraaccel.ops import lora_linear, lora_linear_adapters
from reference.calls import check, function, make_call, run
from reference.dropout import dropout_factor, keep_mask, philox4x32, words
from reference.operators import OPS

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FLOAT64 = ("torch", "ref")  # the kernels that serve it
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
OPERATOR = OPS.lora_linear
# Halves above and below 2^32, a sign, and an offset whose successor wraps around.
SEEDS = [(3, 5), (2**62 - 12345678901, 2**61 + 987654321), (-(2**63), 2**33), (2**32 - 1, -1)]


def forced(force_kernel: Callable[[str], None], kernel: str, layer: torch.dtype) -> None:
    assert layer != F64 or kernel in FLOAT64, "conftest.py leaves these out"
    force_kernel(kernel)


def probe(x: Tensor, dropout: float = 0.5) -> Tensor:
    """D(x) itself: W = 0, A and B the identity."""
    k = x.shape[-1]
    one = torch.eye(k, dtype=x.dtype)
    return lora_linear(x, torch.zeros(k, k, dtype=x.dtype), None, one, one, 1.0, input_dropout=dropout)


# ---- the mask --------------------------------------------------------------------------------------------------------


def test_philox_of_the_tests_gives_the_published_words() -> None:
    """Known answers of Random123 for philox4x32, 10 rounds."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, answer in known:
        found = philox4x32([np.array([c], dtype=np.uint64) for c in counter], list(key))
        assert tuple(int(w[0]) for w in found) == answer


@pytest.mark.parametrize("seed", SEEDS, ids=str)
@pytest.mark.parametrize("layer", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_mask_is_the_documented_one_bit_for_bit(
    kernel: str, layer: torch.dtype, seed: tuple[int, int], force_kernel: Callable[[str], None]
) -> None:
    """In y, dx, dA and dB. With W = 0 and everything else the identity or ones, each of them is the mask."""
    forced(force_kernel, kernel, layer)
    n = (
        300 if kernel != "ref" and seed == SEEDS[1] else 131
    )  # past a block of 64, 256 rows or columns; a tail
    for p in (0.5, 0.1):
        first = keep_mask(*seed, n, n, p)
        second = keep_mask(seed[0], seed[1] + 1, n, n, p)
        assert not torch.equal(first, second)
        eye, zero = torch.eye(n, dtype=layer), torch.zeros(n, n, dtype=layer)
        for adapters, index, mask in (
            ([eye], 0, first),
            ([eye, zero], 0, first),
            ([zero, eye], 1, second),
        ):
            x = torch.ones(n, n, dtype=layer).requires_grad_()
            lora_a = [a.clone().requires_grad_() for a in adapters]
            lora_b = [b.clone().requires_grad_() for b in adapters]
            count = len(adapters)
            y, _ = OPERATOR(x, zero, None, lora_a, lora_b, [1.0] * count, [p] * count, torch.tensor(seed))
            y.backward(torch.ones_like(y), retain_graph=True)
            for found in (y.detach(), x.grad):
                assert torch.equal(found != 0, mask)
                assert torch.allclose(found[mask].double(), torch.tensor(1 / (1 - p), dtype=F64), rtol=2**-8)
            lora_a[index].grad = lora_b[index].grad = None
            y.backward(eye)
            assert torch.equal(lora_a[index].grad != 0, mask)
            assert torch.equal(lora_b[index].grad != 0, mask)
        if kernel == "ref":
            break  # plain loops


@pytest.mark.parametrize("layer", [F64, F32], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_mask_at_the_very_threshold(
    kernel: str, layer: torch.dtype, force_kernel: Callable[[str], None]
) -> None:
    """Kept where the number is not below p 2^32, rounded half up: p is chosen from the number of an element itself."""
    forced(force_kernel, kernel, layer)
    n, seed = 70, (11, 12)
    numbers = words(*seed, n, n)
    eye, zero, x = torch.eye(n, dtype=layer), torch.zeros(n, n, dtype=layer), torch.ones(n, n, dtype=layer)
    for row, col in ((0, 0), (3, 17), (69, 69)):
        number = int(numbers[row, col])
        for more, kept in ((0.0, True), (0.25, True), (0.5, False), (1.0, False)):
            p = (number + more) / 2**32  # exact in float64
            y, _ = OPERATOR(x, zero, None, [eye], [eye], [1.0], [p], torch.tensor(seed))
            assert bool(y[row, col] != 0) == kept, (row, col, more)
            assert torch.equal(y != 0, keep_mask(*seed, n, n, p))


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_gradients_with_dropout(kernel: str, force_kernel: Callable[[str], None]) -> None:
    """F2 and F3 with the reference's mask; several adapters, some with and some without dropout."""
    for dtypes in ((F64, F64), (F32, F32), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16)):
        if dtypes[0] == F64 and kernel not in FLOAT64:
            continue
        force_kernel(kernel)
        for shape, ranks, dropouts in (
            ((7,), [3], [0.5]),
            ((49,), [4, 9], [0.1, 0.0]),
            ((2, 35), [4, 2, 5], [0.3, 0.0, 0.75]),
            ((300,), [8], [0.05]),
            ((0,), [4], [0.5]),
        ):
            call = make_call(shape, 70, 33, ranks, dtypes, dropouts=dropouts)
            check(call, run(call), lent=kernel != "ref")


def test_a_row_keeps_its_mask_whatever_the_others() -> None:
    """The mask depends on the row's index only: not on the number of rows, and leading dimensions count as rows."""
    eye, zero = torch.eye(40), torch.zeros(40, 40)
    seed = torch.tensor([7, 9])

    def mask(*lead: int) -> Tensor:
        y, _ = OPERATOR(torch.ones(*lead, 40), zero, None, [eye], [eye], [1.0], [0.5], seed)
        return y != 0

    assert torch.equal(mask(100)[:30], mask(30))
    assert torch.equal(mask(5, 20).flatten(0, 1), mask(100))
    assert torch.equal(mask(), mask(100)[0])


# ---- VN5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [F64, F32], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_vn5_input_gradient_carries_mask_and_scale(
    kernel: str, layer: torch.dtype, force_kernel: Callable[[str], None]
) -> None:
    """VN5: N = 3 rows, I = 8, O = 6, r = 4, p = 0.5, s = 2; and a column of exact zeros in x, where a mask derived
    from D(x) != 0 would be wrong."""
    forced(force_kernel, kernel, layer)
    for p in (0.5, 1.0):
        call = make_call((3,), 8, 6, 4, (layer, layer), dropouts=[p])
        call.scalings = [2.0]
        call.x[:, 2] = 0
        results = run(call)
        check(call, results)
        if p == 1:
            plain = dataclasses.replace(call, lora_a=[], lora_b=[], scalings=[], dropouts=[])
            assert torch.equal(results["x"], run(plain, function)["x"])
            assert results["lora_A.0"].count_nonzero() == 0
            assert results["lora_B.0"].count_nonzero() == 0
        else:
            kept = dropout_factor(*call.seed, 3, 8, p)
            assert int((kept[:, 2] != 0).sum()) > 0, "the case needs a kept zero"


def test_vn5_gradcheck_with_a_fixed_mask() -> None:
    """VN5: finite differences in float64, the mask fixed by seeding inside the function."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=F64)
    x[:, 2] = 0
    operands = [
        x,
        torch.randn(6, 8, dtype=F64),
        torch.randn(6, dtype=F64),
        torch.randn(4, 8, dtype=F64),
        torch.randn(6, 4, dtype=F64),
    ]

    def f(*t: Tensor) -> Tensor:
        torch.manual_seed(11)
        return lora_linear(*t, 2.0, input_dropout=0.5)

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in operands])

    def two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(12)
        w, bias = operands[1].detach(), operands[2].detach()
        return lora_linear_adapters(x, w, bias, [a, a], [b, 2 * b], [2.0, -1.0], [0.5, 0.25])

    assert torch.autograd.gradcheck(two, [operands[0], operands[3], operands[4]])


# ---- statistics, random numbers --------------------------------------------------------------------------------------


def test_mean_over_seeds_is_the_output_without_dropout() -> None:
    """4096 seeds, within 4 standard deviations of the mean: Var y = s^2 p / (1 - p) sum over k of (x_k (BA)_nk)^2."""
    p, count = 0.25, 4096
    call = make_call((3,), 12, 5, 2, (F64, F64))
    (a,), (b,), (s,) = call.lora_a, call.lora_b, call.scalings
    total = torch.zeros(3, 5, dtype=F64)
    for i in range(count):
        seed = torch.tensor([i, 0])
        total += OPERATOR(call.x, call.weight, call.bias, [a], [b], [s], [p], seed)[0]
    sigma = (s**2 * p / (1 - p) * (call.x.square() @ (b @ a).T.square())).sqrt() / count**0.5
    score = (total / count - run(call)["y"]) / sigma
    assert float(score.abs().max()) < 4
    assert float(score.square().mean()) < 2.5  # 15 of them: 1 on average


def test_manual_seed_decides_the_mask() -> None:
    x = torch.ones(20, 30)
    torch.manual_seed(4)
    first = [probe(x) for _ in range(3)]
    torch.manual_seed(4)
    again = [probe(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.manual_seed(5)
    assert not torch.equal(probe(x), first[0])


def test_each_call_and_each_adapter_has_a_mask_of_its_own() -> None:
    """Two layers on the same x, as q and v of an attention: independent masks (of 3600 about half differ)."""
    torch.manual_seed(0)
    x, eye, zero = torch.ones(60, 60), torch.eye(60), torch.zeros(60, 60)
    first, second = probe(x), probe(x)
    differ = int(((first != 0) != (second != 0)).sum())
    assert abs(differ - 1800) < 4 * 30
    both = lora_linear_adapters(x, zero, None, [eye, eye], [eye, eye], [1.0, 16.0], [0.5, 0.5])
    counts = [int((both == v).sum()) for v in (0, 2, 32, 34)]  # none, first, second, both kept
    assert sum(counts) == 3600
    assert all(abs(c - 900) < 4 * 26 for c in counts), counts


def test_the_generator_is_used_only_where_something_is_dropped() -> None:
    """So that a model without dropout draws what it draws without this library."""
    x = torch.ones(4, 6)
    for dropout, training, drawn in ((0.5, True, True), (0.0, True, False), (0.5, False, False)):
        torch.manual_seed(1)
        eye = torch.eye(6)
        y = lora_linear(x, eye, None, eye, eye, 1.0, input_dropout=dropout, training=training)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        assert torch.equal(state, torch.get_rng_state()) != drawn
        if not drawn:
            assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_probabilities(kernel: str, force_kernel: Callable[[str], None]) -> None:
    """p = 1 drops everything without a division by zero; a p below 2^-33 keeps everything; p just below 1 is finite."""
    force_kernel(kernel)
    call = make_call((50,), 24, 20, 3)
    args = (call.x, call.weight, call.bias, call.lora_a, call.lora_b, call.scalings)
    seed = torch.tensor([1, 2])
    nothing = OPERATOR(*args, [1.0], seed)[0]
    assert torch.equal(nothing, OPERATOR(*args[:3], [], [], [], [], None)[0])
    everything = OPERATOR(*args, [2.0**-34], seed)[0]
    assert torch.equal(everything, OPERATOR(*args, [0.0], None)[0])
    call.dropouts, call.seed = [1 - 2.0**-30], (1, 2)
    check(call, run(call))

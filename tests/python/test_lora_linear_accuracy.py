"""The error against float64 is no larger than that of the layer as PEFT composes it, on the same numbers.

The rule and its slack are in reference.tolerance.ErrorRatio. It holds for what the library chooses by itself and, for
float32, for each kernel that it chooses on some machine. (Inside torch `portable` and `ref` run only where forced.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import loraaccel
from reference import lora_linear as formula
from reference.calls import Call, Results, make_call, operator, run
from reference.tolerance import ErrorRatio

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CHOSEN = ["avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "torch"]
AVAILABLE = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
# M, K, N, R: an ordinary layer; rank near K; sums as long as a block of MKL's and longer; few rows.
SHAPES = [
    (64, 768, 192, 16),
    (96, 64, 64, 64),
    (128, 224, 224, 8),
    (256, 128, 256, 4),
    (600, 96, 64, 16),
    (8, 512, 320, 8),
]
INPUTS = 5


def composed(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: list[Tensor], lora_b: list[Tensor], call: Call
) -> Tensor:
    """The other side: PEFT's composition, with the same mask."""
    factors = [ad.factor for ad in call.adapters(lambda t: t)]
    adapters = [
        formula.Adapter(a, b, s, f) for a, b, s, f in zip(lora_a, lora_b, call.scalings, factors, strict=True)
    ]
    return formula.peft_composition(x, weight, bias, adapters)


def exact(call: Call) -> dict[str, Tensor | np.ndarray]:
    """The formula in a type wider than the operands': float64, or long double for float64."""
    wide: Callable[[Tensor], Tensor | np.ndarray] = formula.double
    if call.x.dtype == F64:

        def wide(t: Tensor) -> np.ndarray:
            return t.detach().numpy().astype(np.longdouble)

    x, weight, bias, grad = (wide(t) for t in (call.x, call.weight, call.bias, call.grad))
    adapters = call.adapters(wide)
    if call.x.dtype == F64:
        adapters = [ad._replace(factor=None if ad.factor is None else wide(ad.factor)) for ad in adapters]
    refs = {"y": formula.forward(x, weight, bias, adapters)}
    return refs | formula.backward(grad, x, weight, adapters)


def error(results: Results, refs: dict[str, Tensor | np.ndarray], name: str) -> Tensor:
    ref = refs[name]
    if isinstance(ref, np.ndarray):
        return torch.from_numpy((results[name].numpy() - ref).astype(np.float64))
    return results[name].double() - ref


def compare(
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    dropout: float = 0.0,
    update: float = 1.0,
) -> None:
    m, k, n, r = shape
    ratios: dict[str, ErrorRatio] = {}
    for seed in range(INPUTS):
        call = make_call((m,), k, n, r, dtypes, dropouts=[dropout], update=update, seed=seed)
        refs, ours, theirs = exact(call), run(call, operator), run(call, composed)
        for name in ours:
            ratio = ratios.setdefault(name, ErrorRatio())
            ratio.add(error(ours, refs, name), error(theirs, refs, name))
    complaints = [f"{name}: {text}" for name, ratio in ratios.items() for text in ratio.complaints()]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(
    "dtypes",
    [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32), (F32, BF16), (F32, F16)],
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
def test_error_is_no_larger_than_eagers(
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    force_kernel: Callable[[str], None],
) -> None:
    force_kernel("auto")
    compare(shape, dtypes)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(
    "update", [1.0, 0.05]
)  # of the base layer's size, as late in training, or much smaller
@pytest.mark.parametrize("kernel", [k for k in CHOSEN if k in AVAILABLE])
def test_error_of_each_float32_kernel_is_no_larger_than_eagers(
    kernel: str, shape: tuple[int, int, int, int], update: float, force_kernel: Callable[[str], None]
) -> None:
    force_kernel(kernel)
    compare(shape, (F32, F32), update=update)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(
    "dtypes",
    [(BF16, BF16), (F16, F16), (BF16, F32)],
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
@pytest.mark.parametrize("kernel", [k for k in CHOSEN if k in AVAILABLE])
def test_error_of_each_16_bit_kernel_is_no_larger_than_eagers(
    kernel: str,
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    force_kernel: Callable[[str], None],
) -> None:
    force_kernel(kernel)
    compare(shape, dtypes)


@pytest.mark.parametrize(
    "dtypes",
    [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32)],
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
def test_error_with_dropout_is_no_larger_than_eagers(
    dtypes: tuple[torch.dtype, torch.dtype], force_kernel: Callable[[str], None]
) -> None:
    force_kernel("auto")
    compare((128, 128, 160, 8), dtypes, 0.1)


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 2.0**-60, reason="no type wider than float64 to compare with"
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_float64_error_is_no_larger_than_eagers(dropout: float, force_kernel: Callable[[str], None]) -> None:
    force_kernel("auto")
    compare((64, 72, 80, 8), (F64, F64), dropout)

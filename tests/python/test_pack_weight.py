"""Packed weights through torch.ops: the same bits with them as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import loraaccel.ops
from reference.calls import Call, make_call
from reference.operators import OPS

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]


def forward(call: Call, packed: Tensor | None, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    w = call.weight if weight is None else weight
    tail = (call.scalings, call.dropouts, None)
    return OPS.lora_linear(call.x, w, call.bias, call.lora_a, call.lora_b, *tail, packed)


def backward(call: Call, hidden: Tensor, packed: Tensor | None, weight: Tensor | None = None) -> list[Tensor]:
    w = call.weight if weight is None else weight
    mask = [True] * (3 + 2 * len(call.lora_a))
    tail = (hidden, call.scalings, call.dropouts, None, mask)
    return OPS.lora_linear_backward(call.grad, call.x, w, call.lora_a, call.lora_b, *tail, packed)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_same_bits(dtype: torch.dtype, kernel: str, force_kernel: Any) -> None:
    force_kernel(kernel)
    for rows, inputs, outputs in ((1, 33, 17), (16, 64, 96), (17, 257, 70), (50, 40, 3), (0, 8, 8)):
        call = make_call((rows,), inputs, outputs, [4, 3], (dtype, F32))
        y, hidden = forward(call, OPS.pack_weight(call.weight, False))
        plain_y, plain_hidden = forward(call, None)
        assert torch.equal(y, plain_y)
        assert torch.equal(hidden, plain_hidden)
        grads = backward(call, hidden, OPS.pack_weight(call.weight, True))
        for got, want in zip(grads, backward(call, hidden, None), strict=True):
            assert torch.equal(got, want)


def test_leading_dimensions() -> None:
    call = make_call((2, 3, 5), 24, 20, 4)
    packed = OPS.pack_weight(call.weight, False)
    assert forward(call, packed)[0].shape == (2, 3, 5, 20)
    assert torch.equal(forward(call, packed)[0], forward(call, None)[0])


def test_gradients_through_a_packed_forward() -> None:
    """The gradient formula reads the weight itself."""
    call = make_call((20,), 24, 16, 4)
    results = []
    for packed in (OPS.pack_weight(call.weight, False), None):
        x, weight, bias, (a,), (b,) = call.leaves()
        y, _ = OPS.lora_linear(x, weight, bias, [a], [b], call.scalings, call.dropouts, None, packed)
        y.backward(call.grad)
        results.append([t.grad for t in (x, weight, bias, a, b)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_bytes() -> None:
    """As pack.h has it: about the weight's size, or twice that for 16-bit types."""
    for use in (False, True):
        for dtype, sizes in ((F32, {4}), (F16, {4}), (BF16, {2, 4})):
            packed = OPS.pack_weight(torch.ones(256, 256, dtype=dtype), use)
            assert packed.dtype == torch.uint8
            assert (packed.numel() - 64) / 256**2 in sizes


def test_a_changed_weight_must_be_packed_again() -> None:
    """Documented: the kernels that packed read the copy, so a change of the weight is not seen."""
    call = make_call((40,), 24, 16, 4)
    packed, for_gradient = OPS.pack_weight(call.weight, False), OPS.pack_weight(call.weight, True)
    (before, hidden), changed = forward(call, None), call.weight * 2
    dx = backward(call, hidden, None)[0]
    assert torch.equal(forward(call, packed, changed)[0], before)
    assert torch.equal(backward(call, hidden, for_gradient, changed)[0], dx)
    after = forward(call, None, changed)[0]
    assert not torch.equal(after, before)
    assert torch.equal(forward(call, OPS.pack_weight(changed, False), changed)[0], after)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(8, 6, dtype=F64), "no packing"),
        (torch.ones(8, 6).t(), "no packing"),
        (torch.ones(0, 6), "no packing"),
        (torch.ones(6), "weight"),
    ],
    ids=["float64", "transposed", "empty", "vector"],
)
@pytest.mark.parametrize("use", [False, True])
def test_what_cannot_be_packed(weight: Tensor, words: str, use: bool) -> None:
    with pytest.raises(RuntimeError, match=f"pack_weight.*{words}"):
        OPS.pack_weight(weight, use)


def test_what_was_packed_from_something_else() -> None:
    call = make_call((20,), 24, 16, 4)
    _, hidden = forward(call, None)
    other, half = torch.ones(16, 23), torch.ones(16, 24, dtype=F16)
    wrong = [
        ("another shape", lambda use: OPS.pack_weight(other, use)),
        ("another type", lambda use: OPS.pack_weight(half, use)),
        ("is packed for", lambda use: OPS.pack_weight(call.weight, not use)),
        ("not made by pack_weight", lambda use: torch.zeros(4096, dtype=torch.uint8)),
        ("is no packed weight", lambda use: torch.zeros(63, dtype=torch.uint8)),
        ("is no packed weight", lambda use: torch.zeros(4096)),
        ("is no packed weight", lambda use: OPS.pack_weight(call.weight, use)[::2]),
    ]
    for words, packed in wrong:
        with pytest.raises(RuntimeError, match=f"lora_linear: packed.*{words}"):
            forward(call, packed(False))
        with pytest.raises(RuntimeError, match=f"lora_linear_backward: packed.*{words}"):
            backward(call, hidden, packed(True))


def test_a_cut_packed_weight_is_refused() -> None:
    """A head that is right does not make up for panels that are missing."""
    call = make_call((20,), 24, 16, 4)
    _, hidden = forward(call, None)
    for packed in (OPS.pack_weight(call.weight, False)[:64], OPS.pack_weight(call.weight, False)[:-1]):
        with pytest.raises(RuntimeError, match=f"packed has {packed.numel()} bytes, expected"):
            forward(call, packed)
    with pytest.raises(RuntimeError, match="packed has 64 bytes, expected"):
        backward(call, hidden, OPS.pack_weight(call.weight, True)[:64])

"""lora_linear on shapes, types, layouts and adapters that nobody thought of. The examples are the same in every run."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import loraaccel
from reference.calls import Call, check, make_call, run

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KERNELS = [k["name"] for k in loraaccel.kernels() if k["op"] == "lora_linear" and k["available"]]
# Near the widths of vectors, register tiles and panels, near the blocks of rows, and anything else.
SIZES = st.one_of(
    st.integers(1, 40), st.sampled_from([47, 48, 63, 64, 65, 96, 127, 128, 129]), st.integers(1, 150)
)
LEADS = st.one_of(
    st.tuples(st.integers(0, 120)),
    st.tuples(),
    st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
)
TYPES = st.one_of(
    st.just((F64, F64)), st.tuples(st.sampled_from([F32, BF16, F16]), st.sampled_from([F32, BF16, F16]))
)


def dense(t: Tensor) -> Tensor:
    return t


def part(t: Tensor) -> Tensor:
    big = torch.full([n + 2 for n in t.shape], 7.0, dtype=t.dtype)
    view = big[tuple(slice(1, 1 + n) for n in t.shape)]
    view.copy_(t)
    return view


def turned(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() else t


def thinned(t: Tensor) -> Tensor:
    big = torch.full((*t.shape[:-1], 3 * t.shape[-1]), 7.0, dtype=t.dtype)
    view = big[..., 1::3]
    view.copy_(t)
    return view


@st.composite
def calls(draw: st.DrawFn) -> Call:
    ranks = draw(
        st.lists(st.one_of(st.integers(1, 20), st.sampled_from([32, 64, 65])), min_size=1, max_size=3)
    )
    dropouts = [draw(st.sampled_from([0.0, 0.0, 0.2, 0.9, 1.0])) for _ in ranks]
    call = make_call(
        draw(LEADS),
        draw(SIZES),
        draw(SIZES),
        ranks,
        draw(TYPES),
        bias=draw(st.booleans()),
        dropouts=dropouts,
        seed=draw(st.integers(0, 10**6)),
    )
    call.scalings = [draw(st.sampled_from([0.0, 1.0, -0.37, 2.0, 11.3])) for _ in ranks]

    def layout(t: Tensor) -> Tensor:
        return draw(st.sampled_from([dense, dense, part, turned, thinned]))(t)

    return dataclasses.replace(
        call,
        x=layout(call.x),
        weight=layout(call.weight),
        bias=None if call.bias is None else layout(call.bias),
        lora_a=[layout(t) for t in call.lora_a],
        lora_b=[layout(t) for t in call.lora_b],
        grad=layout(call.grad),
    )


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
@given(call=calls())
def test_any_call_matches_the_formula(kernel: str, call: Call) -> None:
    if kernel not in ("torch", "ref") and call.x.dtype == F64:
        call.x, call.weight, call.grad = call.x.to(F32), call.weight.to(F32), call.grad.to(F32)
        call.bias = None if call.bias is None else call.bias.to(F32)
        if call.lora_a[0].dtype == F64:
            call.lora_a = [t.to(F32) for t in call.lora_a]
            call.lora_b = [t.to(F32) for t in call.lora_b]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LORAACCEL_FORCE_KERNEL", kernel)
        results = run(call)
    check(call, results, lent=kernel != "ref")

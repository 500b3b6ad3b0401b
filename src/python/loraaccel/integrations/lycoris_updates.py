"""What stands for a call of a LyCORIS module: the operators on its factors, with its masks and its scalar in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel import _conv2d, _dora, _loha, _lokr
from loraaccel.integrations import lycoris_dora
from loraaccel.integrations.kohya_operands import scaling_of
from loraaccel.integrations.lycoris_formula import (
    Facts,
    Mode,
    drawn_mask,
    frozen_output,
    module_dropped,
    output_dropout,
    update_matrix,
)
from loraaccel.ops import lora_delta_adapters, lora_linear_adapters

Mask = tuple[Tensor, float] | None


class Call(NamedTuple):
    """One call, of which everything has been looked at."""

    module: Any
    mode: Mode
    facts: Facts
    x: Tensor
    layer: Any  # the plain frozen layer under it; None where something else computes its output
    used: torch.dtype  # of the result


def run(call: Call) -> Tensor:
    m, mode, facts, x = call.module, call.mode, call.facts, call.x
    if module_dropped(m):
        return frozen_output(m, x, facts.dropped)
    if mode.decomposed:
        return _decomposed(call)
    if mode.form == "linear" and call.layer is not None and not mode.outputs:
        weight, bias = _weight_and_bias(call)
        return _with_frozen(call, x, weight, bias, drawn_mask(m, mode.algo))
    if mode == Mode("locon", "conv", mode.bypass) and call.layer is not None and call.layer.groups == 1:
        y = _whole_convolution(call)
        if y is not None:
            return y
    base = frozen_output(m, x, facts.base)
    mask = drawn_mask(m, mode.algo)
    drop = output_dropout(m, mode.algo) if mode.bypass else None
    if drop is None and base.dtype == call.used:
        return _onto(call, x, base, mask)
    update = _onto(call, x, _nothing_like(call, base), mask)
    return base + (update if drop is None else drop(update))


def scaling(module: Any, mode: Mode, facts: Facts) -> float | None:
    """Of the update, without a scalar that is trained. (DoRA has the multiplier in its gain.)"""
    values = [module.scale if facts.scaled or not mode.bypass else 1.0]
    values += [] if mode.decomposed else [module.multiplier]
    values += [] if _trained_scalar(module) is not None else [module.scalar]
    return scaling_of(*values)


def _trained_scalar(module: Any) -> Tensor | None:
    s = module.scalar
    return s if isinstance(s, Tensor) and s.requires_grad else None


def _scale(call: Call, mask: Mask) -> float:
    found = scaling(call.module, call.mode, call.facts)
    assert found is not None  # why_not_module has looked
    return found if mask is None else found * mask[1]


def _weight_and_bias(call: Call) -> tuple[Tensor, Tensor | None]:
    """Of the frozen layer; without gradients where the host gives it none."""
    weight, bias = call.layer.weight, call.layer.bias
    if call.facts.base == "made" or call.mode.decomposed:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return weight, bias


def _factor(call: Call, t: Tensor) -> Tensor:
    """A factor no narrower than x: x would be rounded to it."""
    return t.to(call.x.dtype) if t.dtype.itemsize < call.x.dtype.itemsize else t


def _geometry(call: Call) -> tuple[Any, Any, Any]:
    keywords = call.module.kw_dict
    return keywords["stride"], keywords["padding"], keywords["dilation"]


def _nothing_like(call: Call, base: Tensor) -> Tensor:
    """Zeros in the memory format that the host's own update has: that of the mask of output dropout follows it."""
    held = [call.x, *(p for p in call.module.parameters() if p.dim() == 4)]
    last = base.dim() == 4 and any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in held
    )
    return torch.zeros(base.shape, dtype=call.used, device=base.device).contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )


# ---- the update on its own, and with the frozen product --------------------------------------------------------------


def _with_frozen(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Mask) -> Tensor:
    """A linear layer as a whole."""
    scale, algo = _scale(call, mask), call.mode.algo
    if algo == "locon":
        a, _, b = _low_rank(call, mask)
        return lora_linear_adapters(x, weight, bias, (a,), (b,), [scale], [0.0])
    if algo == "loha":
        return _loha.loha_linear(x, weight, bias, *_hadamard(call, mask), scale)
    return _onto(call, x, lora_linear_adapters(x, weight, bias, (), (), [], []), mask)


def _whole_convolution(call: Call) -> Tensor | None:
    a, _, b = _low_rank(call, None)
    weight, bias = _weight_and_bias(call)
    return _conv2d.whole_conv(call.x, weight, bias, a, b, _scale(call, None), _geometry(call))


def _onto(call: Call, x: Tensor, base: Tensor, mask: Mask) -> Tensor:
    """base + the update."""
    scale, mode = _scale(call, mask), call.mode
    if mode.algo == "lokr":
        return _kronecker(call, x, base, mask, scale)
    if mode.algo == "loha":
        return _hadamard_onto(call, x, base, mask, scale)
    a, mid, b = _low_rank(call, mask)
    if mode.form == "linear":
        return lora_delta_adapters(x, base, (a,), (b,), [scale], [0.0])
    return _convolved(call, x, base, a, mid, b, scale)


def _convolved(
    call: Call, x: Tensor, base: Tensor, a: Tensor, mid: Tensor | None, b: Tensor, scale: float
) -> Tensor:
    groups = call.module.kw_dict.get("groups", 1)
    if groups > 1:  # the same factors in every group of channels
        if mid is not None:
            a, mid = _merged_middle(a, mid), None
        a = a.repeat(groups, 1, 1, 1)
    return _conv2d.conv_update(base, x, a, b, mid, scale, _geometry(call))


def _merged_middle(a: Tensor, mid: Tensor) -> Tensor:
    """[R, C, kh, kw] of Tucker's middle [R, R', kh, kw] and A [R', C, 1, 1]."""
    return torch.einsum("ij...,jc->ic...", mid, a.flatten(1)).contiguous()


def _low_rank(call: Call, mask: Mask) -> tuple[Tensor, Tensor | None, Tensor]:
    """LoCon's A, middle and B [N, R], B with the scalar and the mask in it."""
    m = call.module
    a, b = _factor(call, m.lora_down.weight), _factor(call, m.lora_up.weight.flatten(1))
    mid = _factor(call, m.lora_mid.weight) if call.mode.form == "tucker" else None
    scalar = _trained_scalar(m)
    b = b if scalar is None else b * scalar
    if mask is not None:
        kept = mask[0].to(b.dtype)
        b = b * (kept if call.mode.bypass else kept[:, None])
    return a, mid, b


def _hadamard(call: Call, mask: Mask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LoHa's w1_a [N, R], w1_b, w2_a, w2_b, the first with the scalar and the mask in it."""
    m = call.module
    a1, b1, a2, b2 = (_factor(call, t) for t in (m.hada_w1_a, m.hada_w1_b, m.hada_w2_a, m.hada_w2_b))
    if call.mode.form == "tucker":
        a1, a2 = a1.t(), a2.t()
    scalar = _trained_scalar(m)
    a1 = a1 if scalar is None else a1 * scalar
    return (a1 if mask is None else a1 * mask[0].to(a1.dtype)[:, None]), b1, a2, b2


def _hadamard_onto(call: Call, x: Tensor, base: Tensor, mask: Mask, scale: float) -> Tensor:
    m = call.module
    a1, b1, a2, b2 = _hadamard(call, mask)
    n = a1.shape[0]
    if call.mode.form == "tucker":
        t1, t2 = _factor(call, m.hada_t1), _factor(call, m.hada_t2)
        a, b = _loha.hadamard_factors(a1, b1, a2, b2)
        mid = (t1[:, None, :, None] * t2[None, :, None, :]).flatten(2, 3).flatten(0, 1)
        return _convolved(call, x, base, a[:, :, None, None], mid, b, scale)
    k, rank = b1.shape[1], b1.shape[0] * b2.shape[0]
    rows = base.numel() // max(n, 1)
    if _loha.factors_pay_alone(rows, n, k, rank, b1.shape[0] + b2.shape[0]):
        a, b = _loha.hadamard_factors(a1, b1, a2, b2)
        if call.mode.form == "linear":
            return lora_delta_adapters(x, base, (a,), (b,), [scale], [0.0])
        return _convolved(call, x, base, a.reshape(rank, *m.shape[1:]), None, b, scale)
    delta = ((a1 @ b1) * (a2 @ b2) * scale).reshape(m.shape)
    return base + m.op(x, delta.to(x.dtype), None, **m.kw_dict)


def _kronecker(call: Call, x: Tensor, base: Tensor, mask: Mask, scale: float) -> Tensor:
    m = call.module
    w1: Any = m.lokr_w1 if m.use_w1 else (m.lokr_w1_a, m.lokr_w1_b)
    w2: Any = m.lokr_w2 if m.use_w2 else (m.lokr_w2_a, m.lokr_w2_b)
    w1, w2 = (
        tuple(_factor(call, t) for t in w) if isinstance(w, tuple) else _factor(call, w) for w in (w1, w2)
    )
    scalar = _trained_scalar(m)
    if scalar is not None:
        w1 = (w1[0] * scalar, w1[1]) if isinstance(w1, tuple) else w1 * scalar
    under = base if mask is None else torch.zeros_like(base)
    if call.mode.form == "linear":
        first, second = (
            (w[0].shape[0], w[1].shape[1]) if isinstance(w, tuple) else tuple(w.shape) for w in (w1, w2)
        )
        sizes = first[0], second[0], first[1], second[1]
        y = _lokr.lokr_update(x, under, sizes, w1, w2, scale)
        return y if mask is None else base + y * mask[0].to(y.dtype)
    middle = None
    if isinstance(w2, tuple):
        up, down = w2
        if call.mode.form == "tucker":
            up, middle = up.t(), _factor(call, m.lokr_t2)
        size = (1, 1) if middle is not None else m.shape[2:]
        w2 = up, down.reshape(down.shape[0], -1, *size)
    elif w2.dim() == 2:
        w2 = w2[:, :, None, None]
    y = _lokr.lokr_conv_update(under, x, w1, w2, middle, scale, _geometry(call))
    return y if mask is None else base + y * mask[0].to(y.dtype)[:, None, None]


# ---- DoRA ------------------------------------------------------------------------------------------------------------


def _decomposed(call: Call) -> Tensor:
    m, mode, x = call.module, call.mode, call.x
    mask = drawn_mask(m, mode.algo)
    weight, bias = _weight_and_bias(call)
    gain = lycoris_dora.gain_of(m.dora_scale, _norms(call, weight, mask), float(m.multiplier))
    if mode.decomposed == "in":
        return _with_frozen(call, x * gain.to(x.dtype), weight, bias, mask)
    if mode.form == "linear":
        z = _with_frozen(call, x, weight, None, mask)
        return _dora.column_gain(z, gain, None if bias is None else bias.to(z.dtype))
    z = _onto(call, x, F.conv2d(x, weight, None, **m.kw_dict), mask)
    y = z * gain[:, None, None]
    return (y if bias is None else y + bias[:, None, None]).to(z.dtype)


def _norms(call: Call, weight: Tensor, mask: Mask) -> Tensor:
    """Norms of the rows (columns) of W + ΔW: of LoCon's from its factors, of the others' with ΔW made, as there."""
    scale, matrix = _scale(call, mask), weight.flatten(1)
    with torch.autocast(weight.device.type, enabled=False):
        if call.mode.algo == "locon":
            a, mid, b = _low_rank(call, mask)
            a = (a if mid is None else _merged_middle(a, mid)).flatten(1)
            if call.mode.decomposed == "in":
                return lycoris_dora.row_norms(matrix.t(), b.t(), a.t(), scale)
            return lycoris_dora.row_norms(matrix, a, b, scale)
        sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
        kept = None if mask is None else (mask[0], 1.0)
        delta = update_matrix(call.module, call.mode.algo, kept, sums)
        scalar = _trained_scalar(call.module)
        delta = delta if scalar is None else delta * scalar
        return lycoris_dora.matrix_norms(
            matrix, delta.flatten(1) * scale, 1 if call.mode.decomposed == "in" else 0
        )

"""LoKr layers: x in blocks, multiplied by one factor of the Kronecker product after the other."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel import _expand
from loraaccel._checks import (
    check_matrix,
    check_operands,
    check_probabilities,
    check_product,
    in_force,
    number,
)
from loraaccel._conv2d import Pair
from loraaccel._dropout import seeded_dropout
from loraaccel._rank_dropout import row_mask
from loraaccel.ops import lora_linear_adapters

Factor: TypeAlias = Tensor | tuple[Tensor, Tensor]


def lokr_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w1: Factor,
    w2: Factor,
    scaling: float = 1.0,
    *,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoKr linear layer:  y = x Wᵀ + bias + scaling · x (w1 ⊗ w2)ᵀ, ⊗ the Kronecker product.

    w1 [a, c] and w2 [b, d], each a tensor or a pair of low-rank factors ([a, R], [R, c]); weight [N, K] with N = a b
    and K = c d. x is read as [..., c, d]: multiplied by w2 along d and by w1 along c, in the order that costs less;
    w1 ⊗ w2 is never made. Dropouts as in `loha_linear`. Types and errors as in
    `lora_linear`; y is rounded once more by the update.
    Source: Edalati et al., "KronA", 2022; LyCORIS, Yeh et al., 2023.
    """
    op = "lokr_linear"
    operands = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_operands(op, operands | _named_factors(w1, w2), x)
    (a, c), (b, d) = _factor_shape(op, "w1", w1), _factor_shape(op, "w2", w2)
    check_matrix(op, "weight", weight, a * b, c * d)
    scale = number(op, scaling)
    check_product(op, scale, x, _named_factors(w1, w2))
    (p_output,) = in_force(training, output_dropout)
    check_probabilities(op, output_dropout=p_output)
    mask = row_mask(op, weight, rank_dropout, rank_dropout_dialect, training)
    base = lora_linear_adapters(x, weight, bias, (), (), [], [])
    if mask is not None or p_output:
        update = lokr_update(x, torch.zeros_like(base), (a, b, c, d), w1, w2, scale)
        update = update if mask is None else update * mask.to(base.dtype)
        return base + seeded_dropout(update, p_output)
    return lokr_update(x, base, (a, b, c, d), w1, w2, scale)


def lokr_update(
    x: Tensor, base: Tensor, sizes: tuple[int, int, int, int], w1: Factor, w2: Factor, scale: float
) -> Tensor:
    """base + scale · x (w1 ⊗ w2)ᵀ on checked operands; sizes: a, b, c, d."""
    a, b, c, d = sizes
    blocks = x.reshape(-1, c, d)
    # Factors in float32 beside 16 bit: nothing is rounded between the two products.
    dtype = torch.promote_types(base.dtype, (w2[0] if isinstance(w2, tuple) else w2).dtype)
    y = base.reshape(-1, a, b)
    with torch.autocast(x.device.type, enabled=False):
        if _second_first(a, b, c, d, w2):
            hidden = _apply(blocks, w2, dtype)  # [M, c, b]
            y = _expand.expand_channels(y, hidden, _whole(w1), scale)
        else:
            hidden = torch.matmul(_whole(w1).to(dtype), blocks.to(dtype))  # [M, a, d]
            if isinstance(w2, tuple):
                hidden, w2 = F.linear(hidden, w2[1].to(dtype)), w2[0]
            y = _expand.expand(y.flatten(0, 1), hidden.flatten(0, 1), w2, scale)
    return y.reshape(base.shape)


def lokr_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w1: Factor,
    w2: Factor,
    scaling: float = 1.0,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    *,
    t2: Tensor | None = None,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoKr convolution:  y = conv(x, W + scaling · w1 ⊗ w2) + bias, w1 [a, c] and w2 [b, d, kh, kw].

    weight [a b, c d, kh, kw]; w1 and w2 may be pairs of low-rank factors, ([a, R], [R, c]) and ([b, R], [R, d kh kw]).
    With ``t2`` [R, R', kh, kw], Tucker's form, w2 is ([b, R], [R', d]). The c blocks of channels are convolved with w2,
    and w1 mixes them. Dropout as in `lokr_linear`. Errors as in `lora_conv2d`.
    """
    op = "lokr_conv2d"
    operands = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    operands |= {} if t2 is None else {"t2": t2}
    check_operands(op, operands | _named_factors(w1, w2), x)
    a, c = _factor_shape(op, "w1", w1)
    kernel = weight.shape[2:]
    scale = number(op, scaling)
    check_product(op, scale, x, _named_factors(w1, w2))
    (p_output,) = in_force(training, output_dropout)
    check_probabilities(op, output_dropout=p_output)
    up: Tensor | None = None
    if isinstance(w2, tuple):
        up, down = w2
        if down.dim() == 2:
            down = down.reshape(down.shape[0], -1, *(kernel if t2 is None else (1, 1)))
    else:
        down = w2
    b = down.shape[0] if up is None else up.shape[0]
    d = down.shape[1]
    size = down.shape[2:] if t2 is None else t2.shape[2:]
    if tuple(weight.shape) != (a * b, c * d, *size):
        raise RuntimeError(
            f"{op}: weight has shape {list(weight.shape)}, expected [{a * b}, {c * d}, "
            f"{', '.join(str(s) for s in size)}] to go with w1 and w2"
        )
    ranks = None if t2 is None or up is None else (up.shape[1], down.shape[0])
    if t2 is not None and (t2.dim() != 4 or tuple(t2.shape[:2]) != ranks):
        raise RuntimeError(
            f"{op}: t2 has shape {list(t2.shape)}, expected {ranks} first, to go with a pair w2"
        )
    geometry = stride, padding, dilation
    mask = row_mask(op, weight, rank_dropout, rank_dropout_dialect, training)
    base = F.conv2d(x, weight, bias, *geometry)
    alone = mask is not None or p_output > 0.0
    under = torch.zeros_like(base) if alone else base
    y = lokr_conv_update(under, x, w1, down if up is None else (up, down), t2, scale, geometry)
    if not alone:
        return y
    y = y if mask is None else y * mask.to(y.dtype)[:, None, None]
    return base + seeded_dropout(y, p_output)


def lokr_conv_update(
    base: Tensor,
    x: Tensor,
    w1: Factor,
    w2: Factor,
    t2: Tensor | None,
    scale: float,
    geometry: tuple[Any, Any, Any],
) -> Tensor:
    """base + scale · conv(x, w1 ⊗ w2) on checked operands; the second of a pair w2 [R, d, kh, kw]."""
    up, down = w2 if isinstance(w2, tuple) else (None, w2)
    w1 = _whole(w1)
    a, c = w1.shape
    blocks = x.reshape(x.shape[0] * c, x.shape[1] // c, *x.shape[2:])
    if not torch.is_autocast_enabled(x.device.type):
        blocks = blocks.to(down.dtype)
    hidden = F.conv2d(blocks, down, None, *(geometry if t2 is None else ()))
    if t2 is not None:
        hidden = F.conv2d(hidden, t2, None, *geometry)
    if up is not None:
        hidden = F.conv2d(hidden, up[:, :, None, None])
    samples, last = x.shape[0], hidden.shape[1:].numel()
    return _expand.expand_channels(
        base.reshape(samples, a, last), hidden.reshape(samples, c, last), w1, scale
    ).reshape(base.shape)


def _named_factors(w1: Factor, w2: Factor) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, w in (("w1", w1), ("w2", w2)):
        if isinstance(w, tuple) and len(w) == 2:
            named |= {f"{name}_a": w[0], f"{name}_b": w[1]}
        else:
            named[name] = w
    return named


def _factor_shape(op: str, name: str, w: Factor) -> tuple[int, int]:
    if not isinstance(w, tuple):
        check_matrix(op, name, w, None, None)
        return w.shape[0], w.shape[1]
    check_matrix(op, f"{name}_a", w[0], None, None)
    check_matrix(op, f"{name}_b", w[1], w[0].shape[1], None)
    return w[0].shape[0], w[1].shape[1]


def _second_first(a: int, b: int, c: int, d: int, w2: Factor) -> bool:
    """True where multiplying by w2 before w1 takes fewer multiplications for each row of x."""
    w2_cost = b * d if not isinstance(w2, tuple) else w2[0].shape[1] * (b + d)
    return c * w2_cost + a * b * c <= a * c * d + a * w2_cost


def _whole(w: Factor) -> Tensor:
    """The factor as one matrix; of two in 16 bit in float32, so that neither it nor its gradient is rounded between."""
    if not isinstance(w, tuple):
        return w
    with torch.autocast(w[0].device.type, enabled=False):
        a, b = (t if t.dtype == torch.float64 else t.float() for t in w)
        return a @ b


def _apply(t: Tensor, w: Factor, dtype: torch.dtype) -> Tensor:
    """t wᵀ over the last dimension."""
    if not isinstance(w, tuple):
        return F.linear(t.to(dtype), w.to(dtype))
    return F.linear(F.linear(t.to(dtype), w[1].to(dtype)), w[0].to(dtype))

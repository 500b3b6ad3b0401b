"""lora_conv2d: the frozen convolution and that of A are torch's, the update is added in one native pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel import _conv_product, _expand, _state
from loraaccel._autograd import refuse_transforms
from loraaccel._checks import check_operands, check_probabilities, in_force, number
from loraaccel._dropout import seeded_dropout
from loraaccel._eager import rank_mask
from loraaccel._rank_dropout import shared_ranks

Pair: TypeAlias = int | Sequence[int]


def lora_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float = 1.0,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    lora_mid: Tensor | None = None,
    input_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    output_dropout: float = 0.0,
    rank_dropout_dialect: str = "kohya",
    training: bool = True,
) -> Tensor:
    """LoRA convolution (LoCon):  y = conv(x, W) + bias + scaling · O ∘ conv1x1(R ∘ H ∘ conv(D(x), A), B).

    x [S, C, H, W], weight [N, C / groups, kh, kw], bias [N] or None, lora_A [R, C, kh, kw],
    lora_B [N, R, 1, 1] (or [N, R]) → y [S, N, H', W'], in x's memory format. stride, padding, dilation as of
    torch.nn.functional.conv2d, for W and A alike. groups: those of W; A may be grouped, [R, C / groups, kh, kw], and B
    too, [N, R / groups, 1, 1]. With ``lora_mid`` [R, R', kh, kw], Tucker's form, A is [R', C, 1, 1] and the geometry
    that of the middle.

    The update is added to the convolution's output in one pass, y is rounded once more by it. Types as torch's
    convolution takes them; an A of another dtype than x is applied to x in its own. Dropouts as in `lora_linear`.
    RuntimeError naming the argument, what was found and what was expected.
    Source: Hu et al., "LoRA", 2021; the form for convolutions: LyCORIS, Yeh et al., 2023.
    """
    op = "lora_conv2d"
    operands = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "lora_A": lora_A,
        "lora_B": lora_B,
        "lora_mid": lora_mid,
    }
    optional = ("bias", "lora_mid")
    check_operands(op, {k: v for k, v in operands.items() if v is not None or k not in optional}, x)
    scale = number(op, scaling)
    _check_conv(op, x, weight, lora_A, lora_B, lora_mid, groups)
    p_input, p_hidden, p_output = in_force(training, input_dropout, hidden_dropout, output_dropout)
    last = lora_A if lora_mid is None else lora_mid
    last, lora_B, p_rank = shared_ranks(op, last, lora_B, rank_dropout, rank_dropout_dialect, training)
    lora_A, lora_mid = (last, None) if lora_mid is None else (lora_A, last)
    check_probabilities(
        op, input_dropout=p_input, hidden_dropout=p_hidden, rank_dropout=p_rank, output_dropout=p_output
    )
    refuse_transforms(op)
    geometry = stride, padding, dilation
    if lora_mid is None and not (p_input or p_hidden or p_rank or p_output):
        y = whole_conv(x, weight, bias, lora_A, lora_B, scale, geometry)
        if y is not None:
            return y
    base = F.conv2d(x, weight, bias, *geometry, groups)
    dropped = seeded_dropout(x, p_input)
    return with_output_dropout(
        base,
        p_output,
        lambda b: conv_update(b, dropped, lora_A, lora_B, lora_mid, scale, geometry, p_hidden, p_rank),
    )


def with_output_dropout(base: Tensor, p: float, update: Callable[[Tensor], Tensor]) -> Tensor:
    """update(base), which adds an adapter to it; with entries of what it adds dropped where p is not 0."""
    if p == 0.0:
        return update(base)
    return base + seeded_dropout(update(torch.zeros_like(base)), p)


def whole_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    geometry: tuple[Any, Any, Any],
) -> Tensor | None:
    """Both convolutions and the update as one product where that is faster, None elsewhere. (With a B that is still
    zero the output is torch's own, bit for bit.)"""
    if _state.off() or lora_b.flatten(1).shape[1] != lora_a.shape[0]:
        return None
    numbers = _conv_product.fits(x, weight, bias, lora_a, geometry)
    if numbers is None or not bool(lora_b.any()):
        return None
    return _conv_product.conv_product(x, weight, bias, lora_a, lora_b, scaling, numbers)


def conv_update(
    base: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    lora_mid: Tensor | None,
    scaling: float,
    geometry: tuple[Any, Any, Any],
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
) -> Tensor:
    """base + scaling · conv1x1(conv(x, A), B): the convolution's part of the adapter, on checked operands."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(lora_a.dtype)
    groups = x.shape[1] // lora_a.shape[1]
    if lora_mid is None:
        h = F.conv2d(x, lora_a, None, *geometry, groups)
    else:
        h = F.conv2d(F.conv2d(x, lora_a), lora_mid, None, *geometry)
    if hidden_dropout:
        h = seeded_dropout(h, hidden_dropout)
    if rank_dropout:
        h = h * rank_mask(h.movedim(1, -1), rank_dropout).movedim(-1, 1)
    return _expand.expand_channels(base, h, _up(lora_b, h.shape[1]), scaling)


def _up(lora_b: Tensor, rank: int) -> Tensor:
    """B as a matrix [N, R]: one block after the other on its diagonal where it is grouped."""
    b = lora_b.flatten(1)
    groups = rank // b.shape[1]
    if groups == 1:
        return b
    blocks = b.reshape(groups, b.shape[0] // groups, b.shape[1])
    return torch.block_diag(*blocks)


def _check_conv(
    op: str,
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    lora_mid: Tensor | None,
    groups: int,
) -> None:
    def wrong(name: str, t: Tensor, expected: str) -> RuntimeError:
        return RuntimeError(f"{op}: {name} has shape {list(t.shape)}, expected {expected}")

    if x.dim() != 4:
        raise wrong("x", x, "[S, C, H, W]")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise RuntimeError(f"{op}: groups is {groups}, expected a divisor of the {channels} channels of x")
    if weight.dim() != 4 or weight.shape[1] != channels // groups:
        raise wrong("weight", weight, f"[N, {channels // groups}, kh, kw] to go with x and {groups} groups")
    kernel = tuple(weight.shape[2:]) if lora_mid is None else (1, 1)
    if (
        lora_a.dim() != 4
        or lora_a.shape[1] not in (channels, channels // groups)
        or tuple(lora_a.shape[2:]) != kernel
    ):
        raise wrong("lora_A", lora_a, f"[R, {channels}, {kernel[0]}, {kernel[1]}] to go with x and weight")
    rank = lora_a.shape[0]
    if lora_a.shape[1] != channels and rank % groups:
        raise RuntimeError(f"{op}: the rank is {rank}, expected a multiple of the {groups} groups of lora_A")
    if lora_mid is not None:
        if lora_mid.dim() != 4 or lora_mid.shape[1] != rank or lora_mid.shape[2:] != weight.shape[2:]:
            expected = f"[R, {rank}, {weight.shape[2]}, {weight.shape[3]}]"
            raise wrong("lora_mid", lora_mid, f"{expected} to go with lora_A and weight")
        rank = lora_mid.shape[0]
    if (
        lora_b.dim() not in (2, 4)
        or lora_b.shape[0] != weight.shape[0]
        or lora_b[0].numel() != lora_b.shape[1]
    ):
        raise wrong("lora_B", lora_b, f"[{weight.shape[0]}, {rank}, 1, 1] to go with weight and lora_A")
    if lora_b.shape[1] not in {rank, rank // groups}:
        raise wrong("lora_B", lora_b, f"[{weight.shape[0]}, {rank}, 1, 1] to go with weight and lora_A")
    if lora_b.shape[1] != rank and rank % groups:
        raise RuntimeError(f"{op}: the rank is {rank}, expected a multiple of the {groups} groups of lora_B")

"""lora_linear_split: one frozen layer whose outputs are several projections, an adapter for each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loraaccel._checks import check_operands, in_force, number
from loraaccel.ops import lora_qkv_packed


def lora_linear_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_As: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    scaling: float,
    split_dims: Sequence[int],
    *,
    input_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """A linear layer whose outputs are several projections side by side, with an adapter for each (kohya's split
    QKV):  y[..., part i] = x W_iᵀ + bias_i + scaling · (R_i ∘ H_i ∘ (D_i(x) A_iᵀ)) B_iᵀ.

    x [..., K] → y [..., N]; weight [N, K]; split_dims: sizes of the parts, their sum N; lora_As [R_i, K] and
    lora_Bs [split_dims[i], R_i]. x is read once for all parts. Each part has masks of its own. Types, dropouts,
    autocast and errors as in `lora_linear`; ValueError where numbers of parts, or their sum, disagree.
    """
    op = "lora_linear_split"
    if len({len(lora_As), len(lora_Bs), len(split_dims)}) != 1 or not split_dims:
        raise ValueError(
            f"{op}: {len(lora_As)} lora_As, {len(lora_Bs)} lora_Bs and {len(split_dims)} split_dims, expected as many "
            "of each, and at least one"
        )
    check_operands(op, {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias}), x)
    for i, (a, b) in enumerate(zip(lora_As, lora_Bs, strict=True)):
        check_operands(f"{op}: part {i}", {"lora_A": a, "lora_B": b}, x)
    if weight.dim() != 2 or sum(split_dims) != weight.shape[0]:
        raise ValueError(
            f"{op}: split_dims {list(split_dims)} with the sum {sum(split_dims)}, expected that of weight "
            f"{list(weight.shape)}"
        )
    parts = list(split_dims)
    p_input, p_hidden, p_rank = in_force(training, input_dropout, hidden_dropout, rank_dropout)
    weights = list(weight.split(parts))
    biases: list[Tensor | None] = [None] * len(parts) if bias is None else list(bias.split(parts))
    adapters = [[pair] for pair in zip(lora_As, lora_Bs, strict=True)]
    ranks = [p_hidden, p_rank] * len(parts) if p_hidden or p_rank else []
    scale = number(op, scaling)
    return lora_qkv_packed(
        x, weights, biases, adapters, [[scale]] * len(parts), [[p_input]] * len(parts), ranks
    )

"""lora_embedding: both look-ups are torch's, the update is added in one native pass."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from loraaccel import _expand
from loraaccel._checks import check_operands, number


def lora_embedding(
    ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float = 1.0,
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """LoRA embedding:  y = W[ids] + scaling · (Aᵀ)[ids] Bᵀ.

    ids of any shape, integers → y [..., D]; weight [V, D], lora_A [R, V], lora_B [D, R]. The rest as of
    torch.nn.functional.embedding, for both look-ups (so ``max_norm`` rescales rows of A in place, as PEFT's layer
    does). y has the weight's dtype and is rounded once. Gradients: weight, lora_A, lora_B.
    Source: Hu et al., "LoRA", 2021.
    """
    op = "lora_embedding"
    check_operands(op, {"ids": ids, "weight": weight, "lora_A": lora_A, "lora_B": lora_B}, ids)
    for name, t in (("weight", weight), ("lora_A", lora_A), ("lora_B", lora_B)):
        if t.dim() != 2:
            raise RuntimeError(f"{op}: {name} has shape {list(t.shape)}, expected two dimensions")
    if lora_A.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"{op}: lora_A has shape {list(lora_A.shape)}, expected [R, {weight.shape[0]}] to go with weight"
        )
    if tuple(lora_B.shape) != (weight.shape[1], lora_A.shape[0]):
        raise RuntimeError(
            f"{op}: lora_B has shape {list(lora_B.shape)}, expected [{weight.shape[1]}, {lora_A.shape[0]}]"
        )
    scale = number(op, scaling)
    rest = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    base = F.embedding(ids, weight, *rest)
    return _expand.expand(base, F.embedding(ids, lora_A.t(), *rest), lora_B, scale)

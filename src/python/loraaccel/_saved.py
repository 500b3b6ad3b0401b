"""What an autograd.Function keeps for its backward pass: tensors that a gradient reads, and of the others the shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]

_LIMIT = 4096
_known: dict[Shape, Tensor] = {}


def keep_or_shape(
    operands: Sequence[Tensor], keep: Sequence[bool]
) -> tuple[list[Tensor | None], list[Shape | None]]:
    """What save_for_backward() takes, and what is remembered of the rest: it may be large, and a user may change in
    place what nothing needs."""
    likes = [None if k else (t.shape, t.dtype, t.device) for t, k in zip(operands, keep, strict=True)]
    return [t if k else None for t, k in zip(operands, keep, strict=True)], likes


def kept_or_shape(saved: Sequence[Tensor], likes: Sequence[Shape | None]) -> list[Tensor]:
    """The operands again; what was not kept has its shape only, which is all that an operator asks of it."""
    return [t if like is None else _shape_only(like) for t, like in zip(saved, likes, strict=True)]


def _shape_only(like: Shape) -> Tensor:
    """A tensor over one number, made once: making one costs as much as a small product."""
    if torch._C._len_torch_dispatch_stack() > 0:  # fake tensors and their like: never mixed with others
        return _make(like)
    known = _known.get(like)
    if known is None:
        if len(_known) >= _LIMIT:
            _known.clear()
        with torch.inference_mode(False):
            known = _known[like] = _make(like)
    return known


def _make(like: Shape) -> Tensor:
    shape, dtype, device = like
    return torch.zeros((), dtype=dtype, device=device).expand(shape)

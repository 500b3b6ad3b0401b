"""torch's dropout without its mask: what is kept for the backward pass is the generator's state, of five kilobytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraaccel import _state


def seeded_dropout(x: Tensor, p: float) -> Tensor:
    """torch.nn.functional.dropout(x, p), the very same values under the same seed; the backward pass makes the mask
    anew. In compiled code and with the switch off it is torch's own."""
    if p == 0.0:
        return x
    drawn = p < 1.0  # where everything is dropped torch draws no mask
    if not drawn or torch.compiler.is_compiling() or _state.off() or not x.is_cpu:
        return F.dropout(x, p)
    # Drawn from a copy, so that a draw of another thread in between cannot part the two passes.
    state, generator = torch.get_rng_state(), torch.Generator()
    generator.set_state(state)
    mask = _mask(x, p, generator)
    torch.set_rng_state(generator.get_state())
    return _SeededDropout.apply(x, mask, p, state)


def _mask(like: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """As torch draws it: in x's type and memory format, kept entries 1 / (1 - p)."""
    return torch.empty_like(like).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, p: float, state: Tensor) -> Tensor:
        ctx.like = torch.empty_like(x, device="meta")
        ctx.rest = p, state
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, state = ctx.rest
        generator = torch.Generator()
        generator.set_state(state)
        return grad * _mask(torch.empty_like(ctx.like, device="cpu"), p, generator), None, None, None

"""Gradients of an operator whose own backward pass has failed, by plain torch: what the launcher's auto mode goes on
with (`_layers.naming`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    formula: Callable[..., Any],
    operands: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Of `formula(*operands)`, one tensor or a tuple, with respect to the operands that need one; None for the others,
    and where no output has a gradient. grads: of the outputs, None for an output that has none.

    An operand that no wanted gradient reads may be anything of its shape.
    """
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaves = [
            t.detach().requires_grad_() if t is not None and needed else t
            for t, needed in zip(operands, needs, strict=True)
        ]
        y = formula(*leaves)
        outputs = [y] if isinstance(y, Tensor) else list(y)
        given = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None]
        wanted = [t for t, needed in zip(leaves, needs, strict=True) if t is not None and needed]
        if not given or not wanted:
            return [None] * len(leaves)
        found = iter(
            torch.autograd.grad(
                [out for out, _ in given],
                wanted,
                [g.detach().to(out.dtype) for out, g in given],
                allow_unused=True,
            )
        )
    return [
        next(found) if t is not None and needed else None for t, needed in zip(leaves, needs, strict=True)
    ]

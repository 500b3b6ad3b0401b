"""Row (a): the q, k and v projections of one attention layer over the same x, each with LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from loraaccel.bench.flops import backward_flops, forward_flops
from loraaccel.bench.workload import Workload

PROJECTIONS = ("to_q", "to_k", "to_v")


class QkvProjection(nn.Module):
    """Three square linear layers, named as diffusers names them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project x [tokens, width] three times."""
        return self.to_q(x), self.to_k(x), self.to_v(x)


@dataclass(frozen=True)
class QkvWorkload:
    """Forward without gradients, or forward and backward for the gradients of x and of all A and B."""

    width: int
    tokens: int
    backward: bool
    row: str = "qkv"
    trains: bool = False

    @property
    def case(self) -> str:
        """Tokens and direction."""
        return f"{self.tokens} tokens, {'fwd+bwd' if self.backward else 'forward'}"

    def flops(self, rank: int) -> int:
        """Of the three projections together."""
        sizes = (self.tokens, self.width, self.width, rank)
        once = forward_flops(*sizes) + (backward_flops(*sizes) if self.backward else 0)
        return len(PROJECTIONS) * once

    def _run(self, module: nn.Module, dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.tokens)
        stack = torch.randn(1 + len(PROJECTIONS), self.tokens, self.width, generator=generator).to(dtype)
        x, *output_gradients = (part.clone() for part in stack)
        if not self.backward:

            def forward() -> dict[str, torch.Tensor]:
                with torch.no_grad():
                    return dict(zip(PROJECTIONS, module(x), strict=True))

            return forward
        x.requires_grad_()
        leaves = {"x": x, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
        names, tensors = [f"grad {name}" for name in leaves], list(leaves.values())

        def forward_backward() -> dict[str, torch.Tensor]:
            outputs = module(x)
            return dict(zip(names, torch.autograd.grad(outputs, tensors, output_gradients), strict=True))

        return forward_backward

    def make_call(self, module: nn.Module, dtype: torch.dtype) -> Callable[[], object]:
        """See Workload."""
        return self._run(module, dtype)

    def observe(self, module: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """The three outputs, or the gradients of x and of each A and B."""
        return self._run(module, dtype)()


@dataclass(frozen=True)
class QkvFamily:
    """Projections of `width`, for several numbers of tokens."""

    width: int = 768
    tokens: tuple[int, ...] = (77, 1024, 4096)
    rank: int = 8
    targets: Sequence[str] = PROJECTIONS

    @property
    def config(self) -> Mapping[str, object]:
        """Sizes, for the output."""
        return {"projections": list(PROJECTIONS), "width": self.width, "rank": self.rank}

    @property
    def workloads(self) -> Sequence[Workload]:
        """Forward of every size, then forward and backward."""
        return [
            QkvWorkload(self.width, tokens, backward) for backward in (False, True) for tokens in self.tokens
        ]

    def build(self) -> nn.Module:
        """The three projections with torch's default initial weights."""
        torch.manual_seed(0)
        return QkvProjection(self.width)

    def compile_model(self, module: nn.Module) -> None:
        """Whole module, one graph per shape."""
        module.compile(dynamic=False)

"""What a row of the benchmark computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn


class Workload(Protocol):
    """One line of a table: something to compute with any variant of a model."""

    @property
    def row(self) -> str:
        """Key of the table: qkv, forward or epoch."""

    @property
    def case(self) -> str:
        """What distinguishes this line from the others of the table."""

    @property
    def trains(self) -> bool:
        """Whether a call changes the adapters."""

    def flops(self, rank: int) -> int | None:
        """Floating-point operations of one call with adapters of this rank (0: none); None if not counted."""

    def make_call(self, module: nn.Module, dtype: torch.dtype) -> Callable[[], object]:
        """The call to be timed, its inputs made in `dtype` beforehand."""

    def observe(self, module: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Results by name, for comparison; leaves the module's parameters as they are."""


class Family(Protocol):
    """A model and the workloads that share it."""

    @property
    def config(self) -> Mapping[str, object]:
        """Sizes of the model, for the output."""

    @property
    def targets(self) -> Sequence[str]:
        """PEFT's target_modules."""

    @property
    def rank(self) -> int:
        """Rank of the adapters."""

    @property
    def workloads(self) -> Sequence[Workload]:
        """In the order of measurement; those that train come last."""

    def build(self) -> nn.Module:
        """The model without adapters, fp32, the same weights each time."""

    def compile_model(self, module: nn.Module) -> object:
        """Compile a variant in place, the way users of this model do."""

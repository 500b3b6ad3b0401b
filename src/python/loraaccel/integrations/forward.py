"""The object that stands in a patched module as its `forward`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from loraaccel import _state
from loraaccel.integrations import peft
from loraaccel.ops import run_lora_linear

# verify: ||ours - eager|| / ||eager||. Both round every output to the dtype and sum in a different order; 16-bit eager
# rounds up to four times. A wrong scale, adapter or transposition is off by far more.
VERIFY_BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class FusedForward:
    """Decides at each call whether the operator can serve it, counts, and else runs the module's own forward.

    Lives in ``module.__dict__["forward"]`` and holds the module, so copies and pickles of the module must come with one
    of their own: see __deepcopy__ and __reduce__.
    """

    def __init__(self, module: nn.Module, name: str, fuse: bool, reason: str, verify: int) -> None:
        self.module = module
        self.name = name
        self.fuse = fuse
        self.reason = reason  # of not fusing at all, or of having been rolled back
        self.verify = verify

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        reason = self.reason
        if not reason:
            if len(args) != 1 or kwargs:
                reason = "extra_arguments"
            else:
                call = peft.fused_call(module, args[0])
                if not isinstance(call, str):
                    y = run_lora_linear(call)
                    if self.verify > 0 and not any(call[6]):
                        y = self._verified(args[0], y)
                    if not torch.compiler.is_compiling():
                        _state.fused["lora_linear"] += 1
                    return y
                reason = call
        if not torch.compiler.is_compiling():
            _state.fallback[reason] += 1
        return type(module).forward(module, *args, **kwargs)

    def _verified(self, x: Tensor, y: Tensor) -> Tensor:
        """y, or the module's own output where y is too far from it."""
        self.verify -= 1
        expected = type(self.module).forward(self.module, x)
        with torch.no_grad():
            error = float(
                (y.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)
            )
        bound = VERIFY_BOUND[y.dtype]
        if y.dtype == expected.dtype and (error <= bound or y.numel() == 0):
            return y
        from loraaccel.patching import warn_rolled_back

        self.reason = "verify_failed"
        warn_rolled_back(self.name, error, bound)
        return expected

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        return FusedForward(copy.deepcopy(self.module, memo), self.name, self.fuse, self.reason, self.verify)

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedForward, (self.module, self.name, self.fuse, self.reason, self.verify)

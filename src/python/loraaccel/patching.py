"""Drop-in use: patch(model), unpatch(model), disabled(), and the report of what was fused and what was not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from loraaccel import _state
from loraaccel._state import disabled
from loraaccel.integrations.forward import FusedForward

__all__ = ["ModuleReport", "PatchReport", "disabled", "patch", "unpatch"]

KINDS = ("lora_linear",)


@dataclass(frozen=True)
class ModuleReport:
    """One LoRA module of a patched model."""

    name: str  # as in model.named_modules()
    kind: str  # operator that stands for it: "lora_linear"; the class name where there is none
    fused: bool  # with the module as it is; a state that changes later (merged, disabled) is followed at each call
    reason: str  # code of integrations.reasons.REASONS, empty where fused


@dataclass(frozen=True)
class PatchReport:
    """Every LoRA module of the model, each fused or falling back to its own forward for one reason."""

    modules: tuple[ModuleReport, ...]

    @property
    def num_fused(self) -> int:
        return sum(m.fused for m in self.modules)

    @property
    def num_fallback(self) -> int:
        return len(self.modules) - self.num_fused

    @property
    def reasons(self) -> dict[str, int]:
        """Modules that fall back, by reason code."""
        return dict(Counter(m.reason for m in self.modules if not m.fused))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: num_fused, num_fallback, reasons, modules."""
        return {
            "num_fused": self.num_fused,
            "num_fallback": self.num_fallback,
            "reasons": self.reasons,
            "modules": [asdict(m) for m in self.modules],
        }

    def __str__(self) -> str:
        text = f"{self.num_fused} of {len(self.modules)} LoRA modules fused"
        if self.num_fallback:
            text += "; not fused: " + ", ".join(f"{n} {reason}" for reason, n in sorted(self.reasons.items()))
        return text


def patch(
    model: nn.Module, *, kinds: Collection[str] | None = None, strict: bool = False, verify: int = 0
) -> PatchReport:
    """Routes the LoRA layers of a model through loraaccel's operators, in place.

    Every LoRA module gets a ``forward`` attribute; class, parameters, state dict, hooks and dtypes stay as they are.
    Each call looks at the module anew: set_adapter, merge, disable_adapter, set_scale and replaced weights are
    followed, and a state that has no fused form runs the module's own forward. Modules added to the model later need
    another call; patching twice changes nothing.

    kinds: operators to use, a subset of {"lora_linear"}; None is all.
    strict: raise RuntimeError, with the model unchanged, if any LoRA module falls back.
    verify: in the first ``verify`` calls of each module run its own forward too, compare, warn and go back to it for
    good where the difference exceeds the bound (calls with active dropout are not compared).

    With ``LORAACCEL=0`` nothing is patched and the report says so. Raises TypeError for something that is no nn.Module,
    ValueError for an unknown kind, ImportError where the operators cannot be loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}, expected a torch.nn.Module")
    unknown = sorted(set(kinds or ()) - set(KINDS))
    if unknown:
        raise ValueError(f"patch: kinds has {unknown}, expected a subset of {list(KINDS)}")
    wanted = frozenset(KINDS if kinds is None else kinds)
    found: list[tuple[nn.Module, ModuleReport, Callable[[], None] | None]] = []
    for name, module, kind in _lora_modules(model):
        reason, install = _plan(module, name, kind, wanted, verify)
        found.append((module, ModuleReport(name, kind, not reason, reason), install))
    report = PatchReport(tuple(entry for _, entry, _ in found))
    if strict and report.num_fallback:
        listed = "; ".join(f"{m.name}: {m.reason}" for m in report.modules if not m.fused)
        raise RuntimeError(
            f"patch: strict, and {report.num_fallback} LoRA modules have no fused form: {listed}"
        )
    if not _state.SWITCHED_OFF:
        for _, _, install in found:
            if install is not None:
                install()
    return report


def unpatch(model: nn.Module) -> int:
    """Takes `patch` back: every forward is the object it was before. Returns the number of modules restored."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model is a {type(model).__name__}, expected a torch.nn.Module")
    restored = 0
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), FusedForward):
            del module.__dict__["forward"]
            restored += 1
    return restored


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, kind) of every LoRA module, of whichever host that is loaded."""
    from loraaccel.integrations import peft

    for name, module in model.named_modules():
        kind = peft.kind_of(module)
        if kind is not None:
            yield name, module, kind


def _plan(
    module: nn.Module, name: str, kind: str, wanted: frozenset[str], verify: int
) -> tuple[str, Callable[[], None] | None]:
    """(reason for falling back or "", what installs the patched forward or None where there is nothing to install)."""
    from loraaccel.integrations import peft

    if _state.SWITCHED_OFF:
        return "switched_off", None
    current = module.__dict__.get("forward")
    if current is not None and not isinstance(current, FusedForward):
        return "forward_replaced", None
    fuse = kind in KINDS and kind in wanted
    if not fuse:
        reason = "kind_excluded" if kind in KINDS else "unsupported_module"
    else:
        reason = peft.why_not_module(module)
    if current is not None:
        return reason, None

    def install() -> None:
        module.__dict__["forward"] = FusedForward(module, name, fuse, reason if not fuse else "", verify)

    return reason, install


def warn_rolled_back(name: str, error: float, bound: float) -> None:
    """One line for a layer that `verify` found wrong."""
    warnings.warn(
        f"loraaccel: verify found a relative error of {error:.2e} in {name}, more than {bound:.2e}; "
        "this layer runs its own forward from now on.",
        RuntimeWarning,
        stacklevel=4,
    )

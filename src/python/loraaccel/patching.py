"""Drop-in use: patch(model), unpatch(model), disabled(), and the report of what was fused and what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from loraaccel import _state
from loraaccel._state import disabled
from loraaccel.integrations import frozen as frozen_layers
from loraaccel.integrations import groups, kohya_network, patched
from loraaccel.integrations.hosts import Host, host_of

__all__ = ["ModuleReport", "PatchReport", "disabled", "patch", "unpatch"]

KINDS = (
    "lora_linear", "lora_qkv", "dora_linear", "lora_delta", "lora_linear_batched", "lora_conv2d", "lora_embedding",
    "loha_linear", "loha_conv2d", "lokr_linear", "lokr_conv2d",
)  # fmt: skip


@dataclass(frozen=True)
class ModuleReport:
    """One LoRA module of a patched model."""

    name: str  # as in model.named_modules()
    kind: str  # operator that stands for it: "lora_linear"; the class name where there is none
    fused: bool  # as the module is; a state that changes later (merged, disabled) is followed at each call
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
    model: nn.Module,
    *,
    kinds: Collection[str] | None = None,
    strict: bool = False,
    verify: int = 0,
    factored: bool = False,
    frozen: bool = False,
) -> PatchReport:
    """Routes the LoRA layers of a model through loraaccel's operators, in place.

    Every LoRA module becomes an instance of a subclass of its class with the same name and one more attribute; its
    parameters, state dict, hooks and dtypes stay as they are. Each call looks at the module anew: set_adapter, merge,
    disable_adapter, set_scale and replaced weights are followed, and a state that has no fused form runs the module's
    own forward. Modules added to the model later need another call; patching twice changes nothing. Copies and
    pickles of a patched model are patched models (loading such a pickle needs loraaccel; state dicts do not).

    kinds: operators to use, None is all; a subset of
        "lora_linear": linear layers, with a bias of the adapter or not, also transformers' Conv1D;
        "lora_qkv": q, k and v of an attention module of diffusers over one input, computed together (info() counts
            one call for each of them);
        "dora_linear": linear layers with DoRA;
        "lora_delta": linear layers whose frozen half computes its own output (quantised, another class, with hooks);
        "lora_linear_batched": linear layers called with an adapter for each sample (adapter_names);
        "lora_conv2d", "lora_embedding";
        "loha_linear", "loha_conv2d", "lokr_linear", "lokr_conv2d": kohya's and LyCORIS's networks of these names.
    strict: raise RuntimeError, with the model unchanged, if any LoRA module falls back.
    verify: in the first ``verify`` calls of each module run its own forward too, compare, warn and go back to it for
    good where the outputs differ by more than the bound. Calls with active dropout are not compared, nor are
    gradients; an adapter that is still zero (B = 0 before training) shows nothing of its branch.

    factored: also modules that make a changed weight W' at each call and multiply by W' - W (LyCORIS outside its bypass
    mode): the change is computed from its factors. That is faster and loses less, and it is not the host's rounding:
    W' - W is rounded to the last bits of W, ours is not. Without it such modules report ``rebuilt``.

    frozen: also torch.nn.Linear layers without LoRA whose parameters are frozen, in float32 and float16: the gradient
    of their input is computed by our kernel (kind "frozen_linear" in info(); not in the report, and `kinds` and
    `verify` do not concern them). The forward pass and calls without gradients stay torch's own, bit for bit.

    With ``LORAACCEL=0`` nothing is patched and the report says so. Raises TypeError for something that is no nn.Module,
    ValueError for an unknown kind, ImportError where the operators cannot be loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}, expected a torch.nn.Module")
    if isinstance(kinds, str):
        raise ValueError(f"patch: kinds is {kinds!r}, expected a collection such as [{kinds!r}]")
    unknown = sorted(set(kinds or ()) - set(KINDS))
    if unknown:
        raise ValueError(f"patch: kinds has {unknown}, expected a subset of {list(KINDS)}")
    wanted = frozenset(KINDS if kinds is None else kinds)
    frozen_layers.release(model)
    found = [
        (module, host, *_decide(module, name, kind, host, wanted, factored))
        for name, module, kind, host in _lora_modules(model)
    ]
    report = PatchReport(tuple(entry for _, _, entry, _ in found))
    if _state.SWITCHED_OFF:
        return report
    if strict and report.num_fallback:
        listed = "; ".join(f"{m.name}: {m.reason}" for m in report.modules if not m.fused)
        raise RuntimeError(
            f"patch: strict, and {report.num_fallback} LoRA modules have no fused form: {listed}"
        )
    for module, host, entry, never in found:
        if entry.reason == "forward_replaced":
            continue
        state = patched.state_of(module)
        limits = None if kinds is None else wanted
        if state is None or (state.reason, state.kinds, state.factored) != (never, limits, factored):
            patched.install(module, _new_state(entry, never, host, verify, limits, factored))
        elif verify:
            state.verify = verify
    groups.install(model)
    if frozen:
        frozen_layers.install(model)
    return report


def _new_state(
    entry: ModuleReport, never: str, host: Host, verify: int, limits: frozenset[str] | None, factored: bool
) -> patched.PatchState:
    wanted = limits is None or "lora_linear" in limits or "lora_qkv" in limits
    plain = host.name == "peft" and entry.kind == "lora_linear" and wanted
    return patched.PatchState(entry.name, never, verify, limits, plain, host=host, factored=factored)


def patch_as_it_comes(
    model: nn.Module, verify: int, roll_back: bool, factored: bool = False
) -> Iterator[tuple[ModuleReport, patched.PatchState]]:
    """`patch` for the launcher, which sees modules one after the other: what each is, and its state."""
    for name, module, kind, host in _lora_modules(model):
        entry, never = _decide(
            module, name or getattr(module, "lora_name", ""), kind, host, frozenset(KINDS), factored
        )
        if _state.SWITCHED_OFF or entry.reason == "forward_replaced":
            continue
        state = patched.state_of(module)
        if state is None or state.reason != never:
            state = _new_state(entry, never, host, verify, None, factored)
            state.roll_back = roll_back
            patched.install(module, state)
        yield entry, state
    groups.install(model)


def unpatch(model: nn.Module) -> int:
    """Takes `patch` back: every module is what it was before. Returns the number of modules restored. A network of
    kohya's trainer that the launcher took over is the host's own again, and so is its trainer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model is a {type(model).__name__}, expected a torch.nn.Module")
    for module in model.modules():
        groups.remove(module)
        kohya_network.give_back(module)
    return sum(patched.remove(module) for module in model.modules())


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Host]]:
    """(name, module, kind, host) of every LoRA module, of whichever host that is loaded."""
    for name, module in model.named_modules():
        found = host_of(module)
        if found is not None:
            host, kind = found
            yield name, module, kind, host


def _uses(kind: str) -> frozenset[str]:
    """Operators that a module of this kind may run, depending on its state and on the call."""
    linear = ("lora_linear", "lora_qkv", "dora_linear", "lora_delta", "lora_linear_batched")
    return frozenset(linear) if kind == "lora_linear" else frozenset({kind})


def _decide(
    module: nn.Module, name: str, kind: str, host: Host, wanted: frozenset[str], factored: bool
) -> tuple[ModuleReport, str]:
    """What to report, and the reason for never fusing this module (empty: each call decides)."""
    state = patched.state_of(module)
    never = ""
    if kind not in KINDS:
        never = "unsupported_module"
    elif state is not None and state.reason == "verify_failed":
        never = "verify_failed"
    elif not _uses(kind) & wanted:
        never = "kind_excluded"
    if _state.SWITCHED_OFF:
        reason = "switched_off"
    elif state is None and ("forward" in module.__dict__ or not host.is_reachable(module)):
        # (put on top of a patched module, it calls that one's)
        reason = "forward_replaced"
    elif not never and not factored and host.rebuilds(module):
        reason = "rebuilt"
    else:
        reason = never or host.why_not_module(module)
    return ModuleReport(name, kind, not reason, reason), never

"""While an attention module's forward runs: its LoRA layers over one input, computed by one lora_qkv call.

The first member of a block that is called with x computes the others with it; they take their results when they are
called with that same tensor, unchanged, in the same state. A member that is called with anything else, or not at all,
costs what was computed for it, never a wrong result. Which members belong together is `groups`' guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loraaccel import _packing, _state
from loraaccel.integrations import peft
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import LoraLinearCall, lora_qkv_adapters

# The hooks on saved tensors that are in force, by which a checkpoint is known; torch 2.7 and older cannot be asked.
saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
MIN_WORK = 2**26  # multiplications; about half a millisecond on two cores in float32
# The innermost attention module whose forward runs in this thread.
current: ContextVar[Scope | None] = ContextVar("loraaccel_group_scope", default=None)

# Block of each member, by its name in the attention module; the names in the order in which they are called.
Blocks = Mapping[str, tuple[str, ...]]


class Round:
    """One lora_qkv call: whose results were taken, and whose were not."""

    __slots__ = ("calls", "rest", "surroundings", "taken")

    def __init__(self, calls: dict[str, LoraLinearCall]) -> None:
        first, *self.rest = calls
        self.taken = [first]
        self.calls = calls
        self.surroundings: tuple[Any, ...] = ()


class _Ready(NamedTuple):
    """A result that waits for its member's call."""

    y: Tensor
    call: LoraLinearCall
    round: Round


class Scope:
    """One call of an attention module's forward. Nothing of it outlives that call."""

    __slots__ = ("_blocks", "_called", "_owner", "_ready", "_state_of", "rounds")

    def __init__(self, owner: nn.Module, blocks: Blocks, state_of: Callable[[nn.Module], Any]) -> None:
        self._owner, self._blocks, self._state_of = owner, blocks, state_of
        self._called: set[str] = set()
        self._ready: dict[str, _Ready] = {}
        self.rounds: list[Round] = []

    def ready_form(self, module: nn.Module, role: str, x: Any) -> Form | None:
        """The result that waits for this call of a member, None where there is none."""
        if role not in self._ready or self._owner._modules.get(role) is not module:
            return None
        y, call, made = self._ready.pop(role)
        if x is not call[0]:  # nor will the others' input be what it was taken to be
            self._drop(made.rest)
            return None
        if _surroundings(x) != made.surroundings or not _is_as_in(module, call):
            return None
        self._called.add(role)
        made.rest.remove(role)
        made.taken.append(role)
        return Form("lora_qkv", lambda: y, any(call[6]), tuple(a.dtype for a in call[3]))

    def first_form(self, module: nn.Module, role: str, call: LoraLinearCall) -> Form | None:
        """What computes this member together with others, None where it is computed by itself."""
        if self._owner._modules.get(role) is not module:
            return None
        calls = {role: call, **self._others(role, call)}
        self._called.add(role)
        if len(calls) == 1:
            return None
        made = Round(calls)
        dropout = any(p for c in calls.values() for p in c[6])
        dtypes = tuple(a.dtype for c in calls.values() for a in c[3])
        return Form("lora_qkv", lambda: self._compute(made), dropout, dtypes)

    def _others(self, role: str, call: LoraLinearCall) -> dict[str, LoraLinearCall]:
        """The members after it in its block that have not been called, each with the call it would make with this x."""
        block = self._blocks.get(role, ())
        if role in self._called:  # another round
            self._called.difference_update(block)
            self._drop(block)
        rest = block[block.index(role) + 1 :] if block else ()
        found: dict[str, LoraLinearCall] = {}
        if not rest or not _pays(call, 1 + len(rest)):
            return found
        for name in rest:
            other = self._owner._modules.get(name)
            state = None if other is None else self._state_of(other)
            if other is None or state is None or state.reason or state.role != name:
                continue
            if name in self._called or name in self._ready:
                continue
            if "forward" in other.__dict__ or peft._has_hooks(other):
                continue  # something is to happen before or after its call
            theirs = peft.fused_call(other, call[0], False)
            if isinstance(theirs, tuple) and _goes_with(theirs, call):
                found[name] = theirs
        return found

    def _compute(self, made: Round) -> Tensor:
        """The first member's result; those of the others wait. (verify computes twice.)"""
        ordered = list(made.calls.values())
        outputs = lora_qkv_adapters(
            ordered[0][0],
            [c[1] for c in ordered],
            [c[2] for c in ordered],
            [list(zip(c[3], c[4], strict=True)) for c in ordered],
            [c[5] for c in ordered],
            [c[6] for c in ordered],
        )
        if made not in self.rounds:
            self.rounds.append(made)
        made.surroundings = _surroundings(ordered[0][0])
        for name, call, y in zip(made.rest, ordered[1:], outputs[1:], strict=True):
            self._ready[name] = _Ready(y, call, made)
        return outputs[0]

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._ready.pop(name, None)

    def close(self) -> None:
        """Drops what was not asked for."""
        self._ready.clear()
        for made in self.rounds:
            made.calls.clear()


def _goes_with(other: LoraLinearCall, call: LoraLinearCall) -> bool:
    weight, own = other[1], call[1]
    return weight.shape[1:] == own.shape[1:] and weight.dtype == own.dtype and other[7] == call[7]


def _pays(call: LoraLinearCall, count: int) -> bool:
    """Whether so many layers like this one are better computed together. That saves some percent of the products' time
    (x is read once, its gradient is summed once, threads wait for one another once), and costs some tens of
    microseconds of Python: below MIN_WORK multiplications the layers are as fast one by one."""
    x, weight = call[0], call[1]
    if x.numel() * weight.shape[0] * count < MIN_WORK:
        return False
    if x.is_inference():
        return False  # it has no version, so that a change between two calls could not be seen
    return _packing.policy != "always"  # a layer by itself uses its packed weight


def _surroundings(x: Tensor) -> tuple[Any, ...]:
    """What must be as it was for a result to stand: x, whether and for whom gradients are recorded, our switch."""
    hooks = None if saved_tensors_hooks is None else saved_tensors_hooks(True)
    version = -1 if x.is_inference() else x._version
    return version, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks, _state.off()


def _is_as_in(module: Any, call: LoraLinearCall) -> bool:
    """Whether the layer is as it was for `call`: all of its state that code would change between the calls of two
    layers (scale, active adapters, merged or not, operands). Types, hooks and dropout are not looked at again."""
    if module.disable_adapters or module.merged:
        return False
    _, weight, bias, lora_a, lora_b, scalings, *_ = call
    children = module._modules
    base = children["base_layer"]._parameters
    if base.get("weight") is not weight or base.get("bias") is not bias:
        return False
    a_modules, b_modules, at = children["lora_A"]._modules, children["lora_B"]._modules, 0
    for name in module.active_adapters:
        if name not in a_modules:
            continue
        if (
            at == len(lora_a)
            or a_modules[name]._parameters.get("weight") is not lora_a[at]
            or b_modules[name]._parameters.get("weight") is not lora_b[at]
            or module.scaling[name] != scalings[at]
        ):
            return False
        at += 1
    return at == len(lora_a)

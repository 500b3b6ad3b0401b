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

from loraaccel import _packing
from loraaccel.integrations import peft
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import LoraLinearCall, lora_qkv_adapters

# The innermost attention module whose forward runs in this thread.
current: ContextVar[Scope | None] = ContextVar("loraaccel_group_scope", default=None)

# Block of each member, by its name in the attention module; the names in the order in which they are called.
Blocks = Mapping[str, tuple[str, ...]]


class Round:
    """One lora_qkv call: whose results were taken, and whose were not."""

    __slots__ = ("rest", "taken")

    def __init__(self, first: str, rest: Sequence[str]) -> None:
        self.taken, self.rest = [first], list(rest)


class _Ready(NamedTuple):
    """A result that waits for its member's call, and what that call must look like."""

    y: Tensor
    call: LoraLinearCall
    surroundings: tuple[Any, ...]
    round: Round


class Scope:
    """One call of an attention module's forward. Nothing of it outlives that call."""

    __slots__ = ("_blocks", "_called", "_owner", "_ready", "_state_of", "rounds")

    def __init__(self, owner: nn.Module, blocks: Blocks, state_of: Callable[[nn.Module], Any]) -> None:
        self._owner, self._blocks, self._state_of = owner, blocks, state_of
        self._called: set[str] = set()
        self._ready: dict[str, _Ready] = {}
        self.rounds: list[Round] = []

    def form_of(self, module: nn.Module, role: str, call: LoraLinearCall) -> Form | None:
        """What stands for this call of a member, None where it is computed by itself."""
        if self._owner._modules.get(role) is not module:
            return None
        ready = self._ready.pop(role, None)
        if ready is not None and _is_same(ready, call):
            self._called.add(role)
            ready.round.rest.remove(role)
            ready.round.taken.append(role)
            return _form([call], lambda: ready.y)
        calls = {role: call, **self._others(role, call)}
        self._called.add(role)
        if len(calls) == 1 or not _pays(calls):
            return None
        first, *rest = calls
        made = Round(first, rest)
        return _form(list(calls.values()), lambda: self._compute(calls, made))

    def _others(self, role: str, call: LoraLinearCall) -> dict[str, LoraLinearCall]:
        """The members after it in its block that have not been called, each with the call it would make with this x."""
        block = self._blocks.get(role, ())
        if role in self._called:  # another round
            self._called.difference_update(block)
        found = {}
        for name in block[block.index(role) + 1 :] if block else ():
            other = self._owner._modules.get(name)
            state = None if other is None else self._state_of(other)
            if other is None or state is None or state.reason or state.role != name or name in self._called:
                continue
            if "forward" in other.__dict__ or peft._has_hooks(other):
                continue  # something is to happen before or after its call
            theirs = peft.fused_call(other, call[0], False)
            if isinstance(theirs, tuple) and _goes_with(theirs, call):
                found[name] = theirs
        return found

    def _compute(self, calls: dict[str, LoraLinearCall], made: Round) -> Tensor:
        """The first member's result; those of the others wait. (verify computes twice.)"""
        ordered = list(calls.values())
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
        for name, y in zip(made.rest, outputs[1:], strict=True):
            self._ready[name] = _Ready(y, calls[name], _surroundings(calls[name]), made)
        return outputs[0]

    def close(self) -> None:
        """Drops what was not asked for."""
        self._ready.clear()


def _form(calls: list[LoraLinearCall], run: Callable[[], Tensor]) -> Form:
    dropout = any(p for c in calls for p in c[6])
    return Form("lora_qkv", run, dropout, tuple(a.dtype for c in calls for a in c[3]))


def _goes_with(other: LoraLinearCall, call: LoraLinearCall) -> bool:
    weight, own = other[1], call[1]
    return weight.shape[1:] == own.shape[1:] and weight.dtype == own.dtype and other[7] == call[7]


def _pays(calls: dict[str, LoraLinearCall]) -> bool:
    """False where the layers one by one are as fast, or where a change of x between two calls could not be seen."""
    x = next(iter(calls.values()))[0]
    if x.is_inference():  # (has no version)
        return False
    return _packing.policy != "always"  # a layer by itself uses its packed weight


def _surroundings(call: LoraLinearCall) -> tuple[Any, ...]:
    """What must not change between the computation of a result and its use, besides the operands' identity."""
    x, weight, bias, lora_a, lora_b, *_ = call
    tensors = (x, weight, *lora_a, *lora_b) if bias is None else (x, weight, bias, *lora_a, *lora_b)
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    versions = [None if t.is_inference() else t._version for t in tensors]
    return versions, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks


def _is_same(ready: _Ready, call: LoraLinearCall) -> bool:
    """Whether `call` asks for the result that is ready."""
    x, weight, bias, lora_a, lora_b, *numbers = ready.call
    return (
        x is call[0]
        and weight is call[1]
        and bias is call[2]
        and len(lora_a) == len(call[3])
        and all(a is b for a, b in zip((*lora_a, *lora_b), (*call[3], *call[4]), strict=True))
        and numbers == list(call[5:])
        and ready.surroundings == _surroundings(call)
    )

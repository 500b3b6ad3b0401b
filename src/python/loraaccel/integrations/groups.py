"""Attention modules whose q, k and v have LoRA: as a rule they share their input, and are computed together.

An attention module is recognised by what it owns: at least two patched linear layers among the names of one family. It
becomes an instance of a subclass of its class, as a LoRA module does (`patched`); its forward opens a `Scope` and runs
the module's own forward, with whatever attention processor is set.

Which members share an input is guessed from the call alone: all of a family, or k and v where the module has a second
input and no projections of their own for it. So a call that is made again, by either kind of activation checkpoint, is
computed as it was before. Where a guess is wrong the blocks are split, by what was seen; but not between a call and its
repetition, which must save the same tensors and draw the same dropout seeds.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from loraaccel import _state
from loraaccel.integrations import group_scope, patched
from loraaccel.integrations.group_scope import Blocks, Round, Scope, current

# Names of diffusers' attention modules: of their own input, and of a second one (joint attention).
FAMILIES = (
    ("to_q", "to_k", "to_v"),
    ("to_query", "to_key", "to_value"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("to_q_t", "to_k_t", "to_v_t"),
)
_QUERIES = ("to_q", "to_query")
_ADDED = ("add_k_proj", "to_k_t")
_CONTEXT = "encoder_hidden_states"
_VIEW_ERROR = "view size is not compatible"

ATTRIBUTE = "_loraaccel_group"  # of an attention module: its GroupState
_SUBCLASS = "_loraaccel_group_subclass"  # of its class


@dataclass
class GroupState:
    """What an attention module remembers."""

    name: str  # in the model that was patched
    members: tuple[tuple[str, ...], ...]  # by family
    # Of calls with one input (False) and with two (True).
    blocks: dict[bool, Blocks] = field(default_factory=dict)
    repeatable: int = 0  # wrongly guessed calls that a checkpoint will make again
    learned: dict[bool, Blocks] = field(
        default_factory=dict
    )  # from these, to be used when they have been made


def install(model: nn.Module) -> None:
    """Patches the attention modules of a model whose LoRA layers are patched. Not where torch cannot tell what a
    checkpoint will repeat: there each layer runs by itself."""
    if group_scope.saved_tensors_hooks is None:
        return
    for name, module in model.named_modules():
        members = _members(module)
        state = module.__dict__.get(ATTRIBUTE)
        if not members:
            remove(module)
            continue
        for role in (role for names in members for role in names):
            _state_of(module._modules[role]).role = role
        if state is not None and state.members == members:
            continue
        if state is None and "forward" in module.__dict__:
            _state.ungrouped["forward_replaced"] += 1
            continue
        module.__dict__[ATTRIBUTE] = GroupState(name, members)
        if not hasattr(type(module), patched.BASE):
            module.__class__ = grouped_class(type(module))


def remove(module: nn.Module) -> None:
    """Undoes install() for one module, where it was done."""
    if module.__dict__.pop(ATTRIBUTE, None) is not None and patched.is_ours(type(module)):
        module.__class__ = patched.base_class(module)


def _state_of(module: Any) -> Any:
    return None if module is None else patched.state_of(module)


def _members(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of its patched linear layers, of each family that has at least two."""
    if type(module).forward is nn.Module.forward:  # a container
        return ()
    found = (tuple(n for n in family if _is_member(module._modules.get(n))) for family in FAMILIES)
    return tuple(names for names in found if len(names) > 1)


def _is_member(module: Any) -> bool:
    state = _state_of(module)
    return state is not None and state.plain and (state.kinds is None or "lora_qkv" in state.kinds)


def grouped_class(base: type) -> type:
    """The subclass of `base` whose forward opens a scope; one for each class."""
    if _SUBCLASS not in base.__dict__:
        setattr(base, _SUBCLASS, _make_class(base))
    return base.__dict__[_SUBCLASS]


def _make_class(base: type) -> type:
    run: Any = base.forward  # type: ignore[attr-defined]
    parameters = list(inspect.signature(run).parameters)[1:]
    second = parameters.index(_CONTEXT) if _CONTEXT in parameters else None

    @functools.wraps(run)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(ATTRIBUTE)
        if state is None or torch.compiler.is_compiling() or _state.off():
            return run(self, *args, **kwargs)
        two = _has_two_inputs(self, second, args, kwargs)
        scope = Scope(self, _blocks(state, two), patched.state_of)
        token = current.set(scope)
        try:
            result = run(self, *args, **kwargs)
        except BaseException as error:
            _learn(state, two, [])  # (a checkpoint stops as soon as it has what it wants)
            if not _is_our_layout(error, scope):
                raise
            _state.ungrouped["layout"] += 1
            state.blocks = {False: {}, True: {}}
            if _repetition():  # what this call has saved and drawn so far is on a checkpoint's record
                raise
        else:
            _learn(state, two, scope.rounds)
            return result
        finally:
            current.reset(token)
            scope.close()
        # The host reads an output as one block of memory, which those of a group are not.
        return run(self, *args, **kwargs)

    return patched.subclass(base, forward, _new_grouped)


def _new_grouped(base: type) -> Any:
    """For copy and pickle: an empty object of the patched class."""
    return object.__new__(grouped_class(base))


def _has_two_inputs(
    module: nn.Module, second: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """True where k and v read a tensor of their own. second: where it stands among the positional arguments."""
    context = kwargs.get(_CONTEXT, args[second] if second is not None and len(args) > second else None)
    if not isinstance(context, Tensor) or any(module._modules.get(name) is not None for name in _ADDED):
        return False
    return context is not (args[0] if args else kwargs.get("hidden_states"))


def _blocks(state: GroupState, two: bool) -> Blocks:
    """The blocks for a call; at first guessed."""
    if two not in state.blocks:
        guessed = [tuple(n for n in names if not (two and n in _QUERIES)) for names in state.members]
        state.blocks[two] = {name: names for names in guessed for name in names}
    return state.blocks[two]


def _learn(state: GroupState, two: bool, rounds: list[Round]) -> None:
    """Splits the blocks some of whose results nobody took, as soon as no call can be repeated that was made before."""
    missed = [r for r in rounds if r.rest]
    if not missed and not state.repeatable:
        return
    if missed:
        _state.ungrouped["other_input"] += len(missed)
        blocks = dict(state.blocks[two])
        for r in missed:
            for part in (tuple(r.taken), tuple(r.rest)):
                blocks.update(dict.fromkeys(part, part))
        state.learned[two] = blocks
    again = _repetition()
    if missed or again < 0:
        state.repeatable = max(0, state.repeatable + again)
    if again <= 0 and not state.repeatable:
        state.blocks.update(state.learned)
        state.learned.clear()


def _repetition() -> int:
    """1 in a call that an activation checkpoint will make again, -1 in that other one, 0 in any other call."""
    if torch._C._current_graph_task_id() != -1:
        return -1
    if group_scope.saved_tensors_hooks is not None and group_scope.saved_tensors_hooks(True) is not None:
        return 1
    if torch.is_grad_enabled():
        return 0
    frame, wanted = sys._getframe(1), torch.utils.checkpoint.CheckpointFunction.forward.__code__
    while frame.f_back is not None:
        if frame.f_code is wanted:
            return 1
        frame = frame.f_back
    return 0


def _is_our_layout(error: BaseException, scope: Scope) -> bool:
    """True for torch's error about a view of strided memory, where the call can be made again."""
    return bool(scope.rounds) and isinstance(error, RuntimeError) and _VIEW_ERROR in str(error)

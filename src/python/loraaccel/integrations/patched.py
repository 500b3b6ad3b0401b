"""What patch() puts under a module: a subclass of its class whose forward asks at each call if an operator serves it.

A subclass, and not a `forward` attribute, because a class follows the object everywhere: shallow and deep copies,
data-parallel replicas and pickles of a patched module have a `self` of their own, and nothing refers back to it.
Name, module and documentation are those of the class it stands for; isinstance holds.
"""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from loraaccel import _layers, _state
from loraaccel._layers import current
from loraaccel.integrations import group_scope, peft, peft_forms
from loraaccel.integrations.hosts import HOSTS, Host
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import run_lora_linear

# verify: ||ours - own|| / ||own||. Both round every output to the dtype and sum in a different order; 16-bit eager code
# rounds up to four times. A wrong scale, adapter or transposition is off by far more.
VERIFY_BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class PatchState:
    """What a patched module remembers, in its `_loraaccel` attribute."""

    name: str  # in the model that was patched
    reason: str  # why it is never fused: excluded, unsupported, rolled back; empty where each call decides
    verify: int  # calls that are still to be compared
    kinds: frozenset[str] | None = None  # operators that may be used; None: all
    plain: bool = True  # a linear layer of PEFT for which "lora_linear" or "lora_qkv" may be used
    looks: int = 8  # times that it will still look for a re-entrant checkpoint around it
    host: Host = HOSTS[0]
    factored: bool = False  # a rebuilt weight may be computed from its factors
    role: str = ""  # its name in an attention module that computes its layers together (`groups`)
    roll_back: bool = False  # after an error in native code run the module's own forward, from then on
    fused: int = 0  # calls that an operator served
    own: Counter[str] = field(default_factory=Counter)  # calls of the module's own forward, by reason
    largest_error: float = 0.0  # that verify has seen


ATTRIBUTE = "_loraaccel"  # of a patched module: its PatchState
BASE = "_loraaccel_base"  # of a patched class: the class it stands for
_SUBCLASS = "_loraaccel_subclass"  # of that class: the patched one


def state_of(module: nn.Module) -> PatchState | None:
    """The state of a patched module, None for any other."""
    return module.__dict__.get(ATTRIBUTE)


def base_class(module: nn.Module) -> type:
    """The module's class as it is without us."""
    return getattr(type(module), BASE, type(module))


def is_ours(cls: type) -> bool:
    """True for a class that patched_class() made, not for one that somebody derived from it (parametrize, FSDP2)."""
    return BASE in cls.__dict__


def install(module: nn.Module, state: PatchState) -> None:
    """Patches a module; one that is patched gets the new state."""
    module.__dict__[ATTRIBUTE] = state
    if not hasattr(type(module), BASE):
        module.__class__ = patched_class(type(module))
        state.host.rebind(module)


def remove(module: nn.Module) -> bool:
    """Undoes install(); False where the module was not patched. A class derived from ours stays: without the state
    its forward is the module's own."""
    state = state_of(module)
    if state is None:
        return False
    del module.__dict__[ATTRIBUTE]
    if is_ours(type(module)):
        module.__class__ = base_class(module)
        state.host.rebind(module)
    return True


def patched_class(base: type) -> type:
    """The subclass of `base` whose forward is ours; one for each class, and living as long as that."""
    if _SUBCLASS not in base.__dict__:
        setattr(base, _SUBCLASS, _make_class(base))
    return base.__dict__[_SUBCLASS]


def _make_class(base: type) -> type:
    @functools.wraps(base.forward)  # type: ignore[attr-defined]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(ATTRIBUTE)
        if state is None:  # somebody kept this bound method and called it after unpatch
            return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        if kwargs:
            args, kwargs = _positional(args, kwargs)
        compiling = torch.compiler.is_compiling()
        form = _form_of(self, state, args, kwargs, compiling)
        if isinstance(form, Form):
            if compiling:
                return form.run()
            drawn = _generators(form) if state.roll_back and form.dropout else None
            try:
                if state.verify <= 0 or _verified(self, state, args, kwargs, form):
                    if state.looks > 0 and self.training and not torch.is_grad_enabled():
                        _look_for_lost_gradients(state)
                    y = _run(state, form)
                    _state.fused[form.kind] += 1
                    state.fused += 1
                    return y
            except (RuntimeError, TypeError, ValueError) as error:  # (a checkpoint stops by another one)
                if not _rolled_back(state, form, args, error):
                    raise
                if drawn is not None:  # the module's own forward draws the masks that the operator had
                    torch.set_rng_state(drawn[0])
                    if drawn[1] is not None:
                        random.setstate(drawn[1])
            form = state.reason
        if not compiling and state.host.counted:
            _state.fallback[form] += 1
            state.own[form] += 1
        return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return subclass(base, forward, _new_patched)


def subclass(base: type, forward: Callable[..., Any], new: Callable[[type], Any]) -> type:
    """A subclass of `base` with another forward, by the same name. new(base) makes an empty object of it, for copy and
    pickle."""

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = base.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        return (new, (base,), *reduced[2:]) if is_ours(type(self)) else reduced

    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {**same, "forward": forward, "__reduce_ex__": reduce_ex, BASE: base}
    return type(base.__name__, (base,), members)


def _run(state: PatchState, form: Form) -> Any:
    outer, current.layer = current.layer, (state, form.kind)
    try:
        return form.run()
    finally:
        current.layer = outer


def _new_patched(base: type) -> Any:
    """For copy and pickle: an empty object of the patched class."""
    return object.__new__(patched_class(base))


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call without arguments that say nothing: `x=` by name, `adapter_names=None`."""
    kwargs = {k: v for k, v in kwargs.items() if not (k == "adapter_names" and v is None)}
    if not args and "x" in kwargs:
        args = (kwargs.pop("x"),)
    return args, kwargs


def _form_of(
    module: nn.Module, state: PatchState, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool
) -> Form | str:
    """What stands for this call, or the reason code for the module's own forward."""
    if state.reason:
        return state.reason
    plain = state.plain and len(args) == 1 and not kwargs
    scope = group_scope.current.get() if plain and state.role and not compiling else None
    waiting = None if scope is None else scope.ready_form(module, state.role, args[0])
    if waiting is not None:
        return waiting
    call = peft.fused_call(module, args[0], compiling) if plain else ""
    if isinstance(call, tuple):  # the common case of PEFT, by the shortest way
        together = None if scope is None else scope.first_form(module, state.role, call)
        if together is not None:
            return together
        if state.kinds is not None and "lora_linear" not in state.kinds:
            return "kind_excluded"
        dtypes = tuple(a.dtype for a in call[3]) if state.verify > 0 else ()
        return Form("lora_linear", functools.partial(run_lora_linear, call), any(call[6]), dtypes)
    if call and call not in peft_forms.SECOND_LOOK:
        return call
    if not state.factored and state.host.rebuilds(module) and not _state.off():
        return "rebuilt"
    form = state.host.form_of(module, args, kwargs, compiling)
    if isinstance(form, Form) and state.kinds is not None and form.kind not in state.kinds:
        return "kind_excluded"
    return form


def _generators(form: Form) -> tuple[Tensor, Any]:
    """The states of what masks are drawn with: torch's generator (1 us), and Python's where it is used (20 us)."""
    return torch.get_rng_state(), random.getstate() if form.draws_in_python else None


def _rolled_back(state: PatchState, form: Form, args: tuple[Any, ...], error: Exception) -> bool:
    """After an error in native code: names the layer in it, or warns and gives the layer up for good (True)."""
    where = f"in {state.name or 'a LoRA module'} ({form.kind}, x {_layers.shapes_of(args)})"
    if not state.roll_back:
        _layers.say_where(error, where)
        return False
    _layers.give_up(state, where, error, stacklevel=3)
    return True


def _verified(
    module: nn.Module, state: PatchState, args: tuple[Any, ...], kwargs: dict[str, Any], form: Form
) -> bool:
    """Compares the operator's output with the module's own, without gradients; False where they differ too much.
    A call with dropout is compared where both draw the same masks, and not counted elsewhere."""
    if form.dropout and not form.replays:
        return True
    state.verify -= 1
    with torch.no_grad():
        generator = torch.get_rng_state() if form.dropout else None
        y = form.run()
        if generator is not None:
            torch.set_rng_state(generator)
        expected = base_class(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
        if generator is not None:
            torch.set_rng_state(generator)
        error = _relative_error(y.double(), expected.double())
    state.largest_error = max(state.largest_error, error)
    dtypes = [y.dtype, *form.dtypes]
    if torch.is_autocast_enabled("cpu"):
        dtypes.append(torch.get_autocast_dtype("cpu"))
    bound = max(VERIFY_BOUND[t] for t in dtypes)
    if y.dtype == expected.dtype and error <= bound:
        return True
    state.reason = "verify_failed"
    warnings.warn(
        f"loraaccel: verify found a relative error of {error:.2e} in {state.name}, more than {bound:.2e}; "
        "this layer runs its own forward from now on.",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def _relative_error(y: Tensor, expected: Tensor) -> float:
    """||y - expected|| / ||expected|| over the entries that are finite in `expected`; there y must be finite too."""
    finite = expected.isfinite()
    if not finite.all():
        y, expected = y[finite], expected[finite]
    error, size = float((y - expected).norm()), float(expected.norm())
    return 0.0 if error == 0.0 else error / max(size, 1e-300)


def _look_for_lost_gradients(state: PatchState) -> None:
    """A re-entrant checkpoint none of whose inputs requires grad gives the adapters inside it no gradient, and training
    goes on without them. Such a block runs without grad mode, under CheckpointFunction.forward: warn once a module."""
    state.looks -= 1  # walking the stack costs microseconds
    wanted = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not wanted:
        frame = frame.f_back
    if frame.f_code is not wanted:
        return
    state.looks = 0
    inputs = frame.f_locals.get("args", ())
    if not any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        warnings.warn(
            f"loraaccel: {state.name} runs in a re-entrant checkpoint none of whose inputs requires grad: its adapter "
            "gets no gradient. Use checkpoint(use_reentrant=False), or model.enable_input_require_grads().",
            RuntimeWarning,
            stacklevel=3,
        )

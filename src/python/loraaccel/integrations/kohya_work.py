"""What a trainer's objects do at each step around the network, and how one such method gives way to ours.

A method is recognised as a LoRA module's class is: it may use only names that we know, and run on tiny objects it must
give what ours gives. What it then does is planned without effects, so that whatever cannot be taken over, or fails, is
still the host's to do.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel import _state
from loraaccel.integrations.kohya_formula import names_in

# Where ours was compared with the host's. Nothing below depends on the device.
DEVICES = ("cpu",)


class Compared(NamedTuple):
    """The host's own method, done on copies."""

    error: Callable[[Any], float]  # of our result and effects, relative, against the host's
    bound: float
    adopt: Callable[[], Any]  # puts the host's results in the place of ours, and returns what it returned


class Plan(NamedTuple):
    """A call, computed as far as that has no effects."""

    run: Callable[[], Any]
    compare: Callable[[Callable[..., Any]], Compared]  # runs the host's function; to be called before run


class Task(NamedTuple):
    """One method of a host's object that ours can stand for."""

    name: str  # as reports say it
    method: str
    follows: Callable[[Any], bool]  # a class: its method does what we do
    # The call (object, arguments): a plan, or a reason code; empty where there is nothing to do.
    plan: Callable[[Any, tuple[Any, ...]], Plan | str]
    names: tuple[str, ...] = ()  # of its arguments
    repeatable: bool = False  # a run that failed has had no effects: the host's method can still do it
    # A class with such a method: is there anything for us to do?
    present: Callable[[Any], bool] = lambda _: True


@dataclass
class Record:
    """What became of one task in a run."""

    verify: int  # calls that are still to be compared
    reason: str = ""  # why it was given up
    fused: int = 0  # calls that ours served
    own: Counter[str] = field(default_factory=Counter)  # calls of the host's own method, by reason
    largest_error: float = 0.0  # that verify has seen


@dataclass(eq=False)
class HostWork:
    """The tasks of one run."""

    verify: int = 0
    roll_back: bool = True  # after an error of ours the host's own method, from then on
    records: dict[str, Record] = field(default_factory=dict)
    trainers: list[Any] = field(default_factory=list)  # whose methods were taken over

    def record(self, task: str) -> Record:
        if task not in self.records:
            self.records[task] = Record(self.verify)
        return self.records[task]

    def call(self, task: Task, owner: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """owner.method(*args, **kwargs), by us or by the method of `cls`, the owner's class without us."""

        def own() -> Any:
            return getattr(cls, task.method)(owner, *args, **kwargs)

        plan = "switched_off" if _state.off() else self._planned(task, owner, cls, args, kwargs)
        if isinstance(plan, str):
            if plan:
                self.record(task.name).own[plan] += 1
            return own()
        record = self.record(task.name)
        if record.verify > 0:
            return _verified(task, record, plan, getattr(cls, task.method))
        try:
            result = plan.run()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            if not task.repeatable:
                raise
            self._failed(task, cls, error)
            record.own["native_error"] += 1
            return own()
        record.fused += 1
        return result

    def _planned(
        self, task: Task, owner: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan | str:
        known = self.records.get(task.name)
        if known is not None and known.reason:
            return known.reason
        for name in task.names[len(args) :]:
            if name in kwargs:
                args = (*args, kwargs[name])
        if len(args) != len(task.names) or not set(kwargs) <= set(task.names):
            return "extra_arguments"
        if not task.follows(cls):
            return "unknown_forward"
        try:
            return task.plan(owner, args)
        except (RuntimeError, TypeError, ValueError) as error:
            self._failed(task, cls, error)
            return "native_error"

    def _failed(self, task: Task, cls: Any, error: Exception) -> None:
        """Raises an error of ours, or gives the task up with a warning."""
        if not self.roll_back:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"loraaccel: in {task.name} ({cls.__name__}.{task.method})")
            raise error
        self.record(task.name).reason = "native_error"
        warnings.warn(
            f"loraaccel: an error in {task.name}; {cls.__name__}.{task.method} runs as it is from now on: {error}",
            RuntimeWarning,
            stacklevel=5,
        )


def _verified(task: Task, record: Record, plan: Plan, host: Callable[..., Any]) -> Any:
    record.verify -= 1
    expected = plan.compare(host)
    result = plan.run()
    error = expected.error(result)
    record.largest_error = max(record.largest_error, error)
    if error <= expected.bound:
        record.fused += 1
        return result
    record.reason = "verify_failed"
    record.own["verify_failed"] += 1
    warnings.warn(
        f"loraaccel: verify found a relative error of {error:.2e} in {task.name}, more than {expected.bound:.2e}; "
        f"{task.method} runs as it is from now on.",
        RuntimeWarning,
        stacklevel=4,
    )
    return expected.adopt()


# ---- proofs ----------------------------------------------------------------------------------------------------------

_NO_GRAD = torch.no_grad()(lambda: None).__code__


def uses_only(cls: Any, method: str, names: frozenset[str]) -> bool:
    """True for a plain method, under torch.no_grad() or not, that uses no other names and nothing from around it."""
    function = getattr(cls, method, None)
    if isinstance(function, FunctionType) and function.__code__ is _NO_GRAD:
        function = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    return names_in(function.__code__) <= names


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖ over what is finite in `expected`; 1 where the rest is not the same."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return 1.0
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return 1.0
    found, expected = found[finite].double(), expected[finite].double()
    error, size = float((found - expected).norm()), float(expected.norm())
    return 0.0 if error == 0.0 else error / max(size, 1e-300)


def why_not_tensors(*tensors: Any) -> str:
    """Reason code for tensors that are not plain, dense, floating-point and on a device that we know."""
    for t in tensors:
        if not isinstance(t, Tensor) or type(t) not in (Tensor, torch.nn.Parameter):
            return "tensor_subclass"
        if t.layout != torch.strided:
            return "tensor_subclass"
        if t.device.type not in DEVICES:
            return "device"
        if not t.is_floating_point():
            return "dtype"
    return ""

"""What kohya's trainer asks of its network, and does with it, at each step: taken over behind the same switch as the
layers, and given back.

A network becomes an instance of a subclass of its class, of the same name, whose methods ask at each call if ours can
stand for them (kohya_work.py). Copies and pickles of it are the host's networks. The trainer's own methods for the mean
of gradients and for the factors of losses are hidden by attributes of the object: its class may be the script's own,
which no import shows.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from torch import nn

from loraaccel import _state
from loraaccel.integrations import (
    kohya_ggpo,
    kohya_loss_factors,
    kohya_max_norm,
    kohya_reduce,
    kohya_save,
)
from loraaccel.integrations.kohya_work import HostWork, Task

TRAINER_TASKS = (kohya_reduce.TASK, kohya_loss_factors.TASK)
TASKS = (kohya_max_norm.TASK, kohya_ggpo.GRADS, kohya_ggpo.NORMS, kohya_save.TASK)

_ATTRIBUTE = "_loraaccel_network"  # of a network that was taken over: its HostWork
_BASE = "_loraaccel_network_base"  # of a class that _class_for() made: the class it stands for
_SUBCLASS = "_loraaccel_network_subclass"  # of that class: the one that stands for it


def take_over(network: nn.Module, work: HostWork) -> bool:
    """Puts ours in the place of the network's methods that TASKS names, as far as its class has them; what cannot be
    proved stays the host's, call by call. False where there is nothing to take, or everything is switched off."""
    if _state.SWITCHED_OFF or _ATTRIBUTE in network.__dict__ or not _tasks_of(type(network)):
        return False
    network.__dict__[_ATTRIBUTE] = work
    if not hasattr(type(network), _BASE):
        network.__class__ = _class_for(type(network))
    return True


def take_over_trainer(trainer: Any, work: HostWork) -> bool:
    """The same for the trainer's methods that TRAINER_TASKS names."""
    cls = type(trainer)
    tasks = [
        task for task in TRAINER_TASKS if callable(getattr(cls, task.method, None)) and task.present(cls)
    ]
    if _state.SWITCHED_OFF or any(task.method in vars(trainer) for task in tasks):
        return False
    for task in tasks:
        setattr(trainer, task.method, _trainer_method(trainer, task, work))
    work.trainers.append(trainer)
    return True


def _trainer_method(trainer: Any, task: Task, work: HostWork) -> Any:
    @functools.wraps(getattr(type(trainer), task.method))
    def method(*args: Any, **kwargs: Any) -> Any:
        return work.call(task, trainer, type(trainer), args, kwargs)

    return method


def give_back(network: nn.Module) -> bool:
    """Undoes take_over(), and take_over_trainer() of the same run; False where the network was not taken over."""
    work = network.__dict__.pop(_ATTRIBUTE, None)
    if work is None:
        return False
    if _BASE in type(network).__dict__:  # (not in a class that somebody derived from it)
        network.__class__ = type(network).__dict__[_BASE]
    while work.trainers:
        trainer = work.trainers.pop()
        for task in TRAINER_TASKS:
            vars(trainer).pop(task.method, None)
    return True


def trainer_above(frame: FrameType | None) -> Any:
    """The object, of those whose methods are running, whose class has a method for the mean of gradients; or None."""
    while frame is not None:
        if frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if callable(getattr(type(owner), kohya_reduce.TASK.method, None)):
                return owner
        frame = frame.f_back
    return None


def applied(network: nn.Module, work: HostWork) -> None:
    """For the launcher: a network has been applied to its model by a trainer, which is still at it."""
    take_over(network, work)
    trainer = trainer_above(sys._getframe(1))
    if trainer is not None:
        take_over_trainer(trainer, work)


def _tasks_of(cls: type) -> list[Task]:
    return [task for task in TASKS if callable(getattr(cls, task.method, None))]


def _class_for(base: type) -> type:
    if _SUBCLASS not in base.__dict__:
        setattr(base, _SUBCLASS, _make_class(base))
    return base.__dict__[_SUBCLASS]


def _make_class(base: type) -> type:
    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = base.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        if _BASE not in type(self).__dict__:
            return reduced
        state = {key: value for key, value in reduced[2].items() if key != _ATTRIBUTE}
        return (_new, (base,), state, *reduced[3:])

    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {task.method: _method(base, task) for task in _tasks_of(base)}
    return type(base.__name__, (base,), {**members, "__reduce_ex__": reduce_ex, _BASE: base})


def _new(base: type) -> Any:
    """For copy and pickle: an empty object of the host's class."""
    return object.__new__(base)


def _method(base: type, task: Task) -> Any:
    host = getattr(base, task.method)

    @functools.wraps(host)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        work = self.__dict__.get(_ATTRIBUTE)
        if work is None:  # somebody kept this bound method and called it after give_back()
            return host(self, *args, **kwargs)
        return work.call(task, self, base, args, kwargs)

    return method

"""Which LoRA module of a patched model is at work, so that an error in its backward pass, which knows only tensors, can
say so, and the launcher's auto mode can give that module up."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T", bound=type)
# What an autograd.Function's backward pass is in plain torch; None where it has no such form for this call.
InTorch = Callable[..., Any]


class Layer(Protocol):
    """What is remembered of a module (`patched.PatchState`)."""

    name: str  # in the model
    reason: str  # why it is never fused; empty where it may be
    roll_back: bool  # after an error in native code its own forward runs, from then on


class _Current(threading.local):
    layer: tuple[Layer, str] | None = None  # and the operator's kind, in this thread


current = _Current()


def say_where(error: Exception, where: str) -> None:
    """Adds a line to the error's text."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"loraaccel: {where}")
    else:
        error.args = (f"{error}\nloraaccel: {where}",)


def give_up(layer: Layer, where: str, error: Exception, stacklevel: int) -> None:
    layer.reason = "native_error"
    warnings.warn(
        f"loraaccel: an error {where}; this layer runs its own forward from now on: {error}",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def shapes_of(values: Any) -> str:
    return ", ".join(f"{list(t.shape)} {t.dtype}" for t in values if isinstance(t, Tensor))


def says_layer(function: T) -> T:
    """Decorates an autograd.Function: an error in its backward pass names the layer whose forward pass it was. Where
    that is to be given up and the class has `backward_in_torch`, the gradients come from there."""
    cls: Any = function
    in_torch = getattr(cls, "backward_in_torch", None)
    cls.forward = staticmethod(remembering(cls.forward))
    cls.backward = staticmethod(naming(cls.backward, in_torch))
    return function


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def remember(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.layer = current.layer
        return forward(ctx, *args, **kwargs)

    return remember


def naming(backward: Callable[..., Any], in_torch: InTorch | None = None) -> Callable[..., Any]:
    @functools.wraps(backward)
    def named(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except (RuntimeError, TypeError, ValueError) as error:
            if ctx.layer is None:
                raise
            layer, kind = ctx.layer
            place = f"the backward pass of {layer.name or 'a LoRA module'}"
            where = f"in {place} ({kind}, gradient {shapes_of(grads)})"
            computed = in_torch(ctx, *grads) if in_torch is not None and layer.roll_back else None
            if computed is None:
                say_where(error, where)
                raise
            give_up(layer, where, error, stacklevel=2)
            return computed

    return named

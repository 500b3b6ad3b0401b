"""The native operators by name, whichever of two ways they come into this process: registered with torch, or called
directly where torch is older. See `_native.torch_path`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from loraaccel import _layers, _native, _runtime

F = TypeVar("F", bound=Callable[..., Any])

_native.load_operators()
_runtime.apply_num_threads()
_runtime.apply_choice(torch.__version__)

REGISTERED = _native.torch_path(torch.__version__) == "operators"


def operator(name: str) -> Any:
    """What computes it: positional arguments as in its schema (src/cpp/torch/register.cpp)."""
    if REGISTERED:
        return getattr(torch.ops.loraaccel, name).default
    from loraaccel import _pointers

    return _pointers.operator(name)


def register_fake(name: str) -> Callable[[F], F]:
    """A decorator: the function gives the operator's outputs for tensors without memory."""

    def register(function: F) -> F:
        if REGISTERED:
            torch.library.register_fake(f"loraaccel::{name}")(function)
        else:
            operator(name).fake = function
        return function

    return register


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
) -> None:
    """The formula for whoever calls the operator itself: compiled code, direct users of torch.ops, operators whose
    eager path has no autograd.Function."""
    if setup_context is not None:
        backward, setup_context = _layers.naming(backward), _layers.remembering(setup_context)
    if REGISTERED:
        torch.library.register_autograd(f"loraaccel::{name}", backward, setup_context=setup_context)
    else:
        operator(name).formula = backward, setup_context


def register_autocast(name: str, function: Callable[..., Any]) -> None:
    """What direct calls of torch.ops under autocast go through; the other paths do the same before the call."""
    if REGISTERED:
        _library.impl(name, function, "AutocastCPU")


if REGISTERED:
    _library = torch.library.Library("loraaccel", "IMPL")

"""Frozen linear layers without LoRA, for patch(frozen=True): the gradient of their input by our kernels.

The forward pass stays torch's, bit for bit: an operator without adapters borrows torch's own product. dx = dy W goes
through `lora_linear_backward`, which reads W in the order in which it lies; in float16 torch has no fast product for
that. What is not ours is not counted: it is no LoRA layer that falls back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from loraaccel import _state
from loraaccel._autograd import autocast_dtype
from loraaccel.integrations import patched, peft
from loraaccel.integrations.hosts import Host, host_of
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import run_lora_linear

KIND = "frozen_linear"
_TYPES = (torch.float32, torch.float16)  # in bfloat16 torch's own product is as fast


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """torch's own linear layers with a frozen weight, but for those inside a LoRA module, which computes with them."""
    owned = _inside_lora(model)
    for name, module in model.named_modules():
        if kind_of(module) and id(module) not in owned:
            yield name, module


def install(model: nn.Module) -> None:
    for name, module in modules(model):
        if patched.state_of(module) is None and "forward" not in module.__dict__:
            patched.install(module, patched.PatchState(name, "", 0, None, plain=False, host=HOST))


def release(model: nn.Module) -> None:
    """Gives back the layers that have got LoRA since: a LoRA module wants torch's own class in its frozen half."""
    ours = [m for m in model.modules() if (state := patched.state_of(m)) is not None and state.host is HOST]
    owned = _inside_lora(model) if ours else ()
    for module in ours:
        if id(module) in owned:
            patched.remove(module)


def _inside_lora(model: nn.Module) -> set[int]:
    return {id(child) for module in model.modules() if host_of(module) for child in module.modules()}


def kind_of(module: nn.Module) -> str | None:
    return KIND if patched.base_class(module) is nn.Linear and not _trained(module) else None


def why_not_module(module: nn.Module) -> str:
    weight, bias = peft._weight_and_bias(module)
    return peft._why_not_weights(weight, bias, [], []) or ("" if weight.dtype in _TYPES else "dtype")


def form_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Form | str:
    """What stands for a call; else why torch's own forward runs (in a word, which nobody counts)."""
    if _state.off():
        return "switched_off"
    if nn.Linear.forward is not peft._linear_forward:  # somebody replaced it for all linear layers
        return "forward_replaced"
    if compiling:
        return "compiled"
    if len(args) != 1 or kwargs:
        return "extra_arguments"
    if peft.transformed():
        return "transform"
    if _trained(module):
        return "trained"
    x = args[0]
    if not torch.is_grad_enabled() or not isinstance(x, Tensor) or not x.requires_grad:
        return "no_gradient"
    if type(x) not in peft._PLAIN or not peft._dense(x):
        return "tensor_subclass"
    reason = why_not_module(module)
    if reason:
        return reason
    weight, bias = peft._weight_and_bias(module)
    if not x.is_cpu:
        return "device"
    if x.dtype != weight.dtype or autocast_dtype(x, weight) not in (None, x.dtype):
        return "dtype"
    if not x.dim() or x.shape[-1] != weight.shape[1]:
        return "shape"
    return Form(KIND, functools.partial(run_lora_linear, (x, weight, bias, [], [], [], [], None)), False, ())


def _trained(module: nn.Module) -> bool:
    weight, bias = peft._weight_and_bias(module)
    return weight.requires_grad or (bias is not None and bias.requires_grad)


HOST = Host("frozen", kind_of, why_not_module, form_of, counted=False)

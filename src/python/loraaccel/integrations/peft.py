"""PEFT's LoRA layers: which of them an operator can stand for, and with what operands.

Semantics of peft.tuners.lora.layer.Linear.forward, in the order of its tests. Nothing of PEFT is imported: where it is
not loaded there are no such layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from loraaccel import _state
from loraaccel._autograd import autocast_dtype
from loraaccel._checks import scaled_factors
from loraaccel.ops import LoraLinearCall

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PLAIN = (nn.Parameter, Tensor)
_STRIDED = torch.strided
_linear_forward = nn.Linear.forward  # some tools replace it for everybody


def _look_at_each() -> bool:
    """For torch 2.4, which has no function for it."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


# True where somebody has registered hooks for every module.
has_global_hook: Callable[[], bool] = getattr(torch_module, "_has_any_global_hook", _look_at_each)


def kind_of(module: nn.Module) -> str | None:
    """The operator's name for a LoRA layer, its class name where no operator exists, None for anything else."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    if layer is None or not isinstance(module, layer.LoraLayer):
        return None
    from loraaccel.integrations import peft_forms

    own = getattr(type(module), "_loraaccel_base", type(module))  # as in integrations.patched.base_class
    return peft_forms.kind_of_class(own) or own.__name__


def why_not_module(module: nn.Module) -> str:
    """Reason code for the module as it stands, whatever x will be; empty where it can be fused."""
    from loraaccel.integrations import peft_forms

    if kind_of(module) != "lora_linear":
        return peft_forms.why_not_module(module)
    operands = _operands(module, compiling=False)
    if not isinstance(operands, str):
        return _why_not_weights(*operands[:4])
    return peft_forms.why_not_module(module) if operands in peft_forms.SECOND_LOOK else operands


def transformed() -> bool:
    """True inside torch.func, forward-mode differentiation and torch.jit tracing."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def fused_call(module: nn.Module, x: Any, compiling: bool) -> LoraLinearCall | str:
    """The operator's arguments for this call, or the reason code for running the module's own forward.

    It runs at every call: 5 us where nothing is unusual, of which each look at a tensor's attribute is 50 ns.
    """
    if _state.off():
        return "switched_off"
    if not compiling and transformed():
        return "transform"
    operands = _operands(module, compiling)
    if isinstance(operands, str):
        return operands
    weight, bias, lora_a, lora_b, scalings, dropouts = operands
    if not isinstance(x, Tensor) or (type(x) not in _PLAIN and not compiling) or not _dense(x):
        return "tensor_subclass"
    reason = _why_not_weights(weight, bias, lora_a, lora_b, compiling)
    if reason:
        return reason
    if not (x.is_cpu and weight.is_cpu) and x.device != weight.device:
        return "device"
    cast = autocast_dtype(x, weight)
    dtype = x.dtype
    if cast is None and dtype != weight.dtype:
        return "dtype"
    if cast is not None and cast not in _FLOATS:
        return "dtype"
    keeps_input = cast is None and not getattr(module, "cast_input_dtype_enabled", True)
    if keeps_input and any(a.dtype != dtype for a in lora_a):
        return "dtype"  # PEFT does not cast x here, and raises
    return x, weight, bias, lora_a, lora_b, scalings, dropouts, cast


def _operands(
    module: Any, compiling: bool
) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor], list[float], list[float]] | str:
    """weight, bias, and A, B, scaling, dropout in force of each active adapter; or a reason code."""
    if module.disable_adapters:
        return "disabled"
    if module.merged:
        return "merged"
    # Children and parameters by their dictionaries: nn.Module's attribute look-up costs as much as the operator.
    children = module._modules
    base = children["base_layer"]
    if type(base) is not nn.Linear or "forward" in base.__dict__ or nn.Linear.forward is not _linear_forward:
        return "base_class"
    if _has_hooks(base) or (not compiling and has_global_hook()):
        return "hooks"
    lora_a: list[Tensor] = []
    lora_b: list[Tensor] = []
    scalings: list[float] = []
    dropouts: list[float] = []
    variants = getattr(module, "lora_variant", None)
    dora = module.__dict__.get("use_dora")  # PEFT before 0.16 has no variants
    a_modules, b_modules = children["lora_A"]._modules, children["lora_B"]._modules
    dropout_modules = children["lora_dropout"]._modules
    for name in module.active_adapters:
        if name not in a_modules:
            continue
        if (variants and name in variants) or (dora and dora.get(name)):
            return "variant"
        a, b, dropout, scaling = a_modules[name], b_modules[name], dropout_modules[name], module.scaling[name]
        if (
            type(a) is not nn.Linear
            or type(b) is not nn.Linear
            or "forward" in a.__dict__
            or "forward" in b.__dict__
        ):
            return "adapter_class"
        a_weight, a_bias = _weight_and_bias(a)
        b_weight, b_bias = _weight_and_bias(b)
        if a_bias is not None or b_bias is not None:
            return "lora_bias"
        if _has_hooks(a) or _has_hooks(b) or _has_hooks(dropout):
            return "hooks"
        p = 0.0
        if type(dropout) is nn.Dropout:
            p = float(dropout.p) if dropout.training else 0.0
        elif type(dropout) is not nn.Identity:
            return "dropout_class"
        if "forward" in dropout.__dict__:
            return "dropout_class"
        if isinstance(scaling, Tensor):
            # A hot-swappable model keeps it in a tensor, so that compiled code need not be compiled again for another.
            if scaling.numel() != 1 or scaling.device.type != "cpu" or scaling.requires_grad:
                return "scaling_type"
            if not compiling:
                scaling = scaling.item()
        if compiling:
            a_weight, b_weight, scaling = scaled_factors(a_weight, b_weight, scaling)
        elif not math.isfinite(scaling):
            return "scaling_type"
        lora_a.append(a_weight)
        lora_b.append(b_weight)
        scalings.append(float(scaling))
        dropouts.append(p)
    if not lora_a:
        return "no_active_adapter"
    if not any(scalings):
        return "zero_scaling"  # exactly the frozen layer's output, bit for bit, is what that is for
    weight, bias = _weight_and_bias(base)
    return weight, bias, lora_a, lora_b, scalings, dropouts


def _weight_and_bias(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """By the dictionary of parameters, else as attributes: sharding and pruning tools keep plain tensors there."""
    parameters = linear._parameters
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return linear.weight, linear.bias


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _dense(t: Tensor) -> bool:
    return t.layout is _STRIDED and not t.is_nested


def _why_not_weights(
    weight: Tensor, bias: Tensor | None, lora_a: list[Tensor], lora_b: list[Tensor], compiling: bool = False
) -> str:
    """Reason code for the types and places of the weights; empty where the operator takes them."""
    dtype = weight.dtype
    on_cpu = weight.is_cpu
    if not on_cpu and not weight.is_meta:
        return "device"
    for t in (weight, *lora_a, *lora_b) if bias is None else (weight, bias, *lora_a, *lora_b):
        if (type(t) not in _PLAIN and not compiling) or t.layout is not _STRIDED or t.is_nested:
            return "tensor_subclass"
        if not (on_cpu and t.is_cpu) and t.device != weight.device:
            return "device"
    if dtype not in _FLOATS or (bias is not None and bias.dtype != dtype):
        return "dtype"
    for a, b in zip(lora_a, lora_b, strict=True):
        a_dtype = a.dtype
        if b.dtype != a_dtype:
            return "dtype"
        if a_dtype != dtype and (a_dtype not in _FLOATS or torch.float64 in (a_dtype, dtype)):
            return "dtype"
    return ""

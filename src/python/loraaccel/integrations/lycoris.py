"""LyCORIS's LoCon, LoHa and LoKr modules: which calls the operators serve, and how they get into the host's place.

A module in bypass mode adds a factored update to the frozen layer's output, and is served as it is. One outside it
makes W' at each call and multiplies x by W' - W: computing that from the factors rounds in other places (and loses
less), so it is for those who ask for it, `patch(model, factored=True)`.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from loraaccel._autograd import autocast_dtype
from loraaccel.integrations import kohya, lycoris_updates, peft
from loraaccel.integrations.lycoris_formula import (
    Facts,
    Mode,
    algo_of,
    facts_of,
    is_class,
    mode_of,
    output_dropout,
    output_type,
)
from loraaccel.integrations.lycoris_updates import Call
from loraaccel.integrations.peft_forms import Form

__all__ = ["form_of", "is_reachable", "kind_of", "rebind", "rebuilds", "why_not_module"]

# What an object must have, since the proof is about its class and made on an object that has everything.
_COMMON = """
module_type op kw_dict shape org_module org_forward multiplier scale scalar tucker bypass_mode wd rank_dropout
rank_dropout_scale module_dropout
"""
_FACTORS = {
    "locon": "lora_down lora_up lora_dim dropout",
    "loha": "hada_w1_a hada_w1_b hada_w2_a hada_w2_b drop",
    "lokr": "use_w1 use_w2 drop",
}
_NEEDED = {algo: (*_COMMON.split(), *names.split()) for algo, names in _FACTORS.items()}
_OPERATORS = {"locon": "lora", "loha": "loha", "lokr": "lokr"}


def kind_of(module: nn.Module) -> str | None:
    """The operator's name for a module of this kind, its class name where there is none, None for anything else."""
    own = kohya._own_class(module)
    if not is_class(own):
        return None
    stem = _OPERATORS.get(algo_of(own))
    layer = {"linear": "linear", "conv2d": "conv2d"}.get(getattr(module, "module_type", ""))
    return own.__name__ if stem is None or layer is None else f"{stem}_{layer}"


def rebuilds(module: nn.Module) -> bool:
    """True for a module that makes the change of the weight at each call, whose factored form rounds elsewhere."""
    return bool(algo_of(kohya._own_class(module))) and not getattr(module, "bypass_mode", None)


def form_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Form | str:
    """What stands for this call, or the reason code for the module's own forward."""
    reason = kohya.why_not_call(args, kwargs, compiling) or why_not_module(module)
    return reason or _form(module, args[0])


def why_not_module(module: Any) -> str:
    """Reason code for the module as it stands, whatever x will be; empty where it may be fused."""
    own = kohya._own_class(module)
    algo = algo_of(own)
    if any(not hasattr(module, name) for name in _NEEDED[algo]):
        return "unknown_forward"  # a relative that keeps these things elsewhere
    mode = mode_of(module, algo)
    facts = facts_of(own, mode)
    if facts is None:
        return "unknown_forward"
    mode = _in_force(mode)
    scaling = lycoris_updates.scaling(module, mode, facts)
    if scaling is None or not math.isfinite(scaling):
        return "scaling_type"
    if scaling == 0.0:
        return "zero_scaling"
    if mode.decomposed and not isinstance(module.multiplier, (int, float)):
        return "scaling_type"
    return _why_not_parameters(module, mode) or _why_not_layer(module, mode)


def _in_force(mode: Mode) -> Mode:
    """The mode without what the call ignores: magnitudes in bypass, output dropout outside it."""
    return mode._replace(decomposed="") if mode.bypass else mode._replace(outputs=False)


def _why_not_parameters(module: Any, mode: Mode) -> str:
    if mode.algo == "locon":
        wanted = nn.Linear if mode.form == "linear" else nn.Conv2d
        halves = [module.lora_down, module.lora_up, *([module.lora_mid] if mode.form == "tucker" else [])]
        if wanted.forward is not kohya._FORWARDS[wanted]:
            return "adapter_class"  # replaced for everybody
        for half in halves:
            if type(half) is not wanted or "forward" in half.__dict__:
                return "adapter_class"
            if half.bias is not None:
                return "lora_bias"
            if peft._has_hooks(half):
                return "hooks"
    factors = [p for name, p in module.named_parameters() if name not in ("dora_scale", "scalar")]
    for t in (*factors, *([module.dora_scale] if module.wd else [])):
        if type(t) not in peft._PLAIN or not peft._dense(t):
            return "tensor_subclass"
        if not t.is_cpu:
            return "device"
        if t.dtype not in peft._FLOATS:
            return "dtype"
    if any(t.dtype != factors[0].dtype for t in factors):
        return "dtype"
    drop = output_dropout(module, mode.algo)
    if drop is not None and type(drop) is not nn.Dropout:
        return "dropout_class"
    return "hooks" if peft.has_global_hook() else ""


def _why_not_layer(module: Any, mode: Mode) -> str:
    """Reason code for a frozen layer with which the mode has no form."""
    layer = module.org_module[0]
    plain = type(layer) in kohya._FORWARDS
    if mode.bypass:
        if module.wd and not plain:
            return "variant"  # LoKr on a quantised layer decomposes the weight in spite of bypass
    elif not plain or type(layer.weight) not in peft._PLAIN or not peft._dense(layer.weight):
        return "base_class"
    if plain and tuple(module.shape) != tuple(layer.weight.shape):
        return "base_class"  # (3.x on a convolution of several groups: the host's own forward says it best)
    if mode.form != "linear":
        keywords = module.kw_dict
        groups = keywords.get("groups", 1)
        if groups != 1 and (mode.algo == "lokr" or mode.decomposed):
            return "base_class"
        if mode.algo == "locon" and mode.bypass:
            down = module.lora_mid if mode.form == "tucker" else module.lora_down
            own = down.stride, down.padding, down.dilation
            if own != (keywords["stride"], keywords["padding"], keywords["dilation"]):
                return "base_class"
    if mode.decomposed:
        if mode.form != "linear" and mode.decomposed == "in":
            return "variant"
        frozen = _plain_below(module)
        if frozen is not layer or layer.weight.requires_grad:
            return "base_class"  # gradients of W are not those of the decomposed weight
    return ""


def _plain_below(module: Any) -> Any:
    """The frozen layer whose own forward the module calls; None where something else is between them."""
    facts = facts_of(kohya._own_class(module), mode_of(module, algo_of(kohya._own_class(module))))
    if facts is not None and facts.base == "made":
        return module.org_module[0]
    owner: Any = getattr(module.org_forward, "__self__", None)
    wanted = kohya._FORWARDS.get(type(owner))
    if wanted is None or getattr(module.org_forward, "__func__", None) is not wanted:
        return None
    return None if getattr(owner, "padding_mode", "zeros") != "zeros" else owner


def _form(module: Any, x: Tensor) -> Form | str:
    own = kohya._own_class(module)
    algo = algo_of(own)
    proved = mode_of(module, algo)
    facts, mode = facts_of(own, proved) or Facts(), _in_force(proved)
    if x.dim() != 4 if mode.form != "linear" else x.dim() < 1:
        return "shape"
    if mode.ranks and mode.bypass and algo == "locon" and mode.form == "linear" and x.dim() == 4:
        return "shape"  # the host takes x for an image there
    layer = _plain_below(module)
    weight = x if layer is None else layer.weight
    if layer is not None:
        bias = layer.bias
        for t in (weight,) if bias is None else (weight, bias):
            if type(t) not in peft._PLAIN or not peft._dense(t):
                return "tensor_subclass"
            if not t.is_cpu:
                return "device"
        if x.shape[1 if mode.form != "linear" else -1] != weight.shape[1] * module.kw_dict.get("groups", 1):
            return "shape"
    cast = autocast_dtype(x, weight)
    factors = next(p.dtype for n, p in module.named_parameters() if n not in ("dora_scale", "scalar"))
    used = x.dtype if cast is None else cast
    types = x.dtype, weight.dtype, factors, module.dora_scale.dtype if mode.decomposed else factors
    if not _types_go(types, cast, mode) or output_type(own, proved, types, cast) != used:
        return "dtype"
    call = Call(module, mode, facts, x, layer, used)
    kind = _OPERATORS[algo] + ("_linear" if mode.form == "linear" else "_conv2d")
    if kind == "lora_linear" and mode.decomposed:
        kind = "dora_linear"
    elif kind == "lora_linear" and (layer is None or mode.outputs):
        kind = "lora_delta"
    drops = mode.ranks or mode.outputs or mode.whole
    return Form(kind, lambda: lycoris_updates.run(call), drops, (factors,), replays=True)


def _types_go(types: tuple[torch.dtype, ...], cast: torch.dtype | None, mode: Mode) -> bool:
    """Whether the operators take types of x, the frozen layer, the factors and DoRA's magnitude."""
    if any(t not in peft._FLOATS for t in types):
        return False
    x, weight, _, magnitude = types
    if torch.float64 in types:
        return len(set(types)) == 1 and not torch.is_autocast_enabled("cpu")
    if cast is None and x != weight:
        return False
    if not mode.decomposed:
        return True
    # (Columns' gains are multiplied into x: rounded to 16 bit that would cost more than the host loses.)
    narrow = cast is not None or x.itemsize == 2
    return magnitude.itemsize >= weight.itemsize and not (mode.decomposed == "in" and narrow)


# ---- putting ours in the host's place --------------------------------------------------------------------------------


def place_of(module: Any) -> tuple[Any, str] | bool | None:
    """Object and attribute that hold the module's bound forward: the frozen layer, or a module stacked on this one.
    None where it is not applied, False where something else hides it."""
    layers = module.__dict__.get("org_module")
    holder, attribute = layers[0] if isinstance(layers, list) and layers else None, "forward"
    seen: set[int] = set()
    while holder is not None and id(holder) not in seen:
        seen.add(id(holder))
        bound = getattr(holder, "__dict__", {}).get(attribute)
        if bound is None:
            return None
        if not isinstance(bound, MethodType):
            return False
        if bound.__self__ is module:
            return holder, attribute
        holder, attribute = bound.__self__, "org_forward"
    return None


def is_reachable(module: nn.Module) -> bool:
    """False where the module may be applied and its forward cannot be found: it is wrapped by something else."""
    return place_of(module) is not False


def rebind(module: Any) -> None:
    """Binds the module's forward anew where the host has put it: after the module got another class."""
    place = place_of(module)
    if isinstance(place, tuple):
        setattr(place[0], place[1], module.forward)

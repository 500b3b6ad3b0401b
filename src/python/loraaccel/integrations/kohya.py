"""kohya's LoRA modules (sd-scripts' networks.lora, lora_fa, lora_flux, lora_sd3 and their kin, and what copied them):
which operator stands for a call, and how it gets into the host's place.

The modules have replaced the forward of a frozen layer by their own, bound to them; `rebind` puts ours there. Masks are
drawn by the same calls as in the host, so a training run sees the same random numbers as without loraaccel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraaccel import _conv2d, _expand, _state
from loraaccel._autograd import autocast_dtype
from loraaccel.integrations import kohya_products, peft
from loraaccel.integrations.kohya_formula import (
    drawn_ranks,
    factors_of,
    follows_formula,
    formula,
    is_applied,
    is_class,
    mode_of,
    module_dropped,
    module_weight,
    names_of,
    perturbed,
)
from loraaccel.integrations.kohya_operands import scaling_of, why_not_types
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import lora_delta_adapters, lora_linear_adapters, lora_qkv_packed

__all__ = ["form_of", "is_reachable", "kind_of", "rebind", "why_not_module"]

_FORWARDS: dict[Any, Any] = {nn.Linear: peft._linear_forward, nn.Conv2d: nn.Conv2d.forward}


def kind_of(module: nn.Module) -> str | None:
    """The operator's name for a module of this kind, its class name where there is none, None for anything else."""
    own = _own_class(module)
    needed, down = {"lora_down", "lora_up", "multiplier", "scale"}, module._modules.get("lora_down")
    if is_class(own):
        product = kohya_products.kind_of_class(own)
        if product:
            return kohya_products.operator_of(module, product)
        if not needed <= names_of(own):
            return own.__name__
    elif not is_applied(module):
        return None
    elif not all(hasattr(module, name) for name in needed):
        return own.__name__
    if isinstance(down, nn.Conv2d):
        return "lora_conv2d"
    return "lora_linear" if isinstance(down, (nn.Linear, nn.ModuleList)) else own.__name__


def _own_class(module: nn.Module) -> Any:
    """The class as it is without us."""
    return getattr(type(module), "_loraaccel_base", type(module))


def form_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Form | str:
    """What stands for this call, or the reason code for the module's own forward."""
    reason = why_not_call(args, kwargs, compiling) or why_not_module(module)
    if reason:
        return reason
    x = args[0]
    product = kohya_products.kind_of_class(_own_class(module))
    return kohya_products.form_of(module, product, x, frozen_layer(module)) if product else _form(module, x)


def why_not_call(args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> str:
    """Reason code for a call that no module of this kind takes from us; empty for a plain tensor on the CPU."""
    if _state.off():
        return "switched_off"
    if compiling:
        return "compiled"
    if peft.transformed():
        return "transform"
    if len(args) != 1 or kwargs:
        return "extra_arguments"
    x = args[0]
    if not isinstance(x, Tensor) or type(x) not in peft._PLAIN or not peft._dense(x):
        return "tensor_subclass"
    return "" if x.is_cpu else "device"


def why_not_module(module: Any) -> str:
    """Reason code for the module as it stands, whatever x will be; empty where it may be fused."""
    cls = _own_class(module)
    product = kohya_products.kind_of_class(cls)
    if product:
        return kohya_products.why_not_module(module, product)
    mode = mode_of(module)
    if not follows_formula(cls, mode):
        return "unknown_forward"
    if not getattr(module, "enabled", True):
        return "disabled"
    network = getattr(module, "network", None)
    if network is not None and getattr(network, "sub_prompt_index", None) is not None:
        return "regional"
    scaling = scaling_of(module.multiplier, module.scale)
    if scaling is None or not math.isfinite(scaling):
        return "scaling_type"
    if scaling == 0.0:
        return "zero_scaling"
    return _why_not_factors(module, mode.form)


def _why_not_factors(module: Any, form: str) -> str:
    wanted = nn.Conv2d if form == "conv" else nn.Linear
    if wanted.forward is not _FORWARDS[wanted]:
        return "adapter_class"  # replaced for everybody
    downs, ups = factors_of(module)
    for half in (*downs, *ups):
        if type(half) is not wanted or "forward" in half.__dict__:
            return "adapter_class"
        if half.bias is not None:
            return "lora_bias"
        if peft._has_hooks(half):
            return "hooks"
        weight = half.weight
        if type(weight) not in peft._PLAIN or not peft._dense(weight):
            return "tensor_subclass"
        if not weight.is_cpu:
            return "device"
        if weight.dtype not in peft._FLOATS or weight.dtype != downs[0].weight.dtype:
            return "dtype"
    if form == "conv" and (
        ups[0].kernel_size != (1, 1) or ups[0].groups != 1 or downs[0].padding_mode != "zeros"
    ):
        return "adapter_class"
    return "hooks" if peft.has_global_hook() else ""


def _form(module: Any, x: Tensor) -> Form | str:
    mode = mode_of(module)
    form = mode.form
    dtype = module_weight(module).dtype
    if x.dim() != 4 if form == "conv" else x.dim() < 1:
        return "shape"
    if mode.ranks and form != "conv" and x.dim() not in (2, 3):
        return "shape"  # the host's mask does not fit there
    frozen = frozen_layer(module)
    if frozen is None:
        run, kind = _on_other(module, x, form)
    else:
        weight, bias = peft._weight_and_bias(frozen)
        reason = why_not_types(x, weight, dtype)
        if reason:
            return reason
        run, kind = _on_frozen(module, x, form, frozen, weight, bias)
    return Form(kind, run, any(mode[1:]), (dtype,), replays=True)


def frozen_layer(module: Any) -> nn.Module | None:
    """The layer whose product is ours to make: exactly torch's Linear or Conv2d, called by its own forward."""
    org = module.org_forward
    owner: Any = getattr(org, "__self__", None)
    cls = type(owner)
    if cls not in _FORWARDS or getattr(org, "__func__", None) is not _FORWARDS[cls]:
        return None
    if cls is nn.Conv2d and (owner.padding_mode != "zeros" or owner.groups != 1):
        return None
    weight, bias = owner.weight, owner.bias
    for t in (weight,) if bias is None else (weight, bias):
        if type(t) not in peft._PLAIN or not peft._dense(t) or t.dtype not in peft._FLOATS or not t.is_cpu:
            return None
    return owner


def _on_frozen(
    module: Any, x: Tensor, form: str, frozen: Any, weight: Tensor, bias: Tensor | None
) -> tuple[Callable[[], Tensor], str]:
    scaling = scaling_of(module.multiplier, module.scale)
    assert scaling is not None  # why_not_module has looked
    downs, ups = factors_of(module)
    lora_a, lora_b = [d.weight for d in downs], [u.weight for u in ups]

    def linear() -> Tensor:
        if module_dropped(module):
            return module.org_forward(x)
        factors = _rank_factors(module, x)
        if form == "split":
            parts = list(module.split_dims)
            biases = [None] * len(parts) if bias is None else list(bias.split(parts))
            pairs = [[pair] for pair in zip(lora_a, lora_b, strict=True)]
            scalings = [[scaling]] * len(parts)
            return lora_qkv_packed(
                x, list(weight.split(parts)), biases, pairs, scalings, rank_factors=factors
            )
        y = lora_linear_adapters(x, weight, bias, lora_a, lora_b, [scaling], [0.0], rank_factors=factors)
        return perturbed(module, x, y)

    def convolution() -> Tensor:
        if module_dropped(module):
            return module.org_forward(x)
        geometry, mode, down = (frozen.stride, frozen.padding, frozen.dilation), mode_of(module), downs[0]
        alike = geometry == (down.stride, down.padding, down.dilation) and down.groups == 1
        if alike and not (mode.hidden or mode.ranks or mode.perturbed):
            y = _conv2d.whole_conv(x, weight, bias, lora_a[0], lora_b[0], scaling, geometry)
            if y is not None:
                return y
        return _conv_update(module, x, module.org_forward(x), scaling)

    return (convolution, "lora_conv2d") if form == "conv" else (linear, "lora_linear")


def _on_other(module: Any, x: Tensor, form: str) -> tuple[Callable[[], Tensor], str]:
    """On a frozen layer that computes its own output: another network's module, a quantised or replaced forward."""
    scaling = scaling_of(module.multiplier, module.scale)
    assert scaling is not None  # why_not_module has looked
    downs, ups = factors_of(module)

    def run() -> Tensor:
        base = module.org_forward(x)
        if module_dropped(module):
            return base
        cast = autocast_dtype(x, base)
        used = x.dtype if cast is None else cast
        if (
            not isinstance(base, Tensor)
            or base.dtype != used
            or (cast is None and used != downs[0].weight.dtype)
        ):
            return formula(module, x, base)
        if form == "conv":
            return _conv_update(module, x, base, scaling)
        lora_a, lora_b = [d.weight for d in downs], [u.weight for u in ups]
        if form == "split":
            lora_a, lora_b = [torch.cat(lora_a)], [torch.block_diag(*lora_b)]
        y = lora_delta_adapters(
            x, base, lora_a, lora_b, [scaling], [0.0], rank_factors=_rank_factors(module, x)
        )
        return perturbed(module, x, y)

    return run, "lora_conv2d" if form == "conv" else "lora_delta"


def _rank_factors(module: Any, x: Tensor) -> Tensor | None:
    """Factors [M, sum of R] of the rank activations of a linear layer, drawn as the host draws them; None: all one."""
    if not module.training:
        return None
    p_hidden, p_rank = getattr(module, "dropout", None), getattr(module, "rank_dropout", None)
    if not p_hidden and p_rank is None:
        return None
    downs = factors_of(module)[0]
    rank = downs[0].weight.shape[0]
    # The host's mask is drawn in the type of its activations, and rounded to it; ours keeps the exact factor.
    like = x.new_empty((*x.shape[:-1], rank), dtype=autocast_dtype(x, module_weight(module)) or x.dtype)
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns: list[Tensor] = []
    for _ in downs:
        if p_hidden:
            kept = F.dropout(torch.ones_like(like), p_hidden) != 0
            columns.append(kept.to(sums) * (1.0 / (1.0 - p_hidden) if p_hidden < 1 else 0.0))
        else:
            columns.append(torch.ones_like(like, dtype=sums))
    if p_rank is not None:
        for i, column in enumerate(columns):
            columns[i] = column * drawn_ranks(like, module) * (1.0 / (1.0 - p_rank))
    return torch.cat([c.reshape(-1, rank) for c in columns], dim=-1)


def _conv_update(module: Any, x: Tensor, base: Tensor, scaling: float) -> Tensor:
    down, up = module.lora_down, module.lora_up
    h = down.forward(x)
    if module.training and getattr(module, "dropout", None) is not None:
        h = F.dropout(h, module.dropout)
    if module.training and getattr(module, "rank_dropout", None) is not None:
        h = h * drawn_ranks(h, module)
        scaling *= 1.0 / (1.0 - module.rank_dropout)
    return _expand.expand_channels(base, h, up.weight.flatten(1), scaling)


# ---- putting ours in the host's place --------------------------------------------------------------------------------


def place_of(module: Any) -> tuple[Any, str] | None:
    """Object and attribute that hold the module's bound forward: the frozen layer, or a module stacked on this one.
    None before apply_to(), and where something else has wrapped it."""
    seen: set[int] = set()
    layer: Any = module
    while "org_forward" in getattr(layer, "__dict__", {}) and id(layer) not in seen:
        seen.add(id(layer))
        layer = getattr(layer.__dict__["org_forward"], "__self__", None)
    holder, attribute = layer, "forward"
    while holder is not None and id(holder) != id(module):
        bound = getattr(holder, "__dict__", {}).get(attribute)
        if not isinstance(bound, MethodType):
            return None
        if bound.__self__ is module:
            return holder, attribute
        holder, attribute = bound.__self__, "org_forward"
    return None


def is_reachable(module: nn.Module) -> bool:
    """False where the module was applied and its forward cannot be found: it is wrapped by something else."""
    return "org_forward" not in module.__dict__ or place_of(module) is not None


def rebind(module: Any) -> None:
    """Binds the module's forward anew where the host has put it: after the module got another class."""
    place = place_of(module)
    if place is not None:
        holder, attribute = place
        setattr(holder, attribute, module.forward)

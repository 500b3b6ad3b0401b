"""PEFT's LoRA layers beyond the plain linear one: with a bias of the adapter, DoRA, a transposed or foreign frozen
layer, an adapter for each sample, convolutions, embeddings. `peft.fused_call` serves the common case, this the rest.

Each form looks at the module as it is at the call, as PEFT's own forward does, and gives what to run, or a reason code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraaccel import _conv2d, _dora, _eager, _expand, _state
from loraaccel._autograd import autocast_dtype
from loraaccel.integrations import peft
from loraaccel.ops import lora_delta_adapters, lora_linear_adapters

# Layers whose frozen half computes its own output, by module of peft.tuners.lora and name.
_FOREIGN = {
    ("bnb", "Linear8bitLt"), ("bnb", "Linear4bit"), ("gptq", "GPTQLoraLinear"), ("awq", "AwqLoraLinear"),
    ("aqlm", "AqlmLoraLinear"), ("hqq", "HqqLoraLinear"), ("eetq", "EetqLoraLinear"), ("inc", "IncLoraLinear"),
    ("torchao", "TorchaoLoraLinear"),
}  # fmt: skip
_FORWARDS: dict[Any, Any] = {nn.Linear: peft._linear_forward, nn.Conv2d: nn.Conv2d.forward}
# Reasons of `peft.fused_call` after which another form may serve.
SECOND_LOOK = frozenset({"variant", "lora_bias", "base_class", "hooks"})


class Form(NamedTuple):
    """What to run instead of the module's forward."""

    kind: str  # of the operator, as info() counts it
    run: Callable[[], Tensor]
    dropout: bool  # some dropout is active: two runs differ
    dtypes: tuple[torch.dtype, ...]  # of the adapters
    replays: bool = False  # draws from torch's generator what the module's own forward draws
    draws_in_python: bool = False  # with Python's generator as well


class Adapter(NamedTuple):
    name: str
    a: nn.Module
    b: nn.Module
    scaling: float | Tensor
    p: float  # dropout in force


def kind_of_class(own: type) -> str | None:
    """The operator for modules of this class of PEFT, None where there is none."""
    layer = sys.modules["peft.tuners.lora.layer"]
    if own is layer.Linear:
        return "lora_linear"
    if own is layer.Conv2d:
        return "lora_conv2d"
    if own is layer.Embedding:
        return "lora_embedding"
    package, _, module = own.__module__.rpartition(".")
    if package == "peft.tuners.lora" and (module, own.__name__) in _FOREIGN:
        return "lora_delta"
    return None


def form_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> Form | str:
    """The form for this call, or a reason code."""
    if _state.off():
        return "switched_off"
    if not compiling and peft.transformed():
        return "transform"
    names = kwargs.get("adapter_names")
    if len(args) != 1 or len(kwargs) != (names is not None):
        return "extra_arguments"
    x = args[0]
    if not isinstance(x, Tensor) or (type(x) not in peft._PLAIN and not compiling) or not peft._dense(x):
        return "tensor_subclass"
    if not x.is_cpu and not x.is_meta:
        return "device"
    kind = kind_of_class(getattr(type(module), "_loraaccel_base", type(module)))
    if names is not None:
        return _mixed(module, x, names, compiling) if kind == "lora_linear" else "extra_arguments"
    state = _why_not_now(module)
    if state:
        return state
    if kind == "lora_embedding":
        return _embedding(module, x)
    adapters = _active(
        module, module.active_adapters, nn.Conv2d if kind == "lora_conv2d" else nn.Linear, compiling
    )
    if isinstance(adapters, str):
        return adapters
    if kind == "lora_conv2d":
        return _convolution(module, x, adapters)
    return _linear(module, x, adapters, compiling, foreign=kind == "lora_delta")


def why_not_module(module: nn.Module) -> str:
    """Reason code for the module as it stands, whatever x will be; empty where a form serves it."""
    kind = kind_of_class(getattr(type(module), "_loraaccel_base", type(module)))
    state = _why_not_now(module)
    if state:
        return state
    if kind == "lora_embedding":
        found = _embedding_adapters(module)
        return found if isinstance(found, str) else ""
    adapters = _active(
        module, module.active_adapters, nn.Conv2d if kind == "lora_conv2d" else nn.Linear, False
    )
    if isinstance(adapters, str):
        return adapters
    if kind == "lora_conv2d":
        return _why_not_conv(module, adapters)
    form = _linear_form(module, adapters, foreign=kind == "lora_delta")
    return form if form not in ("dora_linear", "lora_linear", "lora_delta") else ""


# ---- the module as it is ---------------------------------------------------------------------------------------------


def _why_not_now(module: Any) -> str:
    if module.disable_adapters:
        return "disabled"
    return "merged" if module.merged else ""


def _active(module: Any, names: Sequence[str], wanted: Any, compiling: bool) -> list[Adapter] | str:
    """The adapters among `names` that this layer has; `wanted` is the class of A and B."""
    if wanted.forward is not _FORWARDS[wanted]:
        return "adapter_class"  # replaced for everybody
    a_modules, b_modules = module.lora_A, module.lora_B
    found: list[Adapter] = []
    for name in names:
        if name not in a_modules:
            continue
        a, b, dropout, scaling = (
            a_modules[name], b_modules[name], module.lora_dropout[name], module.scaling[name],
        )  # fmt: skip
        for half in (a, b):
            if type(half) is not wanted or "forward" in half.__dict__:
                return "adapter_class"
            if peft._has_hooks(half):
                return "hooks"
            if not _plain_weights(half, compiling):
                return "tensor_subclass"
        if peft._has_hooks(dropout) or (not compiling and peft.has_global_hook()):
            return "hooks"
        p = 0.0
        if type(dropout) is nn.Dropout and "forward" not in dropout.__dict__:
            p = float(dropout.p) if dropout.training else 0.0
        elif type(dropout) is not nn.Identity or "forward" in dropout.__dict__:
            return "dropout_class"
        if isinstance(scaling, Tensor):
            if scaling.numel() != 1 or scaling.device.type != "cpu" or scaling.requires_grad:
                return "scaling_type"
            if not compiling:
                scaling = scaling.item()
        if not compiling and not math.isfinite(scaling):
            return "scaling_type"
        found.append(Adapter(name, a, b, scaling, p))
    if not found:
        return "no_active_adapter"
    if not compiling and all(ad.scaling == 0 for ad in found):
        return "zero_scaling"
    return found


def _plain_weights(module: nn.Module, compiling: bool) -> bool:
    for t in (module.weight, module.bias):
        if t is None:
            continue
        if (type(t) not in peft._PLAIN and not compiling) or not peft._dense(t):
            return False
        if t.dtype not in peft._FLOATS or not (t.is_cpu or t.is_meta):
            return False
    return True


def _variant(module: Any, name: str) -> Any:
    """The variant that computes this adapter, None for plain LoRA."""
    variant = (getattr(module, "lora_variant", None) or {}).get(name)
    if variant is None and (module.__dict__.get("use_dora") or {}).get(name):
        return "dora without variants"  # PEFT before 0.16
    return variant


def _number(scaling: float | Tensor) -> float:
    """As the operators take it: in compiled code a tensor, or a number that may change, stays what it is."""
    return scaling if torch.compiler.is_compiling() else float(scaling)


def _factors(ad: Adapter) -> tuple[Tensor, Tensor, float]:
    """A, B and scale."""
    a: Any = ad.a.weight
    b: Any = ad.b.weight
    return a, b, _number(ad.scaling)


def _dtypes(adapters: Sequence[Adapter]) -> tuple[torch.dtype, ...]:
    return tuple(ad.a.weight.dtype for ad in adapters)


# ---- linear layers ---------------------------------------------------------------------------------------------------


def _base_of(module: Any) -> nn.Module:
    return module.quant_linear_module if "quant_linear_module" in module._modules else module.base_layer


def _own_weight(base: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight [N, K] and bias of a frozen layer whose product is ours to make; None where it computes its own."""
    if peft._has_hooks(base) or "forward" in base.__dict__:
        return None
    if type(base) is nn.Linear and nn.Linear.forward is peft._linear_forward:
        weight, bias = peft._weight_and_bias(base)
    elif type(base).__name__ == "Conv1D" and type(base).__module__ == "transformers.pytorch_utils":
        weight, bias = base.weight.t(), base.bias
    else:
        return None
    for t in (weight,) if bias is None else (weight, bias):
        plain = type(t) in peft._PLAIN or torch.compiler.is_compiling()
        if not plain or not peft._dense(t) or t.dtype not in peft._FLOATS or not (t.is_cpu or t.is_meta):
            return None
    return weight, bias


def _linear_form(module: Any, adapters: Sequence[Adapter], foreign: bool) -> str:
    """Kind of the operator that serves these adapters on this layer, or a reason code."""
    variants = [_variant(module, ad.name) for ad in adapters]
    biased = any(ad.b.bias is not None for ad in adapters)
    if any(ad.a.bias is not None for ad in adapters):
        return "lora_bias"
    base = _base_of(module)
    if type(base).__name__ == "NonDynamicallyQuantizableLinear":
        return "base_class"  # attention reads its weight: this module's forward never runs
    own = None if foreign else _own_weight(base)
    if any(v is not None for v in variants):
        dora = (
            len(adapters) == 1
            and type(variants[0]).__name__ == "DoraLinearVariant"
            and type(variants[0]).__module__ == "peft.tuners.lora.variants"
        )
        if not dora or own is None or biased:
            return "variant"
        magnitude = module.lora_magnitude_vector[adapters[0].name]
        if type(magnitude).__name__ != "DoraLinearLayer" or peft._has_hooks(magnitude):
            return "variant"
        if adapters[0].p and not module.training:
            return (
                "dropout_class"  # PEFT looks at the layer's mode there, and everywhere else at the dropout's
            )
        return "dora_linear"
    if own is not None:
        return "lora_linear"
    return "lora_bias" if biased else "lora_delta"


def _linear(
    module: Any, x: Tensor, adapters: Sequence[Adapter], compiling: bool, foreign: bool
) -> Form | str:
    kind = _linear_form(module, adapters, foreign)
    if kind == "lora_delta":
        return _foreign(module, x, adapters)
    if kind not in ("lora_linear", "dora_linear"):
        return kind
    own = _own_weight(_base_of(module))
    assert own is not None
    weight, bias = own
    reason = _why_not_types(x, weight, bias, adapters, getattr(module, "cast_input_dtype_enabled", True))
    if reason:
        return reason
    active = any(ad.p for ad in adapters)
    if kind == "dora_linear":
        ad = adapters[0]
        magnitude = module.lora_magnitude_vector[ad.name].weight
        if type(magnitude) not in peft._PLAIN and not compiling:
            return "tensor_subclass"
        norms = None if compiling else _kept_norms(module.lora_magnitude_vector[ad.name], weight, ad)
        args = (x, weight, bias, ad.a.weight, ad.b.weight, magnitude, _number(ad.scaling), ad.p, norms)
        return Form(kind, lambda: _dora.dora(*args), active, _dtypes(adapters))
    factors = [_factors(ad) for ad in adapters]
    bias = _with_adapter_biases(weight, bias, adapters)
    a, b, scales = [f[0] for f in factors], [f[1] for f in factors], [f[2] for f in factors]
    dropouts = [ad.p for ad in adapters]
    return Form(
        kind, lambda: lora_linear_adapters(x, weight, bias, a, b, scales, dropouts), active, _dtypes(adapters)
    )


def _kept_norms(layer: Any, weight: Tensor, ad: Adapter) -> Tensor | None:
    """PEFT's own cache of the norms, which peft.helpers.DoraCaching switches on; else it is cleared, as PEFT does."""
    if not sys.modules["peft.tuners.lora.dora"].ENABLE_DORA_CACHING or layer.training:
        if layer._dora_cache:
            layer._cache_clear()
        return None
    key = f"weight-norm-{ad.name}"
    norms = layer._cache_get(key, None)
    if norms is None:
        a: Any = ad.a.weight
        b: Any = ad.b.weight
        norms = _dora.adapted_norms(weight, a, b, float(ad.scaling))
        layer._cache_store(key, norms)
    return norms


def _with_adapter_biases(weight: Tensor, bias: Tensor | None, adapters: Sequence[Adapter]) -> Tensor | None:
    """bias + Σ scaling · bias of B, in the type of the sums: the operator rounds it with everything else."""
    extra = [ad for ad in adapters if ad.b.bias is not None]
    if not extra:
        return bias
    sums = torch.float64 if weight.dtype == torch.float64 else torch.float32
    total = None if bias is None else bias.to(sums)
    for ad in extra:
        part = ad.b.bias.to(sums) * ad.scaling
        total = part if total is None else total + part
    return total


def _why_not_types(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Adapter], casts: bool
) -> str:
    cast = autocast_dtype(x, weight)
    if cast is not None and cast not in peft._FLOATS:
        return "dtype"
    if cast is None and (
        x.dtype != weight.dtype or (not casts and any(t != x.dtype for t in _dtypes(adapters)))
    ):
        return "dtype"
    if bias is not None and bias.dtype != weight.dtype:
        return "dtype"
    for ad in adapters:
        if ad.a.weight.dtype != ad.b.weight.dtype:
            return "dtype"
        if (ad.a.weight.dtype == torch.float64) != (weight.dtype == torch.float64):
            return "dtype"
        if ad.a.weight.device != weight.device or x.device != weight.device:
            return "device"
    return ""


def _foreign(module: Any, x: Tensor, adapters: Sequence[Adapter]) -> Form | str:
    """The frozen layer runs itself, our operator adds the adapters to its output."""
    if x.dtype not in peft._FLOATS or any(ad.a.weight.dtype != ad.b.weight.dtype for ad in adapters):
        return "dtype"
    if not getattr(module, "cast_input_dtype_enabled", True) and any(t != x.dtype for t in _dtypes(adapters)):
        return "dtype"
    base_layer = _base_of(module)
    factors = [_factors(ad) for ad in adapters]
    a, b, scales = [f[0] for f in factors], [f[1] for f in factors], [f[2] for f in factors]
    dropouts = [ad.p for ad in adapters]

    def run() -> Tensor:
        base = base_layer(x)
        double = (base.dtype == torch.float64, *(t.dtype == torch.float64 for t in (x, *a)))
        fits = (
            (type(base) in peft._PLAIN or torch.compiler.is_compiling())
            and peft._dense(base)
            and base.dtype in peft._FLOATS
            and base.shape == (*x.shape[:-1], b[0].shape[0])
            and base.device == x.device
            and len(set(double)) == 1
        )
        if not fits:  # PEFT's own arithmetic: the frozen layer has run and is not run twice
            return _eager.lora_delta(x, base, a, b, scales, dropouts)
        return lora_delta_adapters(x, base, a, b, scales, dropouts)

    return Form("lora_delta", run, any(dropouts), _dtypes(adapters))


def _mixed(module: Any, x: Tensor, names: Sequence[str], compiling: bool) -> Form | str:
    """Another adapter for each sample. PEFT's own checks run first, and raise what PEFT raises."""
    if compiling or module.training:
        return "extra_arguments"
    module._check_forward_args(x, adapter_names=names)
    if module.disable_adapters:
        return "disabled"
    own = _own_weight(module.base_layer)
    if own is None:
        return "base_class"
    unique = [n for n in dict.fromkeys(names) if n != "__base__" and n in module.lora_A]
    if any(_variant(module, n) is not None for n in unique):
        return "variant"
    if not unique:
        return "no_active_adapter"
    adapters = _active(module, unique, nn.Linear, compiling)
    if isinstance(adapters, str):
        return adapters
    if any(ad.b.bias is not None or ad.a.bias is not None for ad in adapters):
        return "lora_bias"
    weight, bias = own
    reason = _why_not_types(x, weight, bias, adapters, True)
    if reason:
        return reason
    if any(ad.p for ad in adapters):
        return "dropout_class"
    index = {ad.name: i for i, ad in enumerate(adapters)}
    ids = torch.tensor([index.get(n, -1) for n in names], dtype=torch.int64)
    a = [ad.a.weight for ad in adapters]
    b = [ad.b.weight for ad in adapters]
    scales = [_number(ad.scaling) for ad in adapters]
    none = [0.0] * len(adapters)
    return Form(
        "lora_linear_batched",
        lambda: lora_linear_adapters(x, weight, bias, a, b, scales, none, (), ids),
        False,
        _dtypes(adapters),
    )


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _why_not_conv(module: Any, adapters: Sequence[Adapter]) -> str:
    for ad in adapters:
        if _variant(module, ad.name) is not None:
            return "variant"
        if ad.b.bias is not None or ad.a.bias is not None:
            return "lora_bias"
        b: Any = ad.b
        if b.kernel_size != (1, 1) or b.stride != (1, 1) or b.padding not in ((0, 0), "same", "valid"):
            return "adapter_class"
        if ad.a.weight.dtype != ad.b.weight.dtype:
            return "dtype"
        if (ad.a.weight.dtype == torch.float64) != (module.base_layer.weight.dtype == torch.float64):
            return "dtype"
    return ""


def _convolution(module: Any, x: Tensor, adapters: Sequence[Adapter]) -> Form | str:
    """The frozen layer and A run themselves; 1x1 B is added to the output in one pass."""
    reason = _why_not_conv(module, adapters)
    if reason:
        return reason
    if x.dtype not in peft._FLOATS or x.dim() != 4:
        return "dtype" if x.dim() == 4 else "extra_arguments"
    casts = getattr(module, "cast_input_dtype_enabled", True)

    several = len(adapters) > 1 or torch.compiler.is_compiling()
    whole = not several and not adapters[0].p and _same_geometry(module.base_layer, adapters[0].a)

    def run() -> Tensor:
        if whole:
            frozen, ad = module.base_layer, adapters[0]
            geometry = frozen.stride, frozen.padding, frozen.dilation
            a: Any = ad.a.weight
            b: Any = ad.b.weight
            y = _conv2d.whole_conv(x, frozen.weight, frozen.bias, a, b, _number(ad.scaling), geometry)
            if y is not None:
                return y
        base = module.base_layer(x)
        # A and B of all adapters side by side: one update, rounded once.
        hidden, ups, given = [], [], x
        for ad in adapters:
            if casts:
                given = given.to(ad.a.weight.dtype)
            h = ad.a(F.dropout(given, ad.p) if ad.p else given)
            up = _conv2d._up(ad.b.weight, h.shape[1])
            if several:
                up = up.float() * ad.scaling if up.dtype != torch.float64 else up * ad.scaling
            hidden.append(h)
            ups.append(up)
        if not several:
            return _expand.expand_channels(base, hidden[0], ups[0], _number(adapters[0].scaling))
        return _expand.expand_channels(base, torch.cat(hidden, 1), torch.cat(ups, 1), 1.0)

    return Form("lora_conv2d", run, any(ad.p for ad in adapters), _dtypes(adapters))


def _same_geometry(frozen: Any, a: Any) -> bool:
    """A plain frozen convolution of one group, and an A that looks at the same pixels: one product may do for both."""
    return (
        type(frozen) is nn.Conv2d
        and nn.Conv2d.forward is _FORWARDS[nn.Conv2d]
        and "forward" not in frozen.__dict__
        and not peft._has_hooks(frozen)
        and frozen.groups == a.groups == 1
        and frozen.padding_mode == a.padding_mode == "zeros"
        and (frozen.stride, frozen.padding, frozen.dilation) == (a.stride, a.padding, a.dilation)
        and _plain_weights(frozen, False)
    )


# ---- embeddings ------------------------------------------------------------------------------------------------------


def _embedding_adapters(module: Any) -> list[tuple[str, Tensor, Tensor, float]] | str:
    found = []
    for name in module.active_adapters:
        if name not in module.lora_embedding_A:
            continue
        if _variant(module, name) is not None:
            return "variant"
        a, b, scaling = module.lora_embedding_A[name], module.lora_embedding_B[name], module.scaling[name]
        compiling = torch.compiler.is_compiling()
        for t in (a, b):
            if not isinstance(t, Tensor) or (type(t) not in peft._PLAIN and not compiling):
                return "adapter_class"
        if getattr(module, "input_fns", {}).get(name) or getattr(module, "output_fns", {}).get(name):
            return "adapter_class"
        if isinstance(scaling, Tensor):
            if scaling.numel() != 1 or scaling.device.type != "cpu" or scaling.requires_grad:
                return "scaling_type"
            scaling = scaling if compiling else scaling.item()
        if not compiling and not math.isfinite(scaling):
            return "scaling_type"
        if a.dtype not in peft._FLOATS or b.dtype != a.dtype:
            return "dtype"
        if (a.dtype == torch.float64) != (module.base_layer.weight.dtype == torch.float64):
            return "dtype"
        if not (a.is_cpu and b.is_cpu):
            return "device"
        found.append((name, a, b, _number(scaling)))
    if not found:
        return "no_active_adapter"
    if not torch.compiler.is_compiling() and not any(scaling for *_, scaling in found):
        return "zero_scaling"
    scale = getattr(module, "_get_embed_scale", None)
    if scale is not None and scale() is not None:
        return "base_class"  # Gemma's embedding multiplies its output, and PEFT the update
    return found


def _embedding(module: Any, x: Tensor) -> Form | str:
    found = _embedding_adapters(module)
    if isinstance(found, str):
        return found

    def run() -> Tensor:
        base = module.base_layer(x)
        hidden = [module._embed(x, a.T) for _, a, _, _ in found]
        if len(found) == 1:
            return _expand.expand(base, hidden[0], found[0][2], found[0][3])
        ups = [b * s if b.dtype == torch.float64 else b.float() * s for _, _, b, s in found]
        return _expand.expand(base, torch.cat(hidden, -1), torch.cat(ups, 1), 1.0)

    return Form("lora_embedding", run, False, tuple(a.dtype for _, a, _, _ in found))

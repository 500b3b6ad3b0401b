"""kohya's other networks, LoHa and LoKr (sd-scripts' networks.loha and networks.lokr) and DyLoRA: their formulas,
proved as that of `kohya_formula` is, and the operators that stand for them on a plain frozen layer.

LoHa and LoKr make ΔW at every call; the operators multiply by its factors, so that their results are rounded elsewhere.
"""

from __future__ import annotations

import functools
import math
import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraaccel import _conv2d, _loha, _lokr
from loraaccel.integrations import peft
from loraaccel.integrations.kohya_formula import gives_formula, module_dropped, names_of
from loraaccel.integrations.kohya_operands import scaling_of, why_not_types
from loraaccel.integrations.peft_forms import Form
from loraaccel.ops import lora_linear_adapters

_COMMON = """
org_forward module_dropout training torch rand enabled default_forward scale multiplier stride padding
dilation groups nn functional F linear conv2d size
"""
_MADE = """
get_diff_weight rank_dropout device to dtype view dim is_conv conv_mode unsqueeze reshape out_dim in_dim
kernel_size tucker tensor HadaWeight HadaWeightTucker apply hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1
hada_t2 use_w2 lokr_w1 lokr_w2 lokr_w2_a lokr_w2_b lokr_t2 rebuild_tucker make_kron
"""
_DYNAMIC = """
lora_A lora_B lora_dim unit random randint range requires_grad cat tuple is_conv2d is_conv2d_3x3 reshape
transpose math sqrt
"""
_KNOWN_NAMES = frozenset(f"{_COMMON} {_MADE} {_DYNAMIC}".split())
_METHODS = ("forward", "default_forward", "get_diff_weight")


# What an object must have, since the proof is about its class and made on an object that has everything.
_NEEDED_MADE = ("scale", "multiplier", "is_conv", "conv_mode", "tucker")
_NEEDED = {
    "loha": (*_NEEDED_MADE, "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "lokr": (*_NEEDED_MADE, "use_w2", "lokr_w1"),
    "dylora": ("scale", "lora_dim", "unit", "lora_A", "lora_B", "is_conv2d", "is_conv2d_3x3"),
}


class Mode(NamedTuple):
    """What of a formula a call uses."""

    kind: str  # "loha", "lokr" or "dylora"
    form: str  # "linear", "1x1", "flat" or "tucker"
    whole_factor: bool = False  # LoKr's w2 is one matrix
    rows: bool = False  # rank_dropout, of rows of ΔW
    module: bool = False  # module_dropout


@functools.lru_cache(maxsize=4096)
def kind_of_class(cls: Any) -> str:
    """ "loha", "lokr", "dylora", or nothing: by the names that the class uses."""
    names = names_of(cls, _METHODS)
    for name, kind in (("hada_w1_a", "loha"), ("lokr_w1", "lokr")):
        if {name, "get_diff_weight", "org_forward"} <= names:
            return kind
    return "dylora" if {"lora_A", "lora_B", "unit", "randint", "org_forward"} <= names else ""


def operator_of(module: Any, kind: str) -> str:
    conv = getattr(module, "is_conv", False) or getattr(module, "is_conv2d", False)
    if kind == "dylora":
        return "lora_conv2d" if conv else "lora_linear"
    return f"{kind}_conv2d" if conv else f"{kind}_linear"


def mode_of(module: Any, kind: str) -> Mode:
    if kind == "dylora":
        form = "flat" if module.is_conv2d_3x3 else "1x1" if module.is_conv2d else "linear"
        return Mode(kind, form)
    form = module.conv_mode or "linear"
    rows, whole = (
        module.training and getattr(module, p, None) is not None for p in ("rank_dropout", "module_dropout")
    )
    return Mode(kind, form, bool(getattr(module, "use_w2", False)), rows, whole)


# ---- the formulas in plain torch -------------------------------------------------------------------------------------


def formula(module: Any, x: Tensor) -> Tensor:
    """y = base(x) + multiplier · x ΔWᵀ (a convolution with ΔW), in training with rows of ΔW dropped, kept ones times
    1 / (1 - p). DyLoRA: y = base(x) + scale · √(r / (k + unit)) · B A x, k drawn anew at each call, no multiplier."""
    base = module.org_forward(x)
    if module_dropped(module):
        return base
    own: Any = type(module)
    kind = kind_of_class(own)
    if kind == "dylora":
        a, b, scale = dynamic_factors(module)
        if module.is_conv2d_3x3:
            h = F.conv2d(F.conv2d(x, a, stride=module.stride, padding=module.padding), b)
        elif module.is_conv2d:
            h = F.conv2d(F.conv2d(x, a[:, :, None, None]), b[:, :, None, None])
        else:
            h = F.linear(F.linear(x, a), b)
        return base + h * scale
    delta = _delta(module, kind)
    compensation = 1.0
    if module.training and module.rank_dropout is not None:
        kept = (torch.rand(delta.size(0), device=delta.device) > module.rank_dropout).to(delta.dtype)
        delta = delta * kept.view(-1, *[1] * (delta.dim() - 1))
        compensation = 1.0 / (1.0 - module.rank_dropout)
    if not module.is_conv:
        return base + F.linear(x, delta) * module.multiplier * compensation
    if module.conv_mode == "1x1":
        delta = delta[:, :, None, None]
    y = F.conv2d(x, delta, None, module.stride, module.padding, module.dilation, module.groups)
    return base + y * module.multiplier * compensation


def _delta(module: Any, kind: str) -> Tensor:
    """scale · ΔW as the host makes it."""
    m = module
    if kind == "loha":
        if m.tucker:
            first, second = (
                torch.einsum("ij...,jc,in->nc...", t, b, a)
                for t, b, a in ((m.hada_t1, m.hada_w1_b, m.hada_w1_a), (m.hada_t2, m.hada_w2_b, m.hada_w2_a))
            )
            return first * second * m.scale
        made = ((m.hada_w1_a @ m.hada_w1_b) * (m.hada_w2_a @ m.hada_w2_b)) * m.scale
    else:
        if m.use_w2:
            second = m.lokr_w2
        elif m.tucker:
            second = torch.einsum("ij...,in,jc->nc...", m.lokr_t2, m.lokr_w2_a, m.lokr_w2_b)
        else:
            second = m.lokr_w2_a @ m.lokr_w2_b
        first = m.lokr_w1.reshape(*m.lokr_w1.shape, *[1] * (second.dim() - 2))
        made = torch.kron(first, second.contiguous()) * m.scale
    if m.conv_mode == "flat" and made.dim() == 2:
        made = made.reshape(m.out_dim, m.in_dim, *m.kernel_size)
    return made


def dynamic_factors(module: Any) -> tuple[Tensor, Tensor, float]:
    """DyLoRA's A and B with one unit of ranks trained, the others not, and the scale of that rank."""
    chosen = random.randint(0, module.lora_dim - 1)
    chosen -= chosen % module.unit
    for i, (a, b) in enumerate(zip(module.lora_A, module.lora_B, strict=True)):
        a.requires_grad = b.requires_grad = chosen <= i < chosen + module.unit
    a, b = torch.cat(tuple(module.lora_A), dim=0), torch.cat(tuple(module.lora_B), dim=1)
    return a, b, float(module.scale) * math.sqrt(module.lora_dim / (chosen + module.unit))


@functools.lru_cache(maxsize=1024)
def follows_formula(cls: Any, mode: Mode) -> bool:
    """True where the class computes `formula` with the same random numbers, in training in this mode, and without."""
    if names_of(cls, _METHODS) - _KNOWN_NAMES:
        return False
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad():
            torch.manual_seed(1)
            probe, x = _probe(cls, mode)
            for training, repeats in ((False, 1), (True, 8 if mode.module else 3)):
                probe.training = training
                if not gives_formula(cls, formula, probe, [x] * repeats):
                    return False
        return True
    finally:
        random.setstate(state)


def _probe(cls: type, mode: Mode) -> tuple[Any, Tensor]:
    """An object of the class on a tiny frozen layer, made without its constructor, and an input for it."""
    exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    probe: Any = object.__new__(cls)
    nn.Module.__init__(probe)
    n, k, r = 6, 4, 2
    conv = mode.form != "linear"
    size: tuple[int, ...] = () if not conv else (1, 1) if mode.form == "1x1" else (3, 3)
    if conv:
        frozen: nn.Module = nn.Conv2d(k, n, size, padding=size[0] // 2, **exact)
        x = torch.randn(2, k, 4, 5, **exact)
    else:
        frozen, x = nn.Linear(k, n, **exact), torch.randn(2, 3, k, **exact)
    taps = math.prod(size) if mode.form == "flat" else 1
    shapes: dict[str, tuple[int, ...]] = {}
    if mode.kind == "loha":
        for i in (1, 2):
            tucker = mode.form == "tucker"
            shapes[f"hada_w{i}_a"] = (r, n) if tucker else (n, r)
            shapes[f"hada_w{i}_b"] = (r, k) if tucker else (r, k * taps)
            if tucker:
                shapes[f"hada_t{i}"] = (r, r, *size)
    elif mode.kind == "lokr":
        shapes["lokr_w1"] = (2, 2)
        if mode.whole_factor:
            shapes["lokr_w2"] = (3, 2, *(size if mode.form in ("flat", "tucker") else ()))
        elif mode.form == "tucker":
            shapes |= {"lokr_t2": (r, r, *size), "lokr_w2_a": (r, 3), "lokr_w2_b": (r, 2)}
        else:
            shapes |= {"lokr_w2_a": (3, r), "lokr_w2_b": (r, 2 * taps)}
    else:
        ranks = 4
        a = (1, k, *size) if mode.form == "flat" else (1, k)
        b = (n, 1, 1, 1) if mode.form == "flat" else (n, 1)
        probe.lora_A = nn.ParameterList(torch.randn(a, **exact) for _ in range(ranks))
        probe.lora_B = nn.ParameterList(torch.randn(b, **exact) for _ in range(ranks))
    for name, shape in shapes.items():
        probe.register_parameter(name, nn.Parameter(torch.randn(shape, **exact)))
    values = {
        "org_forward": frozen.forward, "lora_name": "probe", "lora_dim": 4, "unit": 2, "scale": 0.5, "multiplier": 0.75,
        "dropout": None, "rank_dropout": 0.25 if mode.rows else None, "module_dropout": 0.5 if mode.module else None,
        "is_conv": conv, "is_conv2d": conv, "is_conv2d_3x3": mode.form == "flat", "tucker": mode.form == "tucker",
        "conv_mode": mode.form if conv else None, "kernel_size": size or None, "in_dim": k, "out_dim": n,
        "use_w2": mode.whole_factor, "stride": (1, 1), "padding": getattr(frozen, "padding", None), "dilation": (1, 1),
        "groups": 1, "enabled": True, "network": None,
    }  # fmt: skip
    probe.__dict__.update(values)
    return probe, x


# ---- what to run at a call -------------------------------------------------------------------------------------------


def why_not_module(module: Any, kind: str) -> str:
    own: Any = type(module)
    if any(not hasattr(module, name) for name in _NEEDED[kind]):
        return "unknown_forward"  # a relative that keeps these things elsewhere
    mode = mode_of(module, kind)
    if not follows_formula(getattr(own, "_loraaccel_base", own), mode):
        return "unknown_forward"
    if not getattr(module, "enabled", True):
        return "disabled"
    scaling = strength(module, kind)
    if scaling is None or not math.isfinite(scaling):
        return "scaling_type"
    if scaling == 0.0:
        return "zero_scaling"
    if mode.rows and module.rank_dropout >= 1:
        return "unknown_forward"  # the host divides by zero
    for t in module.parameters(recurse=True):
        if type(t) not in peft._PLAIN or not peft._dense(t):
            return "tensor_subclass"
        if not t.is_cpu:
            return "device"
        if t.dtype not in peft._FLOATS or t.dtype != next(module.parameters()).dtype:
            return "dtype"
    return ""


def strength(module: Any, kind: str) -> float | None:
    """The scale times the multiplier, which DyLoRA does not use."""
    return scaling_of(module.scale) if kind == "dylora" else scaling_of(module.scale, module.multiplier)


def form_of(module: Any, kind: str, x: Tensor, frozen: Any) -> Form | str:
    """`frozen`: the plain layer under the module, None where something else computes its output."""
    if frozen is None or (isinstance(frozen, nn.Conv2d) and x.dim() != 4):
        return "base_class" if frozen is None else "shape"
    weight, bias = peft._weight_and_bias(frozen)
    dtype = next(module.parameters()).dtype
    reason = why_not_types(x, weight, dtype)
    if reason:
        return reason
    mode = mode_of(module, kind)
    if mode.form != "linear":
        if mode.kind == "dylora" and mode.form == "1x1":  # it takes the pixels as rows
            own: Any = (1, 1), (0, 0), (1, 1)
        else:
            own = module.stride, module.padding, getattr(module, "dilation", (1, 1))
        if own != (frozen.stride, frozen.padding, frozen.dilation):
            return "base_class"
    run = _dynamic if kind == "dylora" else _made

    def call() -> Tensor:
        if module_dropped(module):
            return module.org_forward(x)
        return run(module, kind, x, frozen, weight, bias)

    return Form(
        operator_of(module, kind),
        call,
        mode.rows or mode.module or kind == "dylora",
        (dtype,),
        replays=kind != "dylora",
        draws_in_python=kind == "dylora",
    )


def _dynamic(module: Any, kind: str, x: Tensor, frozen: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    a, b, scale = dynamic_factors(module)
    if not module.is_conv2d:
        return lora_linear_adapters(x, weight, bias, (a,), (b,), [scale], [0.0])
    geometry = frozen.stride, frozen.padding, frozen.dilation
    a = a if a.dim() == 4 else a[:, :, None, None]
    y = _conv2d.whole_conv(x, weight, bias, a, b, scale, geometry)
    if y is not None:
        return y
    return _conv2d.conv_update(module.org_forward(x), x, a, b, None, scale, geometry)


def _made(module: Any, kind: str, x: Tensor, frozen: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    m = module
    scaling = strength(m, kind)
    assert scaling is not None  # why_not_module has looked
    drop: dict[str, Any] = {"rank_dropout": m.rank_dropout if mode_of(m, kind).rows else 0.0}
    if kind == "loha":
        a1, b1, a2, b2 = m.hada_w1_a, m.hada_w1_b, m.hada_w2_a, m.hada_w2_b
        if not m.is_conv:
            return _loha.loha_linear(x, weight, bias, a1, b1, a2, b2, scaling, **drop)
        tucker: dict[str, Any] = {}
        if m.tucker:
            a1, a2, tucker = a1.t(), a2.t(), {"t1": m.hada_t1, "t2": m.hada_t2}
        drop |= {"stride": m.stride, "padding": m.padding, "dilation": m.dilation}
        return _loha.loha_conv2d(x, weight, bias, a1, b1, a2, b2, scaling, **tucker, **drop)
    second: Any = m.lokr_w2 if m.use_w2 else (m.lokr_w2_a, m.lokr_w2_b)
    if not m.is_conv:
        return _lokr.lokr_linear(x, weight, bias, m.lokr_w1, second, scaling, **drop)
    tucker = {}
    if m.tucker and not m.use_w2:
        second, tucker = (m.lokr_w2_a.t(), m.lokr_w2_b), {"t2": m.lokr_t2}
    if m.use_w2 and second.dim() == 2:
        second = second[:, :, None, None]
    drop |= {"stride": m.stride, "padding": m.padding, "dilation": m.dilation}
    return _lokr.lokr_conv2d(x, weight, bias, m.lokr_w1, second, scaling, **tucker, **drop)

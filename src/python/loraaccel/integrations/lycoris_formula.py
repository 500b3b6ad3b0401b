"""LyCORIS's LoCon, LoHa and LoKr modules: their formula, and which classes follow it, in which variant.

Releases differ (3.2 merges the change into W and calls one operator, 3.3 adds a second product to the frozen layer's,
4.x dispatches to kernels), and other trainers carry copies. So nothing here looks at a version: a class is run on tiny
layers in float64 and compared with `formula`, values and random generator, in the mode that is going to be fused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraaccel.integrations.kohya_formula import gives_formula

# Attributes of the modules, and what their forwards call. A forward that uses another name does something unknown.
_KNOWN = """
_current_weight _rebuild_forward apply_weight_decompose bypass_diff bypass_forward bypass_forward_diff bypass_mode
dequantize_weight_only_fp8 diff_weight dora_norm_dims dora_scale drop dropout dtype_tensor get_weight hada_t1 hada_t2
hada_w1_a hada_w1_b hada_w2_a hada_w2_b is_weight_only_fp8_linear isconv kron_bypass kron_weight kw_dict
loha_bypass_diff loha_diff_weight lokr_t2 lokr_w1 lokr_w1_a lokr_w1_b lokr_w2 lokr_w2_a lokr_w2_b lora_dim lora_down
lora_mid lora_up make_kron make_weight module_dropout module_type multiplier op org_forward org_module rank_dropout
rank_dropout_scale rebuild_tucker scalar scale shape training tucker use_w1 use_w2 wd wd_on_out weight bias
weight_decompose padding stride dilation groups torch F linear rand finfo eps tensor norm mean view reshape transpose
size startswith len to dtype device data detach
"""
_KNOWN_NAMES = frozenset(_KNOWN.split())
_CONTRACT = ("apply_to", "restore", "bypass_forward", "bypass_forward_diff", "get_merged_weight")


class Mode(NamedTuple):
    """What of the formula a call uses."""

    algo: str  # "locon", "loha" or "lokr"
    form: str  # "linear", "conv" or "tucker"
    bypass: bool  # y = base + update, else a change of the weight at each call
    decomposed: str = ""  # DoRA: "out" for norms of rows, "in" for norms of columns
    low_rank: tuple[bool, bool] = (False, False)  # LoKr: w1 and w2 are pairs
    grouped: bool = False  # a convolution of several groups
    ranks: bool = False  # rank_dropout
    ranks_scaled: bool = False  # rank_dropout_scale
    outputs: bool = False  # dropout, which only bypass applies
    whole: bool = False  # module_dropout


class Facts(NamedTuple):
    """What a release does where they differ."""

    base: str = (
        "called"  # the frozen layer's output: by org_forward, or "made" of the layer's weight and bias
    )
    dropped: str = "called"  # the same where module_dropout drops the update
    scaled: bool = True  # LoKr in bypass: by alpha / r


def is_class(cls: Any) -> bool:
    """A class with LyCORIS's contract, whichever its formula; as it is without us."""
    return issubclass(cls, nn.Module) and all(callable(getattr(cls, name, None)) for name in _CONTRACT)


@functools.lru_cache(maxsize=4096)
def algo_of(cls: Any) -> str:
    """ "locon", "loha", "lokr", or nothing: by the names that the class uses."""
    names = _names(cls)
    for name, algo in (("hada_w1_a", "loha"), ("lokr_w1", "lokr"), ("lora_down", "locon")):
        if {name, "scalar", "multiplier", "bypass_forward_diff"} <= names:
            return algo
    return ""


@functools.lru_cache(maxsize=4096)
def _names(cls: Any) -> frozenset[str]:
    """Every name that the forward uses, and what it calls of its own class."""
    found: set[str] = set()
    methods, seen = ["forward"], set[str]()

    def walk(code: CodeType) -> None:
        found.update(code.co_names)
        methods.extend(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                walk(constant)

    while methods:
        name = methods.pop()
        own = getattr(cls, name, None)
        if name in seen or own is None or own is getattr(nn.Module, name, None):
            continue
        seen.add(name)
        code = getattr(own.fget if isinstance(own, property) else own, "__code__", None)
        if isinstance(code, CodeType):
            walk(code)
    return frozenset(found)


def mode_of(module: Any, algo: str) -> Mode:
    conv = module.module_type != "linear"
    form = "tucker" if module.tucker else "conv" if conv else "linear"
    low_rank = (not module.use_w1, not module.use_w2) if algo == "lokr" else (False, False)
    decomposed = ("out" if module.wd_on_out else "in") if module.wd else ""
    ranks = bool(module.training and module.rank_dropout)
    return Mode(
        algo, form, bool(module.bypass_mode), decomposed, low_rank,
        conv and module.kw_dict.get("groups", 1) != 1, ranks, ranks and bool(module.rank_dropout_scale),
        output_dropout(module, algo) is not None, bool(module.training and module.module_dropout),
    )  # fmt: skip


def output_dropout(module: Any, algo: str) -> nn.Module | None:
    """The module that drops entries of the update in bypass mode, where it would do something."""
    drop = module.dropout if algo == "locon" else module.drop
    idle = type(drop) is nn.Identity or (type(drop) is nn.Dropout and not (drop.training and drop.p))
    return None if idle else drop


# ---- the formula in plain torch --------------------------------------------------------------------------------------


def formula(module: Any, x: Tensor, algo: str, facts: Facts) -> Tensor:
    """In bypass: y = base(x) + multiplier · dropout(x ΔWᵀ). Else: y = base(x) + x (W' - W)ᵀ, with
    W' = W + multiplier · ΔW, or DoRA's (multiplier (m / (‖W + ΔW‖ + eps) - 1) + 1) ∘ (W + ΔW).

    ΔW = scalar · scale · its factors. rank_dropout drops ranks in LoCon's bypass, rows of ΔW elsewhere (LoKr's bypass:
    nothing); by one mask for the whole batch, divided by its mean with rank_dropout_scale.
    """
    if module_dropped(module):
        return frozen_output(module, x, facts.dropped)
    base = frozen_output(module, x, facts.base)
    scale = module.scale if facts.scaled or not module.bypass_mode else 1.0
    delta = update_matrix(module, algo, drawn_mask(module, algo)) * module.scalar * scale
    if module.bypass_mode:
        y = module.op(x, delta * module.multiplier, **module.kw_dict)
        drop = output_dropout(module, algo)
        return base + (y if drop is None else drop(y))
    weight = module.org_module[0].weight.detach()
    if module.wd:
        made = weight + delta
        dims = [d for d in range(made.dim()) if d != (0 if module.wd_on_out else 1)]
        norms = torch.linalg.vector_norm(made, dim=dims, keepdim=True)
        gain = module.dora_scale / (norms + torch.finfo(module.dora_scale.dtype).eps)
        change = (module.multiplier * (gain - 1) + 1) * made - weight
    else:
        change = delta * module.multiplier
    return base + module.op(x, change, None, **module.kw_dict)


def module_dropped(module: Any) -> bool:
    return bool(module.module_dropout and module.training and torch.rand(1) < module.module_dropout)


def frozen_output(module: Any, x: Tensor, which: str) -> Tensor:
    if which == "called":
        return module.org_forward(x)
    layer = module.org_module[0]
    bias = None if layer.bias is None else layer.bias.detach()
    return module.op(x, layer.weight.detach(), bias, **module.kw_dict)


def drawn_mask(module: Any, algo: str) -> tuple[Tensor, float] | None:
    """Which ranks, or rows of ΔW, stay, drawn as the host draws them, and what the rest is multiplied by. Of nothing
    that stays the mean is 0 and the host's update NaN; here it is 0."""
    if not module.training or not module.rank_dropout or (algo == "lokr" and module.bypass_mode):
        return None
    ranks = algo == "locon" and module.bypass_mode
    size = module.lora_dim if ranks else module.shape[0]
    kept = torch.rand(size, device="cpu") > module.rank_dropout
    return kept, float(size / max(int(kept.sum()), 1)) if module.rank_dropout_scale else 1.0


def update_matrix(
    module: Any, algo: str, mask: tuple[Tensor, float] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The product of the factors in W's shape, without scalar and scale."""
    m: Any = module

    def of(name: str) -> Tensor:
        t: Tensor = getattr(m, name)
        return t if dtype is None else t.to(dtype)

    if algo == "locon":
        up = m.lora_up.weight.flatten(1).to(dtype or m.lora_up.weight.dtype)
        down = m.lora_down.weight.to(up.dtype)
        if mask is not None and m.bypass_mode:
            up, mask = up * (mask[0] * mask[1]).to(up.dtype), None
        if m.tucker:
            delta = torch.einsum("ij...,ni,jc->nc...", m.lora_mid.weight.to(up.dtype), up, down.flatten(1))
            delta = delta.contiguous()  # (the strides of a convolution's weight decide those of its output)
        else:
            delta = up @ down.flatten(1)
    elif algo == "loha":
        a1, b1, a2, b2 = (of(name) for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"))
        if m.tucker:
            delta = torch.einsum("ij...,in,jc->nc...", of("hada_t1"), a1, b1)
            delta = delta * torch.einsum("ij...,in,jc->nc...", of("hada_t2"), a2, b2)
        else:
            delta = (a1 @ b1) * (a2 @ b2)
    else:
        first = of("lokr_w1") if m.use_w1 else of("lokr_w1_a") @ of("lokr_w1_b")
        if m.use_w2:
            second = of("lokr_w2")
        elif m.tucker:
            second = torch.einsum("ij...,in,jc->nc...", of("lokr_t2"), of("lokr_w2_a"), of("lokr_w2_b"))
        else:
            second = of("lokr_w2_a") @ of("lokr_w2_b")
        delta = torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second.contiguous())
    delta = delta.reshape(m.shape)
    if mask is not None:
        rows = (mask[0] * mask[1]).to(delta.dtype)
        delta = delta * rows.reshape(-1, *[1] * (delta.dim() - 1))
    return delta


# ---- the proof -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def facts_of(cls: Any, mode: Mode) -> Facts | None:
    """The variant of `formula` that the class computes, with the same random numbers; None where it is none."""
    if _names(cls) - _KNOWN_NAMES:
        return None
    for base, dropped, scaled in itertools.product(("called", "made"), ("called", "made"), (True, False)):
        facts = Facts(base, dropped, scaled)
        if (base == "made" and mode.bypass) or (not scaled and not (mode.bypass and mode.algo == "lokr")):
            continue
        if _gives(cls, mode, facts):
            return facts
    return None


def _gives(cls: Any, mode: Mode, facts: Facts) -> bool:
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad():
        torch.manual_seed(1)
        probe, inputs = _probe(cls, mode)
        expected: Callable[[Any, Tensor], Tensor] = functools.partial(formula, algo=mode.algo, facts=facts)
        for multiplier, training in ((1, False), (0.75, False), (0.75, True), (1, True)):
            probe.multiplier = multiplier
            probe.train(training)
            repeats = 1 if not training else 8 if mode.whole else 2
            if not gives_formula(cls, expected, probe, inputs * repeats):
                return False
        probe.multiplier = 0.75
        return _gives_gradients(cls, expected, probe.eval(), inputs[0])


def _gives_gradients(cls: Any, expected: Callable[[Any, Tensor], Tensor], probe: Any, x: Tensor) -> bool:
    """The same for gradients: 3.x has LoHa's in Tucker's form by hand, and two of the six are wrong."""
    found = []
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_(), *probe.parameters()]
        for forward in (functools.partial(cls.forward, probe), functools.partial(expected, probe)):
            y = forward(leaves[0])
            found.append(torch.autograd.grad(y.square().sum(), leaves, allow_unused=True))
    return all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-8))
        for a, b in zip(*found, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def output_type(
    cls: Any, mode: Mode, types: tuple[torch.dtype, ...], cast: torch.dtype | None
) -> torch.dtype | None:
    """The type of the class's own result for types of x, the frozen layer, the factors and DoRA's magnitude, under
    autocast to `cast`; None where it refuses them."""
    x_type, layer, factors, magnitude = types
    with (
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", cast, enabled=cast is not None),
        torch.no_grad(),
    ):
        probe, inputs = _probe(cls, mode._replace(whole=False))
        probe.train()
        probe.to(factors)
        probe.org_module[0].to(layer)
        if mode.decomposed:
            probe.dora_scale.data = probe.dora_scale.data.to(magnitude)
        try:
            found = cls.forward(probe, inputs[0].to(x_type))
        except Exception:  # noqa: BLE001  whatever it lacks: the layer's own forward says it best
            return None
    return found.dtype if isinstance(found, Tensor) else None


def _probe(cls: type, mode: Mode) -> tuple[Any, list[Tensor]]:
    """An object of the class on a tiny frozen layer, made without its constructor, and inputs for it."""
    exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
    probe: Any = object.__new__(cls)
    nn.Module.__init__(probe)
    n, k, r, groups = 6, 4, 5, 2 if mode.grouped else 1
    size: tuple[int, ...] = () if mode.form == "linear" else (3, 3)
    if size:
        layer: nn.Module = nn.Conv2d(k, n, size, padding=1, groups=groups, **exact)
        inputs = [torch.randn(2, k, 4, 5, **exact)]
        keywords = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": groups}
    else:
        layer, keywords = nn.Linear(k, n, **exact), {}
        inputs = [torch.randn(2, 3, k, **exact), torch.randn(4, k, **exact)]
    k, taps = k // groups, 9 if size else 1
    values = {
        "lora_name": "probe", "lora_dim": r, "scale": 0.5, "multiplier": 0.75, "module": type(layer),
        "shape": (n, k, *size),
        "module_type": "conv2d" if size else "linear", "op": F.conv2d if size else F.linear, "dim": n,
        "kw_dict": keywords, "isconv": bool(size), "tucker": mode.form == "tucker", "bypass_mode": mode.bypass,
        "is_quant": False, "not_supported": False, "rank_dropout": 0.25 if mode.ranks else 0.0,
        "rank_dropout_scale": mode.ranks_scaled, "module_dropout": 0.5 if mode.whole else 0.0, "rs_lora": False,
        "wd": bool(mode.decomposed), "wd_on_out": mode.decomposed != "in", "dora_norm_dims": 1 + len(size),
        "use_w1": not mode.low_rank[0], "use_w2": not mode.low_rank[1], "full_matrix": False, "dropout": 0.0,
        "org_module": [layer], "org_forward": lambda x: layer(x) + 0.5,
    }  # fmt: skip
    probe.__dict__.update(values)
    drop = nn.Dropout(0.5) if mode.outputs else nn.Identity()
    if mode.algo == "locon":
        del probe.__dict__["dropout"]
        probe.dropout = drop
    probe.drop, probe.rank_drop = drop, nn.Dropout(0.25) if mode.ranks else nn.Identity()
    probe.register_buffer("dtype_tensor", torch.zeros((), **exact), persistent=False)
    probe.register_buffer("scalar", torch.tensor(1.25, **exact), persistent=False)
    shapes = _shapes(mode, n, k, r, taps, size)
    for name, shape in shapes.items():
        probe.register_parameter(name, nn.Parameter(torch.randn(shape, **exact)))
    if mode.algo == "locon":
        tucker = mode.form == "tucker"
        down, edge = ((1, 1), 0) if tucker else (size, 1)
        if not size:
            probe.lora_down, probe.lora_up = (
                nn.Linear(i, o, bias=False, **exact) for i, o in ((k, r), (r, n))
            )
        else:
            probe.lora_down = nn.Conv2d(k, r, down, padding=edge, bias=False, **exact)
            probe.lora_up = nn.Conv2d(r, n, 1, bias=False, **exact)
            if tucker:
                probe.lora_mid = nn.Conv2d(r, r, size, padding=1, bias=False, **exact)
    return probe, inputs


def _shapes(
    mode: Mode, n: int, k: int, r: int, taps: int, size: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Of the parameters that the module holds itself: n = 2 · 3 and k = c · d for LoKr."""
    shapes: dict[str, tuple[int, ...]] = {}
    tucker = mode.form == "tucker"
    if mode.algo == "loha":
        for i in (1, 2):
            shapes[f"hada_w{i}_a"] = (r, n) if tucker else (n, r)
            shapes[f"hada_w{i}_b"] = (r, k) if tucker else (r, k * taps)
            if tucker:
                shapes[f"hada_t{i}"] = (r, r, *size)
    elif mode.algo == "lokr":
        c, d = 2, k // 2
        first, second = mode.low_rank
        shapes |= {"lokr_w1_a": (2, r), "lokr_w1_b": (r, c)} if first else {"lokr_w1": (2, c)}
        if not second:
            shapes["lokr_w2"] = (3, d, *size)
        elif tucker:
            shapes |= {"lokr_t2": (r, r, *size), "lokr_w2_a": (r, 3), "lokr_w2_b": (r, d)}
        else:
            shapes |= {"lokr_w2_a": (3, r), "lokr_w2_b": (r, d * taps)}
    if mode.decomposed:
        ones = (1,) * len(size)
        shapes["dora_scale"] = (n, 1, *ones) if mode.decomposed == "out" else (1, k, *ones)
    return shapes

"""kohya's LoRA modules: their formula, and which classes follow it.

sd-scripts moves its files, and half a dozen trainers carry copies of the class, so a class is recognised by what it
does: its forward may use only names that `_KNOWN_NAMES` lists, and run on tiny layers it must give what `formula`
gives, draw for draw, in the mode that is going to be fused. A class that does something else keeps its own forward.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Attributes of the modules, and what their forwards call. A forward that uses another name does something unknown.
_KNOWN = """
org_forward lora_down lora_up lora_dim alpha scale multiplier training dropout rank_dropout module_dropout
split_dims ggpo_sigma ggpo_beta combined_weight_norms grad_norms perturbation_norm_factor org_module_shape
enabled network sub_prompt_index regional use_sub_prompt default_forward regional_forward sub_prompt_forward
torch nn functional F rand randn cat sqrt no_grad size shape dim ndim device dtype to unsqueeze mul_ T
range len zip enumerate float
"""
_KNOWN_NAMES = frozenset(_KNOWN.split())


@functools.lru_cache(maxsize=4096)
def is_class(cls: Any) -> bool:
    """A module that puts its forward in the place of a frozen layer's, which it calls; as it is without us."""
    if not issubclass(cls, nn.Module) or not callable(getattr(cls, "apply_to", None)):
        return False
    return "org_forward" in names_of(cls)


def is_applied(module: nn.Module) -> bool:
    """A module that has taken a frozen layer's place, whatever its class's forward looks like: a profiler or another
    extension may have put its own function there."""
    return callable(getattr(module, "apply_to", None)) and callable(module.__dict__.get("org_forward"))


def formula(module: Any, x: Tensor, base: Tensor | None = None) -> Tensor:
    """What such a module computes, in plain torch: y = base(x) + multiplier · scale · up(R ∘ H ∘ down(x)).

    H drops rank activations (F.dropout), R whole ranks of a sample, times 1 / (1 - p); with split_dims the same for
    each part of the outputs. With probability module_dropout, in training, the frozen layer alone. With GGPO and
    without split_dims, once its norms are there, a random perturbation on top in training.
    """
    if base is None:
        base = module.org_forward(x)
        if module_dropped(module):
            return base
    downs, ups = factors_of(module)
    hidden = [down(x) for down in downs]
    mode, scale = mode_of(module), module.scale
    if mode.hidden:
        hidden = [F.dropout(h, module.dropout) for h in hidden]
    if mode.ranks:
        masks = [drawn_ranks(h, module) for h in hidden]
        hidden = [h * mask for h, mask in zip(hidden, masks, strict=True)]
        scale = scale * (1.0 / (1.0 - module.rank_dropout))
    outputs = [up(h) for up, h in zip(ups, hidden, strict=True)]
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return perturbed(module, x, base + whole * module.multiplier * scale)


def module_dropped(module: Any) -> bool:
    p = getattr(module, "module_dropout", None)
    return p is not None and module.training and bool(torch.rand(1) < p)


def drawn_ranks(h: Tensor, module: Any) -> Tensor:
    """Which ranks of which sample stay, as the host draws them, in h's number of dimensions."""
    mask = torch.rand((h.size(0), module.lora_dim), device=h.device) > module.rank_dropout
    if h.dim() == 3:
        return mask.unsqueeze(1)
    return mask.unsqueeze(-1).unsqueeze(-1) if h.dim() == 4 else mask


def factors_of(module: Any) -> tuple[list[Any], list[Any]]:
    down, up = module.lora_down, module.lora_up
    if isinstance(down, nn.ModuleList) and isinstance(up, nn.ModuleList):
        return list(down), list(up)
    return [down], [up]


def names_of(cls: Any, methods: Sequence[str] = ("forward", "default_forward")) -> frozenset[str]:
    """Every name that these methods use, as far as the class has them (default_forward: kohya's inference)."""
    found: set[str] = set()
    for name in methods:
        code = getattr(getattr(cls, name, None), "__code__", None)
        if isinstance(code, CodeType):
            found |= names_in(code) | set(
                code.co_freevars
            )  # (those of a wrapper: the function that it wraps)
    return frozenset(found)


def names_in(code: CodeType) -> set[str]:
    """Every name that the code uses, that of functions inside it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found


class Mode(NamedTuple):
    """What of the formula a call uses."""

    form: str  # "linear", "conv" or "split"
    hidden: bool = False  # dropout of the rank activations
    ranks: bool = False  # rank_dropout
    whole: bool = False  # module_dropout
    perturbed: bool = False  # GGPO


@functools.lru_cache(maxsize=1024)
def follows_formula(cls: type, mode: Mode) -> bool:
    """True where the class computes `formula` with the same random numbers, in training in this mode, and without."""
    if names_of(cls) - _KNOWN_NAMES or (mode.perturbed and mode.form != "linear"):
        return False
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad():
        torch.manual_seed(1)
        probe, inputs = _probe(cls, mode)
        for training, repeats in ((False, 1), (True, 8 if mode.whole else 2)):
            probe.training = training
            if not gives_formula(cls, formula, probe, inputs * repeats):
                return False
    return True


def gives_formula(
    cls: Any, formula: Callable[[Any, Tensor], Tensor], probe: Any, inputs: list[Tensor]
) -> bool:
    """True where the class's forward gives the formula's values on every input, and draws the same numbers."""
    for x in inputs:
        state, python_state = torch.get_rng_state(), random.getstate()
        try:
            found = cls.forward(probe, x)
        except Exception:  # noqa: BLE001  whatever it needs, we do not know it
            return False
        after, python_after = torch.get_rng_state(), random.getstate()
        torch.set_rng_state(state)
        random.setstate(python_state)
        expected = formula(probe, x)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        same = torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        if not same or not torch.equal(after, torch.get_rng_state()) or python_after != random.getstate():
            return False
    return True


def _probe(cls: type, mode: Mode) -> tuple[Any, list[Tensor]]:
    """An object of the class on a tiny frozen layer, made without its constructor, and inputs for it."""
    exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    probe: Any = object.__new__(cls)
    nn.Module.__init__(probe)
    rank, parts = 3, [2, 4]
    if mode.form == "conv":
        frozen: nn.Module = nn.Conv2d(2, 6, 3, padding=1, **exact)
        down: nn.Module = nn.Conv2d(2, rank, 3, padding=1, bias=False, **exact)
        up: nn.Module = nn.Conv2d(rank, 6, 1, bias=False, **exact)
        inputs = [torch.randn(2, 2, 4, 5, **exact)]
    else:
        frozen = nn.Linear(5, 6, **exact)
        inputs = [torch.randn(4, 5, **exact), torch.randn(2, 7, 5, **exact)]
        if mode.form == "split":
            down = nn.ModuleList(nn.Linear(5, rank, bias=False, **exact) for _ in parts)
            up = nn.ModuleList(nn.Linear(rank, n, bias=False, **exact) for n in parts)
        else:
            down, up = nn.Linear(5, rank, bias=False, **exact), nn.Linear(rank, 6, bias=False, **exact)
    probe.lora_down, probe.lora_up = down, up
    probe.register_buffer("alpha", torch.tensor(1.5))
    values = {
        "org_forward": frozen.forward, "lora_name": "probe", "lora_dim": rank, "scale": 0.5, "multiplier": 0.75,
        "dropout": 0.5 if mode.hidden else None, "rank_dropout": 0.25 if mode.ranks else None,
        "module_dropout": 0.5 if mode.whole else None, "split_dims": parts if mode.form == "split" else None,
        "ggpo_sigma": 0.5, "ggpo_beta": 0.25, "perturbation_norm_factor": 0.125, "org_module_shape": (6, 5),
        "combined_weight_norms": torch.rand(6, 1, **exact) if mode.perturbed else None,
        "grad_norms": torch.rand(6, 1, **exact) if mode.perturbed else None,
        "enabled": True, "network": None, "regional": False, "use_sub_prompt": False,
    }  # fmt: skip
    for name, value in values.items():
        probe.__dict__[name] = value
    return probe, inputs


def mode_of(module: Any) -> Mode:
    if getattr(module, "split_dims", None) is not None:
        form = "split"
    else:
        form = "conv" if isinstance(module.lora_down, nn.Conv2d) else "linear"
    if not module.training:
        return Mode(form)
    hidden, ranks, whole = (
        getattr(module, p, None) is not None for p in ("dropout", "rank_dropout", "module_dropout")
    )
    return Mode(form, hidden, ranks, whole, is_perturbed(module))


def is_perturbed(module: Any) -> bool:
    """GGPO is on, and the norms that it needs are there."""
    names = ("ggpo_sigma", "ggpo_beta", "combined_weight_norms", "grad_norms")
    return module.training and all(getattr(module, name, None) is not None for name in names)


def perturbed(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """y with kohya's gradient-guided perturbation: x Pᵀ, P random, rows scaled by norms; no part of the gradients."""
    if not is_perturbed(module) or getattr(module, "split_dims", None) is not None:
        return y
    with torch.no_grad():
        spread = module.ggpo_sigma * module.combined_weight_norms + module.ggpo_beta * module.grad_norms**2
        weight = module_weight(module)
        spread = (spread * module.perturbation_norm_factor).to(weight.device)
        perturbation = torch.randn(module.org_module_shape, dtype=weight.dtype, device=weight.device).mul_(
            spread
        )
        moved = x @ perturbation.t()
    return y + moved


def module_weight(module: Any) -> Tensor:
    weight: Tensor = factors_of(module)[0][0].weight
    return weight

"""The norms that kohya's Flux networks take of their layers at each step: of the rows of B A after a step (GGPO), and
of s (B dA + dB A), the gradient that the weight itself would have (with GGPO and without it).

The host makes these matrices, of the layer's size, in the parameters' type (the second under autocast, on a CPU in
bfloat16). Here both come from Gram matrices in float32 and are rounded once, to the type of the host's result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from loraaccel._norms import gradient_row_squares, update_row_squares
from loraaccel.integrations import patched
from loraaccel.integrations.kohya_work import (
    Compared,
    Plan,
    Task,
    relative_error,
    uses_only,
    why_not_tensors,
)

_LOOP = frozenset({"text_encoder_loras", "unet_loras", "update_norms", "update_grad_norms"})
_KNOWN_NORMS = """
ggpo_beta ggpo_sigma training lora_up lora_down weight mul scale torch norm weight_norms sqrt sum
org_weight_norm_estimate combined_weight_norms no_grad
"""
_KNOWN_GRADS = """
training print lora_name named_parameters grad torch autocast device type scale lora_up lora_down weight grad_norms norm
"""
_NORMS, _GRADS = frozenset(_KNOWN_NORMS.split()), frozenset(_KNOWN_GRADS.split())
# verify: the host's roundings of a matrix before its norms are taken, or of the factors (autocast).
_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

# Attributes that a call sets, and their values, for each LoRA module.
_Values = list[tuple[Any, dict[str, Tensor]]]


def _modules(network: Any) -> list[Any]:
    return [*network.text_encoder_loras, *network.unet_loras]


# ---- norms of the update ---------------------------------------------------------------------------------------------


def _plan_norms(network: Any, args: tuple[Any, ...]) -> Plan | str:
    values: _Values = []
    for module in _modules(network):
        if module.ggpo_beta is None or module.ggpo_sigma is None or module.training is False:
            continue
        reason = _why_not(module, "update_norms", norms_follow)
        if reason:
            return reason
        found = _norms(module)
        if isinstance(found, str):
            return found
        values.append((module, found))
    if values and torch.is_autocast_enabled("cpu"):
        return "dtype"
    return _plan_of(values, network)


def _norms(module: Any) -> dict[str, Tensor] | str:
    halves: list[Any] = [getattr(half, "weight", None) for half in (module.lora_down, module.lora_up)]
    (down, up), frozen = halves, module.__dict__.get("org_weight_norm_estimate")
    reason = _why_not_factors(down, up) or why_not_tensors(frozen)
    if reason:
        return reason
    if frozen.dim() != 0:
        return "shape"
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        squares = update_row_squares(down, up)[:, None]
        if not squares.isfinite().all():
            return "values"
        norms = squares.sqrt().to(up.dtype)
        return {
            "weight_norms": norms,
            "combined_weight_norms": torch.sqrt(frozen**2 + squares.to(up.dtype)),
        }


# ---- norms of the gradient -------------------------------------------------------------------------------------------


def _plan_grads(network: Any, args: tuple[Any, ...]) -> Plan | str:
    values: _Values = []
    for module in _modules(network):
        if module.training is False:
            return ""  # the host says so, layer by layer
        reason = _why_not(module, "update_grad_norms", grads_follow)
        if reason:
            return reason
        found = _grads(module)
        if isinstance(found, str):
            return found
        if found:
            values.append((module, found))
    return _plan_of(values, network)


def _grads(module: Any) -> dict[str, Tensor] | str:
    parameters = dict(module.named_parameters())
    down, up = parameters.get("lora_down.weight"), parameters.get("lora_up.weight")
    if down is None or up is None or down.grad is None or up.grad is None:
        return {}
    reason = _why_not_factors(down, up) or why_not_tensors(down.grad, up.grad)
    if reason or {down.grad.dtype, up.grad.dtype} != {down.dtype}:
        return reason or "dtype"
    scale = module.scale
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        return "scaling_type"
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        squares = gradient_row_squares(down, up, down.grad, up.grad)[:, None]
        if not squares.isfinite().all():
            return "values"
        return {"grad_norms": (squares.sqrt() * abs(scale)).to(_dtype_of_grads(down.dtype))}


def _dtype_of_grads(dtype: torch.dtype) -> torch.dtype:
    """Of the host's result, which is made under autocast."""
    with torch.autocast("cpu"):
        product = torch.ones(1, 1, dtype=dtype) @ torch.ones(1, 1, dtype=dtype)
        return torch.norm(product, dim=1).dtype


# ---- both ------------------------------------------------------------------------------------------------------------


def _why_not(module: Any, method: str, follow: Callable[[Any], bool]) -> str:
    follows = method not in module.__dict__ and follow(patched.base_class(module))
    return "" if follows else "unknown_forward"


def _why_not_factors(down: Any, up: Any) -> str:
    reason = why_not_tensors(down, up)
    if reason:
        return reason
    if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
        return "shape"
    return "dtype" if down.dtype != up.dtype or down.dtype not in _BOUND else ""


def _plan_of(values: _Values, network: Any) -> Plan | str:
    return Plan(lambda: _set(values), functools.partial(_compare, values, network)) if values else ""


def _set(values: _Values) -> None:
    for module, attributes in values:
        for name, value in attributes.items():
            setattr(module, name, value)


def _compare(values: _Values, network: Any, host: Callable[..., Any]) -> Compared:
    """Of the host's method: it sets new tensors and changes nothing else, so that copies are not needed."""
    host(network)
    theirs: _Values = [(m, {name: getattr(m, name) for name in found}) for m, found in values]
    bound = max(_BOUND[t.dtype] for _, found in values for t in found.values())

    def error(result: None) -> float:
        return max(
            relative_error(ours[name], expected[name])
            for (_, ours), (_, expected) in zip(values, theirs, strict=True)
            for name in ours
        )

    return Compared(error, bound, lambda: _set(theirs))


# ---- proofs ----------------------------------------------------------------------------------------------------------


def _loops(cls: Any, method: str) -> bool:
    """True where the network's method calls the method of that name of each of its LoRA modules, and does no more."""
    if not uses_only(cls, method, _LOOP):
        return False
    calls: list[str] = []
    modules = [SimpleNamespace(**{method: functools.partial(calls.append, name)}) for name in "abc"]
    try:
        getattr(cls, method)(SimpleNamespace(text_encoder_loras=modules[:1], unet_loras=modules[1:]))
    except Exception:  # noqa: BLE001  whatever it needs, we do not know it
        return False
    return calls == ["a", "b", "c"]


@functools.lru_cache(maxsize=256)
def norms_follow(cls: Any) -> bool:
    """True where the LoRA module's update_norms sets what `_norms` finds."""
    return uses_only(cls, "update_norms", _NORMS) and _gives(cls, "update_norms", _norms)


@functools.lru_cache(maxsize=256)
def grads_follow(cls: Any) -> bool:
    """True where the LoRA module's update_grad_norms sets what `_grads` finds, and nothing without gradients."""
    return uses_only(cls, "update_grad_norms", _GRADS) and _gives(cls, "update_grad_norms", _grads)


def _gives(cls: Any, method: str, ours: Callable[[Any], dict[str, Tensor] | str]) -> bool:
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.manual_seed(1)
        for probe in _probes(cls):
            expected = ours(probe)
            before = set(probe.__dict__)
            try:
                getattr(cls, method)(probe)
            except Exception:  # noqa: BLE001  whatever it needs, we do not know it
                return False
            if isinstance(expected, str) or set(probe.__dict__) - before != set(expected):
                return False
            for name, value in expected.items():
                if relative_error(value, probe.__dict__[name]) > _BOUND[value.dtype]:
                    return False
    return True


def _probes(cls: Any) -> Iterator[Any]:
    """Objects of the class, made without its constructor: with gradients in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        probe: Any = object.__new__(cls)
        nn.Module.__init__(probe)
        exact: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": dtype}
        probe.lora_down, probe.lora_up = nn.Linear(7, 3, **exact), nn.Linear(3, 6, **exact)
        for parameter in probe.parameters():
            parameter.grad = torch.randn_like(parameter)
        probe.__dict__.update(
            lora_name="probe", scale=0.5, training=True, ggpo_beta=0.5, ggpo_sigma=0.25,
            org_weight_norm_estimate=torch.tensor(1.25),
        )  # fmt: skip
        yield probe


def _network_follows(method: str) -> Callable[[Any], bool]:
    return functools.lru_cache(maxsize=256)(lambda cls: _loops(cls, method))


NORMS = Task("norms of weights", "update_norms", _network_follows("update_norms"), _plan_norms)
GRADS = Task("norms of gradients", "update_grad_norms", _network_follows("update_grad_norms"), _plan_grads)

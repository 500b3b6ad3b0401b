"""Our operators as a kernel back end of LyCORIS 4.1, for CPU tensors.

LyCORIS chooses a back end at each call of its functions, has no way to add one, and runs plain torch on the CPU. So its
tables are written to; every name that is touched is looked for first, and put back by `unregister`. Served is what is
faster by measurement: LoHa's bypass, the product with (w1u w1d) ∘ (w2u w2d), as a LoRA layer of the product of the
ranks. Everything else, other types and other devices stay where LyCORIS puts them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loraaccel import _delta, _loha, _state
from loraaccel._autograd import _below_autograd

NAME = "loraaccel"
RELEASES = "4.1."
_TOUCHED = {
    "lycoris.kernels.dispatch": ("_PROBE", "ORDER", "FUSED", "_available", "order_for", "available_backends"),
    "lycoris.kernels.select": ("FUSED",),
    "lycoris.kernels.ops": ("FUSED", "get_ops"),
    "lycoris.kernels.library": ("NS", "loha_bypass_fwd", "loha_bypass_bwd"),
    "lycoris.functional.loha": ("FUSED", "choose", "bypass_forward_diff"),
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CPU = torch.device("cpu")

_undo: list[Callable[[], None]] = []  # in the order in which it was done


def is_registered() -> bool:
    return bool(_undo)


def why_not() -> str:
    """Why the back end cannot be registered with the LyCORIS that is installed; empty where it can."""
    try:
        version = importlib.metadata.version("lycoris-lora")
    except importlib.metadata.PackageNotFoundError:
        return "LyCORIS (pip install lycoris-lora) is not installed"
    if not version.startswith(RELEASES):
        return f"LyCORIS is {version}, expected {RELEASES}x: others keep their kernels' tables elsewhere"
    for module, names in _TOUCHED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            return f"LyCORIS {version}: {error}"
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            return f"LyCORIS {version}: {module} has no {', '.join(missing)}"
    return ""


def register() -> None:
    """Adds the back end "loraaccel". Registering twice changes nothing. RuntimeError, with nothing changed, where the
    installed LyCORIS is not the one that is known."""
    if _undo:
        return
    reason = why_not()
    if reason:
        raise RuntimeError(f"register_backend: {reason}")
    modules = {name: importlib.import_module(name) for name in _TOUCHED}
    dispatch, loha = modules["lycoris.kernels.dispatch"], modules["lycoris.functional.loha"]
    try:
        kernels = torch.library.Library(modules["lycoris.kernels.library"].NS, "IMPL")
        _undo.append(kernels._destroy)
        kernels.impl("loha_bypass_fwd", loha_bypass_fwd, "CPU")
        kernels.impl("loha_bypass_bwd", loha_bypass_bwd, "CPU")
        for name, module in _op_modules().items():
            sys.modules[name] = module
            _undo.append(functools.partial(sys.modules.__delitem__, name))
        _undo.append(modules["lycoris.kernels.ops"].get_ops.cache_clear)
        for name in ("dispatch", "select", "ops"):
            holder = modules[f"lycoris.kernels.{name}"]
            _set(holder, "FUSED", (*holder.FUSED, NAME))
        _set(loha, "FUSED", (*loha.FUSED, NAME))
        _set(loha, "choose", _chooser(loha.choose, dispatch))
        _set(dispatch, "order_for", _order(dispatch.order_for))
        _set(dispatch, "_PROBE", {**dispatch._PROBE, NAME: NAME})
        _set(dispatch, "ORDER", (NAME, *dispatch.ORDER))
        _set(dispatch, "_available", None)
    except Exception:
        unregister()
        raise


def unregister() -> bool:
    """Takes `register` back; False where nothing was registered."""
    found = bool(_undo)
    while _undo:
        _undo.pop()()
    return found


def _set(holder: ModuleType, name: str, value: Any) -> None:
    before = getattr(holder, name)
    _undo.append(lambda: setattr(holder, name, before))
    setattr(holder, name, value)


def _op_modules() -> dict[str, ModuleType]:
    """What `get_ops("loraaccel")` imports."""
    package, ops = (ModuleType(f"lycoris.kernels.{NAME}{part}") for part in ("", ".ops"))
    package.__path__ = []
    ops.loha_bypass_fwd = lambda x, a1, b1, a2, b2, gamma=1.0, base=None: loha_bypass_fwd(  # type: ignore[attr-defined]
        x, a1, b1, a2, b2, gamma, NAME, base
    )
    ops.loha_bypass_bwd = lambda grad, x, a1, b1, a2, b2, gamma=1.0: loha_bypass_bwd(  # type: ignore[attr-defined]
        grad, x, a1, b1, a2, b2, gamma, NAME
    )
    return {package.__name__: package, ops.__name__: ops}


def _order(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """No other device is offered a back end without kernels for it."""

    def order_for(device: Any) -> Any:
        names = original(device)
        elsewhere = device is not None and torch.device(device).type != "cpu"
        return tuple(name for name in names if name != NAME) if elsewhere else names

    return order_for


def _chooser(original: Callable[..., str], dispatch: ModuleType) -> Callable[..., str]:
    def choose(tensors: Sequence[Any], supported: bool = True, backend: str | None = None) -> str:
        asked = (backend or os.environ.get("LYCORIS_KERNEL_BACKEND", "auto")).lower()
        # (x and four factors: the bypass. The rebuild asks with six, the last two Tucker's.)
        served = asked in ("auto", NAME) and supported and len(tensors) == 5 and _is_served(tensors)
        if served and NAME in dispatch.available_backends(_CPU):
            return NAME
        return original(tensors, supported=supported, backend=backend)

    return choose


def _is_served(tensors: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling() or _state.off() or torch.is_autocast_enabled("cpu"):
        return False
    dtype = getattr(tensors[0], "dtype", None)
    if dtype not in _FLOATS or any(
        type(t) not in (Tensor, torch.nn.Parameter) or not t.is_cpu or t.dtype != dtype for t in tensors
    ):
        return False
    x, down, up, other, _ = tensors
    n, k, rank = up.shape[0], down.shape[1], down.shape[0] * other.shape[0]
    rows = x.numel() // max(k, 1)
    # torch's products run nearer to the machine's ceiling in 16 bit: half the multiplications, to be sure to gain.
    margin = 2 * rows if dtype.itemsize == 2 else rows + rows // 4
    return rank * (n + k) * margin <= n * k * (rows + down.shape[0] + other.shape[0])


# ---- the operators ---------------------------------------------------------------------------------------------------


def loha_bypass_fwd(
    x: Tensor,
    a1: Tensor,
    b1: Tensor,
    a2: Tensor,
    b2: Tensor,
    gamma: float,
    backend: str,
    base: Tensor | None = None,
) -> Tensor:
    """[base +] gamma · x ((a1 b1) ∘ (a2 b2))ᵀ, x [T, I], a1, a2 [O, R], b1, b2 [R, I]."""
    under = x.new_zeros(x.shape[0], a1.shape[0]) if base is None else base
    a, b = _loha.hadamard_factors(a1, b1, a2, b2)
    with _below_autograd():
        y: Tensor = _delta.forward_op(x, under, [a], [b], [gamma], [0.0], None)[0]
    return y


def loha_bypass_bwd(
    grad: Tensor, x: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, gamma: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a1, b1, a2, b2."""
    a, b = _loha.hadamard_factors(a1, b1, a2, b2)
    hidden = torch.mm(x, a.t()).float()
    with _below_autograd():
        gx, ga, gb = _delta.backward_op(
            grad, x, [a], [b], hidden, [gamma], [0.0], None, [True, True, True], (), 0.0, None, None
        )
    rank, other = b1.shape[0], b2.shape[0]
    ga, gb = ga.reshape(rank, other, -1), gb.reshape(-1, rank, other)
    return (
        gx, (gb * a2[:, None, :]).sum(2), (ga * b2[None]).sum(1), (gb * a1[:, :, None]).sum(1),
        (ga * b1[:, None]).sum(0),
    )  # fmt: skip

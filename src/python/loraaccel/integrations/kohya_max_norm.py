"""kohya's limit on the norms of the updates (scale_weight_norms), which the trainer applies after each step.

For each pair B, A of the network's state dict, with s = alpha / rows of A, the host makes the matrix s B A, takes its
norm n, and scales A and B by √(limit / n) where n is above the limit. Here n = |s| √Σ (Bᵀ B) ∘ (A Aᵀ), which makes no
matrix of the layer's size; what follows is the host's arithmetic in the host's types, for all pairs at once.

What changes: n carries the host's roundings no more. The host's float32 norm of 13 million numbers is off by 5e-4; in
bfloat16 n is rounded to 8 bits at the end as in the host. Whether a pair whose norm is that near the limit counts as
scaled may differ. The state dict is the network's own: where it holds merged copies (split QKV) they are scaled, as
in the host, and the network is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraaccel._norms import update_squares
from loraaccel.integrations.kohya_work import (
    Compared,
    Plan,
    Task,
    relative_error,
    uses_only,
    why_not_tensors,
)

_METHOD = "apply_max_norm_regularization"
_KNOWN = """
state_dict keys append replace to shape squeeze unsqueeze torch nn functional conv2d permute norm clamp cpu item range
len sum max
"""
_NAMES = frozenset(_KNOWN.split())
# Largest norm of B A whose matrix, and the sum of its squares, the host computes without an overflow.
_LARGEST = {torch.float64: 1e150, torch.float32: 1e18, torch.bfloat16: 1e18, torch.float16: 3e4}
# verify: what the host's roundings amount to (see above), in bits of the type for the 16-bit ones.
_BOUND = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class _Pair(NamedTuple):
    down: Tensor
    up: Tensor
    scale: float


class Limited(NamedTuple):
    """What will be done to the pairs."""

    pairs: list[_Pair]
    norms: list[float]  # as they are
    ratios: list[float]  # 1 for pairs below the limit
    factors: list[float]  # of A and of B
    after: list[float]

    def run(self) -> tuple[int, float, float]:
        scaled = 0
        for pair, ratio, factor in zip(self.pairs, self.ratios, self.factors, strict=True):
            if ratio != 1:
                scaled += 1
                pair.up.mul_(factor)
                pair.down.mul_(factor)
        return scaled, sum(self.after) / len(self.after), max(self.after)


def limited(state: dict[str, Tensor], limit: Any, device: Any) -> Limited | str:
    """The host's method on a state dict, without its effects; or a reason code."""
    if type(limit) not in (int, float) or not 0 < limit < math.inf:
        return "values"
    pairs = _pairs(state, torch.device(device))
    if isinstance(pairs, str):
        return pairs
    with torch.no_grad():
        squares = update_squares([(p.down.flatten(1), p.up.flatten(1)) for p in pairs])
    whole = squares.sqrt()
    scaled = whole * torch.tensor([abs(p.scale) for p in pairs], dtype=torch.float64)
    largest = torch.tensor([_LARGEST[p.up.dtype] for p in pairs], dtype=torch.float64)
    if not bool(((whole < largest) & (scaled < largest)).all()):  # (nor if there are numbers that are none)
        return "values"
    columns: list[list[float]] = [[0.0] * len(pairs) for _ in range(4)]
    for dtype in {p.up.dtype for p in pairs}:
        chosen = [i for i, p in enumerate(pairs) if p.up.dtype == dtype]
        found = _limit(scaled[chosen].to(dtype), float(limit))
        for column, values in zip(columns, found, strict=True):
            for i, value in zip(chosen, values.tolist(), strict=True):
                column[i] = value
    return Limited(pairs, *columns)


def _limit(norms: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norms, ratios, factors and the norms afterwards, each step rounded to the type as the host's numbers are."""
    bounded = norms.clamp(min=limit / 2)
    ratios = torch.clamp(bounded, max=limit) / bounded
    return norms, ratios, ratios**0.5, norms * ratios


def _pairs(state: dict[str, Tensor], device: torch.device) -> list[_Pair] | str:
    pairs: list[_Pair] = []
    seen: set[int] = set()
    for key in state:
        if "lora_down" not in key or "weight" not in key:
            continue
        up_key, alpha_key = key.replace("lora_down", "lora_up"), key.replace("lora_down.weight", "alpha")
        down, up, alpha = state[key], state.get(up_key), state.get(alpha_key)
        if up is None or alpha is None or alpha.dim() != 0:
            return "shape"
        reason = why_not_tensors(down, up)
        if reason:
            return reason
        if up.dtype != down.dtype or up.dtype not in _LARGEST:
            return "dtype"
        if {down.device.type, up.device.type, alpha.device.type} != {device.type}:
            return "device"  # (several processes on CPUs call theirs cpu:0)
        linear = down.dim() == up.dim() == 2
        conv = (
            down.dim() == up.dim() == 4
            and up.shape[2:] == (1, 1)
            and tuple(down.shape[2:]) in ((1, 1), (3, 3))
        )
        if not (linear or conv) or up.shape[1] != down.shape[0] or 0 in (*down.shape, *up.shape):
            return "shape"
        seen.update((down.data_ptr(), up.data_ptr()))
        pairs.append(_Pair(down, up, float(alpha / down.shape[0])))
    # Two layers with one adapter: the host would scale it before it looks at the second.
    return pairs if pairs and len(seen) == 2 * len(pairs) else "shape"


def _plan(network: Any, args: tuple[Any, ...]) -> Plan | str:
    limit, device = args
    if torch.is_autocast_enabled("cpu"):
        return "dtype"  # the host's products would be rounded
    state = network.state_dict()
    found = limited(state, limit, device)
    if isinstance(found, str):
        return found
    return Plan(found.run, functools.partial(_compare, state, found, limit, device))


def _compare(
    state: dict[str, Tensor], ours: Limited, limit: float, device: Any, host: Callable[..., Any]
) -> Compared:
    copies = {key: value.clone() for key, value in state.items()}
    result = host(SimpleNamespace(state_dict=lambda: copies), limit, device)
    bound = max(_BOUND[p.up.dtype] for p in ours.pairs)
    near = sum(abs(norm / limit - 1) <= bound for norm in ours.norms)

    def error(found: tuple[int, float, float]) -> float:
        if abs(found[0] - result[0]) > near:
            return 1.0
        errors = [relative_error(state[key], copies[key]) for key in state]
        errors += [
            abs(f - r) / max(abs(r), 1e-300) if f != r else 0.0
            for f, r in zip(found[1:], result[1:], strict=True)
        ]
        return max(errors)

    def adopt() -> Any:
        with torch.no_grad():
            for key, value in state.items():
                value.copy_(copies[key])
        return result

    return Compared(error, bound, adopt)


@functools.lru_cache(maxsize=256)
def follows(cls: Any) -> bool:
    """True where the class's method does to a tiny state dict what `limited` does, in float32 and in bfloat16."""
    if not uses_only(cls, _METHOD, _NAMES):
        return False
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.no_grad():
        torch.manual_seed(1)
        return all(_gives(getattr(cls, _METHOD), dtype) for dtype in (torch.float32, torch.bfloat16))


def _gives(host: Callable[..., Any], dtype: torch.dtype) -> bool:
    state, limit = _probe(dtype), 2.0
    ours = limited(state, limit, "cpu")
    assert isinstance(ours, Limited)
    try:
        expected = _compare(state, ours, limit, "cpu", host)
        return expected.error(ours.run()) <= expected.bound
    except Exception:  # noqa: BLE001  whatever it needs, we do not know it
        return False


def _probe(dtype: torch.dtype) -> dict[str, Tensor]:
    """Linear layers, a 1x1 and a 3x3 convolution, with norms of 0, far below the limit 2, a little below, and above."""
    state: dict[str, Tensor] = {}
    rank, shapes = 3, ((), (1, 1), (3, 3))
    for i, (kernel, norm) in enumerate((k, n) for k in shapes for n in (0.0, 0.25, 1.5, 5.0)):
        down, up = torch.randn(rank, 5, *kernel), torch.randn(6, rank, *([1] * len(kernel)))
        alpha = torch.tensor(2) if i % 2 else torch.tensor(1.5)
        update = float(alpha / rank) * (up.flatten(1) @ down.flatten(1))
        up *= norm / update.norm()
        name = f"lora_unet_{i}"
        state[f"{name}.alpha"] = alpha
        state[f"{name}.lora_down.weight"], state[f"{name}.lora_up.weight"] = down.to(dtype), up.to(dtype)
    return state


TASK = Task("max norm", _METHOD, follows, _plan, ("max_norm_value", "device"))

"""Weights kept in the order in which the kernels read them: set_packing(), and the copies that are kept. No torch.

By default a call packs W in blocks that fit the caches and keeps nothing. A kept copy saves that work (most where few
rows share it) and costs as many bytes as W, twice as many for a 16-bit type that the CPU cannot multiply.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from typing import Any

from loraaccel import _core

POLICIES = ("auto", "always", "never")
# Numbers of a weight that are compared besides its version: see `_look_at`.
_SAMPLES = 64

policy = "auto"
_budget: int | None = None
_lock = threading.RLock()
_counts: Counter[str] = Counter()
_kept: dict[tuple[int, bool], _Kept] = {}
_bytes = 0


class _Kept:
    """A packed copy and what the weight looked like when it was made."""

    __slots__ = ("look", "packed", "weight")

    def __init__(self, weight: weakref.ref[Any], look: tuple[Any, ...], packed: Any) -> None:
        self.weight, self.look, self.packed = weight, look, packed


def set_packing(new_policy: str = "auto", budget_bytes: int | None = None) -> None:
    """Whether packed copies of frozen weights are kept between calls.

    "auto" and "never": every call packs what it needs and keeps nothing; the model's memory stays what it is.
    "always": the first call of a layer with more than 16 rows keeps a packed copy of its weight (a second one in the
    first backward pass that needs the gradient of x), until ``budget_bytes`` in all are kept (None: no limit); layers
    that no longer fit pack per call. A copy is dropped with its weight, and made anew when the weight changed: by its
    version counter, address, shape, strides or dtype, or, for changes through ``.data`` that torch does not count, by
    64 of its numbers. A change through ``.data`` that touches none of those goes unseen: call
    ``set_packing("always")`` again, which drops all copies. Inside torch.compile'd code nothing is kept.

    ``loraaccel.info()["packing"]`` reports the bytes and how often a copy was used. Environment, read at import:
    ``LORAACCEL_PACKING=auto|always|never``, ``LORAACCEL_PACKING_BYTES=<number>``.
    Raises ValueError for another policy or a negative budget.
    """
    global policy, _budget
    if new_policy not in POLICIES:
        raise ValueError(f"set_packing: policy is {new_policy!r}, expected one of {', '.join(POLICIES)}")
    if budget_bytes is not None and budget_bytes < 0:
        raise ValueError(f"set_packing: budget_bytes is {budget_bytes}, expected 0 or more")
    with _lock:
        for key in list(_kept):
            _drop(key)
        policy, _budget = new_policy, budget_bytes


def _from_environment() -> None:
    name = os.environ.get("LORAACCEL_PACKING", "").strip().lower() or "auto"
    text = os.environ.get("LORAACCEL_PACKING_BYTES", "").strip()
    if name not in POLICIES:
        raise ValueError(f"LORAACCEL_PACKING={name}, expected one of {', '.join(POLICIES)}")
    if text and not text.isdecimal():
        raise ValueError(f"LORAACCEL_PACKING_BYTES={text}, expected a number of bytes")
    set_packing(name, int(text) if text else None)


def report() -> dict[str, Any]:
    with _lock:
        return {
            "policy": policy,
            "budget_bytes": _budget,
            "bytes": _bytes,
            "weights": len(_kept),
            **{name: _counts[name] for name in ("hits", "packed", "dropped", "over_budget")},
        }


def _look_at(weight: Any) -> tuple[Any, ...]:
    flat = weight.detach().view(-1)
    sample = flat[:: max(1, flat.shape[0] // _SAMPLES)].tolist()
    return (weight._version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, sample)


def _drop(key: tuple[int, bool]) -> None:
    global _bytes
    kept = _kept.pop(key, None)
    if kept is not None:
        _bytes -= kept.packed.numel()
        _counts["dropped"] += 1


def _bytes_needed(weight: Any, for_input_gradient: bool) -> int:
    """Bytes of its packed copy; 0 for what is no dense matrix in rows on the CPU, or only looks like a tensor."""
    import torch

    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.device.type != "cpu":
        return 0
    if weight.dim() != 2 or not weight.is_contiguous() or weight.is_inference():  # (those have no version)
        return 0
    rows, cols = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return _core.packed_weight_bytes(rows, cols, dtype, for_input_gradient)


def kept(weight: Any, rows: int, for_input_gradient: bool, pack: Any) -> Any:
    """The packed copy of `weight` that a call with so many rows may use, or None. `pack(weight, flag)` makes one."""
    global _bytes
    if policy != "always" or rows <= 16:
        return None
    size = _bytes_needed(weight, for_input_gradient)
    if size == 0:
        return None
    with _lock:
        key = (id(weight), for_input_gradient)
        found = _kept.get(key)
        look = _look_at(weight)
        if found is not None:
            if found.weight() is weight and found.look == look:
                _counts["hits"] += 1
                return found.packed
            _drop(key)
        if _budget is not None and _bytes + size > _budget:
            _counts["over_budget"] += 1
            return None
        packed = pack(weight, for_input_gradient)
        _kept[key] = _Kept(weakref.ref(weight, lambda _: _forget(key)), look, packed)
        _bytes += packed.numel()
        _counts["packed"] += 1
        return packed


def _forget(key: tuple[int, bool]) -> None:
    with _lock:
        found = _kept.get(key)
        if found is not None and found.weight() is None:
            _drop(key)


_from_environment()

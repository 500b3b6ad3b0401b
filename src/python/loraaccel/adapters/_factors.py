"""Entries as numpy factors, and factors as entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loraaccel.adapters._entry import Entry

BESIDE = {"dora_scale", "lora_bias", "diff_b"}
"""Tensors of an entry that a change of its factors leaves alone."""


def numbers(array: Any, what: str) -> np.ndarray:
    """A torch or numpy array as numpy's, bfloat16 as float32. ValueError, naming ``what``, where it is not finite."""
    if hasattr(array, "data_ptr"):
        tensor = array.detach().cpu()
        values: np.ndarray = (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
    else:
        values = np.asarray(array)
        if values.dtype.itemsize < 4 or values.dtype.kind == "V":
            values = values.astype(np.float32)
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        raise ValueError(f"{what} holds a NaN or an infinity, expected finite numbers")
    return values


def like(values: np.ndarray, original: Any) -> Any:
    """Values in the library and the type of another array, rounded."""
    if hasattr(original, "data_ptr"):
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).to(original.dtype)
    with np.errstate(over="ignore"):  # numbers too large become infinite, and the caller counts them
        return np.ascontiguousarray(values).astype(original.dtype)


@dataclass
class Factors:
    """up [out, r], down [r, columns] and the shapes they have in files; the update is scale * up @ down."""

    up: np.ndarray
    down: np.ndarray
    window: tuple[int, ...]
    """(in, k, k) of a convolution, (in,) of a matrix."""
    wide: bool
    """A weight of four dimensions."""
    turned: bool = False
    """Of an embedding: the update is the transpose."""


def name_of(entry: Entry) -> str:
    return f"{entry.component}.{entry.path}"


def key_of(entry: Entry, role: str) -> str:
    return entry.keys.get(role) or f"{name_of(entry)} ({role})"


def is_pair(entry: Entry) -> bool:
    return entry.kind in ("lora", "embedding")


def factors_of(entry: Entry) -> Factors:
    """The factors of a LoRA, LoCon or embedding entry; Tucker's core is multiplied into A."""
    if entry.kind == "embedding":
        a, b = (
            numbers(entry.tensors[role], key_of(entry, role)) for role in ("embedding_down", "embedding_up")
        )
        return Factors(b, a, a.shape[1:], False, turned=True)
    down = numbers(entry.tensors["lora_down"], key_of(entry, "lora_down"))
    up = numbers(entry.tensors["lora_up"], key_of(entry, "lora_up"))
    wide = down.ndim == 4
    window = down.shape[1:]
    if "lora_mid" in entry.tensors:
        mid = numbers(entry.tensors["lora_mid"], key_of(entry, "lora_mid"))
        down = np.einsum("ijuv,jc->icuv", mid.astype(np.float64), down.reshape(down.shape[0], -1))
        window = down.shape[1:]
        wide = True
    return Factors(up.reshape(up.shape[0], -1), down.reshape(down.shape[0], -1), window, wide)


def entry_with(
    entry: Entry, up: np.ndarray, down: np.ndarray, shape: Factors, scale: float, dtype: Any
) -> Entry:
    """The entry with other factors, of another rank, and a factor; its magnitude (DoRA) and bias stay. ``dtype``: an
    array whose type the factors get, or None for float32."""
    rank = down.shape[0]
    if shape.turned:
        a_role, b_role = "embedding_down", "embedding_up"
    else:
        a_role, b_role = "lora_down", "lora_up"
        down = down.reshape(rank, *shape.window)
        up = up.reshape(up.shape[0], rank, *([1, 1] if shape.wide else []))
    made = {
        a_role: down.astype(np.float32) if dtype is None else like(down, dtype),
        b_role: up.astype(np.float32) if dtype is None else like(up, dtype),
    }
    rest = {role: t for role, t in entry.tensors.items() if role in BESIDE}
    return replace(
        entry,
        kind="embedding" if shape.turned else "lora",
        tensors=made | rest,
        alpha=scale * rank,
        scale=scale,
        rank=rank,
        scale_rule="",
        scale_text="",
        keys={role: key for role, key in entry.keys.items() if role in made or role in rest},
    )


def rescaled(entry: Entry, factor: float) -> Entry:
    """The same update, multiplied."""
    if factor == 1:
        return entry
    scale = entry.scale * factor
    tensors = {role: t for role, t in entry.tensors.items() if role != "alpha"}
    rank = entry.rank
    return replace(entry, tensors=tensors, scale=scale, alpha=scale * rank if rank else None)


def lost(name: str, before: Mapping[str, np.ndarray], after: Mapping[str, Any]) -> list[str]:
    """Notes on numbers that became infinite, or all zero, in a smaller type."""
    notes = []
    for role, values in before.items():
        stored = after[role].float().numpy() if hasattr(after[role], "data_ptr") else np.asarray(after[role])
        infinite = int(np.count_nonzero(~np.isfinite(stored)))
        if infinite:
            notes.append(f"{name}: {infinite} numbers of {role} became infinite in {after[role].dtype}")
        zeros = int(np.count_nonzero((stored == 0) & (values.reshape(stored.shape) != 0)))
        if zeros > stored.size // 100:
            notes.append(
                f"{name}: {zeros} of {stored.size} numbers of {role} became zero in {after[role].dtype}"
            )
    return notes

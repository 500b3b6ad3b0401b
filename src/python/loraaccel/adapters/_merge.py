"""Adapters into base models, and out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraaccel import _core
from loraaccel.adapters._entry import Adapter
from loraaccel.adapters._files import load

Path = str | os.PathLike[str]


@dataclass
class Merged:
    """What a merge did."""

    paths: list[str]
    changed: int
    """Tensors of the base model that changed."""
    tensors: int
    unused: list[str]
    """Layers of adapters that the base model has not (allow_unmatched)."""
    notes: list[str]


@dataclass
class Unmerged:
    """What taking a merge back did."""

    path: str
    restored: int
    tensors: int


def merge(
    base: Path,
    adapters: Path | Adapter | Iterable[tuple[Path | Adapter, float]],
    target: Path,
    *,
    strength: float = 1.0,
    dtype: str | None = None,
    keep: Path | None = None,
    allow_unmatched: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Writes ``target``, the base model with adapters merged into its weights: W + strength * scale * B A in float32,
    rounded once. One tensor at a time is in memory.

    ``base``: a .safetensors file, or a folder of them (shards, or a diffusers pipeline), of which ``target`` becomes a
    copy. ``adapters``: a path or an adapter, or pairs of them with strengths. ``keep``: where to put the original bytes
    of what changes, for ``unmerge``: a file, or a folder where ``base`` is one. ``dtype``: type of the floating-point
    tensors of the result. ``progress`` is called with how many tensors are done, and of how many; what it raises ends
    the merge.

    Raises ValueError for layers that the base model has not (``allow_unmatched`` goes on), shapes that do not fit,
    quantised weights and numbers that are not finite, OSError for files; the target is then what it was."""
    pairs = list(_pairs(adapters))
    opened = [
        (a if isinstance(a, Adapter) else load(a, allow_unmatched=allow_unmatched), strength * s)
        for a, s in pairs
    ]
    for path in [os.fspath(a) for a, _ in pairs if not isinstance(a, Adapter)]:
        for place, what in ((target, "merged model"), (keep, "kept bytes")):
            if place is not None and os.path.exists(place) and os.path.samefile(path, place):
                raise ValueError(f"{os.fspath(place)} is an adapter, expected another place for the {what}")
    report = _core.adapter_merge(
        os.fspath(base),
        [(adapter._described(), s) for adapter, s in opened],
        os.fspath(target),
        dtype or "",
        os.fspath(keep) if keep is not None else "",
        allow_unmatched,
        progress,
    )
    return Merged(**report)


def _pairs(
    adapters: Path | Adapter | Iterable[tuple[Path | Adapter, float]],
) -> list[tuple[Path | Adapter, float]]:
    if isinstance(adapters, str | os.PathLike | Adapter):
        return [(adapters, 1.0)]
    return [(adapter, float(strength)) for adapter, strength in adapters]


def unmerge(merged: Path, kept: Path, target: Path) -> Unmerged:
    """Writes ``target``, the base model that ``merged`` was made of, byte for byte, with the file or folder that
    ``keep`` of ``merge`` named. Nothing is subtracted: that would round.

    Raises ValueError where the two are not of one merge; the target is then what it was."""
    report = _core.adapter_unmerge(os.fspath(merged), os.fspath(kept), os.fspath(target))
    return Unmerged(path=os.fspath(target), restored=report["changed"], tensors=report["tensors"])

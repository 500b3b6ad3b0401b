"""Adapters of another rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from loraaccel import _core
from loraaccel.adapters import _metadata
from loraaccel.adapters._entry import Adapter, Entry
from loraaccel.adapters._factors import (
    Factors,
    entry_with,
    factors_of,
    is_pair,
    lost,
    name_of,
)
from loraaccel.adapters._files import Written, load, save
from loraaccel.adapters._ranks import Kept, check_method, check_rank, choose_rank, kept
from loraaccel.adapters._svd import matrix_svd, product_svd
from loraaccel.adapters._workers import Progress, each

Path = str | os.PathLike[str]
DELTA_KINDS = ("loha", "lokr")
WINDOWS = {"conv1": (1, 1), "conv2": (2, 2), "conv3": (3, 3)}


@dataclass
class ResizedLayer:
    """One layer's change of rank."""

    component: str
    path: str
    old_rank: int
    new_rank: int
    alpha: float
    fro_retained: float
    sum_retained: float
    max_ratio: float


@dataclass
class Resized:
    """What a change of rank did."""

    adapter: Adapter
    layers: list[ResizedLayer]
    kept: list[str]
    """Layers that are as they were: no pair of factors."""
    paths: list[str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """All but the tensors."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "kept": self.kept,
            "paths": self.paths,
            "notes": self.notes,
        }


def resize(
    source: Path | Adapter,
    target: Path | None = None,
    rank: int = 4,
    *,
    conv_rank: int | None = None,
    method: str | None = None,
    param: float | None = None,
    rebuild: bool = False,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    base: str | None = None,
    modules: Iterable[str] = (),
    allow_unmatched: bool = False,
    progress: Progress | None = None,
) -> Resized:
    """The best approximation of every layer's update with another rank; written to ``target`` where it is given.

    ``rank``: of matrices, or the most where ``method`` chooses. ``conv_rank``: of weights with four dimensions, 1x1
    convolutions too; default ``rank``. ``method``: "sv_ratio", "sv_fro" or "sv_cumulative" with ``param``, as in
    sd-scripts' resize_lora, whose ranks these are. No layer gets more than its update has; the factor of the update
    (alpha / rank) stays, B becomes U S and A becomes V^T.

    Tucker's cores are multiplied into A. A magnitude (DoRA) stays. LoHa and LoKr layers are an error, or with
    ``rebuild`` become LoRA; whole differences, norms and other kinds stay as they are. ``format`` and ``dtype``:
    those of the source where not given.

    Raises ValueError naming the layer for numbers that are not finite, and as ``load`` and ``save`` do; the target is
    then what it was."""
    rank = check_rank("rank", rank)
    conv_rank = rank if conv_rank is None else check_rank("conv_rank", conv_rank)
    param = check_method(method, param)
    adapter = opened(source, base, modules, allow_unmatched)
    pairs = [e for e in adapter.entries if is_pair(e) or (rebuild and e.kind in DELTA_KINDS)]
    refuse_deltas(adapter, rebuild)
    if not pairs:
        kinds = sorted({e.kind for e in adapter.entries})
        raise ValueError(
            f"{_title(source)} has no pair of factors to resize, only layers of kind {', '.join(kinds)}"
        )
    work = functools.partial(
        _resize_entry,
        base=adapter.base,
        rank=rank,
        conv_rank=conv_rank,
        method=method,
        param=param,
        cast=dtype is None,
    )
    done = {id(e): result for e, result in zip(pairs, each(work, pairs, len(pairs), progress), strict=True)}
    entries = [done[id(e)][0] if id(e) in done else e for e in adapter.entries]
    layers = [layer for _, layer, _ in done.values()]
    notes = [*adapter.notes, *(note for _, _, more in done.values() for note in more)]
    # the numbers that sd-scripts writes are those of the last layer
    metadata = _metadata.resized(
        adapter.metadata, max(x.old_rank for x in layers), rank, conv_rank, layers[-1].alpha, method, param
    )
    result = replace(adapter, entries=entries, metadata=metadata)
    written = written_to(result, target, format, dtype)
    return Resized(
        result,
        layers,
        [f"{name_of(e)} ({e.kind})" for e in adapter.entries if id(e) not in done],
        written.paths,
        notes + written.notes,
    )


def opened(
    source: Path | Adapter, base: str | None, modules: Iterable[str] = (), allow_unmatched: bool = False
) -> Adapter:
    if isinstance(source, Adapter):
        return source
    return load(source, base=base, modules=modules, allow_unmatched=allow_unmatched)


def written_to(adapter: Adapter, target: Path | None, format: str | None, dtype: str | None) -> Written:  # noqa: A002
    return Written([], [], "") if target is None else save(adapter, target, format, dtype=dtype)


def refuse_deltas(adapter: Adapter, rebuild: bool) -> None:
    others = [e for e in adapter.entries if e.kind in DELTA_KINDS]
    if others and not rebuild:
        raise ValueError(
            f"{name_of(others[0])} and {len(others) - 1} other layers are {others[0].kind}, which has no rank to "
            "change; rebuild makes LoRA of their updates"
        )


def dense_factors(entry: Entry, base: str) -> tuple[np.ndarray, Factors]:
    """The update of a LoHa or LoKr layer, its factor included, [out, columns], and the shapes that factors of it
    have."""
    delta = entry.delta()
    window = _window(entry, base)
    if not window:
        return delta, Factors(delta, delta, (delta.shape[1],), False)
    return delta, Factors(delta, delta, (delta.shape[1] // (window[0] * window[1]), *window), True)


def _window(entry: Entry, base: str) -> tuple[int, ...]:
    """(k, k) of a convolution: of a tensor of four dimensions, else what the name table says of the layer; () of
    others."""
    for role, tensor in entry.tensors.items():
        if getattr(tensor, "ndim", 0) == 4 and role != "dora_scale":
            return tuple(int(size) for size in tensor.shape[2:])
    return WINDOWS.get(_kinds(base).get((entry.component, entry.path), ""), ())


@functools.cache
def _kinds(base: str) -> dict[tuple[str, str], str]:
    return {(name[0], name[1]): name[2] for name in _core.adapter_names(base)} if base else {}


def _resize_entry(
    entry: Entry, base: str, rank: int, conv_rank: int, method: str | None, param: float, cast: bool
) -> tuple[Entry, ResizedLayer, list[str]]:
    limits = {True: conv_rank, False: rank}
    name = name_of(entry)
    notes = []
    try:
        if is_pair(entry):
            shape, scale = factors_of(entry), entry.scale
            keep = functools.partial(choose_rank, limit=limits[shape.wide], method=method, param=param)
            values, (up, down) = product_svd(shape.up, shape.down, keep)
        else:
            matrix, shape = dense_factors(entry, base)
            if not np.isfinite(matrix).all():
                raise ValueError(f"{name} holds a NaN or an infinity, expected finite numbers")
            scale = 1.0
            keep = functools.partial(choose_rank, limit=limits[shape.wide], method=method, param=param)
            values, (up, down) = matrix_svd(matrix, keep)
    except np.linalg.LinAlgError as error:
        raise ValueError(f"{name}: its singular values cannot be computed: {error}") from error
    if "lora_mid" in entry.tensors:
        notes.append(f"{name}: Tucker's core is multiplied into A")
    like = next(t for role, t in entry.tensors.items() if role not in ("alpha", "dora_scale"))
    made = entry_with(entry, up, down, shape, scale, like if cast else None)
    if cast:
        a, b = ("embedding_down", "embedding_up") if shape.turned else ("lora_down", "lora_up")
        notes += lost(name, {a: down, b: up}, made.tensors)
    measured: Kept = kept(values, down.shape[0])
    layer = ResizedLayer(
        entry.component,
        entry.path,
        entry.rank,
        measured.rank,
        scale * measured.rank,
        measured.fro_retained,
        measured.sum_retained,
        measured.max_ratio,
    )
    return made, layer, notes


def _title(source: Path | Adapter) -> str:
    return "the adapter" if isinstance(source, Adapter) else os.fspath(source)

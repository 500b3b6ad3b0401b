"""Several adapters as one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from loraaccel import _core
from loraaccel.adapters import _metadata
from loraaccel.adapters._entry import Adapter, Entry, adapter_of
from loraaccel.adapters._factors import (
    Factors,
    entry_with,
    factors_of,
    is_pair,
    key_of,
    like,
    lost,
    name_of,
    numbers,
    rescaled,
)
from loraaccel.adapters._files import _read_options, _write_options
from loraaccel.adapters._ranks import check_method, check_rank, choose_rank
from loraaccel.adapters._resize import DELTA_KINDS, Path, dense_factors, opened, written_to
from loraaccel.adapters._svd import balanced, matrix_svd, product_norm, product_svd
from loraaccel.adapters._workers import Progress, each

CANCELLED = 1e-4  # a sum of fp16 files that is smaller than this, relative to its parts, is their rounding


@dataclass
class CombinedLayer:
    """One layer of the sum."""

    component: str
    path: str
    kind: str
    rank: int
    sources: list[int]
    """Which adapters have the layer, from 0."""
    error: float
    """|what is stored - the sum| / |the sum|, without a cast that ``dtype`` asks for; 0 where no number changed. Where
    the updates cancel each other, |their sum| < 1e-4 sqrt(sum |update|^2), the divisor is that root, and a note says
    so."""


@dataclass
class Combined:
    """What a combination did."""

    adapter: Adapter
    layers: list[CombinedLayer]
    paths: list[str]
    notes: list[str]

    @property
    def largest_error(self) -> float:
        return max((layer.error for layer in self.layers), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """All but the tensors."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "largest_error": self.largest_error,
            "paths": self.paths,
            "notes": self.notes,
        }


def combine(
    adapters: Iterable[tuple[Path | Adapter, float]],
    target: Path | None = None,
    *,
    rank: int | None = None,
    conv_rank: int | None = None,
    method: str | None = None,
    param: float | None = None,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    base: str | None = None,
    modules: Iterable[str] = (),
    progress: Progress | None = None,
) -> Combined:
    """One adapter whose update of every layer is the weighted sum of theirs; written to ``target`` where it is given.

    Factors are stacked, B = [c1 B1, c2 B2 ...] and A = [A1; A2 ...] with c = weight * scale, so that the sum is
    exact, and the rank is the sum of the ranks. Where all c are equal no number changes and c is the factor; else the
    factor is 1 and c is in B and, as a power of two, in A. With ``rank`` (and ``conv_rank``, ``method``, ``param`` as
    of ``resize``) the sum is then approximated, and ``CombinedLayer.error`` says how well. Layers of one adapter only
    are in the sum as well.

    Whole differences and norms are added. LoHa and LoKr have no exact sum with others: an error without ``rank``.
    Layers with a magnitude (DoRA), and of kinds that multiply, are no sums: an error, but for one adapter with weight
    1. ``format``: the first adapter's. ``dtype``: each layer's own.

    Raises ValueError naming the layer; the target is then what it was."""
    limits = _limits(rank, conv_rank)
    param = check_method(method, param)
    if method is not None and rank is None:
        raise ValueError(f"method is {method!r} without a rank, expected the most that it may choose")
    opened_all = [(opened(a, base, modules), float(w)) for a, w in adapters]
    if not opened_all:
        raise ValueError("there is no adapter to combine")
    for i, (_, weight) in enumerate(opened_all):
        if not abs(weight) <= float(np.finfo(np.float32).max):
            raise ValueError(
                f"the weight of adapter {i + 1} is {weight}, expected a number that float32 holds"
            )
    notes = [f"adapter {i + 1} has weight 0 and is left out" for i, (_, w) in enumerate(opened_all) if w == 0]
    sources = [(i, a, w) for i, (a, w) in enumerate(opened_all) if w != 0]
    if not sources:
        raise ValueError("all weights are 0, expected one that is not")
    first = sources[0][1]
    for i, adapter, _ in sources[1:]:
        if adapter.base != first.base:
            raise ValueError(
                f"adapter {sources[0][0] + 1} is of {first.base or 'no known base model'} and adapter {i + 1} of "
                f"{adapter.base or 'no known base model'}, expected one base model"
            )
    sources = _alike(sources, format or first.format, modules)
    groups: dict[Any, list[tuple[int, Entry, float]]] = {}
    for i, adapter, weight in sources:
        for entry in adapter.entries:
            groups.setdefault(entry.key, []).append((i, entry, weight))
    work = functools.partial(
        _sum, base=first.base, limits=limits, method=method, param=param, cast=dtype is None
    )
    results = each(work, groups.values(), len(groups), progress)
    entries = [entry for entry, _, _ in results]
    metadata = first.metadata
    if len(opened_all) > 1 or rank is not None:
        metadata = {**_metadata.shared([a.metadata for _, a, _ in sources]), **_metadata.network(entries)}
    result = replace(first, entries=entries, metadata=metadata)
    written = written_to(result, target, format, dtype)
    notes += [note for _, _, more in results for note in more]
    return Combined(result, [layer for _, layer, _ in results], written.paths, notes + written.notes)


def _limits(rank: int | None, conv_rank: int | None) -> dict[bool, int] | None:
    """The most ranks of weights with four dimensions (True) and others; None: all that there are."""
    if rank is None:
        if conv_rank is not None:
            raise ValueError("conv_rank goes with rank, expected both")
        return None
    matrix = check_rank("rank", rank)
    return {False: matrix, True: matrix if conv_rank is None else check_rank("conv_rank", conv_rank)}


def _alike(
    sources: list[tuple[int, Adapter, float]],
    spelling: str,
    modules: Iterable[str],
) -> list[tuple[int, Adapter, float]]:
    """Adapters whose entries divide the layers into the same rows: where they do not, in the target's spelling."""
    divisions: dict[tuple[str, str], set[Any]] = {}
    for _, adapter, _ in sources:
        own: dict[tuple[str, str], list[Any]] = {}
        for entry in adapter.entries:
            own.setdefault((entry.component, entry.path), []).append(entry.key[2])
        for layer, rows in own.items():
            divisions.setdefault(layer, set()).add(tuple(sorted(rows)))
    if all(len(ways) == 1 for ways in divisions.values()):
        return sources
    return [(i, respelled(adapter, spelling, modules), w) for i, adapter, w in sources]


def respelled(adapter: Adapter, format: str, modules: Iterable[str] = ()) -> Adapter:  # noqa: A002
    """The adapter as it is after being written in a format and read again."""
    described = adapter._described()
    entries: list[Any] = []
    for file in _core.adapter_spell(described, _write_options(format, None, False, False)):
        options = _read_options(adapter.base or None, file["folder"] or None, False, modules)
        read = _core.adapter_read_tensors(
            "the adapter", file["tensors"], dict(adapter.metadata), file["config"], options
        )
        entries += adapter_of(read, None).entries
    return replace(adapter, entries=entries, format=format)


def _sum(
    group: list[tuple[int, Entry, float]],
    base: str,
    limits: dict[bool, int] | None,
    method: str | None,
    param: float,
    cast: bool,
) -> tuple[Entry, CombinedLayer, list[str]]:
    notes: list[str] = []
    error = 0.0
    indices = [index for index, _, _ in group]
    everything = group
    # what has only a bias's difference is no part of the weight's
    group = [part for part in group if part[1].kind != "full" or "diff" in part[1].tensors] or group
    _, first, weight = group[0]
    if any("dora_scale" in e.tensors for _, e, _ in group) and (len(group) > 1 or weight != 1 or limits):
        raise ValueError(
            f"{name_of(first)} has a magnitude (DoRA), which makes it not combinable: its update is no sum"
        )
    kinds = {e.kind for _, e, _ in group}
    if len(group) == 1 and (limits is None or not (is_pair(first) or first.kind in DELTA_KINDS)):
        made = _alone(first, weight, cast)
    elif kinds <= {"lora"} or kinds == {"embedding"}:
        made, error, notes = _pairs(group, limits, method, param, cast)
    elif (
        kinds <= {"full"}
        or kinds <= {"norm"}
        or (kinds <= {"lora", "full", *DELTA_KINDS} and "full" in kinds)
    ):
        made = _whole(group, cast)
    elif kinds <= {"lora", *DELTA_KINDS}:
        if limits is None:
            raise ValueError(
                f"{name_of(first)} is {' and '.join(sorted(kinds))} in the adapters, whose sum has no exact form; "
                "a rank makes LoRA of it"
            )
        made, error, notes = _deltas(group, base, limits, method, param, cast)
    else:
        raise ValueError(
            f"{name_of(first)} is {' and '.join(sorted(kinds))} in the adapters, which is not combinable"
        )
    made = _with_vectors(made, everything, cast)
    layer = CombinedLayer(first.component, first.path, made.kind, made.rank, indices, error)
    return made, layer, notes


def _alone(entry: Entry, weight: float, cast: bool) -> Entry:
    if weight == 1:
        return entry
    if entry.kind in ("lora", "loha", "lokr", "embedding"):
        return rescaled(entry, weight)
    if entry.kind in ("full", "norm"):
        return _whole([(0, entry, weight)], cast)
    raise ValueError(f"{name_of(entry)} is of kind {entry.kind}, which has no weight but 1, found {weight}")


def _pairs(
    group: list[tuple[int, Entry, float]],
    limits: dict[bool, int] | None,
    method: str | None,
    param: float,
    cast: bool,
) -> tuple[Entry, float, list[str]]:
    first = group[0][1]
    parts = [(factors_of(e), e.scale * w) for _, e, w in group]
    shape = parts[0][0]
    for (f, _), (i, e, _) in zip(parts[1:], group[1:], strict=True):
        if f.up.shape[0] != shape.up.shape[0] or f.window != shape.window:
            raise ValueError(
                f"{name_of(e)} changes a weight of {f.up.shape[0]} x {f.window} in adapter {i + 1}, and of "
                f"{shape.up.shape[0]} x {shape.window} in adapter {group[0][0] + 1}"
            )
        shape.wide = shape.wide or f.wide
    common = parts[0][1]
    even = limits is None and all(c == common for _, c in parts)
    scaled = [(f.up, f.down) if even else _multiplied(f.up, f.down, c) for f, c in parts]
    up = np.concatenate([u for u, _ in scaled], axis=1)
    down = np.concatenate([d for _, d in scaled], axis=0)
    exact = (up, down)
    scale = common if even else 1.0
    if limits is not None:
        keep = functools.partial(choose_rank, limit=limits[shape.wide], method=method, param=param)
        _, pair = product_svd(up, down, keep)
        up, down = balanced(pair)
    made, notes = _stored(first, [e for _, e, _ in group], up, down, shape, scale, cast)
    if even:
        return made, 0.0, notes
    error, more = _relative_error(
        first, _residual(exact, made), product_norm(*exact), [product_norm(*p) for p in scaled]
    )
    return made, error, notes + more


def _multiplied(up: np.ndarray, down: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors of c B A. Half of the power of two goes to A, without rounding, so that neither gets small."""
    half = int(np.frexp(abs(c))[1]) // 2
    return up.astype(np.float64) * np.ldexp(c, -half), down.astype(np.float64) * np.ldexp(1.0, half)


def _stored(
    first: Entry,
    entries: list[Entry],
    up: np.ndarray,
    down: np.ndarray,
    shape: Factors,
    scale: float,
    cast: bool,
) -> tuple[Entry, list[str]]:
    """In the widest of their types."""
    if not cast:
        return entry_with(first, up, down, shape, scale, None), []
    main = [next(t for role, t in e.tensors.items() if role not in ("alpha", "dora_scale")) for e in entries]
    made = entry_with(first, up, down, shape, scale, max(main, key=lambda t: t.itemsize))
    a, b = ("embedding_down", "embedding_up") if shape.turned else ("lora_down", "lora_up")
    return made, lost(name_of(first), {a: down, b: up}, made.tensors)


def _residual(exact: tuple[np.ndarray, np.ndarray], made: Entry) -> float:
    """Of the numbers as they are stored, cast included."""
    stored = factors_of(made)
    up = np.concatenate([exact[0], -made.scale * stored.up.astype(np.float64)], axis=1)
    down = np.concatenate([exact[1], stored.down.astype(np.float64)], axis=0)
    return product_norm(up, down)


def _relative_error(
    entry: Entry, residual: float, total: float, parts: Sequence[float]
) -> tuple[float, list[str]]:
    """``CombinedLayer.error`` of norms, and its note."""
    largest = float(np.linalg.norm(parts))
    if total >= CANCELLED * largest:
        return residual / total if total > 0 else 0.0, []
    note = f"{name_of(entry)}: the updates cancel each other; its error is relative to them, not to their sum"
    return residual / largest, [note]


def _deltas(
    group: list[tuple[int, Entry, float]],
    base: str,
    limits: dict[bool, int],
    method: str | None,
    param: float,
    cast: bool,
) -> tuple[Entry, float, list[str]]:
    first = group[0][1]
    total, shape, parts = _delta_and_shape(group, base)
    keep = functools.partial(choose_rank, limit=limits[shape.wide], method=method, param=param)
    _, pair = matrix_svd(total, keep)
    made, notes = _stored(first, [e for _, e, _ in group], *balanced(pair), shape, 1.0, cast)
    residual = float(np.linalg.norm(total - made.delta()))
    error, more = _relative_error(first, residual, float(np.linalg.norm(total)), parts)
    return made, error, notes + more


def _delta_and_shape(
    group: list[tuple[int, Entry, float]], base: str
) -> tuple[np.ndarray, Factors, list[float]]:
    """The sum, how its pair is stored, and the norms of what is summed."""
    total: Any = 0.0
    norms: list[float] = []
    shape = None
    for i, entry, weight in group:
        delta = entry.delta()
        if np.ndim(total) and delta.shape != total.shape:
            raise ValueError(
                f"{name_of(entry)} changes a weight of {delta.shape} in adapter {i + 1}, and of {total.shape} before"
            )
        if not np.isfinite(delta).all():
            raise ValueError(f"{name_of(entry)} holds a NaN or an infinity, expected finite numbers")
        norms.append(float(np.linalg.norm(weight * delta)))
        total = total + weight * delta
        own = factors_of(entry) if entry.kind == "lora" else dense_factors(entry, base)[1]
        shape = own if shape is None or own.wide else shape
    assert shape is not None
    return total, shape, norms


def _whole(group: list[tuple[int, Entry, float]], cast: bool) -> Entry:
    """A sum of whole differences, with others' updates in it, or of norms."""
    first = next((e for _, e, _ in group if e.kind in ("full", "norm")), group[0][1])
    tensors: dict[str, Any] = {}
    if "diff" in first.tensors:
        total: Any = 0.0
        for _, entry, weight in group:
            if entry.kind != "full" or "diff" in entry.tensors:
                total = total + weight * entry.delta()
        original = first.tensors["diff"]
        total = total.reshape(tuple(original.shape))
        tensors["diff"] = like(total, original) if cast else total.astype(np.float32)
    return replace(
        first, kind="full" if "diff" in first.tensors else first.kind, tensors=tensors, alpha=None, scale=1.0
    )


def _with_vectors(made: Entry, group: list[tuple[int, Entry, float]], cast: bool) -> Entry:
    """Biases, and weights of norms, added up: an adapter's own bias with its factor."""
    tensors = dict(made.tensors)
    changed = len(group) > 1 or group[0][2] != 1
    for role in ("diff_b", "w_norm", "b_norm", "lora_bias"):
        owners = [(e, w * (e.scale if role == "lora_bias" else 1)) for _, e, w in group if role in e.tensors]
        if not owners or not (changed or role not in tensors):
            continue
        if len(owners) == 1 and role == "lora_bias" and len(group) == 1:
            continue  # the layer's factor has the weight
        total = sum(c * numbers(e.tensors[role], key_of(e, role)).astype(np.float64) for e, c in owners)
        if role == "lora_bias":
            total = total / made.scale
        tensors[role] = like(np.asarray(total), owners[0][0].tensors[role]) if cast else np.float32(total)
    return replace(made, tensors=tensors)

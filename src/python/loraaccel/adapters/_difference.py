"""Two adapters compared by what they add to the weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loraaccel.adapters._combine import _alike
from loraaccel.adapters._entry import Adapter, Entry
from loraaccel.adapters._factors import factors_of, is_pair, key_of, name_of, numbers
from loraaccel.adapters._resize import Path, opened
from loraaccel.adapters._svd import product_norm
from loraaccel.adapters._workers import Progress, each

WITH_DELTA = ("lora", "loha", "lokr", "full", "embedding")
VECTORS = ("dora_scale", "lora_bias", "diff_b", "w_norm", "b_norm")


@dataclass
class LayerDifference:
    """One layer in both adapters."""

    component: str
    path: str
    norm_a: float
    """|update| in the first adapter, Frobenius; 0 where it does not have the layer."""
    norm_b: float
    distance: float
    """|update of the first - update of the second|."""
    cosine: float
    """Of the angle between the two updates; 1 where both are zero, 0 where one is."""
    vectors: dict[str, float]
    """Largest difference of magnitudes (DoRA), biases and norms, by role."""

    @property
    def relative(self) -> float:
        """distance / the larger norm."""
        larger = max(self.norm_a, self.norm_b)
        return self.distance / larger if larger > 0 else 0.0


@dataclass
class Difference:
    """Two adapters layer by layer."""

    layers: list[LayerDifference]
    only_a: list[str]
    only_b: list[str]
    notes: list[str]

    @property
    def distance(self) -> float:
        """Of all layers together: |a - b|."""
        return float(np.sqrt(sum(x.distance**2 for x in self.layers)))

    @property
    def relative(self) -> float:
        """distance / the larger of the two norms."""
        norms = [np.sqrt(sum(getattr(x, name) ** 2 for x in self.layers)) for name in ("norm_a", "norm_b")]
        return float(self.distance / max(norms)) if max(norms, default=0) > 0 else 0.0

    @property
    def largest(self) -> float:
        """The largest relative difference of a layer."""
        return max((x.relative for x in self.layers), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "distance": self.distance,
            "relative": self.relative,
            "largest": self.largest,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "layers": [{**asdict(layer), "relative": layer.relative} for layer in self.layers],
            "notes": self.notes,
        }


def diff(
    a: Path | Adapter,
    b: Path | Adapter,
    *,
    base: str | None = None,
    modules: Iterable[str] = (),
    progress: Progress | None = None,
) -> Difference:
    """Compares what two adapters, of any formats, kinds and ranks, add to every layer's weight.

    Pairs of factors are compared through QR decompositions, without making the updates: the distance of equal updates
    with other factors comes out as about 1e-15 of their norm. Magnitudes (DoRA) and biases are compared as vectors;
    kinds without an update of their own (IA3, OFT, GLoRA, whole weights) are named in the notes.

    Raises ValueError for adapters of different base models, and for layers whose updates have different shapes."""
    first, second = opened(a, base, modules), opened(b, base, modules)
    if first.base != second.base:
        raise ValueError(
            f"the first adapter is of {first.base or 'no known base model'} and the second of "
            f"{second.base or 'no known base model'}, expected one base model"
        )
    (_, first, _), (_, second, _) = _alike([(0, first, 1.0), (1, second, 1.0)], first.format, modules)
    mine = {entry.key: entry for entry in first.entries}
    theirs = {entry.key: entry for entry in second.entries}
    keys = [*mine, *(key for key in theirs if key not in mine)]
    notes = sorted(
        {
            f"{name_of(e)} is {e.kind}, which is not compared"
            for e in [*mine.values(), *theirs.values()]
            if e.kind not in (*WITH_DELTA, "norm")
        }
    )
    pairs = [(mine.get(key), theirs.get(key)) for key in keys]
    pairs = [p for p in pairs if all(e is None or e.kind in (*WITH_DELTA, "norm") for e in p)]
    return Difference(
        each(functools.partial(_compare), pairs, len(pairs), progress),
        [name_of(e) for key, e in mine.items() if key not in theirs],
        [name_of(e) for key, e in theirs.items() if key not in mine],
        notes,
    )


def _compare(pair: tuple[Entry | None, Entry | None]) -> LayerDifference:
    one, two = pair
    some = one or two
    assert some is not None
    norms = _norms(one, two)
    vectors = {}
    for role in VECTORS:
        parts = [_vector(e, role) for e in pair]
        there = [v for v in parts if v is not None]
        if there:
            x, y = (np.zeros_like(there[0]) if v is None else v for v in parts)
            if x.shape != y.shape:
                raise ValueError(
                    f"{name_of(some)}: {role} has {x.size} numbers in one adapter and {y.size} in the other"
                )
            vectors[role] = float(np.abs(x - y).max(initial=0))
    return LayerDifference(some.component, some.path, *norms, vectors)


def _vector(entry: Entry | None, role: str) -> np.ndarray | None:
    if entry is None or role not in entry.tensors:
        return None
    scale = entry.scale if role == "lora_bias" else 1.0
    return scale * numbers(entry.tensors[role], key_of(entry, role)).astype(np.float64).ravel()


def _norms(one: Entry | None, two: Entry | None) -> tuple[float, float, float, float]:
    """|one|, |two|, |one - two|, cosine."""
    there = [e for e in (one, two) if e is not None and e.kind in WITH_DELTA and _has_delta(e)]
    if not there:
        return 0.0, 0.0, 0.0, 1.0
    if all(is_pair(e) for e in there):
        parts = []
        for e in there:
            f = factors_of(e)
            parts.append((e.scale * f.up.astype(np.float64), f.down.astype(np.float64)))
        norms = [product_norm(u, d) for u, d in parts]
        if len(parts) == 2:
            (u, d), (v, w) = parts
            if (u.shape[0], d.shape[1]) != (v.shape[0], w.shape[1]):
                raise _unlike(there, (u.shape[0], d.shape[1]), (v.shape[0], w.shape[1]))
            distance = product_norm(np.concatenate([u, -v], axis=1), np.concatenate([d, w], axis=0))
            inner = float(np.sum((u.T @ v) * (d @ w.T)))
            return _row(norms, distance, inner)
    else:
        deltas = [e.delta() for e in there]
        norms = [float(np.linalg.norm(m)) for m in deltas]
        if len(deltas) == 2:
            if deltas[0].shape != deltas[1].shape:
                raise _unlike(there, deltas[0].shape, deltas[1].shape)
            return _row(norms, float(np.linalg.norm(deltas[0] - deltas[1])), float(np.vdot(*deltas)))
    first, second = (norms[0], 0.0) if there[0] is one else (0.0, norms[0])
    return first, second, norms[0], 0.0 if norms[0] > 0 else 1.0


def _row(norms: list[float], distance: float, inner: float) -> tuple[float, float, float, float]:
    product = norms[0] * norms[1]
    cosine = inner / product if product > 0 else float(norms[0] == norms[1])
    return norms[0], norms[1], distance, max(-1.0, min(1.0, cosine))


def _has_delta(entry: Entry) -> bool:
    return entry.kind != "full" or "diff" in entry.tensors


def _unlike(entries: list[Entry], one: tuple[int, ...], two: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{name_of(entries[0])} changes a weight of {one} in one adapter and of {two} in the other"
    )

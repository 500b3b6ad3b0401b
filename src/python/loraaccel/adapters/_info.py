"""What is this file?"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from loraaccel import _core
from loraaccel.adapters._entry import Adapter
from loraaccel.adapters._files import load


@dataclass
class Summary:
    """An adapter in numbers."""

    path: str
    base: str
    also_fits: list[str]
    format: str
    components: dict[str, int]
    kinds: dict[str, int]
    ranks: dict[int, int]
    scales: dict[float, int]
    scale_rules: dict[str, int]
    dtypes: dict[str, int]
    norms: dict[str, float]
    """Frobenius norms of the updates: smallest, largest, and of all together."""
    hashes: dict[str, str]
    metadata: dict[str, str]
    problems: list[str]
    layers: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary(path: str | os.PathLike[str], *, base: str | None = None, norms: bool = True) -> Summary:
    """Reads the file and says what it is. Unlike ``load``, keys that match nothing are problems, not an error."""
    adapter = load(path, base=base, allow_unmatched=True, framework="np_bits")
    return summarise(adapter, os.fspath(path), norms)


def summarise(adapter: Adapter, path: str, norms: bool) -> Summary:
    layers: list[dict[str, Any]] = []
    dtypes: Counter[str] = Counter()
    for entry in adapter.entries:
        described = entry._described()
        dtypes.update(t["dtype"] for t in described["tensors"])
        layer = {
            "component": entry.component,
            "path": entry.path,
            "rows": entry.rows,
            "kind": entry.kind,
            "rank": entry.rank,
            "scale": entry.scale,
            "scale_rule": entry.scale_rule,
            "scale_text": entry.scale_text,
            "dora": "dora_scale" in entry.tensors,
        }
        if norms:
            layer["norm"] = _core.adapter_norm(described)
        layers.append(layer)
    known = [layer["norm"] for layer in layers if layer.get("norm") is not None]
    total = {"min": min(known), "max": max(known), "all": math.sqrt(sum(n * n for n in known))} if known else {}
    return Summary(
        path=path,
        base=adapter.base,
        also_fits=adapter.also_fits,
        format=adapter.format,
        components=dict(Counter(e.component for e in adapter.entries)),
        kinds=dict(Counter(e.kind for e in adapter.entries)),
        ranks=dict(sorted(Counter(e.rank for e in adapter.entries).items())),
        scales=dict(sorted(Counter(e.scale for e in adapter.entries).items())),
        scale_rules=dict(Counter(e.scale_rule for e in adapter.entries)),
        dtypes=dict(dtypes),
        norms=total,
        hashes=_hashes(path, adapter),
        metadata=adapter.metadata,
        problems=[*_problems(adapter, layers), *adapter.notes],
        layers=layers,
    )


def _hashes(path: str, adapter: Adapter) -> dict[str, str]:
    """Of the file's tensors, and those that its metadata claims."""
    if not os.path.isfile(path):
        return {}
    model_hash, legacy_hash = _core.adapter_hashes(path)
    return {"sshs_model_hash": model_hash, "sshs_legacy_hash": legacy_hash}


def _problems(adapter: Adapter, layers: list[dict[str, Any]]) -> list[str]:
    problems = []
    if adapter.unused:
        names = ", ".join(adapter.unused[:5])
        problems.append(f"{len(adapter.unused)} tensors match no layer: {names}")
    broken = [layer["path"] for layer in layers if layer.get("norm") is not None and not math.isfinite(layer["norm"])]
    if broken:
        problems.append(f"{len(broken)} updates are not finite, as of {broken[0]}")
    zero = [layer["path"] for layer in layers if layer.get("norm") == 0]
    if zero:
        problems.append(f"{len(zero)} updates are zero, as of {zero[0]}")
    return problems

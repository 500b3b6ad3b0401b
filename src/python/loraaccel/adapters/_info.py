"""What is this file?"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loraaccel import _core
from loraaccel.adapters import _models
from loraaccel.adapters._files import _read_options

NAMES_IN_PROBLEM = 5


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
    """The factors of the updates, and of how many layers they are."""
    scale_rules: dict[str, int]
    dtypes: dict[str, int]
    norms: dict[str, float]
    """Frobenius norms of the updates: the smallest, the largest, and that of all of them together."""
    hashes: dict[str, str]
    metadata: dict[str, str]
    problems: list[str]
    layers: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary(path: str | os.PathLike[str], *, base: str | None = None, norms: bool = True) -> Summary:
    """Reads an adapter and says what it is. Keys that match no layer are problems here, not an error."""
    name = os.fspath(path)
    described = _core.adapter_inspect(name, _read_options(base, None, True, ()), norms)
    layers = [_layer(entry) for entry in described["entries"]]
    known = [layer["norm"] for layer in layers if layer["norm"] is not None]
    return Summary(
        path=name,
        base=described["base"],
        also_fits=described["also_fits"],
        format=described["format"],
        components=_counts(layers, "component"),
        kinds=_counts(layers, "kind"),
        ranks=dict(sorted(_counts(layers, "rank").items())),
        scales=dict(sorted(_counts(layers, "scale").items())),
        scale_rules=_counts(layers, "scale_rule"),
        dtypes=dict(Counter(t["dtype"] for entry in described["entries"] for t in entry["tensors"])),
        norms={"min": min(known), "max": max(known), "all": math.hypot(*known)} if known else {},
        hashes=_hashes(name),
        metadata=described["metadata"],
        problems=[*_problems(described["unused"], layers), *described["notes"]],
        layers=layers,
    )


# In keys of adapters, of kinds that are read and of others.
_ADAPTERS_OWN = re.compile(r"lora[_.]|hada_|lokr_|oft_|dora_scale|\.alpha$|\.diff(_b)?$")
_KEPT_HEADER = "__loraaccel_header__"  # keep_originals.h


@dataclass
class FileSummary:
    """A safetensors file, or a folder of them, that is no adapter."""

    path: str
    what: str
    """"base model", "bytes kept by a merge", "no tensors" or "tensors of no known model"."""
    base: str
    """Of a base model: sd15, sdxl ..."""
    tensors: int
    numbers: int
    dtypes: dict[str, int]
    """Numbers of each type."""
    metadata: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def file_summary(path: str | os.PathLike[str]) -> FileSummary | None:
    """What else than an adapter the file is; None where its keys are an adapter's. Reads headers only."""
    root = Path(path)
    tensors = list(_models.tensors_of(root, "np"))
    keys = [t.key for t in tensors]
    if any(_ADAPTERS_OWN.search(key) for key in keys):
        return None
    base = _models.recognise(tensors)
    what = "base model" if base else "tensors of no known model" if keys else "no tensors"
    if _KEPT_HEADER in keys:
        what, base = "bytes kept by a merge", ""
    dtypes: Counter[str] = Counter()
    for t in tensors:
        dtypes[t.file.get_slice(t.key).get_dtype()] += math.prod(t.shape)
    metadata = {} if root.is_dir() else dict(_models.metadata_of(root))
    return FileSummary(os.fspath(path), what, base, len(keys), sum(dtypes.values()), dict(dtypes), metadata)


def _layer(entry: dict[str, Any]) -> dict[str, Any]:
    layer = {key: value for key, value in entry.items() if key not in ("tensors", "native_rows")}
    layer["dora"] = any(t["role"] == "dora_scale" for t in entry["tensors"])
    return layer


def _counts(layers: list[dict[str, Any]], key: str) -> dict[Any, int]:
    return dict(Counter(layer[key] for layer in layers))


def _hashes(path: str) -> dict[str, str]:
    if not os.path.isfile(path):
        return {}
    model, legacy = _core.adapter_hashes(path)
    return {"sshs_model_hash": model, "sshs_legacy_hash": legacy}


def _problems(unused: list[str], layers: list[dict[str, Any]]) -> list[str]:
    problems = []
    if unused:
        problems.append(f"{len(unused)} tensors match no layer: {', '.join(unused[:NAMES_IN_PROBLEM])}")
    norms = [(layer["path"], layer["norm"]) for layer in layers if layer["norm"] is not None]
    broken = [path for path, norm in norms if not math.isfinite(norm)]
    if broken:
        problems.append(f"{len(broken)} updates are not finite: {', '.join(broken[:NAMES_IN_PROBLEM])}")
    zero = [path for path, norm in norms if norm == 0]
    if zero:
        problems.append(f"{len(zero)} updates are zero: {', '.join(zero[:NAMES_IN_PROBLEM])}")
    return problems

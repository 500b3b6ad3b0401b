"""An adapter as Python sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraaccel import _core
from loraaccel.adapters._arrays import Described, array_of, default_framework, described_array


@dataclass
class Entry:
    """All that an adapter has for one layer of the base model, or for some of the layer's rows.

    ``component`` is "unet", "transformer", "text_encoder" ..., or "model" for models without a name table (language
    models). ``path`` names the layer as the original checkpoint does. ``kind`` is "lora", "loha", "lokr", "full",
    "norm", "embedding", "replace", "ia3", "oft" or "glora"; it is found from the tensors.

    ``tensors`` maps roles to arrays: lora_down [r, in, ...], lora_up [out, r, ...], lora_mid, dora_scale, lora_bias;
    diff, diff_b; hada_w1_a ...; lokr_w1 ...; alpha. ``rank``, ``scale`` (the factor of the update, alpha and rank
    resolved), ``scale_rule`` and ``scale_text`` (why it is that) are found too. For an entry that is made, the factor
    is that of the tensor alpha, else of ``alpha`` given here, else ``scale``.

    ``rows`` is empty where the entry covers the layer, else (row, native_row, rows): rows of the entry, and which rows
    of the layer they are; ``native_rows`` is then the number of all rows of the layer."""

    component: str
    path: str
    tensors: Mapping[str, Any]
    alpha: float | None = None
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    native_rows: int = 0
    kind: str = ""
    rank: int = 0
    scale: float = 1.0
    scale_rule: str = ""
    scale_text: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names in the file, by role."""

    @property
    def key(self) -> tuple[str, str, tuple[tuple[int, int, int], ...]]:
        """The same for entries of two adapters that are about the same rows of the same layer."""
        return self.component, self.path, tuple(tuple(piece) for piece in self.rows)  # type: ignore[misc]

    def delta(self) -> Any:
        """What is added to the weight, as a float64 array [rows, everything else], the factor included. DoRA's
        normalisation, which needs the weight, is not."""
        import numpy

        rows, columns, data = _core.adapter_delta(self._described())
        return numpy.frombuffer(data, numpy.float64).reshape(rows, columns)

    def _described(self) -> dict[str, Any]:
        tensors = [
            described_array(role, self.keys.get(role, ""), array) for role, array in self.tensors.items()
        ]
        return {
            "component": self.component,
            "path": self.path,
            "rows": [tuple(piece) for piece in self.rows],
            "native_rows": self.native_rows,
            "alpha": self.alpha,
            "scale": self.scale,
            "scale_text": self.scale_text,
            "tensors": tensors,
        }


@dataclass
class Adapter:
    """An adapter, whatever file it came from."""

    entries: list[Entry]
    base: str = ""
    """Which name table: one of ``bases()``, or "" for models without one."""
    format: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    config: str = ""
    """Text of adapter_config.json, where there was one."""
    also_fits: list[str] = field(default_factory=list)
    """Other bases whose names and sizes fit the file as well."""
    unused: list[str] = field(default_factory=list)
    """Keys of the file that were left out (allow_unmatched)."""
    notes: list[str] = field(default_factory=list)

    def find(self, path: str, component: str | None = None) -> list[Entry]:
        """Entries for a layer."""
        return [e for e in self.entries if e.path == path and component in (None, e.component)]

    def _described(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "also_fits": self.also_fits,
            "format": self.format,
            "config": self.config,
            "metadata": self.metadata,
            "entries": [entry._described() for entry in self.entries],
        }


def adapter_of(described: dict[str, Any], framework: str | None) -> Adapter:
    name = framework or default_framework()
    return Adapter(
        entries=[_entry_of(entry, name) for entry in described["entries"]],
        base=described["base"],
        format=described["format"],
        metadata=described["metadata"],
        config=described["config"],
        also_fits=described["also_fits"],
        unused=described["unused"],
        notes=described["notes"],
    )


def _entry_of(described: dict[str, Any], framework: str) -> Entry:
    tensors: list[Described] = described["tensors"]
    fields = {key: value for key, value in described.items() if key != "tensors"}
    return Entry(
        **fields,
        tensors={t["role"]: array_of(t, framework) for t in tensors},
        keys={t["role"]: t["key"] for t in tensors},
    )

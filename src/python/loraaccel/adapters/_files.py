"""Files in, files out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loraaccel import _core
from loraaccel.adapters._arrays import described_array
from loraaccel.adapters._entry import Adapter, adapter_of


@dataclass
class Written:
    """What was written."""

    paths: list[str]
    notes: list[str]
    model_hash: str
    """SHA-256 of the tensors' bytes, as kohya's sshs_model_hash; "" where there are several files."""


def bases() -> list[str]:
    """Base models with a name table."""
    return _core.adapter_bases()


def formats() -> list[str]:
    """Formats that can be written."""
    return _core.adapter_formats()


def load(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    base: str | None = None,
    component: str | None = None,
    allow_unmatched: bool = False,
    modules: Iterable[str] = (),
    config: str = "",
    metadata: Mapping[str, str] | None = None,
    framework: str | None = None,
) -> Adapter:
    """Reads an adapter: a .safetensors file, a folder of PEFT's or of diffusers', or a dict of tensors by key.

    ``base`` and ``component`` say what the file does not (see ``bases()``). ``modules``: the layers of a model without
    a name table, by dotted paths, for files in kohya's flat spelling. ``framework``: "pt" or "np" tensors, views of the
    mapped file. ``config`` and ``metadata`` go with a dict of tensors.

    Raises OSError where the file cannot be read, and SafetensorError, a ValueError, for a file that is not an adapter:
    keys that match no layer (``allow_unmatched`` goes on without them, and lists them in ``Adapter.unused``), halves of
    pairs, shapes that do not fit together."""
    options = _read_options(base, component, allow_unmatched, modules)
    if isinstance(path, Mapping):
        tensors = [described_array("", key, array) for key, array in path.items()]
        described = _core.adapter_read_tensors("the adapter", tensors, dict(metadata or {}), config, options)
        # views of the caller's memory: keep the arrays themselves
        owners = {t["key"]: t["owner"] for t in tensors}
        for entry in described["entries"]:
            for tensor in entry["tensors"]:
                tensor["owner"] = owners[tensor["key"]]
    else:
        described = _core.adapter_read(os.fspath(path), options)
    return adapter_of(described, framework)


def save(
    adapter: Adapter,
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    *,
    dtype: str | None = None,
    fold_alpha: bool = False,
    rescue: bool = False,
) -> Written:
    """Writes an adapter in a format of ``formats()`` (default: the one it was read in), all of it or nothing.

    ``fold_alpha`` multiplies the factors into the weights. ``dtype`` ("F16", "BF16", "F32" ...) casts floating-point
    tensors, once; what became zero is in the notes, and ``rescue``, with "F16", avoids that by powers of two taken from
    alpha."""
    options = _write_options(format or adapter.format, dtype, fold_alpha, rescue)
    return Written(**_core.adapter_write(adapter._described(), os.fspath(path), options))


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    base: str | None = None,
    component: str | None = None,
    allow_unmatched: bool = False,
    modules: Iterable[str] = (),
    dtype: str | None = None,
    fold_alpha: bool = False,
    rescue: bool = False,
) -> tuple[Adapter, Written]:
    """``save(load(source), target, to)`` without tensors in Python. The adapter that is returned has no entries."""
    described, written = _core.adapter_convert(
        os.fspath(source),
        os.fspath(target),
        _read_options(base, component, allow_unmatched, modules),
        _write_options(to, dtype, fold_alpha, rescue),
    )
    return adapter_of(described, "np"), Written(**written)


def _read_options(
    base: str | None, component: str | None, allow_unmatched: bool, modules: Iterable[str]
) -> dict[str, Any]:
    return {
        "base": base or "",
        "component": component or "",
        "allow_unmatched": allow_unmatched,
        "modules": list(modules),
    }


def _write_options(format: str, dtype: str | None, fold_alpha: bool, rescue: bool) -> dict[str, Any]:  # noqa: A002
    if rescue and dtype != "F16":
        raise ValueError(f"rescue with dtype {dtype!r}, expected 'F16', the type that it is for")
    return {"format": format, "dtype": dtype or "", "fold_alpha": fold_alpha, "rescue": rescue}

"""Models in several files with an index, as huggingface_hub writes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from loraaccel.safetensors._open import safe_open
from loraaccel.safetensors._save import Options, save_to_file
from loraaccel.safetensors._torch_sources import shared_groups, sources

UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


def parse_size(size: int | str) -> int:
    """Bytes of a number, or of a text such as "5GB": decimal units."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TB|GB|MB|KB|B)\s*", str(size).upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"a size of {size!r}, expected bytes or a text such as '5GB'")
    return int(float(match[1]) * UNITS[match[2]])


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order: a shard is full when the next tensor does not fit; one above the limit is alone."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if current and filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current or not shards else shards


def save_sharded(
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    name: str = "model",
    metadata: Mapping[str, str] | None = None,
    sync: bool = True,
) -> list[str]:
    """Writes <name>.safetensors, or <name>-00001-of-0000N.safetensors and <name>.safetensors.index.json; the names of
    what was written. Each file has the metadata {"format": "pt"}; ours goes into a single file, or into the index.
    Files of an earlier save with the same name are removed at the end."""
    place = Path(folder)
    groups = shared_groups(tensors)
    if groups:
        sources(tensors)  # raises, naming all of them
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    shards = split(sizes, parse_size(max_shard_size))
    place.mkdir(parents=True, exist_ok=True)
    common = {"format": "pt"}
    if len(shards) == 1:
        written = [f"{name}.safetensors"]
        save_to_file(sources(tensors), place / written[0], {**(metadata or {}), **common}, Options(), sync)
        _remove_others(place, name, written)
        return written
    written = [f"{name}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, names in zip(written, shards, strict=True):
        save_to_file(sources({key: tensors[key] for key in names}), place / file, common, Options(), sync)
    index = {
        "metadata": {"total_size": sum(sizes.values()), **(metadata or {})},
        "weight_map": {key: file for file, names in zip(written, shards, strict=True) for key in names},
    }
    written.append(f"{name}.safetensors.index.json")
    _write_text(place / written[-1], json.dumps(index, indent=2, sort_keys=True) + "\n", sync)
    _remove_others(place, name, written)
    return written


def _write_text(path: Path, text: str, sync: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_others(place: Path, name: str, written: list[str]) -> None:
    pattern = re.compile(rf"{re.escape(name)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for path in place.iterdir():
        if path.name not in written and pattern.fullmatch(path.name):
            path.unlink()


def load_sharded(
    path: str | os.PathLike[str], device: Any = "cpu", *, name: str = "model"
) -> dict[str, Tensor]:
    """The tensors of a folder, or of an index. ValueError where index and files do not agree, naming what is where."""
    place = Path(path)
    if place.is_dir():
        single = place / f"{name}.safetensors"
        index = place / f"{name}.safetensors.index.json"
        if not index.exists() and single.exists():
            with safe_open(single, "pt", device) as file:
                return file.get_tensors()
    else:
        index = place
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index}: no index of safetensors files: {error!r}") from None
    found: dict[str, Tensor] = {}
    for shard in files:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: {shard!r} is no name of a file beside it")
        with safe_open(index.parent / shard, "pt", device) as file:
            found.update(
                {key: value for key, value in file.get_tensors().items() if weight_map.get(key) == shard}
            )
    missing = [key for key in weight_map if key not in found]
    if missing:
        raise ValueError(
            f"{index}: {missing[0]!r} and {len(missing) - 1} more are not in the files that it names"
        )
    return {key: found[key] for key in weight_map}

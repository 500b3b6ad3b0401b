"""safetensors files of torch tensors, with the signatures of ``safetensors.torch``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loraaccel.safetensors._open import safe_open
from loraaccel.safetensors._save import (
    Options,
    PendingSave,
    SaveReport,
    save_in_background,
    save_to_bytes,
    save_to_file,
)
from loraaccel.safetensors._shards import load_sharded, save_sharded
from loraaccel.safetensors._torch_sources import float_dtype, shared_groups, sources

__all__ = [
    "load",
    "load_file",
    "load_model",
    "load_sharded",
    "save",
    "save_file",
    "save_file_async",
    "save_model",
    "save_sharded",
]


def save_file(
    tensors: Mapping[str, Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    hashes: bool = False,
    write_hashes: bool = False,
    sync: bool = True,
) -> SaveReport:
    """Writes `tensors` and takes the place of `filename` when that is done; until then the old file is untouched.

    ``dtype``: what float64, float32, float16 and bfloat16 tensors are written as, rounded once to nearest even; a
    RuntimeWarning where finite numbers became infinite (float8_e4m3fn has none: NaN, where newer torch makes 448).
    ``hashes``: kohya's two hashes in the report; ``write_hashes``: in the metadata too. ``sync=False`` does not wait
    for the disk: then a crash of the machine, not of the program, may lose both files.

    Tensors may have any strides and be on any device. Those that share memory raise RuntimeError, which names them, as
    they would lose that on the way (``save_model`` keeps one of each group); parts of one storage that do not overlap
    are fine. OSError, with errno, where the file cannot be written; ValueError for what is no tensor."""
    options = Options(float_dtype(dtype), hashes, write_hashes)
    return save_to_file(sources(tensors), filename, metadata, options, sync)


def save_file_async(
    tensors: Mapping[str, Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    hashes: bool = False,
    write_hashes: bool = False,
    sync: bool = True,
) -> PendingSave:
    """``save_file`` in the background, of a copy (cast) that is made before this returns: training may go on."""
    options = Options(float_dtype(dtype), hashes, write_hashes)
    return save_in_background(sources(tensors), filename, metadata, options, sync)


def save(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> bytes:
    return save_to_bytes(sources(tensors), metadata, Options(float_dtype(dtype)))


def load_file(
    filename: str | os.PathLike[str], device: Any = "cpu", *, backend: str = "pread"
) -> dict[str, Tensor]:
    """The tensors, in memory of their own; with ``backend="mmap"`` over the file's pages (see ``safe_open``)."""
    with safe_open(filename, "pt", device, backend=backend) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, Tensor]:
    with safe_open.over(data, "pt") as file:
        return file.get_tensors()


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> SaveReport:
    """Saves ``model.state_dict()``. Of names that share memory one is written, the first one that covers it; the
    metadata says for each other one which. (``force_contiguous`` changes nothing: any strides are written.)"""
    state = dict(model.state_dict())
    extra = dict(metadata or {})
    for group in shared_groups(state):
        whole = [name for name in group if _covers_storage(state[name])]
        if not whole:
            raise RuntimeError(
                f"none of {', '.join(sorted(group))}, which share memory, is all of it: clone one of them, or save the "
                "tensor that they are parts of"
            )
        kept = min(whole)
        for name in group:
            if name != kept:
                extra.setdefault(name, kept)
                del state[name]
    return save_file(state, filename, extra if extra or metadata is not None else None)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "pread",
) -> tuple[set[str], list[str]]:
    """Loads a file that ``save_model`` wrote into the model: names that are missing, and those that were not used.
    With ``strict`` RuntimeError where there are any."""
    state = load_file(filename, device, backend=backend)
    mine = model.state_dict()
    missing_keys, unexpected_keys = model.load_state_dict(state, strict=False)
    missing, unexpected = set(missing_keys), list(unexpected_keys)
    for group in shared_groups(mine):
        if any(name in state for name in group):
            missing -= set(group)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{os.fspath(filename)} does not fit {type(model).__name__}: "
            f"missing {', '.join(sorted(missing)) or 'none'}; unexpected {', '.join(sorted(unexpected)) or 'none'}"
        )
    return missing, unexpected


def _covers_storage(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.nbytes == storage.nbytes()

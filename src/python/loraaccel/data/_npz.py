"""Caches of latents and text encoders' outputs as sd-scripts keeps them: .npz files, which numpy reads and writes.

What is ours: only the arrays that are asked for are read, batches straight into their place, and a file is replaced
whole or not at all, where numpy's own savez() leaves half a file if it is stopped."""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from loraaccel.data import _native_images

Path = str | os.PathLike[str]
# Endings of the files with latents, by model.
KINDS = ("sd", "sdxl", "sd3", "flux", "lumina", "hi", "anima")
# What numpy and zipfile raise for a file that is not what it should be.
BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


def latents_path(image: Path, size: tuple[int, int], kind: str) -> str:
    """Where sd-scripts keeps the latents of an image of that (width, height): "photo_0640x0480_sdxl.npz" for
    "photo.jpg". ``kind``: sd, sdxl, sd3, flux, lumina, hi or anima. With sd and sdxl "photo.npz" where that exists, the
    name of older versions. Source: sd-scripts' get_latents_npz_path()."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"size is {tuple(size)}, expected a width and a height of 1 or more")
    stem = os.path.splitext(os.fspath(image))[0]
    if kind in ("sd", "sdxl") and os.path.exists(f"{stem}.npz"):
        return f"{stem}.npz"
    return f"{stem}_{width:04d}x{height:04d}_{kind}.npz"


def npz_read(path: Path, keys: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, or only those named, in that order; the others are not read.

    Raises OSError where the file cannot be read, ValueError where it is no .npz file, is damaged, or lacks a key, with
    the names that it has. Python objects in it (pickles) are never loaded."""
    with _Reader(path) as file:
        return {key: file.array(key) for key in (file.keys if keys is None else keys)}


def npz_write(path: Path, arrays: Mapping[str, Any], *, update: bool = False) -> None:
    """Writes arrays as ``numpy.savez`` does, byte for byte, in the mapping's order; the file at ``path`` is what it was
    until the new one is complete. torch's tensors are copied from their devices, bfloat16 widened to float32, which is
    what sd-scripts stores. ``update``: the arrays that the file has besides stay, in their places.

    Raises OSError for the file, ValueError for an array that numpy would pickle."""
    every: dict[str, np.ndarray] = {}
    if update and os.path.exists(path):
        every.update(npz_read(path))
    every.update({key: _plain(key, array) for key, array in arrays.items()})
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    file = open(temporary, "xb")  # noqa: SIM115  (closed below; not tempfile's, whose files are private)
    try:
        with file:
            np.savez(file, **every)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def npz_read_batch(
    paths: Sequence[Path],
    keys: Sequence[str],
    out: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> dict[str, Any]:
    """One array of every file stacked, for each key: {key: [B, ...]}. All files must have the keys in one shape.

    ``out``: arrays or CPU tensors to fill, of shape [B, ...] and a type that the files' numbers may be rounded to
    (float16 or bfloat16 for float32); else numpy's arrays in the first file's type. ``threads``: files that are read at
    once, by default as many as ``loraaccel.set_num_threads`` says.

    Raises OSError when all others are done, naming every file that cannot be read, with their indices as its attribute
    ``failed``, ValueError for an ``out`` that does not fit."""
    if not paths:
        raise ValueError("paths is empty, expected one file or more")
    first, arrays = _first(paths, keys)
    result = dict(out) if out is not None else {}
    for key, array in arrays.items():
        shape = (len(paths), *array.shape)
        if out is None:
            result[key] = np.empty(shape, array.dtype)
        elif key not in result or tuple(result[key].shape) != shape:
            found = "missing" if key not in result else f"of shape {tuple(result[key].shape)}"
            raise ValueError(f"out[{key!r}] is {found}, expected {shape}")

    def read(i: int) -> OSError | None:
        try:
            if i == first:
                for key, array in arrays.items():
                    _put(result[key], i, array, f"{os.fspath(paths[i])}: {key}")
                return None
            with _Reader(paths[i]) as file:
                for key in keys:
                    _put(result[key], i, file.array(key), f"{os.fspath(paths[i])}: {key}")
        except OSError as error:
            return error
        except ValueError as error:
            return OSError(str(error))
        return None

    with ThreadPoolExecutor(min(_native_images.threads(threads), len(paths))) as pool:
        errors = {i: error for i, error in enumerate(pool.map(read, range(len(paths)))) if error is not None}
    if errors:
        listed = "; ".join(str(error) for error in errors.values())
        failure = OSError(f"{len(errors)} of {len(paths)} files cannot be read: {listed}")
        failure.failed = sorted(errors)  # type: ignore[attr-defined]
        raise failure
    return result


def _first(paths: Sequence[Path], keys: Sequence[str]) -> tuple[int, dict[str, np.ndarray]]:
    """The first file that can be read, and its arrays; (-1, {}) where there is none: reading each will tell."""
    for i, path in enumerate(paths):
        try:
            return i, npz_read(path, keys)
        except (OSError, ValueError):
            continue
    return -1, {}


class _Reader:
    """An open file, whose arrays are read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        try:
            self.file = np.load(path, allow_pickle=False)
        except BROKEN as error:
            raise ValueError(f"{self.path} is no .npz file, or a damaged one: {error}") from error
        if not isinstance(self.file, np.lib.npyio.NpzFile):
            raise ValueError(f"{self.path} holds one array, expected a .npz file of several")
        self.keys = list(self.file.files)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def array(self, key: str) -> np.ndarray:
        if key not in self.keys:
            raise ValueError(
                f"{self.path} has no {key!r}, expected one of {', '.join(self.keys) or 'nothing'}"
            )
        try:
            return np.asarray(self.file[key])
        except BROKEN as error:
            raise ValueError(f"{self.path}: {key} is damaged: {error}") from error


def _plain(key: str, array: Any) -> np.ndarray:
    if hasattr(array, "data_ptr"):
        tensor = array.detach().cpu()
        array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    array = np.asanyarray(array)
    if array.dtype.hasobject:
        raise ValueError(f"{key} is an array of Python objects, expected numbers")
    return array


def _put(out: Any, i: int, array: np.ndarray, name: str) -> None:
    if tuple(out.shape[1:]) != array.shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {tuple(out.shape[1:])}")
    if isinstance(out, np.ndarray):
        if not np.can_cast(array.dtype, out.dtype, "same_kind"):
            raise ValueError(f"{name} is of type {array.dtype}, expected one that {out.dtype} may hold")
        np.copyto(out[i], array, casting="same_kind")
        return
    import torch

    values = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if not torch.can_cast(values.dtype, out.dtype):
        raise ValueError(f"{name} is of type {array.dtype}, expected one that {out.dtype} may hold")
    out[i].copy_(values)

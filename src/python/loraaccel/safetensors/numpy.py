"""safetensors files of numpy arrays, with the signatures of ``safetensors.numpy``. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from loraaccel.safetensors._numpy_arrays import FILE_DTYPES, address
from loraaccel.safetensors._open import safe_open
from loraaccel.safetensors._save import (
    Options,
    PendingSave,
    SaveReport,
    Sources,
    check_name,
    save_in_background,
    save_to_bytes,
    save_to_file,
)

__all__ = ["load", "load_file", "save", "save_file", "save_file_async"]


def save_file(
    tensor_dict: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: Any = None,
    hashes: bool = False,
    write_hashes: bool = False,
    sync: bool = True,
) -> SaveReport:
    """Writes arrays of any strides and byte order. ``dtype``: what floating-point arrays are written as.
    ``write_hashes``: kohya's two hashes into the metadata."""
    options = Options(_float_dtype(dtype), hashes, write_hashes)
    return save_to_file(sources(tensor_dict), filename, metadata, options, sync)


def save_file_async(
    tensor_dict: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: Any = None,
    hashes: bool = False,
    write_hashes: bool = False,
    sync: bool = True,
) -> PendingSave:
    """The same in the background, from a copy that is made before this returns."""
    options = Options(_float_dtype(dtype), hashes, write_hashes)
    return save_in_background(sources(tensor_dict), filename, metadata, options, sync)


def save(
    tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None, *, dtype: Any = None
) -> bytes:
    return save_to_bytes(sources(tensor_dict), metadata, Options(_float_dtype(dtype)))


def load_file(filename: str | os.PathLike[str], *, backend: str = "pread") -> dict[str, np.ndarray]:
    with safe_open(filename, "np", backend=backend) as file:
        return file.get_tensors()


def load(data: bytes) -> dict[str, np.ndarray]:
    with safe_open.over(data, "np") as file:
        return file.get_tensors()


def _float_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return FILE_DTYPES.get(name, name)


def sources(tensors: Mapping[str, Any]) -> Sources:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"expected a dict of str to numpy arrays, found {type(tensors).__name__}")
    result = Sources()
    for name, array in tensors.items():
        _add(result, name, array)
    return result


def _add(result: Sources, name: Any, array: Any) -> None:
    check_name(name)
    if isinstance(array, np.generic):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"tensor {name!r} is {type(array).__name__}, expected a numpy array")
    if array.dtype.name not in FILE_DTYPES:
        raise ValueError(f"tensor {name!r}: safetensors has no type for {array.dtype}")
    file_dtype = FILE_DTYPES[array.dtype.name]

    def gather() -> tuple[int, Any]:
        dense = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return address(dense), dense

    if array.flags.c_contiguous and array.dtype.isnative:
        result.add(name, file_dtype, array.shape, address(array), array)
    else:
        result.add_gathered(name, file_dtype, array.shape, gather)

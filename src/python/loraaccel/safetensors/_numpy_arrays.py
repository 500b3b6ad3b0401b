"""numpy's arrays, for reading. BF16 and 8-bit floats are those of ml_dtypes, where that is installed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
FILE_DTYPES = {theirs: name for name, theirs in (_NAMES | _ML_DTYPES).items()}


def dtype_of(dtype: str) -> np.dtype:
    if dtype in _NAMES:
        return np.dtype(_NAMES[dtype])
    if dtype not in _ML_DTYPES:
        raise ValueError(f"numpy has no type for {dtype}")
    try:
        module = importlib.import_module("ml_dtypes")
    except ModuleNotFoundError:
        raise ValueError(
            f"numpy has no type for {dtype}; the package ml_dtypes has one (pip install ml_dtypes)"
        ) from None
    if not hasattr(module, _ML_DTYPES[dtype]):
        raise ValueError(f"ml_dtypes {module.__version__} has no type for {dtype}")
    return np.dtype(getattr(module, _ML_DTYPES[dtype]))


def empty(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, dtype_of(dtype))


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def over(memory: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(memory, dtype_of(dtype)).reshape(shape)


def to_device(array: np.ndarray, device: Any) -> np.ndarray:
    if device != "cpu":
        raise ValueError(f"device is {device!r}, expected 'cpu' for numpy")
    return array

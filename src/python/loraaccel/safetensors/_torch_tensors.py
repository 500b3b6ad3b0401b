"""torch's tensors, for reading."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# By the names of files. What this torch lacks is left out.
_NAMES = {
    "BOOL": "bool", "F4": "float4_e2m1fn_x2", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, theirs) for name, theirs in _NAMES.items() if hasattr(torch, theirs)
}
FILE_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


def _type_and_shape(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    if dtype not in DTYPES:
        raise ValueError(f"torch {torch.__version__} has no type for {dtype}")
    if dtype == "F4":  # torch counts pairs
        if not shape or shape[-1] % 2:
            raise ValueError(f"F4 {list(shape)}: torch needs a last dimension of an even number")
        shape = (*shape[:-1], shape[-1] // 2)
    return DTYPES[dtype], shape


def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
    native, shape = _type_and_shape(dtype, shape)
    return torch.empty(shape, dtype=native)


def address(array: Tensor) -> int:
    return array.data_ptr()


def over(memory: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    native, shape = _type_and_shape(dtype, shape)
    return torch.frombuffer(memory, dtype=torch.uint8).view(native).reshape(shape)


def to_device(array: Tensor, device: Any) -> Tensor:
    return array.to(device)

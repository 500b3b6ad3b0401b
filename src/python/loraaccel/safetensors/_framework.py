"""What reading needs of a library of tensors, and which library a name stands for."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Protocol


class Framework(Protocol):
    """A module of this package: ``_torch_tensors`` or ``_numpy_arrays``."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A dense, uninitialised array for a file's type; ValueError where the library has no such type."""

    def address(self, array: Any) -> int: ...

    def over(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """An array over a writable buffer, which it keeps alive."""

    def to_device(self, array: Any, device: Any) -> Any: ...


NAMES = {
    "pt": "_torch_tensors",
    "torch": "_torch_tensors",
    "pytorch": "_torch_tensors",
    "np": "_numpy_arrays",
    "numpy": "_numpy_arrays",
}


def framework(name: str) -> Framework:
    if name not in NAMES:
        raise ValueError(f"framework is {name!r}, expected one of {', '.join(NAMES)}")
    module: Any = importlib.import_module(f"loraaccel.safetensors.{NAMES[name]}")
    return module


def buffer_at(address: int, size: int, owner: Any) -> Any:
    """Memory at an address as a buffer that keeps its owner alive."""
    memory: Any = (ctypes.c_char * size).from_address(address)
    memory.owner = owner  # (instances of ctypes take attributes)
    return memory


ITEM_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

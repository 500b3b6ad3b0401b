"""Tensors of adapters as arrays of torch or numpy, and back to what the core writes."""

from __future__ import annotations

import importlib.util
from typing import Any

from loraaccel.safetensors._framework import buffer_at, framework
from loraaccel.safetensors._save import check_name

Described = dict[
    str, Any
]  # role, key, dtype, shape, address, bytes, owner: a tensor as the core describes it


def default_framework() -> str:
    return "pt" if importlib.util.find_spec("torch") is not None else "np"


def array_of(described: Described, name: str) -> Any:
    """An array over the tensor's memory, which it keeps: no copy."""
    library = framework(name)
    dtype, shape = described["dtype"], tuple(described["shape"])
    if described["bytes"] == 0:
        return library.empty(dtype, shape)
    memory = buffer_at(described["address"], described["bytes"], described["owner"])
    return library.over(memory, dtype, shape)


def described_array(role: str, key: str, array: Any) -> Described:
    """What the core needs of an array; its memory is kept by "owner". Other layouts than dense are copied."""
    check_name(key)
    if hasattr(array, "data_ptr"):
        from loraaccel.safetensors._torch_tensors import FILE_DTYPES

        tensor = array.detach().cpu().contiguous()
        if tensor.dtype not in FILE_DTYPES:
            raise ValueError(f"{key or role} is of type {tensor.dtype}, which files have no type for")
        dtype, shape, address = FILE_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
        return _described(role, key, dtype, shape, address, tensor)
    import numpy

    from loraaccel.safetensors._numpy_arrays import FILE_DTYPES as names

    values = numpy.ascontiguousarray(array).reshape(numpy.shape(array))
    if str(values.dtype) not in names:
        raise ValueError(f"{key or role} is of type {values.dtype}, which files have no type for")
    address = values.__array_interface__["data"][0]
    return _described(role, key, names[str(values.dtype)], values.shape, address, values)


def _described(
    role: str, key: str, dtype: str, shape: tuple[int, ...], address: int, owner: Any
) -> Described:
    return {"role": role, "key": key, "dtype": dtype, "shape": shape, "address": address, "owner": owner}

"""``safe_open``: a file whose tensors are read when they are asked for."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from loraaccel._core import SafetensorError, SafetensorsReader
from loraaccel.safetensors._framework import ITEM_BITS, Framework, buffer_at, framework

BACKENDS = ("pread", "mmap")


class safe_open:
    """A safetensors file, its header read and checked.

    ``framework`` is "pt" or "np". ``backend="pread"`` copies tensors out of the file; "mmap" gives tensors over the
    file's pages: no copy, private to this process where they are written to, and as long as the file stays whole.

    Raises OSError for a file that cannot be read and SafetensorError for one that is malformed."""

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "pread",
    ) -> None:
        self._start(framework, device, backend)
        self._reader: SafetensorsReader | None = SafetensorsReader(os.fspath(filename))

    def _start(self, name: str, device: Any, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
        self._framework: Framework = framework(name)
        self._device = device
        self._mapped = backend == "mmap"

    @classmethod
    def over(cls, data: Any, framework: str, device: Any = "cpu") -> safe_open:
        """The same for a file in memory."""
        self = cls.__new__(cls)
        self._start(framework, device, "pread")
        self._reader = SafetensorsReader.from_memory(data)
        return self

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader = None

    @property
    def _file(self) -> SafetensorsReader:
        if self._reader is None:
            raise SafetensorError("the file is closed")
        return self._reader

    def keys(self) -> list[str]:
        """Names, sorted."""
        return self._file.names()

    def offset_keys(self) -> list[str]:
        """Names, in the order of their bytes."""
        return self._file.names(by_offset=True)

    def metadata(self) -> dict[str, str] | None:
        return self._file.metadata()

    def _find(self, name: str) -> int:
        index = self._file.find(name)
        if index is None:
            raise SafetensorError(f"{self._file.path}: no tensor {name!r} among {len(self._file)}")
        return index

    def get_tensor(self, name: str) -> Any:
        return self._tensors([self._find(name)])[0]

    def get_tensors(self) -> dict[str, Any]:
        """All of them, in the order of their bytes."""
        return dict(zip(self.offset_keys(), self._tensors(range(len(self._file))), strict=True))

    def get_slice(self, name: str) -> SafeSlice:
        """Something to index like a tensor: only the rows that are asked for are read."""
        return SafeSlice(self, self._find(name))

    def _tensors(self, indices: Any) -> list[Any]:
        file, arrays, where = self._file, [], []
        for index in indices:
            name, dtype, shape, _, size = file.describe(index)
            try:
                array = self._mapped_array(index, dtype, shape, size)
                if array is None:
                    array = self._framework.empty(dtype, shape)
                    if size:
                        where.append((index, self._framework.address(array)))
            except ValueError as error:
                raise ValueError(f"{file.path}: tensor {name!r}: {error}") from None
            arrays.append(array)
        file.read_all(where)
        return [self._framework.to_device(array, self._device) for array in arrays]

    def _mapped_array(self, index: int, dtype: str, shape: tuple[int, ...], size: int) -> Any:
        """None where it has to be copied."""
        if not self._mapped or size == 0:
            return None
        address = self._file.view(index)
        if address % max(1, ITEM_BITS[dtype] // 8):
            return None  # not aligned
        return self._framework.over(buffer_at(address, size, self._file), dtype, shape)

    def _rows(self, index: int, first: int, count: int) -> Any:
        """A part of the first dimension."""
        name, dtype, shape, _, size = self._file.describe(index)
        row = size // shape[0] if shape[0] else 0
        try:
            array = self._framework.empty(dtype, (count, *shape[1:]))
        except ValueError as error:
            raise ValueError(f"{self._file.path}: tensor {name!r}: {error}") from None
        if row and count:
            self._file.read(index, first * row, count * row, self._framework.address(array))
        return array


class SafeSlice:
    """A tensor of an open file that is read as far as it is indexed."""

    def __init__(self, file: safe_open, index: int) -> None:
        self._owner = file
        self._index = index
        self._name, self._dtype, self._shape, _, _ = file._file.describe(index)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, key: Any) -> Any:
        first = key[0] if isinstance(key, tuple) and key else key
        rest = key[1:] if isinstance(key, tuple) else ()
        whole_bytes = ITEM_BITS[self._dtype] % 8 == 0
        if not self._shape or not whole_bytes or not _is_row_index(first):
            return self._owner.get_tensor(self._name)[key]
        rows: Any = range(self._shape[0])[first]  # IndexError, as for any sequence
        local: tuple[Any, ...]  # the key, in the rows that are read
        if isinstance(rows, int):
            first_row, count, local = rows, 1, (0, *rest)
        elif len(rows) == 0:
            first_row, count, local = 0, 0, (slice(None), *rest)
        else:
            first_row, count = rows[0], rows[-1] + 1 - rows[0]
            local = (slice(None, None, rows.step), *rest)
        result = self._owner._rows(self._index, first_row, count)[local]
        return self._owner._framework.to_device(result, self._owner._device)


def _is_row_index(key: Any) -> bool:
    if isinstance(key, slice):
        return key.step is None or key.step > 0
    return isinstance(key, int) and not isinstance(key, bool)

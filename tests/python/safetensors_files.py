"""safetensors files put together by hand."""

from __future__ import annotations

import json
import struct
from typing import Any


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """`header`: a dict, or the text of one. `length`: what the prefix says, where that is not so."""
    text = header if isinstance(header, bytes) else None
    if text is None:
        text = (header if isinstance(header, str) else json.dumps(header, ensure_ascii=False)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def header_of(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def data_of(content: bytes) -> bytes:
    return content[8 + struct.unpack("<Q", content[:8])[0] :]

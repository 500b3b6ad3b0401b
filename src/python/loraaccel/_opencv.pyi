from collections.abc import Sequence
from typing import Any

_Slot = tuple[int, int, int, int, bool, tuple[int, bool, bool], int, int]

def version() -> str: ...
def decode(data: bytes, alpha: bool, max_pixels: int) -> Any: ...
def load_images(
    sources: Sequence[bytes],
    is_path: Sequence[bool],
    slots: Sequence[_Slot],
    width: int,
    height: int,
    dtype: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    alpha: bool,
    max_pixels: int,
    threads: int,
) -> list[tuple[int, int, str, int, int]]: ...
def resize_cubic(image: Any, width: int, height: int) -> Any: ...

"""Images of one bucket into one batch of normalised pixels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loraaccel import _core
from loraaccel.data import _decode, _native_images
from loraaccel.data._decode import Source, name_of
from loraaccel.data._resize import CUBIC, Rules, rules

Size = tuple[int, int]
DTYPES = {"float32": 0, "bfloat16": 2, "float16": 3}  # codes of the core
OUT_OF_MEMORY = 6  # codes of a Status
FILE_PROBLEMS = (3, 8)
HALF = (0.5, 0.5, 0.5)


@dataclass
class Batch:
    """pixels [B, 3, H, W]; masks float32 [B, H, W] or None; failed: what is wrong with an image, by its index.
    The slot of such an image holds zeros."""

    pixels: Any
    masks: Any
    failed: dict[int, OSError] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    """Everything of a batch but the images: slots of the core, and what the images have in common."""

    slots: list[tuple[int, int, int, int, bool, Rules, int, int]]
    size: Size
    dtype: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    threads: int

    @property
    def form(self) -> tuple[int, int, int, tuple[float, ...], tuple[float, ...]]:
        return (*self.size, self.dtype, self.mean, self.std)

    def put(self, images: Sequence[np.ndarray], indices: Sequence[int]) -> None:
        _core.prepare_images(list(images), [self.slots[i] for i in indices], *self.form, self.threads)


def _dtype_name(dtype: Any) -> str:
    name = str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected float32, float16 or bfloat16")
    return name


def _empty(shape: tuple[int, ...], dtype: str, pin_memory: bool) -> Any:
    if importlib.util.find_spec("torch") is None:
        if dtype == "bfloat16" or pin_memory:
            raise ValueError(
                f"{'pin_memory' if pin_memory else 'bfloat16'} needs torch, which is not installed"
            )
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=pin_memory)


def _address(out: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Of a contiguous array or CPU tensor of that shape and type; ValueError for another."""
    found = (tuple(out.shape), _dtype_name(out.dtype) if str(out.dtype).rpartition(".")[2] in DTYPES else "")
    if found != (shape, dtype):
        raise ValueError(f"{name} is {out.dtype!s} {found[0]}, expected {dtype} {shape}")
    if isinstance(out, np.ndarray):
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"{name} is not contiguous or not writable, expected memory to write in order")
        return out.ctypes.data
    if out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(f"{name} is on {out.device} or not contiguous, expected a contiguous CPU tensor")
    return out.data_ptr()


def _each(values: Sequence[Any] | None, count: int, name: str, default: Any) -> list[Any]:
    listed = [default] * count if values is None else list(values)
    if len(listed) != count:
        raise ValueError(f"{len(listed)} {name}, expected one for each of {count} images")
    return listed


def _plan(
    count: int,
    reso: Size,
    resized: Sequence[Size],
    crop_xy: Sequence[tuple[int, int] | None] | None,
    flip: Sequence[bool] | None,
    how: Rules,
    dtype: Any,
    alpha: bool,
    out: Any,
    masks: Any,
    pin_memory: bool,
    mean: Sequence[float],
    std: Sequence[float],
    threads: int | None,
) -> tuple[_Plan, Any, Any]:
    width, height = int(reso[0]), int(reso[1])
    if width < 1 or height < 1:
        raise ValueError(f"a bucket of {width}x{height}, expected sides of 1 or more")
    name = _dtype_name(dtype) if out is None else _dtype_name(out.dtype)
    shape = (count, 3, height, width)
    if out is None:
        out = _empty(shape, name, pin_memory)
    if alpha and masks is None:
        masks = _empty((count, height, width), "float32", pin_memory)
    at = _address(out, "out", shape, name)
    mask_at = _address(masks, "masks", (count, height, width), "float32") if alpha else 0
    item = 4 if name == "float32" else 2
    slots = []
    sizes = _each(resized, count, "resized sizes", None)
    flips = _each(flip, count, "flips", False)
    for i, (size, crop) in enumerate(zip(sizes, _each(crop_xy, count, "crops", None), strict=True)):
        w, h = int(size[0]), int(size[1])
        x, y = ((w - width) // 2, (h - height) // 2) if crop is None else (int(crop[0]), int(crop[1]))
        if not (0 <= x <= w - width and 0 <= y <= h - height):
            raise ValueError(
                f"image {i}: a crop of {width}x{height} at ({x}, {y}), expected one inside the resized {w}x{h}"
            )
        mask = mask_at + i * height * width * 4 if alpha else 0
        slots.append((w, h, x, y, bool(flips[i]), how, at + i * 3 * height * width * item, mask))
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"mean {mean}, std {std}, expected three numbers each")
    plan = _Plan(
        slots, (width, height), DTYPES[name], tuple(mean), tuple(std), _native_images.threads(threads)
    )
    return plan, out, masks if alpha else None


def prepare_batch(
    images: Sequence[np.ndarray],
    reso: Size,
    resized: Sequence[Size],
    crop_xy: Sequence[tuple[int, int] | None] | None = None,
    flip: Sequence[bool] | None = None,
    alpha: bool = False,
    dtype: Any = "float32",
    *,
    method: str | None = None,
    compat: str = "main",
    pil_pass_order: str | None = None,
    cv2_major: int | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    out: Any = None,
    masks: Any = None,
    pin_memory: bool = False,
    threads: int | None = None,
) -> Batch:
    """``images`` (uint8 [H, W], [H, W, 3] or [H, W, 4]) resized, cropped, flipped and normalised in one pass,
    into a batch.

    Image i is resized to ``resized[i]`` (width, height) as ``resize`` does, cropped to ``reso`` at
    ``crop_xy[i]`` (None: the middle, rounded down), turned left to right where ``flip[i]``, and stored as ((v /
    255) - mean) / std, channels first, in ``dtype`` (float32, float16, bfloat16), rounded as torch does.
    ``alpha``: masks too, alpha / 255, or 1 for images without. ``out`` and ``masks`` are contiguous arrays or
    CPU tensors to write to, [B, 3, H, W] and float32 [B, H, W]; else they are made, by torch where it is
    installed. Images are worked on side by side, without the GIL.

    Raises ValueError, before anything is written, for what does not fit: sizes, crops, dtypes, lengths."""
    how = rules(method, compat, pil_pass_order, cv2_major)
    plan, out, masks = _plan(
        len(images),
        reso,
        resized,
        crop_xy,
        flip,
        how,
        dtype,
        alpha,
        out,
        masks,
        pin_memory,
        mean,
        std,
        threads,
    )
    arrays = list(images)
    if how[0] == CUBIC:
        arrays = _cubic(arrays, plan, range(len(arrays)))
    plan.put(arrays, range(len(arrays)))
    return Batch(out, masks)


def _cubic(arrays: Sequence[np.ndarray], plan: _Plan, indices: Sequence[int]) -> list[np.ndarray]:
    native = _native_images.opencv("method 'cubic'")
    sizes = [plan.slots[i][:2] for i in indices]
    return [
        array if array.shape[1::-1] == size else native.resize_cubic(array, *size)
        for array, size in zip(arrays, sizes, strict=True)
    ]


def load_batch(
    sources: Sequence[Source],
    reso: Size,
    resized: Sequence[Size],
    crop_xy: Sequence[tuple[int, int] | None] | None = None,
    flip: Sequence[bool] | None = None,
    alpha: bool = False,
    dtype: Any = "float32",
    *,
    method: str | None = None,
    compat: str = "main",
    pil_pass_order: str | None = None,
    cv2_major: int | None = None,
    orientation: str = "ignore",
    gray16: str = "high_byte",
    on_error: str = "raise",
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    out: Any = None,
    masks: Any = None,
    pin_memory: bool = False,
    threads: int | None = None,
) -> Batch:
    """Image files (paths, or bytes) decoded as ``load_rgb`` does and then as ``prepare_batch`` does, side by
    side without the GIL; files that Pillow decodes follow one by one.

    ``on_error="raise"``: OSError when all others are done, with the names, and their indices as its attribute
    ``failed``; "skip": they are left zero and listed in ``Batch.failed``. Raises ValueError for arguments that
    do not fit, and ImportError in a build without OpenCV."""
    _decode.check_options(orientation, gray16)
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'skip'")
    how = rules(method, compat, pil_pass_order, cv2_major)
    native = _native_images.opencv("load_batch")
    plan, out, masks = _plan(
        len(sources),
        reso,
        resized,
        crop_xy,
        flip,
        how,
        dtype,
        alpha,
        out,
        masks,
        pin_memory,
        mean,
        std,
        threads,
    )
    batch = Batch(out, masks)
    apply = orientation == "apply"
    if how[0] == CUBIC or apply:  # by way of whole images
        left = list(range(len(sources)))
    else:
        given = [s if isinstance(s, bytes) else os.fsencode(s) for s in sources]
        is_path = [not isinstance(s, bytes) for s in sources]
        results = native.load_images(
            given, is_path, plan.slots, *plan.form, alpha, _decode.max_pixels(), plan.threads
        )
        left = []
        for i, (code, number, text, rotation, pixels) in enumerate(results):
            name = name_of(sources[i])
            if code == 0:
                if text:
                    left.append(i)
                else:
                    _decode.warn_of(name, rotation, apply, pixels)
            elif code == OUT_OF_MEMORY:
                raise MemoryError(text)
            elif code not in FILE_PROBLEMS:
                raise RuntimeError(text)
            elif text.startswith(name):
                batch.failed[i] = OSError(number, text) if number else OSError(text)
            else:
                batch.failed[i] = OSError(f"{name}: {text}")
    for i in left:
        try:
            image = _decode.load_rgb(sources[i], alpha, orientation=orientation, gray16=gray16)
        except OSError as error:
            batch.failed[i] = error
            continue
        plan.put(_cubic([image], plan, [i]) if how[0] == CUBIC else [image], [i])
    for i in batch.failed:  # (`out` may hold the batch before)
        batch.pixels[i] = 0
        if batch.masks is not None:
            batch.masks[i] = 0
    if batch.failed and on_error == "raise":
        listed = "; ".join(str(batch.failed[i]) for i in sorted(batch.failed))
        failure = OSError(f"{len(batch.failed)} of {len(sources)} images cannot be loaded: {listed}")
        failure.failed = sorted(batch.failed)  # type: ignore[attr-defined]
        raise failure
    return batch

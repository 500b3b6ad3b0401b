"""Image files to pixels: by OpenCV where it gives what Pillow gives, else by Pillow."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from loraaccel import _core
from loraaccel.data import _native_images

Source = str | os.PathLike[str] | bytes
MAX_PIXELS = 89_478_485  # Pillow's own number
HEADER_BYTES = 65_536


def name_of(source: Source) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else os.fsdecode(source)


def max_pixels() -> int:
    """The limit that is in force in Pillow where it is imported, else its default; 0: none."""
    image = sys.modules.get("PIL.Image")
    return MAX_PIXELS if image is None else int(image.MAX_IMAGE_PIXELS or 0)


def warn_of(name: str, orientation: int, apply: bool, pixels: int, stacklevel: int = 3) -> None:
    if orientation != 1 and not apply:
        warnings.warn(
            f"{name}: EXIF orientation {orientation} is not applied (orientation='apply' does)",
            stacklevel=stacklevel,
        )
    if pixels > max_pixels() > 0:
        warnings.warn(
            f"{name}: {pixels} pixels, more than {max_pixels()} (a decompression bomb?)",
            stacklevel=stacklevel,
        )


def check_options(orientation: str, gray16: str) -> None:
    if orientation not in ("ignore", "apply"):
        raise ValueError(f"orientation is {orientation!r}, expected 'ignore' or 'apply'")
    if gray16 not in ("high_byte", "clip"):
        raise ValueError(f"gray16 is {gray16!r}, expected 'high_byte' or 'clip'")


def oriented(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels [H, W, ...] as EXIF's orientation 1 to 8 wants them shown."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(pixels[:: -1 if down else 1, :: -1 if right else 1])


def image_size(source: Source, *, orientation: str = "ignore") -> tuple[int, int]:
    """(width, height) from the file's header, without decoding: PNG, JPEG, WebP and BMP; Pillow reads others.

    ``orientation="apply"``: as shown, after EXIF's rotation. A path, or the bytes of a file.
    Raises OSError with the name where there is no size."""
    check_options(orientation, "clip")
    if isinstance(source, bytes):
        data, whole = source, True
    else:
        with open(source, "rb") as file:
            data = file.read(HEADER_BYTES)
        whole = len(data) < HEADER_BYTES
    kind, width, height, rotation = _core.image_header(data)
    if not whole and kind and (width == 0 or (kind in ("png", "webp") and orientation == "apply")):
        kind, width, height, rotation = _core.image_header(Path(os.fsdecode(source)).read_bytes())
    if width == 0:
        width, height, rotation = _pillow_size(source)
    turned = orientation == "apply" and rotation >= 5
    return (height, width) if turned else (width, height)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ImportError(
            "this kind of image file is decoded by Pillow, which is not installed: pip install pillow"
        ) from error
    return Image


def _words(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its own text is about a stream in memory
        return "no image of a kind that Pillow knows"
    return str(error)


def _stream(source: Source) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _pillow_size(source: Source) -> tuple[int, int, int]:
    image_module = _pillow()
    try:
        with image_module.open(_stream(source)) as image:
            return (*image.size, 1 if image.format == "TIFF" else _rotation(image))  # TIFF: as shown already
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers of headers, as its decoders below
        raise OSError(f"{name_of(source)}: no image size: {_words(error)}") from error


def _rotation(image: Any) -> int:
    value = image.getexif().get(0x0112, 1)
    return value if value in range(1, 9) else 1


def pillow_pixels(source: Source, alpha: bool, orientation: str, gray16: str) -> np.ndarray:
    """uint8 [H, W, 3 or 4] by Pillow, with its limits; OSError with the name where it fails."""
    image_module = _pillow()
    mode = "RGBA" if alpha else "RGB"
    try:
        with image_module.open(_stream(source)) as image:
            image.load()  # which applies the orientation of TIFF files
            rotation = _rotation(image) if orientation == "apply" else 1
            if gray16 == "high_byte" and (image.mode.startswith("I;16") or image.mode == "I"):
                values = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                pixels = np.stack([values] * 3 + [np.full_like(values, 255)] * alpha, axis=-1)
            else:
                pixels = np.array(image if image.mode == mode else image.convert(mode), np.uint8)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        raise OSError(f"{name_of(source)}: cannot be decoded: {_words(error)}") from error
    return oriented(pixels, rotation)


def load_rgb(
    source: Source,
    alpha: bool | str = False,
    *,
    orientation: str = "ignore",
    gray16: str = "high_byte",
) -> np.ndarray:
    """Pixels of an image file (a path, or its bytes): uint8 [H, W, 3], or [H, W, 4] with ``alpha=True``.

    The pixels are those of Pillow's ``convert("RGB")`` and ``convert("RGBA")``: without ``alpha`` the colours
    stay as they are stored, whatever their alpha is; ``alpha="white"`` is RGB over a white background. ICC
    profiles are ignored. ``orientation="ignore"`` does what sd-scripts does with EXIF's orientation, and warns
    with the file's name; "apply" shows the image as it was meant (Pillow always does so for TIFF). Grey of 16
    bits keeps its high byte; ``gray16="clip"`` does what Pillow's convert and so sd-scripts does, min(v, 255),
    which makes most such images white.

    OpenCV decodes 8-bit JPEG, PNG (16-bit RGB too) and still WebP. Pillow decodes, as OpenCV's pixels differ or
    it cannot: CMYK JPEG, grey PNG of 16 bits, PNG with a transparent colour or of 16 bits where alpha is
    wanted, palettes shorter than their depth, animations, BMP and all other formats; and it is asked about
    files that end early or do not decode.

    Raises OSError with the name for what cannot be read or decoded, or has more than twice Pillow's limit of 89 478 485
    pixels, before anything is decoded (``PIL.Image.MAX_IMAGE_PIXELS`` is followed; above the limit itself it warns);
    ImportError in a build without OpenCV."""
    check_options(orientation, gray16)
    if alpha not in (False, True, "white"):
        raise ValueError(f"alpha is {alpha!r}, expected False, True or 'white'")
    native = _native_images.opencv("load_rgb")
    data = source if isinstance(source, bytes) else Path(os.fsdecode(source)).read_bytes()
    name = name_of(source)
    _, width, height, rotation = _core.image_header(data)
    apply = orientation == "apply"
    try:
        pixels = native.decode(data, alpha is not False, max_pixels())
    except ValueError as error:
        raise OSError(f"{name}: {error}") from error
    if isinstance(pixels, str):
        pixels = named(name, pillow_pixels, data, alpha is not False, orientation, gray16)
    elif apply:
        pixels = oriented(pixels, rotation)
    warn_of(name, rotation, apply, width * height)
    return _core.flatten_over_white(pixels) if alpha == "white" else pixels


def named(name: str, decode: Any, data: bytes, *arguments: Any) -> np.ndarray:
    """decode(data, *arguments), whose OSError names the file instead of its bytes."""
    try:
        return decode(data, *arguments)
    except OSError as error:
        raise OSError(str(error).replace(name_of(data), name, 1)) from error.__cause__

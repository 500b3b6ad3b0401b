"""Small image files in memory, and a port of sd-scripts' choice of buckets in plain Python."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from PIL import Image


def photo(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth random pixels, [H, W, channels]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, channels), dtype=np.uint8)
    planes = [
        np.asarray(Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC))
        for c in range(channels)
    ]
    return np.stack(planes, axis=-1)


def encode(pixels: np.ndarray, kind: str, mode: str | None = None, **options: Any) -> bytes:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if mode:
        image = image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert(mode), np.uint8)


def select_bucket(
    size: tuple[int, int], predefined: list[tuple[int, int]], area: int, step: int, no_upscale: bool
) -> tuple[Any, Any, float]:
    width, height = size
    ratio = width / height
    if not no_upscale:
        if size in predefined:
            reso = size
        else:
            errors = [abs(w / h - ratio) for w, h in predefined]
            reso = predefined[errors.index(min(errors))]
        scale = reso[1] / height if ratio > reso[0] / reso[1] else reso[0] / width
        resized = (int(width * scale + 0.5), int(height * scale + 0.5))
    else:
        if width * height > area:

            def steps(x: float) -> int:
                return int(x + 0.5) - int(x + 0.5) % step

            w = math.sqrt(area * ratio)
            h = area / w
            by_width = (steps(w), steps(steps(w) / ratio))
            by_height = (steps(steps(h) * ratio), steps(h))
            if abs(by_width[0] / by_width[1] - ratio) < abs(by_height[0] / by_height[1] - ratio):
                resized = (by_width[0], int(by_width[0] / ratio + 0.5))
            else:
                resized = (int(by_height[1] * ratio + 0.5), by_height[1])
        else:
            resized = size
        reso = (resized[0] - resized[0] % step, resized[1] - resized[1] % step)
    return reso, resized, reso[0] / reso[1] - ratio

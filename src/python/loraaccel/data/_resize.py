"""Resizing as sd-scripts does it: which method, whose rules, and the call."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

import numpy as np

from loraaccel import _core
from loraaccel.data import _native_images

METHODS = {
    "nearest": 0,
    "linear": 1,
    "bilinear": 1,
    "area": 2,
    "box": 3,
    "lanczos": 4,
    "lanczos4": 4,
    "cubic": 5,
    "bicubic": 5,
}
CUBIC = 5
COMPAT = {"main": -1, "0.9.1": -2}  # codes of the usual method
Rules = tuple[int, bool, bool]


@functools.cache
def _installed_major(*packages: str) -> int | None:
    for package in packages:
        try:
            return int(metadata.version(package).split(".")[0])
        except metadata.PackageNotFoundError:
            continue
    return None


def rules(method: str | None, compat: str, pil_pass_order: str | None, cv2_major: int | None) -> Rules:
    """What native code is told; ValueError for a name that is none."""
    if method is not None and method not in METHODS:
        raise ValueError(f"resize: method {method!r}, expected None or one of {', '.join(METHODS)}")
    if compat not in COMPAT:
        raise ValueError(f"resize: compat {compat!r}, expected one of {', '.join(COMPAT)}")
    if pil_pass_order not in (None, "h", "v13"):
        raise ValueError(f"resize: pil_pass_order {pil_pass_order!r}, expected None, 'h' or 'v13'")
    if pil_pass_order is None:
        pil_pass_order = "v13" if (_installed_major("pillow") or 13) >= 13 else "h"
    if cv2_major is None:
        cv2_major = _installed_major("opencv-python-headless", "opencv-python") or 5
    code = COMPAT[compat] if method is None else METHODS[method]
    return code, pil_pass_order == "v13", cv2_major >= 5


def resize(
    image: Any,
    width: int,
    height: int,
    method: str | None = None,
    compat: str = "main",
    pil_pass_order: str | None = None,
    cv2_major: int | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """``image`` (uint8, [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], the fourth channel alpha) as [height, width, ...].

    ========================  =====================================================================================
    method                    bit-identical to
    ========================  =====================================================================================
    ``None``                  "area" where neither side grows, else "lanczos"; with ``compat="0.9.1"`` (sd-scripts'
                              version) "area" where both sides shrink
    "area"                    ``cv2.resize`` with INTER_AREA
    "linear", "bilinear"      INTER_LINEAR
    "nearest"                 INTER_NEAREST_EXACT; OpenCV 4 and 5 differ: ``cv2_major``, default: the installed one's
    "box", "lanczos"          ``PIL.Image.resize`` with BOX, LANCZOS (RGBA by way of premultiplied colours); Pillow 13
                              ("v13") and older ones ("h") differ: ``pil_pass_order``, default: the installed one's
    "cubic", "bicubic"        INTER_CUBIC of the OpenCV that loraaccel was built with; others differ by up to 1
    ========================  =====================================================================================

    A size that is the image's gives a copy. The image must be contiguous; ``threads``: as ``set_num_threads`` says.
    Raises ValueError for sizes that are not positive, for another dtype or shape, or an unknown name; ImportError for
    "cubic" in a build without OpenCV."""
    array = np.asarray(image)
    how = rules(method, compat, pil_pass_order, cv2_major)
    size = (int(width), int(height))
    if how[0] == CUBIC:
        return _native_images.opencv("resize with method 'cubic'").resize_cubic(array, *size)
    return _core.resize_image(array, size, how, (0, 0, *size), _native_images.threads(threads))

"""Buckets of image sizes, as sd-scripts makes and chooses them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from loraaccel import _core

Size = tuple[int, int]


def make_buckets(max_reso: Size, min_size: int = 256, max_size: int = 1024, step: int = 64) -> list[Size]:
    """Bucket sizes (width, height), sorted: multiples of ``step`` from ``min_size`` to ``max_size``, of at most as many
    pixels as ``max_reso`` has, and the square of about that many.

    Raises ValueError for numbers that are not positive, or ``min_size`` above ``max_size``."""
    return _core.bucket_resolutions((int(max_reso[0]), int(max_reso[1])), min_size, max_size, step)


def select_bucket_batch(
    sizes: Any,
    *,
    buckets: Sequence[Size] | None = None,
    max_reso: Size | None = None,
    step: int = 64,
    no_upscale: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bucket of each image of ``sizes`` (int64 [n, 2], width and height): (bucket [n, 2], resized [n, 2],
    ratio error [n]).

    The image is to be resized to ``resized`` and cropped to ``bucket``. With ``no_upscale`` the bucket follows from
    ``max_reso`` and ``step``, else it is one of ``buckets``. The error is the bucket's width / height less the image's.
    Raises ValueError for sizes that are not positive, and for ratios for which sd-scripts divides by zero."""
    if no_upscale and max_reso is None:
        raise ValueError("select_bucket_batch: no_upscale without max_reso, expected (width, height)")
    if not no_upscale and buckets is None:
        raise ValueError("select_bucket_batch: no buckets, expected those of make_buckets(), or no_upscale")
    array = np.ascontiguousarray(np.asarray(sizes, dtype=np.int64).reshape(-1, 2))
    return _core.choose_buckets(array, list(buckets or ()), max_reso or (1, 1), step, no_upscale)


def crop_ltrb(bucket: Size, image: Size) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) that SDXL is told of an image in its bucket, in pixels of the bucket.

    As in sd-scripts these are of a fit *into* the bucket, although images are cropped to cover it."""
    return _core.bucket_crop_box((int(bucket[0]), int(bucket[1])), (int(image[0]), int(image[1])))


class BucketManager:
    """sd-scripts' class of that name: same constructor, attributes, methods and results.

    Differs where sd-scripts ends with an AssertionError or a ZeroDivisionError: here it is a ValueError with
    the sizes."""

    def __init__(
        self,
        no_upscale: bool,
        max_reso: Size | None,
        min_size: int | None,
        max_size: int | None,
        reso_steps: int,
    ) -> None:
        if max_size is not None:
            if max_reso is not None and max_size < max(max_reso):
                raise ValueError(
                    f"BucketManager: max_size {max_size}, expected the sides of {max_reso} or more"
                )
            if min_size is not None and max_size < min_size:
                raise ValueError(f"BucketManager: max_size {max_size}, expected min_size {min_size} or more")
        self.no_upscale = no_upscale
        self.max_reso = max_reso
        self.max_area = None if max_reso is None else max_reso[0] * max_reso[1]
        self.min_size = min_size
        self.max_size = max_size
        self.reso_steps = reso_steps
        self.resos: list[Size] = []
        self.reso_to_id: dict[Size, int] = {}
        self.buckets: list[list[Any]] = []
        self.predefined_resos: list[Size] = []

    def add_image(self, reso: Size, image_or_info: Any) -> None:
        self.buckets[self.reso_to_id[reso]].append(image_or_info)

    def shuffle(self) -> None:
        for bucket in self.buckets:
            random.shuffle(bucket)

    def sort(self) -> None:
        """Orders the buckets by size, and numbers them anew."""
        resos = sorted(self.resos)
        self.buckets = [self.buckets[self.reso_to_id[reso]] for reso in resos]
        self.reso_to_id = {reso: i for i, reso in enumerate(resos)}
        self.resos = resos

    def make_buckets(self) -> None:
        if self.max_reso is None or self.min_size is None or self.max_size is None:
            raise ValueError("BucketManager.make_buckets: no max_reso, min_size or max_size was given")
        self.set_predefined_resos(make_buckets(self.max_reso, self.min_size, self.max_size, self.reso_steps))

    def set_predefined_resos(self, resos: Sequence[Size]) -> None:
        self.predefined_resos = list(resos)
        self.predefined_resos_set = set(resos)
        self.predefined_aspect_ratios = np.array([w / h for w, h in resos])

    def add_if_new_reso(self, reso: Size) -> None:
        if reso not in self.reso_to_id:
            self.reso_to_id[reso] = len(self.resos)
            self.resos.append(reso)
            self.buckets.append([])

    def round_to_steps(self, x: float) -> int:
        return int(x + 0.5) // self.reso_steps * self.reso_steps

    def select_bucket(self, image_width: int, image_height: int) -> tuple[Size, Size, float]:
        """(bucket, resized size, ratio error); the bucket joins ``resos`` when it is first chosen."""
        buckets, resized, errors = select_bucket_batch(
            [[image_width, image_height]],
            buckets=self.predefined_resos,
            max_reso=self.max_reso,
            step=self.reso_steps,
            no_upscale=self.no_upscale,
        )
        reso = (int(buckets[0, 0]), int(buckets[0, 1]))
        self.add_if_new_reso(reso)
        return reso, (int(resized[0, 0]), int(resized[0, 1])), float(errors[0])

    @staticmethod
    def get_crop_ltrb(bucket_reso: Size, image_size: Size) -> tuple[float, float, float, float]:
        return crop_ltrb(bucket_reso, image_size)

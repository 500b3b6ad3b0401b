"""Images on their way to training: buckets, decoding, resizing, and batches of normalised pixels, in native code.

    manager = BucketManager(False, (1024, 1024), 256, 2048, 64)
    manager.make_buckets()
    reso, resized, error = manager.select_bucket(*image_size("photo.jpg"))
    batch = load_batch(["photo.jpg"], reso, [resized], alpha=True)
    batch.pixels, batch.masks                    # [1, 3, H, W] in -1 ... 1, [1, H, W]

Results are bit-identical to what sd-scripts computes with Pillow and OpenCV's Python package, which are not
needed, except for kinds of files that Pillow decodes here too (``load_rgb`` lists them). Nothing is drawn at
random: crops and flips come in as arguments. Needs numpy; results are torch's tensors where torch is installed.
docs/images.md."""

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401  (one sentence instead of a stack of imports)
except ModuleNotFoundError as error:
    raise ImportError(
        "loraaccel.data needs numpy, which is not installed: pip install 'loraaccel[data]'"
    ) from error

from loraaccel.data._batch import Batch, load_batch, prepare_batch
from loraaccel.data._buckets import BucketManager, crop_ltrb, make_buckets, select_bucket_batch
from loraaccel.data._decode import image_size, load_rgb
from loraaccel.data._npz import latents_path, npz_read, npz_read_batch, npz_write
from loraaccel.data._resize import resize

__all__ = [
    "Batch",
    "BucketManager",
    "crop_ltrb",
    "image_size",
    "latents_path",
    "load_batch",
    "load_rgb",
    "make_buckets",
    "npz_read",
    "npz_read_batch",
    "npz_write",
    "prepare_batch",
    "resize",
    "select_bucket_batch",
]

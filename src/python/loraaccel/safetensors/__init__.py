"""safetensors files, read and written by the native core, with the signatures of ``safetensors.torch``.

``save_file, load_file, save, load, save_model, load_model, save_file_async, save_sharded, load_sharded`` are for torch;
``loraaccel.safetensors.numpy`` has the same for numpy, and needs no torch. Other than the reference library's:

* Saving writes a new file beside the target and moves it into place when it is complete: whatever fails, the old file
  is untouched; saving over the file that the tensors were read from works. ``sync=False`` does not wait for the disk.
* The same tensors and metadata give the same bytes: metadata is sorted by key.
* ``dtype=`` casts while writing, ``hashes=True`` computes kohya's hashes on the way; what was lost is in the report.
* Tensors that are not contiguous are written as what they mean, not refused.
* Reading copies out of the file (``backend="pread"``), so that a file that another process cuts short is an error.
  ``backend="mmap"`` maps it instead, without a copy; then it is the end of the process, as with every mapping.
* A file in which a name occurs twice is refused.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loraaccel._core import SafetensorError
from loraaccel.safetensors._open import safe_open
from loraaccel.safetensors._save import CastLoss, PendingSave, SaveReport

if TYPE_CHECKING:
    from loraaccel.safetensors.torch import (
        load,
        load_file,
        load_model,
        load_sharded,
        save,
        save_file,
        save_file_async,
        save_model,
        save_sharded,
    )

__all__ = [
    "CastLoss",
    "PendingSave",
    "SafetensorError",
    "SaveReport",
    "load",
    "load_file",
    "load_model",
    "load_sharded",
    "safe_open",
    "save",
    "save_file",
    "save_file_async",
    "save_model",
    "save_sharded",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("loraaccel.safetensors.torch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

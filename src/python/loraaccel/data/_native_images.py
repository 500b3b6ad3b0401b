"""The part of the native code that needs OpenCV's libraries, and how many threads to use."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from loraaccel import _core


def opencv(what: str) -> Any:
    """The module ``loraaccel._opencv``; ImportError with one sentence where it is not there or does not load."""
    try:
        return importlib.import_module("loraaccel._opencv")
    except ModuleNotFoundError as error:
        if error.name != "loraaccel._opencv":
            raise
        raise ImportError(
            f"{what} needs OpenCV, which was not there when this loraaccel was built: install OpenCV's C++ libraries "
            "(Debian and Ubuntu: apt install libopencv-imgcodecs-dev) and build loraaccel from source."
        ) from error
    except ImportError as error:
        raise ImportError(
            f"{what} needs the OpenCV libraries that loraaccel was built with, and they do not load: {error}"
        ) from error


def threads(wanted: int | None) -> int:
    """``wanted``, else what ``loraaccel.set_num_threads`` says; in a worker of torch's DataLoader 1."""
    if wanted is not None:
        if wanted < 1:
            raise ValueError(f"threads is {wanted}, expected None, or 1 or more")
        return wanted
    torch_data = sys.modules.get("torch.utils.data")
    return 1 if torch_data is not None and torch_data.get_worker_info() is not None else _core.num_threads()

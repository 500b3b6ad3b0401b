"""On PYTHONPATH of a training run: the interpreter imports this file before the script, which stays as it is.

LORAACCEL_TEST_WIDTHS=64,64,96,96 makes sd-scripts' U-Net as narrow as that: its widths are constants of the module
library.original_unet, set here when it is imported. A stand-in for torchvision is found where there is no torchvision.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

UNET = "library.original_unet"


class NarrowUnet(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != UNET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            widths = tuple(map(int, os.environ["LORAACCEL_TEST_WIDTHS"].split(",")))
            module.BLOCK_OUT_CHANNELS = widths
            module.TIMESTEP_INPUT_DIM, module.TIME_EMBED_DIM = widths[0], 4 * widths[0]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("LORAACCEL_TEST_WIDTHS"):
    sys.meta_path.insert(0, NarrowUnet())
sys.path.append(str(Path(__file__).parent / "no_torchvision"))

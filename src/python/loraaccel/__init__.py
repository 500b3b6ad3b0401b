"""LoRA kernels in native code: operators, a drop-in switch for existing models, and tools around them.

Importing this package needs neither torch nor a GPU. What is missing is named by ``loraaccel.info()`` and
``loraaccel doctor``; a name that needs something absent raises ImportError with a sentence that says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loraaccel._native import __version__
from loraaccel._packing import set_packing
from loraaccel._runtime import info, kernels, set_num_threads

if TYPE_CHECKING:
    from loraaccel._conv2d import lora_conv2d
    from loraaccel._dora import dora_linear
    from loraaccel._embedding import lora_embedding
    from loraaccel._loha import loha_conv2d, loha_linear
    from loraaccel._lokr import lokr_conv2d, lokr_linear
    from loraaccel._norms import MaxNorm, ggpo_linear, ggpo_norms, limit_norms, lora_norm, lora_row_norms
    from loraaccel._split import lora_linear_split
    from loraaccel.ops import (
        LoraWeights,
        lora_delta,
        lora_linear,
        lora_linear_batched,
        lora_mlp,
        lora_qkv,
    )
    from loraaccel.patching import ModuleReport, PatchReport, disabled, patch, unpatch

__all__ = [
    "LoraWeights",
    "MaxNorm",
    "ModuleReport",
    "PatchReport",
    "__version__",
    "disabled",
    "dora_linear",
    "ggpo_linear",
    "ggpo_norms",
    "info",
    "kernels",
    "limit_norms",
    "loha_conv2d",
    "loha_linear",
    "lokr_conv2d",
    "lokr_linear",
    "lora_conv2d",
    "lora_delta",
    "lora_embedding",
    "lora_linear",
    "lora_linear_batched",
    "lora_linear_split",
    "lora_mlp",
    "lora_norm",
    "lora_qkv",
    "lora_row_norms",
    "patch",
    "set_num_threads",
    "set_packing",
    "unpatch",
]

# Names that need torch are loaded at first use.
_LAZY = {
    "lora_norm": "loraaccel._norms",
    "lora_row_norms": "loraaccel._norms",
    "limit_norms": "loraaccel._norms",
    "ggpo_norms": "loraaccel._norms",
    "ggpo_linear": "loraaccel._norms",
    "MaxNorm": "loraaccel._norms",
    "dora_linear": "loraaccel._dora",
    "lora_conv2d": "loraaccel._conv2d",
    "lora_embedding": "loraaccel._embedding",
    "loha_linear": "loraaccel._loha",
    "loha_conv2d": "loraaccel._loha",
    "lokr_linear": "loraaccel._lokr",
    "lokr_conv2d": "loraaccel._lokr",
    "lora_linear_split": "loraaccel._split",
    "lora_delta": "loraaccel.ops",
    "lora_linear": "loraaccel.ops",
    "lora_linear_batched": "loraaccel.ops",
    "lora_qkv": "loraaccel.ops",
    "lora_mlp": "loraaccel.ops",
    "LoraWeights": "loraaccel.ops",
    "patch": "loraaccel.patching",
    "unpatch": "loraaccel.patching",
    "disabled": "loraaccel.patching",
    "PatchReport": "loraaccel.patching",
    "ModuleReport": "loraaccel.patching",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'loraaccel' has no attribute {name!r}")
    import importlib

    from loraaccel import _native

    _native.load_operators()  # says what to do where torch is missing or too old
    importlib.import_module("loraaccel._registered")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))

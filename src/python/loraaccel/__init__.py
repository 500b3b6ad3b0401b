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
    from loraaccel.ops import LoraWeights, lora_linear, lora_mlp, lora_qkv
    from loraaccel.patching import ModuleReport, PatchReport, disabled, patch, unpatch

__all__ = [
    "LoraWeights",
    "ModuleReport",
    "PatchReport",
    "__version__",
    "disabled",
    "info",
    "kernels",
    "lora_linear",
    "lora_mlp",
    "lora_qkv",
    "patch",
    "set_num_threads",
    "set_packing",
    "unpatch",
]

# Names that need torch are loaded at first use.
_LAZY = {
    "lora_linear": "loraaccel.ops",
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
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))

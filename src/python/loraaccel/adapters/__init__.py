"""Adapter files of any tool: read, looked at, converted, merged into a base model and taken out again; of another rank,
combined, compared, and extracted from two models.

    adapter = load("style.safetensors")          # kohya, PEFT, diffusers, ComfyUI, OneTrainer, LyCORIS ...
    for entry in adapter.entries:
        print(entry.component, entry.path, entry.kind, entry.rank, entry.scale, entry.scale_text)
    save(adapter, "style-diffusers.safetensors", format="diffusers")

Names are looked up in tables that the native core carries; a key that no table knows is an error that lists it.
Needs no torch: tensors are torch's where torch is installed, else numpy's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loraaccel.adapters._entry import Adapter, Entry
from loraaccel.adapters._files import Written, bases, convert, formats, load, save
from loraaccel.adapters._info import FileSummary, Summary, file_summary, summary
from loraaccel.adapters._merge import Merged, Unmerged, merge, unmerge

if TYPE_CHECKING:
    from loraaccel.adapters._combine import Combined, combine
    from loraaccel.adapters._difference import Difference, diff
    from loraaccel.adapters._extract import Extracted, extract
    from loraaccel.adapters._resize import Resized, resize

# what needs numpy, imported when it is asked for
_TOOLS = {
    "Combined": "_combine",
    "combine": "_combine",
    "Difference": "_difference",
    "diff": "_difference",
    "Extracted": "_extract",
    "extract": "_extract",
    "Resized": "_resize",
    "resize": "_resize",
}

__all__ = [
    "Adapter",
    "Combined",
    "Difference",
    "Entry",
    "Extracted",
    "FileSummary",
    "Merged",
    "Resized",
    "Summary",
    "Unmerged",
    "Written",
    "bases",
    "combine",
    "convert",
    "diff",
    "extract",
    "file_summary",
    "formats",
    "load",
    "merge",
    "resize",
    "save",
    "summary",
    "unmerge",
]


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"loraaccel.adapters.{_TOOLS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ValueError(
            f"loraaccel.adapters.{name} needs numpy, which is not installed: pip install 'loraaccel[tools]'"
        ) from None

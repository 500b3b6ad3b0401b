"""Adapter files of any tool: read, looked at, converted, merged into a base model and taken out again.

    adapter = load("style.safetensors")          # kohya, PEFT, diffusers, ComfyUI, OneTrainer, LyCORIS ...
    for entry in adapter.entries:
        print(entry.component, entry.path, entry.kind, entry.rank, entry.scale, entry.scale_text)
    save(adapter, "style-diffusers.safetensors", format="diffusers")

Names are looked up in tables that the native core carries; a key that no table knows is an error that lists it.
Needs no torch: tensors are torch's where torch is installed, else numpy's.
"""

from __future__ import annotations

from loraaccel.adapters._entry import Adapter, Entry
from loraaccel.adapters._files import Written, bases, convert, formats, load, save
from loraaccel.adapters._info import Summary, summary
from loraaccel.adapters._merge import Merged, Unmerged, merge, unmerge

__all__ = [
    "Adapter",
    "Entry",
    "Merged",
    "Summary",
    "Unmerged",
    "Written",
    "bases",
    "convert",
    "formats",
    "load",
    "merge",
    "save",
    "summary",
    "unmerge",
]

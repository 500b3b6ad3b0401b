"""Version of the wheel: the file VERSION, plus the tag that LORAACCEL_LOCAL_VERSION names (cu130: 0.1.0+cu130)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    base = Path(__file__).resolve().parents[1].joinpath("VERSION").read_text().strip()
    local = os.environ.get("LORAACCEL_LOCAL_VERSION", "").strip().lstrip("+")
    if local and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", local):
        raise ValueError(
            f"LORAACCEL_LOCAL_VERSION is {local!r}, expected letters and digits, parts joined by dots"
        )
    return {"version": f"{base}+{local}" if local else base}

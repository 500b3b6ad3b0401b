"""Where the programs are, and what builds them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., str]


def need_tool(name: str) -> str:
    """The program beside this Python (cmake and ninja come as packages), else the one on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tool = shutil.which(name, path=path)
    if tool is None:
        pytest.skip(f"{name} is not installed")
    return tool

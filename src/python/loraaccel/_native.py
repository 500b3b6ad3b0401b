"""Loads the native parts, after checks whose failure would otherwise be a crash or an undefined symbol."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

TORCH_MINIMUM = (2, 10)  # of libloraaccel
POINTERS_MINIMUM = (2, 4)


@functools.cache
def build_info() -> dict[str, Any]:
    """What the build assumed: version, baseline_cpu_flags, machine, torch_headers, torch_minimum."""
    return json.loads((files("loraaccel") / "_build_info.json").read_text())


def cpu_flags() -> set[str]:
    """Instruction sets of this CPU as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def check_cpu(baseline: list[str], present: set[str]) -> None:
    """Raises ImportError where the build may use an instruction set that this CPU lacks (else: SIGILL)."""
    missing = sorted(set(baseline) - present)
    if present and missing:
        raise ImportError(
            f"this build of loraaccel needs a CPU with {', '.join(missing)}, and this one "
            f"({platform.processor() or platform.machine()}) has not. "
            "Install a wheel built for the baseline CPU, or build from source without -march flags."
        )


check_cpu(build_info()["baseline_cpu_flags"], cpu_flags())

from loraaccel import _core  # noqa: E402  (the check above must come first)

__version__: str = _core.__version__


def library_path(stem: str) -> Path:
    """Path of lib<stem> in the installed package (not next to the sources: an editable install has two places)."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(str(files("loraaccel"))) / "lib" / f"lib{stem}.{suffix}"


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.13.0+cpu or 2.15.0a0."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def torch_path(version: str | None) -> str | None:
    """How the operators run with this torch: "operators" (registered with it, over its stable ABI), "pointers" (called
    directly, in eager mode; for older ones), None where they cannot run or torch is not installed (version None).

    ``LORAACCEL_TORCH_PATH=pointers`` takes the second way with a newer torch as well."""
    if version is None or torch_problem(version):
        return None
    return "operators" if _asked_path() == "auto" and parse_version(version) >= TORCH_MINIMUM else "pointers"


def _asked_path() -> str:
    return os.environ.get("LORAACCEL_TORCH_PATH", "").strip().lower() or "auto"


def torch_problem(version: str | None) -> str | None:
    """One sentence on why the operators cannot run with this torch (None: torch is not installed), or None."""
    least = ".".join(map(str, POINTERS_MINIMUM))
    if version is None:
        return (
            f"torch is not installed; loraaccel's operators need torch {least} or newer (pip install torch)."
        )
    if parse_version(version) < POINTERS_MINIMUM:
        return (
            f"torch {version} is installed; loraaccel's operators need torch {least} or newer (pip install -U torch). "
            "The parts that do without torch work with any version."
        )
    if _asked_path() not in ("auto", "pointers"):
        return f"LORAACCEL_TORCH_PATH is {_asked_path()!r}, expected auto or pointers."
    return None


@functools.cache
def load_operators() -> None:
    """Brings the operators into the process: torch.ops.loraaccel, or those of `_core`.

    Raises ImportError with a sentence that says what to do."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(torch_problem(None)) from None
    problem = torch_problem(torch.__version__)
    if problem:
        raise ImportError(problem)
    if torch_path(torch.__version__) == "pointers":
        from loraaccel import _pointers

        _pointers.load()
        return
    path = library_path("loraaccel")
    if not path.is_file():
        raise ImportError(f"{path} is missing; this loraaccel was built without its torch operators.")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"libloraaccel, built with the headers of torch {build_info()['torch_headers']}, does not load with torch "
            f"{torch.__version__}: {error}. Reinstall loraaccel, or report this with the output of `loraaccel doctor`."
        ) from error

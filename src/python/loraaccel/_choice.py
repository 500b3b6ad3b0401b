"""From how many rows on the operators borrow torch's GEMM: the model, or what `loraaccel tune` measured here. No torch.

The measurement lies in a file for each user, one entry for each CPU and pair of versions, and is read when the
operators are loaded. It is never made on its own.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraaccel import _core, _native

if TYPE_CHECKING:
    from loraaccel._runtime import Control

DTYPES = ("float32", "bfloat16", "float16")  # the order of the native functions
NEVER = 2**63 - 1

# Where the numbers in force come from: "model", or the date of the measurement.
source = "model"


def path() -> Path:
    """$LORAACCEL_CACHE_DIR/choice.json; by default in $XDG_CACHE_HOME/loraaccel or ~/.cache/loraaccel."""
    directory = os.environ.get("LORAACCEL_CACHE_DIR")
    if not directory:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        directory = os.path.join(caches, "loraaccel")
    return Path(directory) / "choice.json"


def machine(torch_version: str) -> str:
    """What a measurement holds for."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # no Linux: the processor's name of the standard library
    features = " ".join(_core.cpu_features())
    return f"{model}; {features}; torch {torch_version}; loraaccel {_native.__version__}"


def _read() -> dict[str, Any]:
    try:
        text = path().read_text()
    except FileNotFoundError:
        return {}
    entries = json.loads(text)
    if not isinstance(entries, dict):
        raise ValueError("expected an object")
    return entries


def _rows_of(entry: Any) -> dict[str, int | None]:
    rows = entry["rows"]
    for name in DTYPES:
        if rows[name] is not None and (not isinstance(rows[name], int) or rows[name] < 1):
            raise ValueError(f"rows of {name} are {rows[name]!r}, expected a number from 1 on or null")
    return {name: rows[name] for name in DTYPES}


def apply(library: Control, torch_version: str) -> None:
    """Gives the operators what was measured for this machine, if anything was."""
    global source
    try:
        entry = _read().get(machine(torch_version))
        if entry is None:
            return
        force(library, _rows_of(entry))
        source = str(entry["measured"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"loraaccel: {path()} is no measurement of `loraaccel tune` ({error!r}); the model chooses the kernels. "
            "Delete the file or run `loraaccel tune` again.",
            stacklevel=2,
        )


def force(library: Control, rows: dict[str, int | None]) -> None:
    """Rows by type; None: never."""
    library.set_borrowing_rows([rows[n] or NEVER for n in DTYPES])


def in_force(library: Control) -> dict[str, int | None]:
    return {name: None if n == NEVER else n for name, n in zip(DTYPES, library.borrowing_rows(), strict=True)}


def save(torch_version: str, entry: dict[str, Any]) -> Path:
    """Adds the measurement to the file, replaced as a whole; an unreadable one is written anew."""
    try:
        entries = _read()
    except ValueError:
        entries = {}
    entries[machine(torch_version)] = entry
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    with os.fdopen(handle, "w") as file:
        json.dump(entries, file, indent=2)
    os.replace(name, target)
    return target


def decide(ratios: dict[int, float], margin: float = 1.05) -> int | None:
    """The fewest rows from which torch wins, by the margin, at every measured number of rows; None: nowhere.

    ratios: time of our kernels over that of torch's GEMM with the update added to it, by number of rows.
    """
    chosen = None
    for rows in sorted(ratios, reverse=True):
        if ratios[rows] < margin:
            break
        chosen = rows
    return chosen

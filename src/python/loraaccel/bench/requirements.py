"""Optional packages that the benchmark needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable


class MissingPackagesError(RuntimeError):
    """A package that the requested rows need cannot be imported."""


def require(names: Iterable[str]) -> None:
    """Import the named packages; raise MissingPackagesError naming all that are not installed."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # installed, but broken: its own message says more
                raise
            missing.append(name)
    if missing:
        raise MissingPackagesError(
            f'loraaccel bench needs {", ".join(missing)}, not installed here: pip install "loraaccel[bench]"'
        )

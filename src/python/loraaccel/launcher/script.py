"""Runs a script or a module as the interpreter would have: its own argv, its own folder first, itself as __main__."""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Sequence


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As `python PATH ARGUMENTS`. The module stays __main__: what it registered for the interpreter's end finds it."""
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        {
            "__file__": os.path.abspath(path),
            "__builtins__": __builtins__,
            "__cached__": None,
            "__spec__": None,
        }
    )
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    exec(code, main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As `python -m NAME ARGUMENTS`."""
    sys.argv = [name, *arguments]
    _replace_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _replace_first_path(folder: str) -> None:
    """The interpreter put the folder of our own program, or the current one, there."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path:
        sys.path[0] = folder
    else:
        sys.path.append(folder)

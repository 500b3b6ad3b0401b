"""What exists and what ran: kernels(), info(), set_num_threads()."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from loraaccel import _choice, _core, _native, _packing, _state


class Control(Protocol):
    """What is asked of the operators besides computing."""

    def kernel_calls(self) -> dict[str, int]: ...
    def set_num_threads(self, n: int) -> None: ...
    def set_borrowing_rows(self, rows: Sequence[int]) -> None: ...  # for the types of _choice.DTYPES
    def borrowing_rows(self) -> Sequence[int]: ...


class _Registered:
    """The C functions of libloraaccel."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_native.library_path("loraaccel")))

    def kernel_calls(self) -> dict[str, int]:
        size = 16
        names, calls = (ctypes.c_char_p * size)(), (ctypes.c_int64 * size)()
        count = self._library.loraaccel_torch_kernel_calls(names, calls, size)
        return {name.decode(): calls[i] for i, name in enumerate(names[:count]) if name is not None}

    def set_num_threads(self, n: int) -> None:
        self._library.loraaccel_torch_set_num_threads(ctypes.c_int(n))

    def set_borrowing_rows(self, rows: Sequence[int]) -> None:
        self._library.loraaccel_torch_set_borrowing_rows((ctypes.c_int64 * len(rows))(*rows))

    def borrowing_rows(self) -> list[int]:
        rows = (ctypes.c_int64 * len(_choice.DTYPES))()
        self._library.loraaccel_torch_borrowing_rows(rows)
        return list(rows)


def operators() -> Control | None:
    """The operators, once load_operators() has brought them into the process."""
    if not _native.load_operators.cache_info().currsize:
        return None
    return _Registered() if _path() == "operators" else _core


def _path() -> str | None:
    version = _torch_version()
    return None if version is None else _native.torch_path(version)


def _torch_version() -> str | None:
    """Of the torch that is imported, else of the one that is installed."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.__version__
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def kernels() -> list[dict[str, Any]]:
    """Kernels in order of choice: {"op", "name", "available", "reason"}.

    ``LORAACCEL_FORCE_KERNEL=<name>`` makes every operator use that one; a call it cannot serve raises.
    """
    return _core.kernels(host_lends_gemm=_torch_problem() is None)


def set_num_threads(n: int) -> None:
    """Threads that loraaccel uses at most; 0 returns to the default.

    Inside torch the threads are torch's own (``torch.set_num_threads``), of which at most ``n`` are used.
    The default is ``LORAACCEL_NUM_THREADS``, else all of torch's threads, outside torch the CPUs of the process.
    Raises ValueError for a negative number.
    """
    _core.set_num_threads(n)
    _wanted["threads"] = n
    library = operators()
    if library is not None:
        library.set_num_threads(n)


_wanted = {"threads": 0}


def apply_num_threads() -> None:
    """Tells a freshly loaded libloraaccel what set_num_threads() said before. ValueError for a LORAACCEL_NUM_THREADS
    that is no number of threads."""
    given = os.environ.get("LORAACCEL_NUM_THREADS", "")
    if given and not (given.isascii() and given.isdigit()):
        raise ValueError(f"LORAACCEL_NUM_THREADS is {given!r}, expected a number of threads")
    if _wanted["threads"]:
        set_num_threads(_wanted["threads"])


def apply_choice(torch_version: str) -> None:
    """Tells a freshly loaded libloraaccel what `loraaccel tune` measured."""
    library = operators()
    if library is not None:
        _choice.apply(library, torch_version)


def _torch_problem() -> str | None:
    return _native.torch_problem(_torch_version())


def _kernel_calls() -> dict[str, int]:
    library = operators()
    return {} if library is None else library.kernel_calls()


def _choice_report() -> dict[str, Any]:
    library = operators()
    return {"source": _choice.source, "rows": None if library is None else _choice.in_force(library)}


def info() -> dict[str, Any]:
    """What this process has and did. Cheap: nothing is imported or measured.

    version, switch ("on" or "off"); torch: version, path ("operators"; with torch 2.4 to 2.9
    "pointers"; or None), problem (a sentence or None);
    cpu: features; threads: core, requested; opencv: the version that decodes images, of the build, or None; kernels: as
    kernels(); kernel_calls: operator calls by kernel, backward included; calls: {"fused": {kind: n}, "fallback":
    {reason: n}}, the forward calls of LoRA modules since the process began (calls inside torch.compile'd code are not
    seen by the interpreter and so not counted); packing: policy,
    budget_bytes, and of the packed weights kept by set_packing("always") the bytes now, their number, and how often one
    was used (hits), made (packed), given up (dropped) or did not fit (over_budget);
    ungrouped: how often layers of an attention module were found not to go together, by reason ("other_input": one was
    called with another input or not at all, "layout": the module reads an output as one block of memory,
    "forward_replaced": its forward was replaced before patch());
    choice: from how many rows on torch's GEMM is borrowed, by type (None: never), and the source: "model" or the date
    of `loraaccel tune`.
    """
    torch = sys.modules.get("torch")
    problem = _torch_problem()
    return {
        "version": _native.__version__,
        "switch": "off" if _state.off() else "on",
        "torch": {
            "version": torch.__version__ if torch is not None else None,
            "path": None if problem else _path(),
            "problem": problem,
        },
        "cpu": {"features": _core.cpu_features()},
        "threads": {"core": _core.num_threads(), "requested": _wanted["threads"]},
        "opencv": _native.build_info()["opencv"] or None,
        "kernels": kernels(),
        "kernel_calls": _kernel_calls(),
        "packing": _packing.report(),
        "choice": _choice_report(),
        "calls": {"fused": dict(_state.fused), "fallback": dict(_state.fallback)},
        "ungrouped": dict(_state.ungrouped),
    }

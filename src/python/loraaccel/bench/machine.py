"""Which machine and which packages the figures belong to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

BUSY_LOAD = 0.5  # running programs per core
PACKAGES = ("loraaccel", "torch", "peft", "diffusers", "transformers")


def cpu_model() -> str:
    """Name of the CPU as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """Installed version per package; None where it is not installed as a distribution."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def busy() -> str | None:
    """A sentence if other programs keep the cores busy, by the load average of the last minute."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load <= BUSY_LOAD * num_cores():
        return None
    return f"Other programs are running (load average {load:.1f} before the start): times are longer for it."


def describe(threads: int) -> dict[str, object]:
    """CPU, cores, threads used, operating system, and whether the machine is busy otherwise."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": threads,
        "system": platform.platform(),
        "busy": busy(),
    }

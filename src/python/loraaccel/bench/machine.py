"""Which machine and which packages the figures belong to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

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


def load_average() -> float | None:
    """Programs that ran or wanted to, on average over the last minute; None where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe(threads: int) -> dict[str, object]:
    """CPU, cores, threads used, operating system, and how busy the machine was before the measurement."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": threads,
        "system": platform.platform(),
        "load_average_before": load_average(),
    }

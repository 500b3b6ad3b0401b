"""Figures reported elsewhere, printed beside the rows for orientation. They say nothing about this machine."""

from __future__ import annotations

from dataclasses import dataclass

WHERE = "NVIDIA A100, PyTorch 2.0"


@dataclass(frozen=True)
class Reference:
    """One row as reported for another machine; the times are in `unit`."""

    what: str
    python: float
    cpp: float
    unit: str
    gain: float  # python / cpp as reported, of the times before they were rounded

    def sentence(self) -> str:
        """The line printed under a table."""
        times = f"Python {self.python:g} {self.unit}, C++ {self.cpp:g} {self.unit}, {self.gain:g}x"
        return f"Reported elsewhere, another machine ({WHERE}): {self.what} {times}"


REFERENCES = {
    "qkv": Reference("LoRA QKV projection, r = 8:", 1.23, 0.67, "ms", 1.84),
    "forward": Reference("forward, batch size 4:", 89, 62, "ms", 1.44),
    "epoch": Reference("one training epoch, SDXL:", 18, 13, "min", 1.38),
}

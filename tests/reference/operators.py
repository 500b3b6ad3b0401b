"""The native operators, whichever way they came into the process: OPS.lora_linear(x, weight, ...)."""

from __future__ import annotations

from typing import Any

from loraaccel._operators import operator


class _Operators:
    def __getattr__(self, name: str) -> Any:
        return operator(name)


OPS = _Operators()

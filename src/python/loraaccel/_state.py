"""What a process counts and whether the fast path is on. No torch."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Forward calls of LoRA modules since the process began, by kind of operator and by reason of falling back.
fused: Counter[str] = Counter()
fallback: Counter[str] = Counter()
# Attention modules whose layers turned out not to be computed together, by reason.
ungrouped: Counter[str] = Counter()

# Above zero inside `disabled()`.
disabled_depth = 0
_lock = threading.Lock()


# True where LORAACCEL=0 turned everything off before loraaccel was imported.
SWITCHED_OFF = os.environ.get("LORAACCEL", "").strip().lower() in ("0", "off", "false", "no")

# True while the operators cannot be used: with those that torch has not registered, while it compiles.
not_here: Callable[[], bool] | None = None


def off() -> bool:
    """True where everything must run as if loraaccel did not exist."""
    return SWITCHED_OFF or disabled_depth > 0 or (not_here is not None and not_here())


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, in every thread, patched modules run their own forward and `lora_linear` plain torch."""
    global disabled_depth
    with _lock:
        disabled_depth += 1
    try:
        yield
    finally:
        with _lock:
            disabled_depth -= 1

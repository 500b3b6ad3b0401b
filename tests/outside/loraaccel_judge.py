"""A pytest plugin for test suites of others: every model that PEFT makes is patched, and fused calls are counted.

    LORAACCEL_JUDGE=DIR pytest -p loraaccel_judge ...        counts of each process go to DIR as JSON

Without LORAACCEL_JUDGE nothing is patched. In both cases a model hub that refuses is asked again without a pause: with
HF_ENDPOINT where nobody listens, tests that need a download fail at once. See peft_suite.py.
"""

from __future__ import annotations

import json
import os
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

_out = os.environ.get("LORAACCEL_JUDGE")
_tests: Counter[str] = Counter()  # tests in which something was fused, and all
_before = 0


def pytest_configure(config: Any) -> None:
    from huggingface_hub.utils import _http

    _http.time = types.SimpleNamespace(**(vars(time) | {"sleep": lambda _seconds: None}))
    if not _out:
        return
    from peft.tuners.tuners_utils import BaseTuner

    import loraaccel

    own = BaseTuner.inject_adapter

    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """PEFT comes through here for each adapter of each model, whatever function the user called."""
        result = own(self, model, *args, **kwargs)
        loraaccel.patch(model)
        return result

    BaseTuner.inject_adapter = inject_adapter


def pytest_runtest_setup(item: Any) -> None:
    global _before
    _before = _fused()


def pytest_runtest_teardown(item: Any) -> None:
    _tests["all"] += 1
    _tests["fused"] += _fused() > _before


def pytest_sessionfinish(session: Any) -> None:
    if _out:
        import loraaccel

        counts = {**loraaccel.info()["calls"], "tests": dict(_tests)}
        (Path(_out) / f"{os.getpid()}.json").write_text(json.dumps(counts))


def _fused() -> int:
    if not _out:
        return 0
    import loraaccel

    return sum(loraaccel.info()["calls"]["fused"].values())

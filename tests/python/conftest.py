"""What several test files share. No torch here: tests of the import must be able to run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loraaccel

# Read when torch loads OpenMP. Waiting threads sleep instead of spinning: with tensors as small as here, on cores that
# others use too, spinning costs ten times the work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


FLOAT64 = ("torch", "ref")  # the kernels that serve it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the combinations of a kernel and a type of the layer that no call can have (test_errors.py has the
    error that forcing one of them gives)."""

    def exists(item: pytest.Item) -> bool:
        params = getattr(item, "callspec", None)
        values = params.params if params is not None else {}
        layer = values.get("layer", (values.get("dtypes") or ("torch.float32",))[0])
        return values.get("kernel", "ref") in FLOAT64 or str(layer) != "torch.float64"

    items[:] = [item for item in items if exists(item)]


@pytest.fixture
def force_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """force_kernel(name) sets LORAACCEL_FORCE_KERNEL, which the operators read at each call."""
    return lambda name: monkeypatch.setenv("LORAACCEL_FORCE_KERNEL", name)


@pytest.fixture
def kernel_calls() -> Callable[[], dict[str, int]]:
    """kernel_calls() is what ran since the fixture was made: calls by kernel, forward and backward."""
    before = loraaccel.info()["kernel_calls"]

    def since() -> dict[str, int]:
        now = loraaccel.info()["kernel_calls"]
        return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}

    return since


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers over one input are computed together however small they are; nothing of a group stays behind."""
    from loraaccel.integrations import group_scope

    monkeypatch.setattr(group_scope, "MIN_WORK", 0)
    yield
    assert group_scope.current.get() is None


@pytest.fixture
def no_wrong_guess() -> Iterator[None]:
    """What belongs together in an attention module was guessed right."""
    before = dict(loraaccel.info()["ungrouped"])
    yield
    assert loraaccel.info()["ungrouped"] == before


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """run_python(script, *arguments, path=None, **environment) in a fresh interpreter, in an empty folder.

    path: a folder in front of everything else on the import path. An environment variable of None is unset.
    """

    def run(
        script: str, *arguments: str, path: Path | None = None, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("LORAACCEL")}
        env |= {k: v for k, v in environment.items() if v is not None}
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", script, *arguments]
        work = tmp_path / "empty"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            command, env=env, cwd=work, text=True, capture_output=True, timeout=300, check=False
        )

    return run

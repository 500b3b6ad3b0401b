"""Importing the package where something is missing: no torch, an old torch, a CPU that lacks what the build assumes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import loraaccel
from loraaccel import _native

Run = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT_TORCH = """
import importlib.abc, importlib.metadata, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
real = importlib.metadata.version
def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
"""


def test_import_without_torch(run_python: Run) -> None:
    """The package, its list of kernels and its command line work; the names that need torch say what to install."""
    script = (
        WITHOUT_TORCH
        + """
import loraaccel
assert "torch" not in sys.modules
info = loraaccel.info()
assert info["torch"]["version"] is None and info["torch"]["path"] is None
assert "pip install torch" in info["torch"]["problem"]
lender = [k for k in loraaccel.kernels() if k["name"] == "torch"]
assert [k["available"] for k in lender] == [False] and lender[0]["reason"]
references = [k["op"] for k in loraaccel.kernels() if k["name"] == "ref" and k["available"]]
assert references == ["lora_linear", "resize_image"]
loraaccel.set_num_threads(2)
assert loraaccel.info()["threads"]["core"] == 2
assert "lora_linear" in dir(loraaccel)
for name in ("lora_linear", "patch", "unpatch", "disabled", "PatchReport", "ModuleReport"):
    try:
        getattr(loraaccel, name)
    except ImportError as error:
        assert "torch" in str(error), error
        print(name, "|", error)
    else:
        raise AssertionError(f"{name} was there")
try:
    loraaccel.nosuch
except AttributeError as error:
    assert "nosuch" in str(error)
"""
    )
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert len(said) == 6
    for name, sentence in said.items():
        assert "pip install torch" in sentence, f"{name}: {sentence}"
        assert "2.4" in sentence, f"{name}: {sentence}"


def test_doctor_without_torch(run_python: Run) -> None:
    """Absent is not broken: exit code 0, and the advice says what to install."""
    script = (
        WITHOUT_TORCH
        + """
sys.argv = ["loraaccel", "doctor", "--json"]
import runpy
runpy.run_module("loraaccel", run_name="__main__", alter_sys=True)
"""
    )
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout
    assert "not checked: torch is not installed" in done.stdout


def test_an_error_inside_torch_is_not_taken_for_its_absence(run_python: Run, tmp_path: Path) -> None:
    """A torch that is there and cannot import one of its own dependencies must not be reported as not installed."""
    fake = tmp_path / "path" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("import a_dependency_of_torch\n")
    script = """
import loraaccel
try:
    loraaccel.lora_linear
except ModuleNotFoundError as error:
    assert error.name == "a_dependency_of_torch", error
    print("passed on")
"""
    done = run_python(script, path=tmp_path / "path")
    assert done.stdout.split() == ["passed", "on"], done.stderr


@pytest.mark.parametrize("version", ["2.3.1+cpu", "1.13.1"])
def test_vx1_a_torch_that_is_too_old(version: str, run_python: Run, tmp_path: Path) -> None:
    """VX1: never an undefined symbol; a sentence with what was found, what is needed and what to do. The version is
    looked at before anything native is loaded, so a stub is enough here."""
    fake = tmp_path / "path" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass Tensor: ...\nnn = None\n"
        "def __getattr__(name): raise AssertionError(f'torch.{name} was used')\n"
    )
    (fake / "nn").mkdir()
    (fake / "nn" / "__init__.py").write_text("class Module: ...\nclass Parameter: ...\n")
    (fake / "nn" / "functional.py").write_text("")
    script = """
import loraaccel
try:
    loraaccel.lora_linear
except ImportError as error:
    print(error)
import torch
info = loraaccel.info()
assert info["torch"]["path"] is None
assert info["torch"]["version"] == torch.__version__
assert torch.__version__ in info["torch"]["problem"]
"""
    done = run_python(script, path=tmp_path / "path")
    assert done.returncode == 0, done.stderr
    for word in (version, "2.4", "pip install -U torch"):
        assert word in done.stdout


def test_import_loads_neither_torch_nor_peft(run_python: Run) -> None:
    """Even where both are installed: the import stays cheap, and info() reports the version only of what is loaded."""
    script = """
import sys, loraaccel
loraaccel.info()
heavy = set(sys.modules) & {"torch", "peft", "transformers", "diffusers", "numpy", "click", "rich", "matplotlib"}
assert not heavy, heavy
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr


def test_names_are_there_and_typed() -> None:
    for name in loraaccel.__all__:
        assert getattr(loraaccel, name) is not None
        assert name in dir(loraaccel)
    with pytest.raises(AttributeError, match="nosuch"):
        loraaccel.nosuch  # noqa: B018
    assert (Path(loraaccel.__file__).parent / "py.typed").is_file()


def test_a_cpu_that_lacks_what_the_build_assumes() -> None:
    """Else: an illegal instruction at the first call. The check comes before anything native is loaded."""
    present = {"sse4_2", "avx2"}
    _native.check_cpu([], present)
    _native.check_cpu(["avx2"], present)
    with pytest.raises(ImportError) as error:
        _native.check_cpu(["avx2", "avx512f", "fma"], present)
    for word in ("avx512f", "fma", "-march"):
        assert word in str(error.value)
    assert "avx2" not in str(error.value)
    _native.check_cpu(["avx512f"], set())  # no list of flags on this system: nothing to say


def test_a_library_that_is_missing_is_named(run_python: Run) -> None:
    script = """
from pathlib import Path
from loraaccel import _native
_native.library_path = lambda stem: Path("/nonexistent/libloraaccel.so")
try:
    _native.load_operators()
except ImportError as error:
    print(error)
"""
    done = run_python(script)
    assert "/nonexistent/libloraaccel.so is missing" in done.stdout, done.stderr


def test_a_library_that_does_not_load_is_explained(run_python: Run, tmp_path: Path) -> None:
    """VX1: the loader's own words come inside a sentence that says what was built for what, and what to do."""
    broken = tmp_path / "libloraaccel.so"
    broken.write_bytes(b"not a library")
    script = f"""
from pathlib import Path
from loraaccel import _native
_native.library_path = lambda stem: Path({str(broken)!r})
try:
    _native.load_operators()
except ImportError as error:
    print(error)
"""
    done = run_python(script)
    for word in ("does not load with torch", "Reinstall loraaccel", "libloraaccel"):
        assert word in done.stdout, done.stderr


FIRST_CALLS = """
import faulthandler, threading
faulthandler.dump_traceback_later(60, exit=True)
import torch, loraaccel
start = threading.Barrier(8)
wrong = []

def work():
    one = torch.ones
    start.wait()
    y = loraaccel.lora_linear(one(64, 4), torch.zeros(4, 4), None, one(8, 4), one(4, 8), 2.0)
    if not torch.equal(y, torch.full((64, 4), 64.0)):
        wrong.append(y)

threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not wrong
print("done")
"""


@pytest.mark.parametrize("attempt", range(3))
def test_vx5_first_calls_from_many_threads(attempt: int, run_python: Run) -> None:
    """VX5: eight threads load the operators at the same moment, with a watchdog; in fresh processes."""
    done = run_python(FIRST_CALLS)
    assert done.stdout.split() == ["done"], done.stderr

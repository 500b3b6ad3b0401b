"""info(), kernels(), the switches, what the installed libraries need, and the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import loraaccel
from loraaccel import _native, _runtime
from reference import lora_linear as formula
from reference.calls import check, function, make_call, run

Run = Callable[..., "subprocess.CompletedProcess[str]"]
NAMES = ["avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "torch", "portable", "ref"]


# ---- kernels, info ---------------------------------------------------------------------------------------------------


def test_kernels_lists_every_kernel_in_order_of_choice() -> None:
    kernels = [k for k in loraaccel.kernels() if k["op"] == "lora_linear"]
    assert [k["name"] for k in kernels] == NAMES
    for k in kernels:
        assert set(k) == {"op", "name", "available", "reason"}
        assert isinstance(k["available"], bool)
        assert (k["reason"] == "") == k["available"]
    available = {k["name"] for k in kernels if k["available"]}
    assert {"torch", "portable", "ref"} <= available
    features = loraaccel.info()["cpu"]["features"]
    for name in NAMES[:5]:
        assert (name in features) or (name not in available)


def test_the_first_kernel_that_accepts_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, kernel_calls: Callable[[], dict[str, int]]
) -> None:
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL", raising=False)
    best = next(k["name"] for k in loraaccel.kernels() if k["available"])
    for dtype in (torch.float32, torch.float16):
        run(make_call((128,), 32, 24, 4, (dtype, dtype)))
    assert kernel_calls() == {best: 4}
    run(make_call((128,), 32, 24, 4, (torch.float64, torch.float64)))
    assert kernel_calls() == {best: 4, "torch": 2}


def test_info_says_what_is_there_and_what_ran(kernel_calls: Callable[[], dict[str, int]]) -> None:
    import loraaccel.ops

    before = loraaccel.info()
    assert set(before) == {
        "version",
        "switch",
        "packing",
        "ungrouped",
        "choice",
        "torch",
        "cpu",
        "threads",
        "opencv",
        "kernels",
        "kernel_calls",
        "calls",
    }
    assert before["version"] == loraaccel.__version__ == _native.build_info()["version"]
    assert before["switch"] == "on"
    assert before["torch"] == {
        "version": torch.__version__,
        "path": _native.torch_path(torch.__version__),
        "problem": None,
    }
    assert before["kernels"] == loraaccel.kernels()
    assert before["threads"]["core"] >= 1
    assert set(before["calls"]) == {"fused", "fallback"}
    json.dumps(before)  # plain data
    call = make_call((5,), 8, 6, 2)
    y = function(*call.leaves(), call)
    assert sum(kernel_calls().values()) == 1
    y.backward(call.grad)
    assert sum(kernel_calls().values()) == 2
    before["kernel_calls"]["ref"] = -1  # a copy: what is done to it changes nothing
    assert loraaccel.info()["kernel_calls"].get("ref", 0) >= 0


def test_a_failed_call_is_not_counted(kernel_calls: Callable[[], dict[str, int]]) -> None:
    call = make_call((5,), 8, 6, 2)
    call.lora_b = [call.lora_b[0][:5]]
    with pytest.raises(RuntimeError):
        function(*call.leaves(), call)
    assert kernel_calls() == {}


# ---- switches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_threads() -> Iterator[None]:
    yield
    loraaccel.set_num_threads(0)


def test_set_num_threads(default_threads: None) -> None:
    """Accepted, shown, taken back; results do not depend on it; a negative number is refused."""
    default = loraaccel.info()["threads"]["core"]
    call = make_call((300,), 64, 50, 8)
    wanted = run(call)
    for n in (1, 3):
        loraaccel.set_num_threads(n)
        assert loraaccel.info()["threads"] == {"core": n, "requested": n}
        results = run(call)
        check(call, results)
        assert all(torch.equal(results[name], wanted[name]) for name in wanted if name != "y")
    loraaccel.set_num_threads(0)
    assert loraaccel.info()["threads"] == {"core": default, "requested": 0}
    with pytest.raises(ValueError, match="-1"):
        loraaccel.set_num_threads(-1)
    assert loraaccel.info()["threads"] == {"core": default, "requested": 0}


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("1", 1)])
def test_threads_from_the_environment(value: str, threads: int, run_python: Run) -> None:
    script = "import loraaccel; print(loraaccel.info()['threads']['core'])"
    done = run_python(script, LORAACCEL_NUM_THREADS=value)
    assert done.stdout.split() == [str(threads)], done.stderr


@pytest.mark.parametrize("value", ["", "x", "0", "-2", "1.5"])
def test_a_senseless_number_of_threads_is_no_crash(value: str, run_python: Run) -> None:
    script = "import loraaccel; assert loraaccel.info()['threads']['core'] >= 1"
    assert run_python(script, LORAACCEL_NUM_THREADS=value).returncode == 0


def test_requested_threads_reach_a_library_that_is_loaded_later(run_python: Run) -> None:
    """set_num_threads before the operators are loaded counts as well."""
    script = """
import loraaccel
loraaccel.set_num_threads(1)
import torch, threading
torch.set_num_threads(4)
from loraaccel.ops import lora_linear
t = torch.randn
before = threading.active_count()
import os
def tasks(): return len(os.listdir("/proc/self/task"))
lora_linear(t(8, 8), t(8, 8), None, t(2, 8), t(8, 2))   # loads what is loaded at first use
count = tasks()
lora_linear(t(2000, 64), t(64, 64), None, t(2, 64), t(64, 2))
assert tasks() == count, "threads were started although 1 was asked for"
loraaccel.set_num_threads(0)
lora_linear(t(2000, 64), t(64, 64), None, t(2, 64), t(64, 2))
assert tasks() > count, "no thread was started although torch has 4: this test cannot fail"
"""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc")
    done = run_python(script, LORAACCEL_FORCE_KERNEL="portable")
    assert done.returncode == 0, done.stderr


SWITCHED_OFF = """
import torch, torch.nn.functional as F, loraaccel
from loraaccel.ops import lora_linear, lora_linear_adapters

def composed(x, w, b, pairs, scalings, dropouts):
    y = F.linear(x, w, b)
    dtype = y.dtype
    for (A, B), s, p in zip(pairs, scalings, dropouts):
        x = x.to(A.dtype)
        y = y + F.linear(F.linear(F.dropout(x, p, True), A), B) * s
    return y.to(dtype)

assert loraaccel.info()["switch"] == "off"
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
for layer, adapter in ((f32, f32), (bf16, bf16), (bf16, f32), (f16, f16), (f32, bf16)):
    for dropout in (0.0, 0.5):
        results = []
        for ours in (True, False):
            torch.manual_seed(7)
            x, w, b = (torch.randn(*s).to(layer).requires_grad_() for s in ((60, 24), (20, 24), (20,)))
            pairs = [[torch.randn(*s).to(adapter).requires_grad_() for s in ((r, 24), (20, r))] for r in (3, 5)]
            if ours:
                one = lora_linear(x, w, b, *pairs[0], 1.7, input_dropout=dropout)
                a, c = zip(*pairs)
                two = lora_linear_adapters(x, w, b, a, c, [1.7, -0.4], [dropout, 0.0])
            else:
                one = composed(x, w, b, pairs[:1], [1.7], [dropout])
                two = composed(x, w, b, pairs, [1.7, -0.4], [dropout, 0.0])
            (one.sum() + two.square().sum()).backward()
            grads = [t.grad for t in (x, w, b, *pairs[0], *pairs[1])]
            results.append([one, two, *grads, torch.get_rng_state()])
        for first, second in zip(*results):
            assert first.dtype == second.dtype and torch.equal(first, second), (layer, adapter, dropout)
assert loraaccel.info()["kernel_calls"] == {}
print("identical")
"""


@pytest.mark.parametrize("value", ["0", "off", "FALSE", " no "])
def test_switched_off_everything_is_plain_torch_bit_for_bit(value: str, run_python: Run) -> None:
    """OFF of the conventions: values, gradients and random numbers are those of torch's own operators."""
    if value != "0":
        script = "import loraaccel; print(loraaccel.info()['switch'])"
        assert run_python(script, LORAACCEL=value).stdout.split() == ["off"]
        return
    done = run_python(SWITCHED_OFF, LORAACCEL=value)
    assert done.stdout.split() == ["identical"], done.stderr


@pytest.mark.parametrize("value", ["1", "", "on", None])
def test_switched_on_is_the_default(value: str | None, run_python: Run) -> None:
    script = "import loraaccel; print(loraaccel.info()['switch'])"
    assert run_python(script, LORAACCEL=value).stdout.split() == ["on"]


def test_disabled_is_plain_torch_and_ends(kernel_calls: Callable[[], dict[str, int]]) -> None:
    call = make_call((50,), 12, 10, 3, (torch.bfloat16, torch.float32))
    adapters = call.adapters(lambda t: t)
    wanted = formula.peft_composition(call.x, call.weight, call.bias, adapters)
    with loraaccel.disabled():
        with loraaccel.disabled():
            assert loraaccel.info()["switch"] == "off"
        y = function(call.x, call.weight, call.bias, call.lora_a, call.lora_b, call)
        assert torch.equal(y, wanted)
        assert kernel_calls() == {}
    with pytest.raises(ZeroDivisionError), loraaccel.disabled():
        raise ZeroDivisionError
    assert loraaccel.info()["switch"] == "on"
    function(call.x, call.weight, call.bias, call.lora_a, call.lora_b, call)
    assert sum(kernel_calls().values()) == 1


# ---- the installed libraries, VX1 VX2 --------------------------------------------------------------------------------


def installed() -> list[Path]:
    root = Path(str(files("loraaccel")))
    return [*root.glob("_core*.so"), *(root / "lib").glob("*.so")]


def output_of(tool: str, *arguments: str) -> str:
    if sys.platform != "linux" or shutil.which(tool) is None:
        pytest.skip(f"{tool} is not there")
    return subprocess.run([tool, *arguments], text=True, capture_output=True, check=True, timeout=60).stdout


def test_vx2_no_library_needs_cuda() -> None:
    """VX2: beside the C and C++ libraries, only the operators need something, and that is torch's CPU library."""
    libraries = installed()
    assert [p.name.split(".")[0] for p in libraries] == ["_core", "libloraaccel"]
    for path in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d", str(path)))
        assert "libc.so.6" in needed
        system = r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux.*\.so\.\d+"
        others = [n for n in needed if not re.fullmatch(system, n)]
        assert others == (["libtorch_cpu.so"] if path.name.startswith("lib") else []), path


def undefined_symbols(path: Path) -> set[str]:
    lines = output_of("nm", "-D", "--undefined-only", str(path)).splitlines()
    return {line.split()[-1] for line in lines}


def test_vx1_the_operators_use_the_stable_interface_of_torch_only() -> None:
    """VX1: every symbol that the library takes from elsewhere is of torch's stable C interface or of the C and C++
    libraries; none is of c10 or at, which change with torch's version."""
    (library,) = (p for p in installed() if p.name.startswith("lib"))
    symbols = undefined_symbols(library)
    shims = {s for s in symbols if re.match(r"(aoti_torch|torch)_", s)}
    assert "torch_library_impl" in shims or "aoti_torch_library_impl" in shims
    unknown = [
        s
        for s in symbols - shims
        if "@" not in s and not s.startswith(("_ITM_", "__gmon_start__", "__cxa_finalize"))
    ]
    assert not unknown  # the C and C++ libraries' symbols carry a version
    assert not [s for s in symbols if re.search(r"c10|[0-9](at|torch)[0-9E]", s)]
    versions = {s.split("@")[1].rsplit("_", 1)[0] for s in symbols if "@" in s}
    assert versions <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


def test_the_library_exports_its_c_functions_and_little_else() -> None:
    """A symbol of the core that leaks out could be taken over by another library in the process."""
    (library,) = (p for p in installed() if p.name.startswith("lib"))
    lines = output_of("nm", "-D", "--defined-only", str(library)).splitlines()
    names = {line.split()[-1] for line in lines if line.split()[-2] in "TDB"}
    assert {"loraaccel_torch_kernel_calls", "loraaccel_torch_set_num_threads"} <= names
    assert not [n for n in names if "backtrace" in n]
    assert not [n for n in names if "loraaccel" in n and not n.startswith("loraaccel_torch_")]


# ---- command line ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(run_python: Run) -> Run:
    """cli(*arguments, **environment): `python -m loraaccel` in a fresh process."""
    script = "import runpy; runpy.run_module('loraaccel', run_name='__main__', alter_sys=True)"
    return lambda *arguments, **environment: run_python(script, *arguments, **environment)


def test_doctor_as_json(cli: Run) -> None:
    done = cli("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == loraaccel.__version__
    assert report["operators"] == "compute correctly"
    assert report["problems"] == []
    assert [k["name"] for k in report["info"]["kernels"] if k["op"] == "lora_linear"] == NAMES
    assert report["packages"]["torch"] == torch.__version__
    assert report["build"]["torch_minimum"] == ".".join(map(str, _native.TORCH_MINIMUM))
    assert report["info"]["kernel_calls"] != {}


def test_doctor_as_text(cli: Run) -> None:
    done = cli("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in (loraaccel.__version__, "Nothing is broken", *NAMES):
        assert word in done.stdout


def test_doctor_says_what_is_broken(cli: Run) -> None:
    """A forced kernel that does not exist breaks every call: exit code 1, the problem on standard output."""
    done = cli("doctor", "--json", LORAACCEL_FORCE_KERNEL="nosuch")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["operators"] == "broken"
    assert any("nosuch" in problem for problem in report["problems"])


def test_doctor_mentions_the_switch(cli: Run) -> None:
    done = cli("doctor", "--json", LORAACCEL="0")
    assert done.returncode == 0
    assert any("LORAACCEL=0" in line for line in json.loads(done.stdout)["advice"])


def test_config_prints_paths_that_exist(cli: Run) -> None:
    done = cli("config", "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert set(values) == {"cmake_prefix_path", "pkg_config_path", "include_dir", "lib_dir", "version"}
    assert values["version"] == loraaccel.__version__
    assert (Path(values["include_dir"]) / "loraaccel" / "lora_linear.h").is_file()
    assert (Path(values["pkg_config_path"]) / "loraaccel.pc").is_file()
    assert list(Path(values["cmake_prefix_path"]).rglob("loraaccelConfig.cmake"))
    assert list(Path(values["lib_dir"]).glob("libloraaccel.*"))
    some = cli("config", "--version", "--include-dir")
    assert some.stdout.splitlines() == [
        values["include_dir"],
        values["version"],
    ]  # in the order of the options


@pytest.mark.parametrize(
    "arguments", [["nosuch"], ["config"], ["doctor", "--nosuch"], ["config", "--lib-dir", "extra"]], ids=str
)
def test_wrong_usage_ends_with_2(arguments: list[str], cli: Run) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help(cli: Run) -> None:
    assert loraaccel.__version__ in cli("--version").stdout
    for arguments in (["--help"], ["-h"], ["doctor", "--help"], ["demo", "-h"]):
        done = cli(*arguments)
        assert done.returncode == 0
        assert "Usage" in done.stdout
    overview = cli("--help").stdout
    assert all(command in overview for command in ("demo", "bench", "doctor", "config"))


def test_the_installed_command_is_the_same(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("loraaccel")
    if not script.is_file():
        pytest.skip("the console script is not beside the interpreter")
    done = subprocess.run(
        [script, "nosuch"], text=True, capture_output=True, cwd=tmp_path, check=False, timeout=60
    )
    assert done.returncode == 2


def test_path_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """libloraaccel's ABI begins with torch 2.10; older ones go by pointers, and newer ones where that is asked for."""
    monkeypatch.delenv("LORAACCEL_TORCH_PATH", raising=False)
    paths = {
        v: _native.torch_path(v) for v in ("2.3.1", "2.4.0", "2.7.1+cu126", "2.9.1", "2.10.0", "2.13.0+cpu")
    }
    assert list(paths.values()) == [None, "pointers", "pointers", "pointers", "operators", "operators"]
    assert _native.torch_path(None) is None
    monkeypatch.setenv("LORAACCEL_TORCH_PATH", "pointers")
    assert _native.torch_path("2.13.0+cpu") == "pointers"
    monkeypatch.setenv("LORAACCEL_TORCH_PATH", "pointer")
    assert _native.torch_path("2.13.0+cpu") is None
    expected = "LORAACCEL_TORCH_PATH is 'pointer', expected auto or pointers."
    assert _native.torch_problem("2.13.0+cpu") == loraaccel.info()["torch"]["problem"] == expected


def test_version_parsing() -> None:
    """Versions as torch writes them."""
    for text, wanted in (
        ("2.13.0+cpu", (2, 13)),
        ("2.15.0a0+git123", (2, 15)),
        ("2.10", (2, 10)),
        ("2.9.1", (2, 9)),
        ("3.0.0.dev20270101", (3, 0)),
    ):
        assert _native.parse_version(text) == wanted, text
    assert _native.torch_problem("2.10.0") is None
    assert _native.torch_problem("2.13.0+cpu") is None
    assert _native.torch_problem("2.4.0") is None
    assert "2.3.1" in str(_native.torch_problem("2.3.1"))
    assert "not installed" in str(_native.torch_problem(None))
    assert _runtime._torch_problem() is None

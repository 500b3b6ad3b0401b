"""Everything that is checked, built and measured, one session each: `nox --list` names them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).resolve().parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
TORCH = os.environ.get("LORAACCEL_TORCH", "torch==2.13.0")
JOBS = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
LAYERS = ("core", "opencv", "ops", "torch", "python")  # folders of src/cpp whose sources clang-tidy checks
# The CPUs of qemu that the C++ tests run as, the longest run first, and the kernels that run there. Left out, to save
# minutes, is what would repeat the same instructions on the same data: `ref`, which has no vector code, and on the
# Armv8.2 CPUs `portable` and `torch` (that one uses the best kernel's pieces: neon_bf16 as `max`, neon elsewhere).
ARM_CPUS = {
    "max": {"neon_bf16", "neon", "torch", "portable", "ref"},  # the only one with the bf16 instructions
    "cortex-a72": {"neon", "torch", "portable"},  # plain Armv8.0
    "cortex-a76": {"neon"},
    "neoverse-n1": {"neon"},
}


def install_build_tools(session: nox.Session, *requirements: str) -> None:
    """Install torch, what a build needs and `requirements` in one go, so that one resolver sees them all."""
    session.install(TORCH, *PYPROJECT["build-system"]["requires"], "cmake>=3.26", "ninja", *requirements)
    set_build_environment(session)


def set_build_environment(session: nox.Session) -> None:
    session.env.update(
        CMAKE_BUILD_PARALLEL_LEVEL=JOBS,
        CCACHE_BASEDIR=str(ROOT),  # with ccache, objects of one checkout serve the next
        CCACHE_NOHASHDIR="true",
    )


def install_package(session: nox.Session, *extras: str) -> None:
    """Build the wheel of this checkout and install it with its dependencies and those of `extras`."""
    project = PYPROJECT["project"]
    optional = project.get("optional-dependencies", {})
    install_build_tools(
        session, *project.get("dependencies", []), *(r for extra in extras for r in optional[extra])
    )
    session.install("--no-build-isolation", "--no-deps", ".")


def configure(session: nox.Session, preset: str) -> Path:
    """Run CMake on `preset` against the packages of this session; the build directory is the result."""
    script = "import importlib.util, sys; [print(importlib.util.find_spec(m).origin) for m in sys.argv[1:]]"
    found = session.run("python", "-c", script, "torch", "pybind11", "nlohmann_json", silent=True)
    torch, *prefixes = (str(Path(line).parent) for line in str(found).split())
    build = ROOT / "build" / f"nox-{session.name}"
    where = {
        "Python_EXECUTABLE": f"{session.bin}/python",
        "LORAACCEL_TORCH_ROOT": torch,
        "CMAKE_PREFIX_PATH": ";".join(prefixes),
    }
    defines = [f"-D{name}={value}" for name, value in where.items()]
    session.run("cmake", "--fresh", f"--preset={preset}", f"-B{build}", *defines)
    return build


def run_cpp_tests(session: nox.Session) -> None:
    build = configure(session, "tests")
    if "GTest_DIR:PATH=GTest_DIR-NOTFOUND" in (build / "CMakeCache.txt").read_text():
        session.warn("SKIPPED: the C++ tests need GoogleTest (Debian and Ubuntu: apt install libgtest-dev)")
        return
    session.run("cmake", "--build", str(build))
    options = ["--output-on-failure", "--no-tests=error", f"--parallel={JOBS}"]
    session.run("ctest", "--test-dir", str(build), *options)
    run_as_old_cpu(session, build)


def run_as_old_cpu(session: nox.Session, build: Path) -> None:
    """The same tests as an x86 without AVX: no instruction that it lacks, and what is left computes correctly."""
    if platform.machine() != "x86_64":
        return
    if shutil.which("qemu-x86_64") is None:
        session.warn(
            "SKIPPED: running as an old CPU needs qemu-x86_64 (Debian and Ubuntu: apt install qemu-user)"
        )
        return
    # (A fork inside qemu ends with an assertion of its own; torch's GEMM and ref are the same code on every CPU.)
    for area, tests in (
        ("core", "-*Fork*"),
        ("checkpoint", "*"),
        ("adapters", "*"),
        ("losses", "-*/torch:*/ref"),
        ("images", "*"),
        ("lora", "Kernel/LoraLinear.*:*Mlp*:*Qkv*:*Errors*:-*/torch:*/ref"),
    ):
        program = str(build / "tests" / "cpp" / f"loraaccel_{area}_tests")
        options = ["--gtest_brief=1", f"--gtest_filter={tests}"]
        session.run("qemu-x86_64", "-cpu", "Nehalem", program, *options, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatters, linters and type checks of pre-commit, then clang-tidy."""
    if not (ROOT / ".git").exists():
        session.error("pre-commit reads the list of files from git: run lint in a git checkout")
    session.install("pre-commit==4.7.0")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")
    install_build_tools(session, "clang-tidy==23.1.4")
    run_clang_tidy(session)


def run_clang_tidy(session: nox.Session) -> None:
    build = configure(session, "lint")
    compiled = {Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())}
    base = ROOT / "src" / "cpp"
    sources = {source for layer in LAYERS for source in (base / layer).rglob("*.cpp")}
    if not sources & compiled:
        session.error(f"{build}/compile_commands.json names no source of {base}: nothing to check")
    for source in sorted(sources - compiled):
        session.log(f"not checked, this machine does not compile it: {source.relative_to(ROOT)}")
    pattern = rf"^{re.escape(str(base))}/({'|'.join(LAYERS)})/.*\.cpp$"
    # The compiler's own headers, after clang's: for those that clang lacks, such as backtrace.h.
    headers = str(session.run("c++", "-print-file-name=include", external=True, silent=True)).strip()
    options = ["-quiet", f"-p={build}", f"-j={JOBS}", f"-extra-arg=-idirafter{headers}"]
    session.run("run-clang-tidy.py", *options, pattern)


OLDER_TORCH_TESTS = (
    "runtime", "errors", "lora_linear", "lora_qkv", "lora_mlp", "family", "norms", "kohya", "peft_forms", "peft_state",
    "losses_bce", "losses_diffusion",
)  # fmt: skip


@nox.session
def tests(session: nox.Session) -> None:
    """C++ tests, then the Python tests against the installed wheel. Arguments go to pytest."""
    install_package(session, "tests")
    run_cpp_tests(session)
    args = [absolute(session, arg) for arg in session.posargs]
    everything = not any(arg.startswith(os.sep) for arg in args)
    if everything:
        args += [
            "-n",
            JOBS,
            "--dist=worksteal",
            str(ROOT / "tests" / "python"),
            str(ROOT / "tests" / "consumer"),
        ]
    session.chdir(session.create_tmp())  # nothing of the source tree is importable by accident
    pytest = ("pytest", f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-rs")
    session.run(*pytest, *args)
    if everything:  # the way that older torch goes, with this one
        files = [str(ROOT / "tests" / "python" / f"test_{name}.py") for name in OLDER_TORCH_TESTS]
        session.run(
            *pytest,
            "-n",
            JOBS,
            "--dist=worksteal",
            "-m",
            "not registered",
            *files,
            env={"LORAACCEL_TORCH_PATH": "pointers"},
        )


def absolute(session: nox.Session, arg: str) -> str:
    """`arg`, made absolute where it names a test file or folder (`tests/python/test_x.py::test_y`)."""
    path = Path(session.invoked_from) / arg.split("::")[0]
    return arg if arg.startswith("-") or not path.exists() else str(Path(session.invoked_from) / arg)


@nox.session
def cpp(session: nox.Session) -> None:
    """Only the C++ build and its tests."""
    install_build_tools(session)
    run_cpp_tests(session)


@nox.session
def aarch64(session: nox.Session) -> None:
    """The core for 64-bit Arm: cross-compiled, then its tests under qemu as several CPUs."""
    packages = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
    missing = [package for tool, package in packages.items() if shutil.which(tool) is None]
    if missing:
        session.skip(f"NOTHING WAS TESTED for Arm, which needs Debian's {' and '.join(missing)}")
    session.install(*PYPROJECT["build-system"]["requires"], "cmake>=3.26", "ninja")
    set_build_environment(session)
    build = ROOT / "build" / f"nox-{session.name}"
    python = f"-DPython_EXECUTABLE={session.bin}/python"
    session.run("cmake", "--fresh", "--preset=aarch64", f"-B{build}", python)
    if "LORAACCEL_GTEST_SOURCE-NOTFOUND" in (build / "CMakeCache.txt").read_text():
        session.skip(
            "NOTHING WAS TESTED for Arm, which needs the sources of GoogleTest (Debian's libgtest-dev)"
        )
    session.run("cmake", "--build", str(build))
    reports = Path(session.create_tmp())
    with ThreadPoolExecutor(min(2, int(JOBS))) as pool:  # most tests keep one core busy
        list(pool.map(lambda cpu: run_as_arm_cpu(session, build, cpu, reports / f"{cpu}.json"), ARM_CPUS))


def run_as_arm_cpu(session: nox.Session, build: Path, cpu: str, report: Path) -> None:
    """Run the C++ tests as that CPU; fail where other kernels ran than are to run there."""
    core, checkpoint, adapters, losses, images, lora = (
        str(build / "tests" / "cpp" / f"loraaccel_{area}_tests")
        for area in ("core", "checkpoint", "adapters", "losses", "images", "lora")
    )
    # In the child of a fork qemu 7.2 ends with an assertion of its own as soon as a thread starts.
    run_under_qemu(session, cpu, core, "--gtest_filter=-*Fork*")
    run_under_qemu(session, cpu, checkpoint)
    run_under_qemu(session, cpu, adapters)
    run_under_qemu(session, cpu, images)
    # neon_bf16 is never left out: that it cannot run, the tests have to find out.
    left_out = sorted(ARM_CPUS["max"] - ARM_CPUS[cpu] - {"neon_bf16"})
    only = "*" if not left_out else "-" + ":".join(f"*/{kernel}" for kernel in left_out)
    run_under_qemu(session, cpu, losses, f"--gtest_filter={only}")
    run_under_qemu(session, cpu, lora, f"--gtest_filter={only}", f"--gtest_output=json:{report}")
    suites = json.loads(report.read_text())["testsuites"]
    cases = [case for suite in suites if suite["name"].startswith("Kernel/") for case in suite["testsuite"]]
    ran = {case["name"].rpartition("/")[2] for case in cases if case["result"] == "COMPLETED"}
    if ran != ARM_CPUS[cpu]:
        session.error(f"as {cpu} the kernels {sorted(ran)} ran, expected {sorted(ARM_CPUS[cpu])}")
    session.log(f"as {cpu}: {', '.join(sorted(ran))}")


def run_under_qemu(session: nox.Session, cpu: str, program: str, *options: str) -> None:
    """Silent, as two of them print at a time: nox shows the output of one that fails."""
    qemu = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu]
    session.run(*qemu, program, "--gtest_brief=1", *options, external=True, silent=True)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random safetensors files, for a minute, under sanitizers. Arguments go to libFuzzer: -max_total_time=1800."""
    if shutil.which("clang++") is None:
        session.skip("NOTHING WAS FUZZED: that needs clang and its runtime (Debian: clang, libclang-rt-dev)")
    session.install("cmake>=3.26", "ninja", "nlohmann-json")
    build = ROOT / "build" / f"nox-{session.name}"
    compiler = "-DCMAKE_CXX_COMPILER=clang++"
    session.run("cmake", "--fresh", "-GNinja", f"-S{ROOT / 'tests' / 'fuzz'}", f"-B{build}", compiler)
    session.run("cmake", "--build", str(build))
    for program, words, corpus in (
        ("safetensors_fuzz", "safetensors", "safetensors"),
        ("adapter_names_fuzz", "adapter_names", "adapter_keys"),
    ):
        found = Path(session.create_tmp()) / program  # new inputs go here; the corpus is only read
        found.mkdir(exist_ok=True)
        options = [
            "-max_total_time=60",
            "-max_len=4096",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
        ]
        options += [f"-dict={ROOT / 'tests' / 'fuzz' / f'{words}.dict'}", f"-artifact_prefix={found.parent}/"]
        inputs = str(ROOT / "tests" / "golden" / corpus)
        session.run(
            str(build / program), *options, *session.posargs, str(found), inputs, external=True, silent=True
        )


@nox.session
def demo(session: nox.Session) -> None:
    """`loraaccel demo` from a wheel of this checkout. Arguments go to the command."""
    install_package(session, "demo")
    session.run("loraaccel", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """`loraaccel bench` from a wheel of this checkout. Arguments go to the command."""
    install_package(session, "bench")
    session.run("loraaccel", "bench", *session.posargs)


# What kohya's sd-scripts imports, in the versions that its own list of requirements names.
SDSCRIPTS = (
    "accelerate==1.6.0", "transformers==4.54.1", "diffusers==0.32.1", "safetensors==0.4.5", "huggingface-hub==0.34.3",
    "numpy<2", "opencv-python-headless==4.10.0.84", "einops==0.7.0", "toml==0.10.2", "voluptuous==0.15.2", "ftfy",
    "imagesize", "rich", "tensorboard",
)  # fmt: skip
LYCORIS = ("3.2.0.post2", "4.1.3")  # lora-scripts' pin, and the one with kernels of its own


@nox.session
def hosts(session: nox.Session) -> None:
    """Tests with the real code of training tools: nox -s hosts -- --sd-scripts CHECKOUT [--quick] [pytest's options].

    Modules and trainings of sd-scripts, networks of LyCORIS: an hour, and 8 GB of memory. --quick leaves out the model
    of full width and most variants: ten minutes.
    """
    parser = argparse.ArgumentParser(prog="nox -s hosts --")
    parser.add_argument("--sd-scripts", type=Path, default=os.environ.get("LORAACCEL_SDSCRIPTS_DIR"))
    parser.add_argument("--quick", action="store_true")
    arguments, options = parser.parse_known_args(session.posargs)
    checkout = arguments.sd_scripts
    if not checkout or not (Path(session.invoked_from) / checkout / "networks").is_dir():
        session.error("expected --sd-scripts and a checkout of kohya-ss/sd-scripts")
    install_build_tools(session, *PYPROJECT["project"]["dependencies"], *SDSCRIPTS, "pytest>=8")
    session.install("--no-build-isolation", "--no-deps", ".")
    folders = [ROOT / "build" / "nox-hosts" / f"lycoris-{version}" for version in LYCORIS]
    for version, folder in zip(LYCORIS, folders, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        session.install("--no-deps", "--target", str(folder), f"lycoris-lora=={version}")
    environment = {
        "LORAACCEL_SDSCRIPTS_DIR": str((Path(session.invoked_from) / checkout).resolve()),
        "LORAACCEL_LYCORIS_DIRS": os.pathsep.join(map(str, folders)),
    }
    options = [*(["-m", "not slow"] if arguments.quick else []), *options]
    session.chdir(session.create_tmp())
    config = [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-rs"]
    tests = [str(path) for path in sorted((ROOT / "tests" / "outside").glob("test_*.py"))]
    session.run("pytest", *config, "--durations=20", *options, *tests, env=environment)

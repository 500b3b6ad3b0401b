"""Everything that is checked, built and measured, one session each: `nox --list` names them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).resolve().parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
TORCH = os.environ.get("LORAACCEL_TORCH", "torch==2.13.0")
JOBS = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
LAYERS = ("core", "torch", "python")  # folders of src/cpp whose sources clang-tidy checks


def install_build_tools(session: nox.Session, *requirements: str) -> None:
    """Install torch, what a build needs and `requirements` in one go, so that one resolver sees them all."""
    session.install(TORCH, *PYPROJECT["build-system"]["requires"], "cmake>=3.26", "ninja", *requirements)
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


@nox.session
def tests(session: nox.Session) -> None:
    """C++ tests, then the Python tests against the installed wheel. Arguments go to pytest."""
    install_package(session, "tests")
    run_cpp_tests(session)
    args = [absolute(session, arg) for arg in session.posargs]
    if not any(arg.startswith(os.sep) for arg in args):
        args += [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "consumer")]
    session.chdir(session.create_tmp())  # nothing of the source tree is importable by accident
    session.run("pytest", f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-rs", *args)


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
def demo(session: nox.Session) -> None:
    """`loraaccel demo` from a wheel of this checkout. Arguments go to the command."""
    install_package(session, "demo")
    session.run("loraaccel", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """`loraaccel bench` from a wheel of this checkout. Arguments go to the command."""
    install_package(session, "bench")
    session.run("loraaccel", "bench", *session.posargs)

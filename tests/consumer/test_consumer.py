"""Programs outside this repository, built against the installed package as the README says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import ROOT, Run, need_tool

EXAMPLES = ROOT / "examples"
CORE = EXAMPLES / "cpp_core" / "main.cpp"
FAILING = Path(__file__).parent / "failing_call.cpp"
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(run: Run, tmp_path: Path) -> None:
    run(need_tool("cmake"), "--build", tmp_path / "build")


def needed_libraries(run: Run, program: Path) -> str:
    """The libraries that the program loads, without their addresses and folders."""
    return " ".join(re.findall(r"^\s*(?:\S*/)?(\S+)", run(need_tool("ldd"), program), re.MULTILINE))


def test_core_through_cmake(
    installed: dict[str, str], cmake: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    cmake(EXAMPLES / "cpp_core", installed["cmake_prefix_path"])
    build(run, tmp_path)
    program = tmp_path / "build" / "cpp_core"
    assert "y[0][0] = 64" in run(program)
    libraries = needed_libraries(run, program)
    assert "libc.so" in libraries
    assert not re.search("torch|c10|python|loraaccel", libraries), libraries


def test_forced_kernel_reaches_the_program(
    installed: dict[str, str], cmake: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    cmake(EXAMPLES / "cpp_core", installed["cmake_prefix_path"])
    build(run, tmp_path)
    program = tmp_path / "build" / "cpp_core"
    for kernel in ("portable", "ref"):
        assert f"computed by {kernel}" in run(program, LORAACCEL_FORCE_KERNEL=kernel)
    assert "names no kernel" in run(program, fails=True, LORAACCEL_FORCE_KERNEL="none")


@pytest.mark.slow
def test_autograd_through_cmake(
    installed: dict[str, str], cmake: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    cmake(EXAMPLES / "cpp_autograd", installed["cmake_prefix_path"], torch.utils.cmake_prefix_path)
    build(run, tmp_path)
    program = tmp_path / "build" / "cpp_autograd"
    assert re.match(r"loss \d", run(program))
    libraries = needed_libraries(run, program)
    assert "libloraaccel.so" in libraries
    assert "libtorch_cpu.so" in libraries
    assert "python" not in libraries


def test_core_through_pkg_config(compiler: str, installed: dict[str, str], run: Run, tmp_path: Path) -> None:
    path = {"PKG_CONFIG_PATH": installed["pkg_config_path"]}
    pkg_config = need_tool("pkg-config")
    assert run(pkg_config, "--modversion", "loraaccel", **path).strip() == installed["version"]
    flags = run(pkg_config, "--cflags", "--libs", "loraaccel", **path).split()
    run(compiler, "-std=c++20", *WARNINGS, CORE, "-o", "program", *flags)
    assert "y[0][0] = 64" in run(tmp_path / "program")


def test_static_library_alone(compiler: str, installed: dict[str, str], run: Run, tmp_path: Path) -> None:
    """Nothing but the system's libraries: what files and lines of a native stack need may be absent."""
    flags = [f"-I{installed['include_dir']}", f"-L{installed['lib_dir']}"]
    libraries = ["-lloraaccel_core", "-lpthread", "-ldl"]
    run(compiler, "-std=c++20", *WARNINGS, *flags, FAILING, "-o", "program", *libraries)
    message = "lora_linear: x has shape"
    assert run(tmp_path / "program").startswith(message)
    with_stack = run(tmp_path / "program", LORAACCEL_TRACEBACK="1")
    assert with_stack.startswith(message)
    assert re.search(r"^#0 .*\(program\+0x[0-9a-f]+\)$", with_stack, re.MULTILINE), with_stack


def test_version_that_is_not_there(
    installed: dict[str, str], cmake: Callable[..., str], project: Callable[[str], Path]
) -> None:
    output = cmake(project("find_package(loraaccel 99 REQUIRED)"), installed["cmake_prefix_path"], fails=True)
    assert "version: " + installed["version"] in output


def test_component_that_is_not_there(
    installed: dict[str, str], cmake: Callable[..., str], project: Callable[[str], Path]
) -> None:
    source = project("find_package(loraaccel REQUIRED COMPONENTS core quantum)")
    assert "quantum" in cmake(source, installed["cmake_prefix_path"], fails=True)


def test_autograd_without_torch(
    installed: dict[str, str], cmake: Callable[..., str], project: Callable[[str], Path]
) -> None:
    lines = "set(CMAKE_DISABLE_FIND_PACKAGE_Torch ON)\nfind_package(loraaccel REQUIRED COMPONENTS autograd)"
    assert "Torch" in cmake(project(lines), installed["cmake_prefix_path"], fails=True)


def test_package_files_name_no_folder_of_the_build(installed: dict[str, str]) -> None:
    """A wheel is unpacked anywhere: its CMake and pkg-config files have to be relative to themselves."""
    lib = Path(installed["lib_dir"])
    files = [*lib.glob("cmake/**/*.cmake"), *lib.glob("pkgconfig/*.pc")]
    assert len(files) >= 4
    for file in files:
        text = file.read_text()
        for folder in (str(ROOT), sys.prefix, "/tmp", "/home"):
            assert folder not in text, f"{file} names {folder}"

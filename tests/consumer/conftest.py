"""What the tests need to build a program against the installed package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Run, need_tool


# Any C++20 compiler may build a program over the core; g++ is in .ci/packages, clang++ is tried where it is installed.
@pytest.fixture(params=["g++", *(["clang++"] if shutil.which("clang++") else [])])
def compiler(request: pytest.FixtureRequest) -> str:
    return need_tool(request.param)


@pytest.fixture(scope="session")
def installed() -> dict[str, str]:
    """What `loraaccel config` prints."""
    command = [sys.executable, "-m", "loraaccel", "config", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command; its output is the result, and the message of the failure."""

    def run(*command: object, fails: bool = False, **env: str) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, f"{' '.join(words)}\n{done.stdout}"
        return done.stdout

    return run


@pytest.fixture
def cmake(tmp_path: Path, run: Run) -> Callable[..., str]:
    """Configures a project in `tmp_path / "build"`; the output is the result."""

    def cmake(source: Path, *prefixes: str, fails: bool = False) -> str:
        ninja = need_tool("ninja")
        options = [
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}",
        ]
        build = tmp_path / "build"
        return run(need_tool("cmake"), "-S", source, "-B", build, *options, fails=fails)

    return cmake


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """A CMake project of these lines, without languages."""

    def project(lines: str) -> Path:
        source = tmp_path / "project"
        source.mkdir()
        head = "cmake_minimum_required(VERSION 3.26)\nproject(consumer LANGUAGES CXX)\n"
        (source / "CMakeLists.txt").write_text(head + lines)
        return source

    return project

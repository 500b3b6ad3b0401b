"""The package runs on CPUs without AVX: such instructions stand only in the units that are called after a check.

Looked for in the static library, whose members keep the names of their sources.
"""

from __future__ import annotations

import platform
import re
from collections import defaultdict
from pathlib import Path

import pytest
from programs import Run, need_tool

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="instruction sets of x86-64"
)


def level(member: str) -> int:
    """Which registers a member may use: 1 (xmm), 2 (ymm), 3 (zmm)."""
    if "_avx512" in member:
        return 3
    return 2 if "_avx2" in member else 1


@pytest.fixture
def members(installed: dict[str, str], run: Run) -> dict[str, list[str]]:
    """Instructions of each member of the library."""
    library = Path(installed["lib_dir"]) / "libloraaccel_core.a"
    found: dict[str, list[str]] = defaultdict(list)
    member = ""
    for line in run(need_tool("objdump"), "-d", "--no-show-raw-insn", library).splitlines():
        if header := re.match(r"(\S+):\s+file format", line):
            member = header[1]
        elif instruction := re.match(r"\s*[0-9a-f]+:\t(.*)", line):
            found[member].append(instruction[1])
    return found


def test_wide_registers_stay_in_their_units(members: dict[str, list[str]]) -> None:
    assert {level(name) for name in members} == {1, 2, 3}, "objdump saw no unit of some kind"
    for name, instructions in members.items():
        text = "\n".join(instructions)
        assert level(name) == 3 or "%zmm" not in text, f"zmm in {name}"
        assert level(name) >= 2 or "%ymm" not in text, f"ymm in {name}"
        # The upper half of the registers and the masks exist in AVX-512 only.
        assert level(name) == 3 or not re.search(r"%xmm(1[6-9]|2\d|3[01])\b|%k[0-7]\b", text), name


def test_baseline_units_hold_no_avx_at_all(members: dict[str, list[str]]) -> None:
    """Mnemonics of AVX, F16C and FMA begin with v; BMI and POPCNT are not part of every CPU either. (tzcnt is: gcc
    writes it for every CPU where the operand is not zero, as older ones read it as bsf, which gives the same.)"""
    forbidden = re.compile(r"v(?!err|erw|m)\w+|popcnt|lzcnt|andn|bextr|shlx|shrx|sarx|rorx|mulx|pdep|pext")
    for name, instructions in members.items():
        if level(name) == 1:
            bad = [i for i in instructions if forbidden.fullmatch(i.split()[0])]
            assert not bad, f"{bad[:3]} in {name}"


def test_wide_units_share_no_code(installed: dict[str, str], run: Run) -> None:
    """Of an inline function that several units hold the linker keeps one copy, perhaps the one for another CPU. So what
    a wide unit offers under a weak symbol has to carry the name of its instruction set."""
    library = Path(installed["lib_dir"]) / "libloraaccel_core.a"
    member = ""
    for line in run(need_tool("nm"), "-C", "--defined-only", library).splitlines():
        if line.endswith(".o:"):
            member = line[:-1]
        elif symbol := re.match(r"[0-9a-f]+ [WVu] (.*)", line):
            assert level(member) == 1 or re.search(r"::avx(2|512)", symbol[1]), f"{symbol[1]} in {member}"

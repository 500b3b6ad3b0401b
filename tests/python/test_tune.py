"""`loraaccel tune` and the file it keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import loraaccel.ops  # loads the operators
from loraaccel import _choice
from loraaccel.cli import main, tune

ALL_OURS = dict.fromkeys(_choice.DTYPES, None)


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORAACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LORAACCEL_FORCE_KERNEL", raising=False)


@pytest.mark.parametrize(
    ("ratios", "rows"),
    [
        ({32: 0.5, 128: 0.9, 512: 1.0}, None),
        ({32: 0.5, 128: 1.2, 512: 1.3}, 128),
        ({32: 1.2, 128: 1.2, 512: 1.2}, 32),
        ({32: 1.2, 128: 0.9, 512: 1.2}, 512),  # from there on, everywhere
        ({32: 1.2, 128: 1.2, 512: 1.04}, None),  # within the margin
    ],
)
def test_torch_must_win_everywhere_above(ratios: dict[int, float], rows: int | None) -> None:
    assert _choice.decide(ratios) == rows


def choice_of_new_process(code: str = "pass") -> tuple[dict[str, object], str]:
    script = f"import json, loraaccel, loraaccel.ops; {code}; print(json.dumps(loraaccel.info()['choice']))"
    run = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout), run.stderr


def entry(**rows: int | None) -> dict[str, object]:
    return {"measured": "2030-01-02", "rows": ALL_OURS | rows}


def test_what_was_kept_is_in_force_in_the_next_process() -> None:
    assert choice_of_new_process()[0]["source"] == "model"
    _choice.save(torch.__version__, entry(bfloat16=50))
    choice, warnings = choice_of_new_process()
    assert choice == {"source": "2030-01-02", "rows": ALL_OURS | {"bfloat16": 50}}
    assert warnings == ""


def test_it_decides_which_kernel_runs() -> None:
    _choice.save(torch.__version__, entry(float32=50))
    call = (
        "import torch; one = torch.ones; calls = []\n"
        "for rows in (49, 50):\n"
        "    loraaccel.lora_linear(one(rows, 4), one(3, 4), None, one(2, 4), one(3, 2))\n"
        "    calls.append(dict(loraaccel.info()['kernel_calls']))\n"
        "print(json.dumps(calls))"
    )
    script = f"import json, loraaccel, loraaccel.ops\n{call}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = json.loads(run.stdout)
    assert "torch" not in first
    assert second == first | {"torch": 1}


def test_another_machine_is_not_this_one() -> None:
    _choice.save("1.2.3", entry(float32=1))
    assert choice_of_new_process()[0]["source"] == "model"


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"%s": {"measured": "x", "rows": {"float32": -1, "bfloat16": null, "float16": null}}}',
        '{"%s": 5}',
    ],
)
def test_a_broken_file_is_named_and_changes_nothing(text: str) -> None:
    _choice.path().write_text(text.replace("%s", _choice.machine(torch.__version__)))
    choice, warnings = choice_of_new_process()
    assert choice["source"] == "model"
    assert str(_choice.path()) in warnings
    assert "loraaccel tune" in warnings


def test_the_command_measures_keeps_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ROWS", (20, 40))
    monkeypatch.setattr(tune, "WIDTH", 64)
    before = loraaccel.info()["choice"]["rows"]
    try:
        result = CliRunner().invoke(main, ["tune", "--json"])
        assert result.exit_code == 0, result.output
        report = json.loads(result.output)
        assert Path(report["file"]) == _choice.path()
        for name, ratios in report["ratios"].items():
            assert set(ratios) == {"20", "40"}
            assert all(ratio > 0 for ratio in ratios.values())
            assert report["rows"][name] == _choice.decide({int(m): ratio for m, ratio in ratios.items()})
        kept = json.loads(_choice.path().read_text())[_choice.machine(torch.__version__)]
        assert kept["rows"] == report["rows"] == loraaccel.info()["choice"]["rows"]
    finally:
        from loraaccel import _runtime

        library = _runtime.operators()
        assert library is not None
        _choice.force(library, before)
    assert CliRunner().invoke(main, ["tune", "--reset"]).exit_code == 0
    assert not _choice.path().exists()
    assert CliRunner().invoke(main, ["tune", "--reset"]).exit_code == 0


@pytest.mark.parametrize("name", ["LORAACCEL_FORCE_KERNEL", "LORAACCEL"])
def test_nothing_is_measured_where_nothing_would_be_compared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    result = CliRunner().invoke(main, ["tune"])
    assert result.exit_code == 2
    assert f"{name} is set" in result.output
    assert not _choice.path().exists()


def test_a_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LORAACCEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = CliRunner().invoke(main, ["tune"])
    assert result.exit_code == 1
    assert str(tmp_path / "file" / "cache") in result.output

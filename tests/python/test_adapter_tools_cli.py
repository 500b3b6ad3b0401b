"""The commands resize, combine, extract and diff."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from small_adapters import CONV, PATHS, TO_K, TO_Q, best, deltas, off, pair, update, write

from loraaccel import adapters
from loraaccel.cli import main
from loraaccel.safetensors.numpy import load_file, save_file


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    return (
        write(tmp_path / "a.safetensors", pair(rng, TO_Q, 8, 4), pair(rng, CONV, 8, 4)),
        write(tmp_path / "b.safetensors", pair(rng, TO_Q, 6), pair(rng, TO_K, 6)),
    )


@pytest.mark.parametrize("sd_scripts", [False, True])
def test_resize(tmp_path: Path, files: tuple[Path, Path], sd_scripts: bool) -> None:
    target = tmp_path / "c.safetensors"
    if sd_scripts:
        words = ["--model", files[0], "--save_to", target, "--new_rank", 4, "--new_conv_rank", 2]
        words += ["--save_precision", "fp16", "--device", "cpu", "--verbose"]
    else:
        words = [files[0], target, "--new-rank", 4, "--new-conv-rank", 2, "--dtype", "F16", "--verbose"]
    result = call("resize", *words, "--base", "sdxl")
    assert result.exit_code == 0, result.output
    assert f"unet.{PATHS[TO_Q]}: rank 8 -> 4, alpha 2" in result.output
    written = load_file(target)
    assert written[f"{TO_Q}.lora_up.weight"].dtype == np.float16
    assert off(update(written, TO_Q), best(update(load_file(files[0]), TO_Q), 4)) < 1e-3
    assert written[f"{CONV}.lora_down.weight"].shape == (2, 32, 3, 3)


def test_resize_as_json(tmp_path: Path, files: tuple[Path, Path]) -> None:
    words = (
        "--new_rank",
        6,
        "--dynamic_method",
        "sv_fro",
        "--dynamic_param",
        0.8,
        "--base",
        "sdxl",
        "--json",
    )
    result = call("resize", files[0], tmp_path / "c.safetensors", *words)
    report = json.loads(result.stdout)
    assert report["paths"] == [str(tmp_path / "c.safetensors")]
    assert {layer["path"] for layer in report["layers"]} == {PATHS[TO_Q], PATHS[CONV]}
    assert all(layer["fro_retained"] >= 0.8 for layer in report["layers"])


def test_combine(tmp_path: Path, files: tuple[Path, Path]) -> None:
    target = tmp_path / "c.safetensors"
    result = call(
        "combine", target, "-a", f"{files[0]}=0.7", "-a", f"{files[1]}=0.3", "--base", "sdxl", "--verbose"
    )
    assert result.exit_code == 0, result.output
    assert f"unet.{PATHS[TO_Q]}: lora, rank 14, of 1, 2" in result.output
    a, b = (load_file(path) for path in files)
    assert off(update(load_file(target), TO_Q), 0.7 * update(a, TO_Q) + 0.3 * update(b, TO_Q)) < 1e-6
    result = call(
        "combine", target, "-a", files[0], "-a", files[1], "--new-rank", 3, "--base", "sdxl", "--json"
    )
    report = json.loads(result.stdout)
    assert {layer["rank"] for layer in report["layers"]} == {3}
    assert 0 < report["largest_error"] < 1


def test_extract_and_diff(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    before = {"x.weight": rng.standard_normal((32, 24)).astype(np.float32)}
    change = (rng.standard_normal((32, 3)) @ rng.standard_normal((3, 24))).astype(np.float32)
    save_file(before, tmp_path / "a.safetensors")
    save_file({"x.weight": before["x.weight"] + change}, tmp_path / "b.safetensors")
    result = call(
        "extract", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "out", "--dim", 3
    )
    assert result.exit_code == 0, result.output
    (delta,) = deltas(adapters.load(tmp_path / "out")).values()
    assert off(delta, change) < 1e-5
    names = ("--model_org", tmp_path / "a.safetensors", "--model_tuned", tmp_path / "b.safetensors")
    result = call("extract", *names, "--save_to", tmp_path / "two", "--dim", 2, "--conv_dim", 2, "--json")
    report = json.loads(result.stdout)
    assert report["layers"][0]["rank"] == 2
    assert report["error"] == pytest.approx(off(best(change, 2), change), rel=1e-4)
    result = call("diff", tmp_path / "out", tmp_path / "two", "--json")
    report = json.loads(result.stdout)
    assert report["relative"] == pytest.approx(off(best(change, 2), change), rel=1e-4)
    result = call("diff", tmp_path / "out", tmp_path / "out")
    assert result.exit_code == 0
    assert "model.x: norms" in result.output


def test_bad_usage_is_exit_code_two(tmp_path: Path, files: tuple[Path, Path]) -> None:
    target = tmp_path / "c.safetensors"
    for words in (
        ("resize", files[0]),
        ("resize", files[0], target, "--model", files[1]),
        ("resize", files[0], target, "--new-rank", 0),
        ("resize", files[0], target, "--dynamic-method", "sv_fro"),
        ("resize", files[0], target, "--to", "nothing"),
        ("resize", files[0], target, "--dtype", "F16", "--save-precision", "fp16"),
        ("combine", target),
        ("combine", target, "-a", files[0], "--dynamic-method", "sv_fro", "--dynamic-param", 1),
        ("combine", target, "-a", files[0], "--new-conv-rank", 1),
        ("extract", files[0], files[1]),
        ("diff", files[0]),
    ):
        result = call(*words)
        assert result.exit_code == 2, (words, result.output)
        assert "Error" in result.output
    assert not target.exists()


def test_failures_are_one_sentence_and_exit_code_one(tmp_path: Path, files: tuple[Path, Path]) -> None:
    target = tmp_path / "c.safetensors"
    short = tmp_path / "short.safetensors"
    short.write_bytes(files[0].read_bytes()[:-8])
    for words in (
        ("resize", short, target, "--base", "sdxl"),
        ("resize", files[0], target, "--dynamic-method", "sv_fro", "--dynamic-param", 2, "--base", "sdxl"),
        ("combine", target, "-a", f"{files[0]}=0", "--base", "sdxl"),
        ("combine", target, "-a", tmp_path / "none.safetensors"),
        ("extract", files[0], files[0], target),
        ("extract", files[0], tmp_path, target),
        ("diff", short, files[0], "--base", "sdxl"),
    ):
        result = call(*words)
        assert result.exit_code == 1, (words, result.output)
        assert result.output.startswith("Error: ")
        assert len(result.output.strip().splitlines()) == 1
    assert not target.exists()


def test_help_has_an_example() -> None:
    for name in ("resize", "combine", "extract", "diff"):
        assert f"Example:  loraaccel {name}" in " ".join(call(name, "--help").output.split("\n"))


def test_without_numpy_one_sentence_says_so(tmp_path: Path, files: tuple[Path, Path]) -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import loraaccel.adapters as a\n"
        "try: a.resize\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == (
        "loraaccel.adapters.resize needs numpy, which is not installed: pip install 'loraaccel[tools]'\n"
    )


def test_a_path_that_is_there_is_a_path(tmp_path: Path, files: tuple[Path, Path]) -> None:
    named = tmp_path / "n=0.5"
    named.write_bytes(files[0].read_bytes())
    expected = deltas(files[0])
    for word, weight in ((named, 1.0), (f"{named}=0.25", 0.25), (files[0], 1.0), (f"{files[0]}=-2", -2.0)):
        result = call("combine", tmp_path / "c.safetensors", "-a", word, "--base", "sdxl")
        assert result.exit_code == 0, result.output
        for path, delta in deltas(tmp_path / "c.safetensors").items():
            assert off(delta, expected[path] * weight) < 1e-6

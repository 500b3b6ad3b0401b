"""`loraaccel demo` on the real encoder and the real lexicon; needs loraaccel built, and its demo extra."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loraaccel.cli.demo import demo
from loraaccel.demo import settings

MISSING = [package for package in settings.REQUIRED if importlib.util.find_spec(package) is None]
if MISSING:
    pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

import loraaccel  # noqa: E402
from loraaccel.demo import check, data, model, train  # noqa: E402

LINEAR_LAYERS = 36  # six layers of query, key, value, attention output and two of the MLP
LEXICON = data.load_lexicon(data.lexicon_path())


def test_lexicon_has_the_rows_and_ratings_of_the_file() -> None:
    lines = data.lexicon_path().read_bytes().decode("utf-8").rstrip("\n").split("\n")
    assert len(LEXICON) == len(lines) == 7520
    inconsistent = []
    for row, line in zip(LEXICON, lines, strict=True):
        text, mean, _, ratings = line.split("\t")
        assert (row.text, row.rating) == (text, float(mean))
        if abs(row.rating - statistics.fmean(ast.literal_eval(ratings))) > 0.051:
            inconsistent.append(text)
    # Each line lists its ten ratings too. Their mean, to one decimal, is the rating but for one slip in the file.
    assert inconsistent == ["lmfao"]


def test_lexicon_knows_words_and_emoticons() -> None:
    ratings = {row.text: row.rating for row in LEXICON}
    assert ratings["love"] == 3.2
    assert ratings["catastrophe"] == -3.4
    assert ratings[":)"] == 2.0
    assert ratings["( '}{' )"] == 1.6  # with spaces inside


def test_a_line_without_a_rating_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "lexicon.txt"
    broken.write_text("good\t1.9\nbad\n", encoding="utf-8")
    with pytest.raises(settings.DemoError, match="line 2"):
        data.load_lexicon(broken)


def test_split_holds_out_a_fifth_and_shares_no_text() -> None:
    training, heldout = data.split(LEXICON, 0.2, seed=0)
    assert sorted(training + heldout, key=repr) == sorted(LEXICON, key=repr)
    assert len(heldout) == pytest.approx(0.2 * len(LEXICON), abs=2)
    assert not {row.text.casefold() for row in training} & {row.text.casefold() for row in heldout}
    # The encoder sees tokens: no input of training comes again in the held-out part.
    tokenizer = model.load_tokenizer()
    seen, unseen = (
        {tuple(ids) for ids in tokenizer([row.text for row in rows])["input_ids"]}
        for rows in (training, heldout)
    )
    assert not seen & unseen


def test_split_follows_its_seed() -> None:
    assert data.split(LEXICON, 0.2, seed=3) == data.split(LEXICON, 0.2, seed=3)
    assert data.split(LEXICON, 0.2, seed=3) != data.split(LEXICON, 0.2, seed=4)


def test_an_epoch_of_batches_has_every_row_once() -> None:
    rows = LEXICON[:40]
    encoded = data.encode(model.load_tokenizer(), rows)
    batches = list(data.train_batches(encoded, batch_size=8, num_steps=5, seed=0))
    ratings = torch.cat([batch.ratings for batch in batches])
    assert sorted(ratings.tolist()) == sorted(encoded.ratings.tolist())
    for batch in batches:
        assert batch.attention_mask.sum(1).max() == batch.input_ids.shape[1]


def test_heldout_batches_have_every_row_once() -> None:
    encoded = data.encode(model.load_tokenizer(), LEXICON[:300])
    ratings = torch.cat([batch.ratings for batch in data.heldout_batches(encoded)])
    assert sorted(ratings.tolist()) == sorted(encoded.ratings.tolist())


@pytest.mark.parametrize(
    ("num_steps", "num_evals", "expected"), [(1, 6, [1]), (5, 2, [2, 5]), (300, 3, [100, 200, 300])]
)
def test_last_evaluation_comes_after_the_last_step(
    num_steps: int, num_evals: int, expected: list[int]
) -> None:
    assert train.eval_steps(num_steps, num_evals) == expected


def test_nan_passes_no_check() -> None:
    assert not check.Check("x", check.max_difference([1.0, math.nan], [1.0, 2.0]), "<=", 1.0, "points").ok


def test_a_flipped_bit_is_a_different_tensor() -> None:
    state = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
    assert check.num_different(state, {name: tensor.clone() for name, tensor in state.items()}) == 0
    assert check.num_different(state, {**state, "a": torch.tensor([-0.0, 1.0])}) == 1
    assert check.num_different(state, {"a": state["a"]}) == 1
    assert check.num_different(state, {**state, "b": state["b"].double()}) == 1


@pytest.fixture
def short_lexicon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every twentieth row: what is tested end to end below does not need them all."""
    monkeypatch.setattr(data, "load_lexicon", lambda path: LEXICON[::20])


def run(out: Path, *options: str) -> Result:
    """The command as a user calls it, for six steps of eight texts."""
    return CliRunner().invoke(demo, ["--steps", "6", "--batch-size", "8", "--out", str(out), *options])


def failed(document: dict[str, Any]) -> set[str]:
    """Names of the checks that do not hold."""
    return {entry["name"] for entry in document["checks"] if not entry["ok"]}


@pytest.mark.slow
@pytest.mark.usefixtures("short_lexicon")
def test_run_passes_its_checks_and_leaves_a_peft_adapter(tmp_path: Path) -> None:
    result = run(tmp_path, "--json")
    document = json.loads(result.stdout)  # stdout holds JSON and nothing else
    assert result.exit_code == 0, result.stderr
    assert document["ok"]
    assert not failed(document)
    assert document == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")

    plain, patched = document["plain"], document["patched"]
    for curve in (plain, patched):
        assert len(curve["train_losses"]) == len(curve["step_seconds"]) == 6
        assert len(curve["heldout_losses"]) == len(document["eval_at"])
    assert check.max_difference(plain["train_losses"], patched["train_losses"]) <= check.CURVE_BOUND
    assert patched["heldout_losses"][-1] < patched["heldout_losses"][0]
    assert [layer["fused"] for layer in document["layers"]] == [True] * LINEAR_LAYERS
    assert sum(document["calls"]["fused"].values()) >= 6 * LINEAR_LAYERS

    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"]) == ("LORA", 8)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    expected = model.adapter_state(model.build_peft(8, seed=0))
    assert tensors.keys() == expected.keys()
    assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in expected.items()}
    trained = [name for name in tensors if "lora_B" in name and tensors[name].any()]
    assert len(trained) == LINEAR_LAYERS


@pytest.mark.slow
@pytest.mark.usefixtures("short_lexicon")
def test_a_patch_that_computes_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = loraaccel.patch

    def wrong(target: nn.Module) -> loraaccel.PatchReport:
        target.register_forward_hook(lambda module, inputs, ratings: ratings * 1.01)
        return right(target)

    monkeypatch.setattr(loraaccel, "patch", wrong)
    result = run(tmp_path, "--json")
    assert result.exit_code == 1
    curves = {"train curves, largest difference", "held-out curves, largest difference"}
    assert failed(json.loads(result.stdout)) == curves | {"ratings after reload, difference"}
    assert "failed: train curves" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("short_lexicon")
def test_a_patch_that_does_not_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = loraaccel.patch

    def idle(target: nn.Module) -> loraaccel.PatchReport:
        report = right(target)
        loraaccel.unpatch(target)
        return report

    monkeypatch.setattr(loraaccel, "patch", idle)
    result = run(tmp_path, "--steps", "1")
    assert result.exit_code == 1
    assert "FAILED fused calls, patched copy: 0" in result.stdout


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.REQUIRED, "no_such_module", "no-such-package")
    result = run(tmp_path, "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no-such-package" in result.stderr
    assert 'pip install "loraaccel[demo]"' in result.stderr


@pytest.mark.parametrize(
    "options", [["--steps", "0"], ["--rank", "x"], ["--out", __file__], ["--no-such-option"]]
)
def test_bad_usage_exits_with_two(options: list[str]) -> None:
    assert CliRunner().invoke(demo, options).exit_code == 2


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(demo, ["--help"])
    assert result.exit_code == 0
    assert "Example: loraaccel demo --quick" in result.stdout

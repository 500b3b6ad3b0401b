"""loraaccel info, convert, merge, unmerge: what they print, their exit codes, and what they leave behind."""

from __future__ import annotations

import json

import adapter_files
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from loraaccel.cli import main

SITE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


@pytest.fixture
def files(tmp_path):
    g = adapter_files.seeded()
    tensors = {
        f"{SITE}.lora_down.weight": adapter_files.numbers(g, 4, 320).half(),
        f"{SITE}.lora_up.weight": adapter_files.numbers(g, 320, 4).half(),
        f"{SITE}.alpha": torch.tensor(2.0).half(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"ss_network_dim": "4"})
    weight = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    safetensors.torch.save_file({weight: torch.zeros(320, 320).half()}, tmp_path / "base.safetensors")
    return tmp_path


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_info_says_what_the_file_is(files):
    said = json.loads(call("info", files / "a.safetensors", "--json"))
    delta = safetensors.torch.load_file(files / "a.safetensors")
    norm = (
        0.5
        * (delta[f"{SITE}.lora_up.weight"].double() @ delta[f"{SITE}.lora_down.weight"].double())
        .norm()
        .item()
    )
    assert (said["base"], said["format"], said["kinds"], said["ranks"]) == (
        "sd15",
        "kohya",
        {"lora": 1},
        {"4": 1},
    )
    assert said["scales"] == {"0.5": 1}
    assert said["norms"]["all"] == pytest.approx(norm, rel=1e-6)
    assert said["metadata"] == {"ss_network_dim": "4"}
    assert said["problems"] == []
    assert sorted(said["hashes"]) == ["sshs_legacy_hash", "sshs_model_hash"]
    text = call("info", files / "a.safetensors", "--layers")
    assert "kohya format, base model sd15" in text
    assert "0.5 = 2 / 4, the file's alpha / rank" in text


def test_info_of_what_is_no_adapter(files):
    """A model, the bytes that a merge keeps, nothing, something else; a file of an adapter that is broken stays one."""
    said = json.loads(call("info", files / "base.safetensors", "--json"))
    assert (said["what"], said["base"], said["tensors"], said["numbers"]) == ("base model", "sd15", 1, 102400)
    assert said["dtypes"] == {"F16": 102400}
    assert "no adapter, but base model (sd15)" in call("info", files / "base.safetensors")
    call(
        "merge", files / "base.safetensors", files / "m", "-a", files / "a.safetensors", "--keep", files / "k"
    )
    assert json.loads(call("info", files / "k", "--json"))["what"] == "bytes kept by a merge"
    assert json.loads(call("info", files / "m", "--json"))["what"] == "base model"
    safetensors.torch.save_file({"emb_params": torch.zeros(3, 5)}, files / "emb.safetensors", {"who": "me"})
    said = json.loads(call("info", files / "emb.safetensors", "--json"))
    assert (said["what"], said["metadata"]) == ("tensors of no known model", {"who": "me"})
    assert "who: me" in call("info", files / "emb.safetensors")
    (files / "empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert json.loads(call("info", files / "empty.safetensors", "--json"))["what"] == "no tensors"
    safetensors.torch.save_file({"x.lora_what.weight": torch.zeros(3, 5)}, files / "odd.safetensors")
    assert "none of its 1 tensors" in call("info", files / "odd.safetensors", code=1)
    (files / "text").write_text("root:x:0:0:root:/root:/bin/bash\n" * 4)
    assert "no safetensors file" in call("info", files / "text", code=1)


def test_info_lists_keys_that_match_nothing(files):
    tensors = safetensors.torch.load_file(files / "a.safetensors")
    safetensors.torch.save_file(
        {**tensors, "lora_unet_typo.alpha": torch.tensor(1.0)}, files / "b.safetensors"
    )
    said = json.loads(call("info", files / "b.safetensors", "--json"))
    assert said["problems"] == ["1 tensors match no layer: lora_unet_typo.alpha"]


def test_convert_there_and_back(files):
    said = json.loads(
        call("convert", files / "a.safetensors", files / "d.safetensors", "--to", "diffusers", "--json")
    )
    assert (said["base"], said["from"], said["to"], said["unused"]) == ("sd15", "kohya", "diffusers", [])
    call("convert", files / "d.safetensors", files / "k.safetensors", "--to", "kohya")
    first, back = (safetensors.torch.load_file(files / f"{n}.safetensors") for n in "ak")
    adapter_files.assert_same_tensors(first, back)


def test_merge_and_unmerge(files):
    base, merged = files / "base.safetensors", files / "m.safetensors"
    said = call(
        "merge", base, merged, "-a", f"{files / 'a.safetensors'}=0.5", "--keep", files / "kept.safetensors"
    )
    assert said.startswith("1 of 1 tensors changed")
    tensors = safetensors.torch.load_file(files / "a.safetensors")
    expected = 0.25 * tensors[f"{SITE}.lora_up.weight"].float() @ tensors[f"{SITE}.lora_down.weight"].float()
    (weight,) = safetensors.torch.load_file(merged).values()
    assert torch.equal(weight, expected.half())
    call("unmerge", merged, files / "kept.safetensors", files / "u.safetensors")
    assert (files / "u.safetensors").read_bytes() == base.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["convert", "a.safetensors", "x.safetensors", "--to", "nothing"], 2, "expected one of kohya, peft"),
        (["convert", "none.safetensors", "x.safetensors", "--to", "kohya"], 2, "does not exist"),
        (["convert", "base.safetensors", "x.safetensors", "--to", "kohya"], 1, "none of its 1 tensors"),
        (["convert", "a.safetensors", "x.safetensors", "--to", "kohya", "--rescue"], 1, "expected 'F16'"),
        (
            ["convert", "a.safetensors", "x.safetensors", "--to", "kohya", "--dtype", "fp16"],
            1,
            "no type fp16, expected F64, F32, F16",
        ),
        (
            [
                "convert",
                "a.safetensors",
                "x.safetensors",
                "--to",
                "kohya",
                "--base",
                "sd15",
                "--component",
                "foo",
            ],
            1,
            "sd15 has no component foo, expected one of unet, text_encoder",
        ),
        (["merge", "a.safetensors", "x.safetensors", "-a", "a.safetensors"], 1, "none of the layers"),
        (
            ["merge", "base.safetensors", "x.safetensors", "-a", "a.safetensors", "--dtype", "half"],
            1,
            "no type half, expected F64",
        ),
        (["unmerge", "base.safetensors", "a.safetensors", "x.safetensors"], 1, "was not kept by a merge"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(arguments, code, words, files, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(p.name for p in files.iterdir())
    said = call(*arguments, code=code)
    assert words in said
    assert "Traceback" not in said
    assert sorted(p.name for p in files.iterdir()) == before


@pytest.mark.parametrize("command", ["info", "convert", "merge", "unmerge"])
def test_help_has_an_example(command):
    assert f"Example:  loraaccel {command} " in call(command, "--help").replace("\n", " ")

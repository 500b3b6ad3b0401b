"""Models in several files, saves in the background, and loaders of other libraries on what we write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import save_torch_state_dict
from safetensors_files import data_of, header_of

from loraaccel import safetensors as ours
from loraaccel.safetensors._shards import parse_size


def state(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {
        f"layer.{i}.weight": torch.randn(size, generator=torch.Generator().manual_seed(i))
        for i, size in enumerate(sizes)
    }


@pytest.mark.parametrize("sizes", [[250] * 7, [100, 900, 100, 30, 400, 250, 1], [250], [900, 900]])
def test_shards_are_huggingface_hubs(tmp_path: Path, sizes: list[int]) -> None:
    tensors = state(sizes)
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(tensors, tmp_path / "theirs", max_shard_size="2KB", metadata={"who": "me"})
    written = ours.save_sharded(tensors, tmp_path / "ours", max_shard_size="2KB", metadata={"who": "me"})
    theirs = {file.name: file for file in (tmp_path / "theirs").iterdir()}
    assert sorted(written) == sorted(theirs)
    for name, file in theirs.items():
        mine = (tmp_path / "ours" / name).read_bytes()
        if name.endswith(".json"):
            assert json.loads(mine) == json.loads(file.read_bytes())
        else:
            assert header_of(mine) == header_of(file.read_bytes())
            assert data_of(mine) == data_of(file.read_bytes())
    for folder in ("ours", "theirs"):
        found = ours.load_sharded(tmp_path / folder)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], value) for key, value in tensors.items())


def test_files_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    ours.save_sharded(state([250] * 7), tmp_path, max_shard_size="2KB")
    (tmp_path / "model_other.safetensors").write_bytes(b"mine")
    (tmp_path / "adapter.safetensors").write_bytes(b"mine")
    ours.save_sharded(state([10]), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter.safetensors", "model.safetensors", "model_other.safetensors",
    ]  # fmt: skip
    assert list(ours.load_sharded(tmp_path)) == ["layer.0.weight"]


def test_sizes() -> None:
    assert parse_size(5) == 5
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size(" 1.5 kb ") == 1500
    for wrong in ("5", "5GiB", "", "-1MB", 0, "0B"):
        with pytest.raises(ValueError, match="size"):
            parse_size(wrong)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "index"),
        ("[]", "index"),
        ('{"weight_map": ["a"]}', "index"),
        ('{"weight_map": {"layer.0.weight": "../model.safetensors"}}', "name of a file"),
        ('{"weight_map": {"layer.9.weight": "one.safetensors"}}', "layer.9.weight"),
        ('{"weight_map": {"a": 1}}', "name of a file"),
        ('{"weight_map": {"a": "x", "b": null}}', "index"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, index: str, said: str) -> None:
    ours.save_file(state([3]), tmp_path / "one.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(ValueError, match=said) as error:
        ours.load_sharded(path)
    assert str(path) in str(error.value)


def test_in_the_background_what_the_tensors_were(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(500_000), "t": torch.randn(30, 40).T}
    expected = ours.save(tensors)
    save = ours.save_file_async(tensors, tmp_path / "x", hashes=True)
    tensors["w"].zero_()
    report = save.wait()
    assert save.done()
    assert (tmp_path / "x").read_bytes() == expected
    assert report == save.wait()
    assert len(report.model_hash) == 64


def test_errors_in_the_background_are_raised_by_wait_or_the_next_save(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(5)}
    save = ours.save_file_async(tensors, tmp_path / "none" / "x")
    with pytest.raises(FileNotFoundError) as error:
        save.wait()
    assert error.value.filename == str(tmp_path / "none" / "x")
    save = ours.save_file_async(tensors, tmp_path / "none" / "x")
    while not save.done():
        pass
    with pytest.raises(FileNotFoundError):
        ours.save_file_async(tensors, tmp_path / "y")
    ours.save_file_async(tensors, tmp_path / "y").wait()
    with pytest.raises(RuntimeError, match="a, b"):
        ours.save_file_async({"a": tensors["w"], "b": tensors["w"]}, tmp_path / "y")
    with pytest.warns(RuntimeWarning, match="do not fit"):
        ours.save_file_async({"w": torch.tensor([1e9])}, tmp_path / "y", dtype=torch.float16).wait()


def test_the_interpreter_waits_for_saves_and_tells_of_errors(tmp_path: Path) -> None:
    code = f"""
import torch
from loraaccel import safetensors
safetensors.save_file_async({{"w": torch.ones(3_000_000)}}, {str(tmp_path / "x")!r})
safetensors.save_file_async({{"w": torch.ones(3)}}, {str(tmp_path / "none" / "x")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"saving {tmp_path / 'none' / 'x'} failed" in done.stderr
    assert "FileNotFoundError" in done.stderr
    assert ours.load_file(tmp_path / "x")["w"].sum().item() == 3_000_000


def test_peft_reads_ours_and_we_read_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))

    model = get_peft_model(base(), LoraConfig(target_modules=["0", "1"], r=2, init_lora_weights=False))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = ours.load_file(path)
    theirs = safetensors.torch.load_file(path)
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensors[key], value) for key, value in theirs.items())
    doubled = {key: 2 * value for key, value in tensors.items()}
    ours.save_file(doubled, path, {"format": "pt"})
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    found = loaded.base_model.model[0].lora_A["default"].weight
    assert torch.equal(found, doubled["base_model.model.0.lora_A.weight"])


def test_diffusers_reads_ours_and_we_read_diffusers(tmp_path: Path) -> None:
    from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
    from diffusers.loaders.peft import PeftAdapterMixin  # noqa: F401  (the loader that is used below)
    from diffusers.models.model_loading_utils import load_state_dict

    tensors = {"unet.a.lora_A.weight": torch.randn(2, 3), "unet.a.lora_B.weight": torch.randn(3, 2).half()}
    path = tmp_path / LORA_WEIGHT_NAME_SAFE
    ours.save_file(tensors, path, {"format": "pt"})
    found = load_state_dict(str(path))
    assert all(torch.equal(found[key], value) for key, value in tensors.items())

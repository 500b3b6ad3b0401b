"""kohya's save_weights, taken over: files, hashes and metadata of the host's, and the host's own where we cannot."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors_files import data_of, header_of
from test_launcher import lines_of, start

import loraaccel
from loraaccel.integrations import kohya_network, kohya_save
from loraaccel.integrations.kohya_work import HostWork

TRAIN_UTIL = '''
import hashlib
import safetensors.torch

def precalculate_safetensors_hashes(tensors, metadata):
    """Of the data, and of 64 KiB of a file with the keys of the training alone."""
    content = safetensors.torch.save(tensors, {k: v for k, v in metadata.items() if k.startswith("ss_")})
    data = content[8 + int.from_bytes(content[:8], "little"):]
    return hashlib.sha256(data).hexdigest(), hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
'''


@pytest.fixture(autouse=True)
def trainers_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    library, train_util = types.ModuleType("library"), types.ModuleType("library.train_util")
    exec(TRAIN_UTIL, train_util.__dict__)
    library.train_util = train_util  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setitem(sys.modules, "library.train_util", train_util)
    kohya_save.follows.cache_clear()
    return train_util


class Network(torch.nn.Module):
    """The contract of sd-scripts' networks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i in range(4):
            name = f"lora_unet_{i}"
            self.register_parameter(
                f"{name}_up", torch.nn.Parameter(torch.randn(900, 4 + i, generator=generator))
            )
            self.register_buffer(f"{name}_alpha", torch.tensor(4.0 if i % 2 else 4))
        self.register_buffer("wide", torch.randn(300_000, generator=generator))

    def save_weights(self, file: Any, dtype: Any, metadata: Any) -> None:
        tensors = self.state_dict()
        if dtype is not None:
            for key in list(tensors.keys()):
                tensors[key] = tensors[key].detach().clone().to("cpu").to(dtype)
        if os.path.splitext(file)[1] != ".safetensors":
            torch.save(tensors, file)
            return
        from library import train_util
        from safetensors.torch import save_file

        metadata = metadata or {}
        model_hash, legacy_hash = train_util.precalculate_safetensors_hashes(tensors, metadata)
        metadata["sshs_model_hash"] = model_hash
        metadata["sshs_legacy_hash"] = legacy_hash
        save_file(tensors, file, metadata)


def taken_over(network: torch.nn.Module, verify: int = 0, roll_back: bool = True) -> HostWork:
    work = HostWork(verify, roll_back)
    assert kohya_network.take_over(network, work)
    return work


METADATA = {"ss_network_dim": "4", "ss_tag_frequency": '{"模型": 1}', "modelspec.title": "t"}


@pytest.mark.parametrize(
    "dtype", [None, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("metadata", [METADATA, {}, None], ids=["metadata", "empty", "none"])
@pytest.mark.parametrize("verify", [0, 3], ids=["", "verify"])
def test_files_and_metadata_are_the_hosts(
    tmp_path: Path, dtype: torch.dtype | None, metadata: dict[str, str] | None, verify: int
) -> None:
    network, plain = Network(), Network()
    work = taken_over(network, verify)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    told, expected = (None if metadata is None else dict(metadata) for _ in range(2))
    network.save_weights(str(ours), dtype, told)
    plain.save_weights(str(theirs), dtype, expected)
    assert work.records["saved files"].fused == 1
    assert told == expected
    assert header_of(ours.read_bytes()) == header_of(theirs.read_bytes())
    assert data_of(ours.read_bytes()) == data_of(theirs.read_bytes())
    with safetensors.safe_open(ours, "pt") as file:
        assert file.metadata()["sshs_model_hash"] == hashlib.sha256(data_of(ours.read_bytes())).hexdigest()
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "theirs.safetensors"]


def test_other_files_and_a_switch_that_is_off_are_the_hosts(tmp_path: Path) -> None:
    network = Network()
    work = taken_over(network)
    network.save_weights(str(tmp_path / "x.pt"), None, None)
    assert torch.load(tmp_path / "x.pt").keys() == network.state_dict().keys()
    assert work.records == {}
    with loraaccel.disabled():
        network.save_weights(str(tmp_path / "x.safetensors"), None, None)
    assert dict(work.records["saved files"].own) == {"switched_off": 1}
    kohya_network.give_back(network)
    assert type(network) is Network
    network.save_weights(str(tmp_path / "x.safetensors"), None, None)
    assert work.records["saved files"].fused == 0


class Hashed(Network):
    """As LyCORIS: another hash."""

    def save_weights(self, file: Any, dtype: Any, metadata: Any) -> None:
        from library import train_util
        from safetensors.torch import save_file

        tensors = self.state_dict()
        metadata = metadata or {}
        hashes = train_util.precalculate_safetensors_hashes(tensors, metadata)
        metadata["sshs_model_hash"] = "0x" + hashes[0]
        save_file(tensors, file, metadata)


class Scaled(Network):
    def save_weights(self, file: Any, dtype: Any, metadata: Any) -> None:
        from library import train_util
        from safetensors.torch import save_file

        tensors = self.state_dict()
        for key in list(tensors.keys()):
            tensors[key] = tensors[key].detach().to(dtype) * 2 if dtype is not None else tensors[key]
        metadata = metadata or {}
        hashes = train_util.precalculate_safetensors_hashes(tensors, metadata)
        metadata["sshs_model_hash"], metadata["sshs_legacy_hash"] = hashes
        save_file(tensors, file, metadata)


class Talks(Network):
    def save_weights(self, file: Any, dtype: Any, metadata: Any) -> None:
        print("saving")  # noqa: T201
        super().save_weights(file, dtype, metadata)


@pytest.mark.parametrize("kind", [Hashed, Scaled, Talks])
def test_a_method_that_does_anything_else_is_not_taken_over(
    tmp_path: Path, kind: type[Network], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kohya_save.follows(Network)
    assert not kohya_save.follows(kind)
    assert capsys.readouterr().out == ""
    network, plain = kind(), kind()
    work = taken_over(network)
    network.save_weights(str(tmp_path / "a.safetensors"), torch.float16, dict(METADATA))
    plain.save_weights(str(tmp_path / "b.safetensors"), torch.float16, dict(METADATA))
    assert header_of((tmp_path / "a.safetensors").read_bytes()) == header_of(
        (tmp_path / "b.safetensors").read_bytes()
    )
    assert dict(work.records["saved files"].own) == {"unknown_forward": 1}


@pytest.mark.parametrize("why", ["strides", "shared", "metadata", "sparse"])
def test_what_the_host_refuses_it_refuses_itself(tmp_path: Path, why: str) -> None:
    network, plain = Network(), Network()
    for n in (network, plain):
        if why == "strides":
            n.register_buffer("t", torch.randn(3, 4).T)
        elif why == "shared":
            n.register_buffer("t", n.wide[:5])
        elif why == "sparse":
            n.register_buffer("t", torch.eye(3).to_sparse())
    work = taken_over(network)
    metadata: Any = {"k": 1} if why == "metadata" else None
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(Exception) as theirs:  # noqa: PT011  (whatever it is)
        plain.save_weights(str(tmp_path / "y.safetensors"), None, metadata)
    with pytest.raises(type(theirs.value)):
        network.save_weights(str(path), None, metadata)
    assert work.records["saved files"].fused == 0
    assert path.read_bytes() == b"old"


def test_a_disk_that_refuses_keeps_the_old_file_and_says_why(tmp_path: Path) -> None:
    network = Network()
    work = taken_over(network)
    with pytest.raises(FileNotFoundError) as error:
        network.save_weights(str(tmp_path / "none" / "x.safetensors"), None, None)
    assert error.value.filename == str(tmp_path / "none" / "x.safetensors")
    network.save_weights(str(tmp_path / "x.safetensors"), None, None)
    assert work.records["saved files"].fused == 1


def test_an_error_of_ours_leads_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no thread to hash in")

    assert kohya_save.follows(Network)
    monkeypatch.setattr(kohya_save, "save", broken)
    network, path = Network(), tmp_path / "x.safetensors"
    work = taken_over(network)
    with pytest.warns(RuntimeWarning, match="no thread to hash in"):
        network.save_weights(str(path), torch.float16, dict(METADATA))
    assert dict(work.records["saved files"].own) == {"native_error": 1}
    assert safetensors.torch.load_file(path).keys() == network.state_dict().keys()
    network = Network()
    taken_over(network, roll_back=False)
    with pytest.raises(RuntimeError, match="no thread to hash in"):
        network.save_weights(str(path), torch.float16, dict(METADATA))


@pytest.mark.parametrize("wrong", ["data", "metadata"])
def test_verify_keeps_the_hosts_file_where_ours_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    assert kohya_save.follows(Network)
    right = kohya_save.save

    def save(state: Any, file: Any, dtype: Any, metadata: Any) -> Any:
        if wrong == "metadata":
            return right(state, file, dtype, {**metadata, "more": "x"})
        return right({**state, "wide": state["wide"] + 1e-3}, file, dtype, metadata)

    monkeypatch.setattr(kohya_save, "save", save)
    network, plain = Network(), Network()
    work = taken_over(network, verify=1)
    told, expected = dict(METADATA), dict(METADATA)
    with pytest.warns(RuntimeWarning, match="saved files"):
        network.save_weights(str(tmp_path / "x.safetensors"), torch.float16, told)
    plain.save_weights(str(tmp_path / "y.safetensors"), torch.float16, expected)
    assert told == expected
    x, y = ((tmp_path / name).read_bytes() for name in ("x.safetensors", "y.safetensors"))
    assert header_of(x) == header_of(y)
    assert data_of(x) == data_of(y)
    assert dict(work.records["saved files"].own) == {"verify_failed": 1}
    assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "y.safetensors"]


NETWORK = """
import os
import torch
from torch import nn
from kohya_modules import LoRAModule

class Network(nn.Module):
    def __init__(self, unet):
        super().__init__()
        layers = {n: m for n, m in unet.named_modules() if type(m) is nn.Linear}
        self.loras = [LoRAModule(f"lora_unet_{n}", m, 1.0, 4, 2.0) for n, m in layers.items()]

    def apply_to(self, text_encoder, unet):
        for lora in self.loras:
            lora.apply_to()
            self.add_module(lora.lora_name, lora)

    def save_weights(self, file, dtype, metadata):
        tensors = self.state_dict()
        if dtype is not None:
            for key in list(tensors.keys()):
                tensors[key] = tensors[key].detach().clone().to("cpu").to(dtype)
        from safetensors.torch import save_file
        from library import train_util

        metadata = metadata or {}
        model_hash, legacy_hash = train_util.precalculate_safetensors_hashes(tensors, metadata)
        metadata["sshs_model_hash"] = model_hash
        metadata["sshs_legacy_hash"] = legacy_hash
        save_file(tensors, file, metadata)

def create_network(multiplier, dim, alpha, vae, text_encoder, unet, neuron_dropout=None, **kwargs):
    return Network(unet)
"""
TRAIN = """
import importlib, sys, torch
from torch import nn
torch.manual_seed(0)
unet = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
network = importlib.import_module(sys.argv[1]).create_network(1.0, 4, 2.0, None, None, unet)
network.apply_to(None, unet)
unet(torch.randn(3, 8))
network.save_weights(sys.argv[2], torch.float16, {"ss_network_module": sys.argv[1], "ss_epoch": "1"})
"""


def test_under_the_launcher_and_as_a_network_module(tmp_path: Path) -> None:
    for folder in ("library", "networks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "library" / "train_util.py").write_text(TRAIN_UTIL)
    (tmp_path / "networks" / "lora.py").write_text(NETWORK)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "kohya_modules.py").write_text((Path(__file__).parent / "kohya_modules.py").read_text())
    out = tmp_path / "out"
    out.mkdir()
    start("train.py", "networks.lora", out / "plain.safetensors", cwd=tmp_path)
    plain = (out / "plain.safetensors").read_bytes()
    said = "network: saved files, 1 calls"
    for mode in ("off", "auto", "verify"):
        file, report = out / f"{mode}.safetensors", tmp_path / "report.json"
        options = ["-m", "loraaccel.run", "--use-cpp-kernel", mode, "--report", report]
        done = start(*options, "train.py", "networks.lora", file, cwd=tmp_path)
        assert header_of(file.read_bytes()) == header_of(plain)
        assert data_of(file.read_bytes()) == data_of(plain)
        assert (said in lines_of(done)) == (mode != "off")
        work = {n["work"]: n for n in json.loads(report.read_text())["network"]}
        assert work.get("saved files", {}).get("fused", 0) == (0 if mode == "off" else 1)
    done = start("train.py", "loraaccel.kohya", out / "module.safetensors", cwd=tmp_path)
    assert said in lines_of(done)
    assert header_of((out / "module.safetensors").read_bytes()) == header_of(plain)
    assert data_of((out / "module.safetensors").read_bytes()) == data_of(plain)

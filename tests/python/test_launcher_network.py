"""`loraaccel run` and ``network_module = "loraaccel.kohya"``: the trainer's work around the network, in processes of
their own, with the trainer's class in the script that is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launcher import lines_of, said, start

HERE = Path(__file__).parent
NETWORK = """
from torch import nn
from networks.base import NormedModule, NormedNetwork

class Network(NormedNetwork):
    def __init__(self, unet):
        layers = {n: m for n, m in unet.named_modules() if type(m) is nn.Linear}
        super().__init__({f"lora_unet_{n}": NormedModule(f"lora_unet_{n}", m, 1.0, 4, 2.0) for n, m in layers.items()})

    def apply_to(self, text_encoder, unet):
        super().apply_to(text_encoder, unet)

    def save_weights(self, file, dtype, metadata):
        pass

def create_network(multiplier, dim, alpha, vae, text_encoder, unet, neuron_dropout=None, **kwargs):
    return Network(unet)
"""
TRAINER = """
import importlib, json, sys, types
import torch
from torch import nn

class NetworkTrainer:
    def all_reduce_network(self, accelerator, network):
        for param in network.parameters():
            if param.grad is not None:
                param.grad = accelerator.reduce(param.grad, reduction="mean")

    def train(self, module, out):
        torch.manual_seed(0)
        reduced, log = [], []
        def reduce(tensor, reduction="mean", scale=1.0):
            reduced.append(tensor.numel())
            return tensor.clone()
        accelerator = types.SimpleNamespace(num_processes=2, reduce=reduce)  # (the other one is not needed)
        unet = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 6)).requires_grad_(False)
        network = importlib.import_module(module).create_network(1.0, 4, 2.0, None, None, unet)
        network.apply_to(None, unet)
        optimizer = torch.optim.AdamW(network.parameters(), 3e-2)
        for step in range(6):
            loss = (unet(torch.randn(5, 8)) - torch.randn(5, 6)).square().mean()
            loss.backward()
            self.all_reduce_network(accelerator, network)
            network.update_grad_norms()
            network.update_norms()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            log.append([loss.item(), *network.apply_max_norm_regularization(0.2, torch.device("cpu"))])
        torch.save(network.state_dict(), out)
        print("LOG " + json.dumps(log))
        print("REDUCED " + json.dumps(reduced))

if __name__ == "__main__":
    NetworkTrainer().train(*sys.argv[1:])
"""
WORK = ["mean of gradients", "norms of gradients", "norms of weights", "max norm"]


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    folder = tmp_path / "trainer"
    (folder / "networks").mkdir(parents=True)
    (folder / "networks" / "__init__.py").write_text("")
    shutil.copy(HERE / "kohya_modules.py", folder / "kohya_modules.py")
    shutil.copy(HERE / "kohya_networks.py", folder / "networks" / "base.py")
    (folder / "networks" / "lora.py").write_text(NETWORK)
    (folder / "train.py").write_text(TRAINER)
    return folder


def assert_trained_alike(found: Any, expected: Any, files: list[Path]) -> None:
    ours, theirs = said(found, "LOG"), said(expected, "LOG")
    assert [n[1] for n in ours] == [n[1] for n in theirs]  # counts of scaled layers
    assert ours[-1][1] > 0
    for a, b in zip(ours, theirs, strict=True):
        # The host's norms of gradients are made in bfloat16, and they are the size of GGPO's perturbation.
        assert a == pytest.approx(b, rel=5e-2)
    for a, b in zip(*(torch.load(file).values() for file in files), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-3)


def test_modes(trainer: Path, tmp_path: Path) -> None:
    plain = start("train.py", "networks.lora", tmp_path / "plain.pt", cwd=trainer)
    assert said(plain, "REDUCED") == [32, 48, 48, 24] * 6
    for mode in ("off", "auto", "on", "verify"):
        out, report = tmp_path / f"{mode}.pt", tmp_path / f"{mode}.json"
        options = ["-m", "loraaccel.run", "--use-cpp-kernel", mode, "--report", report]
        done = start(*options, "train.py", "networks.lora", out, cwd=trainer)
        network = json.loads(report.read_text())["network"]
        if mode == "off":
            assert done.stdout == plain.stdout
            assert network == lines_of(done) == []
            continue
        assert_trained_alike(done, plain, [out, tmp_path / "plain.pt"])
        assert [(n["work"], n["fused"], n["own"], n["reasons"]) for n in network] == [
            (w, 6, 0, {}) for w in WORK
        ]
        assert lines_of(done)[1:5] == [f"network: {work}, 6 calls" for work in WORK]
        if mode == "verify":  # its first calls are the trainer's own as well
            assert said(done, "REDUCED") == [32, 48, 48, 24, 152] * 4 + [152] * 2
            assert all(n["largest_error"] < 2e-2 for n in network)
            assert sum(line.startswith("verify: ") for line in lines_of(done)) == 5
        else:
            assert said(done, "REDUCED") == [152] * 6


def test_our_network_module(trainer: Path, tmp_path: Path) -> None:
    plain = start("train.py", "networks.lora", tmp_path / "plain.pt", cwd=trainer)
    done = start("train.py", "loraaccel.kohya", tmp_path / "ours.pt", cwd=trainer)
    assert_trained_alike(done, plain, [tmp_path / "ours.pt", tmp_path / "plain.pt"])
    assert said(done, "REDUCED") == [152] * 6
    assert lines_of(done)[1:] == [f"network: {work}, 6 calls" for work in WORK]
    # both at once: the launcher has it, and says it once
    done = start("-m", "loraaccel.run", "train.py", "loraaccel.kohya", tmp_path / "both.pt", cwd=trainer)
    assert lines_of(done)[1:] == [f"network: {work}, 6 calls" for work in WORK]
    done = start("train.py", "loraaccel.kohya", tmp_path / "off.pt", cwd=trainer, LORAACCEL="0")
    assert done.stdout == plain.stdout
    assert not [line for line in lines_of(done) if "network" in line]


def test_verify_ends_with_1_where_the_networks_work_differs(trainer: Path, tmp_path: Path) -> None:
    sabotage = (
        "import loraaccel.integrations.kohya_max_norm as k\n"
        "right = k._limit\n"
        "k._limit = lambda norms, limit: right(norms * (1.5 if len(norms) == 2 else 1), limit)\n"
    )
    (trainer / "train.py").write_text(sabotage + TRAINER)
    options = ["-m", "loraaccel.run", "--use-cpp-kernel", "verify", "--report", tmp_path / "report.json"]
    done = start(*options, "train.py", "networks.lora", tmp_path / "out.pt", cwd=trainer, code=1)
    assert "network: max norm, 0 calls; the trainer's own: 6 verify_failed" in lines_of(done)
    assert any(line.startswith("verify: max norm failed with") for line in lines_of(done))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 1
    assert report["network"][3]["reasons"] == {"verify_failed": 6}
    plain = start("train.py", "networks.lora", tmp_path / "plain.pt", cwd=trainer)
    assert_trained_alike(done, plain, [tmp_path / "out.pt", tmp_path / "plain.pt"])

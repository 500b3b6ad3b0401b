"""LyCORIS's networks under ``loraaccel run`` and ``network_module = "loraaccel.kohya"`` (cases VT7, VA4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launcher import lines_of, said, start

from loraaccel import kohya

pytest.importorskip("lycoris", reason="LyCORIS (pip install lycoris-lora) is not installed")

TRAINER = """
import importlib, json, sys
import torch
from torch import nn

class Transformer2DModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.proj = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(self.conv(x).movedim(1, -1).flatten(1, 2))

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Transformer2DModel()
        self.requires_grad_(False)

    def forward(self, x):
        return self.block(x)

def network_of(module, unet, arguments):
    if module == "lycoris":
        from lycoris import create_lycoris
        network = create_lycoris(unet, 1.0, 4, 2.0, **arguments)
        network.apply_to()
        return network
    make = importlib.import_module(module).create_network
    network = make(1.0, 4, 2.0, None, None, unet, neuron_dropout=None, **arguments)
    network.apply_to(None, unet, False, True)
    return network

def train(module, out, arguments):
    torch.manual_seed(0)
    unet = Unet()
    network = network_of(module, unet, arguments)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    losses = []
    for step in range(6):
        loss = (unet(torch.randn(2, 4, 8, 8)) - torch.randn(2, 64, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    network.save_weights(out, None, {"ss_network_module": module})
    return losses

print("LOSSES " + json.dumps([loss for job in json.loads(sys.argv[3]) for loss in train(*sys.argv[1:3], job)]))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    return tmp_path


def run(
    trainer: Path, *before: Any, jobs: list[dict[str, Any]], module: str = "lycoris", code: int = 0
) -> Any:
    """The process, and the losses of all jobs, one after the other in one process."""
    out = trainer / "out.safetensors"
    done = start(*before, "train.py", module, out, json.dumps(jobs), cwd=trainer, code=code)
    return done, (code or said(done, "LOSSES"))


def ours(done: Any) -> list[str]:
    return [line for line in lines_of(done) if line.startswith(("lora_", "loha_", "lokr_"))]


LAUNCHER = "-m", "loraaccel.run"


def test_the_launcher_patches_what_the_script_makes(trainer: Path) -> None:
    """Bypass by itself, the rest with --factored; losses are those of the script alone, `off` bit for bit."""
    jobs = [
        {"algo": algo, "bypass_mode": bypass, "rank_dropout": 0.2}
        for algo in ("lora", "loha", "lokr") for bypass in (False, True)
    ]  # fmt: skip
    _, plain = run(trainer, jobs=jobs)
    off, losses = run(trainer, *LAUNCHER, "--use-cpp-kernel", "off", "--factored", jobs=jobs)
    assert (ours(off), losses) == ([], plain)
    kinds = [f"{stem}_{form}" for stem in ("loha", "lokr", "lora") for form in ("conv2d", "linear")]
    rebuilt, losses = run(trainer, *LAUNCHER, jobs=jobs)
    assert ours(rebuilt) == [f"{kind}: 1 of 2 layers fused, 6 calls; not fused: 1 rebuilt" for kind in kinds]
    assert losses == pytest.approx(plain, rel=1e-4)
    fused, losses = run(trainer, *LAUNCHER, "--factored", jobs=jobs)
    assert ours(fused) == [f"{kind}: 2 of 2 layers fused, 12 calls" for kind in kinds]
    assert losses == pytest.approx(plain, rel=1e-4)


def test_the_configuration_file_asks_for_factors(trainer: Path) -> None:
    for text, fused in (
        ("use_cpp_kernel_factored = true", 1),
        ("use_cpp_kernel_factored = false", 0),
        ("", 0),
    ):
        (trainer / "run.toml").write_text(text)
        command = ["train.py", "lycoris", trainer / "out.pt", "[{}]", "--config_file", "run.toml"]
        done = start(*LAUNCHER, *command, cwd=trainer)
        assert ours(done)[1].startswith(f"lora_linear: {fused} of 1 layers fused")
    for text, message in (
        ("use_cpp_kernel_factord = true", "use_cpp_kernel_factord, expected use_cpp_kernel_factored"),
        ('use_cpp_kernel_factored = "yes"', "use_cpp_kernel_factored is 'yes', expected true or false"),
    ):
        (trainer / "run.toml").write_text(text)
        done = start(*LAUNCHER, *command, cwd=trainer, code=2)
        assert message in done.stderr


def test_our_network_module_over_LyCORIS(trainer: Path) -> None:
    """The file is that of lycoris.kohya, and its metadata name that module."""
    arguments = {"algo": "loha", "factor": "8", "preset": "full"}
    _, plain = run(trainer, module="lycoris.kohya", jobs=[arguments])
    from safetensors import safe_open

    with safe_open(trainer / "out.safetensors", "pt") as file:
        expected, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    for options, fused in (({}, 0), ({"factored": "true"}, 1)):
        given = {**arguments, **options, "base_module": "lycoris.kohya"}
        done, losses = run(trainer, module="loraaccel.kohya", jobs=[given])
        assert losses == pytest.approx(plain, rel=1e-4)
        assert ours(done)[1].startswith(f"loha_linear: {fused} of 1 layers fused")
        with safe_open(trainer / "out.safetensors", "pt") as file:
            assert file.metadata()["ss_network_module"] == metadata["ss_network_module"] == "lycoris.kohya"
            assert set(file.keys()) == set(expected)
            for key, value in expected.items():
                torch.testing.assert_close(file.get_tensor(key), value, rtol=1e-3, atol=1e-4)


def test_slips_in_network_args() -> None:
    for slip, message in (
        ({"factored": "perhaps"}, "factored is 'perhaps', expected true or false"),
        ({"factord": "true"}, "factord, expected factored"),
    ):
        with pytest.raises(ValueError, match=message):
            kohya.create_network(1.0, 4, 2.0, None, None, None, base_module="lycoris.kohya", **slip)

"""`loraaccel run` and ``network_module = "loraaccel.kohya"``: scripts in processes of their own (cases VT7, VA4)."""

from __future__ import annotations

import copy
import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
# A package of networks and a trainer, as sd-scripts has them, of this test's own making.
NETWORK = """
import torch
from torch import nn
from networks.modules import LoRAModule

class Network(nn.Module):
    def __init__(self, unet, multiplier, rank, alpha, dropout, **kwargs):
        super().__init__()
        self.seen = kwargs
        self.loras = [
            LoRAModule("lora_unet_" + name.replace(".", "_"), m, multiplier, rank, alpha, dropout)
            for name, m in unet.named_modules() if type(m) in (nn.Linear, nn.Conv2d)
        ]

    def apply_to(self, text_encoder, unet, apply_text_encoder=True, apply_unet=True):
        for lora in self.loras:
            lora.apply_to()
            self.add_module(lora.lora_name, lora)

    def save_weights(self, file, dtype, metadata):
        metadata["sshs_model_hash"] = "of " + metadata["ss_network_module"]
        torch.save({"weights": self.state_dict(), "metadata": metadata, "arguments": self.seen}, file)

def create_network(multiplier, dim, alpha, vae, text_encoder, unet, neuron_dropout=None, **kwargs):
    return Network(unet, multiplier, dim, alpha, neuron_dropout, **kwargs)

def create_network_from_weights(multiplier, file, vae, te, unet, weights_sd=None, for_inference=False, **kwargs):
    return Network(unet, multiplier, 4, 2.0, None, **kwargs), {"file": file}
"""
TRAINER = """
import importlib, json, sys
import torch
from torch import nn

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.proj = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, x):
        return self.proj(self.conv(x).movedim(1, -1))

def train(module, out, dropout=0.25, arguments={}):
    torch.manual_seed(0)
    unet = Unet()
    network = importlib.import_module(module).create_network(1.0, 4, 2.0, None, None, unet, dropout, **arguments)
    network.apply_to(None, unet)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    losses = []
    for step in range(8):
        x = torch.randn(2, 4, 8, 8)
        loss = (unet(x) - torch.randn(2, 8, 8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    network.save_weights(out, None, {"ss_network_module": module})
    return losses

if __name__ == "__main__":
    print("ARGV " + json.dumps(sys.argv))
    print("LOSSES " + json.dumps(train(sys.argv[1], sys.argv[2])))
    print("OURS " + json.dumps(sorted(m for m in sys.modules if m.startswith("loraaccel."))))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    folder = tmp_path / "trainer"
    (folder / "networks").mkdir(parents=True)
    (folder / "networks" / "__init__.py").write_text("")
    shutil.copy(HERE / "kohya_modules.py", folder / "networks" / "modules.py")
    (folder / "networks" / "lora.py").write_text(NETWORK)
    (folder / "train.py").write_text(TRAINER)
    return folder


def start(
    *command: Any, cwd: Path, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)], check=False, cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
        # (Where the tests run in a shell's background, Ctrl-C is ignored, and children would ignore it too.)
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stderr + done.stdout
    return done


def said(done: subprocess.CompletedProcess[str], word: str) -> Any:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(word + " ")]
    return json.loads(line.removeprefix(word + " "))


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [
        line.removeprefix("loraaccel: ")
        for line in done.stderr.splitlines()
        if line.startswith("loraaccel: ")
    ]


def test_every_mode_trains_the_same(trainer: Path, tmp_path: Path) -> None:
    """off is the script alone, bit for bit, with nothing of the operators loaded; on and verify follow it closely."""
    losses, files = {}, {}
    for mode in ("plain", "off", "auto", "on", "verify"):
        out = tmp_path / f"{mode}.pt"
        run = (
            []
            if mode == "plain"
            else ["-m", "loraaccel.run", "--use-cpp-kernel", mode, "--report", tmp_path / f"{mode}.json"]
        )
        done = start(*run, "train.py", "networks.lora", out, cwd=trainer)
        assert said(done, "ARGV") == ["train.py", "networks.lora", str(out)]
        losses[mode], files[mode] = said(done, "LOSSES"), torch.load(out)
        if mode in ("plain", "off"):
            assert lines_of(done) == []
            assert not [m for m in said(done, "OURS") if m in ("loraaccel.ops", "loraaccel.patching")]
            continue
        assert lines_of(done)[:2] == [
            "lora_conv2d: 1 of 1 layers fused, 8 calls", "lora_linear: 1 of 1 layers fused, 8 calls",
        ]  # fmt: skip
        report = json.loads((tmp_path / f"{mode}.json").read_text())
        assert (report["mode"], report["exit_code"]) == (mode, 0)
        assert [(n["name"], n["kind"], n["fused"], n["own"], n["reason"]) for n in report["layers"]] == [
            ("lora_unet_conv", "lora_conv2d", 8, 0, ""), ("lora_unet_proj", "lora_linear", 8, 0, ""),
        ]  # fmt: skip
        assert files[mode]["metadata"] == files["plain"]["metadata"]
        if mode == "verify":
            assert 0 < report["layers"][1]["largest_error"] < 1e-6
            assert any(
                line.startswith("verify: largest relative error of an output") for line in lines_of(done)
            )
    report = json.loads((tmp_path / "off.json").read_text())
    assert report == {"mode": "off", "exit_code": 0, "summary": [], "layers": [], "network": []}
    for mode in ("off", "auto", "on", "verify"):
        exact = mode == "off"
        assert losses[mode] == (losses["plain"] if exact else pytest.approx(losses["plain"], rel=1e-5))
        for key, value in files["plain"]["weights"].items():
            found = files[mode]["weights"][key]
            assert found.dtype == value.dtype
            assert torch.equal(found, value) if exact else torch.allclose(found, value, rtol=1e-3, atol=1e-5)


def test_the_environment_switches_it_off(trainer: Path, tmp_path: Path) -> None:
    done = start(
        "-m", "loraaccel.run", "train.py", "networks.lora", tmp_path / "a.pt", cwd=trainer, LORAACCEL="0"
    )
    assert lines_of(done) == []
    assert "loraaccel.ops" not in said(done, "OURS")


@pytest.mark.parametrize(
    ("text", "mode"), [("true", "on"), ("false", "off"), ('"verify"', "verify"), (None, "auto")]
)
def test_kohyas_configuration_file_chooses(
    trainer: Path, tmp_path: Path, text: str | None, mode: str
) -> None:
    (trainer / "run.toml").write_text("" if text is None else f"[speed]\nuse_cpp_kernel = {text}\n")
    command = ["train.py", "networks.lora", tmp_path / "a.pt", "--config_file", "run"]
    done = start("-m", "loraaccel.run", "--report", tmp_path / "r.json", *command, cwd=trainer)
    assert json.loads((tmp_path / "r.json").read_text())["mode"] == mode
    assert said(done, "ARGV")[3:] == ["--config_file", "run"]
    # The command line has the last word.
    done = start("-m", "loraaccel.run", "--use-cpp-kernel", "off", *command, cwd=trainer)
    assert lines_of(done) == []


def test_nothing_misspelt_is_ignored(trainer: Path, tmp_path: Path) -> None:
    command = ["train.py", "networks.lora", tmp_path / "a.pt"]
    for options, text in (
        (["--use-cpp-kernal", "on", *command], "No such option"),
        (["--use-cpp-kernel", "onn", *command], "'onn' is not one of"),
        (
            [*command, "--use-cpp-kernel", "on"],
            "--use-cpp-kernel stands after the script, expected before it",
        ),
        ([*command, "--use_cpp_kernel"], "--use_cpp_kernel stands after the script"),
        (["no_such.py"], "no_such.py is no file, expected the script to run"),
        (["--report", "no/such/r.json", *command], "no/such/r.json: no file can be written there"),
        ([], "Missing argument 'SCRIPT'"),
    ):
        done = start("-m", "loraaccel.run", *options, cwd=trainer, code=2)
        assert text in done.stderr
    for line, text in (
        ("use_cpp_kernal = true", "use_cpp_kernal, expected use_cpp_kernel"),
        (
            'use_cpp_kernel = "fast"',
            "use_cpp_kernel is 'fast', expected true, false or one of auto, on, off, verify",
        ),
    ):
        (trainer / "run.toml").write_text(line + "\n")
        done = start("-m", "loraaccel.run", *command, "--config_file=run.toml", cwd=trainer, code=2)
        assert text in done.stderr
    assert not (tmp_path / "a.pt").exists()


SCRIPTS = {
    "its own status": ("import sys; sys.exit(7)", 7, ""),
    "a message": ("import sys; sys.exit('no data')", 1, "no data"),
    "an error": ("def f():\n    raise ValueError('no such bucket')\nf()", 1, "ValueError: no such bucket"),
    "no end": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    "a cut file": ("import io, pickle; pickle.load(io.BytesIO(b''))", 1, "EOFError: Ran out of input"),
    "an error of click's": ("import click; raise click.UsageError('mine')", 1, "UsageError: mine"),
    "a pipe without a reader": ("raise BrokenPipeError(32, 'Broken pipe')", 1, "BrokenPipeError"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_ends_as_it_would(name: str, tmp_path: Path) -> None:
    text, code, message = SCRIPTS[name]
    (tmp_path / "script.py").write_text(text)
    done = start("-m", "loraaccel.run", "--report", "r.json", "script.py", cwd=tmp_path, code=code)
    assert message in done.stderr
    assert "Usage:" not in done.stderr
    assert lines_of(done) == ["no LoRA modules: the script made none of a kind that loraaccel knows"]
    assert json.loads((tmp_path / "r.json").read_text())["layers"] == []


def test_after_ctrl_c_what_was_registered_for_the_end_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, os, signal\natexit.register(print, 'SAVED')\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = start("-m", "loraaccel.run", "script.py", cwd=tmp_path, code=-2)
    assert "SAVED" in done.stdout


def test_a_report_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    """The script takes its folder away: how it ends stays what it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "script.py").write_text("import os, sys; os.rmdir('out'); os.chdir('/'); sys.exit(5)")
    done = start("-m", "loraaccel.run", "--report", "out/r.json", "script.py", cwd=tmp_path, code=5)
    assert lines_of(done)[-1].startswith("the report was not written: ")
    assert "Traceback" not in done.stderr


def test_the_script_is_main(tmp_path: Path) -> None:
    """Its folder is the first of the path, it is __main__ for pickles, children and what runs at the end."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "deep" / "script.py").write_text(
        "import atexit, multiprocessing, pickle, sys, beside\n"
        "class Kept: pass\n"
        "def double(n): return 2 * n\n"
        "def at_end(): print('END', WORD, Kept.__module__)\n"
        "WORD = beside.WORD\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(at_end)\n"
        "    assert type(pickle.loads(pickle.dumps(Kept()))) is Kept\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print('SUM', sum(pool.map(double, [1, 2])))\n"
        "    print('NAME', __name__, __file__, sys.argv)\n"
    )
    done = start("-m", "loraaccel.run", "deep/script.py", "--flag", cwd=tmp_path)
    assert "SUM 6" in done.stdout
    assert f"NAME __main__ {tmp_path}/deep/script.py ['deep/script.py', '--flag']" in done.stdout
    assert "END found __main__" in done.stdout
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print('MODULE', __name__, sys.argv[1:])")
    done = start("-m", "loraaccel.run", "-m", "package", "a", "b", cwd=tmp_path)
    assert "MODULE __main__ ['a', 'b']" in done.stdout


def test_hooks_of_the_same_kind_ask_each_other_once(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "class Other:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        for finder in sys.meta_path:\n"
        "            if finder is not self and (spec := finder.find_spec(name, path, target)):\n"
        "                return spec\n"
        "sys.meta_path.insert(0, Other())\n"
        "import beside\n"
        "print('WORD', beside.WORD)\n"
    )
    done = start("-m", "loraaccel.run", "-m", "loraaccel.run", "script.py", cwd=tmp_path)
    assert "WORD found" in done.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_verify_sees_through_dropout_and_a_script_that_exits(rank: str, tmp_path: Path) -> None:
    """PEFT's masks differ from the operator's: without them the two are compared. sys.exit(0) hides nothing, nor does
    being another process than the first."""
    (tmp_path / "script.py").write_text(
        "import sys, torch\nfrom torch import nn\nfrom peft import LoraConfig, get_peft_model\n"
        "import loraaccel.integrations.peft_forms as forms\n"
        "right = forms.lora_linear_adapters\n"
        "if sys.argv[1] == 'wrong':\n"
        "    forms.lora_linear_adapters = lambda *a, **more: right(*a, **more) * 1.5\n"
        "model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))\n"
        "model = get_peft_model(model, LoraConfig(target_modules=['0', '2'], lora_dropout=0.5)).train()\n"
        "model(torch.randn(3, 8)).sum().backward()\n"
        "assert model.base_model.model[0].lora_dropout['default'].training\n"
        "sys.exit(0)\n"
    )
    for word, code in (("right", 0), ("wrong", 1)):
        done = start(
            "-m", "loraaccel.run", "--use-cpp-kernel", "verify", "--report", f"{word}.json", "script.py", word,
            cwd=tmp_path, code=code, RANK=rank,
        )  # fmt: skip
        failed = [line for line in lines_of(done) if " failed with 5.0e-01" in line]
        assert len(failed) == (2 if word == "wrong" else 0)
        assert (tmp_path / f"{word}.json").exists() == (rank == "0")
        if rank == "0":
            report = json.loads((tmp_path / f"{word}.json").read_text())
            assert report["exit_code"] == code
            assert all(layer["largest_error"] is not None for layer in report["layers"])


def test_PEFT_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\nfrom torch import nn\nfrom peft import LoraConfig, get_peft_model\n"
        "model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))\n"
        "model = get_peft_model(model, LoraConfig(target_modules=['0', '2']))\n"
        "model(torch.randn(3, 8))\n"
        "model.add_adapter('second', LoraConfig(target_modules=['2']))\n"
        "model.set_adapter('second')\n"
        "model(torch.randn(3, 8))\n"
    )
    done = start("-m", "loraaccel.run", "script.py", cwd=tmp_path)
    assert lines_of(done) == [
        "lora_linear: 2 of 2 layers fused, 3 calls; calls of fused layers' own forward: 1 no_active_adapter"
    ]


def test_verify_ends_with_1_where_a_layer_differs(trainer: Path, tmp_path: Path) -> None:
    """A layer whose operator is made wrong: it goes back to its own forward, and the run says so at the end."""
    sabotage = (
        "import loraaccel.integrations.kohya as k\n"
        "right = k.lora_linear_adapters\n"
        "k.lora_linear_adapters = lambda *a, **more: right(*a, **more) * 1.5\n"
    )
    (trainer / "train.py").write_text(TRAINER.replace("def train(", sabotage + "def train("))
    files = {}
    for mode, code in (("off", 0), ("verify", 1)):
        command = ["train.py", "networks.lora", tmp_path / f"{mode}.pt"]
        report = ["--report", tmp_path / f"{mode}.json"]
        done = start(
            "-m", "loraaccel.run", "--use-cpp-kernel", mode, *report, *command, cwd=trainer, code=code
        )
        files[mode] = torch.load(tmp_path / f"{mode}.pt")["weights"]
    assert any(
        re.fullmatch(r"verify: lora_unet_proj failed with \d\.\de-0\d", line) for line in lines_of(done)
    )
    assert "lora_linear: 0 of 1 layers fused, 0 calls; not fused: 1 verify_failed" in lines_of(done)
    assert json.loads((tmp_path / "verify.json").read_text())["exit_code"] == 1
    for key, value in files["off"].items():
        assert torch.allclose(files["verify"][key], value, rtol=1e-3, atol=1e-5)


def test_auto_after_a_native_error_is_the_script_alone(trainer: Path, tmp_path: Path) -> None:
    """Each layer's first call fails, with its masks already drawn: its own forward draws the same once more."""
    files, losses = [], []
    foreign = "neon" if platform.machine() in ("x86_64", "AMD64") else "avx2"  # a kernel that cannot run here
    for mode, kernel in (("off", ""), ("auto", foreign)):
        command = ["train.py", "networks.lora", tmp_path / f"{mode}.pt"]
        report = ["--report", tmp_path / f"{mode}.json"]
        done = start(
            "-m", "loraaccel.run", "--use-cpp-kernel", mode, *report, *command, cwd=trainer,
            LORAACCEL_FORCE_KERNEL=kernel,
        )  # fmt: skip
        files.append(torch.load(tmp_path / f"{mode}.pt")["weights"])
        losses.append(said(done, "LOSSES"))
    layers = json.loads((tmp_path / "auto.json").read_text())["layers"]
    assert [(layer["name"], layer["own"], layer["reason"]) for layer in layers] == [
        ("lora_unet_conv", 8, "native_error"), ("lora_unet_proj", 8, "native_error"),
    ]  # fmt: skip
    assert losses[1] == losses[0]
    for key, value in files[0].items():
        assert torch.equal(files[1][key], value)


# ---- without the launcher ----


def trained(trainer: Path, module: str, out: Path, code: int = 0, **arguments: str) -> Any:
    call = f"train.train({module!r}, {str(out)!r}, arguments={arguments!r})"
    script = f"import json, train; print('LOSSES ' + json.dumps({call}))"
    return start("-c", script, cwd=trainer, code=code)


def test_our_network_module(trainer: Path, tmp_path: Path) -> None:
    """Keys, types, values and metadata are those of networks.lora, and so is the name in the metadata."""
    plain = trained(trainer, "networks.lora", tmp_path / "plain.pt")
    ours = trained(trainer, "loraaccel.kohya", tmp_path / "ours.pt", conv_dim="4")
    assert said(ours, "LOSSES") == pytest.approx(said(plain, "LOSSES"), rel=1e-5)
    assert lines_of(ours) == [
        "lora_conv2d: 1 of 1 layers fused, 8 calls",
        "lora_linear: 1 of 1 layers fused, 8 calls",
        "network: saved files, 0 calls; the trainer's own: 1 unknown_forward",
    ]
    files = [torch.load(tmp_path / f"{name}.pt") for name in ("plain", "ours")]
    assert files[1]["metadata"] == files[0]["metadata"]
    assert files[1]["metadata"]["sshs_model_hash"] == "of networks.lora"
    assert files[1]["arguments"] == {"conv_dim": "4"}
    assert list(files[1]["weights"]) == list(files[0]["weights"])
    for key, value in files[0]["weights"].items():
        assert files[1]["weights"][key].dtype == value.dtype
        assert torch.allclose(files[1]["weights"][key], value, rtol=1e-3, atol=1e-5)


def test_arguments_of_our_network_module(trainer: Path, tmp_path: Path) -> None:
    shutil.copy(trainer / "networks" / "lora.py", trainer / "networks" / "lora_fa.py")
    done = trained(
        trainer, "loraaccel.kohya", tmp_path / "a.pt", base_module="networks.lora_fa", use_cpp_kernel="false"
    )
    assert lines_of(done) == []
    assert torch.load(tmp_path / "a.pt")["metadata"]["ss_network_module"] == "networks.lora_fa"
    assert torch.load(tmp_path / "a.pt")["arguments"] == {}
    done = trained(trainer, "loraaccel.kohya", tmp_path / "b.pt", code=1, use_cpp_kernal="true")
    assert "ValueError: network_args: use_cpp_kernal, expected use_cpp_kernel" in done.stderr
    done = trained(trainer, "loraaccel.kohya", tmp_path / "b.pt", code=1, use_cpp_kernel="quick")
    assert "use_cpp_kernel is 'quick', expected true, false or one of auto, on, off, verify" in done.stderr
    done = trained(trainer, "loraaccel.kohya", tmp_path / "b.pt", code=1, base_module="networks.nothing")
    assert "No module named 'networks.nothing'" in done.stderr
    assert not (tmp_path / "b.pt").exists()


def test_the_network_module_follows_launcher_and_file(trainer: Path, tmp_path: Path) -> None:
    """`use_cpp_kernel` is said in one place: network_args, the launcher's option, or the trainer's file."""
    plain = start(
        "-m", "loraaccel.run", "train.py", "networks.lora", tmp_path / "p.pt", cwd=trainer, LORAACCEL="0"
    )
    command = ["train.py", "loraaccel.kohya", tmp_path / "a.pt"]
    off = start("-m", "loraaccel.run", "--use-cpp-kernel", "off", *command, cwd=trainer)
    (trainer / "run.toml").write_text("use_cpp_kernel = false\n")
    by_file = start(*command, "--config_file", "run.toml", cwd=trainer)
    for done in (off, by_file):
        assert lines_of(done) == []
        assert said(done, "LOSSES") == said(plain, "LOSSES")
    (trainer / "run.toml").write_text("use_cpp_kernal = false\n")
    done = start(*command, "--config_file", "run.toml", cwd=trainer, code=1)
    assert "use_cpp_kernal, expected use_cpp_kernel" in done.stderr
    (trainer / "t.py").write_text(
        "import sys, train\ntrain.train(sys.argv[1], sys.argv[2], arguments={'use_cpp_kernel': 'on'})\n"
    )
    done = start("-m", "loraaccel.run", "t.py", "loraaccel.kohya", tmp_path / "b.pt", cwd=trainer, code=1)
    assert "use_cpp_kernel is 'on', but loraaccel run was started with auto" in done.stderr
    start(
        "-m", "loraaccel.run", "--use-cpp-kernel", "on", "t.py", "loraaccel.kohya", tmp_path / "b.pt", cwd=trainer
    )  # fmt: skip


class AppliedNetwork(torch.nn.Module):
    times = 0

    def apply_to(self) -> None:
        self.times += 1

    def save_weights(self, file: str, dtype: Any, metadata: dict[str, str]) -> None: ...


@pytest.mark.parametrize("applied", [False, True])
def test_copies_and_pickles_of_the_network_are_the_hosts(applied: bool) -> None:
    from loraaccel import kohya
    from loraaccel.launcher import session as sessions

    network = kohya._adopted(AppliedNetwork(), "networks.lora", sessions.Session("auto"))
    if applied:
        network.apply_to()
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert other.save_weights.network is other
        assert other.apply_to.network is other
        assert other.apply_to.run is None
        other.apply_to()
        assert other.times == (2 if applied else 1)
    assert network.apply_to.run is not None


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"conv_dim": "4", "use_cpp_kernel": "on", "dropout": None}, {"conv_dim": "4", "dropout": None}),
        ({"conv_dim": "4", "dropout": 0.1}, {"conv_dim": "4", "dropout": 0.1}),
        ({"use_cpp_kernel": "on", "base_module": "networks.lora_fa", "dropout": None}, None),
        ({"base_module": "networks.lora_fa", "dropout": 0.1}, None),
        ({"use_cpp_kernel": "on", "dropout": "0.1"}, {"dropout": "0.1"}),  # the user's
        (None, None),
    ],
)
def test_metadata_are_those_of_sd_scripts_module(arguments: Any, written: Any) -> None:
    """sd-scripts lists network_args with its own dropout, and nothing where there are none: so it is without ours."""
    from loraaccel import kohya

    class Network:
        def save_weights(self, file: str, dtype: Any, metadata: dict[str, str]) -> None:
            self.saved = dict(metadata)

        def apply_to(self) -> None: ...

    from loraaccel.launcher import session as sessions

    network = kohya._adopted(Network(), "networks.lora_fa", sessions.Session("off"))
    metadata = {"ss_network_module": "loraaccel.kohya", "ss_network_dim": "4"}
    if arguments is not None:
        metadata["ss_network_args"] = json.dumps(arguments)
    for _ in range(2):  # (the same metadata are given at every save)
        network.save_weights("a.safetensors", None, metadata)
        expected = {} if written is None else {"ss_network_args": json.dumps(written)}
        assert network.saved == {"ss_network_module": "networks.lora_fa", "ss_network_dim": "4", **expected}


def test_the_model_chooses_sd_scripts_module() -> None:
    from loraaccel.kohya import base_module_for

    class Flux: ...

    class Chroma(Flux): ...

    class MMDiT: ...

    class UNet2DConditionModel: ...

    assert [base_module_for(c()) for c in (Flux, Chroma, MMDiT, UNet2DConditionModel)] == [
        "networks.lora_flux", "networks.lora_flux", "networks.lora_sd3", "networks.lora",
    ]  # fmt: skip

"""Starts sd-scripts' trainers in processes of their own, as a user would, and reads what a run left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# (64, not 32: with one channel in each group, group norm would take away what the time embedding adds, and its layers
# would train on the rounding of a gradient that is zero.)
NARROW = "64,64,96,96"
LAUNCHER = ("-m", "loraaccel.run")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "1", "--quiet")
# What every run is given. With an epoch of 40 images, four at a time, ten steps end where an epoch does.
COMMON: Mapping[str, Any] = {
    "caption_extension": ".txt", "resolution": "128,128", "enable_bucket": True, "min_bucket_reso": 64,
    "max_bucket_reso": 128, "train_batch_size": 4, "max_train_steps": 20, "max_data_loader_n_workers": 0,
    "learning_rate": 1e-3, "optimizer_type": "AdamW", "network_module": "networks.lora", "network_dim": 8,
    "network_alpha": 4, "mixed_precision": "no", "sdpa": True, "seed": 7, "output_name": "adapter",
    "save_model_as": "safetensors", "log_with": "tensorboard",
}  # fmt: skip
Options = Mapping[str, Any]


@dataclass
class Run:
    """One run of a training script."""

    code: int
    log: str
    folder: Path
    losses: list[float]  # of each step, as the script logged them

    @property
    def file(self) -> Path:
        return self.folder / "adapter.safetensors"

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found

    @property
    def said(self) -> list[str]:
        """The lines that loraaccel wrote, without its name."""
        return re.findall(r"^loraaccel: (.*)$", self.log, re.MULTILINE)


class Trainer:
    """A checkout of sd-scripts, with a model to train on. Runs of the same command are made once."""

    def __init__(self, checkout: Path, work: Path, runs: Path, widths: str | None) -> None:
        self.checkout, self.work, self.runs, self.widths = checkout, work, runs, widths
        self._made: dict[str, Run] = {}

    def __call__(
        self,
        options: Options | None = None,
        *,
        mode: str | None = None,
        ours: Sequence[str] | None = None,
        start: Sequence[str] = (),
        config: Options | None = None,
        environment: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> Run:
        """The script with COMMON and `options`; under the launcher in `mode`, or with its options `ours`. `config` is
        written to a TOML file, which then holds all options; `start` comes before, `code` is the expected exit code."""
        key = repr((options, mode, ours, start, config, environment))
        if key not in self._made:
            self._made[key] = self._run(options or {}, mode, ours, start, config, environment or {})
        run = self._made[key]
        assert run.code == code, f"exit code {run.code}:\n{run.log[-6000:]}"
        return run

    def _run(
        self, options: Options, mode: str | None, ours: Sequence[str] | None, start: Sequence[str],
        config: Options | None, environment: Mapping[str, str],
    ) -> Run:  # fmt: skip
        folder = self.runs / f"run{len(self._made)}"
        folder.mkdir(parents=True)
        paths = {
            "pretrained_model_name_or_path": self.work / "model", "train_data_dir": self.work / "images",
            "tokenizer_cache_dir": self.work / "tokenizers", "output_dir": folder, "logging_dir": folder / "logs",
        }  # fmt: skip
        given = {**{name: str(path) for name, path in paths.items()}, **COMMON, **options}
        arguments = arguments_of(given)
        if config is not None:
            (folder / "run.toml").write_text(toml_of({**given, **config}))
            arguments = ["--config_file", str(folder / "run.toml")]
        if mode is not None:
            ours = ("--use-cpp-kernel", mode)
        launcher = [] if ours is None else [*LAUNCHER, *ours, "--report", str(folder / "report.json")]
        command = [sys.executable, *start, *launcher, "train_network.py"]
        done = subprocess.run(
            [*command, *arguments], check=False, cwd=self.checkout, text=True, timeout=3000,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._environment(environment),
        )  # fmt: skip
        (folder / "log.txt").write_text(done.stdout)
        return Run(done.returncode, done.stdout, folder, logged_losses(folder / "logs"))

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """No network, no GPU, the same number of threads in every run, as it decides how sums are rounded. One, unless
        the environment says more: two that wait for each other on a busy machine take ten times as long."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        folders = [more.get("PYTHONPATH"), str(HERE / "stand_ins"), os.environ.get("PYTHONPATH")]
        ours = {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "COLUMNS": "250",
        }  # fmt: skip
        widths = {} if self.widths is None else {"LORAACCEL_TEST_WIDTHS": self.widths}
        return {**os.environ, **widths, **more, **ours}

    def forget(self) -> None:
        """Deletes what the runs have written."""
        shutil.rmtree(self.runs, ignore_errors=True)
        self._made.clear()


def made(checkout: Path, folder: Path, widths: str | None) -> Trainer:
    """A trainer with a new model in `folder`, unless there is one already."""
    if not (folder / "model" / "model_index.json").exists():
        command = [sys.executable, str(HERE / "sdscripts_model.py"), str(folder)]
        subprocess.run([*command, *([] if widths is None else ["--widths", widths])], check=True)
    return Trainer(checkout, folder, folder / "runs", widths)


def arguments_of(options: Options) -> list[str]:
    """As on a command line: True is an option without a value, None and False are left out."""
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments += map(str, value if isinstance(value, list | tuple) else [value])
    return arguments


def toml_of(options: Options) -> str:
    """As lora-scripts writes it: flat, without what is not set."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items() if value is not None)


def logged_losses(folder: Path) -> list[float]:
    """loss/current of each step in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = []
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        if "loss/current" in events.Tags()["scalars"]:
            losses += [event.value for event in events.Scalars("loss/current")]
    return losses


def saved_file(path: Path) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Tensors' entries, metadata and data of a .safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    entries = json.loads(content[8 : 8 + length])
    return entries, entries.pop("__metadata__", {}), content[8 + length :]

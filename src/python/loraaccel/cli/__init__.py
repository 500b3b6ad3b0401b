"""Command line: ``loraaccel COMMAND``. Commands are imported when they are called, so that --help is quick."""

from __future__ import annotations

import importlib

import click

from loraaccel import __version__

# name -> (module, line in the overview)
COMMANDS = {
    "demo": ("loraaccel.cli.demo", "Fine-tune a real encoder with and without loraaccel and compare."),
    "bench": ("loraaccel.cli.bench", "Measure this machine and the LoRA layers on it against PEFT."),
    "doctor": ("loraaccel.cli.doctor", "Say what works here, what is missing and what to do about it."),
    "run": ("loraaccel.cli.run", "Run a training script with its LoRA layers in native code."),
    "info": ("loraaccel.cli.info", "Say what an adapter file is, and what is wrong with it."),
    "convert": ("loraaccel.cli.convert", "Write an adapter in another tool's format."),
    "merge": ("loraaccel.cli.merge", "Merge adapters into a base model."),
    "unmerge": ("loraaccel.cli.unmerge", "Take a merge back, byte for byte."),
    "extract": ("loraaccel.cli.extract", "Make an adapter of the difference of two models."),
    "resize": ("loraaccel.cli.resize", "Write an adapter with another rank."),
    "combine": ("loraaccel.cli.combine", "Make one adapter of several."),
    "diff": ("loraaccel.cli.diff", "Compare two adapters by what they do to the weights."),
    "tune": ("loraaccel.cli.tune", "Measure once which kernels are faster here, ours or torch's."),
    "config": ("loraaccel.cli.config", "Print paths for compilers and CMake."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[name][0]), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="loraaccel")
def main() -> None:
    """LoRA kernels in native code.

    Exit codes: 0 ok, 1 failed, 2 bad usage. Example:

        loraaccel doctor --json
    """

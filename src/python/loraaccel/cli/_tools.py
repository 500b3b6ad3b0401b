"""What the commands that make adapters share: sd-scripts' names of options, and a bar."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

PRECISIONS = {"float": "F32", "fp16": "F16", "bf16": "BF16"}
Progress = Callable[[int, int], None]


def both_names(name: str) -> tuple[str, str]:
    """ "--new-rank" as sd-scripts spells it, too."""
    return name, "--" + name[2:].replace("-", "_")


def adapters_option(number: str) -> Callable[[Any], Any]:
    return click.option(
        "-a",
        "--adapter",
        "adapters",
        multiple=True,
        required=True,
        metavar=f"PATH[={number}]",
        help="May be repeated.",
    )


def with_weight(text: str) -> tuple[str, float]:
    """ "path=0.5"; a path may have "=" in it, and one that is there is a path."""
    path, equals, number = text.rpartition("=")
    if equals and not os.path.exists(text):
        try:
            return path, float(number)
        except ValueError:
            pass  # no number: all of it is the path
    return text, 1.0


def result_options(command: Any) -> Any:
    """--format, --dtype or --save_precision, --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output."),
        click.option(
            "--base", default=None, help="Base model, where names fit several: sd15, sd2, sdxl, flux ..."
        ),
        click.option("--to", "to", default=None, help="Format of the result: kohya, peft, diffusers ..."),
        click.option("--dtype", default=None, help="Floating-point tensors as this type: F32, F16, BF16 ..."),
        click.option(
            *both_names("--save-precision"),
            type=click.Choice(list(PRECISIONS)),
            default=None,
            help="The same in sd-scripts' words.",
        ),
    ):
        command = option(command)
    return command


def result_type(dtype: str | None, save_precision: str | None) -> str | None:
    if dtype and save_precision:
        raise click.UsageError("--dtype and --save-precision say the same, expected one of them")
    return PRECISIONS[save_precision] if save_precision else dtype


def one_of(argument: str | None, option: str | None, names: str) -> str:
    if (argument is None) == (option is None):
        raise click.UsageError(f"expected {names}, one of the two")
    return argument if argument is not None else str(option)


def known_format(to: str | None) -> None:
    from loraaccel import adapters

    if to is not None and to not in adapters.formats():
        raise click.UsageError(f"--to is {to!r}, expected one of {', '.join(adapters.formats())}")


@contextlib.contextmanager
def bar(title: str) -> Iterator[Progress]:
    """On standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, count: progress.update(task, completed=done, total=count)


def show(report: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for line in lines:
        click.echo(line)
    for note in report["notes"]:
        click.echo(f"  note: {note}")

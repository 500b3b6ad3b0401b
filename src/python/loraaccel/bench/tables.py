"""The tables that `loraaccel bench` prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from loraaccel.bench.references import REFERENCES
from loraaccel.bench.results import CaseResult, ModelResult, Report, VariantResult
from loraaccel.bench.variants import COMPILED, NAMES, OURS, PEFT
from loraaccel.timing import Spread

TITLES = {
    "qkv": "(a) QKV projection with LoRA",
    "forward": "(b) UNet forward",
    "epoch": "(c) UNet training epoch: forward, backward, AdamW on the adapters",
}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _times(variant: VariantResult | None) -> str:
    if variant is None or variant.samples is None:
        return "not run"
    spread = variant.samples.spread
    share = variant.share_of_fma_ceiling
    lines = [_milliseconds(spread.median)]
    lines.append(f"{_milliseconds(spread.first_quartile)}-{_milliseconds(spread.third_quartile)}")
    lines.append(f"[{_milliseconds(spread.minimum)}, {_milliseconds(spread.maximum)}]")
    if share is not None:
        lines.append(f"{share:.0%} of FMA")
    return "\n".join(lines)


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f}x\n{spread.first_quartile:.2f}-{spread.third_quartile:.2f}"


def _table(row: str, cases: Iterable[CaseResult]) -> Table:
    table = Table(title=TITLES[row], title_justify="left", show_lines=True, caption_justify="left")
    table.add_column("case")
    for name in NAMES:
        table.add_column(name, justify="right")
    table.add_column(f"{PEFT} /\n{OURS}", justify="right")
    table.add_column(f"{COMPILED} /\n{OURS}", justify="right")
    table.add_column("fused\ncalls", justify="right")
    for case in cases:
        table.add_row(
            f"{case.case}\n{case.dtype}",
            *(_times(case.variants.get(name)) for name in NAMES),
            _ratio(case.ratios.get(f"{PEFT}/{OURS}")),
            _ratio(case.ratios.get(f"{COMPILED}/{OURS}")),
            f"{case.fused_calls}" + (f"\n{case.fallback_calls} not" if case.fallback_calls else ""),
        )
    table.caption = REFERENCES[row].sentence()
    return table


def _rows(model: ModelResult) -> str:
    return ", ".join(dict.fromkeys(case.row for case in model.cases))


def _model_lines(model: ModelResult) -> Iterable[str]:
    patch = model.patch
    yield (
        f"{_rows(model)}, {model.dtype} ({model.dtype_note}): {model.base_parameters:,} frozen and "
        f"{model.lora_parameters:,} LoRA parameters; patch() fused {patch['num_fused']} of "
        f"{patch['num_fused'] + patch['num_fallback']} LoRA modules {patch['reasons'] or ''}"
    )
    for reason, name in dict.fromkeys(
        (variant.skipped, name)
        for case in model.cases
        for name, variant in case.variants.items()
        if variant.skipped
    ):
        yield f"  {name} not run: {reason}"
    compiled = [c.variants[COMPILED].first_call_seconds for c in model.cases if COMPILED in c.variants]
    if any(compiled):
        seconds = ", ".join(f"{value:.1f}" for value in compiled if value)
        yield f"  {COMPILED}: first calls took {seconds} s, left out of the times"
    errors = [
        (variant.error / variant.allowed_error, variant.error)
        for variant in (case.variants[OURS] for case in model.cases)
        if variant.error is not None and variant.allowed_error is not None
    ]
    if errors:
        share, error = max(errors)
        yield f"  {OURS}: largest relative error {error:.1e}, {share:.0%} of what is allowed"


def print_report(report: Report, console: Console) -> None:
    """Print machine, ceilings, one table per row, and the failures."""
    machine, ceilings = report.machine, report.ceilings
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['system']}"
    )
    if machine["busy"]:
        console.print(machine["busy"], style="bold red")
    console.print(
        ", ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items())
    )
    for name, fma in ceilings.fma.items():
        console.print(
            f"FMA ceiling {name}: {fma.all_threads_gflops:.0f} GFLOP/s with {ceilings.threads} threads, "
            f"{fma.one_thread_gflops:.0f} with one ({fma.isa})"
        )
    console.print(f"read ceiling: {ceilings.read_gbytes:.1f} GB/s with {ceilings.threads} threads\n")
    for row in dict.fromkeys(case.row for case in report.cases):
        console.print(_table(row, [case for case in report.cases if case.row == row]))
        console.print()
    console.print(
        "Milliseconds: median, quartiles, [extremes] of calls made in turn. Ratios: median and quartiles of the ratio "
        "within a round.\nfrozen: the model without LoRA; in the epoch its backward goes to the latents.\n",
        markup=False,
    )
    for model in report.models:
        for line in _model_lines(model):
            console.print(line, highlight=False, markup=False)
    for rows, config in {_rows(model): model.config for model in report.models}.items():
        text = ", ".join(f"{name}={value}" for name, value in config.items())
        console.print(f"configuration of {rows}: {text}", highlight=False, markup=False)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="bold red", markup=False)
    console.print(f"{report.seconds:.0f} s")

"""Grouped bars of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loraaccel.bench.results import CaseResult, Report
from loraaccel.bench.tables import TITLES
from loraaccel.bench.variants import NAMES, PEFT

BAR_WIDTH = 0.2


def _bars(axes: Any, cases: list[CaseResult]) -> None:
    """Draw each variant relative to the median of PEFT, quartiles as whiskers, the milliseconds written on top."""
    for place, name in enumerate(NAMES):
        for index, case in enumerate(cases):
            samples, peft = case.variants[name].samples, case.variants[PEFT].samples
            if samples is None or peft is None:
                continue
            spread = samples.spread
            low, high = spread.median - spread.first_quartile, spread.third_quartile - spread.median
            bar = axes.bar(
                index + (place - (len(NAMES) - 1) / 2) * BAR_WIDTH,
                spread.median / peft.median,
                BAR_WIDTH,
                color=f"C{place}",
                yerr=[[low / peft.median], [high / peft.median]],
                capsize=2,
            )
            axes.bar_label(bar, [f"{spread.median * 1e3:.3g} ms"], fontsize=6, rotation=90, padding=3)
    axes.set_xticks(
        range(len(cases)), ["\n".join([*case.case.split(", "), case.dtype]) for case in cases], fontsize=7
    )
    axes.set_ylabel("time / median of PEFT")
    axes.margins(y=0.25)


def save_plot(report: Report, path: Path) -> None:
    """Write one panel per row to `path`; its suffix chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = list(dict.fromkeys(case.row for case in report.cases))
    figure, panels = pyplot.subplots(
        len(rows), 1, figsize=(11, 3.6 * len(rows)), squeeze=False, layout="constrained"
    )
    for axes, row in zip(panels[:, 0], rows, strict=True):
        _bars(axes, [case for case in report.cases if case.row == row])
        axes.set_title(TITLES[row], loc="left", fontsize=9)
    panels[0, 0].legend(
        handles=[Patch(color=f"C{i}", label=name) for i, name in enumerate(NAMES)], fontsize=7
    )
    machine = report.machine
    figure.suptitle(
        f"{machine['cpu']}, {machine['threads']} threads, torch {report.versions['torch']}", fontsize=9
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

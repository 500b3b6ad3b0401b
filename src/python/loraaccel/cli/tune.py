"""`loraaccel tune`: measure, once, from where on torch's GEMM is faster than our kernels on this machine."""

from __future__ import annotations

import os
from typing import Any

import click

ROWS = (32, 128, 512, 2048)
WIDTH, RANK = 1024, 8
ROUNDS = 9
SLOW_SECONDS = 0.1  # a round that takes longer is not repeated


@click.command(epilog="Example:  loraaccel tune --json")
@click.option("--reset", is_flag=True, help="Forget all measurements: the built-in model chooses.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def tune(reset: bool, as_json: bool) -> None:
    """Measure on this machine which kernels are faster, ours or torch's, and keep the answer for later processes.

    Takes some seconds; keep the machine quiet. Nothing is ever measured without this command. The answer holds for
    this CPU and these versions of torch and loraaccel, and lies in LORAACCEL_CACHE_DIR (default: the user's cache).
    """
    import json

    from loraaccel import _choice

    if reset:
        _choice.path().unlink(missing_ok=True)
        click.echo(json.dumps({"removed": str(_choice.path())}) if as_json else f"removed {_choice.path()}")
        return
    for name in ("LORAACCEL_FORCE_KERNEL", "LORAACCEL"):
        if os.environ.get(name):
            raise click.UsageError(f"{name} is set, so that nothing would be compared; unset it.")
    directory = _choice.path().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"{directory} cannot be made: {error}. LORAACCEL_CACHE_DIR names another."
        ) from None
    report = measure()
    import torch

    report["file"] = str(_choice.save(torch.__version__, report))
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for name, ratios in report["ratios"].items():
        text = ", ".join(f"{rows} rows {ratio:.2f}" for rows, ratio in ratios.items())
        rows = report["rows"][name]
        choice = "our kernels always" if rows is None else f"torch's GEMM from {rows} rows on"
        click.echo(f"{name:9} time of ours / of torch's: {text}: {choice}")
    click.echo(f"kept in {report['file']}")


def measure() -> dict[str, Any]:
    """Forward and backward of a 1024 -> 1024 layer both ways, interleaved; the medians of pairs decide."""
    import datetime

    import torch

    import loraaccel
    from loraaccel import _choice, _native, _runtime

    _native.load_operators()
    library = _runtime.operators()
    assert library is not None
    before = _choice.in_force(library)
    ratios: dict[str, dict[int, float]] = {}
    ways: dict[str, dict[str, int | None]] = {
        "ours": dict.fromkeys(_choice.DTYPES, None),
        "torch": dict.fromkeys(_choice.DTYPES, 1),
    }
    try:
        for name in _choice.DTYPES:
            dtype = getattr(torch, name)
            ratios[name] = {rows: _ratio(loraaccel, library, ways, dtype, rows) for rows in ROWS}
    finally:
        _choice.force(library, before)
    rows = {name: _choice.decide(r) for name, r in ratios.items()}
    _choice.force(library, rows)
    _choice.source = datetime.date.today().isoformat()
    return {
        "measured": _choice.source,
        "threads": torch.get_num_threads(),
        "rows": rows,
        "ratios": ratios,
    }


def _ratio(loraaccel: Any, library: Any, ways: dict[str, Any], dtype: Any, rows: int) -> float:
    """Time of our kernels over that of torch's."""
    import torch

    from loraaccel import _choice
    from loraaccel.timing import interleave, ratio

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    x = normal(rows, WIDTH).requires_grad_()
    weight, grad = normal(WIDTH, WIDTH) / WIDTH**0.5, normal(rows, WIDTH)
    a, b = normal(RANK, WIDTH).requires_grad_(), normal(WIDTH, RANK).requires_grad_()

    def call(way: str) -> Any:
        def step() -> None:
            _choice.force(library, ways[way])
            loraaccel.lora_linear(x, weight, None, a, b, 1.0).backward(grad)
            x.grad = a.grad = b.grad = None

        return step

    calls = {way: call(way) for way in ways}
    # torch's float16 can take a hundred times as long as ours: one round tells that as well.
    samples = interleave(calls, 1)
    if sum(s.median for s in samples.values()) < SLOW_SECONDS:
        samples = interleave(calls, ROUNDS)
    return ratio(samples["ours"], samples["torch"]).median

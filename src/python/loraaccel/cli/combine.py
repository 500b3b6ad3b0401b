"""`loraaccel combine`: several adapters as one."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import (
    adapters_option,
    bar,
    both_names,
    known_format,
    result_options,
    result_type,
    show,
    with_weight,
)


@click.command(
    epilog="Example:  loraaccel combine both.safetensors -a style.safetensors=0.7 -a face.safetensors=0.3"
)
@click.argument("target", type=click.Path())
@adapters_option("WEIGHT")
@click.option(
    *both_names("--new-rank"),
    type=click.IntRange(min=1),
    default=None,
    help="Approximate the sum with this rank; default: exact, of all ranks together.",
)
@click.option(*both_names("--new-conv-rank"), type=click.IntRange(min=1), default=None)
@click.option(
    *both_names("--dynamic-method"), type=click.Choice(["sv_ratio", "sv_fro", "sv_cumulative"]), default=None
)
@click.option(*both_names("--dynamic-param"), type=float, default=None)
@click.option("--verbose", is_flag=True, help="A line for each layer.")
@result_options
def combine(
    target: str,
    adapters: tuple[str, ...],
    new_rank: int | None,
    new_conv_rank: int | None,
    dynamic_method: str | None,
    dynamic_param: float | None,
    verbose: bool,
    save_precision: str | None,
    dtype: str | None,
    to: str | None,
    base: str | None,
    as_json: bool,
) -> None:
    """Write TARGET, one adapter that does what several do together: the weighted sum of their updates.

    The sum is exact, of the adapters' ranks together, unless --new-rank approximates it; the error is then said. A
    failed run leaves TARGET as it was."""
    from loraaccel import adapters as tools

    known_format(to)
    if (dynamic_method is None) != (dynamic_param is None):
        raise click.UsageError("--dynamic-method and --dynamic-param go together")
    if new_rank is None and (new_conv_rank is not None or dynamic_method is not None):
        raise click.UsageError("--new-conv-rank and --dynamic-method need --new-rank")
    dtype = result_type(dtype, save_precision)
    with one_sentence(), bar("combining") as progress:
        report = tools.combine(
            [with_weight(text) for text in adapters],
            target,
            rank=new_rank,
            conv_rank=new_conv_rank,
            method=dynamic_method,
            param=dynamic_param,
            format=to,
            dtype=dtype,
            base=base,
            progress=progress,
        )
    ranks = sorted({layer.rank for layer in report.layers if layer.rank})
    span = f"rank {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}" if ranks else "no rank"
    lines = [
        f"{len(report.layers)} layers of {span} from {len(adapters)} adapters; written: {', '.join(report.paths)}",
        f"  largest error of a layer: {report.largest_error:.3g} of the update's norm",
    ]
    for layer in report.layers if verbose else []:
        sources = ", ".join(str(i + 1) for i in layer.sources)
        lines.append(
            f"  {layer.component}.{layer.path}: {layer.kind}, rank {layer.rank}, of {sources}, error {layer.error:.3g}"
        )
    show(report.as_dict(), as_json, lines)

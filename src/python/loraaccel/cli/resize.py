"""`loraaccel resize`: an adapter of another rank."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import bar, both_names, known_format, one_of, result_options, result_type, show


@click.command(epilog="Example:  loraaccel resize style.safetensors style-16.safetensors --new-rank 16")
@click.argument("source", required=False, type=click.Path(exists=True))
@click.argument("target", required=False, type=click.Path())
@click.option("--model", type=click.Path(exists=True), default=None, help="SOURCE in sd-scripts' words.")
@click.option(*both_names("--save-to"), type=click.Path(), default=None, help="TARGET in sd-scripts' words.")
@click.option(*both_names("--new-rank"), type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    *both_names("--new-conv-rank"),
    type=click.IntRange(min=1),
    default=None,
    help="Of weights with four dimensions, 1x1 convolutions too; default: the same.",
)
@click.option(
    *both_names("--dynamic-method"),
    type=click.Choice(["sv_ratio", "sv_fro", "sv_cumulative"]),
    default=None,
    help="Choose each layer's rank, --new-rank at most.",
)
@click.option(*both_names("--dynamic-param"), type=float, default=None, help="Of the method: 4, 0.9, 0.8 ...")
@click.option("--rebuild", is_flag=True, help="Make LoRA of LoHa and LoKr layers.")
@click.option("--allow-unmatched", is_flag=True, help="Leave out tensors that match no layer, and go on.")
@click.option(
    "--device", default=None, expose_value=False, help="No effect: sd-scripts' command lines may have it."
)
@click.option("--verbose", is_flag=True, help="A line for each layer.")
@result_options
def resize(
    source: str | None,
    target: str | None,
    model: str | None,
    save_to: str | None,
    new_rank: int,
    new_conv_rank: int | None,
    dynamic_method: str | None,
    dynamic_param: float | None,
    rebuild: bool,
    allow_unmatched: bool,
    verbose: bool,
    save_precision: str | None,
    dtype: str | None,
    to: str | None,
    base: str | None,
    as_json: bool,
) -> None:
    """Write the adapter SOURCE with another rank as TARGET: the best approximation of each layer's update.

    Options have sd-scripts' names as well, so that a script for its resize_lora.py needs only another program. The
    type of the numbers stays unless it is given. A failed run leaves TARGET as it was."""
    from loraaccel import adapters

    if model is not None and save_to is None and source is not None and target is None:
        source, target = None, source
    start = one_of(source, model, "SOURCE or --model")
    end = one_of(target, save_to, "TARGET or --save-to")
    known_format(to)
    if (dynamic_method is None) != (dynamic_param is None):
        raise click.UsageError("--dynamic-method and --dynamic-param go together")
    dtype = result_type(dtype, save_precision)
    with one_sentence(), bar("resizing") as progress:
        report = adapters.resize(
            start,
            end,
            new_rank,
            conv_rank=new_conv_rank,
            method=dynamic_method,
            param=dynamic_param,
            rebuild=rebuild,
            format=to,
            dtype=dtype,
            base=base,
            allow_unmatched=allow_unmatched,
            progress=progress,
        )
    ranks = sorted({layer.new_rank for layer in report.layers})
    retained = [layer.fro_retained for layer in report.layers]
    lines = [
        f"{len(report.layers)} layers of rank {max(x.old_rank for x in report.layers)} at most are of rank "
        f"{ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}; written: {', '.join(report.paths)}",
        f"  Frobenius norm retained: {sum(retained) / len(retained):.2%} on average, {min(retained):.2%} at least",
    ]
    lines += [
        f"  {layer.component}.{layer.path}: rank {layer.old_rank} -> {layer.new_rank}, alpha {layer.alpha:.6g}, "
        f"sum(S) retained {layer.sum_retained:.1%}, fro retained {layer.fro_retained:.1%}, "
        f"max(S) ratio {layer.max_ratio:.1f}"
        for layer in (report.layers if verbose else [])
    ]
    lines += [f"  as it was: {name}" for name in report.kept]
    show(report.as_dict(), as_json, lines)

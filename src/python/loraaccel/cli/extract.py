"""`loraaccel extract`: the difference of two models as an adapter."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import bar, both_names, known_format, one_of, result_options, result_type, show


@click.command(
    epilog="Example:  loraaccel extract base.safetensors tuned.safetensors lora.safetensors --dim 32"
)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[ORIGINAL TUNED TARGET]")
@click.option(
    *both_names("--model-org"), default=None, type=click.Path(), help="ORIGINAL in sd-scripts' words."
)
@click.option(
    *both_names("--model-tuned"), default=None, type=click.Path(), help="TUNED in sd-scripts' words."
)
@click.option(*both_names("--save-to"), default=None, type=click.Path(), help="TARGET in sd-scripts' words.")
@click.option("--dim", "--rank", "rank", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    *both_names("--conv-dim"), "conv_rank", type=click.IntRange(min=1), default=None, help="Convolutions too."
)
@click.option("--exact", is_flag=True, help="Decompose large differences exactly; slower.")
@click.option(
    *both_names("--clamp-quantile"),
    type=float,
    default=None,
    help="Clamp factors to this quantile of their numbers, as sd-scripts does with 0.99; default: no.",
)
@click.option(
    *both_names("--min-diff"),
    type=float,
    default=0.0,
    show_default=True,
    help="Leave out text encoders that changed by no more; sd-scripts has 0.01.",
)
@click.option(
    "--layers", default=None, metavar="REGEX", help="Other layers than the usual ones, by their paths."
)
@click.option("--allow-unmatched", is_flag=True, help="Leave out layers that TUNED has not, and go on.")
@click.option(
    "--sdxl", is_flag=True, expose_value=False, help="No effect: sd-scripts' command lines may have it."
)
@click.option(
    "--v2", is_flag=True, expose_value=False, help="No effect: sd-scripts' command lines may have it."
)
@click.option(
    "--device", default=None, expose_value=False, help="No effect: sd-scripts' command lines may have it."
)
@click.option("--verbose", is_flag=True, help="A line for each layer.")
@result_options
def extract(
    paths: tuple[str, ...],
    model_org: str | None,
    model_tuned: str | None,
    save_to: str | None,
    rank: int,
    conv_rank: int | None,
    exact: bool,
    clamp_quantile: float | None,
    min_diff: float,
    layers: str | None,
    allow_unmatched: bool,
    verbose: bool,
    save_precision: str | None,
    dtype: str | None,
    to: str | None,
    base: str | None,
    as_json: bool,
) -> None:
    """Write TARGET, a LoRA of what the model TUNED has more than ORIGINAL.

    Models are .safetensors files or folders of them. A layer at a time is in memory. A failed run leaves TARGET as it
    was."""
    from loraaccel import adapters

    if len(paths) not in (0, 3):
        raise click.UsageError(f"expected ORIGINAL, TUNED and TARGET, found {len(paths)} paths")
    first, second, third = paths or (None, None, None)
    original = one_of(first, model_org, "ORIGINAL or --model-org")
    tuned = one_of(second, model_tuned, "TUNED or --model-tuned")
    target = one_of(third, save_to, "TARGET or --save-to")
    known_format(to)
    dtype = result_type(dtype, save_precision)
    with one_sentence(), bar("extracting") as progress:
        report = adapters.extract(
            original,
            tuned,
            target,
            rank,
            conv_rank=conv_rank,
            exact=exact,
            clamp_quantile=clamp_quantile,
            min_diff=min_diff,
            layers=layers,
            base=base,
            format=to,
            dtype=dtype,
            allow_unmatched=allow_unmatched,
            progress=progress,
        )
    lines = [
        f"{len(report.layers)} layers of {report.adapter.base or 'a model without a table'}, {len(report.same)} are "
        f"alike; written: {', '.join(report.paths)}",
        f"  left out by the rank: {report.error:.2%} of the difference's norm",
    ]
    for layer in report.layers if verbose else []:
        how = "exact" if layer.exact else "randomised"
        lines.append(
            f"  {layer.component}.{layer.path}: rank {layer.rank}, norm {layer.norm:.4g}, error {layer.error:.2%} "
            f"({how})"
        )
    show(report.as_dict(), as_json, lines)

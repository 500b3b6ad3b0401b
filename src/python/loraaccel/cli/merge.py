"""`loraaccel merge`: adapters into a base model."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import adapters_option, bar, with_weight


@click.command(
    epilog="Example:  loraaccel merge model.safetensors merged.safetensors -a style.safetensors -a face.safetensors=0.6"
)
@click.argument("base", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@adapters_option("STRENGTH")
@click.option(
    "--dtype", default=None, help="Floating-point tensors of the result as this type: F32, F16, BF16 ..."
)
@click.option(
    "--keep",
    type=click.Path(),
    default=None,
    help="For the original bytes, for `loraaccel unmerge`: a file, or a folder where BASE is one.",
)
@click.option("--allow-unmatched", is_flag=True, help="Leave out what matches no layer, and go on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def merge(
    base: str,
    target: str,
    adapters: tuple[str, ...],
    dtype: str | None,
    keep: str | None,
    allow_unmatched: bool,
    as_json: bool,
) -> None:
    """Write TARGET, the base model BASE with adapters merged into its weights.

    BASE is a .safetensors file or a folder of them (shards, a diffusers pipeline). Sums are made in float32 and rounded
    once; one tensor at a time is in memory. A failed run leaves TARGET as it was."""
    import json
    from dataclasses import asdict

    from loraaccel.adapters import merge as run

    with one_sentence(), bar("merging") as progress:
        report = run(
            base,
            [with_weight(text) for text in adapters],
            target,
            dtype=dtype,
            keep=keep,
            allow_unmatched=allow_unmatched,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    click.echo(f"{report.changed} of {report.tensors} tensors changed; written: {', '.join(report.paths)}")
    for layer in report.unused:
        click.echo(f"  not in the base model: {layer}")
    for note in report.notes:
        click.echo(f"  note: {note}")

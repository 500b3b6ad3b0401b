"""`loraaccel unmerge`: the base model again."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence


@click.command(epilog="Example:  loraaccel unmerge merged.safetensors kept.safetensors model.safetensors")
@click.argument("merged", type=click.Path(exists=True))
@click.argument("kept", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def unmerge(merged: str, kept: str, target: str, as_json: bool) -> None:
    """Write TARGET, the base model that MERGED was made of, byte for byte. KEPT is what `loraaccel merge --keep`
    wrote: a file, or a folder where MERGED is one. Nothing is subtracted, which would round. A failed run
    leaves TARGET as it was."""
    import json
    from dataclasses import asdict

    from loraaccel.adapters import unmerge as run

    with one_sentence():
        report = run(merged, kept, target)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
        return
    click.echo(f"{report.restored} of {report.tensors} tensors restored; written: {report.path}")

"""`loraaccel convert`: an adapter in another tool's format."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import known_format


@click.command(
    epilog="Example:  loraaccel convert style.safetensors style-diffusers.safetensors --to diffusers"
)
@click.argument("source", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@click.option(
    "--to", "to", required=True, help="kohya, peft, diffusers, comfy, ai-toolkit, onetrainer, lycoris ..."
)
@click.option(
    "--base", default=None, help="Base model, where names fit several: sd15, sd2, sdxl, flux, sd3 ..."
)
@click.option("--component", default=None, help="Component of a PEFT folder: unet, text_encoder_2 ...")
@click.option("--dtype", default=None, help="Floating-point tensors as this type: F32, F16, BF16 ...")
@click.option("--fold-alpha", is_flag=True, help="Multiply the factors into the weights.")
@click.option(
    "--rescue", is_flag=True, help="With --dtype F16: keep small numbers by powers of two from alpha."
)
@click.option("--allow-unmatched", is_flag=True, help="Leave out tensors that match no layer, and go on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def convert(
    source: str,
    target: str,
    to: str,
    base: str | None,
    component: str | None,
    dtype: str | None,
    fold_alpha: bool,
    rescue: bool,
    allow_unmatched: bool,
    as_json: bool,
) -> None:
    """Write the adapter SOURCE, a file or folder of any tool, as TARGET in another format.

    TARGET is a folder for --to peft, else a file. Where only names change, the tensors' bytes are what they were. A
    failed run leaves TARGET as it was."""
    import json

    from loraaccel import adapters

    known_format(to)
    with one_sentence():
        adapter, written = adapters.convert(
            source,
            target,
            to,
            base=base,
            component=component,
            dtype=dtype,
            fold_alpha=fold_alpha,
            rescue=rescue,
            allow_unmatched=allow_unmatched,
        )
    if as_json:
        report = {
            "base": adapter.base,
            "from": adapter.format,
            "to": to,
            "paths": written.paths,
            "unused": adapter.unused,
            "notes": written.notes,
            "model_hash": written.model_hash,
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(
        f"{source}: {adapter.format}, {adapter.base or 'no table'}; written: {', '.join(written.paths)}"
    )
    for key in adapter.unused:
        click.echo(f"  left out: {key}")
    for note in written.notes:
        click.echo(f"  note: {note}")

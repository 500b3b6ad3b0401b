"""`loraaccel info`: what is this file?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from loraaccel.cli._adapter_errors import one_sentence

if TYPE_CHECKING:
    from loraaccel.adapters import FileSummary

METADATA_WIDTH = 100


def _say(found: FileSummary) -> None:
    click.echo(f"{found.path}: no adapter, but {found.what}{f' ({found.base})' if found.base else ''}")
    types = ", ".join(f"{name} ({count})" for name, count in found.dtypes.items())
    click.echo(f"  {found.tensors} tensors, {found.numbers} numbers{': ' if types else ''}{types}")
    _say_metadata(found.metadata)


def _say_metadata(metadata: dict[str, str]) -> None:
    for name, value in metadata.items():
        click.echo(f"  {name}: {value if len(value) <= METADATA_WIDTH else value[:METADATA_WIDTH] + ' ...'}")


@click.command(epilog="Example:  loraaccel info style.safetensors")
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--base", default=None, help="Base model, where names fit several: sd15, sd2, sdxl, flux, sd3 ..."
)
@click.option("--layers", is_flag=True, help="A line for each layer: rank, factor and why, norm.")
@click.option("--no-norms", is_flag=True, help="Leave out the norms of the updates, which read every number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def info(path: str, base: str | None, layers: bool, no_norms: bool, as_json: bool) -> None:
    """Say what an adapter file or folder is: base model, kinds, ranks, factors, norms, hashes, metadata, problems. Of
    another safetensors file: what it is instead."""
    import json

    from loraaccel.adapters import Summary, file_summary, summary
    from loraaccel.safetensors import SafetensorError

    with one_sentence():
        try:
            found: Summary = summary(path, base=base, norms=not no_norms)
        except SafetensorError:
            other = file_summary(path)
            if other is None:
                raise
            if as_json:
                click.echo(json.dumps(other.as_dict(), indent=2))
            else:
                _say(other)
            return
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    also = f" (or {', '.join(found.also_fits)})" if found.also_fits else ""
    click.echo(f"{path}: {found.format} format, base model {found.base or 'without a table'}{also}")
    for title, counts in (
        ("components", found.components),
        ("kinds", found.kinds),
        ("ranks", found.ranks),
        ("factors", found.scales),
        ("from", found.scale_rules),
        ("types", found.dtypes),
    ):
        click.echo(f"  {title:11}" + ", ".join(f"{name} ({count})" for name, count in counts.items()))
    if found.norms:
        click.echo("  norms      " + ", ".join(f"{name} {norm:.4g}" for name, norm in found.norms.items()))
    for name, value in found.hashes.items():
        claimed = found.metadata.get(name)
        note = "" if claimed in (None, value) else f"  (its metadata says {claimed})"
        click.echo(f"  {name}  {value}{note}")
    _say_metadata(found.metadata)
    for layer in found.layers if layers else []:
        norm = "" if layer["norm"] is None else f", norm {layer['norm']:.4g}"
        what = f"{layer['kind']}, rank {layer['rank']}{norm}: {layer['scale_text']}"
        click.echo(f"  {layer['component']}.{layer['path']}: {what}")
    for problem in found.problems:
        click.echo(f"  problem: {problem}")

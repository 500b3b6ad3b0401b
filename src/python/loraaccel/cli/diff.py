"""`loraaccel diff`: two adapters compared by what they do."""

from __future__ import annotations

import click

from loraaccel.cli._adapter_errors import one_sentence
from loraaccel.cli._tools import bar, show

SHOWN = 10


@click.command(epilog="Example:  loraaccel diff style.safetensors style-16.safetensors")
@click.argument("first", type=click.Path(exists=True))
@click.argument("second", type=click.Path(exists=True))
@click.option("--base", default=None, help="Base model, where names fit several: sd15, sd2, sdxl, flux ...")
@click.option("--verbose", is_flag=True, help="A line for each layer; else for those that differ most.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def diff(first: str, second: str, base: str | None, verbose: bool, as_json: bool) -> None:
    """Compare the adapters FIRST and SECOND by their updates of every layer's weight, of whatever formats and ranks."""
    from loraaccel import adapters

    with one_sentence(), bar("comparing") as progress:
        report = adapters.diff(first, second, base=base, progress=progress)
    lines = [
        f"{len(report.layers)} layers: the updates differ by {report.relative:.3g} of their norm, "
        f"{report.largest:.3g} in the layer that differs most"
    ]
    layers = report.layers if verbose else sorted(report.layers, key=lambda x: -x.relative)[:SHOWN]
    for layer in layers:
        vectors = "".join(f", {role} by {value:.3g}" for role, value in layer.vectors.items())
        lines.append(
            f"  {layer.component}.{layer.path}: norms {layer.norm_a:.4g} and {layer.norm_b:.4g}, relative "
            f"{layer.relative:.3g}, cosine {layer.cosine:.6f}{vectors}"
        )
    lines += [f"  in the first only: {name}" for name in report.only_a]
    lines += [f"  in the second only: {name}" for name in report.only_b]
    show(report.as_dict(), as_json, lines)

"""The difference of two models as an adapter."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loraaccel.adapters._arrays import default_framework
from loraaccel.adapters._entry import Adapter, Entry
from loraaccel.adapters._factors import numbers
from loraaccel.adapters._models import NOT_USUAL, OF_BLOCKS, USUAL, Layer, Model, Place, open_model
from loraaccel.adapters._ranks import check_rank, choose_rank
from loraaccel.adapters._resize import Path, written_to
from loraaccel.adapters._svd import SMALL_SIDE, balanced, matrix_svd, random_svd, residual
from loraaccel.adapters._workers import Progress, each

SCALES = (".scale_weight", ".weight_scale", ".weight_scale_inv")


@dataclass
class ExtractedLayer:
    """One layer's difference and how well its factors give it."""

    component: str
    path: str
    rank: int
    norm: float
    """Of the difference, Frobenius."""
    largest: float
    """Largest number of the difference."""
    error: float
    """|difference - B A| / |difference|, of B and A as they are stored, without a cast that ``dtype`` asks for."""
    exact: bool
    """Decomposed exactly; else by random combinations of columns."""


@dataclass
class Extracted:
    """What an extraction did."""

    adapter: Adapter
    layers: list[ExtractedLayer]
    same: list[str]
    """Layers that the two models have alike."""
    paths: list[str]
    notes: list[str]

    @property
    def error(self) -> float:
        """Of all layers together."""
        norm = np.sqrt(sum(x.norm**2 for x in self.layers))
        return float(np.sqrt(sum((x.error * x.norm) ** 2 for x in self.layers)) / norm) if norm > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All but the tensors."""
        return {
            "base": self.adapter.base,
            "error": self.error,
            "layers": [asdict(layer) for layer in self.layers],
            "same": self.same,
            "paths": self.paths,
            "notes": self.notes,
        }


def extract(
    original: Path,
    tuned: Path,
    target: Path | None = None,
    rank: int = 4,
    *,
    conv_rank: int | None = None,
    exact: bool = False,
    clamp_quantile: float | None = None,
    min_diff: float = 0.0,
    layers: str | None = None,
    base: str | None = None,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    allow_unmatched: bool = False,
    progress: Progress | None = None,
) -> Extracted:
    """A LoRA of what ``tuned`` has more than ``original``; written to ``target`` where it is given.

    The models are .safetensors files or folders of them (shards, diffusers pipelines), of any floating-point types,
    read a layer at a time. Layers: those that sd-scripts trains, attention and feed-forward layers, and with
    ``conv_rank`` the others of the U-Net's blocks, with that rank for windows above 1x1; of models without a name
    table all matrices but embeddings, norms and heads. ``layers``, a regular expression over the native paths,
    chooses others. No layer gets more rank than its difference has. alpha is the rank; B and A are of one size,
    sqrt(S) in each.

    Differences whose shorter side is above 512 are decomposed by random combinations of columns, a fixed seed, or
    with ``exact`` exactly; ``ExtractedLayer.error`` is what is left out, measured. ``clamp_quantile`` (0.99 in
    sd-scripts) clamps U S and V^T to that quantile of their numbers; the error says what that costs. Text encoders
    are left out where no number of theirs changed by more than ``min_diff`` (0.01 in sd-scripts). ``format``:
    "kohya", or "peft" for models without a table. ``dtype``: F32.

    Raises ValueError naming the tensor: numbers that are not finite, shapes that differ, layers that one of the
    models has not (``allow_unmatched`` goes on without them), quantised weights; the target is then what it was."""
    rank = check_rank("rank", rank)
    if conv_rank is not None:
        check_rank("conv_rank", conv_rank)
    if clamp_quantile is not None and not 0 < clamp_quantile <= 1:
        raise ValueError(f"clamp_quantile is {clamp_quantile}, expected a number above 0 and at most 1")
    if not min_diff >= 0:
        raise ValueError(f"min_diff is {min_diff}, expected 0 or more")
    framework = default_framework()
    before = open_model(original, base, framework)
    after = open_model(tuned, before.base, framework)
    chosen = _chosen(before, conv_rank is not None, layers)
    missing = [place for layer, place in chosen.items() if layer not in after.layers]
    if missing and not allow_unmatched:
        raise ValueError(
            f"{tuned} has no layer for {len(missing)} of {original}, as for {missing[0].key}, expected two models of "
            "one architecture and one spelling"
        )
    pairs = [(layer, place, after.layers[layer]) for layer, place in chosen.items() if layer in after.layers]
    if not pairs:
        raise ValueError(f"{original} and {tuned} have no layer in common to extract an adapter from")
    work = functools.partial(
        _extract_layer,
        rank=rank,
        conv_rank=conv_rank or rank,
        exact=exact,
        clamp=clamp_quantile,
        framework=framework,
    )
    results = each(work, pairs, len(pairs), progress)
    notes = [f"{place.key} is in {original} only" for place in missing]
    found = [(entry, layer, more) for entry, layer, more in results if entry is not None]
    texts = [layer for _, layer, _ in found if layer.component.startswith("text_encoder")]
    if texts and max(layer.largest for layer in texts) <= min_diff:
        largest = max(layer.largest for layer in texts)
        notes.append(f"text encoders are left out: none of their numbers changed by more than {largest:.3g}")
        found = [x for x in found if not x[1].component.startswith("text_encoder")]
    if not found:
        raise ValueError(
            f"{original} and {tuned} are alike in all {len(pairs)} layers, there is nothing to extract"
        )
    notes += [note for _, _, more in found for note in more]
    entries = [entry for entry, _, _ in found]
    spelling = format or ("kohya" if before.base else "peft")
    adapter = Adapter(entries, before.base, spelling, _about(before.base, rank, conv_rank))
    written = written_to(adapter, target, spelling, dtype)
    same = [f"{layer.component}.{layer.path}" for entry, layer, _ in results if entry is None]
    return Extracted(adapter, [layer for _, layer, _ in found], same, written.paths, notes + written.notes)


def _chosen(model: Model, convolutions: bool, pattern: str | None) -> dict[Layer, Place]:
    if pattern is not None:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"layers is {pattern!r}, which is no regular expression: {error}") from error
        chosen = {k: v for k, v in model.layers.items() if wanted.search(k.path) and len(v.shape) in (2, 4)}
        if not chosen:
            raise ValueError(
                f"layers is {pattern!r}, which no layer matches, as {next(iter(model.layers), None)}"
            )
        return chosen

    def usual(layer: Layer, place: Place) -> bool:
        window = place.shape[2:]
        if len(place.shape) not in (2, 4) or (window not in ((), (1, 1)) and not convolutions):
            return False
        if not model.base:
            return not NOT_USUAL.search(layer.path)
        return bool(USUAL.search(layer.path) or (convolutions and OF_BLOCKS.search(layer.path)))

    return {layer: place for layer, place in model.layers.items() if usual(layer, place)}


def _weight(place: Place, framework: str) -> np.ndarray:
    stem = place.key.removesuffix(".weight")
    there = place.file.keys()
    for ending in SCALES:
        if stem + ending in there:
            raise ValueError(
                f"{place.name} is quantised, with {stem + ending} as its scale, expected plain numbers"
            )
    array = place.file.get_tensor(place.key)
    floating = array.dtype.is_floating_point if framework == "pt" else array.dtype.kind in "fV"
    if not floating:
        raise ValueError(f"{place.name} is of type {array.dtype}, expected floating-point numbers")
    part = array if place.rows == 0 else array[place.row : place.row + place.rows]
    return numbers(part, place.name)


def _extract_layer(
    pair: tuple[Layer, Place, Place],
    rank: int,
    conv_rank: int,
    exact: bool,
    clamp: float | None,
    framework: str,
) -> tuple[Entry | None, ExtractedLayer, list[str]]:
    layer, old, new = pair
    if old.shape != new.shape:
        raise ValueError(
            f"{new.name} has shape {list(new.shape)}, and {old.name} {list(old.shape)}, expected one shape"
        )
    difference = _weight(new, framework) - _weight(old, framework)
    shape = difference.shape
    matrix = difference.reshape(shape[0], -1)
    norm = float(np.sqrt(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64)))
    largest = float(np.abs(matrix).max(initial=0))
    info = ExtractedLayer(layer.component, layer.path, 0, norm, largest, 0.0, True)
    if largest == 0:
        return None, info, []
    window = shape[2:]
    limit = min(conv_rank if window not in ((), (1, 1)) else rank, *matrix.shape)
    small = min(matrix.shape) <= max(SMALL_SIDE, 2 * limit)
    info.exact = exact or small
    # relative: a difference may be small, and is no zero
    keep = functools.partial(_relative_rank, limit=limit)
    try:
        if info.exact:
            _, (up, down) = matrix_svd(matrix, keep)
        else:
            values, (up, down) = random_svd(matrix, limit)
            k = keep(values)
            up, down = up[:, :k], down[:k]
    except np.linalg.LinAlgError as error:
        raise ValueError(f"{old.name}: the singular values cannot be computed: {error}") from error
    if clamp is None:
        up, down = balanced((up, down))
    else:
        limit_value = float(np.quantile(np.concatenate([up.ravel(), down.ravel()]), clamp))
        up, down = np.clip(up, -limit_value, limit_value), np.clip(down, -limit_value, limit_value)
    up, down = up.astype(np.float32), down.astype(np.float32)
    info.rank = down.shape[0]
    info.error = residual(matrix, up, down) / norm
    four = [1, 1] if len(shape) == 4 else []
    tensors = {
        "lora_down": _array(down.reshape(info.rank, *shape[1:]), framework),
        "lora_up": _array(up.reshape(shape[0], info.rank, *four), framework),
    }
    native = layer.native_rows * shape[0] // layer.rows if layer.rows else shape[0]
    rows = [] if layer.whole else [(0, layer.native_row * shape[0] // layer.rows, shape[0])]
    entry = Entry(
        layer.component,
        layer.path,
        tensors,
        alpha=float(info.rank),
        rows=rows,
        native_rows=native,
        kind="lora",
        rank=info.rank,
    )
    return entry, info, []


def _relative_rank(values: np.ndarray, limit: int) -> int:
    return choose_rank(values / values[0] if values[0] > 0 else values, limit)


def _array(values: np.ndarray, framework: str) -> Any:
    values = np.ascontiguousarray(values)
    if framework == "np":
        return values
    import torch

    return torch.from_numpy(values)


def _about(base: str, rank: int, conv_rank: int | None) -> dict[str, str]:
    """The least that sd-scripts writes."""
    import json

    arguments = {} if conv_rank is None else {"conv_dim": str(conv_rank), "conv_alpha": str(float(conv_rank))}
    versions = {"sd15": "sd_v1", "sd2": "sd_v2", "sdxl": "sdxl_base_v1-0", "flux": "flux1", "sd3": "sd3"}
    modules = {"flux": "networks.lora_flux", "sd3": "networks.lora_sd3"}
    known = {
        "ss_v2": str(base == "sd2"),
        "ss_base_model_version": versions.get(base, base),
        "ss_network_module": modules.get(base, "networks.lora"),
        "ss_network_args": json.dumps(arguments),
    }
    return {**(known if base else {}), "ss_network_dim": str(rank), "ss_network_alpha": str(float(rank))}

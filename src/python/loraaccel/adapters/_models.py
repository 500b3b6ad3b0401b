"""Base models' tensors, by the layers that they belong to."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loraaccel import _core
from loraaccel.safetensors._open import safe_open

# What checkpoints put before the layers of a component, and which column of the name table spells the rest
# (src/data/names: lines "checkpoint"; a test compares the two).
CHECKPOINTS = {
    "unet": [("model.diffusion_model.", "native"), ("", "native"), ("", "diffusers"), ("unet.", "diffusers")],
    "transformer": [
        ("model.diffusion_model.", "native"),
        ("", "native"),
        ("", "diffusers"),
        ("transformer.", "diffusers"),
    ],
    "text_encoder": [
        ("cond_stage_model.transformer.", "native"),
        ("cond_stage_model.model.", "openclip"),
        ("conditioner.embedders.0.transformer.", "native"),
        ("text_encoders.clip_l.transformer.", "native"),
        ("text_encoder.", "native"),
        ("", "native"),
        ("", "short"),
    ],
    "text_encoder_2": [
        ("conditioner.embedders.1.model.", "openclip"),
        ("text_encoders.clip_g.transformer.", "native"),
        ("text_encoders.t5xxl.transformer.", "native"),
        ("text_encoder_2.", "native"),
        ("", "native"),
    ],
    "text_encoder_3": [
        ("text_encoders.t5xxl.transformer.", "native"),
        ("text_encoder_3.", "native"),
        ("", "native"),
    ],
}

# Layers that sd-scripts trains: attention and feed-forward layers, and with a rank for convolutions the others of the
# U-Net's blocks.
USUAL = re.compile(
    r"\.transformer_blocks\.|\.proj_(in|out)$|^(double|single|joint)_blocks\.|\.self_attn\.|\.mlp\.|^encoder\.block\."
)
OF_BLOCKS = re.compile(
    r"\.(in_layers|out_layers|emb_layers)\.\d+$|\.skip_connection$|\.op$|^output_blocks\.\d+\.\d+\.conv$"
)
NOT_USUAL = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b|norm|\bln_", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """Rows [native_row, native_row + rows) of a layer; native_rows: of the whole of it, 0 where unknown."""

    component: str
    path: str
    native_row: int = 0
    rows: int = 0
    native_rows: int = 0

    @property
    def whole(self) -> bool:
        return self.rows == self.native_rows


@dataclass(frozen=True)
class Place:
    """Where the weight of a layer lies: rows [row, row + rows) of a tensor; rows 0: all of them."""

    file: safe_open
    path: str
    key: str
    row: int
    rows: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.path}: {self.key}"


@dataclass
class Model:
    """A base model: the tensor of every layer."""

    base: str
    layers: dict[Layer, Place]


@dataclass
class _Tensor:
    file: safe_open
    path: str
    component: str
    key: str
    shape: tuple[int, ...]


def open_model(path: str | os.PathLike[str], base: str | None, framework: str) -> Model:
    """A .safetensors file, or a folder of them (shards, a diffusers pipeline). ``base``: its name table, "" for none,
    None to find it out. OSError and SafetensorError as of ``safe_open``; ValueError for a folder without files."""
    tensors = list(tensors_of(Path(path), framework))
    if base is None:
        base = recognise(tensors)
    elif base and base not in _core.adapter_bases():
        raise ValueError(f"base is {base!r}, expected one of {', '.join(_core.adapter_bases())}")
    if not base:
        stems = [(t, t.key.removesuffix(".weight")) for t in tensors if t.key.endswith(".weight")]
        return Model(
            "", {Layer("model", stem): Place(t.file, t.path, t.key, 0, 0, t.shape) for t, stem in stems}
        )
    return Model(base, _layers(tensors, base))


def tensors_of(root: Path, framework: str) -> Iterable[_Tensor]:
    files = [root] if not root.is_dir() else sorted(root.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"{root} is a folder without a .safetensors file, expected a base model")
    for path in files:
        component = "" if path.parent == root or path == root else path.parent.name
        file = safe_open(path, framework)
        for key in file.keys():  # noqa: SIM118  (a method, not a dict)
            yield _Tensor(file, str(path), component, key, tuple(file.get_slice(key).get_shape()))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return file.metadata() or {}


def _names(base: str) -> dict[tuple[str, str], dict[str, list[tuple[str, int, int, int, int]]]]:
    """By component and column: a spelling -> (native path, row, native_row, rows, native rows) of each piece."""
    spelled: dict[tuple[str, str], dict[str, list[tuple[str, int, int, int, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for component, native, kind, out, _, column, name, row, native_row, rows in _core.adapter_names(base):
        if kind in ("linear", "conv1", "conv2", "conv3"):
            spelled[component, column][name].append((native, row, native_row, rows, out))
    return spelled


def _layers(tensors: list[_Tensor], base: str) -> dict[Layer, Place]:
    names = _names(base)
    components = {component for component, _ in names}
    found: dict[Layer, Place] = {}
    for t in tensors:
        stem = t.key.removesuffix(".weight") if t.key.endswith(".weight") else t.key
        possible = [t.component] if t.component in components else sorted(components)
        ways = [
            (component, pieces) for component in possible if (pieces := _pieces(names, component, stem, t))
        ]
        if len(ways) > 1:  # two text encoders that spell alike: then the one of this width
            ways = [way for way in ways if sum(piece[3] for piece in way[1]) == t.shape[0]]
        for component, pieces in ways:
            count = sum(piece[3] for piece in pieces)
            for native, row, native_row, rows, out in pieces:
                layer = Layer(component, native, native_row, rows, out)
                part = (0, 0) if len(pieces) == 1 else (row * t.shape[0] // count, rows * t.shape[0] // count)
                found.setdefault(layer, Place(t.file, t.path, t.key, *part, t.shape))
    return found


def _pieces(
    names: dict[tuple[str, str], dict[str, list[tuple[str, int, int, int, int]]]],
    component: str,
    stem: str,
    t: _Tensor,
) -> list[tuple[str, int, int, int, int]]:
    if len(t.shape) < 2:
        return []
    for prefix, column in CHECKPOINTS.get(component, []):
        if stem.startswith(prefix):
            pieces = names.get((component, column), {}).get(stem[len(prefix) :], [])
            if pieces:
                return pieces
    return []


def recognise(tensors: list[_Tensor]) -> str:
    """The base with the most layers of the right sizes; "" where none has any."""
    scores: Counter[str] = Counter()
    for base in _core.adapter_bases():
        layers = _layers(tensors, base)
        scores[base] = sum(
            place.shape[0] == layer.rows for layer, place in layers.items() if place.rows == 0
        ) + sum(place.rows > 0 for place in layers.values())
    best, score = scores.most_common(1)[0]
    return best if score > 0 else ""

"""Small adapters in kohya's spelling, of SDXL's layers at a tenth of their sizes, and their updates by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loraaccel import adapters
from loraaccel.safetensors.numpy import save_file

BLOCK = "lora_unet_input_blocks_4_1_transformer_blocks_0_"
NATIVE = "input_blocks.4.1.transformer_blocks.0."
TO_Q, TO_K, TO_V = (BLOCK + f"attn1_to_{x}" for x in "qkv")
CROSS_K = BLOCK + "attn2_to_k"
CONV = "lora_unet_input_blocks_4_0_in_layers_2"  # 3x3
SHORTCUT = "lora_unet_input_blocks_4_0_skip_connection"  # 1x1
SHAPES = {
    TO_Q: (64, 64),
    TO_K: (64, 64),
    TO_V: (64, 64),
    CROSS_K: (64, 204),
    CONV: (64, 32, 3, 3),
    SHORTCUT: (64, 32, 1, 1),
}
PATHS = {
    TO_Q: NATIVE + "attn1.to_q",
    TO_K: NATIVE + "attn1.to_k",
    TO_V: NATIVE + "attn1.to_v",
    CROSS_K: NATIVE + "attn2.to_k",
    CONV: "input_blocks.4.0.in_layers.2",
    SHORTCUT: "input_blocks.4.0.skip_connection",
}

Tensors = dict[str, np.ndarray]


def pair(
    rng: np.random.Generator, name: str, rank: int, alpha: float | None = None, dtype: str = "float32"
) -> Tensors:
    """Factors with singular values that fall, as trained ones have."""
    out, *window = SHAPES[name]
    fall = np.geomspace(1, 0.02, rank)
    down = rng.standard_normal((rank, *window)) * 0.1
    up = rng.standard_normal((out, rank)) * fall * 0.1
    tensors = {
        f"{name}.lora_down.weight": down.astype(dtype),
        f"{name}.lora_up.weight": up.reshape(out, rank, *[1] * (len(window) - 1)).astype(dtype),
    }
    if alpha is not None:
        tensors[f"{name}.alpha"] = np.asarray(alpha, dtype)
    return tensors


def update(tensors: Tensors, name: str) -> np.ndarray:
    """alpha / r * B A in float64, [out, all columns]; without alpha B A."""
    down = tensors[f"{name}.lora_down.weight"].astype(np.float64)
    up = tensors[f"{name}.lora_up.weight"].astype(np.float64)
    rank = down.shape[0]
    alpha = tensors.get(f"{name}.alpha")
    scale = 1.0 if alpha is None else float(alpha) / rank
    return scale * up.reshape(up.shape[0], rank) @ down.reshape(rank, -1)


def write(path: Path, *parts: Tensors, metadata: dict[str, str] | None = None) -> Path:
    save_file({k: v for part in parts for k, v in part.items()}, path, metadata)
    return path


def deltas(path: Path | adapters.Adapter) -> dict[str, np.ndarray]:
    """By native path, as the core computes them."""
    adapter = path if isinstance(path, adapters.Adapter) else adapters.load(path, base="sdxl")
    return {entry.path: entry.delta() for entry in adapter.entries}


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def off(found: np.ndarray, expected: np.ndarray) -> float:
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / norm) if norm > 0 else float(np.linalg.norm(found))

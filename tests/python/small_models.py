"""Base models of a few layers, and adapters for them in PEFT's spelling, which needs no table."""

from __future__ import annotations

import json
from pathlib import Path

import adapter_files
import safetensors.torch
import torch

from loraaccel import adapters


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=adapter_files.seeded(seed)) * 0.02).to(dtype)


def plain(
    path: str, out: int, width: int, rank: int = 4, scale: float = 2.0, seed: int = 1, dtype=torch.float32
):
    """PEFT's spelling needs no table."""
    generator = adapter_files.seeded(seed)
    return {
        f"base_model.model.{path}.lora_A.weight": torch.randn(rank, width, generator=generator).to(dtype),
        f"base_model.model.{path}.lora_B.weight": (torch.randn(out, rank, generator=generator) * 0.1).to(
            dtype
        ),
    }, json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank})


def load_plain(path: str, *sizes: int, **more) -> adapters.Adapter:
    tensors, config = plain(path, *sizes, **more)
    return adapters.load(tensors, config=config)


def save(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors.torch.save_file({k.replace("__", "."): t for k, t in tensors.items()}, path)
    return path

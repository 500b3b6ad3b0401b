"""Adapters for tests: tensors by key, with numbers that tell layers and rows apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loraaccel.adapters import Adapter


def numbers(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiples of 1/8 up to 2: sums and products of a few of them are exact."""
    return (torch.randint(-16, 17, shape, generator=generator).double() / 8).to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def native_deltas(adapter: Adapter) -> dict[tuple[str, str], np.ndarray]:
    """What the adapter adds to every layer of the original checkpoint, in float64."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for entry in adapter.entries:
        delta = entry.delta()
        whole = found.setdefault(
            (entry.component, entry.path), np.zeros((entry.native_rows or len(delta), delta.shape[1]))
        )
        for row, native_row, rows in entry.rows or [(0, 0, len(delta))]:
            whole[native_row : native_row + rows] += delta[row : row + rows]
    return found


def assert_same_deltas(first: Adapter, second: Adapter, tolerance: float = 0.0) -> None:
    a, b = native_deltas(first), native_deltas(second)
    assert set(a) == set(b)
    for key, value in a.items():
        assert np.abs(value - b[key]).max() <= tolerance * np.abs(value).max(), key


def assert_same_tensors(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Keys, types, shapes and bytes."""
    assert set(first) == set(second)
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype and tensor.shape == second[key].shape, key
        assert torch.equal(tensor, second[key]), key

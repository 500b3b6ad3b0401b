"""The dropout mask, from Note [Dropout mask] of src/cpp/core/random/philox.h, in numpy integers.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


def philox4x32(counter: list[np.ndarray], key: list[int], rounds: int = 10) -> list[np.ndarray]:
    """Four words for each counter. The counters are arrays of uint64 that hold 32-bit numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left = np.uint64(0xD2511F53) * c0
        right = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (right >> _HIGH) ^ c1 ^ np.uint64(k0),
            right & _LOW,
            (left >> _HIGH) ^ c3 ^ np.uint64(k1),
            left & _LOW,
        )
        k0 = (k0 + 0x9E3779B9) % 2**32
        k1 = (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def words(seed: int, offset: int, rows: int, cols: int) -> np.ndarray:
    """The 32-bit random number of each element, as int64. seed and offset are taken modulo 2^64."""
    seed, offset = seed % 2**64, offset % 2**64
    row, col = np.meshgrid(np.arange(rows, dtype=np.uint64), np.arange(cols, dtype=np.uint64), indexing="ij")
    group, within = col // np.uint64(64), col % np.uint64(64)
    counter = [
        np.uint64(16) * group + within % np.uint64(16),
        row & _LOW,
        row >> _HIGH,
        np.full_like(row, offset % 2**32),
    ]
    key = [seed % 2**32, (seed >> 32) ^ (offset >> 32)]
    four = np.stack(philox4x32(counter, key)).astype(np.int64)
    return np.take_along_axis(four, (within // np.uint64(16)).astype(np.int64)[None], axis=0)[0]


def keep_mask(seed: int, offset: int, rows: int, cols: int, p: float) -> Tensor:
    """True where the element is kept: its number is not below p 2^32, rounded."""
    return torch.from_numpy(words(seed, offset, rows, cols) >= math.floor(p * 2**32 + 0.5))


def dropout_factor(seed: int, offset: int, rows: int, cols: int, p: float) -> Tensor:
    """k / (1 - p) in float64; zeros for p = 1."""
    keep = keep_mask(seed, offset, rows, cols, p).to(torch.float64)
    return keep / (1 - p) if p < 1 else torch.zeros_like(keep)

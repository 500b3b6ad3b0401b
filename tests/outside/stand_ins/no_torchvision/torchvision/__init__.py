"""What sd-scripts' trainers use of torchvision, for an environment without it: images to tensors, and normalisation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def _composed(steps: list[Any]) -> Any:
    def all_of(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return all_of


def _to_tensor() -> Any:
    """uint8 [H, W, C] to float32 [C, H, W] between 0 and 1."""
    return lambda image: torch.from_numpy(np.array(image)).movedim(-1, 0).float().div(255).contiguous()


def _normalised(mean: list[float], std: list[float]) -> Any:
    centre, width = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return lambda image: (image - centre) / width


transforms = SimpleNamespace(Compose=_composed, ToTensor=_to_tensor, Normalize=_normalised)

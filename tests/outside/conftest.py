"""Trainers of a checkout of sd-scripts, whose folder is LORAACCEL_SDSCRIPTS_DIR. Without one these tests are skipped.

What they make goes into pytest's temporary folder and is deleted at the end, or into LORAACCEL_SDSCRIPTS_WORK, where
the models are kept for the next time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sdscripts_runs


def trainer(
    factory: pytest.TempPathFactory, name: str, widths: str | None
) -> Iterator[sdscripts_runs.Trainer]:
    checkout = os.environ.get("LORAACCEL_SDSCRIPTS_DIR")
    if not checkout:
        pytest.skip("LORAACCEL_SDSCRIPTS_DIR names no checkout of sd-scripts")
    kept = os.environ.get("LORAACCEL_SDSCRIPTS_WORK")
    folder = (Path(kept) if kept else factory.mktemp("sdscripts")) / name
    shutil.rmtree(folder / "runs", ignore_errors=True)
    made = sdscripts_runs.made(Path(checkout).resolve(), folder, widths)
    yield made
    made.forget()
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sdscripts_runs.Trainer]:
    """SD 1.5 with a U-Net of 64 to 96 channels: seconds for 20 steps."""
    yield from trainer(tmp_path_factory, "narrow", sdscripts_runs.NARROW)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sdscripts_runs.Trainer]:
    """SD 1.5 with the U-Net as it is: 7 GB of memory, one to three minutes for 20 steps."""
    yield from trainer(tmp_path_factory, "wide", None)

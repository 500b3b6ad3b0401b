"""Which mode a run is in: from the command line, or from the TOML file that kohya's trainers are started with."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODES = ("auto", "on", "off", "verify")
KEY = "use_cpp_kernel"
FACTORED_KEY = "use_cpp_kernel_factored"


class BadOption(Exception):
    """What the user gave makes no sense; the text says what was found and what was expected."""


def mode_of(given: str | None, arguments: Sequence[str]) -> str:
    """The mode of the command line, else that of the script's TOML file, else auto."""
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name.replace("_", "-") == "--use-cpp-kernel":
            raise BadOption(
                f"{name} stands after the script, expected before it: the script does not know it"
            )
    path = config_file(arguments)
    asked = None if path is None else mode_of_config(read_toml(path), path)
    return given or asked or "auto"


def factored_of(given: bool, arguments: Sequence[str]) -> bool:
    """Whether rebuilt weights may be computed from their factors: by the command line, or by the TOML file."""
    path = config_file(arguments)
    value = False if path is None else read_toml(path).get(FACTORED_KEY, False)
    if not isinstance(value, bool):
        raise BadOption(f"{path}: {FACTORED_KEY} is {value!r}, expected true or false")
    return given or value


def config_file(arguments: Sequence[str]) -> Path | None:
    """The file of kohya's --config_file, which may be given without its ending; None where there is none to read."""
    name = None
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--config") or not "--config_file".startswith(option):
            continue  # (argparse takes the beginning of a name)
        if equals:
            name = value
        elif i + 1 < len(arguments):
            name = arguments[i + 1]
    if name is None:
        return None
    path = Path(name if name.endswith(".toml") else name + ".toml")
    return path if path.is_file() else None  # (the script says best what is wrong with it)


def read_toml(path: Path) -> Mapping[str, Any]:
    """The file as a dictionary, its sections taken apart as kohya's trainers do. A file that is no TOML has nothing for
    us, unless it speaks of us: the trainer's reader takes some that the language does not allow."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        data = _parsed(path, text)
    except ValueError as error:
        if KEY in text:
            raise BadOption(f"{path} has {KEY}, but is no TOML: {error}") from None
        return {}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in (KEY, FACTORED_KEY):
            flat[key] = value
        else:
            flat.update(value if isinstance(value, Mapping) else {key: value})
    return flat


def _parsed(path: Path, text: str) -> Mapping[str, Any]:
    for library in ("tomllib", "tomli"):
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        return dict(module.loads(text))
    try:
        module = importlib.import_module("toml")
    except ImportError:
        raise BadOption(
            f"{path}: reading TOML needs Python 3.11, or one of the packages tomli and toml"
        ) from None
    return dict(module.loads(text))


def mode_of_config(config: Mapping[str, Any], path: Path) -> str | None:
    """The mode that the file asks for with use_cpp_kernel: true, false or a mode's name; None where it says nothing."""
    for key in config:
        for ours in (KEY, FACTORED_KEY):
            near = difflib.SequenceMatcher(None, key.replace("-", "_"), ours).ratio() > 0.8
            if near and key not in (KEY, FACTORED_KEY):
                raise BadOption(f"{path}: {key}, expected {ours}")
    value = config.get(KEY)
    if value is None:
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in MODES:
        return str(value)
    raise BadOption(f"{path}: {KEY} is {value!r}, expected true, false or one of {', '.join(MODES)}")

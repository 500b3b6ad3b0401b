"""What saving is the same for every library of tensors: arguments, the report, saves in the background."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loraaccel import _core

# name, dtype, shape, address of dense memory, or a function (offset, bytes) -> address of a piece, used until the next.
Source = tuple[str, str, tuple[int, ...], int, Callable[[int, int], int] | None]


def check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"key {name!r} is {type(name).__name__}, expected str")
    if not name.isascii():
        check_text(name, "key")


def check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} {text!r} holds half a surrogate pair, which UTF-8 has no bytes for"
        ) from None


class Sources:
    """Tensors to be written, and what keeps their memory alive until they are."""

    def __init__(self) -> None:
        self.items: list[Source] = []
        self._owners: list[Any] = []
        self._current: tuple[int, Any] = (-1, None)  # the one tensor that has been put in order

    def add(self, name: str, dtype: str, shape: tuple[int, ...], address: int, owner: Any) -> None:
        self.items.append((name, dtype, tuple(shape), address, None))
        self._owners.append(owner)

    def add_fetched(
        self, name: str, dtype: str, shape: tuple[int, ...], fetch: Callable[[int, int], int]
    ) -> None:
        self.items.append((name, dtype, tuple(shape), 0, fetch))

    def add_gathered(
        self, name: str, dtype: str, shape: tuple[int, ...], gather: Callable[[], tuple[int, Any]]
    ) -> None:
        """`gather` makes a dense copy: its address, and what owns it. One at a time is kept."""
        number = len(self.items)

        def fetch(offset: int, size: int) -> int:
            if self._current[0] != number:
                self._current = (-1, None)
                self._current = (number, gather())
            address: int = self._current[1][0]
            return address + offset

        self.add_fetched(name, dtype, shape, fetch)


class CastLoss(NamedTuple):
    """What a cast did to a tensor's elements."""

    flushed_to_zero: int  # were not zero, and are
    became_infinite: int  # were finite, and are infinite, or NaN where the type has no infinity


@dataclass(frozen=True)
class SaveReport:
    """What was written. The hashes are empty where they were not asked for."""

    file_size: int
    model_hash: str  # SHA-256 of all tensors' bytes: kohya's sshs_model_hash
    legacy_hash: str  # kohya's sshs_legacy_hash
    losses: dict[str, CastLoss]  # of tensors that the cast did something to


@dataclass(frozen=True)
class Options:
    float_dtype: str | None = None
    hashes: bool = False
    write_hashes: bool = False


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is {type(metadata).__name__}, expected a dict of str to str")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"metadata[{key!r}] is {type(value).__name__}, expected str: files hold nothing else"
            )
        check_text(key, "metadata key")
        check_text(value, f"metadata[{key!r}]")
    return dict(metadata)


def save_to_file(
    sources: Sources,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    options: Options,
    sync: bool,
) -> SaveReport:
    report = _report(
        _core.save_safetensors(
            os.fspath(filename),
            sources.items,
            check_metadata(metadata),
            options.float_dtype,
            options.hashes,
            options.write_hashes,
            sync,
        )
    )
    warn_of_infinities(os.fspath(filename), report, options)
    return report


def save_to_bytes(sources: Sources, metadata: Mapping[str, str] | None, options: Options) -> bytes:
    data, report = _core.serialize_safetensors(
        sources.items, check_metadata(metadata), options.float_dtype, options.hashes, options.write_hashes
    )
    warn_of_infinities("the bytes", _report(report), options)
    return data


def _report(native: tuple[int, str, str, list[tuple[str, int, int]]]) -> SaveReport:
    size, model_hash, legacy_hash, losses = native
    return SaveReport(
        size, model_hash, legacy_hash, {name: CastLoss(zeros, infs) for name, zeros, infs in losses}
    )


def warn_of_infinities(where: str, report: SaveReport, options: Options) -> None:
    """A file with infinities is useless, and nothing else would say so."""
    found = {name: loss.became_infinite for name, loss in report.losses.items() if loss.became_infinite}
    if found:
        worst = max(found, key=lambda name: found[name])
        warnings.warn(
            f"loraaccel: {where}: {sum(found.values())} finite numbers of {len(found)} tensors do not fit into "
            f"{options.float_dtype} ({found[worst]} of {worst!r})",
            RuntimeWarning,
            stacklevel=4,
        )


class PendingSave:
    """A save that goes on in the background. ``wait()`` gives its report or raises its error; an error that nobody
    waited for is raised by the next save in the background, or told at the end of the process."""

    def __init__(self, native: _core.PendingSave, filename: str, options: Options) -> None:
        self._native = native
        self._options = options
        self.filename = filename
        _unheard.append(self)

    def done(self) -> bool:
        return self._native.done()

    def wait(self) -> SaveReport:
        if self in _unheard:
            _unheard.remove(self)
        report = _report(self._native.wait())
        warn_of_infinities(self.filename, report, self._options)
        return report


_unheard: list[PendingSave] = []


def save_in_background(
    sources: Sources,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    options: Options,
    sync: bool,
) -> PendingSave:
    for earlier in [save for save in _unheard if save.done()]:
        earlier.wait()
    path = os.fspath(filename)
    native = _core.save_safetensors_async(
        path,
        sources.items,
        check_metadata(metadata),
        options.float_dtype,
        options.hashes,
        options.write_hashes,
        sync,
    )
    return PendingSave(native, path, options)


@atexit.register
def _finish() -> None:
    while _unheard:
        save = _unheard[0]  # (wait() takes it out)
        try:
            save.wait()
        except Exception:  # noqa: BLE001  (told, and there is nobody else to tell)
            sys.stderr.write(f"loraaccel: saving {save.filename} failed\n{traceback.format_exc()}")

"""Failures of the adapter commands: one sentence, exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def one_sentence() -> Iterator[None]:
    """What a user can get wrong becomes a message instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        raise click.ClickException(str(error)) from error

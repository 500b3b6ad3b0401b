"""Rated words and emoticons (the lexicon that vaderSentiment ships), their split, and batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .settings import DemoError, package_file

HELDOUT_FRACTION = 0.2


@dataclass(frozen=True)
class RatedText:
    """A word or emoticon and the mean of ten people's ratings, -4 (most negative) to 4 (most positive)."""

    text: str
    rating: float


@dataclass(frozen=True)
class Batch:
    """B texts of up to L tokens: input_ids and attention_mask [B, L] int64, ratings [B] f32."""

    input_ids: Tensor
    attention_mask: Tensor
    ratings: Tensor

    def select(self, index: Tensor) -> Batch:
        """The rows in `index` [b], cut to the longest of them."""
        mask = self.attention_mask[index]
        length = int(mask.sum(1).max())
        return Batch(self.input_ids[index, :length], mask[:, :length], self.ratings[index])


def lexicon_path() -> Path:
    """The lexicon in the installed vaderSentiment package."""
    return package_file("vaderSentiment", "vader_lexicon.txt")


def load_lexicon(path: Path) -> list[RatedText]:
    """Reads lines of text TAB mean TAB standard deviation TAB ratings."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        try:
            rows.append(RatedText(fields[0], float(fields[1])))
        except (IndexError, ValueError) as error:
            raise DemoError(f"{path}, line {number}: expected a text, a tab and a rating") from error
    return rows


def split(
    rows: Sequence[RatedText], heldout_fraction: float, seed: int
) -> tuple[list[RatedText], list[RatedText]]:
    """Returns (train, held-out); held-out has round(fraction * len(rows)) rows, or a few fewer.

    The encoder ignores case and the lexicon has both `:D` and `:d`, so texts that differ in case only
    stay on one side: nothing that is held out was seen in training.
    """
    groups: dict[str, list[RatedText]] = {}
    for row in rows:
        groups.setdefault(row.text.casefold(), []).append(row)
    names = sorted(groups)
    random.Random(seed).shuffle(names)
    wanted = round(heldout_fraction * len(rows))
    train: list[RatedText] = []
    heldout: list[RatedText] = []
    for name in names:
        side = heldout if len(heldout) + len(groups[name]) <= wanted else train
        side.extend(groups[name])
    return train, heldout


def encode(tokenizer: Any, rows: Sequence[RatedText]) -> Batch:
    """All rows as one padded batch."""
    tokens = tokenizer([row.text for row in rows], padding=True, return_tensors="pt")
    ratings = torch.tensor([row.rating for row in rows], dtype=torch.float32)
    return Batch(tokens["input_ids"], tokens["attention_mask"], ratings)


def train_batches(data: Batch, batch_size: int, num_steps: int, seed: int) -> Iterator[Batch]:
    """`num_steps` batches; every row comes once per epoch, in a new order each epoch."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(data.ratings)
    num_epochs = -(-batch_size * num_steps // num_rows)
    order = torch.cat([torch.randperm(num_rows, generator=generator) for _ in range(num_epochs)])
    for step in range(num_steps):
        yield data.select(order[step * batch_size : (step + 1) * batch_size])


def heldout_batches(data: Batch, batch_size: int = 256) -> list[Batch]:
    """All rows once, in order of length, so that little of a batch is padding."""
    order = data.attention_mask.sum(1).argsort(stable=True)
    return [data.select(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]

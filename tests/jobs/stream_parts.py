"""Streams of the digits, named by import path in test configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from framework.recipes.image_sets.digits import build


class DigitStream:
    """The digits in six parts, every sixth each; gives its state, and notes where it began."""

    num_shards = 6

    def __init__(self, own: range | None = None, notes: str = "", *, train: bool = True) -> None:
        splits = build(28)
        self.samples: Any = splits.train if train else splits.evaluation
        self.own, self.notes, self.train, self.at = own or range(len(self.samples)), notes, train, 0

    def shard(self, num_shards: int, index: int) -> DigitStream:
        return DigitStream(self.own[index::num_shards], self.notes, train=self.train)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        if self.notes and self.train:
            with Path(self.notes).open("a", encoding="utf-8") as notes:
                notes.write(f"{self.at}\n")
        for index in self.own[self.at :]:
            self.at += 1
            image, label = self.samples[index]
            yield image, int(label)
        self.at = 0


def digit_streams(notes: str = "") -> tuple[DigitStream, DigitStream]:
    return DigitStream(notes=notes), DigitStream(train=False)


def with_two_sets(notes: str = "") -> tuple[DigitStream, dict[str, Any]]:
    """The stream, and two sets by name: a stream, and the first fifty samples of it."""
    stream = DigitStream(train=False)
    return DigitStream(notes=notes), {
        "streamed": stream,
        "first": Subset(stream.samples, range(50)),
    }

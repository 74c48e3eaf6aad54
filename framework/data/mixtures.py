"""Mixtures: datasets in fixed shares, as one stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Final

import numpy as np

from framework.data.batches import own_collate
from framework.data.order import LATEST_ORDER, Positions, order_of_epoch
from framework.data.streams import Lane, Place, is_stream, num_divisions
from framework.errors import ConfigError

_PERIOD: Final = 10_000  # positions after which shares repeat: a share has four digits
_MOST_PARTS: Final = 64


@lru_cache
def pattern(weights: tuple[float, ...]) -> Positions:
    """The part of every position of a period: up to any position, each has its share to within one sample.

    Tijdeman 1980, "The chairman assignment problem": of the parts that lag by 1 / (2k - 2), the one whose next sample
    is due first.
    """
    exact, total = np.array(weights), sum(weights)
    if total > _PERIOD or any(weight % 1 for weight in weights):
        exact, total = exact / total * _PERIOD, _PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: round(total) - counts.sum()]] += 1
    if not counts.all():
        fix = "give every part a share of at least 0.0001"
        raise ConfigError.of("mixture-weights", "a part would never be read", fix, "data.parts", list(weights))
    counts //= gcd(*counts.tolist())
    shares, lag = counts / counts.sum(), 1 / max(2 * len(counts) - 2, 1)
    taken, chosen = np.zeros(len(counts)), []
    for position in range(1, counts.sum() + 1):
        behind = shares * position - taken
        due = np.where(behind >= lag - 1e-9, (1 - lag - behind) / shares, np.inf)
        chosen.append(int(due.argmin()))
        taken[chosen[-1]] += 1
    return np.array(chosen, dtype=np.int64)


class Mixture:
    """A stream of samples of several datasets, streams or not, each begun anew where it ends; it has no end.

    A lane of it reads one lane of every part, in the same pattern, begun at a place of its own.
    """

    takes_seed = True

    def __init__(self, parts: Sequence[tuple[float, Any]], *, shuffle: bool = True, seed: int = 0) -> None:
        """`parts`: (weight, dataset); `shuffle`: of datasets with samples by number, by the seed of the run."""
        self._parts, self._shuffle, self.seed, self._lane, self._lanes = list(parts), shuffle, seed, 0, 1
        self.num_shards = min((num_divisions(part) for _, part in parts if is_stream(part)), default=_MOST_PARTS)
        self._state: Mapping[str, Any] = {"count": 0, "places": [None] * len(parts)}
        if (own := own_collate(parts[0][1])) is not None:
            self.collate_fn = own

    def shard(self, num_shards: int, index: int) -> Mixture:
        lane = Mixture(self._parts, shuffle=self._shuffle, seed=self.seed)
        lane._lane, lane._lanes = index, num_shards
        return lane

    def state_dict(self) -> Mapping[str, Any]:
        lanes = (reader.place() if isinstance(reader, Lane) else None for reader in self._readers)
        return {"count": self._count, "places": [lane and [lane.count, lane.number, lane.state] for lane in lanes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        chosen = pattern(tuple(weight for weight, _ in self._parts))
        chosen = np.roll(chosen, -(len(chosen) * self._lane // self._lanes))
        self._count, places = self._state["count"], self._state["places"]
        passes, rest = divmod(self._count, len(chosen))
        self._readers = []
        for number, (_, part) in enumerate(self._parts):
            read = passes * int((chosen == number).sum()) + int((chosen[:rest] == number).sum())
            if is_stream(part):
                reader: Any = Lane(part, index=self._lane, num_lanes=self._lanes, seed=None)
            else:
                reader = _Numbered(part, self._lane, self._lanes, shuffle=self._shuffle, seed=self.seed + number)
            reader.start(read, Place(*(places[number] or (0,))))
            self._readers.append(reader)
        while True:
            part = chosen[self._count % len(chosen)]
            self._count += 1
            yield self._readers[part].take()


class _Numbered:
    """A lane's samples of a dataset that has them by number: every so manieth of its epochs' orders."""

    def __init__(self, dataset: Any, lane: int, lanes: int, *, shuffle: bool, seed: int) -> None:
        self._dataset, self._lane, self._lanes, self._shuffle, self._seed = dataset, lane, lanes, shuffle, seed
        self._epoch = -1

    def start(self, count: int, place: Place) -> None:
        self._count = count

    def take(self) -> Any:
        epoch, position = divmod(self._count * self._lanes + self._lane, size := len(self._dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = order_of_epoch(
                size, seed=self._seed, epoch=epoch, shuffle=self._shuffle, version=LATEST_ORDER
            )
        self._count += 1
        return self._dataset[int(self._order(np.array([position]))[0])]

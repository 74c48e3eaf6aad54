"""Mixtures: datasets in fixed shares, as one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from math import gcd
from typing import Any, Final

import numpy as np

from framework.data.batches import own_collate
from framework.data.loaders import is_stream
from framework.data.order import LATEST_ORDER, Positions, order_of_epoch
from framework.data.streams import Lane, Place, num_divisions
from framework.errors import ConfigError

_PERIOD: Final = 10_000  # positions after which shares repeat: a share has four digits
_MOST_PARTS: Final = 64


@lru_cache
def pattern(weights: tuple[float, ...]) -> Positions:
    """The part of every position of a period: up to any position, each has its share to within one sample (Tijdeman
    1980, "The chairman assignment problem": of those that lag by 1 / (2k - 2), the one that is due first).
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
    """A stream without end of samples of several datasets, streams or not, each begun anew where it ends. A lane of it
    reads a lane of every part, in the same pattern, begun at a place of its own.
    """

    takes_seed = True

    def __init__(self, parts: Sequence[tuple[float, Any]], *, shuffle: bool = True, seed: int = 0) -> None:
        """`parts`: (weight, dataset); `shuffle`: of datasets with samples by number, by the seed of the run."""
        self._parts, self._shuffle, self.seed, self._lane, self._lanes = list(parts), shuffle, seed, 0, 1
        self.num_shards = min((num_divisions(part) for _, part in parts if is_stream(part)), default=_MOST_PARTS)
        self._count, self._places = 0, dict[int, Any]()
        self._streams: dict[int, Lane] = {}
        if (own := own_collate(parts[0][1])) is not None:
            self.collate_fn = own

    def shard(self, num_shards: int, index: int) -> Mixture:
        lane = Mixture(self._parts, shuffle=self._shuffle, seed=self.seed)
        lane._lane, lane._lanes = index, num_shards
        return lane

    def state_dict(self) -> Mapping[str, Any]:
        places = {number: lane.place() for number, lane in self._streams.items()}
        return {"count": self._count, "places": {number: [*vars(place).values()] for number, place in places.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count, self._places = state["count"], state["places"]

    def __iter__(self) -> Iterator[Any]:
        chosen = pattern(tuple(weight for weight, _ in self._parts))
        chosen = np.roll(chosen, -(len(chosen) * self._lane // self._lanes))
        passes, rest = divmod(self._count, len(chosen))
        takes = list[Callable[[], Any]]()
        for number, (_, part) in enumerate(self._parts):
            read = passes * int((chosen == number).sum()) + int((chosen[:rest] == number).sum())
            if is_stream(part):
                lane = self._streams[number] = Lane(part, index=self._lane, num_lanes=self._lanes, seed=None)
                lane.start(read, Place(*self._places.get(number, (0,))))
                takes.append(lane.take)
            else:
                takes.append(partial(next, self._numbered(part, read, self.seed + number)))
        while True:
            part = chosen[self._count % len(chosen)]
            self._count += 1
            yield takes[part]()

    def _numbered(self, dataset: Any, first: int, seed: int) -> Iterator[Any]:
        """A lane's samples of a dataset that has them by number: every so manieth of its epochs' orders."""
        known = -1
        for number in count(first):
            epoch, position = divmod(number * self._lanes + self._lane, size := len(dataset))
            if epoch != known:
                known, version = epoch, LATEST_ORDER
                order = order_of_epoch(size, seed=seed, epoch=epoch, shuffle=self._shuffle, version=version)
            yield dataset[int(order(np.array([position]))[0])]

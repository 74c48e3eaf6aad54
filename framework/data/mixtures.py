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
from framework.data.order import LATEST_ORDER, Positions, mix_int, order_of_epoch
from framework.data.streams import Lane, Place, num_divisions
from framework.errors import ConfigError

_PERIOD: Final = 10_000  # positions after which shares repeat: a share has four digits
_MOST_PARTS: Final = 64
_PART_SALT: Final = 0x3B17


@lru_cache
def pattern(weights: tuple[float, ...]) -> Positions:
    """The part of every position of a period: up to any position, each has its share to within one
    sample (Tijdeman 1980, "The chairman assignment problem": of those that lag by 1 / (2k - 2), the
    one that is due first).
    """
    exact = np.array(weights)
    total = sum(weights)
    if total > _PERIOD or any(weight % 1 for weight in weights):
        exact = exact / total * _PERIOD
        total = _PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: round(total) - counts.sum()]] += 1
    if not counts.all():
        fix = "give every part a share of at least 0.0001"
        raise ConfigError.of(
            "mixture-weights", "a part would never be read", fix, "data.parts", list(weights)
        )
    counts //= gcd(*counts.tolist())
    shares = counts / counts.sum()
    lag = 1 / max(2 * len(counts) - 2, 1)
    taken = np.zeros(len(counts))
    chosen = []
    for position in range(1, counts.sum() + 1):
        behind = shares * position - taken
        due = np.where(behind >= lag - 1e-9, (1 - lag - behind) / shares, np.inf)
        chosen.append(int(due.argmin()))
        taken[chosen[-1]] += 1
    return np.array(chosen, dtype=np.int64)


def _code_of(collate_fn: Any) -> Any:
    """What two `collate_fn`s have in common that do the same: their code, and what is bound to
    it.
    """
    if isinstance(collate_fn, partial):
        return collate_fn.func, collate_fn.args, collate_fn.keywords
    return getattr(collate_fn, "__func__", collate_fn)


def _named(collate_fn: Any) -> str:
    if collate_fn is None:
        return "default"
    code = _code_of(collate_fn)
    if isinstance(code, tuple):
        return f"its collate_fn with {code[2]}"
    return getattr(code, "__qualname__", str(code))


class Mixture:
    """A stream without end of samples of several datasets, streams or not, each begun anew where it
    ends. A lane of it reads a lane of every part, in the same pattern, begun at a place of its own.
    """

    takes_seed = True

    def __init__(
        self, parts: Sequence[tuple[float, Any]], *, shuffle: bool = True, seed: int = 0
    ) -> None:
        """`parts`: (weight, dataset); `shuffle`: of datasets with samples by number, by the seed of
        the run.
        """
        self._parts = list(parts)
        self._shuffle = shuffle
        self.seed = seed
        self._lane = 0
        self._lanes = 1
        self.draws = False  # what parts draw at random is drawn by the seed
        self.num_shards = min(
            (num_divisions(part) for _, part in parts if is_stream(part)), default=_MOST_PARTS
        )
        self._count = 0
        self._places = dict[int, Any]()
        self._streams: dict[int, Lane] = {}
        owns = [own_collate(part) for _, part in parts]
        for number, own in enumerate(owns):
            if _code_of(own) != _code_of(owns[0]):
                reason = (
                    f"part {number} makes batches by {_named(own)}, part 0 by "
                    f"{_named(owns[0])}, and a batch has both"
                )
                fix = "give all parts the same collate_fn, or columns of the same names"
                raise ConfigError.of("mixture-collate", reason, fix, "data.parts")
        if owns[0] is not None:
            self.collate_fn = owns[0]

    def shard(self, num_shards: int, index: int) -> Mixture:
        lane = Mixture(self._parts, shuffle=self._shuffle, seed=self.seed)
        lane._lane = index
        lane._lanes = num_shards
        lane.draws = self.draws
        return lane

    def state_dict(self) -> Mapping[str, Any]:
        places = {number: lane.place() for number, lane in self._streams.items()}
        return {
            "count": self._count,
            "places": {number: [*vars(place).values()] for number, place in places.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]
        self._places = state["places"]

    def __iter__(self) -> Iterator[Any]:
        # Parts are begun here, not with the first sample: what reading up to there draws is not
        # that sample's.
        chosen = pattern(tuple(weight for weight, _ in self._parts))
        chosen = np.roll(chosen, -(len(chosen) * self._lane // self._lanes))
        passes, rest = divmod(self._count, len(chosen))
        takes = list[Callable[[], Any]]()
        for number, (_, part) in enumerate(self._parts):
            read = passes * int((chosen == number).sum()) + int((chosen[:rest] == number).sum())
            if is_stream(part):
                own = mix_int(_PART_SALT, self.seed, number)
                if getattr(part, "takes_seed", False):
                    part.seed = own
                    part.draws = self.draws
                drawn = own if self.draws else None
                lane = self._streams[number] = Lane(
                    part, index=self._lane, num_lanes=self._lanes, seed=drawn
                )
                lane.start(read, Place(*self._places.get(number, (0,))))
                takes.append(lane.take)
            else:
                takes.append(partial(next, self._numbered(part, read, self.seed + number)))
        return self._mixed(chosen, takes)

    def _mixed(self, chosen: Positions, takes: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        while True:
            part = chosen[self._count % len(chosen)]
            self._count += 1
            yield takes[part]()

    def _numbered(self, dataset: Any, first: int, seed: int) -> Iterator[Any]:
        """A lane's samples of a dataset that has them by number: every so manieth of its epochs'
        orders.
        """
        known = -1
        for number in count(first):
            epoch, position = divmod(number * self._lanes + self._lane, size := len(dataset))
            if epoch != known:
                known = epoch
                version = LATEST_ORDER
                order = order_of_epoch(
                    size, seed=seed, epoch=epoch, shuffle=self._shuffle, version=version
                )
            yield dataset[int(order(np.array([position]))[0])]

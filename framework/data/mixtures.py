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
from framework.data.streams import Lane, LanePlace, num_divisions
from framework.errors import ConfigError

_PERIOD: Final = 10_000  # positions after which shares repeat: a share has four digits
_MOST_PARTS: Final = 64
_PART_SALT: Final = 0x3B17


@lru_cache
def pattern(weights: tuple[float, ...]) -> Positions:
    """Return the numbers of the parts that the samples of a period come from, in order: an int64
    array, repeated without end, of at most 10,000 positions.

    Up to any position, each of the k parts has its share to within one sample (Tijdeman 1980, "The
    chairman assignment problem": of the parts that lag by 1 / (2k - 2), the one that is due first).

    Raises:
        ConfigError: kind ``mixture-weights``: a share is too small to be read once in a period.
    """
    exact = np.array(weights)
    total = sum(weights)
    if total > _PERIOD or any(weight % 1 for weight in weights):
        exact = exact / total * _PERIOD
        total = _PERIOD
    counts = np.floor(exact).astype(np.int64)
    # What rounding down has left goes to the parts that lost most.
    most_lacking = np.argsort(counts - exact, kind="stable")
    counts[most_lacking[: round(total) - counts.sum()]] += 1
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
        # In how many positions each part would lag by 1 - lag; 1e-9 is for rounding errors.
        due = np.where(behind >= lag - 1e-9, (1 - lag - behind) / shares, np.inf)
        part = int(due.argmin())
        chosen.append(part)
        taken[part] += 1
    return np.array(chosen, dtype=np.int64)


def _code_of(collate_fn: Any) -> Any:
    """Return the code of a `collate_fn` and its bound arguments: equal for two that do the same."""
    if isinstance(collate_fn, partial):
        return collate_fn.func, collate_fn.args, collate_fn.keywords
    return getattr(collate_fn, "__func__", collate_fn)


def _name_of(collate_fn: Any) -> str:
    if collate_fn is None:
        return "default"
    code = _code_of(collate_fn)
    if isinstance(code, tuple):
        return f"its collate_fn with {code[2]}"
    return getattr(code, "__qualname__", str(code))


class Mixture:
    """A stream without end of samples of several datasets, streams or not; each begins anew when it
    ends. A lane reads a lane of every part, in the same pattern, but from another position on.
    """

    takes_seed = True

    def __init__(
        self, parts: Sequence[tuple[float, Any]], *, shuffle: bool = True, seed: int = 0
    ) -> None:
        """Take the parts (weight, dataset). With `shuffle`, datasets with samples by number are
        shuffled, by the seed of the run.
        """
        self._parts = list(parts)
        self._shuffle = shuffle
        self.seed = seed
        self._lane = 0
        self._lanes = 1
        self.draws = False  # random draws of parts are by the seed
        divisions = [num_divisions(part) for _, part in parts if is_stream(part)]
        self.num_shards = min(divisions, default=_MOST_PARTS)
        self._count = 0
        self._places: dict[int, Any] = {}
        self._streams: dict[int, Lane] = {}
        collate_fns = [own_collate(part) for _, part in parts]
        first = collate_fns[0]
        for number, collate_fn in enumerate(collate_fns):
            if _code_of(collate_fn) != _code_of(first):
                reason = (
                    f"part {number} makes batches by {_name_of(collate_fn)}, part 0 by "
                    f"{_name_of(first)}, and a batch has both"
                )
                fix = "give all parts the same collate_fn, or columns of the same names"
                raise ConfigError.of("mixture-collate", reason, fix, "data.parts")
        if first is not None:
            self.collate_fn = first

    def shard(self, num_shards: int, index: int) -> Mixture:
        """Return lane `index` of `num_shards` lanes, as a mixture of its own."""
        lane = Mixture(self._parts, shuffle=self._shuffle, seed=self.seed)
        lane._lane = index
        lane._lanes = num_shards
        lane.draws = self.draws
        return lane

    def state_dict(self) -> Mapping[str, Any]:
        places = {}
        for number, lane in self._streams.items():
            place = lane.place()
            places[number] = [place.count, place.number, place.state]
        return {"count": self._count, "places": places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]
        self._places = state["places"]

    def __iter__(self) -> Iterator[Any]:
        """Start this lane of all parts at its place, and return the iterator of its samples.

        The parts start in this call, not with the first sample: the random draws of reading up to
        the place are not that sample's.
        """
        chosen = pattern(tuple(weight for weight, _ in self._parts))
        # Each lane begins at its own position of the pattern.
        chosen = np.roll(chosen, -(len(chosen) * self._lane // self._lanes))
        periods, rest = divmod(self._count, len(chosen))
        takes: list[Callable[[], Any]] = []
        for number, (_, part) in enumerate(self._parts):
            is_part = chosen == number
            num_read = periods * int(is_part.sum()) + int(is_part[:rest].sum())
            if is_stream(part):
                takes.append(self._start_lane(number, part, num_read).take)
            else:
                samples = self._samples_by_number(part, num_read, self.seed + number)
                takes.append(partial(next, samples))
        return self._take_in_turn(chosen, takes)

    def _start_lane(self, number: int, part: Any, num_read: int) -> Lane:
        """Start this lane of a stream at its sample `num_read`, from the last known place."""
        seed = mix_int(_PART_SALT, self.seed, number)
        if getattr(part, "takes_seed", False):
            part.seed = seed
            part.draws = self.draws
        sample_seed = seed if self.draws else None
        lane = Lane(part, index=self._lane, num_lanes=self._lanes, seed=sample_seed)
        self._streams[number] = lane
        lane.start(num_read, LanePlace(*self._places.get(number, (0,))))
        return lane

    def _take_in_turn(self, chosen: Positions, takes: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        while True:
            part = chosen[self._count % len(chosen)]
            self._count += 1
            yield takes[part]()

    def _samples_by_number(self, dataset: Any, first: int, seed: int) -> Iterator[Any]:
        """Yield the samples of this lane, from number `first` on, of a dataset with samples by
        number: every `self._lanes`-th of its epochs' orders.
        """
        last_epoch = -1
        for number in count(first):
            size = len(dataset)
            epoch, position = divmod(number * self._lanes + self._lane, size)
            if epoch != last_epoch:
                last_epoch = epoch
                order = order_of_epoch(
                    size, seed=seed, epoch=epoch, shuffle=self._shuffle, version=LATEST_ORDER
                )
            yield dataset[int(order(np.array([position]))[0])]

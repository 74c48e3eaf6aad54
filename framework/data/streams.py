"""Streams: data without samples by number, read in *lanes*: the samples of a step are a function of
(seed, step).

A run reads L lanes at once, L fixed for the run: the largest divisor of the global batch that the
source can be divided into (``num_shards`` and ``shard(num_shards=, index=)``, as datasets of
Hugging Face have; otherwise 1). A step takes global_size / L consecutive samples of every lane, in
the order of lanes. So the samples of a step depend neither on ranks nor on workers, and the
position of a lane is a function of the step: a resume reads up to it, from the beginning of the
lane's pass, or from a state that the source gave while the run trained (``state_dict``,
``load_state_dict``).

A rank reads the lanes that its share of a step touches, and its workers divide them. A lane that
ends begins anew, with ``set_epoch(pass)`` if the source has that.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from framework.data.batches import (
    as_it_is,
    collate,
    own_collate,
    random_state_kept,
    seed_generators,
    seeded_collate,
)
from framework.data.failures import Claims, claims_nothing, explaining_data
from framework.data.loaders import Reading, end_workers
from framework.data.order import Share, mix_int
from framework.data.workers import init_of_workers
from framework.errors import ConfigError
from framework.system.exits import refusing_exits

_MOST_LANES: Final = 64  # unless `data.lanes` sets more: every lane has a file open
_KEY: Final = "stream"  # `checkpoint.names.STREAM`
_SAMPLE_SALT: Final = 0x57E4
_PASS_SALT: Final = 0x9A55
_EVALUATION_SALT: Final = 0xE7A3
_SAMPLES_PER_STATE: Final = 64
# The next state is taken after this many times the duration of the last one, times lanes.
_TIME_OF_STATES: Final = 20


def num_divisions(dataset: Any) -> int:
    """Count the parts that a stream can be divided into."""
    num_shards = getattr(dataset, "num_shards", None)
    if isinstance(num_shards, int) and callable(getattr(dataset, "shard", None)):
        return max(num_shards, 1)
    return 1


def num_lanes(dataset: Any, *, global_size: int, requested: int | None = None) -> int:
    """Return the number of lanes of a run: `requested`, or the largest divisor of the global batch
    up to 64 and the number of the source's parts.

    Raises:
        ConfigError: kind ``stream-lanes``: the stream cannot be read in `requested` lanes.
    """
    most = num_divisions(dataset)
    largest = min(most, requested or _MOST_LANES, global_size)
    while global_size % largest:
        largest -= 1
    if requested is None or requested == largest:
        return largest
    reason = (
        f"the stream has {most} parts, and a step of {global_size} samples takes as many of each"
    )
    fix = f"set data.lanes: {largest}, or leave it out"
    raise ConfigError.of("stream-lanes", reason, fix, "data.lanes", requested)


@dataclass(frozen=True)
class LanePlace:
    """A place at which the reading of a lane can begin.

    Attributes:
        count: samples of the lane before it.
        number: of its pass.
        state: the source's state there; None at the beginning of the pass.
    """

    count: int
    number: int = 0
    state: bytes | None = None


class Lane:
    """One part of a stream, read pass after pass. Random draws of a sample depend on (seed, lane,
    count) alone.
    """

    def __init__(self, source: Any, *, index: int, num_lanes: int, seed: int | None) -> None:
        """Take a source, to be divided into `num_lanes`. `seed` is `run.seed`, or None if samples
        draw nothing.
        """
        self._source = source
        self.index = index
        self._num_lanes = num_lanes
        self._seed = seed
        self._part = source
        self._place = LanePlace(0)
        self._gives_states = True
        self._next_state = 0.0

    def start(self, count: int, place: LanePlace) -> None:
        """Go to sample `count`: begin at `place`, at `count` or before it, and read the samples
        between.
        """
        self.count = place.count
        self._begin(place.number, place.state)
        while self.count < count:
            self.take()

    def take(self) -> Any:
        """Return the next sample; at the end of a pass, the first one of the next pass. Before it
        is read, the global random generators are seeded for it, unless samples draw nothing.

        Raises:
            ConfigError: kind ``stream-empty``: a whole pass has no sample.
        """
        while True:
            self._seed_draws(_SAMPLE_SALT, self.count)
            try:
                sample = next(self._samples)
            except StopIteration:
                if self._place == LanePlace(self.count, self._pass):
                    reason = (
                        f"pass {self._pass} of lane {self.index} of {self._num_lanes} of the "
                        "stream has no sample"
                    )
                    fix = (
                        "let every iteration begin anew, and every part have a sample "
                        "(data.lanes: fewer parts)"
                    )
                    raise ConfigError.of("stream-empty", reason, fix, "data") from None
                self._begin(self._pass + 1)
                continue
            self.count += 1
            return sample

    def place(self) -> LanePlace:
        """Return the last place to begin at.

        It is a new one if the source gives its state, 64 samples were read since the last, and
        states, which may be slow to take, have not taken too much of the time.
        """
        if not self._gives_states or self.count - self._place.count < _SAMPLES_PER_STATE:
            return self._place
        begun = time.perf_counter()
        if begun < self._next_state:
            return self._place
        state = _state_of(self._part)
        if state is None:
            self._gives_states = False
        else:
            self._place = LanePlace(self.count, self._pass, state)
        ended = time.perf_counter()
        self._next_state = ended + _TIME_OF_STATES * self._num_lanes * (ended - begun)
        return self._place

    def _begin(self, number: int, state: bytes | None = None) -> None:
        """Begin pass `number`, or continue it from a state; `count` is where it begins."""
        if self._num_lanes > 1:
            self._part = self._source.shard(num_shards=self._num_lanes, index=self.index)
        _set_epoch(self._part, number)
        if state is not None:
            self._part.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        self._seed_draws(_PASS_SALT, number)
        samples = iter(self._part)
        self._pass = number
        self._samples = samples
        self._place = LanePlace(self.count, number, state)

    def _seed_draws(self, salt: int, number: int) -> None:
        if self._seed is not None:
            seed_generators(mix_int(salt, self._seed, self.index, number))


def _set_epoch(source: Any, epoch: int) -> None:
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _state_of(source: Any) -> bytes | None:
    """Save the state of a source, in plain values; None if it has none that is exact."""
    if not hasattr(source, "load_state_dict") or not _is_exact(source):
        return None
    stream = io.BytesIO()
    try:
        torch.save(source.state_dict(), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception:  # objects of other classes, or a source that has no state yet
        return None
    return stream.getvalue()


def _is_exact(source: Any) -> bool:
    """Check that the state of a Hugging Face stream is exact: one with a shuffled buffer refills
    the buffer with other samples.
    """
    iterables = [getattr(source, "_ex_iterable", None)]
    while iterables:
        iterable = iterables.pop()
        if type(iterable).__name__ == "BufferShuffledExamplesIterable":
            return False
        inner = getattr(iterable, "ex_iterable", None)
        if inner is None:
            iterables += getattr(iterable, "ex_iterables", [])
        else:
            iterables.append(inner)
    return True


class _WorkerItems(IterableDataset[Any]):
    """Items that a function of the worker's number yields."""

    def __init__(self, read: Callable[[int], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        # A source that looks at the worker's number would divide itself once more.
        torch_worker._worker_info = None
        return self._read(0 if info is None else info.id)

    def in_workers(
        self, *, num_workers: int, pin_memory: bool, prefetch_factor: int | None = None
    ) -> Iterator[Any]:
        """Return an iterator over the items of all workers in turn, read in `num_workers`
        processes, or in this one for 0.
        """
        loader = DataLoader(
            self,
            batch_size=None,
            collate_fn=as_it_is,
            # Without a generator here, seeds are drawn from the global one.
            generator=torch.Generator().manual_seed(0),
            num_workers=num_workers,
            worker_init_fn=init_of_workers(),
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
        )
        return iter(loader)


_Key = tuple[int, int]
"""(lane, count) of a sample."""
_BatchPart = tuple[int, _Key, Any]
"""Number of a micro-batch, key of the part's first sample, and its samples or their batch."""


class StreamLoader:
    """Micro-batches of one rank from a stream, as `TrainLoader` reads them from a dataset with
    samples by number.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        share: Share,
        reading: Reading,
        lanes: int | None = None,
        places: Mapping[int, LanePlace] | None = None,
    ) -> None:
        """Divide the stream; nothing is read yet.

        Args:
            dataset: the stream.
            share: of this rank in a step.
            reading: how samples are read; its `prefetch_batches` are steps, not micro-batches.
            lanes: `data.lanes`.
            places: lane -> place to begin at, of a saved run.
        """
        if getattr(dataset, "takes_seed", False):
            dataset.seed = reading.seed
            dataset.draws = reading.random_samples
        self._dataset = dataset
        self._share = share
        self._reading = reading
        self._seed = reading.seed
        self.places = dict(places or {})
        self.earlier_places = dict(self.places)  # before the step that was read last
        self._collate_fn = own_collate(dataset)
        self._sample_seed = reading.seed if reading.random_samples else None
        self.num_lanes = num_lanes(dataset, global_size=share.global_size, requested=lanes)
        self.per_lane = share.global_size // self.num_lanes
        self._per_rank = share.global_size // share.world_size
        self._first = share.rank * self._per_rank  # sample of a step
        end = self._first + self._per_rank
        self._lanes = range(self._first // self.per_lane, -(-end // self.per_lane))
        self._num_workers = min(reading.num_workers, len(self._lanes))

    def stream(self, start_step: int = 0) -> Generator[Any, None, None]:
        """Yield this rank's micro-batches from optimizer step `start_step` on, without end."""
        items = _WorkerItems(partial(self._read, start_step))
        fetching = replace(self._reading, num_workers=self._num_workers).fetching()
        num_batches = self._per_rank // self._share.micro_size
        with explaining_data(self._reading.claims):
            steps = items.in_workers(**fetching)
            try:
                while True:
                    # A batch may be read before the step before it is saved.
                    self.earlier_places = dict(self.places)
                    parts_of: list[list[_BatchPart]] = [[] for _ in range(num_batches)]
                    for _ in range(max(self._num_workers, 1)):
                        parts, places = next(steps)
                        for part in parts:
                            parts_of[part[0]].append(part)
                        # Places come with the step that ends beyond them, however far a worker is.
                        self.places |= places
                    yield from map(self._join, parts_of)
            finally:
                end_workers(steps)

    def _read(
        self, start_step: int, worker: int
    ) -> Iterator[tuple[list[_BatchPart], dict[int, LanePlace]]]:
        """Yield a worker's parts of every step, and the places that are new with it."""
        num_workers = max(self._num_workers, 1)
        first = len(self._lanes) * worker // num_workers
        end = len(self._lanes) * (worker + 1) // num_workers
        indices = self._lanes[first:end]
        lanes = []
        for index in indices:
            lane = Lane(
                self._dataset, index=index, num_lanes=self.num_lanes, seed=self._sample_seed
            )
            lanes.append(lane)
        places: dict[int, LanePlace] = {}
        for step in count(start_step):
            with refusing_exits(), self._random_state():
                if step == start_step:
                    for lane in lanes:
                        place = self.places.get(lane.index, LanePlace(0))
                        lane.start(step * self.per_lane, place)
                samples = []
                for lane in lanes:
                    for _ in range(self.per_lane):
                        key = (lane.index, lane.count)
                        samples.append((key, lane.take()))
                new_places = _changed_places(lanes, places)
                parts = list(self._batch_parts(indices.start * self.per_lane, samples))
            places |= new_places
            yield parts, new_places

    def _random_state(self) -> AbstractContextManager[None]:
        if self._sample_seed is None:
            return nullcontext()
        return random_state_kept()

    def _batch_parts(self, first: int, samples: Sequence[tuple[_Key, Any]]) -> Iterator[_BatchPart]:
        """Cut samples, with their keys, from sample `first` of a step on, into this rank's
        micro-batches.

        A whole micro-batch is collated. So is a part of one, unless the dataset has its own
        `collate_fn`, which may need all samples: then `_join` calls it.
        """
        size = self._share.micro_size
        offset = self._first - first
        for number in range(self._per_rank // size):
            start = offset + number * size
            part = samples[max(start, 0) : max(start + size, 0)]
            if not part:
                continue
            key, _ = part[0]
            values: Any = [sample for _, sample in part]
            if self._collate_fn is None:
                values = collate(values)
            elif len(values) == size:
                values = seeded_collate(self._collate_fn, values, self._seed, key)
            yield number, key, values

    def _join(self, batch_parts: Sequence[_BatchPart]) -> Any:
        """Join the parts of a micro-batch, which several workers may have read."""
        parts = [part for _, _, part in batch_parts]
        if len(parts) == 1:
            return parts[0]
        if self._collate_fn is None:
            batch = _concatenate(parts)
        else:
            samples = list(chain.from_iterable(parts))
            _, key, _ = batch_parts[0]
            batch = seeded_collate(self._collate_fn, samples, self._seed, key)
        if self._reading.pin_memory:
            return pinned(batch)  # type: ignore[no-untyped-call]
        return batch


def _concatenate(parts: Sequence[Any]) -> Any:
    """Join collated parts of a batch: tensors along the first dimension, in any containers."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: _concatenate([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple) and first and isinstance(first[0], str | bytes):
        return type(first)(chain.from_iterable(parts))
    joined = [_concatenate(values) for values in zip(*parts, strict=True)]
    if hasattr(first, "_fields"):
        return type(first)(*joined)
    return type(first)(joined)


class StreamEvalLoader:
    """Batches of one rank as (batch, counts), as in `EvalLoader`. A source in fewer parts than
    ranks is read whole by every rank, and each keeps its own batches.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        gather: Callable[[Any], Sequence[Any]],
        max_samples: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        claims: Claims = claims_nothing,
    ) -> None:
        """Take the arguments of `EvalLoader`; and `gather`, which returns every rank's value. At
        most one worker is started.
        """
        self._dataset = dataset
        self._size = batch_size
        self._most = max_samples
        self._gather = gather
        self._rank = rank
        self._world_size = world_size
        self._pin_memory = pin_memory
        self._num_workers = min(num_workers, 1)
        self._claims = claims

    @property
    def takes_turns(self) -> bool:
        """Whether the ranks take the batches of the stream in turns; otherwise each has a part."""
        return not 1 < self._world_size <= num_divisions(self._dataset)

    def __iter__(self) -> Generator[tuple[Any, bool], None, None]:
        """Yield the batches of one pass. Collective: before every batch the ranks agree whether any
        has one left. A rank without one repeats its last, which does not count.

        Raises:
            ConfigError: kind ``stream-empty``: no rank has a sample.
        """
        items = _WorkerItems(partial(self._read, self._rank, self._world_size))
        with explaining_data(self._claims):
            batches = items.in_workers(num_workers=self._num_workers, pin_memory=self._pin_memory)
            last = None
            try:
                while any(self._gather((batch := next(batches, None)) is not None)):
                    if batch is not None:
                        last = batch
                    elif last is None:
                        # This rank has no batch at all: take the first of the whole stream.
                        last = next(self._read(0, 1))
                    yield last, batch is not None
            finally:
                end_workers(batches)
            if last is None:
                raise ConfigError.of(
                    "stream-empty", "the evaluation stream has no sample", "leave it out", "data"
                )

    def _read(self, part: int, parts: int, _worker: int = 0) -> Iterator[Any]:
        """Yield the batches of part `part` of `parts`, with the same random draws in every pass. A
        stream that has fewer parts is read whole, and every `parts`-th batch of it is this part's.
        """
        dataset = self._dataset
        collate_fn = own_collate(dataset)
        if collate_fn is None:
            collate_fn = collate
        most = self._most
        is_divided = 1 < parts <= num_divisions(dataset)
        if is_divided:
            dataset = dataset.shard(num_shards=parts, index=part)
            if most is not None:
                most = most * (part + 1) // parts - most * part // parts
        _set_epoch(dataset, 0)
        samples = islice(dataset, most)
        for number in count():
            with random_state_kept(), refusing_exits():
                seed_generators(mix_int(_EVALUATION_SALT, part if is_divided else 0, number))
                batch_samples = list(islice(samples, self._size))
                if not batch_samples:
                    return
                is_kept = is_divided or number % parts == part
                if is_kept:
                    batch = collate_fn(batch_samples)
            if is_kept:
                yield batch


class StreamPlaces:
    """Places of a run's lanes, for its checkpoints and from them. All ranks have one."""

    def __init__(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Take `gather`, which returns every rank's value, on every rank."""
        self._gather = gather
        self.restored: dict[int, LanePlace] = {}
        self.loader: StreamLoader | None = None

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the stream for a checkpoint of this step: the last place of every
        lane. Empty if the data is no stream. Collective.
        """
        if self.loader is None:
            return {}
        last: dict[int, LanePlace] = {}
        end = step * self.loader.per_lane
        pairs = self._gather((self.loader.earlier_places, self.loader.places))
        for places in chain.from_iterable(pairs):
            for index, place in places.items():
                if place.count > end:
                    continue
                if index not in last or last[index].count < place.count:
                    last[index] = place
        values = {}
        for index, place in sorted(last.items()):
            values[index] = [place.count, place.number, place.state]
        return {_KEY: values}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the places in the state of a checkpoint."""
        places = state.get(_KEY) or {}
        self.restored = {int(index): LanePlace(*values) for index, values in places.items()}


def _changed_places(lanes: Sequence[Lane], before: Mapping[int, LanePlace]) -> dict[int, LanePlace]:
    """Return the places of the lanes that have another place than before."""
    changed: dict[int, LanePlace] = {}
    for lane in lanes:
        place = lane.place()
        if place != before.get(lane.index):
            changed[lane.index] = place
    return changed

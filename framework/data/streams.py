"""Streams: data without samples by number, read in *lanes*: the samples of a step are a function of (seed, step).

A run reads L lanes at once, L fixed for the run: the largest divisor of the global batch that the source can be divided
into (``num_shards`` and ``shard(num_shards=, index=)``, as datasets of Hugging Face have; otherwise 1). A step takes
global_size / L consecutive samples of every lane, in the order of lanes. So neither ranks nor workers change what a
step holds, and where a lane stands is a function of the step: a resume counts up to there, from the beginning of the
lane's pass, or from a state that the source gave while the run trained (``state_dict``, ``load_state_dict``).

A rank reads the lanes that its share of the step touches, its workers divide them. A lane that several ranks touch is
read by each of them. A lane that ends begins anew, with ``set_epoch(pass)`` where it has that.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from framework.data.batches import as_it_is, collate, own_collate, random_state_kept, seed_generators, seeded_collate
from framework.data.loaders import init_of_workers, num_samples_of_epoch
from framework.data.order import Share, mix_int
from framework.errors import ConfigError
from framework.system.exits import refusing_exits

MOST_LANES: Final = 64
"""Unless `data.lanes` asks for more: every lane has a file open."""
_KEY: Final = "stream"  # `checkpoint.names.STREAM`
_SAMPLE_SALT: Final = 0x57E4
_PASS_SALT: Final = 0x9A55
_EVALUATION_SALT: Final = 0xE7A3
_SAMPLES_PER_STATE: Final = 64
_TIME_OF_STATES: Final = 20  # one is taken when so many times the time has passed that the last one took


class Shardable(Protocol):
    """A stream that can be divided."""

    num_shards: int

    def shard(self, num_shards: int, index: int) -> Any:
        """Part `index` of `num_shards`: iterable, each with a part of the samples, together all of them."""


def is_stream(dataset: Any) -> bool:
    """Check for an iterable of the user's without samples by number."""
    is_iterable = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (is_iterable and type(dataset).__module__ != "builtins")


def num_samples(dataset: Any) -> int | None:
    """Count the samples of an epoch; None where only reading them all would."""
    return None if is_stream(dataset) else num_samples_of_epoch(dataset)


def num_divisions(dataset: Any) -> int:
    """Count the parts that a stream can be divided into."""
    found = getattr(dataset, "num_shards", None)
    return max(found, 1) if isinstance(found, int) and callable(getattr(dataset, "shard", None)) else 1


def num_lanes(dataset: Any, *, global_size: int, asked: int | None = None) -> int:
    """Count the lanes of a run: `asked`, or the largest divisor of the global batch up to 64 and the source's parts.

    Raises:
        ConfigError: kind ``stream-lanes``: `asked` is more than the source has, or does not divide the batch.
    """
    most = num_divisions(dataset)
    if asked is None:
        return max(count for count in range(1, min(most, MOST_LANES, global_size) + 1) if global_size % count == 0)
    largest = max(count for count in range(1, min(most, asked, global_size) + 1) if global_size % count == 0)
    if largest == asked:
        return asked
    reason = f"the stream can be read in {most} parts at once"
    if asked <= most:
        reason = f"a step takes equally many samples of each, and has {global_size}"
    raise ConfigError.of("stream-lanes", reason, f"set data.lanes: {largest}, or leave it out", "data.lanes", asked)


@dataclass(frozen=True)
class Place:
    """A place where a lane can be begun: its samples up to there, its pass, and the source's state (None: the pass)."""

    count: int
    number: int = 0
    state: bytes | None = None


class Lane:
    """One part of a stream, read pass after pass; what a sample draws at random depends on (seed, lane, count)."""

    def __init__(self, source: Any, *, index: int, num_lanes: int, seed: int | None) -> None:
        """`seed` is `run.seed`, or None where samples draw nothing."""
        self._source, self._index, self._num_lanes, self._seed = source, index, num_lanes, seed
        self.count = 0
        self._pass = -1
        self._samples: Iterator[Any] = iter(())
        self._part: Any = None
        self._place = Place(0)
        self._gives_states, self._next = True, 0.0

    def start(self, count: int, place: Place) -> None:
        """Go to where `count` samples were read: to a place before that, and on by reading."""
        self.count = place.count
        self._begin(place.number, place.state)
        while self.count < count:
            self.take()

    def take(self) -> Any:
        """The next sample.

        Raises:
            ConfigError: kind ``stream-empty``: a whole pass has none.
        """
        is_fresh = self._place.count == self.count and self._place.state is None
        while True:
            self._seeded(_SAMPLE_SALT, self.count)
            try:
                sample = next(self._samples)
            except StopIteration:
                if is_fresh:
                    where = f" of {self._num_lanes}" if self._num_lanes > 1 else ""
                    reason = f"pass {self._pass} of lane {self._index}{where} of the stream has no sample"
                    fix = "let every iteration begin anew, and every part have a sample (data.lanes: fewer parts)"
                    raise ConfigError.of("stream-empty", reason, fix, "data") from None
                self._begin(self._pass + 1)
                is_fresh = True
                continue
            self.count += 1
            return sample

    def place(self) -> Place:
        """The last place to begin at; a new one after 64 samples, where the source gives its state."""
        is_due = self.count - self._place.count >= _SAMPLES_PER_STATE
        if self._gives_states and is_due and time.perf_counter() >= self._next:
            begun = time.perf_counter()
            state = _state_of(self._part)
            self._gives_states = state is not None
            if state is not None:
                self._place = Place(self.count, self._pass, state)
            ended = time.perf_counter()
            self._next = ended + _TIME_OF_STATES * (ended - begun)
        return self._place

    def _begin(self, number: int, state: bytes | None = None) -> None:
        """Begin a pass, or go on in it."""
        if self._part is None or self._num_lanes > 1:
            source = self._source
            self._part = source.shard(num_shards=self._num_lanes, index=self._index) if self._num_lanes > 1 else source
        if callable(set_epoch := getattr(self._part, "set_epoch", None)):
            set_epoch(number)
        if state is not None:
            self._part.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        self._seeded(_PASS_SALT, number)
        self._pass, self._samples = number, iter(self._part)
        self._place = Place(self.count, number, state)

    def _seeded(self, salt: int, number: int) -> None:
        if self._seed is not None:
            seed_generators(mix_int(salt, self._seed, self._index, number))


def _state_of(part: Any) -> bytes | None:
    """The state of a source, to be read back with nothing but plain values; None where it has none that is exact."""
    if not hasattr(part, "load_state_dict") or not _is_exact(part):
        return None
    try:
        torch.save(part.state_dict(), stream := io.BytesIO())
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception:  # objects of other classes, or a source that has no state yet
        return None
    return stream.getvalue()


def _is_exact(part: Any) -> bool:
    """Check a stream of Hugging Face's: one that shuffles would refill its buffer with other samples."""
    if not type(part).__module__.startswith("datasets."):
        return True
    formatting, found = getattr(part, "_formatting", None), [getattr(part, "_ex_iterable", None)]
    if getattr(formatting, "is_table", False):
        return False
    while found:
        each = found.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return False
        inner = getattr(each, "ex_iterable", None)
        found += getattr(each, "ex_iterables", []) if inner is None else [inner]
    return True


Piece = tuple[int, tuple[int, int], Any]
"""Micro-batch of the rank's share, (lane, count) of its first sample, and the batch or a part of it."""


class _Reading(IterableDataset[tuple[list[Piece], dict[int, Place]]]):
    """Reading of a rank's lanes from a step on, divided among its workers: an item is a worker's part of a step."""

    def __init__(self, loader: StreamLoader, start_step: int, num_workers: int) -> None:
        self._loader, self._start_step, self._num_workers = loader, start_step, max(num_workers, 1)

    def __iter__(self) -> Iterator[tuple[list[Piece], dict[int, Place]]]:
        info, of = get_worker_info(), self._loader
        # A source that looks would divide itself once more: what it is asked for is read whole.
        torch_worker._worker_info = None
        number = 0 if info is None else info.id
        own = range(
            of.lanes.start + len(of.lanes) * number // self._num_workers,
            of.lanes.start + len(of.lanes) * (number + 1) // self._num_workers,
        )
        per_lane, seed = of.per_lane, of.seed if of.random_samples else None
        lanes = [Lane(of.dataset, index=index, num_lanes=of.num_lanes, seed=seed) for index in own]
        places: dict[int, Place] = {}
        is_begun = False
        while True:
            with ExitStack() as around:
                around.enter_context(refusing_exits())
                if seed is not None:
                    around.enter_context(random_state_kept())
                if not is_begun:
                    for lane, index in zip(lanes, own, strict=True):
                        lane.start(self._start_step * per_lane, of.places.get(index, Place(0)))
                    is_begun = True
                samples = [
                    ((index, lane.count), lane.take())
                    for lane, index in zip(lanes, own, strict=True)
                    for _ in range(per_lane)
                ]
                found = {index: lane.place() for lane, index in zip(lanes, own, strict=True)}
                item = self._pieces(own.start * per_lane, samples)
            news = {index: place for index, place in found.items() if places.get(index) != place}
            places |= news
            yield item, news

    def _pieces(self, first: int, samples: Sequence[tuple[tuple[int, int], Any]]) -> list[Piece]:
        """Cut samples, which have the places of a step from `first` on, into the rank's micro-batches."""
        of, pieces = self._loader, []
        for number, start in enumerate(range(of.start, of.start + of.per_rank, of.micro_size)):
            part = samples[max(start - first, 0) : max(start - first + of.micro_size, 0)]
            if part:
                values = [sample for _, sample in part]
                pieces.append((number, part[0][0], of.collated(part[0][0], values)))
        return pieces


class StreamLoader:
    """Micro-batches of one rank from a stream, as `TrainLoader` gives those of a dataset with samples by number."""

    def __init__(
        self,
        dataset: Any,
        *,
        share: Share,
        seed: int,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        random_samples: bool = True,
        lanes: int | None = None,
        places: Mapping[int, Place] | None = None,
    ) -> None:
        """Divide the stream; nothing is read yet.

        Args:
            dataset: what `is_stream` accepts; its `collate_fn`, if it has one, makes the batches.
            share: of this rank in a step.
            seed: `run.seed`.
            num_workers: processes that read ahead; no more than this rank has lanes are started.
            prefetch_batches: steps that each worker keeps ready.
            pin_memory: copy batches into page-locked memory.
            random_samples: seed the generators for every sample by (seed, lane, count).
            lanes: parts that are read at once; None: `num_lanes` decides.
            places: where lanes can be begun (`state` of a saved run); the rest is counted.

        Raises:
            ConfigError: kind ``stream-lanes``.
        """
        self.dataset, self.seed, self.random_samples, self.places = dataset, seed, random_samples, dict(places or {})
        self.num_lanes = num_lanes(dataset, global_size=share.global_size, asked=lanes)
        self.per_lane, self.micro_size = share.global_size // self.num_lanes, share.micro_size
        self.per_rank = share.global_size // share.world_size
        self.start = share.rank * self.per_rank
        self.lanes = range(self.start // self.per_lane, (self.start + self.per_rank - 1) // self.per_lane + 1)
        self._num_workers, self._pin_memory = min(num_workers, len(self.lanes)), pin_memory
        self._fetching: dict[str, Any] = {"prefetch_factor": prefetch_batches} if num_workers > 0 else {}
        self._own = own_collate(dataset)

    def stream(self, start_step: int = 0) -> Generator[Any, None, None]:
        """This rank's micro-batches from optimizer step `start_step` on, without end."""
        num_parts, num_batches = max(self._num_workers, 1), self.per_rank // self.micro_size
        reading = DataLoader(
            _Reading(self, start_step, num_parts),
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=init_of_workers(),
            generator=torch.Generator().manual_seed(self.seed),
            **self._fetching,
        )
        parts = iter(reading)
        try:
            while True:
                batches: list[list[Piece]] = [[] for _ in range(num_batches)]
                for _ in range(num_parts):
                    pieces, places = next(parts)
                    for piece in pieces:
                        batches[piece[0]].append(piece)
                    # A worker is ahead of the run: a place comes with the step that ends beyond it.
                    self.places |= places
                for found in batches:
                    yield self._joined(found)
        finally:
            del parts  # the last reference: a DataLoader iterator stops its workers when it is collected

    def collated(self, key: tuple[int, int], samples: list[Any]) -> Any:
        """Collate in the worker: a whole micro-batch, or a part of one where torch's default makes it."""
        if self._own is None:
            return collate(samples)
        return seeded_collate(self._own, samples, self.seed, key) if len(samples) == self.micro_size else samples

    def _joined(self, pieces: Sequence[Piece]) -> Any:
        """Join the parts of a micro-batch whose samples several workers have read."""
        if len(pieces) == 1:
            return pieces[0][2]
        parts = [part for _, _, part in pieces]
        if self._own is None:
            joined = _concatenated(parts)
        else:
            samples = [sample for part in parts for sample in part]
            joined = seeded_collate(self._own, samples, self.seed, pieces[0][1])
        return pinned(joined) if self._pin_memory else joined  # type: ignore[no-untyped-call]


def _concatenated(parts: Sequence[Any]) -> Any:
    """Join collated parts of a batch: tensors along the first dimension, in whatever containers."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: _concatenated([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple) and first and isinstance(first[0], str | bytes):
        return type(first)(chain.from_iterable(parts))
    joined = [_concatenated(values) for values in zip(*parts, strict=True)]
    return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)


class StreamEvalLoader:
    """Batches of one rank as (batch, counts), as `EvalLoader` gives those of a dataset with samples by number.

    A source in fewer parts than ranks is read whole by every rank, which keeps its own batches.
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
    ) -> None:
        """Divide the stream; arguments as of `EvalLoader`, and `gather`: every rank's value, on every rank."""
        self._dataset, self._batch_size, self._max_samples, self._gather = dataset, batch_size, max_samples, gather
        workers = num_workers if num_divisions(dataset) >= world_size * num_workers else min(num_workers, 1)
        self._own = _Evaluated(dataset, batch_size, rank, world_size, max(workers, 1), max_samples)
        self._fetching: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "worker_init_fn": init_of_workers(),
        }

    def __iter__(self) -> Generator[tuple[Any, bool], None, None]:
        """One pass. Collective: before every batch the ranks agree on whether any has one left."""
        generator = torch.Generator().manual_seed(0)
        batches = iter(
            DataLoader(self._own, batch_size=None, collate_fn=as_it_is, generator=generator, **self._fetching)
        )
        kept = None
        while any(self._gather((batch := next(batches, None)) is not None)):
            if batch is None and kept is None:
                kept = next(iter(_Evaluated(self._dataset, self._batch_size, 0, 1, 1, None)))
            kept = kept if batch is None else batch
            yield kept, batch is not None
        if kept is None:
            fix = "give it a sample, or leave it out"
            raise ConfigError.of("stream-empty", "the evaluation stream has no sample", fix, "data")


class _Evaluated(IterableDataset[Any]):
    """Finished batches of a rank, or of one of its workers; what they draw is the same in every pass."""

    def __init__(
        self, dataset: Any, batch_size: int, rank: int, world_size: int, num_workers: int, max_samples: int | None
    ) -> None:
        self._dataset, self._batch_size, self._max_samples = dataset, batch_size, max_samples
        self._rank, self._world_size, self._num_workers = rank, world_size, num_workers

    def __iter__(self) -> Iterator[Any]:
        info, size = get_worker_info(), self._batch_size
        torch_worker._worker_info = None
        part, parts = self._rank * self._num_workers + (info.id if info else 0), self._world_size * self._num_workers
        dataset, own, most = self._dataset, own_collate(self._dataset), self._max_samples
        is_divided = 1 < parts <= num_divisions(dataset)
        if is_divided:
            dataset = dataset.shard(num_shards=parts, index=part)
            most = None if most is None else most * (part + 1) // parts - most * part // parts
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(0)
        samples = islice(dataset, most)
        for number in count():
            with random_state_kept(), refusing_exits():
                seed_generators(mix_int(_EVALUATION_SALT, part if is_divided else 0, number))
                found = list(islice(samples, size))
                if not found:
                    return
                if is_divided or number % parts == part:
                    batch = collate(found) if own is None else own(found)
                else:
                    continue
            yield batch


class StreamPlaces:
    """Places of a run's lanes, for its checkpoints and from them. All ranks have one."""

    def __init__(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """`gather` is collective: every rank's value, on every rank."""
        self._gather = gather
        self.found: dict[int, Place] = {}
        self.loader: StreamLoader | None = None

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of this step keeps of the stream; nothing where the data is none. Collective."""
        if self.loader is None:
            return {}
        end = step * self.loader.per_lane
        own = {index: place for index, place in self.loader.places.items() if place.count <= end}
        best = dict(self.found)
        for places in self._gather(own):
            for index, place in places.items():
                if index not in best or best[index].count < place.count:
                    best[index] = place
        return {_KEY: {index: [place.count, place.number, place.state] for index, place in sorted(best.items())}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the places that a checkpoint holds."""
        self.found = {int(index): Place(*place) for index, place in (state.get(_KEY) or {}).items()}

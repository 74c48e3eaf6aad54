"""Streams: data without samples by number, read in *lanes*: the samples of a step are a function of
(seed, step).

A run reads L lanes at once, L fixed for the run: the largest divisor of the global batch that the
source can be divided into (``num_shards`` and ``shard(num_shards=, index=)``, as datasets of
Hugging Face have; otherwise 1). A step takes global_size / L consecutive samples of every lane, in
the order of lanes. So neither ranks nor workers change what a step holds, and where a lane stands
is a function of the step: a resume counts up to there, from the beginning of the lane's pass, or
from a state that the source gave while the run trained (``state_dict``, ``load_state_dict``).

A rank reads the lanes that its share of a step touches, its workers divide them. A lane that ends
begins anew, with ``set_epoch(pass)`` where it has that.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from framework.data.loaders import init_of_workers
from framework.data.order import Share, mix_int
from framework.errors import ConfigError
from framework.system.exits import refusing_exits

_MOST_LANES: Final = 64  # unless `data.lanes` asks for more: every lane has a file open
_KEY: Final = "stream"  # `checkpoint.names.STREAM`
_SAMPLE_SALT: Final = 0x57E4
_PASS_SALT: Final = 0x9A55
_EVALUATION_SALT: Final = 0xE7A3
_SAMPLES_PER_STATE: Final = 64
_TIME_OF_STATES: Final = 20  # times the last one took, times lanes, to the next


def num_divisions(dataset: Any) -> int:
    """Count the parts that a stream can be divided into."""
    found = getattr(dataset, "num_shards", None)
    if isinstance(found, int) and callable(getattr(dataset, "shard", None)):
        return max(found, 1)
    return 1


def num_lanes(dataset: Any, *, global_size: int, asked: int | None = None) -> int:
    """Count the lanes of a run: `asked`, or the largest divisor of the global batch up to 64 and
    the source's parts; a ConfigError, kind ``stream-lanes``, where it cannot be as asked.
    """
    most = num_divisions(dataset)
    largest = min(most, asked or _MOST_LANES, global_size)
    while global_size % largest:
        largest -= 1
    if asked in (None, largest):
        return largest
    reason = (
        f"the stream has {most} parts, and a step of {global_size} samples takes as many of each"
    )
    raise ConfigError.of(
        "stream-lanes", reason, f"set data.lanes: {largest}, or leave it out", "data.lanes", asked
    )


@dataclass(frozen=True)
class Place:
    """A place where a lane can be begun: its samples up to there, its pass, and the source's state
    (None: the pass).
    """

    count: int
    number: int = 0
    state: bytes | None = None


class Lane:
    """One part of a stream, read pass after pass; what a sample draws at random depends on (seed,
    lane, count).
    """

    def __init__(self, source: Any, *, index: int, num_lanes: int, seed: int | None) -> None:
        """`seed` is `run.seed`, or None where samples draw nothing."""
        self._source = source
        self.index = index
        self._num_lanes = num_lanes
        self._seed = seed
        self._part = source
        self._place = Place(0)
        self._gives_states = True
        self._next_state = 0.0

    def start(self, count: int, place: Place) -> None:
        """Go to where `count` samples were read: to a place before that, and on by reading."""
        self.count = place.count
        self._begin(place.number, place.state)
        while self.count < count:
            self.take()

    def take(self) -> Any:
        """The next sample; a ConfigError, kind ``stream-empty``, where a whole pass has none."""
        while True:
            self._draw_by(_SAMPLE_SALT, self.count)
            try:
                sample = next(self._samples)
            except StopIteration:
                if self._place == Place(self.count, self._pass):
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

    def place(self) -> Place:
        """The last place to begin at; a new one after 64 samples, where the source gives its
        state.
        """
        is_due = self.count - self._place.count >= _SAMPLES_PER_STATE
        if is_due and self._gives_states and (begun := time.perf_counter()) >= self._next_state:
            state = _state_of(self._part)
            self._gives_states = state is not None
            if state is not None:
                self._place = Place(self.count, self._pass, state)
            ended = time.perf_counter()
            self._next_state = ended + _TIME_OF_STATES * self._num_lanes * (ended - begun)
        return self._place

    def _begin(self, number: int, state: bytes | None = None) -> None:
        """Begin a pass, or go on in it."""
        if self._num_lanes > 1:
            self._part = self._source.shard(num_shards=self._num_lanes, index=self.index)
        _set_epoch(self._part, number)
        if state is not None:
            self._part.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        self._draw_by(_PASS_SALT, number)
        self._pass, self._samples, self._place = (
            number,
            iter(self._part),
            Place(self.count, number, state),
        )

    def _draw_by(self, salt: int, number: int) -> None:
        if self._seed is not None:
            seed_generators(mix_int(salt, self._seed, self.index, number))


def _set_epoch(source: Any, epoch: int) -> None:
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _state_of(source: Any) -> bytes | None:
    """The state of a source in plain values; None where it has none that is exact."""
    if not hasattr(source, "load_state_dict") or not _is_exact(source):
        return None
    try:
        torch.save(source.state_dict(), stream := io.BytesIO())
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception:  # objects of other classes, or a source that has no state yet
        return None
    return stream.getvalue()


def _is_exact(source: Any) -> bool:
    """Check a stream of Hugging Face's, which would refill a shuffled buffer with others."""
    found = [getattr(source, "_ex_iterable", None)]
    while found:
        each = found.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return False
        inner = getattr(each, "ex_iterable", None)
        found += getattr(each, "ex_iterables", []) if inner is None else [inner]
    return True


class _Read(IterableDataset[Any]):
    """Items that a function of a worker's number yields."""

    def __init__(self, read: Callable[[int], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        # A source that looks would divide itself once more: what it is asked for is read whole.
        torch_worker._worker_info = None
        return self._read(0 if info is None else info.id)

    def in_workers(self, num_workers: int, **options: Any) -> Iterator[Any]:
        options |= {"num_workers": num_workers, "worker_init_fn": init_of_workers()}
        # without one, seeds are drawn from the global generator
        generator = torch.Generator().manual_seed(0)
        return iter(
            DataLoader(self, batch_size=None, collate_fn=as_it_is, generator=generator, **options)
        )


# number of a micro-batch, (lane, count) of the first sample, all or a part
Piece = tuple[int, tuple[int, int], Any]


class StreamLoader:
    """Micro-batches of one rank from a stream, as `TrainLoader` gives those of a dataset with
    samples by number.
    """

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
        """Divide the stream; nothing is read yet. Arguments are as of `TrainLoader` and of the
        config, but workers keep whole steps ready; `places`: where lanes can be begun, of a saved
        run.
        """
        if getattr(dataset, "takes_seed", False):
            dataset.seed = seed
            dataset.draws = random_samples
        self._dataset = dataset
        self._share = share
        self._seed = seed
        self.places = dict(places or {})
        self._own = own_collate(dataset)
        self._drawn = seed if random_samples else None
        self.num_lanes = num_lanes(dataset, global_size=share.global_size, asked=lanes)
        self.per_lane = share.global_size // self.num_lanes
        self._per_rank = share.global_size // share.world_size
        first = share.rank * self._per_rank
        self._first, self._lanes = (
            first,
            range(first // self.per_lane, -(-(first + self._per_rank) // self.per_lane)),
        )
        self._num_workers = min(num_workers, len(self._lanes))
        self._pin_memory = pin_memory
        self._fetching = {"prefetch_factor": prefetch_batches} if num_workers > 0 else {}

    def stream(self, start_step: int = 0) -> Generator[Any, None, None]:
        """This rank's micro-batches from optimizer step `start_step` on, without end."""
        reading = _Read(partial(self._read, start_step))
        parts = reading.in_workers(self._num_workers, pin_memory=self._pin_memory, **self._fetching)
        try:
            while True:
                batches: list[list[Piece]] = [
                    [] for _ in range(self._per_rank // self._share.micro_size)
                ]
                for _ in range(max(self._num_workers, 1)):
                    pieces, places = next(parts)
                    for piece in pieces:
                        batches[piece[0]].append(piece)
                    # which come with the step that ends beyond them, however far a worker is
                    self.places |= places
                yield from map(self._joined, batches)
        finally:
            # the last reference: a DataLoader iterator stops its workers when it is collected
            del parts

    def _read(self, start_step: int, worker: int) -> Iterator[tuple[list[Piece], dict[int, Place]]]:
        """A worker's part of every step, and the places that are new with it."""
        workers = max(self._num_workers, 1)
        all_lanes = self._lanes
        own = all_lanes[
            len(all_lanes) * worker // workers : len(all_lanes) * (worker + 1) // workers
        ]
        lanes = [
            Lane(self._dataset, index=index, num_lanes=self.num_lanes, seed=self._drawn)
            for index in own
        ]
        known: dict[int, Place] = {}
        for step in count(start_step):
            with refusing_exits(), nullcontext() if self._drawn is None else random_state_kept():
                for lane in lanes if step == start_step else ():
                    lane.start(step * self.per_lane, self.places.get(lane.index, Place(0)))
                samples = [
                    ((lane.index, lane.count), lane.take())
                    for lane in lanes
                    for _ in range(self.per_lane)
                ]
                news = {
                    lane.index: place
                    for lane in lanes
                    if (place := lane.place()) != known.get(lane.index)
                }
                pieces = list(self._pieces(own.start * self.per_lane, samples))
            known |= news
            yield pieces, news

    def _pieces(
        self, first: int, samples: Sequence[tuple[tuple[int, int], Any]]
    ) -> Iterator[Piece]:
        """Cut samples, from the place `first` of a step on, into micro-batches, collated if whole
        or by default.
        """
        size = self._share.micro_size
        offset = self._first - first
        for number in range(self._per_rank // size):
            start = offset + number * size
            part = samples[max(start, 0) : max(start + size, 0)]
            if part:
                key = part[0][0]
                values = [sample for _, sample in part]
                if self._own is None:
                    yield number, key, collate(values)
                else:
                    is_whole = len(values) == size
                    yield (
                        number,
                        key,
                        seeded_collate(self._own, values, self._seed, key) if is_whole else values,
                    )

    def _joined(self, pieces: Sequence[Piece]) -> Any:
        """Join the parts of a micro-batch whose samples several workers have read."""
        parts = [part for _, _, part in pieces]
        if len(parts) == 1:
            return parts[0]
        if self._own is None:
            joined = _concatenated(parts)
        else:
            joined = seeded_collate(
                self._own, [*chain.from_iterable(parts)], self._seed, pieces[0][1]
            )
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
    if hasattr(first, "_fields"):
        return type(first)(*joined)
    return type(first)(joined)


class StreamEvalLoader:
    """Batches of one rank as (batch, counts), as of `EvalLoader`. A source in fewer parts than
    ranks is read whole by every rank, which keeps its own batches.
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
        """Arguments are as of `EvalLoader`, and `gather`: every rank's value. One worker is started
        at most.
        """
        self._dataset = dataset
        self._size = batch_size
        self._most = max_samples
        self._gather = gather
        self._own = (rank, world_size)
        self._fetching = {"pin_memory": pin_memory, "num_workers": min(num_workers, 1)}

    def __iter__(self) -> Generator[tuple[Any, bool], None, None]:
        """One pass. Collective: before every batch the ranks agree on whether any has one left."""
        batches = _Read(partial(self._read, *self._own)).in_workers(**self._fetching)
        kept = None
        while any(self._gather((batch := next(batches, None)) is not None)):
            if batch is None and kept is None:
                kept = next(self._read(0, 1))
            kept = kept if batch is None else batch
            yield kept, batch is not None
        if kept is None:
            raise ConfigError.of(
                "stream-empty", "the evaluation stream has no sample", "leave it out", "data"
            )

    def _read(self, part: int, parts: int, _worker: int = 0) -> Iterator[Any]:
        """The batches of one of so many parts; what they draw is the same in every pass."""
        dataset = self._dataset
        own = own_collate(self._dataset)
        most = self._most
        is_divided = 1 < parts <= num_divisions(dataset)
        if is_divided:
            dataset = dataset.shard(num_shards=parts, index=part)
            if most is None:
                most = None
            else:
                most = most * (part + 1) // parts - most * part // parts
        _set_epoch(dataset, 0)
        samples = islice(dataset, most)
        for number in count():
            with random_state_kept(), refusing_exits():
                seed_generators(mix_int(_EVALUATION_SALT, part if is_divided else 0, number))
                found = list(islice(samples, self._size))
                if not found:
                    return
                is_kept = is_divided or number % parts == part
                if is_kept:
                    if own is None:
                        batch = collate(found)
                    else:
                        batch = own(found)
            if is_kept:
                yield batch


class StreamPlaces:
    """Places of a run's lanes, for its checkpoints and from them. All ranks have one."""

    def __init__(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """`gather`: every rank's value, on every rank."""
        self._gather = gather
        self.found: dict[int, Place] = {}
        self.loader: StreamLoader | None = None

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of this step keeps of the stream; nothing where the data is none.
        Collective.
        """
        if self.loader is None:
            return {}
        best = dict[int, Place]()
        end = step * self.loader.per_lane
        for index, place in chain.from_iterable(
            each.items() for each in self._gather(self.loader.places)
        ):
            if place.count <= end and (index not in best or best[index].count < place.count):
                best[index] = place
        return {
            _KEY: {
                index: [place.count, place.number, place.state]
                for index, place in sorted(best.items())
            }
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the places that a checkpoint holds."""
        self.found = {int(index): Place(*place) for index, place in (state.get(_KEY) or {}).items()}

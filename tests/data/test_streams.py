"""Streams: a step's samples depend on seed and step alone, and a resume reads no more than it has
to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from framework.data.order import Share
from framework.data.streams import StreamEvalLoader, StreamLoader, StreamPlaces, num_lanes
from framework.errors import ConfigError
from tests.data.loader_of import stream_loader

GLOBAL = 12
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(IterableDataset[Any]):
    """Numbers in parts of unequal length, with what was drawn beside each; counts its reads."""

    def __init__(
        self, ends: tuple[int, ...] = (7, 30, 4, 11, 25, 9), parts: range | None = None
    ) -> None:
        self.ends, self.parts, self.read, self.epoch = ends, parts or range(len(ends)), [0], 0
        self.num_shards = len(self.parts)

    def shard(self, num_shards: int, index: int) -> Numbers:
        own = Numbers(self.ends, self.parts[index::num_shards])
        own.read = self.read
        return own

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for part in self.parts:
            for number in range(self.ends[part]):
                self.read[0] += 1
                yield (
                    10_000 * self.epoch + 100 * part + number,
                    random.random() + torch.rand(()).item(),
                )


class Stateful(Numbers):
    """Gives its state, and begins where it was."""

    start = 0

    def shard(self, num_shards: int, index: int) -> Stateful:
        own = Stateful(self.ends, self.parts[index::num_shards])
        own.read = self.read
        return own

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "where": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = int(state["where"])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        whole = [(part, number) for part in self.parts for number in range(self.ends[part])]
        self.at, self.start = self.start, 0
        for part, number in whole[self.at :]:
            self.read[0] += 1
            self.at += 1
            yield 10_000 * self.epoch + 100 * part + number, random.random() + torch.rand(()).item()


class Texts(IterableDataset[Any]):
    """One part, dicts of a text and a tensor, and a `collate_fn` that draws, or torch's."""

    def __init__(self, *, collates: bool) -> None:
        if collates:
            self.collate_fn = lambda samples: (
                [sample["text"] for sample in samples],
                random.random(),
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (
            {"text": str(number), "x": torch.tensor([number]), "pair": (number, str(number))}
            for number in range(31)
        )


def loader(
    dataset: Any, *, ranks: int = 1, rank: int = 0, micro: int = 2, **options: Any
) -> StreamLoader:
    share = Share(GLOBAL, micro, GLOBAL // ranks // micro, rank, ranks)
    return stream_loader(dataset, share=share, seed=3, **options)


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, list | tuple) else batch


def steps(
    dataset: Any, count: int, *, start: int = 0, ranks: int = 1, micro: int = 2, **options: Any
) -> list[Any]:
    """Return the samples of some steps, all ranks' together, sample by sample."""
    found: list[Any] = [[] for _ in range(count)]
    for rank in range(ranks):
        stream = loader(dataset, ranks=ranks, rank=rank, micro=micro, **options).stream(start)
        for step in range(count):
            for batch in islice(stream, GLOBAL // ranks // micro):
                found[step] += [*zip(*plain(batch), strict=True)]
        stream.close()
    return found


class TestSamples:
    def test_a_step_takes_as_many_of_every_lane_and_lanes_begin_anew(self) -> None:
        found = [[number for number, _ in step] for step in steps(Numbers(), 4)]
        assert found[0] == [0, 1, 100, 101, 200, 201, 300, 301, 400, 401, 500, 501]
        assert found[2] == [4, 5, 104, 105, 10200, 10201, 304, 305, 404, 405, 504, 505]
        assert found[3][:2] == [6, 10000]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("ranks", "micro", "workers"),
        [(1, 3, 0), (1, 12, 0), (2, 2, 0), (3, 4, 0), (4, 1, 0), (1, 3, 2), (2, 2, 2), (1, 12, 5)],
    )
    def test_neither_ranks_nor_workers_nor_micro_batches_change_them(
        self, ranks: int, micro: int, workers: int
    ) -> None:
        alone = steps(Numbers(), 8)
        assert len({value for step in alone for _, value in step}) == 8 * GLOBAL
        assert steps(Numbers(), 8, ranks=ranks, micro=micro, num_workers=workers) == alone

    @pytest.mark.slow
    @pytest.mark.parametrize("stateful", [False, True])
    @pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (2, 2)])
    def test_a_resume_at_any_step_goes_on(self, ranks: int, workers: int, stateful: bool) -> None:
        dataset = Stateful() if stateful else Numbers()
        whole = steps(dataset, 12)
        for start in (5,) if workers else (1, 5, 9):
            assert (
                steps(dataset, 2, start=start, ranks=ranks, micro=1, num_workers=workers)
                == whole[start : start + 2]
            )

    def test_without_random_samples_nothing_is_seeded(self) -> None:
        random.seed(1)
        first = steps(Numbers(), 1, random_samples=False)
        assert steps(Numbers(), 1, random_samples=False) != first

    def test_the_generators_of_the_process_are_left_alone(self) -> None:
        states = random.getstate(), torch.get_rng_state()
        steps(Numbers(), 2)
        assert random.getstate() == states[0]
        assert torch.equal(torch.get_rng_state(), states[1])

    @pytest.mark.slow
    @pytest.mark.parametrize("collates", [False, True])
    def test_a_stream_of_one_part_is_read_by_every_rank(self, collates: bool) -> None:
        def batches(ranks: int, micro: int, workers: int) -> list[Any]:
            streams = [
                loader(
                    Texts(collates=collates),
                    ranks=ranks,
                    rank=rank,
                    micro=micro,
                    num_workers=workers,
                ).stream(2)
                for rank in range(ranks)
            ]
            return [
                plain(batch)
                for stream in streams
                for batch in islice(stream, GLOBAL // ranks // micro)
            ]

        alone = batches(1, 4, 0)
        assert batches(3, 4, 0) == alone == batches(3, 4, 2)
        if not collates:
            assert alone[0]["text"] == ["24", "25", "26", "27"]
            assert alone[0]["pair"] == [[24, 25, 26, 27], ["24", "25", "26", "27"]]

    @pytest.mark.slow
    def test_parts_of_a_micro_batch_are_joined_as_collated_together(self) -> None:
        class Divided(Texts):
            num_shards = 4

            def shard(self, num_shards: int, index: int) -> Any:
                return [
                    sample
                    for number, sample in enumerate(Texts.__iter__(self))
                    if number % num_shards == index
                ]

        for collates in (False, True):
            both = [
                [
                    plain(batch)
                    for batch in islice(
                        loader(Divided(collates=collates), micro=6, num_workers=n).stream(), 6
                    )
                ]
                for n in (0, 3)
            ]
            assert both[0] == both[1]


class TestLanes:
    @pytest.mark.parametrize(
        ("parts", "size", "lanes"),
        [(1, 8, 1), (8, 8, 8), (7, 12, 6), (1000, 96, 48), (1000, 7, 7), (5, 7, 1)],
    )
    def test_their_number_divides_the_step(self, parts: int, size: int, lanes: int) -> None:
        assert num_lanes(Numbers((1,) * parts), global_size=size) == lanes

    @pytest.mark.parametrize(
        ("asked", "largest"),
        [(8, 6), (5, 4)],
    )
    def test_those_that_do_not_exist_are_refused(self, asked: int, largest: int) -> None:
        with pytest.raises(ConfigError, match="stream-lanes") as caught:
            loader(Numbers(), lanes=asked)
        reason = "the stream has 6 parts, and a step of 12 samples takes as many of each"
        assert f"data.lanes = {asked}: {reason}; set data.lanes: {largest}" in str(caught.value)
        assert loader(Numbers(), lanes=4).num_lanes == 4

    @pytest.mark.parametrize("ends", [(5, 0), (0,), ()])
    def test_one_without_a_sample_is_named(self, ends: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match=r"of the stream has no sample.*stream-empty"):
            steps(Numbers(ends), 1)

    def test_a_source_that_does_not_begin_anew_is_named(self) -> None:
        class Once:
            def __init__(self) -> None:
                self.rest = iter(range(15))

            def __iter__(self) -> Iterator[int]:
                return self.rest

        stream = loader(Once()).stream()
        with pytest.raises(ConfigError, match=r"pass 1 of lane 0 of 1 of the stream has no sample"):
            list(islice(stream, 12))


class TestStates:
    """States of the source, taken while training, spare a resume what was read."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where reading samples takes longer than here."""
        monkeypatch.setattr("framework.data.streams._TIME_OF_STATES", 0)

    def saved(
        self, dataset: Any, step: int, *, ranks: int, workers: int = 0, ahead: int = 0
    ) -> dict[str, Any]:
        """What a checkpoint holds after this many steps, with batches of the next one read."""
        found: list[StreamPlaces] = [StreamPlaces(lambda own: [own, *others]) for _ in range(ranks)]
        others: list[Any] = []
        for rank, places in enumerate(found):
            places.loader = loader(dataset, ranks=ranks, rank=rank, micro=1, num_workers=workers)
            stream = places.loader.stream()
            for _ in range(step * GLOBAL // ranks + ahead):
                next(stream)
            stream.close()
            if rank:
                others.append((places.loader.earlier_places, places.loader.places))
        return found[0].state(step)

    @pytest.mark.slow
    @pytest.mark.parametrize(("before", "after", "workers"), [(1, 1, 0), (2, 3, 0), (3, 1, 2)])
    def test_a_resume_reads_a_few_samples_only(
        self, before: int, after: int, workers: int, tmp_path: Path
    ) -> None:
        ends = (300,) * 6
        whole = steps(Stateful(ends), 83)[80:]
        state = self.saved(Stateful(ends), 80, ranks=before, workers=workers)
        torch.save(state, tmp_path / "state.pt")
        restored = StreamPlaces(lambda own: [own])
        restored.restore(torch.load(tmp_path / "state.pt", weights_only=True))
        assert len(restored.restored) == 6
        assert all(80 * 2 - 70 < place.count <= 80 * 2 for place in restored.restored.values())
        dataset = Stateful(ends)
        assert steps(dataset, 3, start=80, ranks=after, micro=1, places=restored.restored) == whole
        assert dataset.read[0] < after * 6 * (70 + 3 * 2)

    @pytest.mark.parametrize("step", range(28, 38))
    def test_a_batch_that_is_read_ahead_costs_no_state(self, step: int) -> None:
        """Of every lane there is a place, of at most 70 samples before, at any step."""
        ends = (300,) * 6
        state = self.saved(Stateful(ends), step, ranks=1, ahead=1)
        restored = StreamPlaces(lambda own: [own])
        restored.restore(state)
        counts = [place.count for place in restored.restored.values()]
        assert len(counts) == 6
        assert all(step * 2 - 70 < count <= step * 2 for count in counts)

    def test_a_source_without_states_reads_its_pass_only(self) -> None:
        ends = (50,) * 6
        whole = steps(Numbers(ends), 83)[80:]
        restored = StreamPlaces(lambda own: [own])
        restored.restore(self.saved(Numbers(ends), 80, ranks=2))
        dataset = Numbers(ends)
        assert steps(dataset, 3, start=80, places=restored.restored) == whole
        assert dataset.read[0] == 6 * (10 + 3 * 2), (
            "ten of the fourth pass were read before the save"
        )


class TestEvaluation:
    def batches(self, dataset: Any, ranks: int, **options: Any) -> list[list[tuple[Any, bool]]]:
        """What every rank sees, as all of them step together."""

        def reading(rank: int, most: int) -> list[tuple[Any, bool]]:
            rounds = iter(range(most))
            evaluation = StreamEvalLoader(
                dataset,
                batch_size=4,
                rank=rank,
                world_size=ranks,
                gather=lambda has: [has, next(rounds, None) is not None],
                **options,
            )
            return [(plain(batch), counts) for batch, counts in evaluation]

        most = 0
        for rank in range(ranks):
            with suppress(ConfigError):  # alone, a rank without samples has nothing
                most = max(most, len(reading(rank, 0)))
        return [reading(rank, most) for rank in range(ranks)]

    @pytest.mark.slow
    @pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2), (3, 0), (8, 0)])
    def test_every_sample_counts_once_and_ranks_make_as_many_passes(
        self, ranks: int, workers: int
    ) -> None:
        found = self.batches(Numbers(), ranks, num_workers=workers)
        counted = [
            number for one in found for batch, counts in one if counts for number in batch[0]
        ]
        assert sorted(counted) == sorted(
            100 * part + number for part, end in enumerate(Numbers().ends) for number in range(end)
        )
        assert len({len(one) for one in found}) == 1
        assert self.batches(Numbers(), ranks, num_workers=workers) == found, (
            "what is drawn is the same in every pass"
        )

    def test_a_rank_without_samples_repeats_others(self) -> None:
        found = self.batches(Numbers((9, 0)), 2)
        assert [counts for _, counts in found[1]] == [False] * 3
        assert all(batch[0] == [0, 1, 2, 3] for batch, _ in found[1])

    @pytest.mark.parametrize("ranks", [1, 2, 8])
    def test_the_most_samples_are_kept_to(self, ranks: int) -> None:
        found = self.batches(Numbers(), ranks, max_samples=10)
        assert sum(len(batch[0]) for one in found for batch, counts in one if counts) <= 10

    def test_an_empty_one_is_named(self) -> None:
        with pytest.raises(ConfigError, match="the evaluation stream has no sample"):
            self.batches(Numbers((0,)), 1)


class TestHuggingFace:
    """Streams of `datasets`: files are lanes, states are theirs."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        for part in range(6):
            rows = ({"x": [part, number], "y": number % 2} for number in range(200 + part))
            (tmp_path / f"{part}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
        self.folder = tmp_path

    def dataset(self, *, buffer: int = 0) -> Any:
        import datasets

        files = sorted(map(str, self.folder.glob("*.jsonl")))
        cache = str(self.folder / "cache")
        found = datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=cache
        )
        found = found.with_format("torch")
        return found.shuffle(seed=5, buffer_size=buffer) if buffer else found

    def rows(
        self, count: int, *, start: int = 0, ranks: int = 1, buffer: int = 0, **options: Any
    ) -> list[Any]:
        found: list[Any] = [[] for _ in range(count)]
        for rank in range(ranks):
            stream = loader(
                self.dataset(buffer=buffer), ranks=ranks, rank=rank, micro=2, **options
            ).stream(start)
            for step in range(count):
                for batch in islice(stream, GLOBAL // ranks // 2):
                    found[step] += batch["x"].tolist()
            stream.close()
        return found

    @pytest.mark.slow
    @pytest.mark.parametrize("buffer", [0, 16])
    def test_ranks_workers_and_resumes_see_the_same(self, buffer: int) -> None:
        whole = self.rows(38, buffer=buffer)
        assert len({tuple(row) for step in whole for row in step}) == 456
        assert self.rows(38, ranks=3, buffer=buffer, num_workers=2) == whole
        assert self.rows(2, start=36, ranks=2, buffer=buffer) == whole[36:]
        places = StreamPlaces(lambda own: [own])
        places.loader = loader(self.dataset(buffer=buffer))
        stream = places.loader.stream()
        for _ in range(34 * 6):
            next(stream)
        stream.close()
        places.restore(places.state(34))
        states = [place.state is not None for place in places.restored.values()]
        assert states == [not buffer] * 6, (
            "a shuffle buffer is in no state: what it holds is counted"
        )
        assert (
            self.rows(2, start=34, ranks=2, buffer=buffer, places=places.restored) == whole[34:36]
        )

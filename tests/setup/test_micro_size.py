"""The search for the largest micro-batch, on sizes with known peaks and on memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.data.splits import Splits
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.plan_text import rows
from framework.setup.micro_size import (
    Search,
    _described,
    _free,
    _of_process,
    _peak,
    _reset_peak,
    _usable,
    first_batch,
    longest_first,
)

MIB = 2**20


def divisors(share: int) -> list[int]:
    return [size for size in range(1, share + 1) if share % size == 0]


@pytest.mark.parametrize("share", [1, 7, 12, 64, 720])
@pytest.mark.parametrize("most", [0, 1, 5, 9, 60, 719, 10_000])
def test_it_finds_the_largest_that_fits(share: int, most: int) -> None:
    sizes = divisors(share)
    search = Search(sizes, lambda size: 1000 + 3 * size, lambda: 1000 + 3 * most)
    size = search.largest()
    assert size == max([size for size in sizes if size <= most], default=None)
    if size is not None:
        facts = {"micro_size": size, "peak_bytes": search.peaks, "took_seconds": 1.0}
        assert str(size) in _described(facts | {"limit_bytes": 1000}, share=share)
    above = [size for size in search.peaks if size > most]
    if most >= 2:
        assert not above, "they are on the line of those before"
    assert len(above) <= 1


def test_where_the_limit_is_not_known_it_goes_as_far_as_memory() -> None:
    search = Search(divisors(720), lambda size: 0 if size <= 100 else None, lambda: None)
    assert search.largest() == 90
    assert len(search.peaks) <= 10


def test_a_line_through_falling_peaks_does_not_promise_more() -> None:
    search = Search([1, 2, 4], lambda size: 10 - size, lambda: 9)
    assert search.largest() == 4
    assert search.expected(8) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_on_a_processor_the_peak_is_that_of_this_process() -> None:
    _free()
    before = _of_process("VmRSS")

    def peak_of(size: int) -> int:
        """Return how far the peak is above what the process holds, of which a busy system may take
        pages and give them back.
        """
        _free()
        _reset_peak()
        held = _of_process("VmRSS")
        torch.ones(size * MIB, dtype=torch.uint8)
        return _peak() - held

    found = Search([1, 20, 40, 80, 160], peak_of, lambda: 100 * MIB).largest()
    assert found == 80
    usable = _usable()
    assert usable is None or usable > before


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"batch": {"micro_size": "measured"}}, "the samples of a step would depend on the device"),
        (
            {"batch": {"micro_size": "measured", "global_size": 8, "accumulation_steps": 2}},
            "batch.accumulation_steps 2 fixes it",
        ),
        (
            {"batch": {"micro_size": "measured", "global_size": 8}, "parallel": {"pipe": 2}},
            "stages of a pipeline",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=rf"{line}.*\[micro-size-measured\]"):
        make_plan(config_from_values(sections), Cluster(1, 2, "cpu"))


class Texts(list[tuple[float, int]]):
    """Samples that show their lengths."""

    lengths = (1, 3, 2, 9, 8, 1, 1, 1)


def test_the_longest_samples_are_tried_also_where_the_run_begins_with_the_shortest() -> None:
    train = Texts((float(length), 0) for length in Texts.lengths)
    values = {
        "batch": {"micro_size": "measured", "global_size": 8},
        "data": {"target": "a:b", "train_samples": 8, "curriculum_steps": 4, "bucket_steps": 2},
    }
    plan = make_plan(config_from_values(values), Cluster(1, 2, "cpu"))
    inputs, _ = first_batch(plan, longest_first(Splits(train, None), plan), 2, rank=0)
    assert inputs.tolist() == [9, 8]


class Parts:
    """A stream in 8 parts."""

    num_shards = 8

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def shard(self, num_shards: int, index: int) -> Parts:
        return Parts(index)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        yield float(self.index), 0


def test_a_small_step_of_the_trial_reads_fewer_lanes_than_the_run() -> None:
    values = {
        "batch": {"micro_size": "measured", "global_size": 8},
        "data": {"target": "a:b", "lanes": 8},
        "training": {"max_steps": 1},
    }
    plan = make_plan(config_from_values(values), Cluster(1, 2, "cpu"))
    inputs, _ = first_batch(plan, longest_first(Splits(Parts(), None), plan), 1, rank=1)
    assert inputs.tolist() == [1]


def test_until_it_is_measured_the_plan_has_micro_batches_of_a_sample() -> None:
    config = config_from_values({"batch": {"micro_size": "measured", "global_size": 8}})
    plan = make_plan(config, Cluster(1, 2, "cpu"))
    assert (plan.layout.micro_size, plan.layout.accumulation_steps) == (1, 4)
    assert rows(plan)["batch"].endswith(
        " or fewer steps of larger micro-batches, as measured at the start"
    )

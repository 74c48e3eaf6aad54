"""Throughput by a clock that the test moves."""

from __future__ import annotations

from contextlib import suppress

import pytest

from framework.train.throughput import SpikeScore, Stopwatch


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(watch: Stopwatch, clock: Clock, *, steps: int, seconds_per_step: float) -> None:
    for _ in range(steps):
        clock.now += seconds_per_step
        watch.step()


def test_an_interval_is_the_time_since_the_last_one(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=8)
    train(watch, clock, steps=4, seconds_per_step=0.5)
    assert watch.read() == {
        "throughput/samples_per_sec": 16.0,
        "time/step_ms": 500.0,
        "time/data_ms": 0.0,
        "data/stalls": 0.0,
    }
    train(watch, clock, steps=2, seconds_per_step=2.0)
    assert watch.read()["time/step_ms"] == 2000.0


def test_excluded_time_is_not_training_time(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=1)
    train(watch, clock, steps=2, seconds_per_step=1.0)
    with watch.excluded():
        clock.now += 50
    assert watch.read()["time/step_ms"] == 1000.0
    with suppress(ValueError), watch.excluded():
        clock.now += 70
        raise ValueError("saving failed")
    train(watch, clock, steps=1, seconds_per_step=3.0)
    assert watch.read()["time/step_ms"] == 3000.0


def test_waiting_for_data_is_counted_and_part_of_the_step(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=1)
    for _ in range(2):
        watch.note_wait(0.25)
        clock.now += 1.25
        watch.step()
    assert watch.read() == {
        "throughput/samples_per_sec": 0.8,
        "time/step_ms": 1250.0,
        "time/data_ms": 250.0,
        "data/stalls": 2.0,
    }
    train(watch, clock, steps=1, seconds_per_step=1.0)
    assert watch.read()["time/data_ms"] == 0.0


def test_the_mean_leaves_the_first_interval_out(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=10)
    assert watch.samples_per_second() == 0.0
    train(watch, clock, steps=1, seconds_per_step=100.0)
    watch.read()
    assert watch.samples_per_second() == pytest.approx(0.1)
    train(watch, clock, steps=3, seconds_per_step=1.0)
    watch.read()
    train(watch, clock, steps=1, seconds_per_step=5.0)
    watch.read()
    assert watch.samples_per_second() == pytest.approx(10 * 4 / 8)


def test_nothing_is_reported_of_no_time_or_no_steps(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=1)
    assert watch.read() == {}
    watch.step()
    assert watch.read() == {}
    clock.now += 1.0
    watch.step()
    assert watch.read()["time/step_ms"] == 500.0, "a reading that said nothing lost nothing"


def test_tokens_are_counted_where_the_data_has_them(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=8, tokens_per_step=8 * 256)
    train(watch, clock, steps=1, seconds_per_step=9.0)
    watch.read()
    train(watch, clock, steps=4, seconds_per_step=0.5)
    assert watch.read()["throughput/tokens_per_sec"] == 4096.0
    assert watch.tokens_per_second() == pytest.approx(4096.0)
    assert Stopwatch(clock, samples_per_step=8).tokens_per_second() == 0.0


def test_parts_add_up_to_the_step(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=1)
    train(watch, clock, steps=4, seconds_per_step=0.5)
    parts = {"time/data_ms": 50.0, "time/forward_ms": 150.0, "time/backward_ms": 250.0}
    read = watch.read(parts)
    assert read["time/other_ms"] == 50.0
    assert sum(read[name] for name in (*parts, "time/other_ms")) == read["time/step_ms"]
    train(watch, clock, steps=1, seconds_per_step=0.4)
    assert watch.read(parts)["time/other_ms"] == 0.0, "another clock's parts may be a little longer"


def test_stalls_are_waits_longer_than_a_tenth_of_a_step(clock: Clock) -> None:
    watch = Stopwatch(clock, samples_per_step=1)
    for wait in (0.0, 0.09, 0.11, 0.5, 0.3):
        watch.note_wait(wait)
        clock.now += 1.0
        watch.step()
    assert watch.read()["data/stalls"] == 3.0
    train(watch, clock, steps=1, seconds_per_step=1.0)
    assert watch.read()["data/stalls"] == 0.0


def test_amounts_become_rates(clock: Clock) -> None:
    watch = Stopwatch(
        clock, samples_per_step=1, per_step={"throughput/tflops": 3.0, "throughput/mfu": 0.1}
    )
    train(watch, clock, steps=4, seconds_per_step=0.5)
    read = watch.read()
    assert (read["throughput/tflops"], read["throughput/mfu"]) == (6.0, 0.2)


def test_the_spike_score_counts_losses_far_from_those_before_them() -> None:
    score = SpikeScore()
    assert [score.note(1.0 + 0.01 * (number % 2)) for number in range(16)] == [{}] * 16
    assert score.note(None) == {}
    assert score.note(1.02) == {"train/spike_score": 0.0}, "three standard deviations"
    assert score.note(5.0) == {"train/spike_score": 0.5}
    assert score.note(float("nan")) == {"train/spike_score": pytest.approx(2 / 3)}
    for _ in range(125):
        last = score.note(1.0)
    assert last == {"train/spike_score": 2 / 128}
    assert [score.note(1.0)["train/spike_score"] for _ in range(3)] == [2 / 128, 1 / 128, 0.0]


def test_equal_losses_have_no_spikes() -> None:
    score = SpikeScore()
    for number in range(40):
        last = score.note(2.0 * (1 + 1e-9 * (number % 3)))
    assert last == {"train/spike_score": 0.0}

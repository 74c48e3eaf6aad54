"""The order of things in a run, with an engine that only writes down what it is asked to do."""

from __future__ import annotations

import errno
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from framework.errors import StorageError, TrainingError
from framework.system import waiting
from framework.system.stopping import GO_ON, Action, Decision
from framework.train.cadence import Every, Schedule
from framework.train.monitors.base import Monitor, Point
from framework.train.trainer import Outcome, Trainer
from tests.fake_engine import BATCHES, RecordedStep, RecordingEngine
from tests.train.trainer_of import trainer_of
from tests.until import until

EVAL_DATA = {"": BATCHES}
EVALUATE = Decision(Action.EVALUATE)
SAVE = Decision(Action.SAVE)
SIGTERM = Decision(Action.STOP, "SIGTERM")


class Numbers:
    """Micro-batches 0, 1, 2...: two per step."""

    def __init__(self, *, ends_after: int | None = None) -> None:
        self.started_at: list[int] = []
        self.closed = 0
        self._ends_after = ends_after

    def stream(self, start_step: int) -> Iterator[int]:
        self.started_at.append(start_step)
        number = 2 * start_step
        try:
            while self._ends_after is None or number < self._ends_after:
                yield number
                number += 1
        finally:
            self.closed += 1


class Memory:
    """Remembers; may fail."""

    name = "memory"

    def __init__(
        self, *, fails: Exception | None = None, fails_to_close: Exception | None = None
    ) -> None:
        self.points: list[Point] = []
        self.closed = 0
        self._fails, self._fails_to_close = fails, fails_to_close

    def write(self, point: Point) -> None:
        self.points.append(point)
        if self._fails is not None:
            raise self._fails

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close is not None:
            raise self._fails_to_close


def agenda(total_steps: int = 6, **changes: Any) -> Schedule:
    cadences: dict[str, Any] = {
        "log": Every(2, at_end=True),
        "evaluate": Every(3, at_end=True),
        "save": Every(3, at_end=True),
    }
    return Schedule(total_steps, steps_per_epoch=4, samples_per_step=8, **(cadences | changes))


@dataclass
class Run:
    engine: RecordingEngine
    data: Numbers
    fit: Callable[[], Outcome]


def make_run(
    plan: Schedule | None = None,
    *,
    engine: RecordingEngine | None = None,
    data: Numbers | None = None,
    monitors: Sequence[Monitor] = (),
    start_step: int = 0,
    eval_data: Any = EVAL_DATA,
    saves: bool = True,
    stop: Callable[[int], Decision] = lambda step: GO_ON,
    evaluates_first: bool = False,
) -> Run:
    engine, data = engine or RecordingEngine(), data or Numbers()
    engine.step = start_step
    trainer = trainer_of(
        engine,
        schedule=plan or agenda(),
        train_data=data,
        eval_data=eval_data,
        monitors=monitors,
        start_step=start_step,
        stop=stop,
        evaluates_first=evaluates_first,
        save=(lambda step, metrics: engine.events.append(f"save {step}")) if saves else None,
    )
    return Run(engine, data, trainer.fit)


def test_a_run_whose_every_step_is_skipped_ends(capsys: pytest.CaptureFixture[str]) -> None:
    counted = {step: {"train/skipped_steps": float(step)} for step in range(1, 41)}
    engine = RecordingEngine(norms=counted, skipped=frozenset(range(41)))
    run = make_run(agenda(40), engine=engine, eval_data={}, saves=False)
    with pytest.raises(TrainingError, match=r"step 20: .*\[every-step-skipped\]"):
        run.fit()
    assert engine.events[-1] == "read 20"
    assert capsys.readouterr().err.count("[every-step-skipped]") == 1


def test_metrics_are_read_then_evaluated_then_saved_and_only_when_due() -> None:
    run = make_run(agenda(7))
    outcome = run.fit()
    assert run.engine.events == [
        "train 1",
        "train 2",
        "read 2",
        "train 3",
        "read 3",
        "evaluate 3",
        "save 3",
        "train 4",
        "read 4",
        "train 5",
        "train 6",
        "read 6",
        "evaluate 6",
        "save 6",
        "train 7",
        "read 7",
        "evaluate 7",
        "save 7",
    ]
    assert outcome.step == 7
    assert outcome.metrics["eval/loss"] == 0.7
    assert run.engine.taken == list(range(14))
    assert run.data.closed == 1


def test_each_point_is_reported_once_to_everyone_with_step_and_epoch() -> None:
    first, second = Memory(), Memory()
    make_run(monitors=[first, second]).fit()
    assert first.points == second.points
    seen = [
        (point.step, point.epoch, sorted(name.split("/")[0] for name in point.metrics))
        for point in first.points
    ]
    timed = ["data", "throughput", "time", "time", "train"]
    assert seen == [
        (2, 0.5, timed),
        (3, 0.75, timed),
        (3, 0.75, ["eval"]),
        # with the time of the save before it
        (4, 1.0, ["data", "throughput", "time", "time", "time", "train"]),
        (6, 1.5, timed),
        (6, 1.5, ["eval"]),
    ]
    assert (first.closed, second.closed) == (1, 1)


def test_a_resumed_run_goes_on_where_the_first_one_would_have_been() -> None:
    whole, resumed = make_run(), make_run(start_step=3)
    whole.fit()
    outcome = resumed.fit()
    assert resumed.data.started_at == [3]
    assert resumed.engine.taken == whole.engine.taken[6:]
    assert resumed.engine.events == whole.engine.events[whole.engine.events.index("save 3") + 1 :]
    assert outcome.step == 6


@pytest.mark.parametrize("start_step", [6, 9])
def test_a_run_that_is_over_does_nothing_and_closes_its_monitors(start_step: int) -> None:
    monitor = Memory()
    run = make_run(start_step=start_step, monitors=[monitor])
    outcome = run.fit()
    assert (outcome.step, outcome.metrics, outcome.samples_per_sec) == (start_step, {}, 0.0)
    assert (run.engine.events, monitor.points, monitor.closed) == ([], [], 1)


def test_without_evaluation_data_or_saving_nothing_is_read_for_them() -> None:
    run = make_run(agenda(3, log=Every(100)), eval_data={}, saves=False)
    run.fit()
    assert run.engine.events == ["train 1", "train 2", "train 3"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_after_it_was_reported(loss: float) -> None:
    monitor = Memory()
    run = make_run(engine=RecordingEngine(losses={3: loss}), monitors=[monitor])
    with pytest.raises(
        TrainingError, match=r"step 3: train/loss = -?(nan|inf): .*\[loss-not-finite\]"
    ):
        run.fit()
    assert "evaluate 3" not in run.engine.events, "weights that hold NaN are neither measured"
    assert "save 3" not in run.engine.events, "nor saved"
    assert monitor.points[-1].step == 3
    assert (monitor.closed, run.data.closed) == (1, 1)


def test_fp16_goes_on_after_a_loss_that_is_not_finite_and_does_not_save_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(
        agenda(not_finite_allowed=2), engine=RecordingEngine(losses={2: math.inf, 3: math.nan})
    )
    assert run.fit().step == 6
    assert [event for event in run.engine.events if event.startswith("save")] == ["save 6"]
    assert capsys.readouterr().err == (
        "warning: step 3: its loss is not finite, and it is not saved; earlier checkpoints are untouched "
        "[loss-not-finite]\n"
    )


def test_fp16_ends_when_the_loss_stays_infinite() -> None:
    """Logged are steps 2, 3, 4, 6...: the third in a row is one too many, wherever it began."""
    for first, last in ((1, 4), (3, 6)):
        run = make_run(
            agenda(12, not_finite_allowed=2),
            engine=RecordingEngine(losses=dict.fromkeys(range(first, 13), math.inf)),
        )
        with pytest.raises(
            TrainingError,
            match=rf"^step {last}: train/loss = inf, as 3 logged losses in a row: .*\[loss-not-fin",
        ):
            run.fit()
    few = RecordingEngine(losses=dict.fromkeys((2, 3, 8, 9), math.nan))
    assert make_run(agenda(12, not_finite_allowed=2), engine=few).fit().step == 12, (
        "4 and 10 are finite: the count begins anew"
    )


@pytest.mark.parametrize(
    ("last", "error", "words"),
    [
        (99, TrainingError, r"^step 6: train/loss = nan.*\[loss-not-finite\]$"),
        # it may become a number again: the next start goes on from the checkpoint before
        (
            5,
            StorageError,
            r"stopped after step 5, which could not be saved; .*\[checkpoint-not-written\]$",
        ),
    ],
    ids=["length", "request"],
)
def test_in_fp16_no_run_ends_well_on_a_loss_that_is_not_finite(
    last: int, error: type[Exception], words: str
) -> None:
    engine = RecordingEngine(losses={5: math.nan, 6: math.nan})
    run = make_run(agenda(not_finite_allowed=9), engine=engine, stop=stop_after(last))
    with pytest.raises(error, match=words):
        run.fit()
    assert [event for event in run.engine.events if event.startswith("save")] == ["save 3"]


@pytest.mark.parametrize("num_micro_batches", [0, 4, 5])
def test_data_that_ends_early_is_an_error_with_the_step(num_micro_batches: int) -> None:
    monitor = Memory()
    run = make_run(data=Numbers(ends_after=num_micro_batches), monitors=[monitor])
    step = num_micro_batches // 2 + 1
    with pytest.raises(
        TrainingError, match=rf"^step {step}: the training data ended .*\[training-data-ended\]$"
    ):
        run.fit()
    assert (monitor.closed, run.data.closed) == (1, 1)


def test_an_exception_in_a_step_is_left_as_it_is_and_everything_is_closed() -> None:
    monitor = Memory(fails_to_close=OSError("gone"))
    run = make_run(engine=RecordingEngine(fails_at=2), monitors=[monitor])
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        run.fit()
    assert (monitor.closed, run.data.closed) == (1, 1)


def test_a_stream_that_cannot_be_closed_is_fine() -> None:
    class Endless:
        def stream(self, start_step: int) -> Iterator[int]:
            return iter(range(100))

    engine = RecordingEngine()
    outcome = trainer_of(
        engine, schedule=agenda(2), train_data=Endless(), eval_data=EVAL_DATA
    ).fit()
    assert outcome.step == 2


def test_a_failed_save_ends_the_run() -> None:
    def full(step: int, metrics: Mapping[str, float]) -> None:
        raise StorageError("no space")

    monitor, data = Memory(), Numbers()
    trainer = trainer_of(
        RecordingEngine(), schedule=agenda(), train_data=data, monitors=[monitor], save=full
    )
    with pytest.raises(StorageError):
        trainer.fit()
    assert (monitor.closed, data.closed) == (1, 1)


def test_a_monitor_that_fails_is_warned_of_once_and_costs_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, good = Memory(fails=OSError(errno.ENOSPC, "No space left on device")), Memory()
    outcome = make_run(monitors=[broken, good]).fit()
    assert outcome.step == 6
    assert (len(broken.points), broken.closed) == (1, 1)
    assert (len(good.points), good.closed) == (6, 1)
    warning = (
        "warning: memory: No space left on device; training goes on without it [monitor-failed]\n"
    )
    assert capsys.readouterr().err == warning


def test_monitors_that_fail_to_close_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    broken, good = Memory(fails_to_close=RuntimeError("worker died")), Memory()
    assert make_run(monitors=[broken, good]).fit().step == 6
    assert good.closed == 1
    assert capsys.readouterr().err.startswith("warning: memory: RuntimeError: worker died; ")


def test_evaluating_and_saving_are_not_training_time() -> None:
    now = [0.0]

    class Slow(RecordingEngine):
        def train_step(self, micro_batches: Iterator[Any]) -> RecordedStep:
            now[0] += 1.0
            return super().train_step(micro_batches)

        def evaluate(
            self, batches: Iterable[tuple[Any, bool]], **options: Any
        ) -> Mapping[str, float]:
            now[0] += 30.0
            return super().evaluate(batches)

    def save(step: int, metrics: Mapping[str, float]) -> None:
        now[0] += 50.0

    monitor = Memory()
    trainer = trainer_of(
        Slow(),
        schedule=agenda(),
        train_data=Numbers(),
        eval_data=EVAL_DATA,
        save=save,
        monitors=[monitor],
        clock=lambda: now[0],
    )
    outcome = trainer.fit()
    times = [
        point.metrics["time/step_ms"] for point in monitor.points if "time/step_ms" in point.metrics
    ]
    assert times == [1000.0] * 4
    assert outcome.samples_per_sec == 8.0


def stop_after(number: int, asked: list[int] | None = None) -> Callable[[int], Decision]:
    """A request that arrives while a step is taken; notes after which steps the Trainer asks."""

    def stop(step: int) -> Decision:
        if asked is not None:
            asked.append(step)
        if step >= number:
            return SIGTERM
        return GO_ON

    return stop


def test_what_the_clock_asks_for_is_done_after_the_next_step() -> None:
    asked = iter([GO_ON, SAVE, EVALUATE, GO_ON, GO_ON, SAVE, GO_ON, GO_ON])
    never = agenda(7, evaluate=Every(0), save=Every(0), log=Every(0))
    run = make_run(never, stop=lambda step: next(asked))
    assert run.fit().stopped == ""
    kept = [event for event in run.engine.events if not event.startswith("train")]
    # The evaluation after step 3 asks as well, between its batches.
    assert kept == ["read 2", "save 2", "read 3", "evaluate 3", "read 5", "save 5"]


def test_an_evaluation_by_the_clock_waits_for_its_first_step_and_its_data() -> None:
    late = agenda(4, evaluate=Every(0, start_step=3), save=Every(0))
    run = make_run(late, stop=lambda step: EVALUATE if step in (0, 2) else GO_ON)
    run.fit()
    assert [event for event in run.engine.events if event.startswith("evaluate")] == ["evaluate 3"]
    run = make_run(late, stop=lambda step: EVALUATE, eval_data={}, saves=False)
    assert run.fit().step == 4


def test_an_evaluation_before_the_first_step() -> None:
    run = make_run(agenda(3, evaluate=Every(0, at_start=True)), evaluates_first=True)
    run.fit()
    assert run.engine.events[:2] == ["evaluate 0", "train 1"]


def test_a_run_that_is_to_stop_saves_the_step_and_goes_on_as_if_nothing_had_been() -> None:
    monitor, asked = Memory(), list[int]()
    run = make_run(stop=stop_after(4, asked), monitors=[monitor])
    outcome = run.fit()
    assert (outcome.step, outcome.stopped) == (4, "SIGTERM")
    assert run.engine.events[-3:] == ["train 4", "read 4", "save 4"]
    assert asked == [0, 1, 2, 3, 3, 4], "an evaluation asks between its batches"
    assert (monitor.closed, run.data.closed) == (1, 1)
    rest = make_run(start_step=4)
    rest.fit()
    assert run.engine.taken + rest.engine.taken == list(range(12))


def test_what_is_not_logged_is_read_before_it_is_saved_at_a_stop() -> None:
    monitor = Memory()
    run = make_run(stop=stop_after(5), monitors=[monitor])
    run.fit()
    assert run.engine.events[-3:] == ["train 5", "read 5", "save 5"]
    assert monitor.points[-1].step == 5


def test_weights_that_hold_nan_are_not_saved_at_a_stop() -> None:
    run = make_run(stop=stop_after(1), engine=RecordingEngine(losses={1: math.nan}))
    with pytest.raises(TrainingError, match="loss-not-finite"):
        run.fit()
    assert "save 1" not in run.engine.events


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("stopped", [False, True])
def test_weights_of_a_step_whose_gradients_hold_nan_are_not_saved(
    norm: float, stopped: bool
) -> None:
    """The loss of the step before is finite yet: `auto` would start from these weights again and
    again.
    """
    step = 5 if stopped else 3
    engine = RecordingEngine(norms={step: {"train/grad_norm": norm}})
    run = make_run(engine=engine, stop=stop_after(5) if stopped else stop_after(100))
    with pytest.raises(
        TrainingError,
        match=rf"step {step}: train/grad_norm = {norm}: .*not saved.*\[loss-not-finite\]",
    ):
        run.fit()
    assert f"save {step}" not in engine.events
    assert (run.data.closed, engine.events.count(f"read {step}")) == (1, 1)


def test_a_step_that_was_skipped_leaves_weights_to_be_saved() -> None:
    engine = RecordingEngine(norms={3: {"train/grad_norm": math.inf}}, skipped=frozenset({3}))
    make_run(engine=engine).fit()
    assert "save 3" in engine.events


def test_between_two_saves_a_norm_that_is_not_finite_is_reported_and_no_error() -> None:
    assert (
        make_run(engine=RecordingEngine(norms={2: {"train/grad_norm": math.inf}})).fit().step == 6
    )


def test_a_step_that_is_saved_already_is_not_saved_again_at_a_stop() -> None:
    run = make_run(stop=stop_after(3))
    assert run.fit().stopped == "SIGTERM"
    assert run.engine.events[-2:] == ["read 3", "save 3"], (
        "the evaluation ends with the request, and nothing is lost"
    )
    assert run.engine.events.count("save 3") == 1


def test_a_stop_before_the_first_step_saves_nothing_and_closes_everything() -> None:
    monitor = Memory()
    run = make_run(stop=stop_after(0), start_step=2, monitors=[monitor])
    outcome = run.fit()
    assert (outcome.step, outcome.stopped, run.engine.events) == (2, "SIGTERM", [])
    assert (monitor.closed, run.engine.taken) == (1, [])


def test_a_request_after_the_last_step_finds_the_run_finished() -> None:
    asked: list[int] = []
    outcome = make_run(agenda(evaluate=Every(0)), stop=stop_after(6, asked)).fit()
    assert (outcome.step, outcome.stopped) == (6, "")
    assert asked[-1] == 5


@pytest.mark.parametrize("last", [3, 6])
def test_a_request_in_an_evaluation_ends_it_and_saves(last: int) -> None:
    monitor = Memory()
    run = make_run(stop=stop_after(last), monitors=[monitor])
    outcome = run.fit()
    assert (outcome.step, outcome.stopped, run.engine.events[-1]) == (
        last,
        "SIGTERM",
        f"save {last}",
    )
    assert "eval/loss" not in monitor.points[-1].metrics


@pytest.mark.parametrize("last", [3, 6])
def test_an_evaluation_that_a_stop_has_ended_is_made_up_for(last: int) -> None:
    unbroken, stopped, rest = Memory(), Memory(), Memory()
    make_run(monitors=[unbroken]).fit()
    make_run(stop=stop_after(last), monitors=[stopped]).fit()
    make_run(start_step=last, monitors=[rest], evaluates_first=True).fit()

    def measured(points: Sequence[Point]) -> list[tuple[int, float]]:
        return [
            (point.step, point.metrics["eval/loss"])
            for point in points
            if "eval/loss" in point.metrics
        ]

    assert measured([*stopped.points, *rest.points]) != measured(stopped.points)
    assert [step for step, _ in measured([*stopped.points, *rest.points])] == [3, 6]
    assert [step for step, _ in measured(unbroken.points)] == [3, 6]


def test_an_evaluation_that_is_not_due_is_not_made_up_for() -> None:
    run = make_run(start_step=4, evaluates_first=True)
    run.fit()
    assert "evaluate 4" not in run.engine.events


def test_without_saving_a_stop_ends_the_run_all_the_same() -> None:
    run = make_run(stop=stop_after(2), saves=False)
    assert run.fit().stopped == "SIGTERM"
    assert run.engine.events == ["train 1", "train 2", "read 2"]


def test_a_stop_that_cannot_be_saved_is_an_error_of_storage() -> None:
    monitor = Memory()
    trainer = trainer_of(
        RecordingEngine(),
        schedule=agenda(),
        train_data=Numbers(),
        monitors=[monitor],
        stop=stop_after(1),
        save=lambda step, metrics: False,
    )
    with pytest.raises(
        StorageError, match=r"SIGTERM: stopped after step 1, .* \[checkpoint-not-written\]"
    ):
        trainer.fit()
    assert monitor.closed == 1


def test_events_are_recorded_in_order_with_how_long_they_took() -> None:
    now, monitor = [0.0], Memory()
    seen: list[Any] = []

    class Slow(RecordingEngine):
        def evaluate(
            self, batches: Iterable[tuple[Any, bool]], **options: Any
        ) -> Mapping[str, float]:
            now[0] += 30.0
            return super().evaluate(batches)

    def save(step: int, metrics: Mapping[str, float]) -> bool:
        now[0] += 50.0
        return step != 3  # the first one could not be written

    def record(kind: str, step: int, **details: Any) -> None:
        seen.append((kind, step, details))

    fit = trainer_of(
        Slow(),
        schedule=agenda(7),
        train_data=Numbers(),
        eval_data=EVAL_DATA,
        save=save,
        monitors=[monitor],
        stop=lambda step: SIGTERM if step == 6 else GO_ON,
        record=record,
        constants={"run/restarts": 2.0},
        clock=lambda: now[0],
    ).fit
    fit()
    assert seen == [
        ("first_step", 1, {"seconds": 0.0, "data_seconds": 0.0}),
        ("evaluate", 3, {"seconds": 30.0}),
        ("evaluate", 6, {"seconds": 30.0}),
        ("save", 6, {"seconds": 50.0, "folder": "checkpoints/global_step6"}),
        ("stop", 6, {"signal": "SIGTERM"}),
        ("end", 6, {"is_finished": False}),
    ]
    logged = [point for point in monitor.points if "train/loss" in point.metrics]
    assert {point.metrics["run/restarts"] for point in logged} == {2.0}
    saves = [(point.step, point.metrics.get("time/checkpoint_ms")) for point in logged]
    assert saves == [(2, None), (3, None), (4, 50_000.0), (6, None)]


def test_a_run_that_fails_ends_with_its_error() -> None:
    seen: list[Any] = []
    trainer = trainer_of(
        RecordingEngine(fails_at=2),
        schedule=agenda(),
        train_data=Numbers(),
        record=lambda kind, step, **details: seen.append((kind, step, details)),
    )
    with pytest.raises(RuntimeError):
        trainer.fit()
    assert [kind for kind, _, _ in seen] == ["first_step", "end"]
    assert seen[1] == ("end", 1, {"error": "CUDA out of memory"})


def test_a_slow_first_batch_is_waited_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the event of the first step knows which part of it was the wait."""
    announced: list[str] = []
    monkeypatch.setattr(waiting, "_FIRST_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "announce", announced.append)
    events: list[dict[str, Any]] = []

    def wait_for_line(number: int) -> None:
        """Wait until so many lines are announced, however late a busy machine does it, and as long
        again: the announcer's clock may have begun before the one that the event reads.
        """
        until(lambda: len(announced) >= number)
        time.sleep(0.05)

    class SlowNumbers(Numbers):
        def stream(self, start_step: int) -> Iterator[int]:
            wait_for_line(1)
            yield 0
            wait_for_line(2)
            yield from range(1, 100)

    class SlowEngine(RecordingEngine):
        def train_step(self, micro_batches: Iterator[Any]) -> RecordedStep:
            result = super().train_step(micro_batches)
            if self.step == 1:
                wait_for_line(3)
            return result

    def record(kind: str, step: int, **details: Any) -> None:
        events.append({"kind": kind, "step": step} | details)

    trainer = trainer_of(SlowEngine(), schedule=agenda(), train_data=SlowNumbers(), record=record)
    trainer.fit()
    assert [line.split(" since ")[0] for line in announced] == [
        "waiting for the first batch of the training data",
        "waiting for the first batch of the training data",
        "waiting for the first step, in which kernels are compiled",
    ]
    (first,) = [event for event in events if event["kind"] == "first_step"]
    assert 0.1 <= first["data_seconds"] <= first["seconds"] - 0.05


def test_a_trainer_takes_at_most_eight_arguments() -> None:
    assert len(inspect.signature(Trainer).parameters) <= 8

"""Callbacks of a run, with an engine that only writes down what it is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from framework.errors import TrainingError
from framework.train.cadence import Every, Schedule
from framework.train.callbacks import Callbacks, Requests, State
from framework.train.metric_watch import EarlyStopping, ReduceOnPlateau
from framework.train.trainer import Outcome
from tests.fake_engine import RecordingEngine
from tests.train.test_trainer import EVAL_DATA, Numbers
from tests.train.trainer_of import trainer_of


class Recorder:
    """Notes every call."""

    def __init__(self, **asks: Any) -> None:
        self.calls: list[str] = []
        self._asks = asks

    def _note(self, event: str, state: State) -> None:
        self.calls.append(f"{event} {state.step}")
        if ask := self._asks.get(f"{event}_{state.step}"):
            ask(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda state: self._note(name.removeprefix("on_"), state)
        raise AttributeError(name)


def train(
    *callbacks: Any, steps: int = 6, losses: Mapping[int, float] | None = None, **more: Any
) -> tuple[Any, ...]:
    engine, saved, points = RecordingEngine(), [], []
    if losses is not None:
        engine.evaluate = lambda batches, *, is_stopping: {"eval/loss": losses[engine.step]}  # type: ignore[method-assign]
    rates: list[float] = []
    gather = more.pop("gather", lambda value: [value])
    called = Callbacks(callbacks, gather=gather, is_main=True, scale_lr=rates.append)
    monitor = SimpleNamespace(name="points", write=points.append, close=lambda: None)
    agenda = Schedule(
        steps, 3, 4, Every(2, at_end=True), Every(3, at_end=True), Every(4, at_end=True)
    )
    trainer = trainer_of(
        engine,
        schedule=agenda,
        train_data=Numbers(),
        eval_data=EVAL_DATA,
        monitors=[monitor],
        **({"save": lambda step, metrics: saved.append(step), "callbacks": called} | more),
    )
    outcome: Outcome = trainer.fit()
    return outcome, engine.events, saved, points, rates


def test_each_event_has_its_call() -> None:
    recorder = Recorder()
    train(recorder)
    assert recorder.calls == [
        "start 0",
        *("gradients 0", "step 1", "gradients 1", "step 2", "log 2"),
        *("gradients 2", "step 3", "log 3", "evaluation 3"),
        *("gradients 3", "step 4", "log 4", "save 4"),
        *("gradients 4", "step 5"),
        *("gradients 5", "step 6", "log 6", "evaluation 6", "save 6", "end 6"),
    ]


def test_a_state_shows_the_metrics_and_changes_nothing_by_itself() -> None:
    seen: list[State] = []

    class Looks:
        def on_log(self, state: State) -> None:
            seen.append(state)
            with pytest.raises(TypeError):
                state.metrics["train/loss"] = 0.0  # type: ignore[index]

    train(Looks())
    assert [(state.step, state.total_steps, round(state.epoch, 2)) for state in seen[:2]] == [
        (2, 6, 0.67),
        (3, 6, 1.0),
    ]
    assert all(state.metrics["train/loss"] == 1.0 and state.is_main for state in seen)


def test_what_is_logged_is_part_of_the_point() -> None:
    class Logs:
        def on_step(self, state: State) -> None:
            state.log(**{"mine/steps": state.step})

        def on_log(self, state: State) -> None:
            state.log(**{"mine/logged": 7})

    *_, points, _ = train(Logs())
    first = points[0].metrics
    assert (first["mine/steps"], first["mine/logged"]) == (2.0, 7.0)


def test_a_run_that_is_stopped_ends_as_with_its_last_step() -> None:
    outcome, events, saved, *_ = train(Recorder(log_2=lambda state: state.stop("enough")))
    assert (outcome.step, outcome.ended_early, outcome.stopped) == (2, "enough", "")
    assert events == ["train 1", "train 2", "read 2", "evaluate 2"]
    assert saved == [2]


def test_what_is_asked_for_is_done_once_at_the_next_logged_step() -> None:
    asks = {"step_1": State.evaluate, "step_3": State.save}
    _, events, saved, *_ = train(Recorder(**asks))
    assert [event for event in events if "evaluate" in event] == [
        "evaluate 2",
        "evaluate 3",
        "evaluate 6",
    ]
    assert saved == [3, 4, 6]


def test_it_happens_where_another_rank_asks() -> None:
    others = iter([Requests(), Requests(stop="rank 1 has had enough"), *[Requests()] * 9])
    outcome, *_ = train(Recorder(), gather=lambda own: [own, next(others)])
    assert (outcome.step, outcome.ended_early) == (2, "rank 1 has had enough")


@pytest.mark.parametrize(
    ("factors", "rates"), [((1.0, 0.5), [0.5]), ((0.5, 0.5), [0.5]), ((0.1, 0.5), [0.1])]
)
def test_rates_are_scaled_once_where_any_rank_asks(
    factors: tuple[float, float], rates: list[float]
) -> None:
    scaled: list[float] = []
    requests = [Requests(lr_factor=factor) for factor in factors]
    callbacks = Callbacks(
        [Recorder()], gather=lambda own: requests, is_main=True, scale_lr=scaled.append
    )
    callbacks.agreed()
    assert scaled == rates


def test_a_callback_that_fails_ends_the_run_by_name() -> None:
    class Breaks:
        def on_log(self, state: State) -> None:
            raise ValueError("no such thing")

    with pytest.raises(
        TrainingError,
        match=r"step 2: callback Breaks 1: on_log raised ValueError: no such thing .*test_call",
    ) as failed:
        train(Recorder(), Breaks())
    assert failed.value.is_of_one_rank
    assert str(failed.value).endswith("[callback-failed]")


class Fails:
    """A callback that fails at a step."""

    def __init__(self, event: str, at: int) -> None:
        self._at = at
        setattr(self, f"on_{event}", self._fail)

    def _fail(self, state: State) -> None:
        if state.step == self._at:
            raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("event", "step"), [("step", 4), ("log", 4), ("step", 6), ("log", 6), ("evaluation", 6)]
)
def test_what_is_due_is_saved_before_a_callback_ends_the_run(event: str, step: int) -> None:
    saved: list[int] = []
    with pytest.raises(TrainingError, match=rf"step {step}: callback Fails 0: on_{event}"):
        train(Fails(event, step), save=lambda step, metrics: saved.append(step))
    assert saved == [4, 6][: step // 3]


def test_a_callback_that_fails_elsewhere_ends_all_ranks_after_the_save() -> None:
    saved: list[int] = []
    failure = TrainingError("step 4: callback of rank 1 [callback-failed]")
    others = iter([Requests(), Requests(), Requests(), Requests(failure=failure)])
    with pytest.raises(TrainingError, match="callback of rank 1"):
        train(
            Recorder(),
            gather=lambda own: [own, next(others)],
            save=lambda step, metrics: saved.append(step),
        )
    assert saved == [4]


def test_an_evaluation_that_was_asked_for_and_fails_is_saved_as_well() -> None:
    saved: list[int] = []
    with pytest.raises(TrainingError, match="callback Fails 1: on_evaluation"):
        train(
            Recorder(step_4=State.evaluate),
            Fails("evaluation", 4),
            save=lambda step, metrics: saved.append(step),
        )
    assert saved == [4]


LOSSES = {3: 1.0, 6: 0.9, 9: 0.95, 12: 0.91, 15: 0.99, 18: 0.8}


def test_early_stopping_waits_for_its_patience() -> None:
    outcome, *_ = train(EarlyStopping(patience=3), steps=18, losses=LOSSES)
    assert outcome.step == 15
    assert outcome.ended_early == "eval/loss has not been better than 0.9 for 3 evaluations"
    outcome, *_ = train(EarlyStopping(patience=4), steps=18, losses=LOSSES)
    assert (outcome.step, outcome.ended_early) == (18, "")
    outcome, *_ = train(EarlyStopping(patience=1, best_is="max"), steps=18, losses=LOSSES)
    assert outcome.step == 6
    outcome, *_ = train(EarlyStopping(patience=1, min_change=0.2), steps=18, losses=LOSSES)
    assert outcome.step == 6


def test_a_run_that_was_ended_stays_ended_when_it_is_started_again() -> None:
    first = EarlyStopping(patience=3)
    train(first, steps=18, losses=LOSSES)
    again = EarlyStopping(patience=3)
    kept = Callbacks([first], gather=list, is_main=True).state()
    Callbacks([again], gather=list, is_main=True).restore(kept)
    outcome, events, saved, *_ = train(again, steps=18, losses=LOSSES)
    assert (outcome.step, events, saved) == (0, [], [])
    assert outcome.ended_early


def test_the_rate_falls_where_the_loss_does_not() -> None:
    *_, rates = train(ReduceOnPlateau(factor=0.1, patience=2), steps=18, losses=LOSSES)
    assert rates == [0.1]


def test_a_metric_that_is_not_measured_is_named() -> None:
    with pytest.raises(
        TrainingError, match="no metric eval/accuracy is measured; there are eval/loss"
    ):
        train(EarlyStopping(metric="eval/accuracy"), losses=LOSSES)


def test_without_callbacks_nothing_is_gathered() -> None:
    called = Callbacks([], gather=lambda value: pytest.fail("a collective"), is_main=True)
    assert not called
    assert called.state() == {}

"""`Trainer`: the loop of a run.

The engine takes the steps. The trainer is about time: what is due after which step, and which
monitors, callbacks and checkpoints get its results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Protocol

from framework.checkpoint.names import CHECKPOINTS, tag_of
from framework.engine_protocol import (
    EVALUATING,
    SAVING,
    STEPS,
    Engine,
    EvalSets,
    StepProfile,
    StepResult,
    Table,
    evaluate_sets,
)
from framework.errors import StorageError, TrainingError
from framework.system.clock import now
from framework.system.log import warn
from framework.system.stopping import Action
from framework.train.bad_steps import RolledBack
from framework.train.cadence import Every, Schedule
from framework.train.callbacks import Callbacks, Requests
from framework.train.hooks import FirstStep, Hooks, Save
from framework.train.monitors.base import Monitor, Point, Sinks
from framework.train.throughput import SkippedSteps, SpikeScore, Stopwatch

# Time of callbacks and the like; less is not recorded as an event.
_ASIDE_SECONDS: Final = 0.1


def _first_of(batches: Iterable[tuple[Any, bool]]) -> Iterable[tuple[Any, bool]]:
    """Return the first batch of an evaluation set alone, which is read when it is needed."""
    first = getattr(batches, "first", None)
    if first is None:
        return islice(batches, 1)
    found: Iterable[tuple[Any, bool]] = first()
    return found


class TrainData(Protocol):
    """An endless stream of this rank's micro-batches that can start at any step."""

    def stream(self, start_step: int) -> Iterator[Any]:
        """Yield micro-batches from the first one of step `start_step` (counted from 0) on."""
        ...


@dataclass
class Outcome:
    """End of a run.

    Attributes:
        step: optimizer steps taken in all.
        metrics: the last value of every metric.
        samples_per_sec: mean training throughput of this process's part of the run.
        tokens_per_sec: the same in tokens; 0 for data without tokens.
        stopped: name of the signal that ended it before its last step, or ``training.max_minutes``;
            else empty.
        ended_early: why a callback ended it before its last step; else empty.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_sec: float = 0.0
    tokens_per_sec: float = 0.0
    stopped: str = ""
    ended_early: str = ""


@dataclass(frozen=True)
class RunStart:
    """Where this start of a run begins.

    Attributes:
        step: optimizer steps that were taken before.
        evaluates_first: whether the evaluation that is due after `step` comes first; it is missing
            where a stop ended it.
        constants: metrics of every logged point.
    """

    step: int = 0
    evaluates_first: bool = False
    constants: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Trains an engine from `start_step` to the end of the schedule."""

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Schedule,
        train_data: TrainData,
        eval_data: EvalSets = MappingProxyType({}),
        monitors: Sequence[Monitor] = (),
        start: RunStart = RunStart(),
        hooks: Hooks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the parts of a run; `fit` begins it.

        Args:
            engine: takes the steps.
            schedule: how many steps, and what is due after which.
            train_data: micro-batches from any step on.
            eval_data: batches to measure by the name of their set, each with whether it counts.
            monitors: they get every measurement.
            start: where this start of the run begins.
            hooks: called at their moments.
            clock: seconds, for throughput.
        """
        self._engine = engine
        self._schedule = schedule
        self._train_data = train_data
        self._eval_data = eval_data
        self._start = start
        self._hooks = hooks or Hooks()
        self._clock = clock
        self._sinks = Sinks(monitors)
        self._spikes = SpikeScore()
        if self._hooks.bad_steps is None:
            self._skipped_steps = SkippedSteps(start.step)
        else:
            cause = "its numbers were bad (training.bad_steps)"
            self._skipped_steps = SkippedSteps(start.step, cause)
        self._stopwatch = Stopwatch(
            clock,
            samples_per_step=schedule.samples_per_step,
            tokens_per_step=schedule.tokens_per_step,
            per_step=schedule.per_step,
        )
        self._first_step = FirstStep()
        self._outcome = Outcome(step=start.step)
        self._measured: dict[str, float] = {}  # metrics of this very step
        self._due_by_clock = set[Action]()  # to be done after the next step
        self._save_metrics: dict[str, float] = {}  # to be logged with the next point
        self._saved_step = -1
        # Whether errors of callbacks wait until the ranks agree on their requests.
        self._keeps_failures = False
        self._not_finite = 0  # logged losses in a row, up to now
        self._aside_seconds = 0.0
        self._profile_seconds = 0.0

    def fit(self) -> Outcome:
        """Train to the end, or to the step where the run is asked to stop, and save there; close
        the monitors.

        It runs on every rank alike: logging, evaluation and saving are collective.

        Raises:
            TrainingError: more logged losses in a row than are allowed, or the last one, or the
                gradient norm of a step that is to be saved, are not finite; or every step is
                skipped; or the data ends before the run does.
            StorageError: the run is to stop, and its last step cannot be saved; or its folder is
                lost.
            RolledBack: a step was bad, and the run is to go on from an earlier one.
        """
        schedule = self._schedule
        hooks = self._hooks
        outcome = self._outcome
        with ExitStack() as ending:
            ending.callback(self._close_monitors)
            ending.push(self._record_end)
            if hooks.profile is not None:
                ending.callback(hooks.profile.close)
            ending.callback(self._first_step.end)
            stream = self._train_data.stream(outcome.step)
            ending.callback(getattr(stream, "close", lambda: None))
            num_steps = schedule.total_steps - outcome.step
            micro_batches = self._engine.ahead(self._micro_batches(stream), num_steps=num_steps)
            if self._start.evaluates_first and self._eval_data and self._due(schedule.evaluate):
                self._evaluate()
                if not outcome.stopped:
                    self._check_measured(self._measured)
            else:
                self._try_evaluation()
            self._call_aside("on_start")
            if hooks.callbacks is not None:
                if hooks.callbacks.hears("on_gradients"):
                    self._engine.before_steps(lambda: self._call("on_gradients"))
                self._follow(hooks.callbacks, is_start=True)
            hooks.enter(STEPS)
            self._aside_seconds = 0.0  # the time until here is the start's
            self._stopwatch.begin()
            while outcome.step < schedule.total_steps and not outcome.ended_early:
                if self._is_stopping():
                    break
                result = self._next_step(micro_batches)
                outcome.step += 1
                self._stopwatch.step()
                self._do_what_is_due(result)
            if outcome.stopped:
                hooks.record("stop", outcome.step, signal=outcome.stopped)
            if outcome.stopped and outcome.step > self._start.step:
                self._save_before_stopping(result)
            self._call_aside("on_end")
            self._note_aside()
        outcome.samples_per_sec = self._stopwatch.samples_per_second()
        outcome.tokens_per_sec = self._stopwatch.tokens_per_second()
        return outcome

    def _next_step(self, micro_batches: Iterator[Any]) -> StepResult:
        bad_steps = self._hooks.bad_steps
        if bad_steps is not None and self._outcome.step + 1 in bad_steps.left_out:
            return bad_steps.pass_over(micro_batches)
        if self._first_step.is_over:
            return self._take_step(micro_batches)
        return self._take_first_step(micro_batches)

    def _take_first_step(self, micro_batches: Iterator[Any]) -> StepResult:
        """Take the first step, and record how long it took, and how long it waited for data."""
        started = self._clock()
        result = self._take_step(micro_batches)
        self._first_step.end()
        self._hooks.record(
            "first_step",
            self._outcome.step + 1,
            seconds=self._clock() - started,
            data_seconds=round(self._stopwatch.waited_seconds, 6),
        )
        return result

    def _take_step(self, micro_batches: Iterator[Any]) -> StepResult:
        profile = self._hooks.profile
        if profile is None or profile.is_over:
            return self._engine.train_step(micro_batches)
        return self._profiled_step(profile, micro_batches)

    def _profiled_step(self, profile: StepProfile, micro_batches: Iterator[Any]) -> StepResult:
        """Take a step that may be profiled. The time in which the profile begins and ends is not
        the step's.
        """
        step = self._outcome.step + 1
        with self._stopwatch.excluded():
            profile.begin(step)
        self._profile_seconds += self._stopwatch.excluded_seconds
        result = self._engine.train_step(micro_batches)
        with self._stopwatch.excluded():
            profile.end(step)
        self._profile_seconds += self._stopwatch.excluded_seconds
        if profile.is_over:
            self._hooks.record("profile", step, seconds=self._profile_seconds)
        return result

    def _record_end(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Record the end of the loop, or its error, which goes on (the exit of a context)."""
        if isinstance(error, RolledBack):
            return
        outcome = self._outcome
        if error is not None:
            self._hooks.record("end", outcome.step, error=str(error) or type(error).__name__)
            return
        details: dict[str, Any] = {"is_finished": not outcome.stopped}
        if outcome.ended_early:
            details["ended_early"] = outcome.ended_early
        self._hooks.record("end", outcome.step, **details)

    def _do_what_is_due(self, result: StepResult) -> None:
        """Log, evaluate, follow callbacks, show weights and save, as is due after this step.
        Collective; raises as `fit`.
        """
        schedule = self._schedule
        self._measured.clear()
        hooks = self._hooks
        logs = self._due(schedule.log)
        evaluates, saves = self._due_measures()
        is_followed = evaluates or saves or logs
        self._keeps_failures = is_followed
        self._call("on_step")
        has_news = hooks.bad_steps is not None and hooks.bad_steps.watch.has_news
        if is_followed or has_news:
            # Evaluating and saving wait for the device anyway; reading first keeps their time out
            # of the step's.
            self._read(result)
        if evaluates:
            self._evaluate()
        # Before the save, which then holds the changes that callbacks have made.
        failure = None
        if hooks.callbacks is not None and is_followed:
            requests = self._follow(hooks.callbacks)
            saves = requests.save or saves
            failure = requests.failure
        self._keeps_failures = False
        if hooks.show_weights is not None and self._due(schedule.show_weights):
            with self._aside("histograms"):
                hooks.show_weights(self._outcome.step)
        if saves and hooks.save is not None:
            if self._not_finite:
                warn(
                    f"step {self._outcome.step}: its loss is not finite, and it is not saved; "
                    "earlier checkpoints are untouched [loss-not-finite]",
                    is_of_all_ranks=True,
                )
            else:
                self._save_now(hooks.save, result)
        if failure is not None:
            raise failure

    def _due_measures(self) -> tuple[bool, bool]:
        """Return whether an evaluation and a save are due, by steps or by the clock; for what was
        due by the clock, the clock starts again.
        """
        schedule = self._schedule
        evaluates = self._due(schedule.evaluate)
        saves = self._hooks.save is not None and self._due(schedule.save)
        if (
            Action.EVALUATE in self._due_by_clock
            and self._outcome.step >= schedule.evaluate.start_step
        ):
            evaluates = True
        if Action.SAVE in self._due_by_clock:
            saves = True
        for action in self._due_by_clock:
            self._hooks.minutes.restart(action)
        self._due_by_clock.clear()
        return evaluates and bool(self._eval_data), saves

    def _call(
        self, event: str, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """Call the callbacks, and return the metrics that they log."""
        callbacks = self._hooks.callbacks
        if callbacks is None or not callbacks.hears(event):
            return {}
        outcome = self._outcome
        schedule = self._schedule
        return callbacks.call(
            event,
            step=outcome.step,
            total_steps=schedule.total_steps,
            epoch=outcome.step / schedule.steps_per_epoch,
            metrics={**outcome.metrics, **metrics},
            keeps_failure=self._keeps_failures,
        )

    def _call_aside(self, event: str) -> None:
        """Call the callbacks; their time is not the steps'."""
        callbacks = self._hooks.callbacks
        if callbacks is not None and callbacks.hears(event):
            with self._aside(f"the callback {event}"):
                self._call(event)

    @contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        """Enter another phase than the steps', with its own time."""
        phase_before = self._hooks.enter(phase)
        with self._stopwatch.excluded():
            yield
        self._hooks.enter(phase_before)

    @contextmanager
    def _aside(self, phase: str) -> Iterator[None]:
        with self._in_phase(phase):
            yield
        self._aside_seconds += self._stopwatch.excluded_seconds

    def _note_aside(self) -> None:
        """Record the time of callbacks and histograms since the last such event, unless it is
        short.
        """
        if self._aside_seconds >= _ASIDE_SECONDS:
            self._hooks.record("callbacks", self._outcome.step, seconds=self._aside_seconds)
            self._aside_seconds = 0.0

    def _follow(self, callbacks: Callbacks, *, is_start: bool = False) -> Requests:
        """Follow the requests of callbacks: evaluate, or end the run (`Outcome.ended_early`).
        Returns whether to save, and the error of a callback. Collective.

        A run that ends is evaluated and saved as at its last step; with `is_start`, before the
        first step, neither.
        """
        with self._aside("the callbacks"):
            requests = callbacks.agreed()
        if requests.failure is not None:
            return requests
        schedule = self._schedule
        self._outcome.ended_early = requests.stop
        ends = bool(requests.stop) and not is_start and self._outcome.step < schedule.total_steps
        is_evaluated = any(name.startswith("eval/") for name in self._measured)
        evaluates = requests.evaluate or (ends and schedule.evaluate.at_end)
        if evaluates and self._eval_data and not is_evaluated:
            self._evaluate()
            if callbacks.hears("on_evaluation"):
                requests.failure = callbacks.agreed_failure()
        requests.save = requests.save or (ends and schedule.save.at_end)
        return requests

    def _save_now(self, save: Save, result: StepResult) -> None:
        """Save this step, record it and call `on_save`, unless the save fails; raises TrainingError
        for a gradient norm that is not finite.
        """
        self._refuse_to_save_nan(result)
        with self._in_phase(SAVING):
            is_saved = save(self._outcome.step, self._measured) is not False
        self._hooks.minutes.restart(Action.SAVE)
        seconds = self._stopwatch.excluded_seconds
        not_logged_ms = self._save_metrics.get("time/checkpoint_ms", 0.0)
        self._save_metrics = {"time/checkpoint_ms": 1000 * seconds + not_logged_ms}
        if is_saved:
            self._saved_step = self._outcome.step
            self._hooks.record(
                "save",
                self._saved_step,
                seconds=seconds,
                folder=f"{CHECKPOINTS}/{tag_of(self._saved_step)}",
            )
            self._call_aside("on_save")
            self._note_aside()

    def _refuse_to_save_nan(self, result: StepResult) -> None:
        """Refuse to save a step with a gradient norm that is not finite.

        The loss was measured before the step: where only the gradients were bad, the weights hold
        NaN now. Saved, the next start (`checkpoint.resume: auto`) would begin with them, again and
        again.
        """
        norm = self._measured.get("train/grad_norm", 0.0)
        if not math.isfinite(norm) and not result.may_be_skipped:
            raise TrainingError(
                f"step {self._outcome.step}: train/grad_norm = {norm}: training has diverged, and "
                "its weights are not saved; lower optimizer.lr, set training.clip_grad_norm, or "
                "start again from an earlier checkpoint [loss-not-finite]"
            )

    def _save_before_stopping(self, result: StepResult) -> None:
        """Save the last step of a run that stops, unless it is saved already.

        Raises:
            TrainingError: its loss or gradient norm is not finite.
            StorageError: it could not be saved.
        """
        step = self._outcome.step
        save = self._hooks.save
        if save is None or self._saved_step == step:
            return
        if not self._measured:
            self._read(result)
        if self._not_finite > self._schedule.not_finite_allowed:
            raise self._diverged()
        # In fp16 the next loss may be finite again: the checkpoint before this step stays the last.
        if not self._not_finite:
            self._save_now(save, result)
        if self._saved_step != step:
            raise StorageError(
                f"{self._outcome.stopped}: stopped after step {step}, which could not be saved; "
                "the last complete checkpoint stands: checkpoint.resume=auto "
                "[checkpoint-not-written]"
            )

    def _micro_batches(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield the stream, timed, and raise an error at its end.

        A sample that raises StopIteration looks like the end.
        """
        clock = self._clock
        first_step = self._first_step
        while True:
            first_step.wait_for_batch()
            before = clock()
            try:
                batch = next(stream)
            except StopIteration:
                break
            self._stopwatch.note_wait(clock() - before)
            first_step.compute()
            yield batch
        error = TrainingError(
            f"step {self._outcome.step + 1}: the training data ended before the run did; every "
            "number below len(dataset) must give a sample, and __getitem__ must not raise "
            "StopIteration [training-data-ended]"
        )
        error.is_of_one_rank = True
        raise error

    def _due(self, cadence: Every) -> bool:
        return cadence.is_due(self._outcome.step, total_steps=self._schedule.total_steps)

    def _read(self, result: StepResult) -> None:
        """Read and log a step, and all bad steps since the last one that was read. Collective."""
        policy = self._hooks.bad_steps
        if policy is None:
            self._log(result.read())
            return
        bad_steps = policy.watch.read()
        for bad_step in bad_steps:
            self._hooks.record("bad_step", bad_step.step, **bad_step.details())
        self._log(result.read())
        policy.follow(bad_steps, note=partial(warn, is_of_all_ranks=True))

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics with speeds, times and what callbacks measure, and check the losses.

        Raises:
            TrainingError: training has diverged, or every step is skipped.
        """
        schedule = self._schedule
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        point = dict(metrics)
        point.update(self._spikes.note(metrics.get("train/loss")))
        point.update(self._stopwatch.read(times))
        point.update(self._save_metrics)
        point.update(self._start.constants)
        self._save_metrics = {}
        self._report(point | self._call("on_log", point))
        if self._hooks.bad_steps is not None or math.isfinite(metrics.get("train/loss", 0.0)):
            self._not_finite = 0
        else:
            self._not_finite += 1
        is_last = self._outcome.step == schedule.total_steps
        if self._not_finite > schedule.not_finite_allowed or (self._not_finite and is_last):
            raise self._diverged()
        if "train/loss" in metrics:  # the step was not left out
            self._skipped_steps.note(self._outcome.step, metrics, is_last=is_last)

    def _diverged(self) -> TrainingError:
        loss = str(self._outcome.metrics["train/loss"])
        if self._not_finite > 1:
            loss += f", as {self._not_finite} logged losses in a row"
        return TrainingError(
            f"step {self._outcome.step}: train/loss = {loss}: training has diverged; lower "
            "optimizer.lr, look for NaN in the data, or start again from an earlier "
            "checkpoint [loss-not-finite]"
        )

    def _evaluate(self) -> None:
        """Measure and report the evaluation data; a stop between its batches ends it unreported."""
        with self._in_phase(EVALUATING):
            tables: dict[str, Table] = {}
            metrics = evaluate_sets(
                self._engine, self._eval_data, is_stopping=self._is_stopping, tables=tables
            )
            if tables and not self._outcome.stopped:
                self._hooks.keep_tables(self._outcome.step, tables)
            if not self._outcome.stopped:
                self._report({**metrics, **self._call("on_evaluation", metrics)})
        self._hooks.minutes.restart(Action.EVALUATE)
        if not self._outcome.stopped:
            self._hooks.record(
                "evaluate", self._outcome.step, seconds=self._stopwatch.excluded_seconds
            )

    def _try_evaluation(self) -> None:
        """Evaluate the first batch of every set and forget it, so that an error in evaluation, or
        a metric that is followed and not measured, ends the run now and not after hours.
        """
        schedule = self._schedule
        is_due = schedule.evaluate.at_end or schedule.evaluate.every_steps
        if not (self._eval_data and is_due and self._engine.can_try_evaluation):
            return
        if self._outcome.step >= schedule.total_steps or self._is_stopping():
            return
        metrics: dict[str, float] = {}
        are_all_known = True
        with self._in_phase(EVALUATING), self._engine.trying_evaluation():
            for name, batches in self._eval_data.items():
                try:
                    metrics |= evaluate_sets(self._engine, {name: _first_of(batches)})
                except (ArithmeticError, ValueError) as error:
                    # What is computed of one batch may be undefined where that of all is not.
                    if not isinstance(error, ArithmeticError) and str(error) != "math domain error":
                        raise
                    are_all_known = False
        if are_all_known:
            self._check_measured(metrics)

    def _check_measured(self, metrics: Mapping[str, float]) -> None:
        """Refuse metrics that the run follows and that the first evaluation has not given, unless a
        callback of the user's own may log them.
        """
        callbacks = self._hooks.callbacks
        if callbacks is None or not callbacks.may_measure():
            self._hooks.measured(metrics)

    def _is_stopping(self) -> bool:
        """Ask `Hooks.stop`, and return whether the run stops here (`Outcome.stopped`). What is due
        by the clock is noted for after the next step.
        """
        decision = self._hooks.stop(self._outcome.step)
        if decision.action is Action.STOP:
            self._outcome.stopped = decision.reason
            return True
        self._outcome.stopped = ""
        if decision.action is not Action.NONE:
            self._due_by_clock.add(decision.action)
        return False

    def _report(self, metrics: Mapping[str, float]) -> None:
        self._outcome.metrics.update(metrics)
        self._measured.update(metrics)
        epoch = self._outcome.step / self._schedule.steps_per_epoch
        self._sinks.write(Point(self._outcome.step, epoch, now(), metrics))

    def _close_monitors(self) -> None:
        self._sinks.close(hurries=self._outcome.step < self._schedule.total_steps)

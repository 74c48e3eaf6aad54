"""`Trainer`: the loop of a run.

The engine takes the steps. The trainer is about time: what is due after which step, and which
monitors, callbacks and checkpoints get its results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

from framework.checkpoint.names import CHECKPOINTS, tag_of
from framework.engine.protocol import (
    EVALUATING,
    SAVING,
    STEPS,
    Engine,
    EvalSets,
    StepProfile,
    StepResult,
    evaluate_sets,
)
from framework.errors import StorageError, TrainingError
from framework.system.clock import now
from framework.system.log import warn
from framework.system.stopping import GO_ON, TIME_IS_UP, Action, Decision
from framework.system.waiting import waiting
from framework.train.bad_steps import BadStepPolicy, RolledBack
from framework.train.callbacks import Callbacks
from framework.train.monitors.base import Monitor, Point, Sinks
from framework.train.throughput import SkippedSteps, SpikeScore, Stopwatch

# Time of callbacks and the like; less is not recorded as an event.
_ASIDE_SECONDS: Final = 0.1

# When something is due: every N steps, and at the end.


@dataclass(frozen=True)
class Every:
    """Steps at which something happens.

    Attributes:
        every_steps: interval between two of them; 0: none before the end.
        at_end: also after the last step.
        at_start: also before the first step.
        start_step: steps before it do not count, but for the start.
    """

    every_steps: int = 0
    at_end: bool = False
    at_start: bool = False
    start_step: int = 0

    @staticmethod
    def of(
        *,
        every_steps: int | None,
        every_epochs: int | None,
        steps_per_epoch: int,
        at_end: bool = False,
        at_start: bool = False,
        start_step: int = 0,
    ) -> Every:
        """Make a cadence from the fields of a config section; steps win over epochs."""
        interval = every_steps or 0
        if not interval and every_epochs:
            interval = every_epochs * steps_per_epoch
        return Every(interval, at_end=at_end, at_start=at_start, start_step=start_step)

    def is_due(self, step: int, *, total_steps: int) -> bool:
        """Check whether it happens after this step, counted from 1."""
        if step == 0:
            return self.at_start or (self.at_end and total_steps == 0)
        if self.at_end and step == total_steps:
            return True
        has_interval_ended = self.every_steps > 0 and step % self.every_steps == 0
        return has_interval_ended and step >= self.start_step


class Minutes:
    """Evaluations, saves and the end of a start by the clock; another thread may ask for them."""

    def __init__(
        self,
        often: Mapping[Action, float | None] = MappingProxyType({}),
        *,
        most: float | None = None,
        began: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count minutes.

        Args:
            often: minutes between two evaluations and two saves, counted from now.
            most: length of the run, counted from `began`; None: without end.
            began: time of the clock at which the run began.
            clock: seconds.
        """
        self._clock = clock
        self._seconds: dict[Action, float] = {}
        self._due_at: dict[Action, float] = {}
        now = clock()
        for action, minutes in often.items():
            if minutes is not None:
                self._seconds[action] = 60 * minutes
                self._due_at[action] = now + 60 * minutes
        if most is not None:
            self._due_at[Action.STOP] = began + 60 * most

    def due(self) -> Decision:
        """Return what is due.

        An evaluation or a save is returned once, and again only after its `restart`.
        """
        if not self._due_at:
            return GO_ON
        now = self._clock()
        for action, moment in self._due_at.items():
            if now < moment:
                continue
            if action is Action.STOP:
                return TIME_IS_UP
            self._due_at[action] = math.inf
            return Decision(action)
        return GO_ON

    def restart(self, action: Action) -> None:
        """Count from now: it has happened."""
        if action in self._seconds:
            self._due_at[action] = self._clock() + self._seconds[action]


class TrainData(Protocol):
    """An endless stream of this rank's micro-batches that can start at any step."""

    def stream(self, start_step: int) -> Iterator[Any]:
        """Yield micro-batches from the first one of step `start_step` (counted from 0) on."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Length of the run, and the steps at which something happens.

    Attributes:
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps in one pass over the data.
        samples_per_step: global batch size.
        log: when metrics are read.
        evaluate: when evaluation data is measured.
        save: when a checkpoint is written.
        not_finite_allowed: how many logged losses in a row may be NaN or infinite before the run
            ends: in fp16 one that overflows costs its step and no more.
        tokens_per_step: tokens in a global batch; None for data without tokens.
        per_step: metric of a rate -> the amount in one step, such as floating-point operations.
    """

    total_steps: int
    steps_per_epoch: int
    samples_per_step: int
    log: Every
    evaluate: Every
    save: Every
    not_finite_allowed: int = 0
    tokens_per_step: int | None = None
    per_step: Mapping[str, float] = field(default_factory=dict)


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
        save: Callable[[int, Mapping[str, float]], object] | None = None,
        start_step: int = 0,
        evaluates_first: bool = False,
        stop: Callable[[int], Decision] = lambda step: GO_ON,
        enter: Callable[[str], str] = lambda phase: "",
        minutes: Minutes | None = None,
        look: tuple[Every, Callable[[int], object]] | None = None,
        record: Callable[..., object] | None = None,
        callbacks: Callbacks | None = None,
        profile: StepProfile | None = None,
        bad_steps: BadStepPolicy | None = None,
        constants: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the parts of a run; `fit` begins it.

        Args:
            engine: takes the steps.
            schedule: how many steps, and what is due after which.
            train_data: micro-batches from any step on.
            eval_data: batches to measure by the name of their set, each with whether it counts.
            monitors: they get every measurement.
            save: writes a checkpoint of a step, and returns False if it could not; None: nothing is
                saved.
            start_step: optimizer steps that were taken before.
            evaluates_first: whether the evaluation that is due after `start_step` comes first; it
                is missing where a stop ended it.
            stop: called before the first step, after every step but the last, and between the
                batches of an evaluation, alike on all ranks. A stop ends the run there;
                evaluations and saves are done after the next step.
            enter: called with each phase of the run as it begins; returns the phase before it.
            minutes: evaluations and saves by the clock; `stop` reports when one is due.
            look: when to look at the weights, and the function that does; collective, its time is
                not the steps'.
            record: records an event by kind and step (`train.events.Events`).
            callbacks: called at the events of the run.
            profile: profiles some steps.
            bad_steps: policy for steps with bad numbers; None: a loss that is not finite ends the
                run.
            constants: metrics of every logged point.
            clock: seconds, for throughput.
        """
        self._engine = engine
        self._schedule = schedule
        self._profile = profile
        take_step: Callable[[Iterator[Any]], StepResult] = engine.train_step
        if profile is not None:
            take_step = partial(self._profiled_step, profile)
        self._train_step: Callable[[Iterator[Any]], StepResult] = partial(
            self._first_step, take_step
        )
        self._train_data = train_data
        self._eval_data = eval_data
        self._enter = enter
        self._clock = clock
        self._aside_seconds = 0.0
        self._profile_seconds = 0.0
        self._sinks = Sinks(monitors)
        self._save = save
        self._stop = stop
        self._minutes = minutes or Minutes()
        self._due_by_clock = set[Action]()  # after the next step
        self._evaluates_first = evaluates_first
        self._look = look
        self._record = record or _ignore
        self._constants = constants
        self._callbacks = callbacks
        self._bad_steps = bad_steps
        self._hears_steps = callbacks is not None and callbacks.hears("on_step")
        self._checkpoint: dict[str, float] = {}  # to be logged with the next point
        self._spikes = SpikeScore()
        self._saved_step = -1
        self._not_finite = 0  # logged losses in a row, up to now
        if bad_steps is None:
            self._skipped_steps = SkippedSteps(start_step)
        else:
            cause = "its numbers were bad (training.bad_steps)"
            self._skipped_steps = SkippedSteps(start_step, cause)
        self._outcome = Outcome(step=start_step)
        self._measured: dict[str, float] = {}  # at this very step
        self._stopwatch = Stopwatch(
            clock,
            samples_per_step=schedule.samples_per_step,
            tokens_per_step=schedule.tokens_per_step,
            per_step=schedule.per_step,
        )

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
        outcome = self._outcome
        start_step = outcome.step
        with ExitStack() as ending:
            ending.callback(self._close_monitors)
            ending.push(self._record_end)
            if self._profile is not None:
                ending.callback(self._profile.close)
            stream = self._train_data.stream(outcome.step)
            ending.callback(getattr(stream, "close", lambda: None))
            micro_batches = self._micro_batches(stream)
            if self._evaluates_first and self._eval_data and self._due(schedule.evaluate):
                self._evaluate()
            self._call_aside("on_start")
            if self._callbacks is not None:
                self._follow(self._callbacks, is_start=True)
            self._enter(STEPS)
            self._aside_seconds = 0.0  # the time until here is the start's
            self._stopwatch.begin()
            while outcome.step < schedule.total_steps and not outcome.ended_early:
                if self._is_stopping():
                    break
                result = self._next_step(micro_batches)
                outcome.step += 1
                self._stopwatch.step()
                self._do_what_is_due(result)
            self._call_aside("on_end")
            if outcome.stopped:
                self._record("stop", outcome.step, signal=outcome.stopped)
            if outcome.stopped and outcome.step > start_step:
                self._save_before_stopping(result)
            self._note_aside()
        outcome.samples_per_sec = self._stopwatch.samples_per_second()
        outcome.tokens_per_sec = self._stopwatch.tokens_per_second()
        return outcome

    def _first_step(
        self, take_step: Callable[[Iterator[Any]], StepResult], micro_batches: Iterator[Any]
    ) -> StepResult:
        """Take the first step, and show what it waits for: a batch, or the step's own work."""
        started = self._clock()
        self._train_step = take_step
        with ExitStack() as computing:

            def announced_batches() -> Iterator[Any]:
                while True:
                    computing.close()
                    with waiting("the first batch of the training data"):
                        batch = next(micro_batches, None)
                    computing.enter_context(
                        waiting("the first step, in which kernels are compiled")
                    )
                    if batch is None:
                        return
                    yield batch

            result = take_step(announced_batches())
        seconds = self._clock() - started
        data_seconds = round(self._stopwatch.waited_seconds, 6)
        self._record(
            "first_step", self._outcome.step + 1, seconds=seconds, data_seconds=data_seconds
        )
        return result

    def _next_step(self, micro_batches: Iterator[Any]) -> StepResult:
        if self._bad_steps is not None and self._outcome.step + 1 in self._bad_steps.left_out:
            return self._bad_steps.pass_over(micro_batches)
        return self._train_step(micro_batches)

    def _profiled_step(self, profile: StepProfile, micro_batches: Iterator[Any]) -> StepResult:
        """Take a step that may be profiled.

        The time in which the profile begins and ends is not the step's. After the last profiled
        step, steps are taken as without a profile.
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
            self._train_step = self._engine.train_step
            self._record("profile", step, seconds=self._profile_seconds)
        return result

    def _record_end(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RolledBack):
            return
        outcome = self._outcome
        if error is not None:
            self._record("end", outcome.step, error=str(error) or type(error).__name__)
            return
        details: dict[str, Any] = {"is_finished": not outcome.stopped}
        if outcome.ended_early:
            details["ended_early"] = outcome.ended_early
        self._record("end", outcome.step, **details)

    def _do_what_is_due(self, result: StepResult) -> None:
        schedule = self._schedule
        self._measured.clear()
        if self._hears_steps:
            self._call("on_step")
        logs = self._due(schedule.log)
        evaluates, saves = self._due_measures()
        has_news = self._bad_steps is not None and self._bad_steps.watch.has_news
        if evaluates or saves or logs or has_news:
            # Evaluating and saving wait for the device anyway; reading first keeps their time out
            # of the step's.
            self._read(result)
        if evaluates:
            self._evaluate()
        # Before the save, which then holds the changes that callbacks have made.
        if self._callbacks is not None and (evaluates or saves or logs):
            saves = self._follow(self._callbacks) or saves
        if self._look is not None:
            cadence, look_at_weights = self._look
            if self._due(cadence):
                with self._aside("histograms"):
                    look_at_weights(self._outcome.step)
        if saves and self._save is not None:
            if self._not_finite:
                warn(
                    f"step {self._outcome.step}: its loss is not finite, and it is not saved; "
                    "earlier checkpoints are untouched [loss-not-finite]",
                    is_of_all_ranks=True,
                )
            else:
                self._save_now(self._save, result)

    def _due_measures(self) -> tuple[bool, bool]:
        """Return whether an evaluation and a save are due, by steps or by the clock."""
        schedule = self._schedule
        evaluates = self._due(schedule.evaluate)
        saves = self._save is not None and self._due(schedule.save)
        if (
            Action.EVALUATE in self._due_by_clock
            and self._outcome.step >= schedule.evaluate.start_step
        ):
            evaluates = True
        if Action.SAVE in self._due_by_clock:
            saves = True
        for action in self._due_by_clock:
            self._minutes.restart(action)
        self._due_by_clock.clear()
        return evaluates and bool(self._eval_data), saves

    def _call(
        self, event: str, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """Call the callbacks, and return the metrics that they log."""
        if self._callbacks is None or not self._callbacks.hears(event):
            return {}
        outcome = self._outcome
        schedule = self._schedule
        return self._callbacks.call(
            event,
            step=outcome.step,
            total_steps=schedule.total_steps,
            epoch=outcome.step / schedule.steps_per_epoch,
            metrics={**outcome.metrics, **metrics},
        )

    def _call_aside(self, event: str) -> None:
        """Call the callbacks; their time is not the steps'."""
        if self._callbacks is not None and self._callbacks.hears(event):
            with self._aside(f"the callback {event}"):
                self._call(event)

    @contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        """Enter another phase than the steps', with its own time."""
        phase_before = self._enter(phase)
        with self._stopwatch.excluded():
            yield
        self._enter(phase_before)

    @contextmanager
    def _aside(self, phase: str) -> Iterator[None]:
        with self._in_phase(phase):
            yield
        self._aside_seconds += self._stopwatch.excluded_seconds

    def _note_aside(self) -> None:
        if self._aside_seconds >= _ASIDE_SECONDS:
            self._record("callbacks", self._outcome.step, seconds=self._aside_seconds)
            self._aside_seconds = 0.0

    def _follow(self, callbacks: Callbacks, *, is_start: bool = False) -> bool:
        """Follow the requests of callbacks: evaluate, or end the run. Collective.

        A run that ends is evaluated and saved as at its last step. Returns whether to save.
        """
        with self._aside("the callbacks"):
            requests = callbacks.agreed()
        schedule = self._schedule
        self._outcome.ended_early = requests.stop
        ends = bool(requests.stop) and not is_start and self._outcome.step < schedule.total_steps
        is_evaluated = any(name.startswith("eval/") for name in self._measured)
        evaluates = requests.evaluate or (ends and schedule.evaluate.at_end)
        if evaluates and self._eval_data and not is_evaluated:
            self._evaluate()
        return requests.save or (ends and schedule.save.at_end)

    def _save_now(
        self, save: Callable[[int, Mapping[str, float]], object], result: StepResult
    ) -> None:
        self._refuse_to_save_nan(result)
        with self._in_phase(SAVING):
            is_saved = save(self._outcome.step, self._measured) is not False
        self._minutes.restart(Action.SAVE)
        seconds = self._stopwatch.excluded_seconds
        not_logged_ms = self._checkpoint.get("time/checkpoint_ms", 0.0)
        self._checkpoint = {"time/checkpoint_ms": 1000 * seconds + not_logged_ms}
        if is_saved:
            self._saved_step = self._outcome.step
            self._record(
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
        step = self._outcome.step
        if self._save is None or self._saved_step == step:
            return
        if not self._measured:
            self._read(result)
        if self._not_finite > self._schedule.not_finite_allowed:
            raise self._diverged()
        # In fp16 the next loss may be finite again: the checkpoint before this step stays the last.
        if not self._not_finite:
            self._save_now(self._save, result)
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
        while True:
            before = clock()
            try:
                batch = next(stream)
            except StopIteration:
                break
            self._stopwatch.note_wait(clock() - before)
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
        policy = self._bad_steps
        if policy is None:
            self._log(result.read())
            return
        bad_steps = policy.watch.read()
        for bad_step in bad_steps:
            self._record("bad_step", bad_step.step, **bad_step.details())
        self._log(result.read())
        policy.follow(bad_steps, note=partial(warn, is_of_all_ranks=True))

    def _log(self, metrics: Mapping[str, float]) -> None:
        schedule = self._schedule
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        point = dict(metrics)
        point.update(self._spikes.note(metrics.get("train/loss")))
        point.update(self._stopwatch.read(times))
        point.update(self._checkpoint)
        point.update(self._constants)
        self._checkpoint = {}
        self._report(point | self._call("on_log", point))
        if self._bad_steps is not None or math.isfinite(metrics.get("train/loss", 0.0)):
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
            "optimizer.lr, set training.clip_grad_norm, or start again from an earlier "
            "checkpoint [loss-not-finite]"
        )

    def _evaluate(self) -> None:
        with self._in_phase(EVALUATING):
            metrics = evaluate_sets(self._engine, self._eval_data, is_stopping=self._is_stopping)
            if not self._outcome.stopped:
                self._report({**metrics, **self._call("on_evaluation", metrics)})
        self._minutes.restart(Action.EVALUATE)
        if not self._outcome.stopped:
            self._record("evaluate", self._outcome.step, seconds=self._stopwatch.excluded_seconds)

    def _is_stopping(self) -> bool:
        decision = self._stop(self._outcome.step)
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


def _ignore(kind: str, step: int, **details: object) -> None: ...

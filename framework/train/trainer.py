"""`Trainer`: the loop. Steps are the engine's business, this is time: what is due after which step,
and what is told to whom.
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
from framework.system.stopping import EVALUATE, SAVE, TIME_IS_UP
from framework.system.waiting import waiting
from framework.train.bad_steps import BadStepPolicy, RolledBack
from framework.train.callbacks import Callbacks
from framework.train.monitors.base import Monitor, Point, Sinks
from framework.train.throughput import SkippedSteps, SpikeScore, Stopwatch

# Beside the steps: less is no event.
_ASIDE_SECONDS: Final = 0.1

# When something is due: every so many steps, and at the end.


@dataclass(frozen=True)
class Every:
    """Steps at which something happens.

    Attributes:
        every_steps: 0 for never in between.
        at_end: also after the last step.
        at_start: also before the first step.
        start_step: before it nothing happens but at the start.
    """

    every_steps: int = 0
    at_end: bool = False
    at_start: bool = False
    start_step: int = 0

    @staticmethod
    def of(
        *, every_steps: int | None, every_epochs: int | None, steps_per_epoch: int, **others: Any
    ) -> Every:
        """From a config section; steps win over epochs."""
        return Every(every_steps or (every_epochs or 0) * steps_per_epoch, **others)

    def is_due(self, step: int, *, total_steps: int) -> bool:
        """Check whether it happens after this step, counted from 1."""
        if self.every_steps and step % self.every_steps == 0 and step and step >= self.start_step:
            return True
        return (self.at_end and step == total_steps) or (self.at_start and step == 0)


class Minutes:
    """Evaluations, saves and the end of a start by the clock; another thread may ask what is
    due.
    """

    def __init__(
        self,
        often: Mapping[str, float | None] = MappingProxyType({}),
        *,
        most: float | None = None,
        began: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count minutes, `often` for ``evaluate`` and ``save`` from now, `most` for the run from
        `began` on.
        """
        self._clock = clock
        now = clock()
        self._seconds = {
            word: 60 * minutes for word, minutes in often.items() if minutes is not None
        }
        self._at = {word: now + seconds for word, seconds in self._seconds.items()}
        if most is not None:
            self._at[TIME_IS_UP] = began + 60 * most

    def due(self) -> str:
        """What is due; an evaluation or a save not again before it was restarted."""
        if self._at:
            now = self._clock()
        else:
            now = 0.0
        for word, moment in self._at.items():
            if now >= moment:
                if word != TIME_IS_UP:
                    self._at[word] = math.inf
                return word
        return ""

    def restart(self, word: str) -> None:
        """Count from now: it has happened."""
        if word in self._seconds:
            self._at[word] = self._clock() + self._seconds[word]


class TrainData(Protocol):
    """An endless stream of this rank's micro-batches that can start at any step."""

    def stream(self, start_step: int) -> Iterator[Any]:
        """Micro-batches from the first one of step `start_step` (counted from 0) on."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Length of the run and what happens when.

    Attributes:
        total_steps: optimizer steps of the whole run.
        steps_per_epoch: optimizer steps in one pass over the data.
        samples_per_step: global batch size.
        log, evaluate, save: when metrics are read, evaluation data is measured, a checkpoint is
            written.
        not_finite_allowed: how many logged losses in a row may be NaN or infinite before the run
            ends: in fp16 one that overflows costs its step and no more.
        tokens_per_step: tokens in a global batch; None where the data has none.
        per_step: further amounts in a step, by the metric that is their rate
            (`throughput.flops_per_step`).
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
        tokens_per_sec: the same in tokens; 0 where the data has none.
        stopped: name of the signal that ended it before its last step, or ``training.max_minutes``;
            else empty.
        ended_early: why a callback ended it before its last step; empty when none did.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_sec: float = 0.0
    tokens_per_sec: float = 0.0
    stopped: str = ""
    ended_early: str = ""


class Trainer:
    """Trains an engine from `start_step` to the end of the agenda."""

    def __init__(
        self,
        engine: Engine,
        *,
        agenda: Schedule,
        train_data: TrainData,
        eval_data: EvalSets = MappingProxyType({}),
        monitors: Sequence[Monitor] = (),
        save: Callable[[int, Mapping[str, float]], object] | None = None,
        start_step: int = 0,
        evaluates_first: bool = False,
        stop: Callable[[int], str] = lambda step: "",
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
        """Begins nothing: `fit` does.

        Args:
            engine, agenda: what takes the steps; how many, and what is due after which.
            train_data: micro-batches from any step on.
            eval_data: batches to measure by the name of their set, each with whether it counts.
            monitors: what is told of every measurement.
            save: writes a checkpoint of a step and says whether it could; None where nothing is
                saved.
            start_step: optimizer steps that were taken before.
            evaluates_first: what is due after `start_step` was not measured before: a stop had
                ended it.
            stop: asked before the first step, after every step but the last, and between the
                batches of an evaluation, alike on all ranks; a signal ends the run there,
                ``evaluate`` and ``save`` are done after the next step.
            enter: told of each phase of the run that begins, and says which one ends by it.
            minutes: what `stop` asks.
            look: at the weights, and when; collective, its time is not the steps'.
            record: notes an event by kind and step (`train.events.Events`); None: nobody does.
            callbacks: called at the events of the run; None: nobody is.
            profile: looks at some steps closely; None: at none.
            bad_steps: what becomes of steps whose numbers go wrong; None: a loss that is not finite
                ends the run.
            constants: metrics of every logged point.
            clock: seconds, for throughput.
        """
        self._engine = engine
        self._agenda = agenda
        self._profile = profile
        if profile is None:
            take = engine.train_step
        else:
            take = partial(self._profiled_step, profile)
        self._train_step: Callable[[Iterator[Any]], StepResult] = partial(self._first_step, take)
        self._train_data = train_data
        self._eval_data = eval_data
        self._enter = enter
        self._clock = clock
        self._aside_seconds = self._profile_seconds = 0.0
        self._sinks = Sinks(monitors)
        self._save = save
        self._stop = stop
        # by the clock
        self._minutes = minutes or Minutes()
        self._asked = set[str]()
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
        if bad_steps is not None:
            cause = ["its numbers were bad (training.bad_steps)"]
        else:
            cause = []
        self._skipped_steps = SkippedSteps(start_step, *cause)
        self._outcome = Outcome(step=start_step)
        self._measured: dict[str, float] = {}  # at this very step
        self._stopwatch = Stopwatch(
            clock,
            samples_per_step=agenda.samples_per_step,
            tokens_per_step=agenda.tokens_per_step,
            per_step=agenda.per_step,
        )

    def fit(self) -> Outcome:
        """Train to the end, or to where the run is asked to stop, and save there. Closes the
        monitors.

        On every rank alike: logging, evaluation and saving are collective.

        Raises:
            TrainingError: logged losses, more than are allowed in a row, or the last one, or the
                gradient norm of a step that is to be saved, are not finite; or every step is
                skipped; or the data ends before the run
            does. StorageError: the run is to stop, and what it has reached cannot be saved; or its
            folder is lost. RolledBack: a step was bad, and the run is to go on from an earlier one.
        """
        agenda = self._agenda
        outcome = self._outcome
        start_step = outcome.step
        with ExitStack() as ending:
            ending.callback(self._close_monitors)
            ending.push(self._record_end)
            if self._profile is not None:
                ending.callback(self._profile.close)
            stream = self._train_data.stream(outcome.step)
            ending.callback(getattr(stream, "close", lambda: None))
            micro_batches = self._unending(stream)
            if self._evaluates_first and self._eval_data and self._due(agenda.evaluate):
                self._evaluate()
            self._call_aside("on_start")
            if self._callbacks is not None:
                self._follow(self._callbacks, is_start=True)
            self._enter(STEPS)
            self._aside_seconds = 0.0  # what was before is the start
            self._stopwatch.begin()
            while outcome.step < agenda.total_steps and not outcome.ended_early:
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
        self, take: Callable[[Iterator[Any]], StepResult], micro_batches: Iterator[Any]
    ) -> StepResult:
        begun = self._clock()
        self._train_step = take
        with ExitStack() as computing:

            def announced() -> Iterator[Any]:
                """Yield the batches; what is waited for is one of them, or what the step makes of
                them.
                """
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

            result = take(announced())
        seconds = self._clock() - begun
        waited = round(self._stopwatch.waited_seconds, 6)
        self._record("first_step", self._outcome.step + 1, seconds=seconds, data_seconds=waited)
        return result

    def _next_step(self, micro_batches: Iterator[Any]) -> StepResult:
        if self._bad_steps is not None and self._outcome.step + 1 in self._bad_steps.left_out:
            return self._bad_steps.pass_over(micro_batches)
        return self._train_step(micro_batches)

    def _profiled_step(self, profile: StepProfile, micro_batches: Iterator[Any]) -> StepResult:
        """Take a step that may be profiled: what begins before it and ends after it is no part of
        its time. After the last of them steps are as they are without a profile.
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
        if error is None:
            if self._outcome.ended_early:
                early = {"ended_early": self._outcome.ended_early}
            else:
                early = {}
            self._record("end", self._outcome.step, is_finished=not self._outcome.stopped, **early)
        else:
            self._record("end", self._outcome.step, error=str(error) or type(error).__name__)

    def _do_what_is_due(self, result: StepResult) -> None:
        agenda = self._agenda
        self._measured.clear()
        if self._hears_steps:
            self._call("on_step")
        evaluate = bool(self._eval_data) and self._due(agenda.evaluate)
        save = self._save is not None and self._due(agenda.save)
        if self._asked:
            is_time = EVALUATE in self._asked and self._outcome.step >= agenda.evaluate.start_step
            evaluate = evaluate or (is_time and bool(self._eval_data))
            save = save or SAVE in self._asked
            for word in self._asked:
                self._minutes.restart(word)
            self._asked.clear()
        has_news = self._bad_steps is not None and self._bad_steps.watch.has_news
        if evaluate or save or self._due(agenda.log) or has_news:
            # Evaluating and saving wait for the device anyway; reading first keeps their time out
            # of the step's.
            self._read(result)
        if evaluate:
            self._evaluate()
        # Before the save, which then holds what they have changed.
        if self._callbacks is not None and (evaluate or save or self._due(agenda.log)):
            save = self._follow(self._callbacks) or save
        if self._look is not None and self._due(self._look[0]):
            with self._aside("histograms"):
                self._look[1](self._outcome.step)
        if save and self._save is not None:
            if self._not_finite:
                warn(
                    f"step {self._outcome.step}: its loss is not finite, and it is not saved; "
                    "earlier checkpoints are untouched [loss-not-finite]",
                    is_of_all_ranks=True,
                )
            else:
                self._save_now(self._save, result)

    def _call(
        self, event: str, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """Call the callbacks; returns what they log."""
        if self._callbacks is None or not self._callbacks.hears(event):
            return {}
        outcome = self._outcome
        agenda = self._agenda
        return self._callbacks.call(
            event,
            step=outcome.step,
            total_steps=agenda.total_steps,
            epoch=outcome.step / agenda.steps_per_epoch,
            metrics={**outcome.metrics, **metrics},
        )

    def _call_aside(self, event: str) -> None:
        """Call the callbacks, in time of their own."""
        if self._callbacks is not None and self._callbacks.hears(event):
            with self._aside(f"the callback {event}"):
                self._call(event)

    @contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        """Time of another phase than the steps'."""
        before = self._enter(phase)
        with self._stopwatch.excluded():
            yield
        self._enter(before)

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
        """Do what callbacks ask for: evaluate, or end the run, which is evaluated and saved as at
        its last step. Collective. Returns whether it is to be saved.
        """
        with self._aside("the callbacks"):
            asked = callbacks.agreed()
        agenda, self._outcome.ended_early = self._agenda, asked.stop
        ends = bool(asked.stop) and not is_start and self._outcome.step < agenda.total_steps
        is_evaluated = any(name.startswith("eval/") for name in self._measured)
        evaluates = asked.evaluate or (ends and agenda.evaluate.at_end)
        if evaluates and self._eval_data and not is_evaluated:
            self._evaluate()
        return asked.save or (ends and agenda.save.at_end)

    def _save_now(
        self, save: Callable[[int, Mapping[str, float]], object], result: StepResult
    ) -> None:
        self._refuse_to_save_nan(result)
        with self._in_phase(SAVING):
            is_saved = save(self._outcome.step, self._measured) is not False
        self._minutes.restart(SAVE)
        seconds = self._stopwatch.excluded_seconds
        self._checkpoint = {
            "time/checkpoint_ms": 1000 * seconds + self._checkpoint.get("time/checkpoint_ms", 0.0)
        }
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
        """The loss was measured before the step: where only the gradients were bad, it is the
        weights that hold NaN now.

        Saved, they would be what `auto` starts from, again and again.
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
        if self._not_finite > self._agenda.not_finite_allowed:
            raise self._diverged()
        # in fp16 the next loss may be a number again: the checkpoint before this step stands
        if not self._not_finite:
            self._save_now(self._save, result)
        if self._saved_step != step:
            raise StorageError(
                f"{self._outcome.stopped}: stopped after step {step}, which could not be saved; "
                "the last complete checkpoint stands: checkpoint.resume=auto "
                "[checkpoint-not-written]"
            )

    def _unending(self, stream: Iterator[Any]) -> Iterator[Any]:
        """The stream, timed. Where it ends (a sample that raises StopIteration looks like that) is
        an error with a name.
        """
        yield from self._stopwatch.timed(stream)
        error = TrainingError(
            f"step {self._outcome.step + 1}: the training data ended before the run did; every "
            "number below len(dataset) must give a sample, and __getitem__ must not raise "
            "StopIteration [training-data-ended]"
        )
        error.is_of_one_rank = True
        raise error

    def _due(self, cadence: Every) -> bool:
        return cadence.is_due(self._outcome.step, total_steps=self._agenda.total_steps)

    def _read(self, result: StepResult) -> None:
        """Read a step, and all since the last one that was read for what was bad. Collective."""
        policy = self._bad_steps
        if policy is None:
            found = []
        else:
            found = policy.watch.read()
        for bad in found:
            self._record("bad_step", bad.step, **bad.details())
        self._log(result.read())
        if policy is not None:
            policy.follow(found, note=partial(warn, is_of_all_ranks=True))

    def _log(self, metrics: Mapping[str, float]) -> None:
        parts = {name: value for name, value in metrics.items() if name.startswith("time/")}
        spikes = self._spikes.note(metrics.get("train/loss"))
        checkpoint = self._checkpoint
        self._checkpoint = {}
        found = {
            **metrics,
            **spikes,
            **self._stopwatch.read(parts),
            **checkpoint,
            **self._constants,
        }
        self._report(found | self._call("on_log", found))
        is_fine = self._bad_steps is not None or math.isfinite(metrics.get("train/loss", 0.0))
        self._not_finite = 0 if is_fine else self._not_finite + 1
        is_last = self._outcome.step == self._agenda.total_steps
        if self._not_finite > self._agenda.not_finite_allowed or (self._not_finite and is_last):
            raise self._diverged()
        if "train/loss" in metrics:  # it was not left out
            self._skipped_steps.note(self._outcome.step, metrics, is_last=is_last)

    def _diverged(self) -> TrainingError:
        loss = self._outcome.metrics["train/loss"]
        repeated = f", as {self._not_finite} logged losses in a row"
        return TrainingError(
            f"step {self._outcome.step}: train/loss = "
            f"{loss}{repeated if self._not_finite > 1 else ''}: training has diverged; lower "
            "optimizer.lr, set training.clip_grad_norm, or start again from an earlier "
            "checkpoint [loss-not-finite]"
        )

    def _evaluate(self) -> None:
        with self._in_phase(EVALUATING):
            metrics = evaluate_sets(self._engine, self._eval_data, is_stopping=self._is_stopping)
            if not self._outcome.stopped:
                self._report({**metrics, **self._call("on_evaluation", metrics)})
        self._minutes.restart(EVALUATE)
        if not self._outcome.stopped:
            self._record("evaluate", self._outcome.step, seconds=self._stopwatch.excluded_seconds)

    def _is_stopping(self) -> bool:
        self._outcome.stopped = asked = self._stop(self._outcome.step)
        if asked and asked in (EVALUATE, SAVE):
            self._asked.add(asked)
            self._outcome.stopped = asked = ""
        return asked != ""

    def _report(self, metrics: Mapping[str, float]) -> None:
        self._outcome.metrics.update(metrics)
        self._measured.update(metrics)
        epoch = self._outcome.step / self._agenda.steps_per_epoch
        self._sinks.write(Point(self._outcome.step, epoch, now(), metrics))

    def _close_monitors(self) -> None:
        self._sinks.close(hurries=self._outcome.step < self._agenda.total_steps)


def _ignore(kind: str, step: int, **details: object) -> None: ...

"""`open_engine`: a run with the user's own loop, and the engine, checkpoints and sinks of `fit`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, NoReturn

import torch

from framework.config.run_config import RunConfig
from framework.config.training import MEASURED
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.backward_passes import BackwardPasses
from framework.engine.distributed import rank
from framework.engine.plain_engine import PlainEngine
from framework.engine.schedules import MakeSchedule
from framework.engine_protocol import (
    EVALUATING,
    SAVING,
    StepResult,
    Table,
    WeightDoors,
    evaluate_sets,
)
from framework.errors import (
    ConfigError,
    FrameworkError,
    Problem,
    RunStopped,
    TrainingError,
    UsageError,
    explaining,
)
from framework.run import opened
from framework.setup.assemble import make_eval_loaders, make_schedule
from framework.setup.handed_over import (
    config_with_objects,
    names_section,
    read_given,
    refuse_unknown_arguments,
)
from framework.setup.open_run import OpenRun
from framework.setup.prepare_run import prepare
from framework.setup.user_code import ConfigSource, MakeOptimizer, ModelSource, Objects
from framework.system.clock import now
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.launcher_rank import take_rank
from framework.system.log import warn
from framework.system.stopping import Action, Decision, StopRequest
from framework.train.monitors.base import Point, Sinks

# Words of torch's errors about partitioned weights, which are vectors without elements.
_PARTITIONED: Final = re.compile(r"1-D|1D|shape|size")
# Engines that are open, the first one first: requests to stop are for all of them.
_OPEN: Final[list[OpenEngine]] = []


class _OfTheLoop:
    """Placeholder for training data that only the loop has. It always has the same length, because
    a resumed run compares lengths. Checkpoints have the class's name in their config.
    """

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Any:
        raise IndexError("the loop has its own data")


@contextmanager
def open_engine(
    config: ConfigSource,
    *further: NoReturn,  # so that type checkers refuse them as well
    model: ModelSource | None = None,
    train_data: Any = None,
    eval_data: Any = None,
    task: Any = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeSchedule | None = None,
    **unknown: NoReturn,
) -> Iterator[OpenEngine]:
    """Open a run for a loop of the user's own, on every rank; `checkpoint.resume` sets its start.

    At the end of the block it is saved if `checkpoint.at_end` is set. After `should_stop` was true
    it is always saved, and RunStopped is raised. Several may be open, each with a run folder of its
    own.

    Args:
        config: as `fit` takes it.
        model, train_data, eval_data, task, optimizer, scheduler: as `fit` takes them; without
            data, here or in the config, the loop has its own.

    Raises:
        ConfigError: as `fit`; or the length of the run is not set; or ranks share samples; or the
            config sets what only the loop of `fit` does.
    """
    end_in_one_line()
    has_callbacks = bool(unknown.pop("callbacks", ()))  # refused beside what else `fit` does
    refuse_unknown_arguments(unknown, further=further, function="open_engine")
    if _OPEN:
        request = _OPEN[0].request
        handling: AbstractContextManager[object] = nullcontext()  # the first engine handles it
    else:
        request = StopRequest()
        handling = request.handling()
    with refusing_exits():
        take_rank(os.environ)
        values, source = read_given(config)
        has_own_data = train_data is None and not names_section(values, "data")
        if has_own_data:
            train_data = _OfTheLoop()
        objects = Objects(model, train_data, eval_data, task, optimizer, scheduler=scheduler)
        described = _without_hang_watch(config_with_objects(values, objects, source=source))
        _refuse_work_of_fit(described, has_own_data=has_own_data, has_callbacks=has_callbacks)
        prepared = prepare(described, objects=objects, source=source)
    with handling, opened(prepared, request) as run:
        engine = OpenEngine(run, request)
        reason = "interrupted"
        try:
            engine._refuse_shared_weights()
            _OPEN.append(engine)
            if not run.start_step and prepared.plan.config.evaluation.at_start:
                engine._evaluate_once()
            # RunStopped is of an engine that was opened later: this one ends as that one did
            with suppress(RunStopped):
                yield engine
            reason = ""
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            if engine in _OPEN:
                _OPEN.remove(engine)
            engine._close(reason)


def _without_hang_watch(config: RunConfig) -> RunConfig:
    """Set `supervision.hang_seconds` to 0 unless the config sets it: a loop may work for long
    without a call of the engine.
    """
    if "hang_seconds" in config.supervision.model_fields_set:
        return config
    supervision = config.supervision.model_copy(update={"hang_seconds": 0})
    return config.model_copy(update={"supervision": supervision})


def _refuse_work_of_fit(config: RunConfig, *, has_own_data: bool, has_callbacks: bool) -> None:
    """Raise a ConfigError for keys that only the loop of `fit` serves, and for a run of unknown
    length: with data of the user's own it takes `training.max_steps`.
    """
    _refuse_divided_steps(config)
    if has_own_data and not config.training.max_steps:
        reason = "without train_data nothing says how long the run is"
        raise ConfigError.of("max-steps-not-given", reason, "set it", "training.max_steps")
    problems = list(_work_of_fit(config, has_callbacks=has_callbacks))
    if has_own_data:
        problems += _work_with_data(config)
    if problems:
        raise ConfigError(problems)


def _refuse_divided_steps(config: RunConfig) -> None:
    divides_steps = {
        "parallel.pipe": config.parallel.pipe > 1,
        "parallel.tensor": config.parallel.tensor > 1,
        "parallel.sequence": config.parallel.sequence > 1,
        "model.moe": bool(getattr(config.model, "moe", None)),
        "training.bad_steps": bool(config.training.bad_steps),
    }
    for key, is_divided in divides_steps.items():
        if is_divided:
            reason = "its steps are more than the passes of each rank's own batch"
            raise ConfigError.of("own-loop-divided", reason, "use fit()", key)


def _work_of_fit(config: RunConfig, *, has_callbacks: bool) -> Iterator[Problem]:
    """Yield a problem for each key that sets work of the loop of `fit`."""
    if config.callbacks or has_callbacks:
        yield Problem(
            "not-in-own-loop",
            "the loop of fit() calls them, at events that a loop of one's own has not",
            "call them there",
            "callbacks",
        )
    if config.batch.micro_size == MEASURED:
        yield Problem(
            "not-in-own-loop",
            "steps of fit() measure it, and the loop's may take other memory",
            "write a number",
            "batch.micro_size",
            MEASURED,
        )
    if config.profile is not None:
        yield Problem(
            "not-in-own-loop",
            "the loop of fit() profiles its steps",
            "use torch.profiler in the loop, or fit()",
            "profile",
        )
    tensorboard = config.monitors.tensorboard
    if tensorboard is None:
        return
    for name in ("samples", "histograms_every_steps"):
        if getattr(tensorboard, name):
            yield Problem(
                "not-in-own-loop",
                "the loop of fit() looks at them",
                "leave it out, or use fit()",
                f"monitors.tensorboard.{name}",
            )


def _work_with_data(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key that takes data which only the loop has."""
    for name, every_epochs in (
        ("checkpoint", config.checkpoint.every_epochs),
        ("evaluation", config.evaluation.every_epochs),
    ):
        if every_epochs:
            yield Problem(
                "not-in-own-loop",
                "without train_data nothing says how long an epoch is",
                "set every_steps",
                f"{name}.every_epochs",
            )
    for name in ("every_steps", "every_minutes", "at_start"):
        if getattr(config.evaluation, name):
            yield Problem(
                "not-in-own-loop",
                "there is no evaluation data: the loop has its own",
                "hand over train_data and eval_data, or evaluate in the loop",
                f"evaluation.{name}",
            )


class OpenEngine(WeightDoors):
    """One model with its optimizer, run folder and sinks, on this `rank` of `world_size`, for
    `max_steps`. Every method that reads or writes weights is collective.
    """

    def __init__(self, run: OpenRun, request: StopRequest) -> None:
        assert isinstance(run.engine, PlainEngine)
        self.request = request
        self._run = run
        self._engine = run.engine
        self._plan = run.prepared.plan
        self._passes = run.engine.backward_passes()
        run.engine.has_gradients = self._has_gradients
        self.rank = rank()
        self.world_size = self._plan.layout.world_size
        self.max_steps = self._plan.length.total_steps or 0
        monitors, self._events, _ = run.open_monitors()
        run.stop.enter("")  # no hang watch: a loop may work for long without a call of the engine
        self._sinks = Sinks(monitors)
        self._eval_sets = make_eval_loaders(self._plan, run.prepared.parts.splits, rank=self.rank)
        self._schedule = make_schedule(self._plan)
        self._logged: dict[str, float] = {}  # metrics of step `_logged_at`
        # steps at which metrics were logged, a checkpoint was saved, and due work was done last
        self._logged_at = run.start_step
        self._saved_at = run.start_step
        self._done_at = run.start_step
        # the number of steps at the last call of `should_stop`
        self._should_stop_at = -1
        # due work waits for the next call of `should_stop`
        self._leaves_due_work = True

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, including earlier starts."""
        return self._engine.steps_taken

    @property
    def module(self) -> torch.nn.Module:
        """The model in training; at ZeRO stage 3 its weights are partitioned."""
        return self._engine.module

    def _source(self) -> PlainEngine:
        return self._engine

    def move(self, batch: Any) -> Any:
        """Move a batch to this rank's device, in the type that the model takes."""
        return self._engine.move(batch)

    def batches(self) -> Iterator[Any]:
        """Return this rank's micro-batches of the training data from `steps_taken` on, without end:
        the same as in `fit`.
        """
        return self._run.train_data().stream(self.steps_taken)

    def train_step(self, *batches: Any) -> StepResult:
        """Take one step on `batch.accumulation_steps` batches of (inputs, target), by the task's
        loss; `read()` of the result waits for the device.
        """
        accumulation_steps = self._plan.layout.accumulation_steps
        if len(batches) != accumulation_steps:
            raise UsageError(
                f"train_step: {len(batches)} batches, and batch.accumulation_steps is "
                f"{accumulation_steps}"
            )
        if self._passes.num_passes:
            raise UsageError(
                "train_step: a backward before it was not stepped with; call step() after it"
            )
        self._passes.refuse_broken("train_step")
        self._do_left_work()
        with self._passes.running(self._passes_of_others()):
            result = self._engine.train_step(iter(batches))
        self._follow_step()
        return result

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return outputs of the model, for a loss that goes to `backward`."""
        return self._engine(*inputs, **named)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of a micro-batch's mean loss, 0-d. Gradients are averaged over
        ranks and micro-batches; several passes before one `step` add theirs. Weights of other open
        engines get none.
        """
        with explaining(self._explain_double_backward):
            self._passes.run(loss, self._passes_of_others(), retain_graph=retain_graph)

    def _refuse_shared_weights(self) -> None:
        names = {weight: name for name, weight in self.module.named_parameters()}
        for engine in _OPEN:
            for weight in engine._passes.parameters:
                if weight in names:
                    name = names[weight]
                    reason = f"{name} is a weight of {engine._plan.config.run.name}'s model as well"
                    fix = "give one engine a model that holds both, with a loss for each part"
                    raise ConfigError.of("weights-of-two-engines", reason, fix, "model")

    def _has_gradients(self) -> bool:
        """Check whether the last micro-batch of a step has had a backward pass, and no step yet."""
        return bool(self._passes.num_passes and self._engine.is_last_micro_batch())

    def _passes_of_others(self) -> list[BackwardPasses]:
        return [engine._passes for engine in _OPEN if engine is not self]

    def _explain_double_backward(self, error: Exception) -> TrainingError | None:
        """Explain an error of a backward pass through spread weights; None for other errors."""
        if isinstance(error, FrameworkError):  # explained already
            return None
        if self._plan.config.zero.stage < 3 or not _PARTITIONED.search(str(error)):
            return None
        reason = (
            "gradients of gradients (create_graph=True), and a second pass through one graph "
            "(retain_graph=True), need weights that are spread again; set zero.stage: 2"
        )
        return TrainingError(f"backward: zero.stage = 3: {reason} [double-backward]")

    def step(self) -> None:
        """Clip gradients and step, after the last of `batch.accumulation_steps` micro-batches; does
        nothing after the others.
        """
        before = self.steps_taken
        self._passes.end()
        self._do_left_work()
        self._passes.step()
        has_stepped = self.steps_taken > before
        if has_stepped and self.steps_taken % self._plan.config.training.log_every == 0:
            self._engine.written.refuse()
        self._follow_step()

    def _do_left_work(self) -> None:
        """Do work that was left to a `should_stop` which was not called since the last step; from
        then on none is left to it.
        """
        if self._should_stop_at < self.steps_taken and self._done_at != self.steps_taken:
            self._do_due_work()
            self._leaves_due_work = False

    def _follow_step(self) -> None:
        """Do the work that is due, unless the loop calls `should_stop` before every step: then all
        engines are between steps, and the loop has logged its metrics of this one.
        """
        if not self._leaves_due_work or self._should_stop_at < self.steps_taken - 1:
            self._do_due_work()

    def _do_due_work(self) -> None:
        """Evaluate and save if this step's schedule has it, once a step."""
        step = self.steps_taken
        if step == self._done_at:
            return
        self._done_at = step
        if self._schedule.evaluate.is_due(step, total_steps=-1):
            self._evaluate_once()
        if self._schedule.save.is_due(step, total_steps=-1) and self._saved_at != step:
            self.save()
            self._run.minutes.restart(Action.SAVE)

    def _evaluate_once(self) -> None:
        """Evaluate, unless there is no data for it, or metrics of this step are logged already."""
        logged = self._metrics_of_step(self.steps_taken)
        is_evaluated = any(name.startswith("eval/") for name in logged)
        if self._eval_sets and not is_evaluated:
            self.evaluate()
            self._run.minutes.restart(Action.EVALUATE)

    def evaluate(self, batches: Iterable[Any] | None = None) -> dict[str, float]:
        """Measure the evaluation data, or other batches, the same number on every rank; returns and
        logs the metrics ``eval/...``.
        """
        sets: Mapping[str, Iterable[tuple[Any, bool]]] = self._eval_sets
        if batches is not None:
            sets = {"": ((batch, True) for batch in batches)}
        with self._run.stop.during(EVALUATING):
            tables: dict[str, Table] = {}
            metrics = evaluate_sets(self._engine, sets, is_stopping=self._beat, tables=tables)
            if tables:
                self._run.folder.keep_tables(self.steps_taken, tables)
        self.log(metrics)
        return metrics

    def _beat(self) -> bool:
        """Give a sign of life to the hang watch of every engine; the evaluation does not stop."""
        for engine in _OPEN:  # `should_stop` may have been called on any of them
            engine._run.stop.live()
        self._run.stop.live()  # one that ends is not open any more
        return False

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write numbers of this step, or 0-d tensors, to the run's sinks; rank 0's count."""
        step = self.steps_taken
        values = {name: float(value) for name, value in metrics.items()}
        self._logged = self._metrics_of_step(step) | values
        self._logged_at = step
        self._run.outcome.metrics.update(values)
        epoch = step / (self._plan.length.steps_per_epoch or 1)
        self._sinks.write(Point(step, epoch, now(), values))

    def _metrics_of_step(self, step: int) -> dict[str, float]:
        if self._logged_at == step:
            return self._logged
        return {}

    def save(self) -> None:
        """Write a checkpoint of this step, with the metrics that were logged at it."""
        step = self.steps_taken
        self._saved_at = step
        with self._run.stop.during(SAVING):
            self._run.save(step, self._metrics_of_step(step))
        self._note("save")

    def should_stop(self) -> bool:
        """Check, before every step and of one engine alone, whether all ranks end here, by a signal
        or `training.max_minutes`; evaluates and saves all that is due, by steps, epochs or minutes.
        """
        for engine in _OPEN:
            engine._do_due_work()
            engine._should_stop_at = engine.steps_taken
        decision = self._run.stop(self.steps_taken)
        for engine in _OPEN:
            engine._follow(decision)
        return bool(self._run.outcome.stopped)

    def _follow(self, decision: Decision) -> None:
        """Save, evaluate or note the stop that all ranks have agreed on."""
        if decision.action is Action.SAVE:
            self.save()
            self._run.minutes.restart(Action.SAVE)
        elif decision.action is Action.EVALUATE:
            self.evaluate()
            self._run.minutes.restart(Action.EVALUATE)
        elif decision.action is Action.STOP:
            self._run.outcome.stopped = decision.reason

    def _close(self, error: str) -> None:
        """End the run: after a loop without an error do what is due at the end; close the sinks."""
        outcome = self._run.outcome
        outcome.step = self.steps_taken
        if not error:
            self._do_work_at_end()
        if outcome.stopped:
            self._note("stop", signal=outcome.stopped)
        if error:
            self._note("end", error=error)
        else:
            self._note("end", is_finished=not outcome.stopped)
        self._sinks.close(hurries=bool(error or outcome.stopped))

    def _do_work_at_end(self) -> None:
        config = self._plan.config
        outcome = self._run.outcome
        self._do_due_work()
        is_at_end_set = "at_end" in config.evaluation.model_fields_set
        if is_at_end_set and self._schedule.evaluate.at_end and not outcome.stopped:
            self._evaluate_once()
        if self._passes.num_passes:
            name = config.run.name
            warn(
                f"{name}: the loop ends with a backward that no step() followed: it changed nothing"
            )
        if outcome.step > self._saved_at and (outcome.stopped or config.checkpoint.at_end):
            self.save()

    def _note(self, kind: str, **details: Any) -> None:
        if self._events is not None:
            self._events(kind, self.steps_taken, **details)

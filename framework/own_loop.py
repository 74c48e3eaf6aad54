"""`open_engine`: a run whose loop is the user's own, around the engine, the checkpoints and the
sinks of `fit`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch

from framework.config.run_config import RunConfig
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.backward_passes import BackwardPasses
from framework.engine.distributed import rank
from framework.engine.plain_engine import PlainEngine
from framework.engine.protocol import EVALUATING, SAVING, StepResult, evaluate_sets
from framework.engine.workarounds.grad_scaler import explaining_overflow
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
from framework.setup.open_run import OpenRun
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects, config_with_objects
from framework.system.clock import now
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.launcher_rank import take_rank
from framework.system.log import warn
from framework.system.stopping import EVALUATE, SAVE, StopRequest
from framework.train.monitors.base import Point, Sinks

# Of weights that are spread: their places hold vectors without elements.
_SPREAD: Final = re.compile(r"1-D|1D|shape|size")
# Engines that are open, the first one first: requests to stop are for all of them.
_OPEN: Final[list[OpenEngine]] = []


class _OfTheLoop:
    """Stands where data would; of one length, which a run that goes on compares, whatever the run's
    is.
    """

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Any:
        raise IndexError("the loop has its own data")


@contextmanager
def open_engine(config: RunConfig | Mapping[str, Any], **parts: Any) -> Iterator[OpenEngine]:
    """A run for a loop of one's own, on every rank, from where `checkpoint.resume` says. At the end
    of the block it is saved as `checkpoint.at_end` says; where `should_stop` was true, it is, and
    RunStopped is raised. Several may be open, each with a run folder of its own.

    Args:
        config: as `fit` takes it.
        parts: model, train_data, eval_data, task, optimizer, scheduler, as `fit` takes them;
            without data, here or in the config, the loop has its own.

    Raises:
        ConfigError: as `fit`; or nothing says how long the run is; or ranks share samples; or the
            config sets what the loop of `fit` does.
    """
    end_in_one_line()
    if _OPEN:
        request = _OPEN[0].request
    else:
        request = StopRequest()
    with refusing_exits():
        take_rank(os.environ)
        given = config.model_fields_set if isinstance(config, RunConfig) else config
        own = "train_data" not in parts and "data" not in given
        if own:
            parts["train_data"] = _OfTheLoop()
        objects = Objects(**parts)
        asked = config_with_objects(config, objects)
        # a loop may do for long what nobody sees
        if "hang_seconds" not in asked.supervision.model_fields_set:
            waits = asked.supervision.model_copy(update={"hang_seconds": 0})
            asked = asked.model_copy(update={"supervision": waits})
        _refuse_work_of_fit(asked, has_own_data=own, has_callbacks=bool(objects.callbacks))
        prepared = prepare(asked, objects=objects)
    with request.handling() if not _OPEN else nullcontext(), opened(prepared, request) as run:
        engine = OpenEngine(run, request)
        engine._refuse_shared_weights()
        _OPEN.append(engine)
        if not run.start_step:
            engine._evaluate_if(prepared.plan.config.evaluation.at_start)
        error = "interrupted"
        try:
            # of an engine that was opened later: this one ends as that did
            with suppress(RunStopped):
                yield engine
            error = ""
        except Exception as found:
            error = str(found) or type(found).__name__
            raise
        finally:
            _OPEN.remove(engine)
            engine._close(error)


def _refuse_work_of_fit(config: RunConfig, *, has_own_data: bool, has_callbacks: bool) -> None:
    """Refuse what a config sets and no call of an open engine does."""
    sizes = {
        f"parallel.{name}": getattr(config.parallel, name)
        for name in ("pipe", "tensor", "sequence")
    }
    sizes["model.moe"] = 2 if getattr(config.model, "moe", None) else 1
    sizes["training.bad_steps"] = 2 if config.training.bad_steps else 1
    for key in (key for key, size in sizes.items() if size > 1):
        reason = "its steps are more than the passes of each rank's own batch"
        raise ConfigError.of("own-loop-divided", reason, "use fit()", key)
    if has_own_data and not config.training.max_steps:
        reason = "without train_data nothing says how long the run is"
        raise ConfigError.of("max-steps-not-given", reason, "set it", "training.max_steps")
    problems: list[Problem] = []

    def refuse(key: str, reason: str, fix: str) -> None:
        problems.append(Problem("not-in-own-loop", reason, fix, key))

    if config.callbacks or has_callbacks:
        refuse(
            "callbacks",
            "the loop of fit() calls them, at events that a loop of one's own has not",
            "call them there",
        )
    if config.profile is not None:
        refuse(
            "profile",
            "the loop of fit() profiles its steps",
            "use torch.profiler in the loop, or fit()",
        )
    board = config.monitors.tensorboard
    for name in ("samples", "histograms_every_steps"):
        if board is not None and getattr(board, name):
            key = f"monitors.tensorboard.{name}"
            refuse(key, "the loop of fit() looks at them", "leave it out, or use fit()")
    if has_own_data:
        for section in (config.checkpoint, config.evaluation):
            name = "checkpoint" if section is config.checkpoint else "evaluation"
            if section.every_epochs:
                reason = "without train_data nothing says how long an epoch is"
                refuse(f"{name}.every_epochs", reason, "set every_steps")
        for name in ("every_steps", "every_minutes", "at_start"):
            if getattr(config.evaluation, name):
                reason = "there is no evaluation data: the loop has its own"
                refuse(
                    f"evaluation.{name}",
                    reason,
                    "hand over train_data and eval_data, or evaluate in the loop",
                )
    if problems:
        raise ConfigError(problems)


class OpenEngine:
    """One model with its optimizer, run folder and sinks, on this `rank` of `world_size`, for
    `max_steps`. What meets weights is collective.
    """

    def __init__(self, run: OpenRun, request: StopRequest) -> None:
        assert isinstance(run.engine, PlainEngine)
        self.request = request
        self._run = run
        self._engine = run.engine
        self._of = run.engine.engine
        self._plan = run.prepared.plan
        self._passes = BackwardPasses(self._of)
        self.rank = rank()
        self.world_size = self._plan.layout.world_size
        self.max_steps = self._plan.length.total_steps or 0
        monitors, self._events, _ = run.open_monitors()
        run.stop.enter("")  # a loop may do for long what nobody sees
        self._sinks = Sinks(monitors)
        self._eval_sets = make_eval_loaders(self._plan, run.prepared.parts.splits, rank=self.rank)
        self._measured: dict[str, float] = {}  # at step `_measured_at`
        self._measured_at = self._saved_at = self._done_at = run.start_step
        self._asked_at = -1  # the step before which the loop has called `should_stop`
        self._waits = True  # for `should_stop`, with what is due
        self._agenda = make_schedule(self._plan)

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, those of earlier starts included."""
        return int(self._of.global_steps)

    @property
    def module(self) -> torch.nn.Module:
        """The model as it is trained; at ZeRO stage 3 its weights are spread."""
        return self._of.module  # type: ignore[no-any-return]

    def gathered(
        self, module: torch.nn.Module | None = None
    ) -> AbstractContextManager[torch.nn.Module]:
        """Return a context in which the weights of the model, or of one of its modules, are whole
        at every ZeRO stage. What all ranks write into them alike is kept. Collective.
        """
        return self._engine.written.gathered(module)

    def move(self, batch: Any) -> Any:
        """A batch on this rank's device, in the type that the model wants."""
        batches = self._engine._batches
        return batches.as_read(batches.move(batch))

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the training data from `steps_taken` on, without end: those
        of `fit`.
        """
        return self._run.train_data().stream(self.steps_taken)

    def train_step(self, *batches: Any) -> StepResult:
        """Take one step on `batch.accumulation_steps` batches of (inputs, target), by the task's
        loss; `read()` of the result waits for the device.
        """
        if len(batches) != (wanted := self._plan.layout.accumulation_steps):
            raise UsageError(
                f"train_step: {len(batches)} batches, and batch.accumulation_steps is {wanted}"
            )
        if self._passes.num_passes:
            raise UsageError(
                "train_step: a backward before it was not stepped with; call step() behind it"
            )
        self._passes.refuse_broken("train_step")
        self._catch_up()
        with self._passes.running(self._others()):
            result = self._engine.train_step(iter(batches))
        self._follow_step()
        return result

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Outputs of the model, for a loss that goes to `backward`."""
        return self._of(*inputs, **named)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Backward pass of a micro-batch's mean loss, 0-d; gradients are averaged over ranks and
        micro-batches. Those of several passes before one `step` are added. Weights of other open
        engines get none.
        """
        with explaining_overflow(self._of), explaining(self._double_backward):
            self._passes.run(loss, self._others(), retain_graph=retain_graph)

    def _refuse_shared_weights(self) -> None:
        own = {weight: name for name, weight in self.module.named_parameters()}
        for engine in _OPEN:
            for weight in engine._passes.parameters:
                if weight in own:
                    reason = (
                        f"{own[weight]} is a weight of {engine._plan.config.run.name}'s "
                        "model as well"
                    )
                    fix = "give one engine a model that holds both, with a loss for each part"
                    raise ConfigError.of("weights-of-two-engines", reason, fix, "model")

    def _others(self) -> list[BackwardPasses]:
        return [engine._passes for engine in _OPEN if engine is not self]

    def _double_backward(self, error: Exception) -> TrainingError | None:
        if isinstance(error, FrameworkError):  # explained already
            return None
        if self._plan.config.zero.stage < 3 or not _SPREAD.search(str(error)):
            return None
        reason = (
            "gradients of gradients (create_graph=True), and a second pass through one graph "
            "(retain_graph=True), need weights that are spread again; set zero.stage: 2"
        )
        return TrainingError(f"backward: zero.stage = 3: {reason} [double-backward]")

    def step(self) -> None:
        """Clip and step, behind the last of `batch.accumulation_steps` micro-batches; nothing
        behind the others.
        """
        before = self.steps_taken
        self._passes.end()
        self._catch_up()
        with explaining_overflow(self._of):
            self._of.step()
        if (
            self.steps_taken > before
            and self.steps_taken % self._plan.config.training.log_every == 0
        ):
            self._engine.written.refuse()
        self._follow_step()

    def _catch_up(self) -> None:
        """Do what was left to a `should_stop` that has not come since the last step, and leave
        nothing to it again.
        """
        if self._asked_at < self.steps_taken and self._done_at != self.steps_taken:
            self._do_what_is_due()
            self._waits = False

    def _follow_step(self) -> None:
        """Do what is due, unless the loop asks `should_stop` before every step: there all engines
        are between steps, and what the loop has logged at this one is known.
        """
        if not self._waits or self._asked_at < self.steps_taken - 1:
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        step = self.steps_taken
        if step == self._done_at:
            return
        self._done_at = step
        self._evaluate_if(self._agenda.evaluate.is_due(step, total_steps=-1))
        if self._agenda.save.is_due(step, total_steps=-1) and self._saved_at != step:
            self.save()
            self._run.minutes.restart(SAVE)

    def _evaluate_if(self, is_due: bool) -> None:
        is_measured = self._measured_at == self.steps_taken and any(
            name.startswith("eval/") for name in self._measured
        )
        if is_due and self._eval_sets and not is_measured:
            self.evaluate()
            self._run.minutes.restart(EVALUATE)

    def evaluate(self, batches: Iterable[Any] | None = None) -> dict[str, float]:
        """Measure the evaluation data, or other batches, as many on every rank; ``eval/...``,
        logged.
        """
        sets = self._eval_sets if batches is None else {"": ((batch, True) for batch in batches)}
        with self._run.stop.during(EVALUATING):
            metrics = evaluate_sets(self._engine, sets, is_stopping=self._lives)
        self.log(metrics)
        return metrics

    def _lives(self) -> bool:
        for engine in [*_OPEN, self]:  # any may be the one that is asked; one that ends is not open
            engine._run.stop.live()
        return False

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand numbers of this step, or 0-d tensors, to the run's sinks; rank 0's count."""
        step = self.steps_taken
        found = {name: float(value) for name, value in metrics.items()}
        self._measured = (self._measured if self._measured_at == step else {}) | found
        self._measured_at = step
        self._run.outcome.metrics.update(found)
        self._sinks.write(
            Point(step, step / (self._plan.length.steps_per_epoch or 1), now(), found)
        )

    def save(self) -> None:
        """Write a checkpoint of this step, with what was logged at it."""
        step = self._saved_at = self.steps_taken
        with self._run.stop.during(SAVING):
            self._run.save(step, self._measured if self._measured_at == step else {})
        self._note("save")

    def should_stop(self) -> bool:
        """Check, before every step and of one engine alone, whether all ranks end here, by a signal
        or `training.max_minutes`; evaluates and saves all that is due, by steps, epochs or minutes.
        """
        for engine in _OPEN:
            engine._do_what_is_due()
            engine._asked_at = engine.steps_taken
        asked = self._run.stop(self.steps_taken)
        for engine in _OPEN if asked else ():
            if asked in (EVALUATE, SAVE):
                engine.save() if asked == SAVE else engine.evaluate()
                engine._run.minutes.restart(asked)
            else:
                engine._run.outcome.stopped = asked
        return bool(self._run.outcome.stopped)

    def _close(self, error: str) -> None:
        outcome = self._run.outcome
        asked = self._plan.config.checkpoint
        outcome.step = self.steps_taken
        if not error:
            self._do_what_is_due()
            ends = (
                "at_end" in self._plan.config.evaluation.model_fields_set
                and self._agenda.evaluate.at_end
            )
            self._evaluate_if(ends and not outcome.stopped)
        if self._passes.num_passes and not error:
            name = self._plan.config.run.name
            warn(
                f"{name}: the loop ends with a backward that no step() followed: it changed nothing"
            )
        if not error and outcome.step > self._saved_at and (outcome.stopped or asked.at_end):
            self.save()
        if outcome.stopped:
            self._note("stop", signal=outcome.stopped)
        self._note("end", **({"error": error} if error else {"is_finished": not outcome.stopped}))
        self._sinks.close(hurries=bool(error or outcome.stopped))

    def _note(self, kind: str, **details: Any) -> None:
        if self._events is not None:
            self._events(kind, self.steps_taken, **details)

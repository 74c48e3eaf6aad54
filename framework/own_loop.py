"""`open_engine`: a run whose loop is the user's own, around the engine, the checkpoints and the sinks of `fit`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import torch

from framework.config.run_config import RunConfig
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.distributed import rank
from framework.engine.failures import ExplainedData
from framework.engine.plain_engine import PlainEngine
from framework.engine.protocol import StepResult, evaluate_sets
from framework.engine.schedules import MakeSchedule
from framework.engine.workarounds.grad_scaler import explaining_overflow
from framework.errors import ConfigError, RunStopped, TrainingError, UsageError, explaining
from framework.run import opened
from framework.setup.assemble import OpenRun, make_eval_loaders
from framework.setup.objects import MakeOptimizer, ModelSource, Objects, config_with_objects
from framework.setup.parts import make_train_loader
from framework.setup.prepared import order_of, prepare
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.stopping import EVALUATE, SAVE, StopRequest
from framework.tasks.task import Task
from framework.train.monitors.base import Point, Sinks

# Of weights that are not there: their places hold vectors without elements.
_SPREAD: Final = re.compile(r"1-D|1D|shape|size")
# Engines that are open, the first one first: requests to stop are for all of them.
_OPEN: Final[list[OpenEngine]] = []


class _Unnumbered:
    """Stands where data would: the loop has its own. Of one length, whatever the run's is: a run that goes on compares
    it.
    """

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Any:
        raise IndexError("this run was opened without train_data: its loop has its own")


@contextmanager
def open_engine(
    config: RunConfig | Mapping[str, Any],
    *,
    model: ModelSource | None = None,
    train_data: Any = None,
    eval_data: Any = None,
    task: Any = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeSchedule | None = None,
) -> Iterator[OpenEngine]:
    """A run for a loop of one's own; arguments are those of `fit`. Called on every rank.

    It goes on from where `checkpoint.resume` says; at the end of the block it is saved where `checkpoint.at_end` says
    so, or where `should_stop` was true, which then raises RunStopped (exit code 75) as `fit` does. Several may be open:
    each has a run folder of its own.

    Raises:
        ConfigError: as `fit`; or there is neither `train_data` nor `training.max_steps`; or the run is a pipeline.
    """
    end_in_one_line()
    request = _OPEN[0].request if _OPEN else StopRequest()
    objects = Objects(model, train_data, eval_data, task, optimizer, (), scheduler)
    with refusing_exits():
        if train_data is None and "data" not in (config if isinstance(config, Mapping) else config.model_fields_set):
            objects = Objects(model, (_Unnumbered(), eval_data), None, task, optimizer, (), scheduler)
        asked = config_with_objects(config, objects)
        if asked.parallel.pipe > 1:
            reason = "a pipeline has its own order of forward and backward passes"
            raise ConfigError.of("own-loop-with-pipeline", reason, "use fit()", "parallel.pipe", asked.parallel.pipe)
        if (
            objects.splits is not None
            and isinstance(objects.splits.train, _Unnumbered)
            and not asked.training.max_steps
        ):
            reason = "without train_data nothing else says how long the run is"
            raise ConfigError.of("max-steps-not-given", reason, "set it", "training.max_steps")
        prepared = prepare(asked, objects=objects)
    with request.handling() if not _OPEN else nullcontext(), opened(prepared, request) as run:
        engine = OpenEngine(run, request)
        _OPEN.append(engine)
        try:
            with suppress(RunStopped):  # of an engine that was opened later: this one ends as that did
                yield engine
        except BaseException as error:
            engine._close(str(error) or type(error).__name__)
            raise
        else:
            engine._close()
        finally:
            _OPEN.remove(engine)


class OpenEngine:
    """One model with its optimizer, its run folder and its sinks, for a loop of one's own. All methods but `log` and
    `move` are collective where they meet weights: every rank calls them in the same order.
    """

    def __init__(self, run: OpenRun, request: StopRequest) -> None:
        assert isinstance(run.engine, PlainEngine)
        self.request, self._run, self._engine = request, run, run.engine
        plan, splits = run.prepared.plan, run.prepared.parts.splits
        monitors, self._events, _ = run.open_monitors()
        self._sinks = Sinks(monitors)
        self._eval_sets = make_eval_loaders(plan, splits, rank=rank())
        self._measured: dict[str, float] = {}  # at step `_measured_at`
        self._measured_at = self._saved_at = run.start_step
        self.rank, self.world_size, self.max_steps = rank(), plan.layout.world_size, plan.length.total_steps or 0

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, those of earlier starts included."""
        return int(self._engine.engine.global_steps)

    @property
    def module(self) -> torch.nn.Module:
        """The model as it is trained; at ZeRO stage 3 its weights are spread."""
        module: torch.nn.Module = self._engine.engine.module
        return module

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._engine.lr()

    def move(self, batch: Any) -> Any:
        """A batch on this rank's device, inputs of a model in fp16 or bf16 in its type."""
        batches = self._engine._batches
        return batches.as_read(batches.move(batch))

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches of `train_data` from `steps_taken` on, without end: those of `fit`."""
        prepared, task = self._run.prepared, self._run.prepared.parts.task
        at_once = prepared.plan.layout.accumulation_steps if type(task).count is not Task.count else 1
        order = order_of(self._run.start)
        loader = make_train_loader(prepared.plan, prepared.parts.splits, rank=rank(), order=order, read_at_once=at_once)
        return ExplainedData(loader).stream(self.steps_taken)

    def train_step(self, *batches: Any) -> StepResult:
        """Take one step on `batch.accumulation_steps` batches of (inputs, target), by the loss of the task. Does not
        wait for the device, but `read()` of the result does.
        """
        wanted = self._run.prepared.plan.layout.accumulation_steps
        if len(batches) != wanted:
            raise UsageError(f"train_step: {len(batches)} batches, and batch.accumulation_steps is {wanted}")
        return self._engine.train_step(iter(batches))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Outputs of the model, in its number format."""
        return self._engine.engine(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of a mean loss (0-d) over this rank's micro-batch; ranks and micro-batches are averaged.

        Raises:
            TrainingError: kind ``double-backward``: the loss needs gradients of gradients, at ZeRO stage 3; kind
                ``loss-of-another-engine``: it goes through outputs of another engine.
        """
        with explaining_overflow(self._engine.engine), explaining(self._foreign_loss):
            self._engine.engine.backward(loss)

    def _foreign_loss(self, error: Exception) -> TrainingError | None:
        stated = str(error)
        if "Direct calls to tensor.backward()" in stated:
            reason = "the loss goes through what another engine has returned; call that one's module, within frozen()"
            return TrainingError(f"backward: {reason} [loss-of-another-engine]")
        if self._run.prepared.plan.config.zero.stage == 3 and _SPREAD.search(stated):
            reason = "weights are spread again when their layer's pass has ended, where gradients of gradients "
            reason += "(create_graph=True) need them; set zero.stage: 2"
            return TrainingError(f"backward: zero.stage = 3: {reason} [double-backward]")
        return None

    def step(self) -> None:
        """Clip, step and clear the gradients behind the last of `batch.accumulation_steps` backward passes; nothing
        behind the others.
        """
        with explaining_overflow(self._engine.engine):
            self._engine.engine.step()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Give this model's weights no gradients meanwhile: the losses of another engine go through it."""
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in trained:
                weight.requires_grad_(True)

    def evaluate(self, batches: Iterable[Any] | None = None) -> dict[str, float]:
        """Measure `eval_data`, or other batches, equally many on all ranks, and log ``eval/...``."""
        sets = self._eval_sets if batches is None else {"": ((batch, True) for batch in batches)}
        metrics = evaluate_sets(self._engine, sets)
        self.log(metrics)
        return metrics

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand metrics of this step to the run's sinks, on rank 0; numbers, or 0-d tensors, which are waited for."""
        step, found = self.steps_taken, {name: float(value) for name, value in metrics.items()}
        self._measured = (self._measured if self._measured_at == step else {}) | found
        self._measured_at = step
        self._run.outcome.metrics.update(found)
        epoch = step / (self._run.prepared.plan.length.steps_per_epoch or 1)
        self._sinks.write(Point(step, epoch, time.time(), found))

    def save(self) -> None:
        """Write a checkpoint of this step, with what was logged at it."""
        step = self.steps_taken
        self._run.save(step, self._measured if self._measured_at == step else {})
        self._saved_at = step
        self._note("save")

    def should_stop(self) -> bool:
        """Check whether the loop is to end here, on all ranks alike: by a signal, or `training.max_minutes`. Asked
        before every step, of one engine alone; it also evaluates and saves where `every_minutes` says so.
        """
        asked = self._run.stop(self.steps_taken)
        if asked in (EVALUATE, SAVE):
            self._run.minutes.restart(asked)
            for engine in _OPEN:
                engine.save() if asked == SAVE else engine.evaluate()
        elif asked:
            for engine in _OPEN:
                engine._run.outcome.stopped = asked
        return bool(self._run.outcome.stopped)

    def _close(self, error: str = "") -> None:
        outcome, asked = self._run.outcome, self._run.prepared.plan.config.checkpoint
        outcome.step = self.steps_taken
        if not error and outcome.step > self._saved_at and (outcome.stopped or asked.at_end):
            self.save()
        if outcome.stopped:
            self._note("stop", signal=outcome.stopped)
        self._note("end", **({"error": error} if error else {"is_finished": not outcome.stopped}))
        self._sinks.close(hurries=bool(error or outcome.stopped))

    def _note(self, kind: str, **details: Any) -> None:
        if self._events is not None:
            self._events(kind, self.steps_taken, **details)

"""A run between its start and its end, and the construction of its Trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.weight_parts import whole_shape
from framework.config.run_config import RunConfig, watched_metrics
from framework.engine.distributed import claims_error_report, from_rank0, rank
from framework.engine.hang_watch import Watched
from framework.engine_protocol import Engine
from framework.plan.cluster import GPU_VARIABLE
from framework.plan.plan import Plan
from framework.setup.assemble import (
    make_eval_loaders,
    make_monitors,
    make_profiler,
    make_schedule,
    watch_samples,
)
from framework.setup.components import make_train_loader
from framework.setup.prepare_run import Prepared, order_of
from framework.setup.start_point import on_rank0
from framework.system.log import print_line
from framework.system.waiting import waiting
from framework.tasks.task import Task
from framework.train.bad_steps import LeftOut
from framework.train.best import BestSoFar
from framework.train.cadence import Minutes
from framework.train.callbacks import Callbacks
from framework.train.hooks import Hooks, record_nothing
from framework.train.monitors.base import Behind, HeldFolder, Monitor
from framework.train.monitors.log_lines import LogLines
from framework.train.run_folder import RunFolder
from framework.train.trainer import Outcome, RunStart, TrainData, Trainer

if TYPE_CHECKING:
    from framework.checkpoint.async_checkpointer import AsyncCheckpointer
    from framework.checkpoint.checkpointer import Checkpointer
    from framework.data.streams import StreamPlaces
    from framework.engine.pipeline_engine import PipelineEngine
    from framework.engine.plain_engine import PlainEngine
    from framework.plan.balance import StageTable
    from framework.report.run_result import RunResult
    from framework.train.events import Events


@dataclass
class OpenRun:
    """A run between its start and its end, for the loop that trains it.

    Attributes:
        start: the checkpoint that the run started from.
        load: loads a checkpoint into the engine and all parts with a state.
        outcome: filled by the loop.
        began: start of this process, by the monotonic clock.
        settle: waits until the folder is known to be held; set with the monitors.
    """

    prepared: Prepared
    engine: PlainEngine | PipelineEngine
    folder: RunFolder
    checkpointer: Checkpointer | AsyncCheckpointer
    best: BestSoFar
    callbacks: Callbacks
    start: SavedCheckpoint | None
    places: StreamPlaces | None
    stop: Watched
    minutes: Minutes
    left_out: LeftOut
    load: Callable[[SavedCheckpoint], int]
    outcome: Outcome
    began: float
    settle: Callable[[], object] = lambda: None

    @property
    def start_step(self) -> int:
        """Optimizer steps that were taken before this start."""
        if self.start is None:
            return 0
        return self.start.step

    @property
    def result(self) -> RunResult:
        """Result of the run, made of its `outcome`."""
        from framework.report.run_result import RunResult  # the run is over

        return RunResult.of(
            self.outcome, folder=self.folder.path, start_step=self.start_step, best=self.best.found
        )

    def print_start(self) -> None:
        """Print the summary of the start; on rank 0."""
        from framework.report.start_summary import print_start  # the other ranks print nothing

        prepared = self.prepared
        stages = prepared.cut.table if prepared.cut else None
        num_params, num_trained = count_parameters(
            self.engine, stages, divides_experts=prepared.plan.layout.expert_size > 1
        )
        print_start(
            prepared.plan,
            self.folder.path,
            start_step=self.start_step,
            stages=stages,
            evaluates=bool(prepared.parts.splits.evaluations),
            num_params=num_params,
            num_trained=num_trained,
        )

    def print_end(self) -> None:
        """Record the end in the events, write the report and print the result, or only the goodput
        if the run was stopped; on rank 0, when the engine is closed.
        """
        from framework.report.end_summary import describe_goodput, print_end, write_report
        from framework.train.events import note_closed

        plan = self.prepared.plan
        folder = self.folder.path
        note_closed(folder / "events.jsonl", step=self.outcome.step)
        report = write_report(folder) if plan.config.monitors.report else None
        goodput = describe_goodput(folder)
        if not self.outcome.stopped:
            print_end(self.result, plan, environment=os.environ, report=report, goodput=goodput)
        elif goodput:
            print_line(f"goodput {goodput}")

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record an error after the loop as the end of the run: the loop has noted its own end."""
        try:
            yield
        except Exception as error:
            if rank() == 0:
                from framework.train.events import Events

                # the disk that refused the checkpoint may refuse this line too
                with suppress(OSError):
                    Events.append(self.folder.events, "end", self.outcome.step, error=str(error))
            raise

    def open_monitors(self) -> tuple[list[Monitor], Events | None, tuple[int, Mapping[str, float]]]:
        """Open the monitors and, on rank 0, the events. Collective.

        Returns:
            The monitors, the events, and on every rank the counts of rank 0: earlier starts of the
            run, and floating-point operations of a step by the metric that is their rate.
        """
        plan = self.prepared.plan
        folder = self.folder
        start_step = self.start_step
        total_steps = plan.length.total_steps or 0
        held = Behind(HeldFolder(folder))
        monitors: list[Monitor] = [held, self.best, LogLines(total_steps)]
        events: list[Events] = []  # on rank 0
        self.settle = held.settle

        def add_monitors() -> tuple[int, Mapping[str, float]]:
            """Add the monitors of rank 0; return the counts that all ranks need."""
            from framework.train.events import Events

            since = time.monotonic() - self.began
            events.append(Events(folder.events, from_step=start_step, seconds=since))
            changes = self._changes()
            if changes:
                events[0]("changed", start_step, changes=changes)
            if self.prepared.measured:
                events[0]("measured", start_step, **self.prepared.measured)
            monitors.extend(
                make_monitors(
                    plan.config,
                    folder.path,
                    total_steps=total_steps,
                    from_step=start_step,
                    held=held,
                )
            )
            from framework.plan.plan_against_run import PlanAgainstRun

            monitors.append(Behind(PlanAgainstRun(plan, folder.path), after=held))
            monitors.append(events[0])
            return events[0].restarts, _flops_per_step(plan)

        facts = from_rank0(on_rank0(add_monitors))
        return monitors, events[0] if events else None, facts

    def _changes(self) -> list[str]:
        """Describe what a resumed run has otherwise than its checkpoint, by
        `checkpoint.allow_changed`.
        """
        config = self.prepared.plan.config
        if self.start is None or not config.checkpoint.allow_changed:
            return []
        from framework.checkpoint.resumable import describe_allowed

        return describe_allowed(self.start, config=config.to_dict())

    def train_data(self, *, for_engine: bool = False) -> TrainData:
        """Return this rank's loader of the training data, in the order that the run began with;
        `for_engine` is as in `make_train_loader`.
        """
        plan = self.prepared.plan
        parts = self.prepared.parts
        order = order_of(self.start)
        # A loss of sums: the step counts all of its micro-batches before the first forward pass.
        read_at_once = 1
        if type(parts.task).count is not Task.count:
            read_at_once = plan.layout.accumulation_steps
        return make_train_loader(
            plan,
            parts.splits,
            rank=rank(),
            order=order,
            places=self.places,
            read_at_once=read_at_once,
            claims=claims_error_report,
            for_engine=for_engine,
        )

    def save(self, step: int, metrics: Mapping[str, float]) -> object:
        """Wait until the folder is known to be held, then write a checkpoint. Collective."""
        with waiting(f"the save of step {step}"):
            self.settle()
            return self.checkpointer.save(step, metrics)


def build_trainer(run: OpenRun) -> Trainer:
    """Open the monitors and the events of a run, and build its Trainer. Collective; called once."""
    prepared = run.prepared
    engine = run.engine
    start = run.start
    plan = prepared.plan
    splits = prepared.parts.splits
    monitors, events, (restarts, per_step) = run.open_monitors()
    section = plan.config.training.bad_steps
    watch = engine.bad_steps
    policy = None
    if section is not None and watch is not None:
        from framework.train.bad_step_policy import BadStepPolicy

        policy = BadStepPolicy(
            section.policy, section.max_roll_backs, watch, run.left_out, engine.pass_over
        )
    tokens_per_sample = getattr(splits.train, "tokens_per_sample", None)
    return Trainer(
        engine,
        schedule=make_schedule(plan, tokens_per_sample=tokens_per_sample, per_step=per_step),
        train_data=run.train_data(for_engine=True),
        eval_data=make_eval_loaders(plan, splits, rank=rank()),
        monitors=monitors,
        start=RunStart(
            run.start_step,
            evaluates_first=start is None or (start.verified and not _was_evaluated(start)),
            constants={"run/restarts": float(restarts)},
        ),
        hooks=Hooks(
            save=run.save,
            stop=run.stop,
            minutes=run.minutes,
            enter=run.stop.enter,
            record=record_nothing if events is None else events,
            show_weights=watch_samples(engine, prepared, monitors, run.folder),
            keep_tables=run.folder.keep_tables,
            measured=_refusal_of_unmeasured(plan.config),
            callbacks=run.callbacks or None,
            profile=make_profiler(engine, plan, run.folder, start_step=run.start_step),
            bad_steps=policy,
        ),
    )


def _refusal_of_unmeasured(config: RunConfig) -> Callable[[Collection[str]], object]:
    """Return what refuses metrics that the run follows and its first evaluation has not given."""
    if not any(watched_metrics(config)):
        return lambda names: None
    from framework.setup.watched_metrics import refuse_not_measured

    return partial(refuse_not_measured, config)


def _flops_per_step(plan: Plan) -> Mapping[str, float]:
    """Count the floating-point operations of a step, by the metric that is their rate. On rank 0:
    the other ranks load no estimates of time.
    """
    from framework.plan.flops import flops_per_step
    from framework.plan.work import work_of

    peaks: Mapping[str, float] = {}
    # CPUs have no listed peak, unless a variable names a device.
    if plan.cluster.device != "cpu" or GPU_VARIABLE in os.environ:
        from framework.plan.auto import peaks_at_hand

        peaks = peaks_at_hand(plan.cluster)
    return flops_per_step(plan, work_of(plan), peaks)


def _was_evaluated(checkpoint: SavedCheckpoint) -> bool:
    return any(name.startswith("eval/") for name in checkpoint.manifest.get("metrics", {}))


def count_parameters(
    engine: Engine, stages: StageTable | None, *, divides_experts: bool
) -> tuple[int, int]:
    """Return the number of parameters of the whole model, and of its trained ones, over all stages
    and over all ranks that share weights, or experts where `divides_experts` is set.
    """
    if stages is not None:
        count = sum(stage.num_params for stage in stages.stages())
        return count, count
    module = engine.module
    sizes = {weight: whole_shape(weight).numel() for weight in module.parameters()}
    if divides_experts:
        from framework.models.experts import sizes_of_all_ranks

        sizes |= sizes_of_all_ranks(module, sizes)
    num_trained = sum(size for weight, size in sizes.items() if weight.requires_grad)
    return sum(sizes.values()), num_trained

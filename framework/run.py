"""The story of a run, top to bottom: from the result of `prepare`, for which no process waits for
another, to `Trainer.fit()` and its end. From `process_group` on, all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.run_config import RunConfig
from framework.config.training import MEASURED
from framework.data.loaders import is_stream
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.distributed import (
    device,
    device_name,
    from_rank0,
    gather,
    open_rank_log,
    process_group,
    rank,
    refuse_different_ranks,
)
from framework.engine.failures import explaining_failures
from framework.engine.hang_watch import HangWatch, Watched, watching
from framework.engine.plain_engine import arithmetic_of
from framework.engine.random_state import seed_ranks
from framework.engine.stop_agreement import agreed_stops
from framework.engine_protocol import LOADING, SAVING, Engine
from framework.errors import RunStopped
from framework.setup import start_point
from framework.setup.assemble import assemble_engine, make_callbacks, make_checkpointer
from framework.setup.open_run import OpenRun, build_trainer
from framework.setup.prepare_run import Prepared, order_of
from framework.system.exits import end_in_one_line
from framework.system.log import logging_the_run
from framework.system.stopping import Action, StopRequest
from framework.system.waiting import waiting
from framework.train.best import BestSoFar
from framework.train.cadence import Minutes
from framework.train.run_folder import RunFolder
from framework.train.trainer import Outcome

if TYPE_CHECKING:
    import torch

    from framework.data.streams import StreamPlaces
    from framework.plan.plan import Plan
    from framework.report.run_result import RunResult


def run_prepared(prepared: Prepared, request: StopRequest) -> RunResult:
    """Train a prepared run to its end, or until the request stops it."""
    with opened(prepared, request) as run:
        if prepared.plan.config.training.bad_steps is None:
            run.outcome = build_trainer(run).fit()
        else:
            from framework.setup.roll_back import train

            run.outcome = train(run)
    return run.result


@contextmanager
def opened(prepared: Prepared, request: StopRequest) -> Iterator[OpenRun]:
    """Open a run for the time of its loop: with the process group of all ranks, the run folder
    locked, and the engine at the start or at a loaded checkpoint.

    Collective, as is the end of the block, which reports the run's `outcome` as the loop has left
    it.

    Raises:
        RunStopped: the loop was stopped, as `outcome` shows.
    """
    config = prepared.plan.config
    folder = RunFolder(config.run.folder)
    with logging_the_run():
        with explaining_failures(folder.logs, prepared.plan), process_group(config.run.backend):
            end_in_one_line()
            refuse_different_ranks(prepared.fingerprint())
            with closing(folder):
                start = start_point.choose_together(folder, config, prepared.named)
                prepared = start_point.measure_cut(prepared, start)
                prepared = _with_measured_batch(prepared, start)
                prepared = start_point.agreed_weights(prepared, start)
                start_point.open_folder(folder, prepared, start)
                open_rank_log(folder.logs / f"rank{rank()}.log")
                with (
                    arithmetic_of(prepared.plan),
                    _leaving_nothing(config.zero.stage),
                    watching(
                        logs=folder.logs,
                        end_seconds=config.supervision.hang_seconds,
                        stop_request=request.asked,
                    ) as watch,
                    _at_work(prepared, folder, start, request, watch) as run,
                ):
                    yield run
        if run.outcome.stopped:  # only now: all ranks have left the group in good order
            from framework.report.end_summary import describe_stop

            raise RunStopped(describe_stop(run.result, run.outcome.stopped, prepared.plan))


def _with_measured_batch(prepared: Prepared, start: SavedCheckpoint | None) -> Prepared:
    """Return the run with the micro-batch that `batch.micro_size: measured` finds. Collective."""
    plan = prepared.plan
    if plan.config.batch.micro_size != MEASURED:
        return prepared
    from framework.setup.micro_size import measured

    with arithmetic_of(plan), _leaving_nothing(plan.config.zero.stage):
        return measured(prepared, start, around=partial(_attention, plan))


def _leaving_nothing(stage: int) -> AbstractContextManager[None]:
    """Return a context after which nothing of ZeRO stage 3 is left in the process."""
    if stage < 3:
        return nullcontext()
    from framework.engine.workarounds.left_by_stage_3 import leaving_nothing

    return leaving_nothing(stage)


def _attention(plan: Plan, model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the kernel of `training.attention` computes attention. Collective
    where it is entered.
    """
    if plan.config.training.attention == "auto" and device_name() != "cuda":
        return nullcontext()
    from framework.engine.attention_kernels import kernel_of_run

    return kernel_of_run(plan, model, device())


@contextmanager
def _at_work(
    prepared: Prepared,
    folder: RunFolder,
    start: SavedCheckpoint | None,
    request: StopRequest,
    watch: HangWatch,
) -> Iterator[OpenRun]:
    """Assemble the engine and everything around it, load the start, and close all of it in order at
    the end of the block. Collective.
    """
    plan = prepared.plan
    config = plan.config
    with waiting("the model and DeepSpeed's engine"):
        engine = assemble_engine(prepared)
    start_point.keep_ds_config(folder, engine.ds_config)
    _seed(prepared, start)
    best = BestSoFar(config.checkpoint.keep_best, best_is=config.checkpoint.best_is)
    description = prepared.description(order=order_of(start)) | engine.description()
    description |= start_point.describe_frozen(engine, config)
    callbacks = make_callbacks(engine, prepared)
    places = _stream_places(prepared)
    left_out = start_point.steps_left_out(folder, start, config)
    with_state: list[Any] = [best, callbacks, left_out]
    if engine.bad_steps:
        with_state.append(engine.bad_steps)
    kept = start_point.Kept(places, *with_state)
    load = partial(_load, engine, kept, description, watch)
    start_step = load(start)
    checkpointer = make_checkpointer(
        engine, folder.checkpoints, plan=plan, description=description, further=kept.state
    )
    minutes = _make_minutes(config, began=request.began)
    with (
        _attention(plan, engine.module),
        closing(checkpointer),
        agreed_stops(request, start_step=start_step, due=minutes.due) as ask,
    ):
        run = OpenRun(
            prepared=prepared,
            engine=engine,
            folder=folder,
            checkpointer=checkpointer,
            best=best,
            callbacks=callbacks,
            start=start,
            places=places,
            stop=Watched(watch, ask),
            minutes=minutes,
            left_out=left_out,
            load=load,
            outcome=Outcome(step=start_step),
            began=request.began,
        )
        if rank() == 0:
            run.print_start()
        yield run
        watch.enter(SAVING)
        with run.recording_failure():
            with waiting("the last checkpoint to be on the disk"):
                checkpointer.finish(is_final=bool(run.outcome.stopped))
            from_rank0(start_point.on_rank0(folder.check_held))
    request.training_is_over()
    watch.enter("")
    engine.close()
    if rank() == 0:
        run.print_end()


def _load(
    engine: Engine,
    kept: start_point.Kept,
    description: Mapping[str, Any],
    watch: HangWatch,
    checkpoint: SavedCheckpoint | None,
) -> int:
    """Load a checkpoint, if there is one, into the engine and `kept`; returns its step. Collective,
    and watched: a load that hangs is a hang.
    """
    name = "nothing"
    if checkpoint:
        name = str(checkpoint.path)
    with watch.during(LOADING), waiting(f"the load of {name}"):
        return start_point.load_start(engine, checkpoint, kept=kept, description=description)


def _make_minutes(config: RunConfig, *, began: float) -> Minutes:
    intervals = {
        Action.EVALUATE: config.evaluation.every_minutes,
        Action.SAVE: config.checkpoint.every_minutes,
    }
    return Minutes(intervals, most=config.training.max_minutes, began=began)


def _stream_places(prepared: Prepared) -> StreamPlaces | None:
    """Return what keeps the places of a training stream; None for data with samples by number."""
    if not is_stream(prepared.parts.splits.train):
        return None
    from framework.data.streams import StreamPlaces

    return StreamPlaces(gather)


def _seed(prepared: Prepared, start: SavedCheckpoint | None) -> None:
    """Seed this rank by its tensor group, and by the step it starts at: ranks of one group draw the
    same numbers, and `models.split.TensorPart` takes care of layers that are divided among them.
    """
    plan = prepared.plan
    first_of_group = rank() - plan.layout.tensor_rank(rank())
    step = 0
    if start:
        step = start.step
    seed_ranks(plan.config.run.seed, rank=first_of_group, step=step)

"""The story of a run: from what `prepare` has found, before this process waited for any other, to
`Trainer.fit()` and its end, top to bottom. From `process_group` on, all ranks walk the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from framework.checkpoint.manifest import SavedCheckpoint
from framework.data.streams import StreamPlaces
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.distributed import (
    from_rank0,
    gather,
    process_group,
    quiet_deepspeed,
    rank,
    refuse_different_ranks,
)
from framework.engine.failures import explaining_failures
from framework.engine.hang_watch import HangWatch, Watched, watching
from framework.engine.plain_engine import arithmetic_of
from framework.engine.protocol import LOADING, SAVING
from framework.engine.random_state import seed_ranks
from framework.engine.stop_agreement import agreed_stops
from framework.engine.workarounds.left_by_stage_3 import leaving_nothing
from framework.errors import RunStopped
from framework.report.summary import RunResult, describe_stop
from framework.setup import start_point
from framework.setup.assemble import assemble_engine, make_callbacks, make_checkpointer
from framework.setup.open_run import OpenRun
from framework.setup.prepare_run import Prepared, order_of
from framework.setup.roll_back import train
from framework.system.exits import end_in_one_line
from framework.system.log import noting_errors
from framework.system.stopping import StopRequest
from framework.system.waiting import waiting
from framework.train.best import BestSoFar
from framework.train.run_folder import RunFolder
from framework.train.trainer import Minutes, Outcome


def run_prepared(prepared: Prepared, request: StopRequest) -> RunResult:
    """Train what was prepared, to its end or to where the request stops it."""
    with opened(prepared, request) as run:
        run.outcome = train(run)
    return run.result


@contextmanager
def opened(prepared: Prepared, request: StopRequest) -> Iterator[OpenRun]:
    """A run for the time of its loop: all ranks together, its folder held, its engine where it goes
    on from. Collective, as is the end of the block, which reports what the loop has left in
    `outcome`.

    Raises:
        RunStopped: the outcome says that the loop was stopped.
    """
    config, folder = prepared.plan.config, RunFolder(prepared.plan.config.run.folder)
    with noting_errors():
        with explaining_failures(folder.logs, prepared.plan), process_group(config.run.backend):
            end_in_one_line()
            refuse_different_ranks(prepared.fingerprint())
            with closing(folder):
                start = start_point.choose_together(folder, config)
                prepared = start_point.agreed_weights(
                    start_point.measure_cut(prepared, start), start
                )
                start_point.open_folder(folder, prepared, start)
                quiet_deepspeed(folder.logs / f"rank{rank()}.log")
                with (
                    arithmetic_of(prepared.plan),
                    leaving_nothing(config.zero.stage),
                    watching(
                        logs=folder.logs,
                        end_seconds=config.supervision.hang_seconds,
                        asked=request.asked,
                    ) as watch,
                    _at_work(prepared, folder, start, request, watch) as run,
                ):
                    yield run
        if run.outcome.stopped:  # here, where all ranks have left the group in good order
            raise RunStopped(describe_stop(run.result, run.outcome.stopped, prepared.plan))


@contextmanager
def _at_work(
    prepared: Prepared,
    folder: RunFolder,
    start: SavedCheckpoint | None,
    request: StopRequest,
    watch: HangWatch,
) -> Iterator[OpenRun]:
    plan, of_checkpoint = prepared.plan, prepared.plan.config.checkpoint
    with waiting("the model and DeepSpeed's engine"):
        engine = assemble_engine(prepared)
    # Ranks of a tensor group draw alike; where their layers are divided, `models.split.TensorPart`
    # sees to it.
    first = rank() - plan.layout.tensor_rank(rank())
    seed_ranks(plan.config.run.seed, rank=first, step=start.step if start else 0)
    best = BestSoFar(of_checkpoint.keep_best, best_is=of_checkpoint.best_is)
    described = prepared.description(order=order_of(start)) | engine.description()
    described |= start_point.describe_frozen(engine, plan.config)
    callbacks = make_callbacks(engine, prepared)
    places = StreamPlaces(gather)
    left_out = start_point.steps_left_out(folder, start, plan.config)
    kept = start_point.Kept(places, best, callbacks, left_out, *filter(None, [engine.bad_steps]))

    def load(chosen: SavedCheckpoint | None) -> int:
        with watch.during(LOADING), waiting(f"the load of {chosen.path if chosen else 'nothing'}"):
            return start_point.load_start(engine, chosen, kept=kept, description=described)

    start_step = load(start)
    checkpointer = make_checkpointer(
        engine, folder.checkpoints, plan=plan, description=described, further=kept.state
    )
    often = {"evaluate": plan.config.evaluation.every_minutes, "save": of_checkpoint.every_minutes}
    minutes = Minutes(often, most=plan.config.training.max_minutes, began=request.began)
    with (
        closing(checkpointer),
        agreed_stops(request, start_step=start_step, due=minutes.due) as ask,
    ):
        parts = (
            prepared,
            engine,
            folder,
            checkpointer,
            best,
            callbacks,
            start,
            places,
            Watched(watch, ask),
            minutes,
        )
        run = OpenRun(*parts, left_out, load, outcome=Outcome(step=start_step), began=request.began)
        if rank() == 0:
            run.print_start()
        yield run
        watch.enter(SAVING)
        with waiting("the last checkpoint to be on the disk"):
            checkpointer.finish(is_final=bool(run.outcome.stopped))
        from_rank0(start_point.on_rank0(folder.check_held))
    request.training_is_over()
    watch.enter("")
    engine.close()
    if rank() == 0:
        run.print_end()

"""The story of a run: from a config to `Trainer.fit()`, top to bottom. `prepare` finds everything that can be wrong
before this process waits for any other; from `process_group` on, all ranks walk the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.load import Source
from framework.config.run_config import RunConfig
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
from framework.engine.schedules import MakeSchedule
from framework.engine.stop_agreement import agreed_stops
from framework.errors import RunStopped
from framework.plan.plan import Plan
from framework.report.summary import (
    RunResult,
    describe_goodput,
    describe_stop,
    print_end,
    print_next,
    print_start,
    write_report,
)
from framework.setup import start_point
from framework.setup.assemble import (
    OpenRun,
    assemble_engine,
    count_parameters,
    make_callbacks,
    make_checkpointer,
)
from framework.setup.objects import (
    MakeOptimizer,
    ModelSource,
    Objects,
    config_with_objects,
    refuse_unknown_arguments,
)
from framework.setup.prepared import Prepared, order_of, prepare
from framework.setup.roll_back import train
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.log import noting_errors, print_line
from framework.system.stopping import StopRequest
from framework.system.waiting import waiting
from framework.train.best import BestSoFar
from framework.train.events import note_closed
from framework.train.run_folder import RunFolder
from framework.train.trainer import Minutes, Outcome


def fit(
    config: RunConfig | Mapping[str, Any],
    *further: NoReturn,  # so that type checkers refuse them as well
    model: ModelSource | None = None,
    train_data: Any = None,
    eval_data: Any = None,
    task: Any = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeSchedule | None = None,
    callbacks: Sequence[Any] = (),
    **unknown: NoReturn,
) -> RunResult:
    """Train, and return how it ended. Called on every rank.

    In the main thread, SIGTERM, SIGINT, SIGUSR1 and SIGHUP are requests to stop: all ranks save after the same step,
    and it raises `RunStopped`; SIGINT or SIGTERM more than two seconds later does what it did before. An error that a
    script does not catch ends it with one line (`framework.system.exits`).

    Args:
        config: a RunConfig, or nested dicts; the section of what is handed over may hold its other keys.
        model: an `nn.Module` or a list of layers, or a callable that builds one.
        train_data, eval_data: datasets of (inputs, target), map-style or streams, or the pair of both as `train_data`;
            for evaluation also several by name, whose metrics are ``eval/<name>/loss`` and so on.
        task: a `framework.Task` or a callable ``loss(outputs, targets)``.
        optimizer: a callable from parameters to an optimizer, for example ``functools.partial(SGD, lr=0.1)``.
        scheduler: a callable from the optimizer to a schedule like torch's, which is stepped after every step; for
            example ``functools.partial(StepLR, step_size=100)``.
        callbacks: objects with some of ``on_start``, ``on_step``, ``on_log``, ``on_evaluation``, ``on_save`` and
            ``on_end``, each called with a `framework.State` on every rank.

    Raises:
        ConfigError: the run cannot work as described; no process group was started.
        TrainingError, StorageError: it started and failed; PeerLostError: another rank is gone.
        RunStopped: it was asked to stop, and what it had reached is saved.
    """
    end_in_one_line()
    refuse_unknown_arguments(unknown, further=further)
    objects, request = Objects(model, train_data, eval_data, task, optimizer, callbacks, scheduler), StopRequest()
    with request.handling():
        with refusing_exits():
            prepared = prepare(config_with_objects(config, objects), objects=objects)
        return run_prepared(prepared, request)


def fit_loaded(plan: Plan, source: Source, request: StopRequest, *, words: Sequence[str]) -> RunResult:
    """Train what was read from a file and planned; `words`: the file and its settings, for the command proposed at the
    end.
    """
    with refusing_exits():
        prepared = prepare(plan.config, source=source, plan=plan)
    result = run_prepared(prepared, request)
    if os.environ.get("RANK", "0") == "0":
        print_next(prepared.plan, words, environment=os.environ)
    return result


def run_prepared(prepared: Prepared, request: StopRequest) -> RunResult:
    """Train what was prepared, to its end or to where the request stops it."""
    with opened(prepared, request) as run:
        run.outcome = train(run)
    return _result(run)


@contextmanager
def opened(prepared: Prepared, request: StopRequest) -> Iterator[OpenRun]:
    """A run for the time of its loop: all ranks together, its folder held, its engine where it goes on from.
    Collective, as is the end of the block, which reports what the loop has left in `outcome`.

    Raises:
        RunStopped: the outcome says that the loop was stopped.
    """
    folder = RunFolder(prepared.plan.config.run.folder)
    with noting_errors():
        with (
            explaining_failures(folder.logs, prepared.plan),
            process_group(prepared.plan.config.run.backend),
        ):
            end_in_one_line()
            refuse_different_ranks(prepared.fingerprint())
            with closing(folder):
                start = start_point.choose_together(folder, prepared.plan.config)
                prepared = start_point.agreed_weights(start_point.measure_cut(prepared, start), start)
                start_point.open_folder(folder, prepared, start)
                quiet_deepspeed(folder.logs / f"rank{rank()}.log")
                seconds = prepared.plan.config.supervision.hang_seconds
                with (
                    arithmetic_of(prepared.plan),
                    watching(logs=folder.logs, end_seconds=seconds) as watch,
                    _at_work(prepared, folder, start, request, watch) as run,
                ):
                    yield run
        if run.outcome.stopped:  # here, where all ranks have left the group in good order
            raise RunStopped(describe_stop(_result(run), run.outcome.stopped, prepared.plan))


@contextmanager
def _at_work(
    prepared: Prepared, folder: RunFolder, start: SavedCheckpoint | None, request: StopRequest, watch: HangWatch
) -> Iterator[OpenRun]:
    plan, of_checkpoint = prepared.plan, prepared.plan.config.checkpoint
    with waiting("the model and DeepSpeed's engine"):
        engine = assemble_engine(prepared)
    # Ranks of a tensor group draw alike; where their layers are divided, `models.split.TensorPart` sees to it.
    first = rank() - plan.layout.tensor_rank(rank())
    seed_ranks(plan.config.run.seed, rank=first, step=start.step if start else 0)
    best = BestSoFar(of_checkpoint.keep_best, best_is=of_checkpoint.best_is)
    described = prepared.description(order=order_of(start)) | engine.description()
    described |= start_point.describe_frozen(engine, plan.config)
    callbacks = make_callbacks(engine, prepared)
    places, left_out = StreamPlaces(gather), start_point.steps_left_out(folder, start, plan.config)
    kept = start_point.Kept(places, best, callbacks, left_out, *filter(None, [engine.bad_steps]))

    def load(chosen: SavedCheckpoint | None) -> int:
        with watch.during(LOADING), waiting(f"the load of {chosen.path if chosen else 'nothing'}"):
            return start_point.load_start(engine, chosen, kept=kept, description=described)

    start_step = load(start)
    if rank() == 0:
        stages = prepared.cut.table if prepared.cut else None
        num_params, num_trained = count_parameters(engine, stages)
        print_start(
            plan,
            folder.path,
            start_step=start_step,
            stages=stages,
            evaluates=bool(prepared.parts.splits.evaluations),
            num_params=num_params,
            num_trained=num_trained,
        )
    checkpointer = make_checkpointer(
        engine,
        folder.checkpoints,
        plan=plan,
        description=described,
        further=kept.state,
    )
    often = {"evaluate": plan.config.evaluation.every_minutes, "save": of_checkpoint.every_minutes}
    minutes = Minutes(often, most=plan.config.training.max_minutes, began=request.began)
    with closing(checkpointer), agreed_stops(request, start_step=start_step, due=minutes.due) as ask:
        stop = Watched(watch, ask)
        parts = (prepared, engine, folder, checkpointer, best, callbacks, start, places, stop, minutes)
        run = OpenRun(*parts, left_out, load, outcome=Outcome(step=start_step), began=request.began)
        yield run
        watch.enter(SAVING)
        with waiting("the last checkpoint to be on the disk"):
            checkpointer.finish(is_final=bool(run.outcome.stopped))
        from_rank0(start_point.on_rank0(folder.check_held))
    request.training_is_over()
    watch.enter("")
    engine.close()
    if rank() == 0:
        note_closed(folder.path / "events.jsonl", step=run.outcome.step)
        report = write_report(folder.path) if plan.config.monitors.report else None
        goodput = describe_goodput(folder.path)
        if not run.outcome.stopped:
            print_end(_result(run), plan, environment=os.environ, report=report, goodput=goodput)
        elif goodput:
            print_line(f"goodput {goodput}")


def _result(run: OpenRun) -> RunResult:
    return RunResult.of(run.outcome, folder=run.folder.path, start_step=run.start_step, best=run.best.found)

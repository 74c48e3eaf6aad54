"""The story of a run: from a config to `Trainer.fit()`, top to bottom.

Everything that can be wrong is looked for in `prepare`, before this process waits for any other; from `process_group`
on, all ranks walk the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NoReturn

from framework.checkpoint.checkpointer import clear_unfinished
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import CHECKPOINTS, size_of, tag_of
from framework.checkpoint.resumable import (
    check_movable,
    check_reachable,
    check_resumable,
    describe_changes,
    describe_resharding,
    describe_versions,
    needs_resharding,
)
from framework.checkpoint.resume_point import set_aside_later
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.data.token_files import keep_tokenizer
from framework.engine import environment as random_state
from framework.engine.distributed import (
    from_rank0,
    process_group,
    quiet_deepspeed,
    rank,
    refuse_different_ranks,
)
from framework.engine.environment import describe_environment
from framework.engine.failures import ExplainedData, explaining_failed_batches, explaining_known_failures
from framework.engine.layer_times import time_layers
from framework.engine.lost_peers import explaining_lost_peers
from framework.engine.plain_engine import use_matmul_precision
from framework.engine.stop_agreement import agreed_stops
from framework.errors import RunStopped
from framework.plan.plan import Plan
from framework.report.summary import RunResult, print_end, print_next, print_start
from framework.setup.assemble import assemble_engine
from framework.setup.objects import MakeOptimizer, ModelSource, Objects, config_with_objects, refuse_unknown_arguments
from framework.setup.prepared import Prepared, prepare
from framework.setup.stages import cut_as_saved, cut_by_time
from framework.setup.start_point import agreed_weights, choose_together, on_rank0
from framework.setup.wiring import (
    description,
    make_checkpointer,
    make_eval_loader,
    make_monitors,
    make_schedule,
    make_train_loader,
)
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.log import noting_errors, print_line
from framework.system.stopping import StopRequest
from framework.train.best import BestSoFar
from framework.train.monitors.base import HeldFolder, Monitor
from framework.train.monitors.console import LogLines
from framework.train.run_folder import RunFolder
from framework.train.trainer import Trainer


def fit(
    config: RunConfig | Mapping[str, Any],
    *further: NoReturn,  # so that type checkers refuse them as well
    model: ModelSource | None = None,
    train_data: Any = None,
    eval_data: Any = None,
    task: Any = None,
    optimizer: MakeOptimizer | None = None,
    **unknown: NoReturn,
) -> RunResult:
    """Train, and return how it ended. Called on every rank.

    Called in the main thread, it takes SIGTERM, SIGINT, SIGUSR1 and SIGHUP for requests to stop while it works: all
    ranks save after the same step, and it raises `RunStopped`. SIGINT or SIGTERM a second time, more than two seconds
    later, does what it did before. The handlers that were there are put back at the end.

    An error that a script does not catch ends it with one line and the error's exit code; with ``DSF_TRACEBACK=1`` in
    the environment, with a traceback (`framework.system.exits`).

    Args:
        config: a RunConfig, or the same as nested dicts; sections that are left out have defaults. The section of what
            is handed over may hold its other keys, such as ``{"data": {"num_workers": 2, "random_samples": False}}``.
        model: an `nn.Module` or a list of layers, or a callable that builds one; instead of the config's ``model``.
        train_data, eval_data: map-style datasets of (inputs, target) (a list of such samples is one), or the pair of
            both as `train_data`; instead of the config's ``data``.
        task: a `framework.Task` or a callable ``loss(outputs, targets)``; instead of the config's ``task``.
        optimizer: a callable from parameters to an optimizer, for example ``functools.partial(SGD, lr=0.1)``; instead
            of the config's ``optimizer``.

    Raises:
        ConfigError: the run cannot work as described; no process group was started.
        TrainingError, StorageError: it started and failed; of the former, PeerLostError: another rank is gone.
        RunStopped: it was asked to stop, and what it had reached is saved.
    """
    end_in_one_line()
    refuse_unknown_arguments(unknown, further=further)
    objects = Objects(model, train_data, eval_data, task, optimizer)
    request = StopRequest()
    with request.handling():
        with refusing_exits():
            prepared = prepare(config_with_objects(config, objects), objects=objects)
        return _run(prepared, request)


def fit_loaded(config: RunConfig, source: Source, request: StopRequest, *, words: Sequence[str]) -> RunResult:
    """Train what was read from a file, started from the command line; problems found later still name its lines.

    `words` are the file and the settings that were given with it, for the command that the end of the run proposes.
    """
    with refusing_exits():
        prepared = prepare(config, source=source)
    result = _run(prepared, request)
    if os.environ.get("RANK", "0") == "0":
        print_next(prepared.plan, words, environment=os.environ)
    return result


def _run(prepared: Prepared, request: StopRequest) -> RunResult:
    config = prepared.plan.config
    with noting_errors():
        folder = RunFolder(config.run.folder)
        with (
            explaining_lost_peers(),
            explaining_failed_batches(folder.logs),
            explaining_known_failures(),
            process_group(config.run.backend),
        ):
            end_in_one_line()
            refuse_different_ranks(prepared.fingerprint())
            try:
                start = choose_together(folder, config)
                prepared = agreed_weights(_measured(prepared, start), start)
                word = from_rank0(on_rank0(lambda: _open_folder(folder, prepared, start)))
                if word:
                    folder.wait_until_visible(word)
                quiet_deepspeed(folder.logs / f"rank{rank()}.log")
                use_matmul_precision(prepared.plan)
                result, stopped = _fit(prepared, folder, start, request)
            finally:
                folder.close()
        if stopped:  # here, where all ranks have left the group in good order
            raise RunStopped(_describe_stop(result, stopped, prepared.plan))
    return result


def _fit(
    prepared: Prepared, folder: RunFolder, start: SavedCheckpoint | None, request: StopRequest
) -> tuple[RunResult, str]:
    plan, config, splits = prepared.plan, prepared.plan.config, prepared.parts.splits
    engine = assemble_engine(prepared)
    # Other dropout masks on every rank, and where the states of the ranks are not resumed.
    random_state.seed_everything(random_state.seed_of(config.run.seed, rank=rank(), step=start.step if start else 0))
    agenda = make_schedule(plan, tokens_per_sample=getattr(splits.train, "tokens_per_sample", None))
    described = description(plan, splits, pipeline=prepared.pipeline())
    start_step = 0
    best = BestSoFar(config.checkpoint.keep_best, best_is=config.checkpoint.best_is)
    if start is not None:
        moved = needs_resharding(start, description=described)
        if moved and rank() == 0:
            stated = describe_resharding(start, description=described)
            print_line(f"resume: {start.path} was written in another layout ({stated}) and is moved into this one")
        state = engine.load(start, moved=moved)
        start_step = int(state["step"])
        best.restore(state)
    if rank() == 0:
        print_start(
            plan,
            folder.path,
            start_step=start_step,
            stages=prepared.cut.table if prepared.cut else None,
            evaluates=splits.evaluation is not None,
        )
    monitors: list[Monitor] = [HeldFolder(folder), best, LogLines(agenda.total_steps)]
    from_rank0(
        on_rank0(
            lambda: monitors.extend(
                make_monitors(config, folder.path, total_steps=agenda.total_steps, from_step=start_step)
            )
        )
    )
    checkpointer = make_checkpointer(
        engine, folder.checkpoints, plan=plan, last_step=agenda.total_steps, description=described, further=best.state
    )
    eval_loader = make_eval_loader(plan, splits, rank=rank())
    with closing(checkpointer), agreed_stops(request, start_step=start_step) as stop:
        trainer = Trainer(
            engine,
            agenda=agenda,
            train_data=ExplainedData(make_train_loader(plan, splits, rank=rank())),
            eval_data=ExplainedData(eval_loader) if eval_loader is not None else None,
            monitors=monitors,
            save=checkpointer.save,
            start_step=start_step,
            stop=stop,
        )
        outcome = trainer.fit()
        checkpointer.finish(is_final=bool(outcome.stopped))
        from_rank0(on_rank0(folder.check_held))
    request.training_is_over()
    engine.close()
    result = RunResult(
        folder.path,
        outcome.step,
        dict(outcome.metrics),
        outcome.samples_per_sec,
        start_step,
        outcome.tokens_per_sec,
        best.found,
    )
    if rank() == 0 and not outcome.stopped:
        print_end(result, plan, environment=os.environ)
    return result, outcome.stopped


def _describe_stop(result: RunResult, stopped: str, plan: Plan) -> str:
    if result.step == result.start_step:
        return f"{stopped}: stopped before the first step: nothing new to save [stopped]"
    saved = result.folder / CHECKPOINTS / tag_of(result.step)
    return (
        f"{stopped}: stopped after step {result.step} of {plan.length.total_steps}; {saved} is complete; go on with "
        "checkpoint.resume=auto [stopped]"
    )


def _measured(prepared: Prepared, start: SavedCheckpoint | None) -> Prepared:
    """With `parallel.partition: measured`: rank 0 times the layers on its device, and all ranks cut by that.
    Collective.

    A run that goes on is cut as it was: no two measurements are the same, and another cut would be a move.
    """
    plan, cut = prepared.plan, prepared.cut
    if cut is None or plan.config.parallel.partition != "measured" or plan.config.parallel.stages is not None:
        return prepared
    if start is not None and (as_saved := cut_as_saved(cut, plan, start.manifest)):
        if rank() == 0:
            print_line("resume: the pipeline is cut as it was measured at the first start")
        return replace(prepared, cut=as_saved)
    seconds = from_rank0(
        on_rank0(
            lambda: time_layers(cut.layers, cut.inputs, seed=plan.config.run.seed, precision=plan.config.precision)
        )
    )
    return replace(prepared, cut=cut_by_time(cut, plan, seconds))


def _open_folder(folder: RunFolder, prepared: Prepared, start: SavedCheckpoint | None) -> str:
    """See whether the run may go on from where it starts, and open its folder; nothing is written before that is
    settled.

    Returns the folder's word, for hosts that may still see another one of its name.
    """
    config, plan = prepared.plan.config, prepared.plan
    if start is not None:
        described = description(plan, prepared.parts.splits, pipeline=prepared.pipeline())
        check_movable(start, description=described)
        check_resumable(
            start,
            config=config.to_dict(),
            global_size=plan.layout.global_size,
            steps_per_epoch=plan.length.steps_per_epoch or 0,
            data=described,
        )
        check_reachable(start, total_steps=plan.length.total_steps or 0)
    continues = start is not None and start.folder.resolve() == folder.checkpoints.resolve()
    moved = folder.open(fresh=not continues)
    _report_resume(start, plan, folder)
    if continues:
        for removed in clear_unfinished(folder.checkpoints):
            print_line(f"removed {folder.checkpoints}/{removed}, which an interrupted save or deletion left")
    if moved is not None:
        print_line(f"{folder.path} held an earlier run; it is now {moved}")
    if start is not None and continues:
        for replaced in set_aside_later(start):
            print_line(
                f"the steps after {start.step} are taken again; an earlier checkpoint of them is now {replaced} "
                f"({size_of(replaced) / 1e9:.3f} GB; it stays until somebody deletes it)"
            )
    pipeline = prepared.pipeline()
    folder.describe(
        config=config.to_dict(),
        ds_config=prepared.ds_config,
        plan=plan.to_dict() | ({"pipeline": pipeline} if pipeline else {}),
        environment=describe_environment(),
    )
    if tokens := getattr(config.data, "path", None):
        keep_tokenizer(tokens, folder.path)
    return folder.word


def _report_resume(start: SavedCheckpoint | None, plan: Plan, folder: RunFolder) -> None:
    """Print the checkpoint that the run starts from, and what is not as it was there."""
    if plan.config.checkpoint.resume == "auto":
        print_line(
            f"resume: auto: {f'from {start.path}' if start else f'no checkpoint in {folder.path}, starting afresh'}"
        )
    elif start is not None:
        print_line(f"resume: from {start.path}")
    if start is not None:
        for change in describe_changes(start, config=plan.config.to_dict()):
            print_line(f"resume: changed since the save, and applied: {change}")
        if versions := describe_versions(start, versions=describe_environment()["versions"]):
            print_line(
                f"note: other releases wrote this checkpoint ({versions}); an unbroken run may differ in the last bits"
            )
        for note in _changed_schedule(start, plan):
            print_line(f"note: {note}")


def _changed_schedule(start: SavedCheckpoint, plan: Plan) -> Iterator[str]:
    """A run that is made longer stretches a schedule that ends with it: allowed, but never silently."""
    scheduler, before, now = plan.config.scheduler, start.manifest.get("total_steps"), plan.length.total_steps
    ends_with_run = "total_steps" in type(scheduler).model_fields and getattr(scheduler, "total_steps", None) is None
    if ends_with_run and before is not None and before != now:
        yield (
            f"the {scheduler.kind} schedule now ends at step {now} instead of {before}, so the learning rate goes on "
            f"from another point of its curve; scheduler.total_steps={before} keeps it"
        )

"""The functions that start a run: `fit()` from Python, `fit_loaded` from a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from framework.config.load import Source
from framework.engine import workarounds  # noqa: F401  # before all that imports DeepSpeed
from framework.engine.schedules import MakeSchedule
from framework.plan.plan import Plan
from framework.run import run_prepared
from framework.setup.prepare_run import prepare
from framework.setup.user_code import ConfigSource, MakeOptimizer, ModelSource, Objects
from framework.system.exits import end_in_one_line, refusing_exits
from framework.system.launcher_rank import take_rank
from framework.system.stopping import StopRequest

if TYPE_CHECKING:
    from framework.checkpoint.resume_point import ResumeLookup
    from framework.report.run_result import RunResult


def fit(
    config: ConfigSource,
    *further: NoReturn,  # so that type checkers refuse them as well
    model: ModelSource | None = None,
    train_data: Any = None,
    eval_data: Any = None,
    task: Any = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeSchedule | None = None,
    callbacks: Sequence[Any] = (),
    metrics: Any = None,
    **unknown: NoReturn,
) -> RunResult:
    """Train, and return how it ended. Called on every rank.

    In the main thread, SIGTERM, SIGINT, SIGUSR1 and SIGHUP are requests to stop: all ranks save
    after the same step, and it raises `RunStopped`; SIGINT or SIGTERM more than two seconds later
    does what it did before. An error that a script does not catch ends it with one line
    (`framework.system.exits`).

    Args:
        config: a RunConfig, nested dicts, or the path of a YAML or JSON file; the section of what
            is handed over may hold its other keys.
        model: an `nn.Module` or a list of layers (modules, `Layer`s, DeepSpeed's `LayerSpec`s,
            functions), or a callable that builds one, or a `PipelineModule`.
        train_data, eval_data: datasets of (inputs, target), map-style or streams, or the pair of
            both as `train_data`; for evaluation also several by name, whose metrics are
            ``eval/<name>/loss`` and so on.
        task: a `framework.Task` or a callable ``loss(outputs, targets)``.
        optimizer: a callable from parameters to an optimizer, for example ``functools.partial(SGD,
            lr=0.1)``; from (name, parameter) pairs if its argument is ``named_parameters``.
        scheduler: a callable from the optimizer to a schedule like torch's, which is stepped after
            every step; for example ``functools.partial(StepLR, step_size=100)``.
        callbacks: objects with some of ``on_start``, ``on_gradients``, ``on_step``, ``on_log``,
            ``on_evaluation``, ``on_save`` and ``on_end``, each called with a `framework.State` on
            every rank.
        metrics: of torchmetrics, over all samples of each evaluation: a Metric, a
            MetricCollection, or a dict of several by name, beside those of `evaluation.metrics`.

    Raises:
        ConfigError: the run cannot work as described; no process group was started.
        TrainingError, StorageError: it started and failed; PeerLostError: another rank is gone.
        RunStopped: it was asked to stop, and what it had reached is saved.
    """
    from framework.setup.handed_over import (
        config_with_objects,
        read_given,
        refuse_unknown_arguments,
    )

    end_in_one_line()
    refuse_unknown_arguments(unknown, further=further)
    objects = Objects(model, train_data, eval_data, task, optimizer, callbacks, scheduler, metrics)
    request = StopRequest()
    with request.handling():
        with refusing_exits():
            take_rank(os.environ)
            values, source = read_given(config)
            described = config_with_objects(values, objects, source=source)
            prepared = prepare(described, objects=objects, source=source)
        return run_prepared(prepared, request)


def fit_loaded(
    plan: Plan,
    source: Source,
    request: StopRequest,
    *,
    words: Sequence[str],
    lookup: ResumeLookup | None = None,
) -> RunResult:
    """Train a run that was read from a file and planned.

    Args:
        plan: the plan of the run.
        source: the places of its values.
        request: a request to stop this process.
        words: the file and its settings, for the commands proposed at the end.
        lookup: the search for the checkpoint to resume, if it was made before.
    """
    with refusing_exits():
        prepared = prepare(plan.config, source=source, plan=plan, lookup=lookup)
    result = run_prepared(prepared, request)
    if os.environ.get("RANK", "0") == "0":
        from framework.report.end_summary import print_next

        print_next(prepared.plan, words, environment=os.environ)
    return result

"""The components of a run: model, data, task and optimizer, named in the config or handed over.

All of them are imported here, and data and task are built, before any process group exists: their
errors are found while no other process waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from framework.config.base import Object, Target
from framework.config.data import Mixture
from framework.config.optimizer import Muon
from framework.config.run_config import RunConfig, watched_metrics
from framework.data.batches import in_pixels
from framework.data.failures import Claims, claims_nothing
from framework.data.loaders import Reading, TrainLoader, is_stream
from framework.data.order import LATEST_ORDER, Ordering, Share
from framework.data.splits import Splits, as_splits
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, Problem
from framework.models.layers import LayeredModel
from framework.models.unsupported import refuse_unsupported
from framework.plan.plan import Plan
from framework.plan.rules.model import classes_problem, vocabulary_problem
from framework.setup.user_code import (
    MakeOptimizer,
    ModelSource,
    Objects,
    call_factory,
    check_arguments,
    check_handed_over,
    load_target,
    takes,
    type_name,
)
from framework.tasks.task import Task, collects

if TYPE_CHECKING:
    from framework.data.streams import StreamLoader, StreamPlaces


@dataclass(frozen=True)
class Parts:
    """Components of a run. Callbacks are objects with some of the methods of
    `train.callbacks.EVENTS`.
    """

    build_model: Callable[[], torch.nn.Module]
    splits: Splits
    task: Task
    make_optimizer: MakeOptimizer | None = None
    callbacks: tuple[Any, ...] = ()
    make_schedule: MakeSchedule | None = None


def gather_parts(config: RunConfig, objects: Objects) -> Parts:
    """Import all components, and build data and task.

    Raises:
        ConfigError: a target does not import, does not take its arguments, or is of a wrong type.
    """
    _refuse_objects_from_files(config, objects)
    splits = objects.splits or _load_data(config.data, key="data")
    if objects.task is None:
        task = _configured_task(config)
    else:
        task = _handed_over_task(objects.task)
    task.added_metrics = None  # a task that is handed over again has the metrics of the run before
    if config.evaluation.metrics or objects.metrics is not None:
        from framework.setup.evaluation_metrics import added_metrics

        task.added_metrics = added_metrics(config, objects.metrics)
    _check_labels_and_tokens(config, splits)
    _refuse_unmeasured(config, splits, task)
    make_optimizer: MakeOptimizer | None = None
    make_schedule: MakeSchedule | None = None
    if _makes_optimizer_or_schedule(config, objects):
        from framework.setup.optimizer_makers import checked_optimizer_maker, schedule_maker

        make_optimizer = checked_optimizer_maker(config, objects.optimizer)
        make_schedule = schedule_maker(config, objects.scheduler, make_optimizer)
    if isinstance(objects.model, torch.nn.Module):
        refuse_unsupported(objects.model, config)  # before any rank waits for another
    build_model = _refusing_unsupported(model_builder(config, objects.model), config)
    callbacks: tuple[Any, ...] = ()
    if config.callbacks or objects.callbacks:
        from framework.setup.run_callbacks import checked_callbacks

        callbacks = checked_callbacks(config, objects)
    return Parts(build_model, splits, task, make_optimizer, callbacks, make_schedule)


def _refuse_unmeasured(config: RunConfig, splits: Splits, task: Task) -> None:
    """Refuse metrics that the run follows and no evaluation set gives."""
    if not any(watched_metrics(config)):
        return
    from framework.setup.watched_metrics import refuse_unmeasured

    added = task.added_metrics or ()
    refuse_unmeasured(config, splits, added=added, is_open=collects(task))


def _makes_optimizer_or_schedule(config: RunConfig, objects: Objects) -> bool:
    """Check whether code makes the optimizer or the schedule: Muon's, a target, or what was handed
    over. DeepSpeed or torch makes all others by their names.
    """
    if objects.optimizer is not None or objects.scheduler is not None:
        return True
    if isinstance(config.optimizer, Muon) or config.optimizer.own_factory() is not None:
        return True
    return config.scheduler.own_factory() is not None


def _load_data(section: Any, *, key: str) -> Splits:
    """Build the datasets of a section. A mixture has the evaluation data of its first part with
    any.
    """
    if not isinstance(section, Mixture):
        return as_splits(call_factory(section.factory(), key=key))
    from framework.data import mixtures

    weighted = []
    evaluation = None
    for number, part in enumerate(section.parts):
        splits = _load_data(part.data, key=f"{key}.parts.{number}.data")
        weighted.append((part.weight, splits.train))
        if evaluation is None:
            evaluation = splits.evaluation
    return Splits(mixtures.Mixture(weighted, shuffle=section.shuffle), evaluation)


def make_train_loader(
    plan: Plan,
    splits: Splits,
    *,
    rank: int,
    num_workers: int | None = None,
    order: int = LATEST_ORDER,
    read_at_once: int = 1,
    places: StreamPlaces | None = None,
    claims: Claims = claims_nothing,
    for_engine: bool = False,
) -> TrainLoader | StreamLoader:
    """Return this rank's loader of micro-batches.

    Args:
        plan: of the run.
        splits: its data.
        rank: the rank that reads.
        num_workers: in the place of the config's number; then no device is used.
        order: version of the order of the samples.
        read_at_once: micro-batches that a step takes before it begins; the workers have that many
            ready together.
        places: of the lanes of a stream.
        claims: decides which errors of the data this rank reports.
        for_engine: batches go to an engine, for which images may stay pixels until they are on a
            device.
    """
    data = plan.config.data
    layout = plan.layout
    if num_workers is None:
        workers = data.num_workers or splits.taken.get("num_workers", 0)
    else:
        workers = num_workers
    batches_per_worker = -(-read_at_once // max(workers, 1))  # rounded up
    share = Share(
        layout.global_size,
        layout.micro_size,
        layout.accumulation_steps,
        layout.data_parallel_rank(rank),
        layout.data_parallel_size,
    )
    reading = Reading(
        plan.config.run.seed,
        random_samples=data.has_random_samples(),
        num_workers=workers,
        prefetch_batches=data.prefetch_batches,
        pin_memory=plan.cluster.device != "cpu" and num_workers is None,
        claims=claims,
    )
    if is_stream(splits.train):  # a worker has a whole step of a stream ready
        return _stream_loader(splits.train, data, share, reading, places)
    prefetch_batches = max(data.prefetch_batches, batches_per_worker)
    ordering = Ordering(
        splits.taken.get("shuffle", data.shuffle),
        version=order,
        bucket_steps=data.bucket_steps,
        curriculum_steps=data.curriculum_steps,
    )
    dataset = splits.train
    if for_engine and reading.pin_memory:
        dataset = in_pixels(dataset)
    return TrainLoader(
        dataset,
        share=share,
        reading=replace(reading, prefetch_batches=prefetch_batches),
        ordering=ordering,
    )


def _stream_loader(
    stream: Any, data: Any, share: Share, reading: Reading, places: StreamPlaces | None
) -> StreamLoader:
    """Return the loader of a stream, with its lanes where `places` had them.

    Raises:
        ConfigError: the section `data` orders samples by length, which a stream does not show.
    """
    from framework.data.lengths import lengths_of
    from framework.data.streams import StreamLoader

    if data.bucket_steps:
        lengths_of(stream, "data.bucket_steps")
    elif data.curriculum_steps:
        lengths_of(stream, "data.curriculum_steps")
    restored = None
    if places is not None:
        restored = places.restored
    loader = StreamLoader(
        stream, share=share, reading=reading, lanes=getattr(data, "lanes", None), places=restored
    )
    if places is not None:
        places.loader = loader
    return loader


def _check_labels_and_tokens(config: RunConfig, splits: Splits) -> None:
    """Refuse data with classes or tokens that the model lacks: they would fail in a GPU kernel.

    Some datasets know them from their files alone, which may not be where the plan is made.
    """
    classes = getattr(splits.train, "classes", None)
    problems = list(vocabulary_problem(getattr(splits.train, "vocab_size", None), config.model))
    if isinstance(classes, Sized):
        problems += classes_problem(len(classes), config.model)
    if problems:
        raise ConfigError(problems)


def _configured_task(config: RunConfig) -> Task:
    task = load_task(config)
    if isinstance(task, Task):
        return task
    from framework.tasks.from_callable import as_task

    return as_task(task)


def load_task(config: RunConfig) -> Any:
    """Return the config's task, in a form that `as_task` takes.

    A task target is a loss function ``loss(outputs, targets, **args)``, or a class or function to
    call with the args. A function that fits both is a loss if there are no args.
    """
    section = config.task
    if not isinstance(section, Target):
        return call_factory(section.factory(), key="task")
    target = load_target(section.target, key="task.target")
    if isinstance(target, (Task, torch.nn.Module)) or not callable(target):
        if section.args:
            reason = f"it is an object ({type_name(target)}), which takes no args"
            raise ConfigError.of(
                "target-not-callable", reason, "leave args out", "task.target", section.target
            )
        return target
    if not _is_loss(target, section.args):
        return call_factory(section.factory(), key="task")
    check_arguments(target, section.args, key="task", positional=2)
    if section.args:
        return partial(target, **section.args)
    return target


def _is_loss(target: Any, arguments: Mapping[str, Any]) -> bool:
    """Check whether a callable is a loss function, and not one that makes a task of `arguments`."""
    if inspect.isclass(target) or not takes(target, {}, positional=2):
        return False
    return not (arguments and takes(target, arguments))


def _handed_over_task(task: Any) -> Task:
    from framework.tasks.from_callable import as_task

    if callable(task) and not isinstance(task, (Task, type)):
        fix = "hand over functools.partial(...) with what else it takes"
        check_handed_over(task, key="task", call="(outputs, targets)", num_values=2, fix=fix)
    return as_task(task, handed_over=True)


def model_builder(
    config: RunConfig, model: ModelSource | None, *, is_trained: bool = True
) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the model handed over, or else the config's model.

    Args:
        config: of the run.
        model: handed over, or None.
        is_trained: the run trains it, so that what a `PipelineModule` was given besides its layers
            is held against the config.
    """
    trained_by = config if is_trained else None
    if model is None:
        factory = config.model.factory()
        check_arguments(load_target(factory.path, key="model.target"), factory.kwargs, key="model")
        build = partial(call_factory, factory, key="model")
        if config.model.is_own_code:
            return partial(_built_by, build, trained_by)
        return lambda: as_module(build())
    if isinstance(model, (torch.nn.Module, list, tuple)):
        return partial(_built_by, lambda: model, trained_by)
    if not callable(model):
        reason = (
            "it is neither a torch.nn.Module nor a list of layers, nor a callable that builds one"
        )
        fix = "hand over a module, or a function that returns one"
        raise ConfigError.of("model-target-result", reason, fix, "model", type_name(model))
    fix = "hand over functools.partial(...) with its arguments, or the built model"
    check_handed_over(model, key="model", call="()", fix=fix)
    return partial(_built_by, model, trained_by)


def _built_by(build: Callable[[], Any], config: RunConfig | None) -> torch.nn.Module:
    """Build the user's model and return it as a module: a `PipelineModule`, or a list of layers,
    becomes a `LayeredModel`. Arguments of a `PipelineModule` are checked against `config`, if
    given.
    """
    from framework.models.layer_specs import check_arguments_of, is_pipeline, pipelines_unbuilt

    with pipelines_unbuilt():
        model = build()
    if is_pipeline(model):
        if config is not None:
            check_arguments_of(model, config)
        return _stacked(model)
    return as_module(model)


def _refusing_unsupported(
    build: Callable[[], torch.nn.Module], config: RunConfig
) -> Callable[[], torch.nn.Module]:
    def build_supported() -> torch.nn.Module:
        model = build()
        refuse_unsupported(model, config)
        return model

    return build_supported


def as_module(model: Any) -> torch.nn.Module:
    """Return a module as it is, and a list of layers as a `LayeredModel`, with a forward()."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.ModuleList):
        return model
    if not isinstance(model, (torch.nn.ModuleList, list, tuple)):
        reason = "it is neither a torch.nn.Module nor a list of layers"
        raise ConfigError.of(
            "model-target-result", reason, "return a module", "model", type_name(model)
        )
    return _stacked(model, taken_from=model)


def _stacked(model: Any, *, taken_from: Any = None) -> LayeredModel:
    """Return the layers of a list or of a `PipelineModule` as a module.

    Raises:
        ConfigError: as `as_layers`; kind ``layers-do-not-fit``.
    """
    from framework.models.layer_lists import as_layers

    layers = as_layers(model)
    try:
        return LayeredModel(layers, taken_from=taken_from)
    except ValueError as error:
        raise ConfigError.of(
            "layers-do-not-fit", str(error), "correct the list", "model"
        ) from error


def _refuse_objects_from_files(config: RunConfig, objects: Objects) -> None:
    """Refuse a resolved config that describes objects of an earlier run which are not handed over
    again.
    """
    value_by_key = {
        "model": objects.model,
        "data": objects.train_data,
        "task": objects.task,
        "optimizer": objects.optimizer,
        "scheduler": objects.scheduler,
    }
    problems = []
    for key, value in value_by_key.items():
        section = getattr(config, key)
        if value is None and isinstance(section, Object):
            reason = "it was handed over from Python and exists only there"
            argument = "train_data" if key == "data" else key
            fix = f"hand it over again with framework.fit(..., {argument}=...)"
            problems.append(
                Problem("object-not-given", reason, fix, f"{key}.object", section.object)
            )
    if problems:
        raise ConfigError(problems)

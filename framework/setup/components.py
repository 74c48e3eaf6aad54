"""The components of a run: model, data, task and optimizer, named in the config or handed over.

All of them are imported here, and data and task are built, before any process group exists: their
errors are found while no other process waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from framework.config.base import Object, Target
from framework.config.data import Mixture
from framework.config.optimizer import Muon, optimizer_lr
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
    call_failed,
    check_arguments,
    check_handed_over,
    load_target,
    takes,
    type_name,
)
from framework.system.log import warn
from framework.tasks.task import Task, collects
from framework.train.callbacks import EVENTS, EarlyStopping, ReduceOnPlateau

if TYPE_CHECKING:
    from framework.data.streams import StreamLoader, StreamPlaces

_BUILT_IN_CALLBACKS: Final = {"early_stopping": EarlyStopping, "reduce_on_plateau": ReduceOnPlateau}


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
    refuse_unmeasured(config, splits, added=task.added_metrics or (), is_open=collects(task))
    if objects.optimizer is not None:
        make_optimizer: MakeOptimizer | None = _handed_over_optimizer(objects.optimizer)
        key = "optimizer"
        value = type_name(objects.optimizer)
    else:
        make_optimizer = optimizer_maker(config)
        key = "optimizer.target"
        value = getattr(config.optimizer, "target", "")
    if make_optimizer is not None and not isinstance(config.optimizer, Muon):
        size = config.parallel.tensor
        from framework.setup.optimizer_probe import check_optimizer

        check_optimizer(make_optimizer, stage=config.zero.stage, key=key, value=value, tensor=size)
    schedule = _schedule_maker(config, objects.scheduler, make_optimizer)
    if isinstance(objects.model, torch.nn.Module):
        refuse_unsupported(objects.model, config)  # before any rank waits for another
    build_model = _refusing_unsupported(model_builder(config, objects.model), config)
    return Parts(build_model, splits, task, make_optimizer, _callbacks(config, objects), schedule)


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


def _callbacks(config: RunConfig, objects: Objects) -> tuple[Any, ...]:
    """Return the callbacks of the config, then those that were handed over."""
    named: list[tuple[str, str, Any]] = []  # key in the config, name, callback
    for number, section in enumerate(config.callbacks):
        key = f"callbacks.{number}"
        if isinstance(section, Target):
            named.append((key, section.target, call_factory(section.factory(), key=key)))
        else:
            build = _BUILT_IN_CALLBACKS[section.kind]
            named.append((key, section.kind, build(**section.model_dump(exclude={"kind"}))))
    for number, callback in enumerate(objects.callbacks):
        named.append((f"callbacks.{number}", type_name(callback), callback))
    for key, name, callback in named:
        if inspect.isclass(callback):
            raise ConfigError.of(
                "callback-without-events", "it is a class", "hand over an object of it", key, name
            )
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            fix = f"give it one of {', '.join(EVENTS)}"
            raise ConfigError.of(
                "callback-without-events", "it has no method of an event", fix, key, name
            )
        _check_events(callback, key, name)
    return tuple(callback for _, _, callback in named)


def _check_events(callback: Any, key: str, name: str) -> None:
    """Refuse methods of events that cannot be called with the state alone, and name methods that
    look like events and are none: both would show when the event comes, after hours.

    A callback is not called to try it: what it does (files, messages, states) is meant for real
    events.

    Raises:
        ConfigError: kind ``callback-event``.
    """
    for event in EVENTS:
        method = getattr(callback, event, None)
        if not callable(method):
            continue
        reason = ""
        if inspect.iscoroutinefunction(method):
            reason = f"{event} is a coroutine, and nothing awaits it"
        elif not takes(method, {}, positional=1):
            reason = f"{event} cannot be called with one argument, the state"
        if reason:
            raise ConfigError.of(
                "callback-event", reason, f"write def {event}(self, state)", key, name
            )
    for attribute in dir(type(callback)):
        if not attribute.startswith("on_") or attribute in EVENTS:
            continue
        from deepspeed_lint.text.typos import nearest

        similar = nearest(attribute, EVENTS)
        if similar:
            line = f"{key} = {name}: {attribute} is no event; is {similar} meant? [callback-event]"
            warn(line, is_of_all_ranks=True)


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


def refuse_unmeasured(
    config: RunConfig, splits: Splits, *, added: Collection[str] = (), is_open: bool = False
) -> None:
    """Refuse metrics that no evaluation set gives: they would never have a value.

    Args:
        config: of the run.
        splits: its data.
        added: names of metrics of torchmetrics. One may give several figures, which begin with its
            name.
        is_open: the task computes metrics of all samples, with names that are known after it.
    """
    areas = []
    known = []  # empty if the task's metrics have no names
    for set_name in splits.evaluations:
        area = f"eval/{set_name}/" if set_name else "eval/"
        areas.append(area)
        names = getattr(config.task, "metrics", ())
        if names and not is_open and "" not in added:
            known += [f"{area}{name}" for name in (*names, *added)]
    if not areas:
        return
    problems = []
    for key, metric in watched_metrics(config):
        many = tuple(f"{area}{name}_" for area in areas for name in added)
        is_added = metric.startswith(many)
        if metric.startswith("eval/") and not is_added and not _is_given(metric, known, areas):
            reason = "no evaluation set gives it"
            fix = f"write one of {', '.join(known or areas)}"
            problems.append(Problem("unknown-metric", reason, fix, key, metric))
    if problems:
        raise ConfigError(problems)


def refuse_not_measured(config: RunConfig, names: Collection[str]) -> None:
    """Refuse metrics that the run follows and that an evaluation has not given.

    Raises:
        ConfigError: kind ``unknown-metric``.
    """
    known = sorted(name for name in names if name.startswith("eval/"))
    problems = []
    for key, metric in watched_metrics(config):
        if metric.startswith("eval/") and metric not in names:
            reason = "the evaluation does not give it"
            fix = f"write one of {', '.join(known)}"
            problems.append(Problem("unknown-metric", reason, fix, key, metric))
    if problems:
        raise ConfigError(problems)


def _is_given(metric: str, known: Sequence[str], areas: Sequence[str]) -> bool:
    """Check whether an evaluation gives a metric.

    Args:
        metric: its name.
        known: all names; empty if the task's metrics have none: then any within the areas counts.
        areas: what names of the evaluation sets begin with.
    """
    if known:
        return metric in known
    return metric.startswith(tuple(areas))


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
    """Return the model that a function of the user's builds; a `PipelineModule` as its layers."""
    from framework.models.layer_specs import is_pipeline, pipelines_unbuilt

    with pipelines_unbuilt():
        model = build()
    if is_pipeline(model):
        if config is not None:
            _check_arguments_of(model, config)
        return _stacked(model)
    return as_module(model)


def _check_arguments_of(pipeline: Any, config: RunConfig) -> None:
    """Refuse a `PipelineModule` with a loss where the run names none, and warn of its arguments
    that the run config decides.

    Raises:
        ConfigError: kind ``pipeline-loss``.
    """
    from framework.models.layer_specs import DECIDED, arguments_of, name_of

    arguments = arguments_of(pipeline)
    if arguments is None:
        return
    loss = arguments["loss_fn"]
    if loss is not None and "task" not in config.model_fields_set:
        reason = (
            f"its PipelineModule has the loss_fn {name_of(loss)}, and the loss of a run is its "
            "task, which is not given"
        )
        fix = "name the loss: task: {target: my_module:my_loss}, or fit(..., task=my_loss)"
        raise ConfigError.of("pipeline-loss", reason, fix, "task")
    others = []
    for name, key in DECIDED.items():
        ours = attrgetter(key)(config)
        if (arguments[name] or 0) != ours:
            others.append(f"{name}={arguments[name]} ({key} is {ours})")
    if others:
        warn(
            f"model: of its PipelineModule the layers are taken, and not {', '.join(others)} "
            "[pipeline-settings-left-out]",
            is_of_all_ranks=True,
        )


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


def optimizer_maker(config: RunConfig) -> MakeOptimizer | None:
    """Return the function that makes Muon or the optimizer of a target, or None for other built-in
    kinds. Raises ConfigError if the target cannot be called.
    """
    section = config.optimizer
    if isinstance(section, Muon):
        from framework.engine.parameter_groups import MuonWithAdamW

        has_shares = config.zero.stage > 0 or config.parallel.tensor > 1
        return partial(MuonWithAdamW, section=section, has_shares=has_shares)
    factory = section.own_factory()
    if factory is None:
        return None
    make = load_target(factory.path, key="optimizer.target")
    check_arguments(make, factory.kwargs, key="optimizer", positional=1)

    def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters, **factory.kwargs)
        except (Exception, SystemExit) as error:
            raise call_failed(error, factory.path, key="optimizer") from error
        return _checked_optimizer(optimizer, key="optimizer.target", value=factory.path)

    return _with_names_if_wanted(make, make_optimizer)


def _handed_over_optimizer(make: Any) -> MakeOptimizer:
    """Return a function that makes an optimizer with `make` and checks it. Raises ConfigError if
    `make` cannot be called with parameters alone.
    """
    fix = (
        "hand over a function from parameters to an optimizer, such as "
        "functools.partial(torch.optim.SGD, lr=0.1)"
    )
    if not callable(make):
        if isinstance(make, torch.optim.Optimizer):
            reason = "it is built already, over parameters that are yet to move to their device"
        else:
            reason = "it cannot be called"
        if len(getattr(make, "param_groups", ())) > 1:
            fix += (
                "; groups by name go into the config: optimizer: {kind: adamw, groups: "
                "[{match: '.*bias', weight_decay: 0}]}, or are made by a function whose argument "
                "is called named_parameters"
            )
        raise ConfigError.of("optimizer-target-result", reason, fix, "optimizer", type_name(make))
    check_handed_over(make, key="optimizer", call="(parameters)", num_values=1, fix=fix)

    def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        return _checked_optimizer(make(parameters), key="optimizer", value=type_name(make))

    return _with_names_if_wanted(make, make_optimizer)


def _with_names_if_wanted(function: Any, make: MakeOptimizer) -> MakeOptimizer:
    """Return `make`, which calls the user's function, or `NamedMaker` of it if the first argument
    of the function is called ``named_parameters``.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # some builtins have none
        return make
    if names[:1] != ["named_parameters"]:
        return make
    from framework.engine.optimizer_weights import NamedMaker

    return NamedMaker(make)


def _checked_optimizer(optimizer: Any, *, key: str, value: str) -> torch.optim.Optimizer:
    """Return the optimizer, made savable. Raises ConfigError if it is none, or needs a closure."""
    if isinstance(optimizer, torch.optim.Optimizer):
        from framework.setup.user_optimizer import refuse_closure, savable

        refuse_closure(optimizer, key=key, value=value)
        return savable(optimizer, key=key, value=value)
    reason = f"it returned {type_name(optimizer)}, not a torch.optim.Optimizer"
    fix = "return an optimizer over the given parameters"
    raise ConfigError.of("optimizer-target-result", reason, fix, key, value)


def _schedule_maker(
    config: RunConfig, handed_over: MakeSchedule | None, make_optimizer: MakeOptimizer | None
) -> MakeSchedule | None:
    """Return the user's own schedule, tried over an optimizer of one weight, or None if the config
    names a built-in one.
    """
    section = config.scheduler
    make = handed_over
    key = "scheduler"
    path = type_name(handed_over)
    factory = section.own_factory()
    if factory is not None:
        target = load_target(factory.path, key="scheduler.target")
        check_arguments(target, factory.kwargs, key="scheduler", positional=1)
        make = partial(target, **factory.kwargs)
        key = "scheduler.target"
        path = factory.path
    if make is None:
        return None
    from framework.setup.user_optimizer import check_schedule

    weights = [torch.nn.Parameter(torch.zeros(1))]
    lr = optimizer_lr(config.optimizer) or 1.0
    if make_optimizer is not None:
        optimizer = make_optimizer(weights)
    elif hasattr(config.optimizer, "betas"):
        optimizer = torch.optim.AdamW(weights, lr=lr)
    else:
        optimizer = torch.optim.SGD(weights, lr=lr)
    check_schedule(make, optimizer, key=key, value=path)
    return make


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

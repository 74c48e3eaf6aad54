"""The four things a run is made of beside its numbers: model, data, task, optimizer; named in the
config or handed over.

All of them are imported here, and data and task are built, before any process group exists: what is
wrong with them is found while nothing else waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

from framework.config.base import Object, Target
from framework.config.data import Mixture
from framework.config.optimizer import Muon, optimizer_lr
from framework.config.run_config import RunConfig
from framework.config.training import EarlyStopping as WatchSection
from framework.data import mixtures
from framework.data.lengths import lengths_of
from framework.data.loaders import TrainLoader, is_stream
from framework.data.order import LATEST_ORDER, Share
from framework.data.splits import Splits, as_splits
from framework.data.streams import StreamLoader, StreamPlaces
from framework.engine.parameter_groups import MuonWithAdamW
from framework.engine.schedules import MakeSchedule
from framework.errors import ConfigError, Problem
from framework.models.layers import Layer, LayeredModel, as_layers
from framework.models.unsupported import refuse_unsupported
from framework.plan.plan import Plan
from framework.plan.rules.model import vocabulary_problem
from framework.setup.optimizer_probe import check_optimizer
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
from framework.setup.user_optimizer import check_schedule, refuse_closure, savable
from framework.tasks.task import Task, as_task
from framework.train.callbacks import EVENTS, EarlyStopping, ReduceOnPlateau

_IN_THE_BOX: Final = {"early_stopping": EarlyStopping, "reduce_on_plateau": ReduceOnPlateau}


@dataclass(frozen=True)
class Parts:
    """Parts that a run is made of; callbacks are objects with some of the methods of
    `train.callbacks.EVENTS`.
    """

    build_model: Callable[[], torch.nn.Module]
    splits: Splits
    task: Task
    make_optimizer: MakeOptimizer | None = None
    callbacks: tuple[Any, ...] = ()
    make_schedule: MakeSchedule | None = None


def gather_parts(config: RunConfig, objects: Objects) -> Parts:
    """Import all four, build data and task.

    Raises:
        ConfigError: something named does not import, does not take its arguments, or is not what it
            should be.
    """
    _refuse_objects_from_files(config, objects)
    splits = objects.splits or _load_data(config.data, key="data")
    if objects.task is None:
        task = as_task(load_task(config))
    else:
        task = _given_task(objects.task)
    _check_labels_and_tokens(config, splits)
    refuse_unmeasured(config, splits)
    if objects.optimizer is not None:
        make_optimizer: MakeOptimizer | None = _given_optimizer(objects.optimizer)
        key = "optimizer"
        value = type_name(objects.optimizer)
    else:
        make_optimizer = optimizer_maker(config)
        key = "optimizer.target"
        value = getattr(config.optimizer, "target", "")
    if make_optimizer is not None and not isinstance(config.optimizer, Muon):
        size = config.parallel.tensor
        check_optimizer(make_optimizer, stage=config.zero.stage, key=key, value=value, tensor=size)
    schedule = _schedule_maker(config, objects.scheduler, make_optimizer)
    if isinstance(objects.model, torch.nn.Module):
        refuse_unsupported(objects.model, config)  # before any rank waits for another
    build_model = _refusing_unsupported(model_builder(config, objects.model), config)
    return Parts(build_model, splits, task, make_optimizer, _callbacks(config, objects), schedule)


def _load_data(section: Any, *, key: str) -> Splits:
    if not isinstance(section, Mixture):
        return as_splits(call_factory(section.factory(), key=key))
    found = [
        _load_data(part.data, key=f"{key}.parts.{number}.data")
        for number, part in enumerate(section.parts)
    ]
    weighted = [
        (part.weight, splits.train) for part, splits in zip(section.parts, found, strict=True)
    ]
    evaluation = next(
        (splits.evaluation for splits in found if splits.evaluation is not None), None
    )
    return Splits(mixtures.Mixture(weighted, shuffle=section.shuffle), evaluation)


def _callbacks(config: RunConfig, objects: Objects) -> tuple[Any, ...]:
    """Those of the config, then those that were handed over."""
    found = []
    for number, section in enumerate(config.callbacks):
        key = f"callbacks.{number}"
        if isinstance(section, Target):
            found.append((key, section.target, call_factory(section.factory(), key=key)))
        else:
            found.append(
                (
                    key,
                    section.kind,
                    _IN_THE_BOX[section.kind](**section.model_dump(exclude={"kind"})),
                )
            )
    found += [
        (f"callbacks.{number}", type_name(one), one) for number, one in enumerate(objects.callbacks)
    ]
    for key, value, one in found:
        if inspect.isclass(one):
            raise ConfigError.of(
                "callback-without-events", "it is a class", "hand over an object of it", key, value
            )
        if not any(callable(getattr(one, event, None)) for event in EVENTS):
            fix = f"give it one of {', '.join(EVENTS)}"
            raise ConfigError.of(
                "callback-without-events", "it has no method of an event", fix, key, value
            )
    return tuple(one for _, _, one in found)


def make_train_loader(
    plan: Plan,
    splits: Splits,
    *,
    rank: int,
    num_workers: int | None = None,
    order: int = LATEST_ORDER,
    read_at_once: int = 1,
    places: StreamPlaces | None = None,
) -> TrainLoader | StreamLoader:
    """This rank's stream of micro-batches. With `num_workers`, other than the config's, no device
    is touched.

    `read_at_once`: micro-batches that a step takes before it begins; the workers have that many
    ready together. `places`: of the lanes of a stream.
    """
    data = plan.config.data
    layout = plan.layout
    if num_workers is None:
        workers = data.num_workers or splits.taken.get("num_workers", 0)
    else:
        workers = num_workers
    share = Share(
        layout.global_size,
        layout.micro_size,
        layout.accumulation_steps,
        layout.data_parallel_rank(rank),
        layout.data_parallel_size,
    )
    options: dict[str, Any] = {
        "seed": plan.config.run.seed,
        "num_workers": workers,
        "prefetch_batches": data.prefetch_batches,
        "pin_memory": plan.cluster.device != "cpu" and num_workers is None,
        "random_samples": data.has_random_samples(),
    }
    by_length: dict[str, Any] = {
        "bucket_steps": data.bucket_steps,
        "curriculum_steps": data.curriculum_steps,
    }
    if is_stream(splits.train):  # of which a worker has a whole step ready
        if any(by_length.values()):
            lengths_of(
                splits.train, "data.bucket_steps" if data.bucket_steps else "data.curriculum_steps"
            )
        found = None if places is None else places.restored
        loader = StreamLoader(
            splits.train, share=share, lanes=getattr(data, "lanes", None), places=found, **options
        )
        if places is not None:
            places.loader = loader
        return loader
    shuffle = splits.taken.get("shuffle", data.shuffle)
    options["prefetch_batches"] = max(data.prefetch_batches, -(-read_at_once // max(workers, 1)))
    return TrainLoader(
        splits.train, **asdict(share), shuffle=shuffle, order_version=order, **by_length, **options
    )


def _check_labels_and_tokens(config: RunConfig, splits: Splits) -> None:
    """Of what some datasets only know from their files: a class that the model lacks would fail in
    a GPU kernel.
    """
    found = getattr(splits.train, "classes", None)
    expected = getattr(config.model, "num_classes", None)
    if isinstance(found, Sized) and expected is not None and len(found) > expected:
        reason = f"the training data has {len(found)} classes"
        key = "model.num_classes"
        raise ConfigError.of(
            "model-data-num-classes", reason, f"set {key}: {len(found)}", key, expected
        )
    problems = tuple(vocabulary_problem(getattr(splits.train, "vocab_size", None), config.model))
    if problems:
        raise ConfigError(problems)


def refuse_unmeasured(config: RunConfig, splits: Splits) -> None:
    """Refuse metrics that no evaluation set gives: nothing would follow them."""
    areas = [f"eval/{name}/" if name else "eval/" for name in splits.evaluations]
    known = [f"{area}{name}" for area in areas for name in getattr(config.task, "metrics", ())]
    asked = {"checkpoint.keep_best": config.checkpoint.keep_best}
    watches = (
        (number, one)
        for number, one in enumerate(config.callbacks)
        if isinstance(one, WatchSection)
    )
    asked |= {f"callbacks.{number}.metric": one.metric for number, one in watches}
    problems = [
        Problem(
            "unknown-metric",
            "no evaluation set gives it",
            f"write one of {', '.join(known or areas)}",
            key,
            metric,
        )
        for key, metric in asked.items()
        if metric and areas and metric.startswith("eval/")
        if (metric not in known if known else not metric.startswith(tuple(areas)))
    ]
    if problems:
        raise ConfigError(problems)


def load_task(config: RunConfig) -> Any:
    """Load what `as_task` takes: a task target is a loss function ``loss(outputs, targets,
    **args)``, or a class or function to call with the args. A function that would do as either is a
    loss where there are no args.
    """
    section = config.task
    if not isinstance(section, Target):
        return call_factory(section.factory(), key="task")
    found = load_target(section.target, key="task.target")
    if isinstance(found, (Task, torch.nn.Module)) or not callable(found):
        if section.args:
            reason = f"it is an object ({type_name(found)}), which takes no args"
            raise ConfigError.of(
                "target-not-callable", reason, "leave args out", "task.target", section.target
            )
        return found
    may_be_loss = not inspect.isclass(found) and takes(found, {}, positional=2)
    if may_be_loss and not (section.args and takes(found, section.args)):
        check_arguments(found, section.args, key="task", positional=2)
        if section.args:
            return partial(found, **section.args)
        return found
    return call_factory(section.factory(), key="task")


def _given_task(task: Any) -> Task:
    if callable(task) and not isinstance(task, (Task, type)):
        fix = "hand over functools.partial(...) with what else it takes"
        check_handed_over(task, key="task", call="(outputs, targets)", num_values=2, fix=fix)
    return as_task(task, handed_over=True)


def model_builder(config: RunConfig, model: ModelSource | None) -> Callable[[], torch.nn.Module]:
    """Return what builds the model that was handed over, or the one that the config names."""
    if model is None:
        factory = config.model.factory()
        check_arguments(load_target(factory.path, key="model.target"), factory.kwargs, key="model")
        return lambda: as_module(call_factory(factory, key="model"))
    if isinstance(model, (torch.nn.Module, list, tuple)):
        return lambda: as_module(model)
    if not callable(model):
        reason = (
            "it is neither a torch.nn.Module nor a list of layers, nor a callable that builds one"
        )
        fix = "hand over a module, or a function that returns one"
        raise ConfigError.of("model-target-result", reason, fix, "model", type_name(model))
    fix = "hand over functools.partial(...) with its arguments, or the built model"
    check_handed_over(model, key="model", call="()", fix=fix)
    return lambda: as_module(model())


def _refusing_unsupported(
    build: Callable[[], torch.nn.Module], config: RunConfig
) -> Callable[[], torch.nn.Module]:
    def build_supported() -> torch.nn.Module:
        model = build()
        refuse_unsupported(model, config)
        return model

    return build_supported


def as_module(model: Any) -> torch.nn.Module:
    """A list of layers has no forward() of its own; as a `LayeredModel` it has."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.ModuleList):
        return model
    if not isinstance(model, (torch.nn.ModuleList, list, tuple)):
        reason = "it is neither a torch.nn.Module nor a list of layers"
        raise ConfigError.of(
            "model-target-result", reason, "return a module", "model", type_name(model)
        )
    layers = list(model)
    if layers and all(isinstance(layer, Layer) for layer in layers):
        try:
            return LayeredModel(layers)
        except ValueError as error:
            raise ConfigError.of(
                "layers-do-not-fit", str(error), "mend the list", "model"
            ) from error
    return LayeredModel(as_layers(model), taken_from=model)


def optimizer_maker(config: RunConfig) -> MakeOptimizer | None:
    section = config.optimizer
    if isinstance(section, Muon):
        return partial(MuonWithAdamW, section=section)
    if not isinstance(section, Target):
        return None
    make = load_target(section.target, key="optimizer.target")
    check_arguments(make, section.args, key="optimizer", positional=1)

    def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters, **section.args)
        except (Exception, SystemExit) as error:
            raise call_failed(error, section.target, key="optimizer") from error
        return _checked_optimizer(optimizer, key="optimizer.target", value=section.target)

    return make_optimizer


def _given_optimizer(make: Any) -> MakeOptimizer:
    fix = (
        "hand over a function from parameters to an optimizer, such as "
        "functools.partial(torch.optim.SGD, lr=0.1)"
    )
    if not callable(make):
        built = "it is built already, over parameters that are yet to move to their device"
        if isinstance(make, torch.optim.Optimizer):
            reason = built
        else:
            reason = "it cannot be called"
        if len(getattr(make, "param_groups", ())) > 1:
            fix += (
                "; groups by name go into the config: optimizer: {kind: adamw, groups: "
                "[{match: '.*bias', "
            )
            fix += "weight_decay: 0}]}"
        raise ConfigError.of("optimizer-target-result", reason, fix, "optimizer", type_name(make))
    check_handed_over(make, key="optimizer", call="(parameters)", num_values=1, fix=fix)
    return lambda parameters: _checked_optimizer(
        make(parameters), key="optimizer", value=type_name(make)
    )


def _checked_optimizer(optimizer: Any, *, key: str, value: str) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        refuse_closure(optimizer, key=key, value=value)
        return savable(optimizer, key=key, value=value)
    reason = f"it returned {type_name(optimizer)}, not a torch.optim.Optimizer"
    fix = "return an optimizer over the given parameters"
    raise ConfigError.of("optimizer-target-result", reason, fix, key, value)


def _schedule_maker(
    config: RunConfig, given: MakeSchedule | None, make_optimizer: MakeOptimizer | None
) -> MakeSchedule | None:
    """The schedule of the user's own, tried over an optimizer of one weight; None where the config
    names another.
    """
    section = config.scheduler
    make = given
    if isinstance(section, Target):
        found = load_target(section.target, key="scheduler.target")
        check_arguments(found, section.args, key="scheduler", positional=1)
        make = partial(found, **section.args)
    if make is None:
        return None
    if given is not None:
        key = "scheduler"
        path = type_name(given)
    else:
        key = "scheduler.target"
        path = section.target  # type: ignore[union-attr]
    weights = [torch.nn.Parameter(torch.zeros(1))]
    lr = optimizer_lr(config.optimizer) or 1.0
    plain = partial(
        torch.optim.AdamW if hasattr(config.optimizer, "betas") else torch.optim.SGD, lr=lr
    )
    check_schedule(make, (make_optimizer or plain)(weights), key=key, value=path)
    return make


def _refuse_objects_from_files(config: RunConfig, objects: Objects) -> None:
    """A resolved config says which objects a run was given; it cannot bring them back."""
    given = {
        "model": objects.model,
        "data": objects.train_data,
        "task": objects.task,
        "optimizer": objects.optimizer,
    }
    given["scheduler"] = objects.scheduler
    problems = [
        Problem(
            "object-not-given",
            "it was handed over from Python and exists only there",
            "hand it over again with framework.fit(..., "
            f"{'train_data' if key == 'data' else key}=...)",
            f"{key}.object",
            getattr(config, key).object,
        )
        for key, given_object in given.items()
        if given_object is None and isinstance(getattr(config, key), Object)
    ]
    if problems:
        raise ConfigError(problems)

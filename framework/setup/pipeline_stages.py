"""A model cut into pipeline stages, before any process waits for another: its layers, what they
weigh, where they are cut.

Also started by itself (``python -m framework.setup.pipeline_stages``) by the command `plan`, which does not
import torch: see `framework.commands.stage_balance`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch

from framework.config.base import ModelKind
from framework.config.groups import is_matrix, refuse_unmatched_groups
from framework.config.load import config_from_values
from framework.errors import ConfigError, FrameworkError, Problem
from framework.models.freezing import frozen_names
from framework.models.layers import (
    Layer,
    LayeredModel,
    as_layers,
    lists_layers,
    own_train,
    recipes_only,
    refuse_bad_ties,
)
from framework.models.survey import Surveyed, refuse_untrue_layers, survey
from framework.plan.balance import LayerFacts, StageTable, cut, needs_same_groups, with_seconds
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.setup.components import Parts, gather_parts, make_train_loader
from framework.setup.user_code import Objects, summary
from framework.tasks.task import Task

# Of what is found while the parts are gathered: not that this machine lacks something, but that the
# run cannot work.
_WRONG_ANYWHERE: Final = frozenset(
    {
        "model-data-num-classes",
        "model-data-vocab-size",
        "text-damaged",
        "text-one-document",
        "text-too-short",
        "text-without-special-tokens",
    }
)


@dataclass(frozen=True)
class CutModel:
    """A model as layers, and the stages that run them.

    Attributes:
        layers: recipes, or built modules.
        table: what the layers weigh and where they are cut.
        inputs: the model's inputs of one micro-batch, on the CPU.
        surveyed: what each layer passes on.
        frozen: names of the weights that are not trained.
        set_mode: the model's own `train()`, which sets modes of its layers; None where its class
            overrides none.
    """

    layers: tuple[Layer, ...]
    table: StageTable
    inputs: Any
    surveyed: tuple[Surveyed, ...]
    frozen: frozenset[str]
    set_mode: Callable[[bool], object] | None = None


def cut_model(plan: Plan, parts: Parts) -> CutModel:
    """Take the model apart, weigh its layers on one micro-batch and decide where it is cut.

    Raises:
        ConfigError: it cannot be cut, a layer fails, or what crosses a cut cannot be sent.
    """
    config, seed = plan.config, plan.config.run.seed
    torch.manual_seed(seed)  # as the plain engine does before it builds the model
    with recipes_only():
        model = parts.build_model()
        layers = tuple(as_layers(model))
    try:
        refuse_bad_ties(layers)
    except ValueError as error:
        raise ConfigError.of("layers-do-not-fit", str(error), "mend the list", "model") from error
    if type(parts.task).forward is not Task.forward:
        reason = (
            "its own forward() would not be called in a pipeline, whose stages call their "
            "layers themselves"
        )
        fix = "move it into the model's layers, or set parallel.pipe: 1"
        raise ConfigError.of(
            "task-forward-with-pipeline", reason, fix, "task", type(parts.task).__name__
        )
    inputs, _ = first_batch(plan, parts)
    if not _is_tensors(inputs):
        handed = f"the task hands a {type(inputs).__name__} to the model"
        reason = f"{handed}, and a pipeline's first stage takes a tensor or a tuple of tensors"
        fix = "let split(batch) return such inputs, or set parallel.pipe: 1"
        raise ConfigError.of(
            "inputs-unsendable", reason, fix, "parallel.pipe", config.parallel.pipe
        )
    in_half = config.precision.dtype in ("bf16", "fp16")
    look = partial(survey, layers, inputs, seed=seed, float_bytes=2 if in_half else 4)
    surveyed = tuple(look())
    shapes = {
        f"{layer.place}.{name}": shape for layer in surveyed for name, shape in layer.params.items()
    }
    frozen = frozenset(frozen_names(shapes, config.training.freeze))
    trained = {name: shape for name, shape in shapes.items() if name not in frozen}
    refuse_unmatched_groups(trained, config.optimizer)
    if frozen:  # once more, now that the names are known: no gradient flows through what is frozen
        surveyed = tuple(look(frozen=frozen))
    # those of our own are tested
    if lists_layers(model) and not isinstance(config.model, ModelKind):
        refuse_untrue_layers(model, inputs, seed=seed)
    return CutModel(
        layers,
        _cut(_facts(surveyed), surveyed, plan),
        inputs,
        surveyed,
        frozen,
        _mode_setter(model),
    )


def _mode_setter(model: torch.nn.Module) -> Callable[[bool], object] | None:
    """Return the `train()` of the model that was taken apart.

    Raises:
        ConfigError: kind ``layers-do-not-fit``: it has one, and is no more than recipes of its
            layers here.
    """
    if isinstance(model, LayeredModel) and type(model).train is LayeredModel.train:
        return model.taken_from_train
    own = own_train(model)
    if own is not None and not any(True for _ in model.children()):
        reason = (
            "its own train() would not be called in a pipeline, whose stages build their "
            "layers themselves"
        )
        fix = "override train() in the modules of its layers, or set parallel.pipe: 1"
        raise ConfigError.of("layers-do-not-fit", reason, fix, "model", type(model).__name__)
    return own


def check_recomputed(plan: Plan, parts: Parts) -> None:
    """With `training.recompute_every` a module that tells its layers is run by them on one device
    too.

    Not at ZeRO stage 3, where the whole model may not fit one process's memory.

    Raises:
        ConfigError: the layers give another output than its forward().
    """
    config = plan.config
    if (
        not config.training.recompute_every
        or config.zero.stage == 3
        or isinstance(config.model, ModelKind)
    ):
        return
    torch.manual_seed(config.run.seed)
    model = parts.build_model()
    if not lists_layers(model):
        return
    inputs, _ = first_batch(plan, parts)
    if _is_tensors(inputs):
        refuse_untrue_layers(model, inputs, seed=config.run.seed)


def cut_by_time(model: CutModel, plan: Plan, seconds: Sequence[float]) -> CutModel:
    """The same model, cut by what its layers were measured to take.

    Raises:
        ConfigError: what crosses the new cut cannot be sent.
    """
    return replace(
        model, table=_cut(with_seconds(model.table.layers, seconds), model.surveyed, plan)
    )


def cut_as_saved(model: CutModel, plan: Plan, manifest: Mapping[str, Any]) -> CutModel | None:
    """The same model, cut as a checkpoint says that its run was by measurement; None where it had
    other layers or stages.
    """
    saved = manifest.get("pipeline") or {}
    parallel = plan.config.parallel
    bounds = saved.get("bounds")
    layers = [layer.name for layer in model.table.layers]
    was_measured = manifest["config"].get("parallel", {}).get("partition") == parallel.partition
    if not was_measured or saved.get("layers") != layers or not isinstance(bounds, list):
        return None
    is_whole = all(type(bound) is int for bound in bounds) and [0, len(layers)] == [
        *bounds[:1],
        *bounds[-1:],
    ]
    if not is_whole or len(bounds) != parallel.pipe + 1:
        return None
    stages = [
        number for number, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)
    ]
    config = plan.config.model_copy(
        update={"parallel": parallel.model_copy(update={"stages": stages})}
    )
    return replace(
        model, table=_cut(model.table.layers, model.surveyed, replace(plan, config=config))
    )


def _cut(facts: Sequence[LayerFacts], surveyed: Sequence[Surveyed], plan: Plan) -> StageTable:
    config = plan.config
    table = cut(facts, config.parallel, same_groups=needs_same_groups(config))
    if isinstance(table, Problem):
        raise ConfigError(table)
    problems = [
        Problem(
            "layer-output-unsendable",
            f"a stage ends with layer {last.layer.name} ({last.kind}), and {last.cannot_send}",
            "change the layer, or name other stages in parallel.stages",
            "parallel.pipe",
            config.parallel.pipe,
        )
        for last in (surveyed[stop - 1] for stop in table.bounds[1:-1])
        if last.cannot_send
    ]
    if problems:
        raise ConfigError(problems)
    _refuse_shared_weights(table, surveyed)
    return table


def _facts(surveyed: Sequence[Surveyed]) -> list[LayerFacts]:
    """Collect the figures that the balance is computed from; weights that are not trained count as
    nothing in it.
    """
    return [
        LayerFacts(
            layer.layer.name,
            layer.kind,
            sum(shape.numel() for shape in layer.params.values()),
            layer.param_bytes,
            layer.output_bytes,
            flops=layer.flops,
            tied=layer.layer.tied,
            may_start_stage=layer.layer.may_start_stage,
            groups=frozenset(
                "matrices" if is_matrix(shape) else "biases and norms"
                for shape in layer.params.values()
            ),
        )
        for layer in surveyed
    ]


def _refuse_shared_weights(table: StageTable, surveyed: Sequence[Surveyed]) -> None:
    """One weight in two layers that nobody tied: each stage would train a copy, and they would
    drift apart.
    """
    holders: dict[int, tuple[int, str]] = {}
    for stage, (start, stop) in enumerate(pairwise(table.bounds)):
        for surveyed_layer in surveyed[start:stop]:
            layer = surveyed_layer.layer
            if not layer.is_built or layer.tied:
                continue
            weights = dict(layer.build().named_parameters())
            for name in surveyed_layer.params:
                other_stage, other = holders.setdefault(id(weights[name]), (stage, layer.name))
                if other_stage != stage:
                    reason = (
                        f"it is a weight of {other} on stage {other_stage} as well as of "
                        f"{layer.name} on stage "
                    )
                    reason += f"{stage}, and the copies would drift apart"
                    fix = (
                        "put both on one stage in parallel.stages, or build a LayeredModel with "
                        "tied layers"
                    )
                    raise ConfigError.of(
                        "weight-on-two-stages", reason, fix, "model", f"{layer.name}.{name}"
                    )


def first_batch(plan: Plan, parts: Parts) -> tuple[Any, Any]:
    """The model's inputs and the targets of the run's first micro-batch; a ConfigError where it
    cannot be read.
    """
    batches = make_train_loader(plan, parts.splits, rank=0, num_workers=0).stream(0)
    try:
        return parts.task.split(next(batches))
    except FrameworkError:
        raise
    except Exception as error:
        reason = f"the first micro-batch cannot be read: {summary(error)}"
        fix = "mend the dataset, its collate_fn, or the task's split(batch)"
        raise ConfigError.of("first-batch-failed", reason, fix, "data") from error
    finally:
        batches.close()


def _is_tensors(inputs: Any) -> bool:
    return all(
        isinstance(tensor, torch.Tensor)
        for tensor in (inputs if isinstance(inputs, tuple) else (inputs,))
    )


def describe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Where a model would be cut, for the command `plan`.

    Args:
        asked: ``config`` and ``cluster`` as plain values.

    Returns:
        ``lines`` and ``pipeline`` of the table; or ``missing``, what this machine lacks to know it;
        or ``problems``, why it cannot be cut. Problems as plain values.
    """
    config = config_from_values(asked["config"])
    cluster = Cluster(**asked["cluster"])
    try:
        parts = gather_parts(config, Objects())
    except ConfigError as error:
        if any(problem.kind in _WRONG_ANYWHERE for problem in error.problems):
            reported = "problems"
        else:
            reported = "missing"
        return {reported: [problem.to_dict() for problem in error.problems]}
    try:
        table = cut_model(
            make_plan(config, cluster, num_train_samples=parts.splits.num_train), parts
        ).table
    except ConfigError as error:
        return {"problems": [problem.to_dict() for problem in error.problems]}
    return {"lines": list(table.lines()), "pipeline": table.to_dict()}


def answer(find: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """Read a question from stdin and write the answer to stdout, both JSON; what user code prints
    goes to stderr.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.redirect_stdout(sys.stderr):
            reported = find(json.load(sys.stdin))
        json.dump(reported, output)
    return 0


if __name__ == "__main__":
    sys.exit(answer(describe))

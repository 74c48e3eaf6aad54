"""Cuts a model into pipeline stages, before any process waits for another: its layers, their
weights, and the places of the cuts.

The command `plan`, which does not import torch, also starts this module as a process of its own
(``python -m framework.setup.pipeline_stages``): see `framework.commands.stage_balance`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from framework.config.groups import is_matrix, refuse_unmatched_groups
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.config.training import LoRA
from framework.errors import ConfigError, FrameworkError, Problem
from framework.models.freezing import frozen_names
from framework.models.layer_lists import as_layers, lists_layers
from framework.models.layers import (
    AroundLayers,
    Layer,
    LayeredModel,
    own_train,
    recipes_only,
    refuse_bad_ties,
)
from framework.models.survey import Surveyed, meta_module, refuse_untrue_layers, survey
from framework.plan.balance import LayerFacts, StageTable, cut, needs_same_groups, with_seconds
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.setup.components import Parts, gather_parts, make_train_loader
from framework.setup.user_code import Objects
from framework.setup.user_code_errors import summary
from framework.system.json_lines import decode, encode
from framework.tasks.model_loss import ModelLoss
from framework.tasks.task import Task

if TYPE_CHECKING:
    from framework.engine.tensor_plans import KnownPlan

# Problems with the parts that no machine can solve: the run cannot work. All others may mean that
# this machine lacks a file or a package.
_WRONG_ANYWHERE: Final = frozenset(
    {
        "model-data-num-classes",
        "model-data-vocab-size",
        "target-args",
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
        table: costs of the layers, and the places of the cuts.
        inputs: the model's inputs of one micro-batch, on the CPU.
        surveyed: weights and outputs of each layer.
        frozen: names of the weights that are not trained.
        around: what the model does beside running its layers.
        tensor_plan: how the ranks of a tensor group divide its weights; None without such groups.
    """

    layers: tuple[Layer, ...]
    table: StageTable
    inputs: Any
    surveyed: tuple[Surveyed, ...]
    frozen: frozenset[str]
    around: AroundLayers
    tensor_plan: KnownPlan | None = None


def cut_model(plan: Plan, parts: Parts) -> CutModel:
    """Take the model apart, survey its layers on one micro-batch and decide where it is cut.

    Raises:
        ConfigError: it cannot be cut, a layer fails, or a value at a cut cannot be sent.
    """
    config = plan.config
    torch.manual_seed(config.run.seed)  # as the plain engine does before it builds the model
    with recipes_only():
        model = parts.build_model()
    given = first_batch(plan, parts)[0]
    if config.parallel.expert > 1 and config.model.is_own_code:
        from framework.engine.packed_experts import refuse_without_packed

        refuse_without_packed(model, config.parallel.expert)
    layers, around = _taken_apart(model, given, plan, parts.task)
    try:
        refuse_bad_ties(layers)
    except ValueError as error:
        raise ConfigError.of(
            "layers-do-not-fit", str(error), "correct the list", "model"
        ) from error
    _refuse_own_forward(parts.task)
    inputs = around.order(given)
    _refuse_other_inputs(inputs, config.parallel.pipe)
    surveyed, frozen = _survey_layers(config, layers, inputs, leave=around.leave)
    # the layers of our own models are tested
    if lists_layers(model) and config.model.is_own_code:
        refuse_untrue_layers(model, inputs, seed=config.run.seed)
    if config.training.mlp_tile:
        _refuse_without_perceptrons(model, layers, config)
    if config.training.lora is not None:
        surveyed = _with_adapters(surveyed, layers, config.training.lora, seed=config.run.seed)
    table = _cut(_facts(surveyed), surveyed, plan)
    tensor_plan: KnownPlan | None = None
    if config.parallel.tensor > 1:
        from framework.engine.tensor_plans import known_plan

        size = config.parallel.tensor
        entries = config.parallel.tensor_plan
        tensor_plan = known_plan(model, entries, size=size, layers=layers)
    return CutModel(layers, table, inputs, surveyed, frozen, around, tensor_plan)


def _refuse_without_perceptrons(model: Any, layers: Sequence[Layer], config: RunConfig) -> None:
    """Refuse `training.mlp_tile` where no layer has a perceptron that can be computed in tiles.

    Raises:
        ConfigError: kind ``mlp-not-tiled``.
    """
    from framework.models.tiled_perceptron import has_perceptrons, no_perceptrons

    seed = config.run.seed
    modules = (meta_module(layer, number, seed) for number, layer in enumerate(layers))
    if not any(has_perceptrons(module) for module in modules):
        raise no_perceptrons(model, config.training.mlp_tile)


def _with_adapters(
    surveyed: Sequence[Surveyed], layers: Sequence[Layer], lora: LoRA, *, seed: int
) -> tuple[Surveyed, ...]:
    """Return the surveyed layers with what is trained of them: adapters, and `modules_to_save`.

    Raises:
        ConfigError: as `add_adapters`.
    """
    from framework.setup.adapted_stages import trained_shapes_of_layers

    shapes = trained_shapes_of_layers(layers, lora, seed=seed)
    return tuple(replace(each, params=shapes[each.layer.name]) for each in surveyed)


def _layers_of_transformers(
    model: Any, given: Any, plan: Plan, task: Task
) -> tuple[tuple[Layer, ...], AroundLayers]:
    """Return the layers of a model of transformers, and what it does around them."""
    from framework.models.transformers_layers import TransformersLayers

    if getattr(plan.config.data, "packing", False):
        from framework.setup.packed_rows import keep_texts_apart_in_layers

        keep_texts_apart_in_layers(model, task, plan)
    if plan.config.parallel.sequence > 1:
        from framework.models.sequence import share_attention

        share_attention(model)
    taken = TransformersLayers(model, given)
    taken.refuse_other_logits(taken.in_order(given))
    around = taken.around()
    if not isinstance(task, ModelLoss):
        around = replace(around, judge=None)
    return tuple(taken.layers()), around


def _taken_apart(
    model: Any, given: Any, plan: Plan, task: Task
) -> tuple[tuple[Layer, ...], AroundLayers]:
    """Return the layers of a model, and what it does around them; `given` are the inputs of one
    micro-batch.

    Raises:
        ConfigError: it cannot be cut, or not with this task or these rows.
    """
    has_own_loss = isinstance(task, ModelLoss)
    is_packed = getattr(plan.config.data, "packing", False)
    if hasattr(model, "set_attn_implementation") and not lists_layers(model):  # of transformers
        return _layers_of_transformers(model, given, plan, task)
    layers = tuple(as_layers(model))
    stages = plan.config.parallel.pipe
    if plan.config.parallel.sequence > 1 and plan.config.model.is_own_code:
        parallel = plan.config.parallel
        raise ConfigError.of(
            "sequence-with-pipeline",
            f"stages of a pipeline (parallel.pipe {parallel.pipe}) share sequences of gpt, bert "
            "and models of transformers alone: a model's own layers do not share their sequences",
            "set one of the two to 1",
            "parallel.sequence",
            parallel.sequence,
        )
    if has_own_loss:
        reason = f"stages of a pipeline (parallel.pipe {stages}) have no model that sees the labels"
        fix = "name a task that computes the loss from outputs and targets"
        raise ConfigError.of("model-loss-divided", reason, fix, "task.kind", "model_loss")
    around = _around(model)
    if is_packed and getattr(type(model), "enter_stage", None) in (None, LayeredModel.enter_stage):
        reason = (
            f"stages of a pipeline (parallel.pipe {stages}) do not keep the conversations of a row "
            f"apart in a {type(model).__name__}"
        )
        fix = "set data.packing: false"
        raise ConfigError.of("packing-not-separated", reason, fix, "data.packing", True)
    return layers, around


def _refuse_own_forward(task: Task) -> None:
    if type(task).forward is Task.forward:
        return
    reason = (
        "its own forward() would not be called in a pipeline, whose stages call their "
        "layers themselves"
    )
    fix = "move it into the model's layers, or set parallel.pipe: 1"
    raise ConfigError.of("task-forward-with-pipeline", reason, fix, "task", type(task).__name__)


def _survey_layers(
    config: RunConfig,
    layers: Sequence[Layer],
    inputs: Any,
    *,
    leave: Callable[[Any], Any] | None,
) -> tuple[tuple[Surveyed, ...], frozenset[str]]:
    """Return the surveyed layers, and the names of the frozen weights."""
    in_half = config.precision.dtype in ("bf16", "fp16")
    survey_layers = partial(
        survey,
        layers,
        inputs,
        seed=config.run.seed,
        float_bytes=2 if in_half else 4,
        leave=leave,
    )
    surveyed = tuple(survey_layers())
    shapes = {}
    for layer in surveyed:
        for name, shape in layer.params.items():
            shapes[f"{layer.place}.{name}"] = shape
    frozen = frozenset(frozen_names(shapes, config.training.freeze))
    trained = {name: shape for name, shape in shapes.items() if name not in frozen}
    refuse_unmatched_groups(trained, config.optimizer)
    if frozen:  # once more, now that the names are known: frozen weights pass no gradient on
        surveyed = tuple(survey_layers(frozen=frozen))
    return surveyed, frozen


def _around(model: torch.nn.Module) -> AroundLayers:
    """Return what a model does beside running its layers.

    Raises:
        ConfigError: kind ``layers-do-not-fit``: its own `train()` would not be called.
    """
    set_mode = _mode_setter(model)
    if isinstance(model, LayeredModel):
        return AroundLayers(set_mode, model.enter_stage, model.leave_stage)
    return AroundLayers(set_mode)


def _mode_setter(model: torch.nn.Module) -> Callable[[bool], object] | None:
    """Return the `train()` of the model that was taken apart, or None if its class overrides none.

    Raises:
        ConfigError: kind ``layers-do-not-fit``: its class overrides `train()`, and here the model
            holds only recipes of its layers.
    """
    if isinstance(model, LayeredModel) and type(model).train is LayeredModel.train:
        return model.taken_from_train
    train = own_train(model)
    if train is not None and not any(True for _ in model.children()):
        reason = (
            "its own train() would not be called in a pipeline, whose stages build their "
            "layers themselves"
        )
        fix = "override train() in the modules of its layers, or set parallel.pipe: 1"
        raise ConfigError.of("layers-do-not-fit", reason, fix, "model", type(model).__name__)
    return train


def check_recomputed(plan: Plan, parts: Parts) -> None:
    """Compare a model that lists its layers with them, if `training.recompute_every` runs them.

    Skipped at ZeRO stage 3, where the whole model may not fit one process's memory.

    Raises:
        ConfigError: the layers give another output than the model's forward().
    """
    config = plan.config
    if not config.training.recompute_every or config.zero.stage == 3:
        return
    if not config.model.is_own_code:
        return
    torch.manual_seed(config.run.seed)
    model = parts.build_model()
    if not lists_layers(model):
        return
    inputs, _ = first_batch(plan, parts)
    if _is_tensors(inputs):
        refuse_untrue_layers(model, inputs, seed=config.run.seed)


def let_go_of_others(layers: Sequence[Layer], own: torch.nn.Module) -> None:
    """Free the numbers of layers that were built whole and are in none of this rank's stage, `own`:
    other ranks train them.
    """
    kept = {id(weight) for weight in own.parameters()}
    for layer in layers:
        if not layer.is_built:
            continue
        for weight in layer.build().parameters():
            if id(weight) not in kept:
                weight.data = weight.data.new_empty(0)


def cut_by_time(model: CutModel, plan: Plan, seconds: Sequence[float]) -> CutModel:
    """Return the same model, cut by the measured time of each layer.

    Raises:
        ConfigError: a value at a new cut cannot be sent.
    """
    layers = with_seconds(model.table.layers, seconds)
    return replace(model, table=_cut(layers, model.surveyed, plan))


def cut_as_saved(model: CutModel, plan: Plan, manifest: Mapping[str, Any]) -> CutModel | None:
    """Return the same model with the measured cuts of a checkpoint's run, or None if that run had
    other layers or stages.
    """
    saved = manifest.get("pipeline") or {}
    parallel = plan.config.parallel
    layers = [layer.name for layer in model.table.layers]
    was_measured = manifest["config"].get("parallel", {}).get("partition") == parallel.partition
    if not was_measured or saved.get("layers") != layers:
        return None
    bounds = _checked_bounds(saved.get("bounds"), num_layers=len(layers), num_stages=parallel.pipe)
    if bounds is None:
        return None
    stages: list[int] = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        stages.extend(number for _ in range(start, stop))
    new_parallel = parallel.model_copy(update={"stages": stages})
    config = plan.config.model_copy(update={"parallel": new_parallel})
    table = _cut(model.table.layers, model.surveyed, replace(plan, config=config))
    return replace(model, table=table)


def _checked_bounds(value: Any, *, num_layers: int, num_stages: int) -> list[int] | None:
    """Return the bounds of stages in a manifest, or None if they do not fit layers and stages."""
    if not isinstance(value, list) or len(value) != num_stages + 1:
        return None
    bounds = [bound for bound in value if type(bound) is int]
    if len(bounds) != len(value) or bounds[0] != 0 or bounds[-1] != num_layers:
        return None
    return bounds


def _cut(facts: Sequence[LayerFacts], surveyed: Sequence[Surveyed], plan: Plan) -> StageTable:
    """Divide the layers into stages. Raises ConfigError if they cannot be divided so, a value at a
    cut cannot be sent, or two stages would share a weight that is not tied.
    """
    config = plan.config
    table = cut(facts, config.parallel, same_groups=needs_same_groups(config))
    if isinstance(table, Problem):
        raise ConfigError(table)
    problems = []
    for stop in table.bounds[1:-1]:
        last = surveyed[stop - 1]
        if last.cannot_send:
            reason = (
                f"a stage ends with layer {last.layer.name} ({last.kind}), and {last.cannot_send}"
            )
            fix = "change the layer, or name other stages in parallel.stages"
            problems.append(
                Problem(
                    "layer-output-unsendable", reason, fix, "parallel.pipe", config.parallel.pipe
                )
            )
    if problems:
        raise ConfigError(problems)
    _refuse_shared_weights(table, surveyed)
    return table


def _facts(surveyed: Sequence[Surveyed]) -> list[LayerFacts]:
    """Return the figures that balance the stages; weights that are not trained count as nothing."""
    facts = []
    for layer in surveyed:
        num_params = 0
        groups = set()
        for shape in layer.params.values():
            num_params += shape.numel()
            groups.add("matrices" if is_matrix(shape) else "biases and norms")
        facts.append(
            LayerFacts(
                layer.layer.name,
                layer.kind,
                num_params,
                layer.param_bytes,
                layer.output_bytes,
                flops=layer.flops,
                tied=layer.layer.tied,
                may_start_stage=layer.layer.may_start_stage,
                groups=frozenset(groups),
            )
        )
    return facts


def _refuse_shared_weights(table: StageTable, surveyed: Sequence[Surveyed]) -> None:
    """Refuse a weight in layers of two stages that are not tied: each stage would train a copy, and
    the copies would drift apart.
    """
    holders: dict[int, tuple[int, str]] = {}
    for stage, (start, stop) in enumerate(pairwise(table.bounds)):
        for surveyed_layer in surveyed[start:stop]:
            layer = surveyed_layer.layer
            for name, weight in _untied_weights(surveyed_layer):
                other_stage, other = holders.setdefault(id(weight), (stage, layer.name))
                if other_stage != stage:
                    reason = (
                        f"it is a weight of {other} on stage {other_stage} as well as of "
                        f"{layer.name} on stage {stage}, and the copies would drift apart"
                    )
                    fix = (
                        "put both on one stage in parallel.stages, or build a LayeredModel with "
                        "tied layers"
                    )
                    raise ConfigError.of(
                        "weight-on-two-stages", reason, fix, "model", f"{layer.name}.{name}"
                    )


def _refuse_other_inputs(inputs: Any, stages: int) -> None:
    """Refuse inputs that a first stage does not take."""
    if _is_tensors(inputs):
        return
    reason = (
        f"the task hands a {type(inputs).__name__} to the model, and a pipeline's first stage "
        "takes a tensor or a tuple of tensors"
    )
    fix = "let split(batch) return such inputs, or set parallel.pipe: 1"
    raise ConfigError.of("inputs-unsendable", reason, fix, "parallel.pipe", stages)


def _untied_weights(surveyed_layer: Surveyed) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the weights to train of a built layer that is not tied, by name; all of them if its
    adapters are trained, which each stage would have for itself.
    """
    layer = surveyed_layer.layer
    if not layer.is_built or layer.tied:
        return
    weights = dict(layer.build().named_parameters())
    names = [name for name in surveyed_layer.params if name in weights]
    if surveyed_layer.params and not names:
        names = list(weights)
    for name in names:
        yield name, weights[name]


def first_batch(plan: Plan, parts: Parts) -> tuple[Any, Any]:
    """Return the model's inputs and the targets of the run's first micro-batch.

    Raises ConfigError if it cannot be read.
    """
    batches = make_train_loader(plan, parts.splits, rank=0, num_workers=0).stream(0)
    try:
        return parts.task.split(next(batches))
    except FrameworkError:
        raise
    except Exception as error:
        reason = f"the first micro-batch cannot be read: {summary(error)}"
        fix = "correct the dataset, its collate_fn, or the task's split(batch)"
        raise ConfigError.of("first-batch-failed", reason, fix, "data") from error
    finally:
        batches.close()


def _is_tensors(inputs: Any) -> bool:
    if isinstance(inputs, tuple):
        return all(isinstance(item, torch.Tensor) for item in inputs)
    return isinstance(inputs, torch.Tensor)


def is_wrong_anywhere(error: ConfigError) -> bool:
    """Return whether the parts of a run are wrong on every machine, rather than missing here."""
    return any(problem.kind in _WRONG_ANYWHERE for problem in error.problems)


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the places where a model would be cut, for the command `plan`.

    Args:
        question: ``config`` and ``cluster`` as plain values.

    Returns:
        ``lines`` and ``pipeline`` of the table; or ``missing``, files and packages that this
        machine lacks; or ``problems``, why the model cannot be cut. Problems as plain values.
    """
    config = config_from_values(question["config"])
    cluster = Cluster(**question["cluster"])
    try:
        parts = gather_parts(config, Objects())
    except ConfigError as error:
        key = "problems" if is_wrong_anywhere(error) else "missing"
        return {key: [problem.to_dict() for problem in error.problems]}
    try:
        plan = make_plan(config, cluster, num_train_samples=parts.splits.num_train)
        table = cut_model(plan, parts).table
    except ConfigError as error:
        return {"problems": [problem.to_dict() for problem in error.problems]}
    return {"lines": list(table.lines()), "pipeline": table.to_dict()}


def answer(find: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """Read a question from stdin and write the answer to stdout, both JSON. Output of user code
    goes to stderr.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.redirect_stdout(sys.stderr):
            values = find(decode(sys.stdin.buffer.read()))
        output.write(encode(values))
    return 0


if __name__ == "__main__":
    sys.exit(answer(describe))

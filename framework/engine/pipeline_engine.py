"""`PipelineEngine`: DeepSpeed's pipeline engine behind `engine_protocol.Engine`.

The layers of a model become the layers of DeepSpeed's `PipelineModule`, cut where the plan cuts
them. Every rank builds the layers of its own stage only, each under its own seed, so that the first
weights do not depend on where the model is cut.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)

from framework.checkpoint.state.shard_map import plain_name
from framework.checkpoint.state.weight_names import Names, names_of
from framework.engine.base_engine import BaseEngine
from framework.engine.distributed import claims_error_report, device, gather, rank
from framework.engine.initialize import MakeOptimizer, initialize
from framework.engine.metrics import Evaluation
from framework.engine.schedules import MakeSchedule
from framework.engine.step import Step
from framework.engine.step_batches import StepLoss
from framework.engine.workarounds.grad_scaler import explaining_overflow, scale_fp16_loss
from framework.engine.workarounds.module_buffers import share_buffers
from framework.errors import ConfigError, FrameworkError, TrainingError
from framework.models.added_losses import AddsLosses, collected_routings, routing_metrics
from framework.models.layers import AroundLayers, Layer, first_of_ties, recompute
from framework.plan.balance import Bounds
from framework.plan.plan import Plan
from framework.tasks.loss_checks import refuse_without_graph
from framework.tasks.task import Task

# Batches per stage that are evaluated in one go: enough to fill the pipeline, few enough to hold in
# memory.
_EVAL_CHUNK = 4

Adapt = Callable[[torch.nn.Module, str, PipelineParallelGrid], torch.nn.Module]
"""Changes a layer's module after it was built: (module, name of the layer, DeepSpeed's process
groups of data-parallel ranks, stages and tensor parts).
"""


class StagesModule(PipelineModule):  # type: ignore[misc]
    """A PipelineModule that is cut at given bounds, each layer built under its own seed."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        bounds: Bounds,
        seed: int,
        adapt: Adapt,
        around: AroundLayers,
        loss_fn: Callable[..., torch.Tensor],
        dynamic_shape: bool,
        keeps_products: bool,
        tensor_size: int = 1,
        leaves_out_frozen: bool = False,
    ) -> None:
        self._bounds = list(bounds)
        self._seed = seed
        self._adapt = adapt
        self._layers = tuple(layers)
        self.around = around
        self.holds_modes = False
        self._leaves_out_frozen = leaves_out_frozen
        num_stages = len(bounds) - 1
        topology = None
        if tensor_size > 1:  # the order of ranks is that of `plan.layout.Layout`
            num_ranks = torch.distributed.get_world_size()
            num_replicas = num_ranks // (num_stages * tensor_size)
            topology = PipeModelDataParallelTopology(num_stages, tensor_size, num_replicas)
        super().__init__(
            layers=self._specs(layers),
            num_stages=num_stages,
            topology=topology,
            # DeepSpeed's own function would make batch norms count every batch twice.
            activation_checkpoint_func=partial(
                recompute, modules=self.modules, keeps_products=keeps_products
            ),
            loss_fn=loss_fn,
            dynamic_shape=dynamic_shape,
        )

    def _specs(self, layers: Sequence[Layer]) -> list[LayerSpec]:
        """Return the specs from which DeepSpeed builds this stage. Layers that share weights are
        all built as the first one of them.
        """
        firsts: dict[str, partial[torch.nn.Module]] = {}
        specs: list[LayerSpec] = []
        for number, layer in enumerate(layers):
            spec = LayerSpec(torch.nn.Module)
            make = partial(self._make, layer, number)
            if layer.tied:
                weights = list(layer.tied_weights)
                is_first = layer.tied not in firsts
                make = firsts.setdefault(layer.tied, make)
                # DeepSpeed saves the weights of layers without a `forward_fn`: of the first.
                call = None if is_first else layer.call
                spec = TiedLayerSpec(
                    layer.tied, torch.nn.Module, forward_fn=call, tied_weight_attr=weights
                )
            spec.build = make
            specs.append(spec)
        return specs

    def _make(self, layer: Layer, number: int) -> torch.nn.Module:
        """Build a layer. DeepSpeed calls this when the process groups exist."""
        module = layer.make(number, seed=self._seed)
        return self._adapt(module, layer.name, self._grid)

    def train(self, mode: bool = True) -> StagesModule:
        """Set the mode, by the `train()` of each layer and of the model that was taken apart.

        DeepSpeed does so before every step (pipe/engine.py, `train_batch`), where modes are the
        run's own to set.
        """
        if self.holds_modes:
            return self
        super().train(mode)
        if self.around.set_mode is not None:
            self.around.set_mode(mode)
        return self

    def forward(self, forward_input: Any) -> Any:
        """Stand in for DeepSpeed's, which applies the `call` of tied layers alone: run the stage,
        and make its output contiguous for the next one; a transposed view is not.
        """
        around = self.around
        value = forward_input
        if around.enter is not None:
            value = around.enter(value)
        count = len(self.forward_funcs)
        every = self.activation_checkpoint_interval
        for number, start in enumerate(range(0, count, every or count)):
            stop = min(start + (every or count), count)
            if every and self.is_checkpointable_results[number]:
                value = self.activation_checkpoint_func(self._run, value, start, stop)
            else:
                value = self._run(value, start, stop)
        if around.leave is not None:
            value = around.leave(value)
        return _contiguous(value)

    def _run(self, value: Any, start: int, stop: int) -> Any:
        """Run the layers of this stage from `start` up to, but without, `stop`."""
        first = self._local_start
        own_layers = self._layers[first + start : first + stop]
        for layer, function in zip(own_layers, self.forward_funcs[start:stop], strict=True):
            if layer.tied:
                value = layer.apply(self.tied_modules[layer.tied], value)
            else:
                value = layer.apply(function, value)
        return value

    def load_state_dir(self, load_dir: Any, checkpoint_engine: Any, strict: bool = True) -> None:
        """Load the layers of this stage; under adapters their files have no frozen weights."""
        strict = strict and not self._leaves_out_frozen
        super().load_state_dir(load_dir, checkpoint_engine, strict=strict)

    def plain_names(self) -> Names:
        """Return the plain module's names of the weights and buffers of this stage."""
        return names_of(self, self.plain_name)

    def plain_name(self, name: str) -> str:
        """Return the plain module's name of a weight, given its name in this module."""
        first = first_of_ties(self._layers)
        return plain_name(name, layers=[layer.name for layer in self._layers], tied_keys=first)

    def _partition_layers(self, method: str = "") -> None:
        """Stand in for DeepSpeed's: cut at the given bounds, not by `method`."""
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if type(value) is tuple:
        return tuple(map(_contiguous, value))
    return value


def build_pipeline(
    plan: Plan,
    *,
    ds_config: Mapping[str, Any],
    layers: Sequence[Layer],
    bounds: Bounds,
    around: AroundLayers,
    task: Task,
    make_optimizer: MakeOptimizer | None = None,
    make_schedule: MakeSchedule | None = None,
    adapt: Adapt = lambda module, name, grid: module,
    built: Callable[[], object] = lambda: None,
    varying_shapes: bool = False,
) -> PipelineEngine:
    """Build this rank's stage and wrap it with `deepspeed.initialize`. Collective.

    Args:
        plan: the plan of the run.
        ds_config: DeepSpeed's JSON.
        layers: all layers of the model.
        bounds: first layers of the stages, and the number of layers.
        around: what the model does beside running its layers; its `set_mode` is called with every
            change between training and evaluation, after the layers' own `train()`.
        task: computes the loss in the last stage.
        make_optimizer: makes the user's optimizer; None if the JSON names one.
        make_schedule: makes the user's schedule.
        adapt: changes each layer after it was built.
        built: called when all ranks have built their layers; it may be collective.
        varying_shapes: whether batches may differ in more than their number of samples; the stages
            then send each other the shape of everything they send.
    """
    loss = _LastStageLoss(task, around)
    # DeepSpeed prints its layers; the plan's table has more
    with contextlib.redirect_stdout(io.StringIO()):
        module = StagesModule(
            layers,
            bounds=bounds,
            seed=plan.config.run.seed,
            adapt=adapt,
            around=around,
            loss_fn=loss,
            dynamic_shape=varying_shapes,
            keeps_products=plan.config.training.keeps_products,
            tensor_size=plan.layout.tensor_size,
            leaves_out_frozen=plan.config.training.lora is not None,
        )
    built()
    engine = initialize(
        plan,
        module,
        ds_config=ds_config,
        make_optimizer=make_optimizer,
        make_schedule=make_schedule,
        names=module.plain_names(),
        layers=[layer.name for layer in layers],
    )
    _send_whole_tensors(engine)
    if engine.is_last_stage():  # where the loss is
        scale_fp16_loss(engine)
        loss.of_step = StepLoss(
            task,
            micro_batches=engine.gradient_accumulation_steps(),
            group=engine.grid.get_data_parallel_group(),
        )
    pipeline = PipelineEngine(engine, plan, task, loss=loss)
    num_norms = 0  # a stage whose groups have one norm together
    if pipeline.has_norm_for_each_group:
        num_norms = len(engine.optimizer.bit16_groups)
    _refuse_other_groups(num_norms, plan)  # on every stage: some may have one norm and others not
    return pipeline


def _send_whole_tensors(engine: deepspeed.PipelineEngine) -> None:
    """Have stages send each other whole tensors, each received in memory of its own."""
    # Each tensor rank sends its own whole copy of an activation. DeepSpeed would send parts of it,
    # and join them by the shape of the first micro-batch.
    engine.is_pipe_partitioned = False
    engine.is_grad_partitioned = False
    # DeepSpeed hands out one buffer for several purposes by its number of elements alone: where a
    # middle stage receives other types than it sends (integers before floats, or bf16 and fp32
    # under autocast), numbers would be misread.
    engine._allocate_or_extend_buffers = lambda number, shape, dtype: torch.empty(
        tuple(shape), dtype=dtype, device=engine.device
    )


def _attach_losses(engine: deepspeed.PipelineEngine) -> tuple[int, int]:
    """Let the losses that layers add enter the backward pass where the layers are, as the last
    stage alone has the loss of the step. Collective.

    Returns:
        The numbers of such layers in this stage and in all stages.
    """

    def weight() -> float:
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
        return scale / float(engine.gradient_accumulation_steps())

    layers = [module for module in engine.module.modules() if isinstance(module, AddsLosses)]
    for layer in layers:
        layer.weight = weight
    pipelines = torch.distributed.get_world_size() // engine.num_stages
    return len(layers), sum(gather(len(layers))) // pipelines


def _refuse_other_groups(num_norms: int, plan: Plan) -> None:
    """Refuse stages with different numbers of norms, of which this one adds up `num_norms`, one for
    each parameter group: a stage would wait for the norm of a group that another one does not have.
    Collective.

    Raises:
        ConfigError: kind ``stage-with-one-group``.
    """
    nums = gather(num_norms)
    if len(set(nums)) == 1:
        return
    reason = (
        f"the stages have from {min(nums)} to {max(nums)} groups of weights that are stepped "
        "differently, and DeepSpeed, which steps them on the host, adds up a norm for each group "
        "over all stages"
    )
    fix = "leave zero.offload_optimizer out, or choose parallel.stages so that each has blocks"
    if plan.layout.expert_size > 1:
        reason = (
            f"the stages have from {min(nums)} to {max(nums)} groups of weights, of which experts "
            "that ranks share have their own, and DeepSpeed adds up a norm for each group over all "
            "stages"
        )
        fix = "set model.moe.every or parallel.stages so that each has experts"
    kind = getattr(plan.config.optimizer, "kind", None)
    raise ConfigError.of("stage-with-one-group", reason, fix, "optimizer.kind", kind)


@dataclass(frozen=True)
class _HiddenTargets:
    """Targets, hidden from DeepSpeed: it would turn lists into tuples, and refuses objects without
    tensors.
    """

    targets: Any


def _take_each(take: Callable[[], tuple[Any, Any]], count: int) -> Iterator[tuple[Any, Any]]:
    return (take() for _ in range(count))


def _hiding_targets(halves: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, _HiddenTargets]]:
    return map(_hide_targets, halves)


def _hide_targets(halves: tuple[Any, Any]) -> tuple[Any, _HiddenTargets]:
    inputs, targets = halves
    return inputs, _HiddenTargets(targets)


class _LastStageLoss:
    """Loss of the last stage: the task's loss of the model's outputs, or in evaluation its
    metrics.
    """

    def __init__(self, task: Task, around: AroundLayers) -> None:
        self._task = task
        self._judge = around.judge
        self.of_step: StepLoss | None = None  # on ranks of the last stage
        self.evaluation: Evaluation | None = None
        self.counts: Iterator[bool] = iter(())  # whether the batches of an evaluation count

    def __call__(self, outputs: Any, hidden: _HiddenTargets) -> torch.Tensor:
        """Return the loss of a micro-batch, 0-d; in an evaluation add its metrics to that, and
        return 0.
        """
        if self._judge is not None:
            outputs = self._judge(outputs, hidden.targets)
        if self.evaluation is None:
            assert self.of_step is not None
            loss = self.of_step(outputs, hidden.targets)
            refuse_without_graph(loss, outputs)
            return loss
        self.evaluation.add(outputs, hidden.targets, counts=next(self.counts))
        return torch.zeros((), device=device())


class PipelineEngine(BaseEngine):
    """One stage of a pipeline."""

    def __init__(
        self, engine: deepspeed.PipelineEngine, plan: Plan, task: Task, *, loss: _LastStageLoss
    ) -> None:
        super().__init__(
            engine,
            plan,
            task,
            names=engine.module.plain_names,
            stages=engine.mpu.get_pipe_parallel_group(),
        )
        self._loss = loss
        self._shapes: Any = None
        self._sharing: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._batches.positions is not None:
            from framework.engine.rank_groups import sequence_group

            self._sharing = sequence_group(plan.layout, self._batches.positions).shared
        self._mixtures = _attach_losses(engine)
        if plan.layout.tensor_size > 1:
            from framework.engine.tensor_check import GradientCheck

            self.tensor_check = GradientCheck(
                engine,
                engine.module.plain_names(),
                group=engine.grid.get_slice_parallel_group(),
                every=plan.config.training.log_every,
                is_own_plan=plan.config.parallel.tensor_plan is None,
            )
        if self.bad_steps is not None and engine.is_last_stage():
            # The watch takes the mean over all ranks, of which those of one stage have a loss:
            # the sum over micro-batches.
            factor = engine.num_stages / engine.gradient_accumulation_steps()
            self.bad_steps.loss = lambda: engine.total_loss.detach() * factor

    def train_step(self, micro_batches: Iterator[Any]) -> Step:
        """Run one 1F1B pass over the step's micro-batches. The first stage takes inputs, the last
        one targets.
        """
        self.trained_weights.refuse_changed_flags()
        self.phases.begin()
        lr = self.lr()
        if self.tensor_check is not None:
            self.tensor_check.begin(self.engine.global_steps + 1)
        with explaining_overflow(self.engine), self._explaining(), self._sharing():
            take = partial(self._next_halves, micro_batches)
            if self._loss.of_step is not None:
                halves = self._loss.of_step.weighted(take)
            else:
                halves = _take_each(take, self.engine.gradient_accumulation_steps())
            self.engine.module.holds_modes = True
            try:
                with collected_routings() as routings:
                    loss = self.engine.train_batch(_hiding_targets(halves))
            finally:
                self.engine.module.holds_modes = False
        # DeepSpeed has averaged it over micro-batches and pipelines, and sent it to every stage.
        loss = loss.detach().clone()
        if self.tensor_check is not None:
            self.tensor_check.end()
        self.phases.end()
        reported = [(routing.balance, routing.dropped) for routing in routings]
        further = partial(self._routing_metrics, reported)
        return Step(self, lambda: loss, lr, self.may_be_skipped(), further)

    def _routing_metrics(self, reported: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Return what this stage's mixtures report, so that the mean over all ranks is that over
        all mixtures.
        """
        metrics = routing_metrics(reported)
        own, total = self._mixtures
        share = own * self.engine.num_stages / max(total, 1)
        return {name: value * share for name, value in metrics.items()}

    def name_module(self, name: str) -> str:
        first = name.removeprefix("tied_modules.").partition(".")[0]
        if first not in ("", "tied_modules"):  # a layer, or a module in it
            name = self.engine.module.plain_name(f"{name}.")
        return name.removesuffix(".")

    def name_weight(self, name: str) -> str:
        return str(self.engine.module.plain_name(name))

    def evaluate(
        self,
        batches: Iterable[tuple[Any, bool]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Mapping[str, float]:
        share_buffers(self.engine)
        evaluation = self._begin_evaluation(batches)
        self._loss.evaluation = evaluation
        is_at_end = self.engine.is_first_stage() or self.engine.is_last_stage()
        if isinstance(batches, Sized) and not is_at_end:
            # a stage between others needs their number only
            batches = [(None, True) for _ in range(len(batches))]
        try:
            with (
                self.modes.evaluating(),
                self._explaining(),
                self._averaged(),
                self._sharing(),
            ):
                for chunk in _with_last_alone(batches, size=_EVAL_CHUNK * self.engine.num_stages):
                    if is_stopping():
                        return {}
                    self._evaluate_alike(chunk)
        finally:
            self._loss.evaluation = None
            self._forget_shapes()  # training batches have a size of their own
        return self._end_evaluation(evaluation)

    def _evaluate_alike(self, pairs: list[tuple[Any, bool]]) -> None:
        """Evaluate batches of one size, in pairs with whether they count: the stages agree only
        once on the shapes that they send. Collective.
        """
        self._forget_shapes()
        self._loss.counts = iter([counts for _, counts in pairs])
        batches = iter([batch for batch, _ in pairs])
        self.engine.eval_batch(
            _hiding_targets(_take_each(partial(self._next_halves, batches), len(pairs))),
            compute_loss=True,
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(pairs),
        )

    def _next_halves(self, batches: Iterator[Any]) -> tuple[Any, Any]:
        inputs, targets = super()._next_halves(batches)
        inputs = self.engine.module.around.order(inputs)
        if not self.engine.dynamic_shape:
            self._refuse_other_shapes(inputs)
        return inputs, targets

    def _forget_shapes(self) -> None:
        self._shapes = None
        self.engine.reset_activation_shape()

    def _refuse_other_shapes(self, inputs: Any) -> None:
        """Refuse inputs of other shapes than before: the stages have sent each other their shapes
        once, and other tensors would be misread, or never come.
        """
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            fix = "they may differ only where the dataset has a collate_fn of its own; give it one"
            raise TrainingError(
                f"a micro-batch has inputs of the shapes {shapes}, and those before it had "
                f"{self._shapes}: in a pipeline {fix} [batch-shapes-differ]"
            )

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Mark errors of a stage for a report by one of its ranks, and note rank and stage in them:
        the other stages do not have them.
        """
        try:
            yield
        except FrameworkError as error:
            error.is_of_one_rank = error.is_of_one_rank or claims_error_report(str(error))
            raise
        except Exception as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(
                    f"on rank {rank()}, stage {self.engine.stage_id} of {self.engine.num_stages}"
                )
            raise


def _with_last_alone(batches: Iterable[Any], *, size: int) -> Iterator[list[Any]]:
    """Yield lists of at most `size` batches; the last batch, which may have fewer samples, alone.

    The lists are as long on every rank for the same number of batches: `eval_batch` is collective.
    """
    remaining = iter(batches)
    waiting = list(islice(remaining, 1))  # possibly the last batch
    while True:
        following = list(islice(remaining, size))
        if not following:
            break
        waiting += following
        yield waiting[:-1]
        waiting = waiting[-1:]
    if waiting:
        yield waiting

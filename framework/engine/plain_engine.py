"""`PlainEngine`: DeepSpeed's data-parallel engine (ZeRO 0-3) behind `engine_protocol.Engine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import torch

from framework.checkpoint.state.weight_names import names_of
from framework.engine.base_engine import BaseEngine
from framework.engine.distributed import device, device_name
from framework.engine.initialize import MakeOptimizer, initialize
from framework.engine.schedules import MakeSchedule
from framework.engine.step import Step
from framework.engine.step_batches import StepLoss, loss_of_one_batch
from framework.engine.workarounds.grad_scaler import (
    explaining_overflow,
    grad_scaler,
    scale_fp16_loss,
)
from framework.engine.workarounds.module_buffers import share_buffers
from framework.models.added_losses import (
    AddsLosses,
    collected_routings,
    router_balance,
    routing_metrics,
)
from framework.models.layers import LayeredModel
from framework.plan.compiling import CompileChoice, compile_choice, uses_deepcompile
from framework.plan.plan import Plan
from framework.system.limits import ranks_on_host, room
from framework.tasks.loss_checks import refuse_without_graph
from framework.tasks.task import Task

if TYPE_CHECKING:
    from framework.engine.backward_passes import BackwardPasses
    from framework.engine.compile_probe import CompileProbe
    from framework.engine.copies_ahead import BatchesAhead
    from framework.engine.gradient_sums import GradientSums
    from framework.engine.rank_groups import RankGroups
    from framework.engine.shared_positions import PositionCheck


# Share of the host's free memory for activations that are held there.
_SHARE_FOR_ACTIVATIONS: Final = 0.8


def build_engine(
    plan: Plan,
    *,
    ds_config: Mapping[str, Any],
    model: torch.nn.Module,
    task: Task,
    make_optimizer: MakeOptimizer | None = None,
    make_schedule: MakeSchedule | None = None,
    groups: RankGroups | None = None,
) -> PlainEngine:
    """Wrap a model with `deepspeed.initialize`. Collective.

    Args:
        plan: the plan of the run.
        ds_config: DeepSpeed's JSON.
        model: the whole model.
        task: computes the loss.
        make_optimizer: makes the user's optimizer; None if the JSON names one.
        make_schedule: makes the user's schedule.
        groups: process groups, if a tensor group divides the weights.
    """
    if plan.layout.sequence_size > 1:
        from framework.models.sequence import share_attention

        share_attention(model)
    names = names_of(model)
    engine = initialize(
        plan,
        model,
        ds_config=ds_config,
        make_optimizer=make_optimizer,
        make_schedule=make_schedule,
        names=names,
        groups=groups,
    )
    scale_fp16_loss(engine)
    plain = PlainEngine(engine, plan, task)
    plain.compare_positions()
    choice = compile_choice(plan.config, plan.cluster.device)
    if uses_deepcompile(plan.config):
        from framework.engine.deep_compilation import compile_by_deepspeed

        assert choice.section is not None
        compile_by_deepspeed(engine, choice.section)
    elif choice.section is not None:
        plain.compile_first(choice)
    return plain


class PlainEngine(BaseEngine):
    """One DeepSpeedEngine with the whole model.

    `show_batch` is called with inputs, targets and outputs of the first batch of each evaluation.
    """

    show_batch: Callable[[Any, Any, Any], object] | None = None
    _check: PositionCheck | None = None  # until the first step
    _ahead: BatchesAhead | None = None
    _probe: CompileProbe | None = None
    _is_probed = True

    def __init__(self, engine: deepspeed.DeepSpeedEngine, plan: Plan, task: Task) -> None:
        super().__init__(engine, plan, task, names=partial(names_of, engine.module))
        self._plan = plan
        self._sums = _sum_gradients(engine)
        if plan.layout.tensor_size > 1:
            from framework.engine.tensor_check import GradientCheck

            self.tensor_check = GradientCheck(
                engine,
                names_of(engine.module),
                group=engine.mpu.get_model_parallel_group(),
                every=plan.config.training.log_every,
                is_own_plan=plan.config.parallel.tensor_plan is None,
            )
        # Losses that layers add are means, which a count of the task's must not divide.
        has_added_losses = any(isinstance(module, AddsLosses) for module in engine.module.modules())
        dividing_sums = self._sums or self._flat_step
        if dividing_sums is not None and (not dividing_sums.divides or has_added_losses):
            dividing_sums = None
        self._loss = StepLoss(
            task, micro_batches=engine.gradient_accumulation_steps(), sums=dividing_sums
        )
        self._tiles = _tiles(engine.module, plan, task)
        self._saving: Callable[[], AbstractContextManager[None]] = nullcontext
        if plan.config.training.offload_activations:
            from framework.models.host_activations import HostActivations

            free = room()
            host_bytes = None
            if free is not None:  # the rest is for what a rank needs beside them
                host_bytes = int(_SHARE_FOR_ACTIVATIONS * free.num_bytes / ranks_on_host())
            holding = HostActivations(engine.module, device(), host_bytes=host_bytes)
            self._saving = holding.saving
        self._sharing: Callable[[], AbstractContextManager[None]] = nullcontext
        positions = self._batches.positions
        if positions is not None:
            from framework.engine.rank_groups import sequence_group

            group = sequence_group(plan.layout, positions)
            self._sharing = group.shared
            # Shipped models need none: tests compare them.
            if plan.config.model.is_own_code:
                from framework.engine.shared_positions import PositionCheck

                self._check = PositionCheck(engine, task, group)

    def compare_positions(self) -> None:
        """Refuse a model of transformers that computes something else when ranks share sequences.
        Collective.
        """
        if self._check is not None:
            self._check.settle_numbering()

    def compile_first(self, choice: CompileChoice) -> None:
        """Compile the model before the first step, if it then computes the same.

        Raises:
            ConfigError: kind ``no-blocks``.
        """
        from framework.engine.compile_probe import CompileProbe

        names = names_of(self.engine.module)
        self._probe = CompileProbe(
            self._plan, self.engine, choice, names=names, end_pass=self._end_pass
        )
        self._is_probed = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return outputs of the model, for a loss whose backward pass is DeepSpeed's."""
        if not self._is_probed and torch.is_grad_enabled():
            self._is_probed = True
            assert self._probe is not None
            # The loss is the loop's: any that depends on all outputs shows whether they, and what
            # is computed back from them, are the same.
            self._probe.decide(lambda model: _mean_square(model(*inputs, **named)))
        with self._saving():
            return self.engine(*inputs, **named)

    def outputs(self, inputs: Any) -> Any:
        """Return outputs of the model as the task computes them."""
        return self._task.forward(self.engine, inputs)

    def move(self, batch: Any) -> Any:
        """Move a batch to this rank's device, in the type that the model takes."""
        return self._batches.as_read(self._batches.move(batch))

    def backward_passes(self) -> BackwardPasses:
        """Return the backward passes of a loop of the user's own, and the steps after them."""
        from framework.engine.backward_passes import BackwardPasses

        return BackwardPasses(self.engine)

    def close(self) -> None:
        if self._sums is not None:
            self._sums.close()
        if self._probe is not None:
            self._probe.close()
        super().close()

    def ahead(self, micro_batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]:
        """Return micro-batches that are copied early, the first of a step during the step before
        it, where the device has a stream for that. Not for a pipeline: its stages read at other
        moments.
        """
        if self._batches.streams is None:
            return micro_batches
        from framework.engine.copies_ahead import BatchesAhead

        task = self._task
        batches = self._batches
        self._ahead = BatchesAhead(
            micro_batches,
            lambda batch: batches.begin(batches.on_host(task, batch)),
            count=num_steps * self.engine.gradient_accumulation_steps(),
        )
        return self._ahead

    def train_step(self, micro_batches: Iterator[Any]) -> Step:
        """Run forward, backward and DeepSpeed's step for each micro-batch, without waiting for the
        device.
        """
        self.trained_weights.refuse_changed_flags()  # before ranks wait for each other in the pass
        if self._check is not None:
            micro_batches = self._compared(micro_batches, self._check)
            self._check = None
        if not self._is_probed:
            micro_batches = self._probed(micro_batches)
            self._is_probed = True
        watch = self.bad_steps
        if watch is None:
            step: Step = self._take(micro_batches)
        else:
            step = watch.run(self._take, micro_batches)
        return step

    def _compared(self, micro_batches: Iterator[Any], check: PositionCheck) -> Iterator[Any]:
        """Check the model's positions with the first micro-batch, and return all of them."""
        first = next(micro_batches)
        move = self._batches.move
        split = self._task.split
        check.look_at_batch(first, lambda batch: split(move(batch)), self._batches.as_read)
        return chain([first], micro_batches)

    def _probed(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        """Compile the model if the first micro-batch gives the same then, and return all of them.
        Collective.
        """
        assert self._probe is not None
        first = next(micro_batches)
        with self._sharing():
            self._probe.decide(partial(self._loss_of, first))
        return chain([first], micro_batches)

    def try_pass(self, batch: Any) -> None:
        """Run a micro-batch forward and backward; no rank waits for another."""
        from framework.engine.compile_probe import run_alone

        with self._saving():
            run_alone(self.engine, partial(self._loss_of, batch))

    def skip_no_steps(self) -> None:
        """Set the loss scale of autocast to 1: at its start it is too large for the first steps."""
        scaler = grad_scaler(self.engine)
        if scaler is not None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})

    def _loss_of(self, batch: Any, model: Any) -> torch.Tensor:
        """Compute the loss of a micro-batch by itself, 0-d."""
        inputs, targets = self._batches.split(self._task, batch)
        with self._tiles(targets), collected_routings() as routings:
            outputs = self._task.forward(model, inputs)
            loss = loss_of_one_batch(self._task, outputs, targets)
        return sum((routing.loss for routing in routings), loss)

    def _take(self, micro_batches: Iterator[Any]) -> Step:
        """Take one step on the next micro-batches; its loss stays on the device."""
        engine = self.engine
        task = self._task
        phases = self.phases
        phases.begin()
        lr = self.lr()  # before the step: DeepSpeed moves the schedule on at its end
        total: torch.Tensor | None = None
        reported: list[tuple[torch.Tensor, torch.Tensor]] = []  # by mixtures of experts
        is_divided = engine.gradient_accumulation_steps() > 1  # by 1 takes two kernels
        if self.tensor_check is not None:
            self.tensor_check.begin(engine.global_steps + 1)
        with explaining_overflow(engine), self._sharing():
            take = partial(self._next_halves, micro_batches)
            for inputs, targets in self._loss.weighted(take):
                phases.enter("forward")
                with self._tiles(targets):
                    with collected_routings() as routings:
                        with self._saving():
                            outputs = task.forward(engine, inputs)
                        loss = self._loss(outputs, targets)
                    refuse_without_graph(loss, outputs)
                    balance = router_balance(outputs, engine.module)
                    del outputs  # the backward pass needs the memory
                    phases.enter("backward")
                    full_loss = sum((routing.loss for routing in routings), loss)
                    engine.backward(full_loss, scale_wrt_gas=is_divided)
                    del full_loss
                reported += [(routing.balance, routing.dropped) for routing in routings]
                if balance is not None:
                    reported.append(balance)
                phases.enter("optimizer")
                if total is None:
                    total = loss.detach()
                else:
                    total = total + loss.detach()
                if self.bad_steps is not None:
                    self.bad_steps.loss = partial(self._current_loss, total)
                engine.step()
        assert total is not None
        mean = self._loss.mean(total)
        if self.tensor_check is not None:
            self.tensor_check.end()
        if self._ahead is not None:
            phases.enter("data")
            self._ahead.fill()
        phases.end()
        return Step(self, mean, lr, self.may_be_skipped(), partial(routing_metrics, reported))

    def _current_loss(self, total: torch.Tensor) -> torch.Tensor:
        """Return this rank's loss of the step that is being taken, when its count is known."""
        return self._loss.mean(total)()

    def evaluate(
        self,
        batches: Iterable[tuple[Any, bool]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Mapping[str, float]:
        task = self._task
        evaluation = self._begin_evaluation(batches)
        tiles = self._tiles
        if evaluation.looks_at_all:
            tiles = _no_tiles
        show = self.show_batch
        share_buffers(self.engine)
        with (
            self.modes.evaluating(),
            torch.no_grad(),
            self._averaged(),
            self._sharing(),
        ):
            for batch, counts in batches:
                if is_stopping():
                    return {}
                inputs, targets = self._batches.split(task, batch)
                with tiles(targets):
                    outputs = task.forward(self.engine, inputs)
                evaluation.add(outputs, targets, counts=counts)
                if counts and show is not None:
                    show(inputs, targets, outputs)
                    show = None
        return self._end_evaluation(evaluation)


def _mean_square(outputs: Any) -> torch.Tensor:
    """Return the sum of the mean squares of all floating-point tensors in a model's outputs."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    losses: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            losses.append(leaf.float().square().mean())
    return torch.stack(losses).sum()


Tiles = Callable[[Any], AbstractContextManager[None]]
"""Returns a context, for targets, in which the output layer may compute the loss tile by tile."""


def _tiles(model: torch.nn.Module, plan: Plan, task: Any) -> Tiles:
    """Have the output layer of a model compute the loss tile by tile, if it can and should; else
    warn if GPUs compute it slowly. Return the context of each forward pass.

    Raises:
        ConfigError: kind ``loss-not-tiled``: the config sets a tile, and it cannot.
    """
    tile = plan.config.training.loss_tile
    if tile == 0 or (tile == "auto" and not isinstance(model, LayeredModel)):
        if device_name() != "cpu" and plan.config.precision.dtype != "fp32":
            from framework.engine.slow_rows import warn_of_slow_rows

            warn_of_slow_rows(model)
        return _no_tiles
    from framework.engine.loss_tiles import loss_tiles

    return loss_tiles(model, plan, task)


def _sum_gradients(engine: deepspeed.DeepSpeedEngine) -> GradientSums | None:
    """Put sums of our own in place at stage 0, as `sum_gradients` does; return None at others."""
    if engine.zero_optimization_stage() != 0:
        return None
    from framework.engine.gradient_sums import sum_gradients

    return sum_gradients(engine)


def _no_tiles(targets: Any) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def arithmetic_of(plan: Plan) -> Iterator[None]:
    """Compute as the config sets it for the time of the block: fp32 products and convolutions in
    TF32 or not, and the same bits in every run or not.
    """
    cudnn = torch.backends.cudnn
    matmul = getattr(plan.config.precision, "matmul", "highest")
    matmul_before = torch.get_float32_matmul_precision()
    allowed_tf32 = cudnn.allow_tf32
    used_benchmark = cudnn.benchmark
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision(matmul)
    cudnn.allow_tf32 = matmul != "highest"
    if plan.config.training.deterministic:
        # cuBLAS reads it at the first product (NVIDIA, cuBLAS: results reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    detects_anomaly = plan.config.training.detect_anomaly or torch.is_anomaly_enabled()
    try:
        with torch.autograd.set_detect_anomaly(detects_anomaly):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul_before)
        cudnn.allow_tf32 = allowed_tf32
        cudnn.benchmark = used_benchmark
        torch.use_deterministic_algorithms(was_deterministic)

"""Base of both engines: what happens around DeepSpeed's step, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import deepspeed
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.checkpoint_engine import use_atomic_files
from framework.checkpoint.state.weight_names import Names
from framework.checkpoint.state.weight_parts import expert_part_of, splits_of, whole_shape
from framework.config.optimizer import ScheduleFree
from framework.config.training import Training
from framework.engine.checkpoint_bytes import save_bytes
from framework.engine.collective_timeout import collective_timeout
from framework.engine.distributed import device, gather
from framework.engine.garbage import Garbage
from framework.engine.held_weights import further_names, is_frozen, state_of
from framework.engine.metrics import Evaluation
from framework.engine.modes import Modes
from framework.engine.phases import phases_of
from framework.engine.plain_weights import PlainWeights
from framework.engine.schedules import LR_RATIO
from framework.engine.step import PassedStep
from framework.engine.step_batches import HALF, DeviceBatches, place, streams_of
from framework.engine.trained_weights import TrainedWeights
from framework.engine.workarounds.grad_scaler import may_have_been_skipped
from framework.engine.workarounds.module_buffers import share_buffers
from framework.engine_protocol import Table
from framework.errors import TrainingError
from framework.plan.compiling import uses_deepcompile
from framework.plan.plan import Plan
from framework.system.files import FileRecord, NewFile
from framework.tasks.task import Positions, Task, collects

if TYPE_CHECKING:
    from framework.checkpoint.save_stream import OpenFile
    from framework.engine.bad_steps import StepWatch
    from framework.engine.ema import WeightAverage
    from framework.engine.flat_step import FlatStep
    from framework.engine.flat_sums import FlatSums
    from framework.engine.freezing import StepwiseFreezing
    from framework.engine.full_weights import FullWeights
    from framework.engine.schedule_free import AveragedWeights
    from framework.engine.stragglers import Stragglers
    from framework.engine.tensor_check import GradientCheck
    from framework.engine.workarounds.grad_norm import KeptNorm
    from framework.engine.written_weights import WrittenWeights
    from framework.engine.zenflow import ZenFlowSteps


class BaseEngine:
    """A DeepSpeed engine, the task that defines what a batch means, and the checkpoint files."""

    tensor_check: GradientCheck | None = None
    """Compares gradients of the weights that a tensor group does not divide."""
    is_trying = False
    """Whether evaluation is tried before the first step."""
    tables: Mapping[str, Table] = MappingProxyType({})
    _before_step: Callable[[], object] | None = None

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        plan: Plan,
        task: Task,
        *,
        names: Callable[[], Names],
        stages: Any = None,
    ) -> None:
        """Prepare the first step.

        Args:
            engine: what `deepspeed.initialize` returned.
            plan: the plan of the run.
            task: moved to the device.
            names: returns the plain names of the weights and buffers that the engine holds.
            stages: process group of a pipeline's stages; None without a pipeline.
        """
        place(task, device())
        self.engine = engine
        self._task = task
        self._names = names
        self._layout = plan.layout
        training = plan.config.training
        self.modes = Modes(engine, plain_name=self.name_module, stages=stages)
        half = HALF.get(plan.config.precision.dtype)
        positions = _positions_of_rank(plan)
        self._batches = DeviceBatches(
            device(), half, training.channels_last, positions, streams_of(device())
        )
        # First, so that all that is put between the engine and its optimizer below sees the
        # groups that are stepped.
        self._freezing = self._make_freezing(training)
        # whether all gradients of a step are there, and were not taken yet
        self.has_gradients: Callable[[], bool] = lambda: False
        self._leaves_out_frozen = training.lora is not None
        self._zenflow = self._make_zenflow(plan)
        # DeepCompile sums gradients within its graph, into buffers of its own.
        self._sums_in_graph = uses_deepcompile(plan.config)
        self._flat_step: FlatStep | None = None
        if not self._sums_in_graph:
            self._flat_step = _shorten_step(engine, plan)
        self.written: WrittenWeights | PlainWeights = PlainWeights(engine.module)
        if half is not None or plan.config.zero.stage > 0:
            from framework.engine.written_weights import WrittenWeights

            self.written = WrittenWeights(engine, names, log_every=training.log_every)
        self._average = self._make_average(plan)
        self._files = use_atomic_files(engine)
        self.kept_norm = _keep_norm(engine)
        self.phases = phases_of(engine)
        self.stragglers = _stragglers_of(plan)
        self.bad_steps = self._make_bad_steps(training)
        self.trained_weights = TrainedWeights(engine, names())
        self._end_pass = self._keep_gradient_order()
        if getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
            from framework.engine.workarounds.nvme_state import read_weights_once

            read_weights_once(engine.optimizer)
        self._has_copies = engine.zero_optimization_stage() == 3 and _is_zero_plus_plus(engine)
        if self._has_copies:
            from framework.engine.zero_plus_plus import prepare_gathering

            prepare_gathering(engine, names())
        self._garbage = Garbage(engine, log_every=training.log_every)

    # What the config may ask for beside the step; None where it does not.

    def _make_freezing(self, training: Training) -> StepwiseFreezing | None:
        if not training.freeze:
            return None
        from framework.engine.freezing import StepwiseFreezing

        return StepwiseFreezing(self.engine, training.freeze, self._names())

    def _make_zenflow(self, plan: Plan) -> ZenFlowSteps | None:
        if plan.config.zero.zenflow is None:
            return None
        from framework.engine.zenflow import ZenFlowSteps

        return ZenFlowSteps(self.engine, self._names())

    def _make_average(self, plan: Plan) -> WeightAverage | AveragedWeights | None:
        if plan.config.training.ema is not None:
            from framework.engine.ema import WeightAverage

            return WeightAverage(self.engine, plan.config, before=self.written.carry)
        if isinstance(plan.config.optimizer, ScheduleFree):
            from framework.engine.schedule_free import AveragedWeights

            beta = plan.config.optimizer.betas[0]
            return AveragedWeights(self.engine, beta=beta, before=self.written.carry)
        return None

    def _make_bad_steps(self, training: Training) -> StepWatch | None:
        if training.bad_steps is None:
            return None
        from framework.engine.bad_steps import StepWatch

        return StepWatch(
            self.engine, training.bad_steps, self.kept_norm, most_steps=training.log_every
        )

    def _keep_gradient_order(self) -> Callable[[], None] | None:
        """Have ZeRO sum gradients in the same order on all ranks, and return what ends a pass at
        stage 3. Flat sums, sums at stage 0 and sums of DeepCompile are in the order of the
        weights.
        """
        sums_by_zero = self.engine.zero_optimization_stage() > 0 and not self._sums_in_graph
        if not sums_by_zero or self._flat_sums is not None:
            return None
        from framework.engine.workarounds.gradient_order import keep_gradient_order

        return keep_gradient_order(
            self.engine, refuse_changes=self.trained_weights.refuse_changed_flags
        )

    @property
    def has_norm_for_each_group(self) -> bool:
        """Whether DeepSpeed's own step at ZeRO 1 and 2 takes a norm for each group."""
        return self.engine.zero_optimization_stage() in (1, 2) and self._flat_step is None

    @property
    def _flat_sums(self) -> FlatSums | None:
        return None if self._flat_step is None else self._flat_step.sums

    @property
    def ds_config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.engine.config
        return config

    @property
    def module(self) -> torch.nn.Module:
        return self.engine.module  # type: ignore[no-any-return]

    @property
    def steps_taken(self) -> int:
        return int(self.engine.global_steps)

    def may_be_skipped(self) -> bool:
        """Check whether the last step may have left the weights as they were."""
        watch = self.bad_steps
        return (watch is not None and watch.keeps_weights) or may_have_been_skipped(self.engine)

    def ahead(self, micro_batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]:
        """Return the micro-batches as they are: only `PlainEngine` begins to copy the next ones."""
        return micro_batches

    @property
    def can_try_evaluation(self) -> bool:
        """Whether evaluation can be tried before training: not with DeepCompile, which makes its
        graphs of what runs first.
        """
        return not self._sums_in_graph

    def trying_evaluation(self) -> AbstractContextManager[None]:
        from framework.engine.evaluation_trial import trying_evaluation

        return trying_evaluation(self)

    def _begin_evaluation(self, batches: Any) -> Evaluation:
        """Begin a pass over the batches of a loader."""
        task = self._task
        if not collects(task) and task.added_metrics is None:
            return Evaluation(task)
        from framework.engine.evaluation import WholeEvaluation

        return WholeEvaluation(task, self._layout, batches, is_trial=self.is_trying)

    def _end_evaluation(self, evaluation: Evaluation) -> dict[str, float]:
        """Return the metrics of a pass. Collective."""
        figures = evaluation.figures()
        self.tables = evaluation.tables
        return figures

    def pass_over(self, micro_batches: Iterator[Any]) -> PassedStep:
        assert self.bad_steps is not None
        lr = self.lr()
        self.bad_steps.pass_over(micro_batches)
        return PassedStep({"train/lr": lr, "train/skipped_steps": float(self.engine.skipped_steps)})

    def scale_lr(self, factor: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= factor

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        self.trained_weights.refuse_changes()
        # A resumed run starts from the saved buffers on every rank: so does the unbroken run.
        share_buffers(self.engine)
        self.written.carry()
        self.written.refuse()
        timeout: AbstractContextManager[None] = nullcontext()
        if open_file is NewFile:
            timeout = collective_timeout()
        further: dict[str, Any] = {}
        if self._zenflow is not None:
            further["zenflow"] = self._zenflow.state()
        with self.written.unguarded(), timeout:
            return save_bytes(
                self.engine,
                self._files,
                folder,
                tag,
                state,
                names=self._names(),
                leaves_out_frozen=self._leaves_out_frozen,
                further=further,
                open_file=open_file,
            )

    def load(
        self, checkpoint: SavedCheckpoint, *, moved: bool, changed: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        from framework.engine.checkpoint_load import load_bytes, move_in

        names = self._names()
        partly = self._leaves_out_frozen
        if moved:
            if partly:
                names = {tensor: name for tensor, name in names.items() if not is_frozen(tensor)}
            with self.written.unguarded():
                state = move_in(
                    self.engine, checkpoint, names=names, layout=self._layout, changed=changed
                )
        else:
            with self.written.unguarded():
                restores = {}
                if self._zenflow is not None:
                    restores["zenflow"] = self._zenflow.load
                state = load_bytes(
                    self.engine,
                    checkpoint.folder,
                    checkpoint.tag,
                    partly=partly,
                    restores=restores,
                    changed=changed,
                )
        if self._average is None:
            from framework.engine.ema import forget_average

            forget_average(self.engine)
        if self._has_copies:
            from framework.engine.zero_plus_plus import forget_copies

            forget_copies(self.engine)
        self.written.reset()
        return state

    def description(self) -> dict[str, Any]:
        """Describe for a checkpoint's manifest which weights it holds and how tensor ranks share
        them. Collective.
        """
        names = self._names()
        if self._leaves_out_frozen:
            names = {tensor: name for tensor, name in names.items() if tensor.requires_grad}
        rank_splits = splits_of(names)
        all_splits = [rank_splits]
        if self._layout.tensor_size > 1 and self._layout.pipe_size > 1:
            all_splits = gather(rank_splits)  # each stage has its own weights
        tensor_splits: dict[str, Any] = {}
        for splits in all_splits:
            for name, split in splits.items():
                tensor_splits[name] = [split.dim, list(split.sections)]
        description = self._describe_weights()
        if tensor_splits:
            description["tensor"] = tensor_splits
        experts: dict[str, int] = {}
        for rank_experts in self._gathered_experts():
            experts |= rank_experts
        if experts:
            description["experts"] = experts
        return description

    def _gathered_experts(self) -> Sequence[Mapping[str, int]]:
        """Return the weights with packed experts that an expert group shares, by name: how many
        experts the group has; of each rank, where stages have their own. Collective.
        """
        own: dict[str, int] = {}
        for tensor, name in self._names().items():
            part = expert_part_of(tensor)
            is_left_out = self._leaves_out_frozen and not tensor.requires_grad
            if part is not None and not is_left_out:
                own[name] = sum(part.split.sections)
        if self._layout.expert_size > 1 and self._layout.pipe_size > 1:
            return gather(own)
        return [own]

    def gathered(
        self, module: torch.nn.Module | None = None
    ) -> AbstractContextManager[torch.nn.Module]:
        return self.written.gathered(module)

    @cached_property
    def full_weights(self) -> FullWeights:
        """Whole weights, gradients and optimizer states by name; made by all ranks at once.

        Raises:
            TrainingError: kind ``full-weight-unavailable``.
        """
        if self._zenflow is not None:
            raise TrainingError(
                "with ZenFlow the copies of weights lie column by column, and its columns have "
                "none: read the module's weights (engine.gathered) [full-weight-unavailable]"
            )
        from framework.engine.full_weights import FullWeights

        return FullWeights(
            self.engine,
            layout=self._layout,
            written=self.written,
            plain_name=self.name_weight,
            has_gradients=lambda: self.has_gradients(),
        )

    def before_steps(self, call: Callable[[], object]) -> None:
        is_first = self._before_step is None
        self._before_step = call
        if is_first:
            take_step = self.engine._take_model_step
            self.engine._take_model_step = partial(self._take_after_call, take_step)

    def _take_after_call(self, take_step: Callable[[Any], None], lr_kwargs: Any) -> None:
        """Stand in for DeepSpeed's `_take_model_step`: the gradients are complete here."""
        assert self._before_step is not None
        if self._flat_step is not None:
            self._flat_step.divide_now()
        self.has_gradients = lambda: True
        try:
            self._before_step()
        finally:
            self.has_gradients = lambda: False
        take_step(lr_kwargs)

    def _describe_weights(self) -> dict[str, Any]:
        """Describe the weights that every save is compared with: at stage 3 the files alone do not
        show them.
        """
        if self._layout.pipe_size > 1 or self.engine.zero_optimization_stage() < 3:
            return {}
        module = self.module
        partly = self._leaves_out_frozen
        state = state_of(module, partly=partly)
        # by identity: tied weights count once
        sizes = {tensor: whole_shape(tensor).numel() for tensor in set(state.values())}
        num_names = len(sizes)
        num_elements = sum(sizes.values())
        if self._layout.expert_size > 1:
            from framework.models.experts import expert_weights

            experts = [weight for weight in expert_weights(module) if weight in sizes]
            num_elsewhere = self._layout.expert_size - 1
            num_names += num_elsewhere * len(experts)
            num_elements += num_elsewhere * sum(sizes[weight] for weight in experts)
        description: dict[str, Any] = {"weights": {"names": num_names, "elements": num_elements}}
        ties = further_names(module, partly=partly)
        if ties:
            description["ties"] = ties
        return description

    def lr(self) -> float:
        """Return `optimizer.lr` as the schedule has it now, before the first group's own ratio."""
        group = self.engine.optimizer.param_groups[0]
        return float(self.engine.get_lr()[0]) / (group.get(LR_RATIO) or 1.0)

    def close(self) -> None:
        self._garbage.close()
        if self._freezing is not None:
            self._freezing.close()
        if self._flat_sums is not None:
            self._flat_sums.close()
        self.written.close()
        self.engine.destroy()

    def _averaged(self) -> AbstractContextManager[None]:
        """Return a context in which an evaluation computes with the average of the weights, if that
        is to be measured. To enter and leave it is collective.
        """
        if self._average is None:
            return nullcontext()
        return self._average.in_evaluation()

    def name_module(self, name: str) -> str:
        """Return the plain model's name of a module, given its name in DeepSpeed's model."""
        return name

    def is_last_micro_batch(self) -> bool:
        """Check whether the step is taken after the micro-batch that is computed."""
        return bool(self.engine.is_gradient_accumulation_boundary())

    def name_weight(self, name: str) -> str:
        """Return the plain model's name of a weight, given its name in DeepSpeed's model."""
        return name

    def _next_halves(self, batches: Iterator[Any]) -> tuple[Any, Any]:
        """Read the next batch and return its inputs and targets on the device. Reading counts for
        the phase ``data``, the rest for ``copy``.
        """
        enter = self.phases.enter
        before = enter("data")
        batch = next(batches)
        enter("copy")
        halves = self._batches.split(self._task, batch)
        enter(before)
        return halves


def _shorten_step(engine: deepspeed.DeepSpeedEngine, plan: Plan) -> FlatStep | None:
    """Have the engine step in fewer passes over the gradients than DeepSpeed does. Return that step
    at stages 1 and 2.
    """
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        from framework.engine.flat_step import shorten_flat_step
        from framework.engine.one_rank import is_alone, keep_gradients_in_place
        from framework.plan.flat_sums import coalesces

        keep_gradients_in_place(engine)
        # gradients of stage 2 wait for the last micro-batch of a step
        is_one_sum = coalesces(plan.config, plan.layout)
        step = shorten_flat_step(engine, coalesces=is_one_sum)
        if is_one_sum and not is_alone(engine) and (step is None or step.sums is None):
            from framework.engine.flat_sums import wait_for_last

            wait_for_last(engine)
        return step
    if stage == 0 and (engine.fp16_enabled() or engine.bfloat16_enabled()):
        from framework.engine.half_step import shorten_half_step

        shorten_half_step(engine)
    return None


def _keep_norm(engine: deepspeed.DeepSpeedEngine) -> KeptNorm | None:
    """Keep the gradient norm of fp32 training at stage 0, which DeepSpeed drops. Return what keeps
    it, or None if DeepSpeed's optimizer does.
    """
    if engine.zero_optimization_stage() != 0 or engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    from framework.engine.workarounds.grad_norm import keep_norm

    return keep_norm(engine)


def _stragglers_of(plan: Plan) -> Stragglers | None:
    """Make what looks for stragglers, or return None if ranks are not compared: there is one, or
    they are stages of a pipeline. Collective.
    """
    if torch.distributed.get_world_size() == 1 or plan.layout.pipe_size > 1:
        return None
    from framework.engine.stragglers import stragglers_of

    return stragglers_of(plan)


def _positions_of_rank(plan: Plan) -> Positions | None:
    """Return this rank's part of every sequence, or None if it has all positions."""
    size = plan.layout.sequence_size
    if size > 1:
        return Positions(plan.layout.sequence_rank(torch.distributed.get_rank()), size)
    return None


def _is_zero_plus_plus(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Check whether weights are gathered from second copies, or quantized."""
    return engine.zero_hpz_partition_size() > 1 or bool(engine.zero_quantized_weights())

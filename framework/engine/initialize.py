"""Base of both engines: the call of `deepspeed.initialize`, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.save_stream import OpenFile
from framework.checkpoint.state.checkpoint_engine import use_atomic_files
from framework.checkpoint.state.optimizer_shards import Names
from framework.checkpoint.state.tensor_split import splits_of, whole_shape
from framework.config.deepspeed_words import SCHEDULES
from framework.engine.bad_steps import StepWatch
from framework.engine.checkpoint_bytes import load_bytes, move_in, save_bytes
from framework.engine.collective_timeout import collective_timeout
from framework.engine.distributed import device, gather
from framework.engine.ema import WeightAverage
from framework.engine.expert_parallel import declaring_experts, with_expert_groups
from framework.engine.freezing import StepwiseFreezing
from framework.engine.held_weights import further_names, state_of
from framework.engine.metrics import engine_metrics, memory_metrics, over_ranks
from framework.engine.modes import Modes
from framework.engine.optimizer_weights import make_over_all
from framework.engine.parameter_groups import LR_RATIO, parameter_groups
from framework.engine.phases import phases_of
from framework.engine.rank_groups import RankGroups
from framework.engine.schedules import MakeSchedule, client_schedule
from framework.engine.step_batches import HALF, DeviceBatches, place
from framework.engine.stragglers import stragglers_of
from framework.engine.tensor_check import GradientCheck
from framework.engine.trained_weights import TrainedWeights
from framework.engine.workarounds.fp32_sums import taking_zero_optimizer
from framework.engine.workarounds.grad_norm import keep_norm
from framework.engine.workarounds.grad_scaler import forget_autocast, may_have_been_skipped
from framework.engine.workarounds.gradient_order import keep_gradient_order
from framework.engine.workarounds.half_without_zero import taking_no_empty_step
from framework.engine.workarounds.idle_measurements import leave_out_measurements
from framework.engine.workarounds.module_buffers import share_buffers
from framework.engine.written_weights import WrittenWeights
from framework.errors import ConfigError, explaining
from framework.plan.plan import Plan
from framework.system.files import FileRecord, NewFile
from framework.tasks.task import Positions, Task

# Learning rates among the parameters of DeepSpeed's schedules.
_RATES: Final = {
    theirs[key] for _, theirs in SCHEDULES.values() for key in ("min_lr", "max_lr") if key in theirs
}
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""The user's optimizer, where the JSON names none."""


def initialize(
    plan: Plan,
    model: torch.nn.Module,
    *,
    ds_config: Mapping[str, Any],
    make_optimizer: MakeOptimizer | None,
    make_schedule: MakeSchedule | None = None,
    names: Names,
    layers: Sequence[str] | None = None,
    groups: RankGroups | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Wrap a model, or a stage of it, with `deepspeed.initialize`. Collective.

    `names` are the plain names of its weights, and `layers` those of all layers, where it is a
    stage; `groups` those of the ranks, where a tensor group divides weights.
    """
    _refuse_number_types(plan, model)
    _refuse_renorms(plan, model)
    forget_autocast()
    deepspeed.utils.groups.mpu = None  # DeepSpeed keeps that of an earlier engine of the process
    named = {names[parameter]: parameter for parameter in model.parameters()}
    _refuse_nothing_to_train(model)
    freeze = plan.config.training.freeze
    groups_of_weights = parameter_groups(named, plan.config.optimizer, layers=layers, freeze=freeze)
    stepped = with_expert_groups(model, groups_of_weights)
    make = make_optimizer
    if make is not None:
        section = plan.config.optimizer
        is_stage = layers is not None
        make = partial(make_over_all, make, names=names, section=section, is_stage=is_stage)
    with (
        refusing_scalars(),
        _sending_scalars(),
        declaring_experts(model),
        taking_zero_optimizer(),
        taking_no_empty_step(),
    ):
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=stepped,
            optimizer=make,
            lr_scheduler=client_schedule(plan, make_schedule),
            dist_init_required=False,
            config=_with_group_rates(ds_config, stepped),
            mpu=groups,
        )
    leave_out_measurements(engine)
    share_buffers(engine, unsaved=True)  # DeepSpeed has made the weights equal, and nothing else
    return engine


def _refuse_nothing_to_train(model: torch.nn.Module) -> None:
    """Torch's optimizers refuse an empty list of weights, in words of their own. Stages of a
    pipeline without one are found when it is cut.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    reason = "none of the model's weights is trained: requires_grad is False for all of them"
    if not list(model.parameters()):
        reason = "the model has no weights"
    fix = "set requires_grad_(True) for those that are to be trained, or training.lora"
    raise ConfigError.of("nothing-to-train", reason, fix, "model")


def _with_group_rates(ds_config: Mapping[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """The JSON with a list for every rate of the schedule, where groups have rates of their own:
    DeepSpeed's schedules give one number to all groups.
    """
    ratios = [group.get(LR_RATIO, 1.0) if isinstance(group, dict) else 1.0 for group in groups]
    schedule = ds_config.get("scheduler", {})
    if "params" not in schedule or all(ratio == 1.0 for ratio in ratios):
        return dict(ds_config)
    params = schedule["params"]
    lists = {name: [params[name] * ratio for ratio in ratios] for name in _RATES & params.keys()}
    return {**ds_config, "scheduler": {**schedule, "params": {**params, **lists}}}


def _refuse_number_types(plan: Plan, model: torch.nn.Module) -> None:
    """DeepSpeed reduces no doubles at stage 0, and its fp32 copies at stages 1 to 3 drop what is
    imaginary.
    """
    doubles = plan.config.zero.stage == 0 and plan.config.precision.dtype in ("fp32", "autocast")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (
            parameter.is_complex() or (doubles and parameter.dtype == torch.float64)
        ):
            dtype = str(parameter.dtype).removeprefix("torch.")
            reason = f"the model's weight {name} is {dtype}, which DeepSpeed cannot train"
            pair = "keep its real view (torch.view_as_real) as the weight, and join it in forward"
            fix, at = (pair, "") if parameter.is_complex() else ("use .float()", " at zero.stage 0")
            raise ConfigError.of("weight-type", f"{reason}{at}", fix, "model")


def _refuse_renorms(plan: Plan, model: torch.nn.Module) -> None:
    """Torch shortens the rows that a rank looks up, and no others: copies of the weight would drift
    apart.
    """
    if plan.layout.data_parallel_size * plan.layout.sequence_size == 1:
        return
    for name, module in model.named_modules():
        if (
            isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            and module.max_norm is not None
        ):
            reason = (
                f"{name} has max_norm, which shortens in each rank's copy the rows that its "
                "own batch looks up"
            )
            fix = (
                "leave it out and shorten all rows in a callback (docs/callbacks.md), or train "
                "on one rank"
            )
            raise ConfigError.of("weight-differs-between-ranks", reason, fix, "model")


def _scalar_refusal(error: BaseException) -> ConfigError | None:
    """At stage 3 DeepSpeed sends bytes in many places: there a weight without dimensions is
    refused.
    """
    if "dim() cannot be 0 to view" not in str(error):
        return None
    return ConfigError.of(
        "scalar-weight",
        "the model has a weight without dimensions, which DeepSpeed cannot spread over ranks",
        "make it a vector of one number, torch.ones(1) instead of torch.tensor(1.0), or set "
        "zero.stage: 2",
        "zero.stage",
        3,
    )


refusing_scalars = partial(explaining, _scalar_refusal)


@contextmanager
def _sending_scalars() -> Iterator[None]:
    """DeepSpeed sends every weight as bytes, which torch does not take a tensor without dimensions
    for: CLIP's `logit_scale` ends its start (0.19.8, `DeepSpeedEngine._broadcast_model`). Meanwhile
    such a weight is seen as a vector of one number.
    """
    send = deepspeed.DeepSpeedEngine._broadcast_model

    def send_all(engine: deepspeed.DeepSpeedEngine) -> None:
        scalars = [parameter for parameter in engine.module.parameters() if parameter.ndim == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        send(engine)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    deepspeed.DeepSpeedEngine._broadcast_model = send_all
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = send


@dataclass(frozen=True)
class Step:
    """Result of one step, taken at rate `lr`; its loss on this rank, and `further` means, are still
    on the device.
    """

    engine: BaseEngine
    read_loss: Callable[[], torch.Tensor]
    lr: float
    may_be_skipped: bool
    further: Callable[[], dict[str, float]] = dict

    def read(self) -> Mapping[str, float]:
        # first: by it the device has been waited for
        loss = {"train/loss": float(self.read_loss())}
        if self.engine.tensor_check is not None:
            self.engine.tensor_check.compare()
        self.engine.written.refuse()
        engine, own = (
            self.engine,
            loss | self.further() | self.engine.phases.read() | memory_metrics(),
        )
        slow = engine.stragglers
        if slow is None:
            shared = over_ranks(own)
        else:
            shared = over_ranks(own, partial(slow.note, engine.engine.global_steps))
        return shared | {"train/lr": self.lr} | engine_metrics(engine.engine, engine.kept_norm)


@dataclass(frozen=True)
class PassedStep:
    """Result of a step that was left out."""

    metrics: Mapping[str, float]
    may_be_skipped: bool = True

    def read(self) -> Mapping[str, float]:
        return self.metrics


def positions_of(plan: Plan) -> Positions | None:
    """This rank's part of every sequence; None where it has all positions."""
    size = plan.layout.sequence_size
    if size > 1:
        return Positions(plan.layout.sequence_rank(torch.distributed.get_rank()), size)
    return None


class BaseEngine:
    """One of DeepSpeed's engines, the task that says what a batch means, and the files of its
    checkpoints.
    """

    tensor_check: GradientCheck | None = None
    """Of what a tensor group does not divide."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        plan: Plan,
        task: Task,
        *,
        names: Callable[[], Names],
        stages: Any = None,
    ) -> None:
        """`names` tells the plain names of what the engine holds, `stages` is a pipeline's process
        group.
        """
        place(task, device())
        self.engine = engine
        self._task = task
        self._names = names
        self._layout = plan.layout
        self.modes = Modes(engine, plain_name=self.name_module, stages=stages)
        self._batches = DeviceBatches(
            device(),
            HALF.get(plan.config.precision.dtype),
            plan.config.training.channels_last,
            positions_of(plan),
        )
        # First: what stands between the engine and its optimizer later sees the groups that are
        # stepped.
        self._freezing = StepwiseFreezing(engine, plan.config.training.freeze, names())
        self._leaves_out_frozen = plan.config.training.lora is not None
        self.written = WrittenWeights(engine, names, log_every=plan.config.training.log_every)
        self._average = WeightAverage(engine, plan.config, before=self.written.carry)
        self._files = use_atomic_files(engine)
        self.kept_norm = keep_norm(engine, stages=stages)
        self.phases = phases_of(engine)
        self.stragglers = stragglers_of(plan, torch.distributed.get_world_size())
        asked = plan.config.training.bad_steps
        most = plan.config.training.log_every
        if asked is None:
            watch = None
        else:
            watch = StepWatch(engine, asked, self.kept_norm, most_steps=most)
        self.bad_steps = watch
        self.trained_weights = TrainedWeights(engine, names())
        keep_gradient_order(engine, refuse_changes=self.trained_weights.refuse_changed_flags)

    def may_be_skipped(self) -> bool:
        """Check whether the last step may have left the weights as they were."""
        watch = self.bad_steps
        return (watch is not None and watch.keeps_weights) or may_have_been_skipped(self.engine)

    def pass_over(self, micro_batches: Iterator[Any]) -> PassedStep:
        """Leave out a step after a roll back: its data is read, counters and schedule go on."""
        assert self.bad_steps is not None
        lr = self.lr()
        self.bad_steps.pass_over(micro_batches)
        return PassedStep({"train/lr": lr, "train/skipped_steps": float(self.engine.skipped_steps)})

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        self.trained_weights.refuse_changes()
        # so that a run that is resumed, where all have what is saved, is the unbroken one
        share_buffers(self.engine)
        self.written.carry()
        self.written.refuse()
        with (
            self.written.unguarded(),
            collective_timeout() if open_file is NewFile else nullcontext(),
        ):
            return save_bytes(
                self.engine,
                self._files,
                folder,
                tag,
                state,
                names=self._names(),
                leaves_out_frozen=self._leaves_out_frozen,
                open_file=open_file,
            )

    def load(self, checkpoint: SavedCheckpoint, *, moved: bool) -> Mapping[str, Any]:
        names = self._names()
        partly = self._leaves_out_frozen
        if moved:
            if partly:
                names = {
                    one: name
                    for one, name in names.items()
                    if one.requires_grad or not isinstance(one, torch.nn.Parameter)
                }
            with self.written.unguarded():
                state = move_in(self.engine, checkpoint, names=names, layout=self._layout)
        else:
            with self.written.unguarded():
                state = load_bytes(self.engine, checkpoint.folder, checkpoint.tag, partly=partly)
        self._average.after_load()
        self.written.reset()
        return state

    def description(self) -> dict[str, Any]:
        """Describe for the manifest of its checkpoints what they hold of the model, and how tensor
        ranks share weights. Collective.
        """
        layout = self._layout
        own = splits_of(self._names())
        # stages have others
        if layout.tensor_size > 1 and layout.pipe_size > 1:
            everyone = gather(own)
        else:
            everyone = [own]
        found = {
            name: [one.dim, list(one.sections)]
            for splits in everyone
            for name, one in splits.items()
        }
        return self._described_weights() | ({"tensor": found} if found else {})

    def _described_weights(self) -> dict[str, Any]:
        """Describe the weights that every save is held against; at stage 3 the files alone do not
        tell them.
        """
        if self._layout.pipe_size > 1 or self.engine.zero_optimization_stage() < 3:
            return {}
        module = self.engine.module
        partly = self._leaves_out_frozen
        each = {
            id(one): whole_shape(one).numel() for one in state_of(module, partly=partly).values()
        }
        ties = further_names(module, partly=partly)
        weights = {"weights": {"names": len(each), "elements": sum(each.values())}}
        return weights | ({"ties": ties} if ties else {})

    def lr(self) -> float:
        """`optimizer.lr` as the schedule has it now: where the first group has a share of it, what
        it is a share of.
        """
        group = self.engine.optimizer.param_groups[0]
        return float(self.engine.get_lr()[0]) / (group.get(LR_RATIO) or 1.0)

    def close(self) -> None:
        self._freezing.close()
        self.written.close()
        self.engine.destroy()

    def name_module(self, name: str) -> str:
        """Name in the plain model of a module that DeepSpeed's model has under this name."""
        return name

    def _halves(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of each batch, on the device."""
        enter = self.phases.enter
        before = enter("data")
        for batch in batches:
            enter("copy")
            halves = self._batches.split(self._task, batch)
            enter(before)
            yield halves
            before = enter("data")
        enter(before)

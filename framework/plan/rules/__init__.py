"""Rules between keys: each is a small function that yields the problems it sees, under a stable kind.

A rule knows the config, the cluster and nothing else: it reads no file, clock, environment or device. `ALL` lists them;
a new rule is a function here and its name in `ALL`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from pydantic import ValidationError

from framework.config.base import Section, Target
from framework.config.data import DataObject, DataTarget
from framework.config.model import _Classifier
from framework.config.optimizer import AdamW, Lamb, Lion, OptimizerSection
from framework.config.precision import FP16, Autocast
from framework.config.run_config import RunConfig
from framework.config.scheduler import WarmupLR
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.ema import ema_beside_its_weights, ema_measured_and_not_kept
from framework.plan.rules.metrics import best_has_a_direction, best_is_measured
from framework.plan.rules.model import (
    channels_last_with_pipeline,
    decay_on_matrices_of_nothing,
    freeze_patterns,
    heads_divide,
    inert_model_options,
    recompute_in_parts,
)
from framework.plan.rules.parts import parts_speak_of_the_same, sequence_fits, vocabulary_fits
from framework.plan.rules.passed_keys import deepspeed_section, deepspeed_values
from framework.plan.rules.pipe import (
    bf16_pipeline_needs_zero1,
    enough_layers,
    idle_stages,
    partition_beside_stages,
    stages_as_written,
    stages_need_a_pipeline,
    zero_with_pipeline,
)
from framework.plan.rules.schedule import cycle_order

Rule = Callable[[RunConfig, Cluster], Iterator[Problem]]


def world_size_differs(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """The run is meant for another number of devices."""
    planned = config.run.world_size
    if planned is not None and planned != cluster.world_size:
        yield Problem(
            kind="world-size-differs", key="run.world_size", value=planned,
            reason=f"the run is meant for another number of devices than the {cluster.world_size} given ({cluster})",
            fix=f"start it on {planned} (without its hostfile the deepspeed launcher lets every node train alone), or set "
                f"run.world_size: {cluster.world_size}",
        )  # fmt: skip


def fp16_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your device"."""
    if config.precision.dtype == "fp16" and cluster.device == "cpu":
        yield Problem(kind="fp16-on-cpu", key="precision.dtype", value="fp16",
                      reason="DeepSpeed's cpu accelerator cannot train in fp16", fix="use bf16, fp32 or autocast here")  # fmt: skip


def autocast_fp16_needs_plain_ranks(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py and stage3.py `step`: after an overflow the step is skipped before the GradScaler is
    told, so that its scale is never lowered and no step is ever taken again; without clipping, and in a pipeline, every rank lowers
    its own scale by what it sees of the gradients."""
    precision, stage, pipe = config.precision, config.zero.stage, config.parallel.pipe
    if isinstance(precision, Autocast) and precision.compute_dtype == "fp16" and (stage or pipe > 1):
        where = f"ZeRO stage {stage}" if stage else f"a pipeline of {pipe} stages"
        yield Problem(kind="autocast-fp16-not-scaled", key="precision.compute_dtype", value="fp16",
                      reason=f"with {where} DeepSpeed does not lower its loss scale after an overflow, and training stands still",
                      fix="set precision.compute_dtype: bf16, or take dtype: fp16")  # fmt: skip


def optimizer_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/ops/op_builder/cpu/no_impl.py: FusedLion and FusedLamb have no CPU kernel."""
    optimizer, offloaded = config.optimizer, config.zero.offload_optimizer.device != "none"
    if (
        cluster.device == "cpu"
        and isinstance(optimizer, (Lion, Lamb))
        and not (isinstance(optimizer, Lion) and offloaded)
    ):
        yield Problem(kind="optimizer-on-cpu", key="optimizer.kind", value=optimizer.kind,
                      reason="DeepSpeed has no kernel of it for cpu devices", fix="use adamw here")  # fmt: skip


def offload_needs_stage(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Below these stages DeepSpeed drops the setting without a word, and the memory that was counted on is not freed."""
    zero = config.zero
    offload = zero.offload_optimizer
    needed = {"none": 0, "cpu": 1, "nvme": 3}[offload.device]
    if zero.stage < needed:
        yield Problem(kind="offload-needs-stage", key="zero.offload_optimizer.device", value=offload.device,
                      reason=f"DeepSpeed ignores it at stage {zero.stage}", fix=f"set zero.stage: {needed}")  # fmt: skip
    if offload.device == "cpu" and offload.ratio < 1 and zero.stage != 3:
        yield Problem(kind="offload-needs-stage", key="zero.offload_optimizer.ratio", value=offload.ratio,
                      reason="a ratio below 1 needs stage 3", fix="set zero.stage: 3 or ratio: 1.0")  # fmt: skip
    if zero.offload_param.device != "none" and zero.stage != 3:
        yield Problem(kind="offload-needs-stage", key="zero.offload_param.device", value=zero.offload_param.device,
                      reason=f"DeepSpeed ignores it at stage {zero.stage}", fix="set zero.stage: 3")  # fmt: skip


def offload_needs_adam(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: Lamb has no host kernel."""
    if config.zero.offload_optimizer.device != "none" and isinstance(config.optimizer, Lamb):
        yield Problem(kind="offload-optimizer-unsupported", key="optimizer.kind", value="lamb",
                      reason="it cannot run on the host", fix="use adamw, or zero.offload_optimizer: {device: none}")  # fmt: skip


def inert_stage3_keys(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Stage-3 settings that were written down for another stage do nothing."""
    if config.zero.stage == 3:
        return
    for key in sorted(config.zero.model_fields_set):
        if key.startswith("stage3_") or key == "sub_group_size":
            yield Problem(kind="inert-at-stage", key=f"zero.{key}", value=getattr(config.zero, key), severity="warning",
                          reason=f"it does nothing at stage {config.zero.stage}", fix="remove it or set zero.stage: 3")  # fmt: skip


def batch_norm_in_half_precision(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 casts weights and leaves buffers in fp32: torch refuses the mix in batch norm."""
    halves = ("fp16", "bf16")
    if config.precision.dtype in halves and isinstance(config.model, _Classifier) and config.model.has_batch_norm:
        yield Problem(kind="batch-norm-in-half-precision", key="precision.dtype", value=config.precision.dtype,
                      reason="the model has batch norm, whose fp32 running statistics do not go with half-precision weights",
                      fix="use autocast: {dtype: autocast} keeps weights in fp32 and computes in bf16")  # fmt: skip


def schedule_needs_lr(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed's WarmupDecayLR ends its warm-up at 0.001 whatever the optimizer says, so we must know the rate."""
    scheduler, optimizer = config.scheduler, config.optimizer
    if isinstance(scheduler, WarmupLR) and scheduler.max_lr is None and optimizer_lr(optimizer) is None:
        yield Problem(kind="lr-unknown", key="scheduler.max_lr",
                      reason=f"the {scheduler.kind} schedule needs the optimizer's learning rate, which is not in the config",
                      fix="set it here, or optimizer.args.lr")  # fmt: skip


def optimizer_lr(optimizer: OptimizerSection) -> float | None:
    """The learning rate that the config gives the optimizer."""
    lr = optimizer.args.get("lr") if isinstance(optimizer, Target) else optimizer.lr
    return float(lr) if isinstance(lr, (int, float)) else None


def warmup_fits(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A warm-up as long as the schedule never reaches the learning rate that was asked for."""
    warmup, total = getattr(config.scheduler, "warmup_steps", 0), getattr(config.scheduler, "total_steps", None)
    if total is not None and warmup >= total:
        yield Problem(kind="warmup-too-long", key="scheduler.warmup_steps", value=warmup,
                      reason=f"the whole schedule has {total} steps", fix="make it shorter, or leave total_steps out")  # fmt: skip


def momentum_order(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """torch.optim.SGD: "Nesterov momentum requires a momentum"."""
    optimizer = config.optimizer
    if getattr(optimizer, "nesterov", False) and not getattr(optimizer, "momentum", 0.0):
        yield Problem(kind="nesterov-needs-momentum", key="optimizer.nesterov", value=True,
                      reason="there is no momentum to look ahead along", fix="set optimizer.momentum: 0.9")  # fmt: skip


def image_shapes_agree(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Model and data are both known by name and their shapes differ: the first forward pass would fail."""
    model, data = config.model, config.data
    if not isinstance(model, _Classifier) or isinstance(data, (DataTarget, DataObject)):
        return
    shape = data.image_shape()
    if shape is None:
        return
    pairs = [
        ("image_size", model.expected_image_size(), "image_size", shape.size, "{} pixels"),
        ("in_channels", model.in_channels, "channels", shape.channels, "{} channel(s)"),
        ("num_classes", model.num_classes, "num_classes", shape.num_classes, "{} classes"),
    ]
    for key, expected, data_key, given, words in pairs:
        if expected is not None and given is not None and expected != given:
            fixes = [f"model.{key}: {given}"] if _takes(model, key, given) else []
            fixes += [f"data.{data_key}: {expected}"] if _takes(data, data_key, expected) else []
            yield Problem(kind=f"model-data-{key.replace('_', '-')}", key=f"model.{key}", value=expected,
                          reason=f"the {data.kind} data has {words.format(given)}",
                          fix=f"set {' or '.join(fixes)}" if fixes else "choose another model or other data")  # fmt: skip


def _takes(section: Section, key: str, value: int) -> bool:
    try:
        type(section).model_validate({**section.model_dump(), key: value})
    except ValidationError:
        return False
    return True


def lamb_needs_dynamic_scale(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "lamb optimizer requires dynamic loss scaling"."""
    if isinstance(config.optimizer, Lamb) and isinstance(config.precision, FP16) and config.precision.loss_scale:
        yield Problem(kind="lamb-with-fixed-loss-scale", key="precision.loss_scale", value=config.precision.loss_scale,
                      reason="DeepSpeed's Lamb needs dynamic loss scaling", fix="set precision.loss_scale: 0")  # fmt: skip


def slow_host_optimizer(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Not wrong, but rarely meant: the step on the host with torch's kernel is several times slower."""
    optimizer = config.optimizer
    torchs = isinstance(optimizer, AdamW) and optimizer.implementation == "torch"
    if config.zero.offload_optimizer.device != "none" and torchs:
        yield Problem(kind="slow-host-optimizer", key="optimizer.implementation", value="torch", severity="note",
                      reason="the step runs on the host, where DeepSpeed's kernel is several times faster but resumes "
                      "with a drift in the last bits", fix="set optimizer.implementation: deepspeed for speed")  # fmt: skip


ALL: Final[tuple[Rule, ...]] = (
    world_size_differs, fp16_needs_gpu, autocast_fp16_needs_plain_ranks, optimizer_needs_gpu, offload_needs_stage,
    offload_needs_adam, inert_stage3_keys, batch_norm_in_half_precision, schedule_needs_lr, warmup_fits, momentum_order,
    image_shapes_agree, parts_speak_of_the_same, sequence_fits, vocabulary_fits, deepspeed_section,
    heads_divide, recompute_in_parts, inert_model_options, channels_last_with_pipeline, decay_on_matrices_of_nothing,
    freeze_patterns,
    deepspeed_values, lamb_needs_dynamic_scale, slow_host_optimizer, zero_with_pipeline, bf16_pipeline_needs_zero1,
    enough_layers, stages_as_written, stages_need_a_pipeline, partition_beside_stages, idle_stages, ema_measured_and_not_kept,
    ema_beside_its_weights,
    best_is_measured, best_has_a_direction, cycle_order,
)  # fmt: skip


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(config, cluster)]

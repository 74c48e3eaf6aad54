"""Rules between the devices of a run, its number format, its optimizer and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.base import ModelKind
from framework.config.optimizer import AdamW, Lamb, Lion
from framework.config.precision import BF16, FP16, Autocast
from framework.config.run_config import RunConfig
from framework.config.zero import NEEDED_STAGE, STAGE3_KEYS
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.layout import Layout
from framework.plan.rules.base import Found, rule


@rule("world-size-differs")
def world_size_differs(config: RunConfig, cluster: Cluster) -> Found:
    """The run is meant for another number of devices."""
    planned = config.run.world_size
    if planned is not None and planned != cluster.world_size:
        yield (
            "run.world_size",
            f"the run is meant for another number of devices than the {cluster.world_size} given ({cluster})",
            f"start it on {planned} (without its hostfile the deepspeed launcher lets every node train alone), or "
            f"set run.world_size: {cluster.world_size}",
        )


@rule("fp16-on-cpu")
def fp16_needs_gpu(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your device"."""
    if config.precision.dtype == "fp16" and cluster.device == "cpu":
        reason = "DeepSpeed's cpu accelerator cannot train in fp16"
        yield "precision.dtype", reason, "use bf16, fp32 or autocast here"


@rule("optimizer-on-cpu")
def optimizer_needs_gpu(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/ops/op_builder/cpu/no_impl.py: FusedLion and FusedLamb have no CPU kernel."""
    optimizer, offloaded = config.optimizer, config.zero.offload_optimizer.device != "none"
    if cluster.device == "cpu" and (isinstance(optimizer, Lamb) or (isinstance(optimizer, Lion) and not offloaded)):
        yield "optimizer.kind", "DeepSpeed has no kernel of it for cpu devices", "use adamw here"


@rule("autocast-fp16-not-scaled")
def autocast_fp16_needs_plain_ranks(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/zero/stage_1_and_2.py and stage3.py `step`: after an overflow the step is skipped before the
    GradScaler is told, so that its scale is never lowered and no step is ever taken again; without clipping, and in a
    pipeline, every rank lowers its own scale by what it sees of the gradients."""
    precision, stage, pipe = config.precision, config.zero.stage, config.parallel.pipe
    if isinstance(precision, Autocast) and precision.compute_dtype == "fp16" and (stage or pipe > 1):
        where = f"ZeRO stage {stage}" if stage else f"a pipeline of {pipe} stages"
        yield (
            "precision.compute_dtype",
            f"with {where} DeepSpeed does not lower its loss scale after an overflow, and training stands still",
            "set precision.compute_dtype: bf16, or take dtype: fp16",
        )


@rule("batch-norm-in-half-precision")
def batch_norm_in_half_precision(config: RunConfig, cluster: Cluster) -> Found:
    """DeepSpeed 0.19.8 casts weights and leaves buffers in fp32: torch refuses the mix in batch norm."""
    if (
        config.precision.dtype in ("fp16", "bf16")
        and isinstance(config.model, ModelKind)
        and config.model.has_batch_norm
    ):
        yield (
            "precision.dtype",
            "the model has batch norm, whose fp32 running statistics do not go with half-precision weights",
            "use autocast: {dtype: autocast} keeps weights in fp32 and computes in bf16",
        )


LONG_SUM: Final = 8
"""Gradients summed in half precision at most: bf16 is exact to 1 in 256, and each further summand is rounded."""


def sums_of(config: RunConfig, layout: Layout) -> tuple[str, str]:
    """What half-precision gradients are summed in, over micro-batches and over ranks; empty for their own type."""
    precision = config.precision
    if not isinstance(precision, BF16 | FP16):
        return "", ""
    own = precision.dtype
    accumulation = precision.grad_accumulation or ("fp32" if layout.accumulation_steps > LONG_SUM else own)
    reduction = precision.grad_reduction or ("fp32" if layout.data_parallel_size > LONG_SUM else own)
    return "fp32" if accumulation == "fp32" and config.zero.stage else "", "fp32" if reduction == "fp32" else ""


@rule("fp32-sums-need-zero")
def fp32_sums_need_zero(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/engine.py `_do_optimizer_sanity_check`: "unsupported mix of model_dtype and
    grad_accum_dtype".
    """
    if config.zero.stage == 0 and getattr(config.precision, "grad_accumulation", None) == "fp32":
        reason = f"at ZeRO stage 0 DeepSpeed sums gradients in {config.precision.dtype}"
        yield "precision.grad_accumulation", reason, "set zero.stage: 1 or higher, or remove it"


def half_precision_without_zero(config: RunConfig, cluster: Cluster, layout: Layout) -> Iterator[Problem]:
    """Find what is not wrong at stage 0, but less exact, or slower, than at any other stage.

    deepspeed/runtime/fp16/unfused_optimizer.py `step` looks at each gradient from the host.
    """
    if config.zero.stage or config.parallel.pipe > 1 or not isinstance(config.precision, BF16 | FP16):
        return
    dtype, steps = config.precision.dtype, layout.accumulation_steps
    found = [("half-precision-without-zero", f"in {dtype} every step waits for the device once for each weight there")]
    if steps > LONG_SUM:
        reason = f"the gradients of {steps} micro-batches are summed in {dtype}, which rounds each"
        found.append(("long-sum-in-half-precision", reason))
    fix = "set zero.stage: 1, on a single device as well"
    for kind, reason in found if cluster.device == "cuda" else found[1:]:
        yield Problem(kind=kind, key="zero.stage", value=0, severity="note", reason=reason, fix=fix)


@rule("offload-needs-stage")
def offload_needs_stage(config: RunConfig, cluster: Cluster) -> Found:
    """Below these stages DeepSpeed drops the setting without a word, and frees no memory."""
    zero, offload = config.zero, config.zero.offload_optimizer
    for name, needed in NEEDED_STAGE.items():
        stage = needed.get(getattr(zero, name).device, 0)
        if zero.stage < stage:
            yield f"zero.{name}.device", f"DeepSpeed ignores it at stage {zero.stage}", f"set zero.stage: {stage}"
    if offload.device == "cpu" and offload.ratio < 1 and zero.stage != 3:
        yield "zero.offload_optimizer.ratio", "a ratio below 1 needs stage 3", "set zero.stage: 3 or ratio: 1.0"


@rule("inert-at-stage", "warning")
def inert_stage3_keys(config: RunConfig, cluster: Cluster) -> Found:
    """Stage-3 settings that were written down for another stage do nothing."""
    stage = config.zero.stage
    for key in STAGE3_KEYS if stage != 3 else ():
        if key in config.zero.model_fields_set:
            yield f"zero.{key}", f"it does nothing at stage {stage}", "remove it or set zero.stage: 3"


@rule("nesterov-needs-momentum")
def momentum_order(config: RunConfig, cluster: Cluster) -> Found:
    """torch.optim.SGD: "Nesterov momentum requires a momentum"."""
    optimizer = config.optimizer
    if getattr(optimizer, "nesterov", False) and not getattr(optimizer, "momentum", 0.0):
        yield "optimizer.nesterov", "there is no momentum to look ahead along", "set optimizer.momentum: 0.9"


@rule("offload-optimizer-unsupported")
def offload_needs_adam(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: Lamb has no host kernel."""
    if config.zero.offload_optimizer.device != "none" and isinstance(config.optimizer, Lamb):
        yield "optimizer.kind", "it cannot run on the host", "use adamw, or zero.offload_optimizer: {device: none}"


@rule("lamb-with-fixed-loss-scale")
def lamb_needs_dynamic_scale(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "lamb optimizer requires dynamic loss scaling"."""
    if isinstance(config.optimizer, Lamb) and isinstance(config.precision, FP16) and config.precision.loss_scale:
        yield "precision.loss_scale", "DeepSpeed's Lamb needs dynamic loss scaling", "set precision.loss_scale: 0"


@rule("optimizer-sees-shape")
def lamb_sees_shards(config: RunConfig, cluster: Cluster) -> Found:
    """Its ratio is one of norms of a weight, and ZeRO gives it shares of one flat vector of all weights."""
    zero = config.zero
    if isinstance(config.optimizer, Lamb) and zero.stage and zero.offload_optimizer.device == "none":  # else refused
        yield (
            "optimizer.kind",
            f"it scales each weight's step by its norm, and at zero.stage {zero.stage} it sees shares of one flat "
            "vector of all weights",
            "set zero.stage: 0, or use adamw",
        )


@rule("inert-without-decay", "warning")
def decay_on_matrices_of_nothing(config: RunConfig, cluster: Cluster) -> Found:
    """A choice of weights for weight decay is written down, and there is no decay."""
    optimizer = config.optimizer
    if getattr(optimizer, "weight_decay_on", "all") != "all" and not getattr(optimizer, "weight_decay", 0.0):
        yield "optimizer.weight_decay_on", "optimizer.weight_decay is 0", "set optimizer.weight_decay or remove it"


@rule("slow-host-optimizer", "note")
def slow_host_optimizer(config: RunConfig, cluster: Cluster) -> Found:
    """Not wrong, but rarely meant: the step on the host with torch's kernel is several times slower."""
    is_torchs = isinstance(config.optimizer, AdamW) and config.optimizer.implementation != "deepspeed"
    if config.zero.offload_optimizer.device != "none" and is_torchs:
        yield (
            "optimizer.implementation",
            "the step runs on the host, where DeepSpeed's kernel is several times faster but resumes with a drift in "
            "the last bits",
            "set optimizer.implementation: deepspeed for speed",
        )

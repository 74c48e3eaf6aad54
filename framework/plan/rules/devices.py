"""Rules between a run, its number format and the devices that it is to run on.

Rules between the number format and the other sections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.base import ModelKind
from framework.config.optimizer import Lamb, Lion
from framework.config.precision import BF16, FP16, Autocast
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.layout import Layout


def autocast_fp16_needs_plain_ranks(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py and stage3.py `step`: after an overflow the step is skipped before the
    GradScaler is told, so that its scale is never lowered and no step is ever taken again; without clipping, and in a
    pipeline, every rank lowers its own scale by what it sees of the gradients."""
    precision, stage, pipe = config.precision, config.zero.stage, config.parallel.pipe
    if isinstance(precision, Autocast) and precision.compute_dtype == "fp16" and (stage or pipe > 1):
        where = f"ZeRO stage {stage}" if stage else f"a pipeline of {pipe} stages"
        yield Problem(
            kind="autocast-fp16-not-scaled",
            key="precision.compute_dtype",
            value="fp16",
            reason=f"with {where} DeepSpeed does not lower its loss scale after an overflow, and training stands still",
            fix="set precision.compute_dtype: bf16, or take dtype: fp16",
        )


def batch_norm_in_half_precision(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 casts weights and leaves buffers in fp32: torch refuses the mix in batch norm."""
    halves = ("fp16", "bf16")
    if config.precision.dtype in halves and isinstance(config.model, ModelKind) and config.model.has_batch_norm:
        yield Problem(
            kind="batch-norm-in-half-precision",
            key="precision.dtype",
            value=config.precision.dtype,
            reason="the model has batch norm, whose fp32 running statistics do not go with half-precision weights",
            fix="use autocast: {dtype: autocast} keeps weights in fp32 and computes in bf16",
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


def fp32_sums_need_zero(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_optimizer_sanity_check`: "unsupported mix of model_dtype and
    grad_accum_dtype".
    """
    if config.zero.stage == 0 and getattr(config.precision, "grad_accumulation", None) == "fp32":
        yield Problem(
            kind="fp32-sums-need-zero",
            key="precision.grad_accumulation",
            value="fp32",
            reason=f"at ZeRO stage 0 DeepSpeed sums gradients in {config.precision.dtype}",
            fix="set zero.stage: 1 or higher, or remove it",
        )


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


# Rules between a run and the devices it is to run on.


def world_size_differs(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """The run is meant for another number of devices."""
    planned = config.run.world_size
    if planned is not None and planned != cluster.world_size:
        yield Problem(
            kind="world-size-differs",
            key="run.world_size",
            value=planned,
            reason=f"the run is meant for another number of devices than the {cluster.world_size} given ({cluster})",
            fix=f"start it on {planned} (without its hostfile the deepspeed launcher lets every node train alone), or "
            f"set run.world_size: {cluster.world_size}",
        )


def fp16_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your device"."""
    if config.precision.dtype == "fp16" and cluster.device == "cpu":
        yield Problem(
            kind="fp16-on-cpu",
            key="precision.dtype",
            value="fp16",
            reason="DeepSpeed's cpu accelerator cannot train in fp16",
            fix="use bf16, fp32 or autocast here",
        )


def optimizer_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/ops/op_builder/cpu/no_impl.py: FusedLion and FusedLamb have no CPU kernel."""
    optimizer, offloaded = config.optimizer, config.zero.offload_optimizer.device != "none"
    if (
        cluster.device == "cpu"
        and isinstance(optimizer, (Lion, Lamb))
        and not (isinstance(optimizer, Lion) and offloaded)
    ):
        yield Problem(
            kind="optimizer-on-cpu",
            key="optimizer.kind",
            value=optimizer.kind,
            reason="DeepSpeed has no kernel of it for cpu devices",
            fix="use adamw here",
        )

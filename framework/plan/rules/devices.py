"""Rules between the devices of a run, its number format, its optimizer and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.precision import BF16, FP16
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
            f"the run is meant for another number of devices than the {cluster.world_size} given "
            f"({cluster})",
            f"start it on {planned} (without its hostfile the deepspeed launcher lets every node "
            f"train alone), or set run.world_size: {cluster.world_size}",
        )


LONG_SUM: Final = 8
"""Gradients summed in half precision at most: bf16 is exact to 1 in 256, and each further summand
is rounded.
"""


def sums_of(config: RunConfig, layout: Layout) -> tuple[str, str]:
    """What half-precision gradients are summed in, over micro-batches and over ranks; empty for
    their own type.
    """
    precision = config.precision
    if not isinstance(precision, BF16 | FP16):
        return "", ""
    own = precision.dtype
    accumulation = precision.grad_accumulation or (
        "fp32" if layout.accumulation_steps > LONG_SUM else own
    )
    reduction = precision.grad_reduction or ("fp32" if layout.num_replicas > LONG_SUM else own)
    return (
        "fp32" if accumulation == "fp32" and config.zero.stage else "",
        "fp32" if reduction == "fp32" else "",
    )


def half_precision_without_zero(
    config: RunConfig, cluster: Cluster, layout: Layout
) -> Iterator[Problem]:
    """Find what is not wrong at stage 0, but less exact, or slower, than at any other stage.

    deepspeed/runtime/fp16/unfused_optimizer.py `step` looks at each gradient from the host.
    """
    if (
        config.zero.stage
        or config.parallel.pipe > 1
        or not isinstance(config.precision, BF16 | FP16)
    ):
        return
    dtype = config.precision.dtype
    steps = layout.accumulation_steps
    found = [
        (
            "half-precision-without-zero",
            f"in {dtype} every step waits for the device once for each weight there",
        )
    ]
    if steps > LONG_SUM:
        reason = f"the gradients of {steps} micro-batches are summed in {dtype}, which rounds each"
        found.append(("long-sum-in-half-precision", reason))
    fix = "set zero.stage: 1, on a single device as well"
    for kind, reason in found if cluster.device == "cuda" else found[1:]:
        yield Problem(kind=kind, key="zero.stage", value=0, severity="note", reason=reason, fix=fix)


@rule()
def divided_in_advance(config: RunConfig, cluster: Cluster) -> Found:
    """deepspeed/runtime/zero/stage3.py `__avg_scatter_contiguous_grads` multiplies by it again if
    it is another.
    """
    key = "gradient_predivide_factor"
    parallel = config.parallel
    factor = config.deepspeed.get(key)
    ranks = cluster.world_size // (parallel.pipe * parallel.tensor)
    if config.zero.stage == 3 and factor == ranks > 1:
        reason = (
            f"at stage 3 gradients stay {ranks} times too small where it is the number of ranks"
        )
        yield Problem("predivided-by-all-ranks", reason, "remove it", f"deepspeed.{key}", factor)


@rule("offload-needs-stage")
def offload_needs_stage(config: RunConfig, cluster: Cluster) -> Found:
    """Below these stages DeepSpeed drops the setting without a word, and frees no memory."""
    zero, offload = config.zero, config.zero.offload_optimizer
    for name, needed in NEEDED_STAGE.items():
        stage = needed.get(getattr(zero, name).device, 0)
        if zero.stage < stage:
            yield (
                f"zero.{name}.device",
                f"DeepSpeed ignores it at stage {zero.stage}",
                f"set zero.stage: {stage}",
            )
    if offload.device == "cpu" and offload.ratio < 1 and zero.stage != 3:
        yield (
            "zero.offload_optimizer.ratio",
            "a ratio below 1 needs stage 3",
            "set zero.stage: 3 or ratio: 1.0",
        )


@rule("inert-at-stage", "warning")
def inert_stage3_keys(config: RunConfig, cluster: Cluster) -> Found:
    """Stage-3 settings that were written down for another stage do nothing."""
    stage = config.zero.stage
    for key in STAGE3_KEYS if stage != 3 else ():
        if key in config.zero.model_fields_set:
            yield (
                f"zero.{key}",
                f"it does nothing at stage {stage}",
                "remove it or set zero.stage: 3",
            )

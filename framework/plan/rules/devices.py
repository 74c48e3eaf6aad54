"""Rules between the devices of a run, its number format, its optimizer and ZeRO."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from framework.config.precision import BF16, FP16, PrecisionSection, fp8_of
from framework.config.run_config import RunConfig
from framework.config.training import Compile
from framework.config.zero import NEEDED_STAGE, STAGE3_KEYS
from framework.errors import Problem, missing_package
from framework.plan.cluster import Cluster
from framework.plan.compiling import uses_deepcompile
from framework.plan.layout import Layout
from framework.plan.rules.base import Found, rule


@rule("world-size-differs")
def world_size_differs(config: RunConfig, cluster: Cluster) -> Found:
    """Find a run that is meant for another number of devices."""
    planned = config.run.world_size
    if planned is not None and planned != cluster.world_size:
        yield (
            "run.world_size",
            f"the run is meant for another number of devices than the {cluster.world_size} given "
            f"({cluster})",
            f"start it on {planned} (without its hostfile the deepspeed launcher lets every node "
            f"train alone), or set run.world_size: {cluster.world_size}",
        )


PASSES_NOT_IN_A_RUN: Final = {
    "z3": (
        "it is ZeRO stage 3's, where DeepCompile takes away the hooks that gather weights",
        "leave passes out; the ZeRO stage has its own",
    ),
    "autosp": (
        "DeepSpeed's AutoSP takes batches that its own function has marked "
        "(compile/passes/sp_compile.py `prepare_autosp_inputs`), and is left out at ZeRO 2 and 3",
        "set parallel.sequence",
    ),
    "autotp": (
        "DeepSpeed would divide the model itself, unknown to checkpoints here",
        "set parallel.tensor",
    ),
}
"""A pass of DeepCompile -> why a run does not have it, and what to do."""


@rule("deepcompile-pass")
def passes_of_deepcompile(config: RunConfig, cluster: Cluster) -> Found:
    """Find passes that a run does not have, and passes for compilers that have none."""
    section = config.training.compile
    if not isinstance(section, Compile):
        return
    for name in section.passes:
        if not uses_deepcompile(config):
            reason = "passes are DeepCompile's, and the compiler is another"
            fix = "set training.compile: {backend: deepcompile}, or leave passes out"
            yield "training.compile.passes", reason, fix
            return
        if name in PASSES_NOT_IN_A_RUN:
            reason, fix = PASSES_NOT_IN_A_RUN[name]
            yield "training.compile.passes", reason, fix


LONG_SUM: Final = 8
"""Gradients summed in half precision at most: bf16 is exact to 1 in 256, and each further summand
is rounded.
"""


def sums_of(config: RunConfig, layout: Layout) -> tuple[str, str]:
    """Return the types that half-precision gradients are summed in, over micro-batches and over
    ranks; empty for their own type.
    """
    precision = config.precision
    if not isinstance(precision, BF16 | FP16) or config.zero.zenflow is not None:
        return "", ""
    accumulation = ""
    if config.zero.stage and _is_summed_in_fp32(
        precision.grad_accumulation, layout.accumulation_steps
    ):
        accumulation = "fp32"
    reduction = ""
    if _is_summed_in_fp32(precision.grad_reduction, layout.num_replicas):
        reduction = "fp32"
    return accumulation, reduction


def _is_summed_in_fp32(dtype: str | None, num_summands: int) -> bool:
    """Check whether a sum is in fp32: as configured, or by default because it is long."""
    if dtype:
        return dtype == "fp32"
    return num_summands > LONG_SUM


def half_precision_without_zero(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Find long sums of gradients in half precision: stage 0 has no others."""
    if config.zero.stage or config.parallel.pipe > 1:
        return
    precision = config.precision
    steps = layout.accumulation_steps
    if isinstance(precision, BF16 | FP16) and steps > LONG_SUM:
        dtype = precision.dtype
        yield Problem(
            kind="long-sum-in-half-precision",
            key="zero.stage",
            value=0,
            severity="note",
            reason=f"the gradients of {steps} micro-batches are summed in {dtype}, which rounds "
            "each",
            fix="set zero.stage: 1, on a single device as well",
        )


@rule()
def divided_in_advance(config: RunConfig, cluster: Cluster) -> Found:
    """Find gradients that are divided by all ranks in advance and not multiplied again.

    deepspeed/runtime/zero/stage3.py `__avg_scatter_contiguous_grads` multiplies by other factors.
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


# CUDA's compute capability of Ada: its tensor cores are the first with fp8.
_FP8_CAPABILITY: Final = (8, 9)


def missing_fp8_package(precision: PrecisionSection) -> Iterator[Problem]:
    """Find products in fp8 where the package for them is not installed."""
    if fp8_of(precision) is not None and importlib.util.find_spec("torchao") is None:
        problem = missing_package("torchao", what="precision.fp8", extra="fp8").problems[0]
        yield replace(problem, key="precision.fp8")


def missing_metrics_package(config: RunConfig) -> Iterator[Problem]:
    """Find metrics of torchmetrics where it is not installed."""
    if config.evaluation.metrics and importlib.util.find_spec("torchmetrics") is None:
        what = "evaluation.metrics"
        problem = missing_package("torchmetrics", what=what, extra="metrics").problems[0]
        yield replace(problem, key=what)


def fp8_problems(
    precision: PrecisionSection, name: str, capability: tuple[int, int] | None
) -> Iterator[Problem]:
    """Find products in fp8 on a GPU that has none.

    Args:
        precision: of the run.
        name: of the GPU.
        capability: its CUDA compute capability; None: it is no GPU of NVIDIA.
    """
    section = fp8_of(precision)
    if section is None or section.emulate:
        return
    if capability is None:
        reason = f"{name} is no GPU of NVIDIA, and on others fp8 was not tried"
    elif capability < _FP8_CAPABILITY:
        major, minor = capability
        reason = f"{name} has no products in fp8: its compute capability is {major}.{minor}"
    else:
        return
    fix = "set precision.fp8: false, or take GPUs of capability 8.9 or newer (L4, H100)"
    value = section.model_dump(exclude_unset=True) or True
    yield Problem("fp8-on-device", reason, fix, "precision.fp8", value)


@rule("offload-needs-stage")
def offload_needs_stage(config: RunConfig, cluster: Cluster) -> Found:
    """Find offloading below its stage: DeepSpeed drops the setting without a message, and frees no
    memory.
    """
    zero = config.zero
    for name, needed in NEEDED_STAGE.items():
        stage = needed.get(getattr(zero, name).device, 0)
        if zero.stage < stage:
            yield (
                f"zero.{name}.device",
                f"DeepSpeed ignores it at stage {zero.stage}",
                f"set zero.stage: {stage}",
            )


# bf16 rounds to 8 digits: what changes a number by less leaves it as it was.
_LEAST_CHANGE_IN_BF16: Final = 2**-9


@rule("moment-stands-still", "warning")
def second_moment_in_bf16(config: RunConfig, cluster: Cluster) -> Found:
    """Find a running mean in bf16 that never becomes smaller: (1 - beta2) of it is less than
    rounding leaves.
    """
    betas = getattr(config.optimizer, "betas", None)
    if betas is None or getattr(config.precision, "states", "") != "bf16":
        return
    beta = betas[-1]
    if 1 - beta < _LEAST_CHANGE_IN_BF16:
        yield (
            "optimizer.betas",
            f"in bf16 {beta} of a number rounds to the number, and a mean never becomes smaller",
            f"set optimizer.betas: [{betas[0]}, 0.99], or precision.states: fp32",
        )


@rule("inert-at-stage", "warning")
def inert_stage3_keys(config: RunConfig, cluster: Cluster) -> Found:
    """Find settings of stage 3, or 2, at another stage, where they have no effect."""
    stage = config.zero.stage
    if config.zero.coalesce and stage != 2:
        fix = "remove it or set zero.stage: 2"
        yield "zero.coalesce", f"it does nothing at stage {stage}", fix
    elif config.zero.coalesce and uses_deepcompile(config):
        yield "zero.coalesce", "DeepCompile sums gradients within its graph", "remove it"
    if stage == 3:
        return
    for key in STAGE3_KEYS:
        if key in config.zero.model_fields_set:
            yield (
                f"zero.{key}",
                f"it does nothing at stage {stage}",
                "remove it or set zero.stage: 3",
            )
